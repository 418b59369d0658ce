"""What is read of prompts on simulated ranks and on processes, against transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.boundary.mesh import make_mesh
from layline.comm.simulated import run_ranks
from layline.config import EngineConfig
from layline.engine.balance import MeshPlan, MeshScheduler
from layline.engine.facts import ModelFacts, open_model
from layline.engine.model import load_part
from layline.engine.reading import PromptReading
from layline.engine.reading_plan import take_reading
from layline.engine.request import Request
from layline.sampling import TokenLogprobs
from layline.topology import Topology
from support.embedding import reference, save_embedder, unit
from support.fake_requests import fake_request
from support.mesh import poisoned_memory
from support.poison import poison
from support.tiny import VOCAB, save_tiny

# Eight query heads and two key heads, so that attention TP 4 has replicas.
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
LENGTHS = (1, 2, 9, 17, 30, 40)
BLOCKS = 40
SCORES = PromptReading(vocab=VOCAB, top=2)
MEAN, LAST = PromptReading(), PromptReading(last_only=True)
MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2": {"tp": 2, "attn_dp": 2},
    "dp2-tp2": {"tp": 4, "attn_dp": 2},
    "cp2": {"tp": 2, "attn_cp": 2},
    "cp2-zigzag": {"tp": 2, "attn_cp": 2, "cp_layout": "zigzag"},
    "dp2-cp2": {"tp": 4, "attn_dp": 2, "attn_cp": 2},
    "cp2-tp2": {"tp": 4, "attn_cp": 2, "cp_layout": "zigzag"},
    "sequence-parallel": {"tp": 2, "sequence_parallel": True},
    "input-scattered": {"tp": 2, "input_scattered": True},
    "local-ffns": {"tp": 2, "attn_dp": 2, "dense_tp": 1},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


class Case:
    """A checkpoint and transformers' numbers for every prompt."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        model = save_tiny(path, "Qwen3", **SHAPE)
        with torch.inference_mode():
            self.tables = [
                model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in prompts()
            ]
            self.states = [model.model(torch.tensor([ids]))[0][0] for ids in prompts()]

    def check_scores(self, number: int, found: Sequence[TokenLogprobs]) -> None:
        ids, table = prompts()[number], self.tables[number]
        assert [one.token_id for one in found] == ids[1:]
        for row, one in enumerate(found):
            assert one.logprob == pytest.approx(float(table[row, one.token_id]), abs=2e-4)
            assert [i for i, _ in one.top] == table[row].topk(2).indices.tolist()

    def check(self, number: int, request: Request) -> None:
        if request.reading is SCORES:
            self.check_scores(number, request.prompt_logprobs)
            return
        states = self.states[number]
        wanted = states[-1] if request.reading is LAST else states.sum(0)
        torch.testing.assert_close(torch.tensor(request.hidden_sum), wanted, atol=5e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("scored"))


def planned(engine: EngineConfig) -> tuple[list[tuple[int, Request]], list[MeshPlan]]:
    """Requests for every kind of reading of every prompt, and the steps that compute them."""
    scheduler = MeshScheduler.of(engine, BLOCKS)
    requests = []
    for number, reading in itertools.product(range(len(LENGTHS)), (SCORES, MEAN, LAST)):
        request = fake_request(prompts()[number], 1)
        request.most_tokens, request.reading = 0, reading
        scheduler.add(request)
        requests.append((number, request))
    plans = []
    while scheduler.num_unfinished:
        plan = scheduler.next_step()
        assert plan is not None
        plans.append(plan)
        scheduler.begin(plan)
        scheduler.complete(plan)
        for _, request in requests:
            if request.is_prefilled:
                scheduler.remove(request)
    return requests, plans


def read_on(topology: Topology, groups: Any, facts: ModelFacts, job: Any) -> list[Any]:
    """One rank's readings of every step."""
    engine, plans = job
    here = facts.on_rank(topology.rank)
    _, checkpoint = open_model(engine)
    with torch.inference_mode():
        loaded = load_part(here, checkpoint, make_mesh(here.spec, groups), torch.device("cpu"))
        checkpoint.close()
        loaded.bind_cache(BLOCKS)
        for layer in loaded.runner.model.layers:
            assert layer.self_attn.cache is not None
            poison(layer.self_attn.cache)
        return [loaded.runner.run_reading(plan.step)[1] for plan in plans]


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_reads_what_transformers_says(case: Case, name: str) -> None:
    engine = EngineConfig(model=case.path, dtype="float32", prefill_tokens=11, **MESHES[name])
    requests, plans = planned(engine)
    served, checkpoint = open_model(engine)
    checkpoint.close()
    topology = served.facts.spec.topology
    with poisoned_memory():
        runs = run_ranks(
            topology,
            lambda here, groups: read_on(here, groups, served.facts, (engine, plans)),
        )
    for rank, found in enumerate(runs):
        dp = topology.at(rank).coordinates.attn_dp
        leader = dp * topology.attn_cp * topology.attn_tp
        # Every rank of a group computes them; its leader's are reported.
        assert found == runs[leader]
        if rank != leader:
            continue
        for plan, readings in zip(plans, found, strict=True):
            part, step = plan.parts[dp], plan.step.parts[dp]
            for read, reading in zip(step.reads, readings, strict=True):
                assert part is not None
                take_reading(part.entries[read.span].request, reading)
    for number, request in requests:
        case.check(number, request)


PROCESSES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "dp2": {"tp": 2, "attn_dp": 2},
    "cp2": {"tp": 2, "attn_cp": 2},
}


@pytest.mark.parametrize("name", PROCESSES)
def test_prompts_are_scored_by_ranks_in_other_processes(case: Case, name: str) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    alone = LLM(case.path, threads=1).generate(prompts(), params)
    nothing = replace(params, max_tokens=0)
    with LLM(case.path, threads=1, prefill_tokens=13, **PROCESSES[name]) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts(), params)
            for number, (wanted, output) in enumerate(zip(alone, outputs, strict=True)):
                assert output.token_ids == wanted.token_ids
                assert output.prompt_logprobs is not None
                case.check_scores(number, output.prompt_logprobs[1:])  # type: ignore[arg-type]
        for number, output in enumerate(llm.generate(prompts(), nothing)):
            assert output.prompt_logprobs is not None
            case.check_scores(number, output.prompt_logprobs[1:])  # type: ignore[arg-type]
        assert llm._engine.stats().blocks_held == 0


@pytest.mark.parametrize("name", ["tp2", "dp2"])
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_embeddings_from_ranks_in_other_processes(tmp_path: Path, name: str, mode: str) -> None:
    model = save_embedder(tmp_path, mode=mode)
    with LLM(str(tmp_path), threads=1, prefill_tokens=13, **PROCESSES[name]) as llm:
        for output, ids in zip(llm.embed(prompts()), prompts(), strict=True):
            wanted = unit(reference(model, ids, mode=mode))
            found = torch.from_numpy(output.embedding)
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
