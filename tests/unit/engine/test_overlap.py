"""A step is launched before the tokens of the one before it are read: answers stay the same.

On the CPU a launched step is done at once, so what is tested is all but the waiting: plans that
refer to tokens nobody has read, rows too much, and what happens to steps under way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.engine.local import LocalExecutor
from layline.engine.request import FinishReason, Request
from layline.errors import RunError
from support.sampled import SampledLogits
from support.tiny import save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61], BASE, [7] * 5]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", max_position_embeddings=96)
    return path


def model(directory: Path, *, overlap: bool = True, **flags: Any) -> LLM:
    return LLM(str(directory), threads=1, overlap=overlap, **flags)


def memory(blocks: int) -> int:
    """Bytes of a cache: layers, keys and values, their heads and size, FP32."""
    return (blocks + 1) * 16 * 3 * 2 * 2 * 8 * 4


def accounted(llm: LLM) -> None:
    """Nothing runs or is under way, and every block is free or kept for its contents."""
    engine = llm._engine
    assert not engine.has_work
    assert not engine._steps._flights
    assert engine.stats().blocks_held == 0
    executor = engine._executor
    assert isinstance(executor, LocalExecutor)
    assert len(executor._rows) == 0


def stops_of(llm: LLM) -> list[SamplingParams]:
    """Ends of every kind, somewhere in the middle of what the model says."""
    outputs = llm.generate(PROMPTS, GREEDY)
    ids, texts = [o.token_ids for o in outputs], [o.text for o in outputs]
    return [
        replace(GREEDY, stop=(texts[0][len(texts[0]) // 2 :][:2],)),
        replace(GREEDY, stop=(texts[1][3:5], texts[1][-3:]), include_stop_in_output=True),
        replace(GREEDY, stop_token_ids=(ids[2][7],)),
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, stop_token_ids=(ids[4][0],), min_tokens=5),
        replace(GREEDY, max_tokens=2),
        GREEDY,
    ]


def drawn_params() -> list[SamplingParams]:
    """Draws, and draws that depend on the tokens before them."""
    free = SamplingParams(temperature=1.2, seed=3, max_tokens=24, ignore_eos=True)
    return [
        free,
        replace(free, seed=4, top_p=0.8, logprobs=2),
        replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
        replace(free, seed=5, presence_penalty=1.5),
        replace(free, seed=6, top_k=7, frequency_penalty=1.0, stop=("e",)),
        replace(GREEDY, logprobs=3),
        replace(free, seed=7, logit_bias={11: 3.0}),
    ]


def compare(llm: LLM, other: LLM, params: list[SamplingParams]) -> None:
    found, wanted = llm.generate(PROMPTS, params), other.generate(PROMPTS, params)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason
        for one, two in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert one.token_id == two.token_id
            assert abs(one.logprob - two.logprob) < 1e-4
    accounted(llm)
    accounted(other)


@pytest.mark.parametrize("kind", ["greedy", "stops", "draws"])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"prefill_tokens": 7},
        {"prefix_cache": False, "max_running": 2},
        {"kv_memory": memory(6)},
        {"kv_memory": memory(6), "prefill_tokens": 5, "prefix_cache": False},
        {"max_running": 1, "prefill_tokens": 1},
    ],
    ids=str,
)
def test_answers_are_those_without_overlap(directory: Path, kind: str, flags: Any) -> None:
    calm = model(directory, overlap=False)
    params = {"greedy": [GREEDY] * len(PROMPTS), "draws": drawn_params()}
    if kind == "stops":
        params["stops"] = stops_of(calm)
    llm = model(directory, **flags)
    for _ in range(2):
        compare(llm, calm, params[kind])
    assert llm._engine.num_ahead > 20
    assert calm._engine.num_ahead == 0
    if flags.get("kv_memory") and kind != "stops":
        assert llm._engine.stats().preemptions > 0
    if flags.get("prefix_cache", True):
        assert llm._engine.stats().prefix_hits > 0


def test_ids_that_nobody_has_read_are_fed(directory: Path) -> None:
    llm = model(directory)
    watch = SampledLogits(llm)
    requests = [llm._engine.submit(prompt, GREEDY) for prompt in (BASE, [3])]
    llm._engine.run(requests)
    decodes = [step.parts[0].token_ids for step in watch.steps[1:]]
    assert decodes == [(-1, -2)] * (GREEDY.max_tokens - 1)
    # What ends by length is known, so no row is too much.
    assert len(watch.steps) == GREEDY.max_tokens
    assert all(len(request.events) == GREEDY.max_tokens for request in requests)


def test_who_has_stopped_has_one_row_too_much(directory: Path) -> None:
    llm = model(directory)
    (whole,) = llm.generate([BASE], GREEDY)
    index = next(i for i, t in enumerate(whole.token_ids) if i > 3 and t not in whole.token_ids[:i])
    watch = SampledLogits(llm)
    request = llm._engine.submit(BASE, replace(GREEDY, stop_token_ids=(whole.token_ids[index],)))
    llm._engine.run([request])
    assert request.output_ids == whole.token_ids[: index + 1]
    assert len(watch.steps) == index + 2
    assert len(request.events) == index + 1
    accounted(llm)


def advance(llm: LLM, requests: list[Request], tokens: int) -> None:
    while min(len(request.output_ids) for request in requests) < tokens:
        llm._engine.step()


def test_an_abort_frees_the_blocks_of_steps_under_way(directory: Path) -> None:
    llm = model(directory, kv_memory=memory(7))
    wanted = model(directory, overlap=False).generate(PROMPTS[:2], GREEDY)
    kept, gone = (llm._engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2])
    advance(llm, [kept, gone], 3)
    assert llm._engine._steps._flights
    held = llm._engine.stats().blocks_held
    llm._engine.abort(gone)
    assert llm._engine.stats().blocks_held < held
    # Whoever takes the blocks writes to them after the step that is under way.
    late = llm._engine.submit(PROMPTS[1], GREEDY)
    llm._engine.run([kept, late])
    assert [kept.output_ids, late.output_ids] == [output.token_ids for output in wanted]
    assert (len(gone.output_ids), gone.finish_reason) == (3, FinishReason.ABORT)
    accounted(llm)


def test_all_that_is_under_way_may_be_aborted(directory: Path) -> None:
    llm = model(directory)
    requests = [llm._engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    advance(llm, requests, 2)
    for request in requests:
        llm._engine.abort(request)
    assert not llm._engine.has_work
    compare(llm, model(directory, overlap=False), [GREEDY] * len(PROMPTS))


def test_an_interrupted_wait_goes_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model(directory)
    wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    requests = [llm._engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    executor: Any = llm._engine._executor
    for method in ("collect", "launch"):
        advance(llm, requests, len(requests[0].output_ids) + 3)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(executor, method, interrupted)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    llm._engine.step()
    llm._engine.run(requests)
    assert [request.output_ids for request in requests] == wanted
    assert all(len(request.events) == len(request.output_ids) for request in requests)
    accounted(llm)


def test_steps_that_gave_no_tokens_are_run_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model(directory, kv_memory=memory(6), prefill_tokens=9)
    params = drawn_params()
    wanted = model(directory, overlap=False).generate(PROMPTS, params)
    requests = [llm._engine.submit(p, one) for p, one in zip(PROMPTS, params, strict=True)]
    executor: Any = llm._engine._executor
    launch, calls = executor.launch, 0

    def unreadable() -> None:
        raise RunError("planted")

    def failing(*step: Any) -> Any:
        nonlocal calls
        calls += 1
        launched = launch(*step)
        if calls % 5 == 0:
            # As a device's rows without a token: known when they are read, by whomever.
            launched.drawn.read = launched.drawn.read_ids = unreadable
        return launched

    monkeypatch.setattr(executor, "launch", failing)
    failures = 0
    while llm._engine.has_work:
        try:
            llm._engine.step()
        except RunError:
            failures += 1
            assert all(request.num_pending == 0 for request in requests)
    assert failures > 5
    for request, theirs in zip(requests, wanted, strict=True):
        assert request.output_ids == theirs.token_ids
        assert request.text == theirs.text
        assert len(request.events) == len(request.output_ids)
    accounted(llm)


def test_a_step_that_cannot_be_launched_loses_no_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model(directory)
    wanted = [output.token_ids for output in llm.generate(PROMPTS[:3], GREEDY)]
    requests = [llm._engine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
    advance(llm, requests, 3)
    before = [len(request.output_ids) for request in requests]

    def broken(*_: object) -> None:
        raise RunError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._executor, "launch", broken)
        with pytest.raises(RunError, match="planted"):
            llm._engine.step()
        # The step that was under way has been read.
        assert [len(request.output_ids) for request in requests] == [n + 1 for n in before]
        with pytest.raises(RunError, match="planted"):
            llm._engine.step()
    llm._engine.run(requests)
    assert [request.output_ids for request in requests] == wanted
    accounted(llm)
