"""Drive the engine's parts the way its loop does, keeping every logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layline.config import EngineConfig
from layline.engine.balance import MeshScheduler
from layline.engine.core import Engine
from layline.engine.facts import open_model
from layline.engine.local import LocalExecutor
from layline.engine.model import LoadedModel, load_alone
from layline.engine.step import MeshStep
from layline.engine.step_plan import StepPlan
from layline.sampling import SamplingParams
from support.poison import poison


class Recorder:
    """Stands in for the runner: runs the step and keeps the logits of all its rows.

    ``forced`` holds, for each request, the ids to continue with whatever the logits say.
    """

    def __init__(self, loaded: LoadedModel, forced: Sequence[Sequence[int]] = ()) -> None:
        self._runner = loaded.runner
        self.clock = loaded.runner.clock
        self._forced = [list(ids) for ids in forced]
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.plans: list[StepPlan] = []

    def watch(self, scheduler: MeshScheduler) -> None:
        """Keep the plans of ``scheduler``: a step does not say whose its rows are."""
        decide = scheduler.next_step

        def next_step() -> Any:
            plan = decide()
            if plan is not None:
                (part,) = plan.parts
                assert part is not None
                self.plans.append(part)
            return plan

        scheduler.next_step = next_step  # type: ignore[method-assign]

    def run_reading(
        self, step: MeshStep, before: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[Any]]:
        """As Runner.run_reading, of steps that read nothing."""
        return self.run(step, before), []

    def run(self, step: MeshStep, before: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self._runner.hidden_states(step, before)
        scores = self._runner.model.logits(hidden)
        sampled = self._runner.score(hidden, step)
        plan = self.plans[-1]
        row = index = 0
        for entry in plan.entries:
            rows = scores[row : row + entry.span.count]
            self.logits.setdefault(entry.request.request_id, []).append(rows.float())
            row += entry.span.count
            if entry.samples:
                # The row that is sampled is the entry's last, whatever the head's batch was.
                scale = rows[-1].abs().max()
                assert (sampled[index] - rows[-1]).abs().max() <= 0.02 * scale
                if self._forced:
                    following = self._forced[entry.request.request_id].pop(0)
                    sampled[index].zero_()[following] = 1.0
                index += 1
        assert index == len(sampled)
        return sampled


@torch.inference_mode()
def poison_unused_slots(loaded: LoadedModel) -> None:
    """Fill every cache row that no token has written with NaN; block 0 is the padding's, zero."""
    for layer in loaded.runner.model.layers:
        assert layer.self_attn.cache is not None
        poison(layer.self_attn.cache)


def run_greedy(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    forced: Sequence[Sequence[int]] = (),
) -> tuple[list[torch.Tensor], list[list[int]], Recorder]:
    """Logits [prompt + new - 1, vocabulary] and generated ids of every prompt, run together."""
    model, checkpoint = open_model(config)
    loaded = load_alone(config, model.facts, checkpoint)
    checkpoint.close()
    poison_unused_slots(loaded)
    recorder = Recorder(loaded, forced)
    loaded.runner = recorder  # type: ignore[assignment]
    # Every row is to be computed, so that its logits are there to compare.
    scheduler = MeshScheduler.of(config, loaded.num_blocks, shares=False)
    recorder.watch(scheduler)
    engine = Engine(model, scheduler, LocalExecutor(loaded))
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    logits = [torch.cat(recorder.logits[request.request_id]) for request in requests]
    return logits, [request.output_ids for request in requests], recorder
