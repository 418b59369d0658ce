"""A model over pipeline stages in worker processes answers as it does on one stage.

In batch-invariant FP32 every log-probability is the same bit by bit, whatever shares its step.
Each way to divide the stages is started once, and asked for everything.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from layline import LLM, Grammar, SamplingParams
from layline.engine.output import GenerationOutput
from layline.engine.remote_stages import StagedRanks
from layline.errors import RunError, UnsplitError, UsageError
from support.tiny import save_tiny
from support.writer import save_writer

LAYERS = 6
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61], [7] * 5, BASE[3:]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=5)
DRAWN = [
    SamplingParams(temperature=1.2, seed=number, max_tokens=9, repetition_penalty=1.3, logprobs=0)
    for number in range(len(PROMPTS))
]
WAYS: dict[str, dict[str, Any]] = {
    "two processes": {"pp_stages": 2, "pp_processes": 2},
    # The cache is so small that requests are preempted.
    "three, uneven": {"pp_stages": 3, "pp_processes": 3, "pp_splits": (1, 5), "kv_memory": 73728},
    "runs of stages": {"pp_stages": 5, "pp_processes": 2},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stages")
    save_tiny(directory, "Llama", num_hidden_layers=LAYERS)
    return directory


def load(path: Path, **flags: Any) -> LLM:
    return LLM(str(path), **{"batch_invariant": True, "threads": 1, "prefill_tokens": 9, **flags})


def found_in(outputs: Sequence[GenerationOutput]) -> list[tuple[Any, ...]]:
    return [
        (each.token_ids, each.text, each.finish_reason, each.logprobs, each.prompt_logprobs)
        for each in outputs
    ]


def ranks_of(llm: LLM) -> StagedRanks:
    executor = llm._executor
    assert isinstance(executor, StagedRanks)
    return executor


def workers(before: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """The ranks that this process has started since ``before``, in their order."""
    found = [
        child
        for child in psutil.Process().children()
        if child not in before and "layline.engine.worker" in child.cmdline()
    ]
    return sorted(found, key=lambda child: int(child.cmdline()[-3]))


@pytest.fixture(scope="module")
def whole(path: Path) -> Iterator[LLM]:
    with load(path) as llm:
        yield llm


@pytest.fixture(scope="module", params=WAYS)
def way(request: Any) -> dict[str, Any]:
    found: dict[str, Any] = WAYS[request.param]
    return found


@pytest.fixture(scope="module")
def staged(path: Path, way: dict[str, Any]) -> Iterator[LLM]:
    with load(path, **way) as llm:
        yield llm


def test_every_bit_is_that_of_one_stage(whole: LLM, staged: LLM, way: dict[str, Any]) -> None:
    """And a step began on the first stage while the one before was on others."""
    # pipeline G13, G39, G40, G41, G45
    before = ranks_of(staged).num_overlapped
    assert found_in(staged.generate(PROMPTS, GREEDY)) == found_in(whole.generate(PROMPTS, GREEDY))
    assert ranks_of(staged).num_overlapped > before
    assert sorted(staged.engine.times.stages) == list(range(way["pp_stages"]))
    assert len({sum(each.counts) for each in staged.engine.times.stages.values()}) == 1


def test_drawn_tokens_and_prompts_are_those_of_one_stage(whole: LLM, staged: LLM) -> None:
    """What a request has said so far is known where the last stage draws."""
    assert found_in(staged.generate(PROMPTS, DRAWN)) == found_in(whole.generate(PROMPTS, DRAWN))
    read = replace(GREEDY, max_tokens=3, prompt_logprobs=2)
    assert found_in(staged.generate(PROMPTS, read)) == found_in(whole.generate(PROMPTS, read))


def test_chunks_of_one_prompt_overlap(whole: LLM, staged: LLM) -> None:
    """Tiny chunks on busy cores may miss each other in one prompt, but not in each of them."""
    # pipeline G45, G46
    before = ranks_of(staged).num_overlapped
    params = replace(GREEDY, max_tokens=1)
    for last in range(13, 33):
        prompt = [[*BASE[::-1], 11, 12, last][::-1]]
        assert found_in(staged.generate(prompt, params)) == found_in(whole.generate(prompt, params))
        if ranks_of(staged).num_overlapped > before:
            break
    assert ranks_of(staged).num_overlapped > before


def test_beginnings_in_the_cache_are_shared_on_every_stage(whole: LLM, staged: LLM) -> None:
    prompt = [17, *BASE[:33]]
    for ending in ([4], [5, 6]):
        hits = staged.stats().prefix_hits
        asked = [[*prompt, *ending]]
        assert found_in(staged.generate(asked, GREEDY)) == found_in(whole.generate(asked, GREEDY))
    assert staged.stats().prefix_hits >= hits + 32


def test_preempted_requests_come_back_to_every_stage(
    whole: LLM, staged: LLM, way: dict[str, Any]
) -> None:
    params = replace(GREEDY, max_tokens=25)
    assert found_in(staged.generate(PROMPTS, params)) == found_in(whole.generate(PROMPTS, params))
    assert (staged.stats().preemptions > 0) == ("kv_memory" in way)


def test_an_abandoned_request_leaves_the_others_alone(whole: LLM, staged: LLM) -> None:
    stream = staged.stream(BASE, replace(GREEDY, max_tokens=20))
    next(stream)
    stream.close()
    assert found_in(staged.generate(PROMPTS, GREEDY)) == found_in(whole.generate(PROMPTS, GREEDY))
    assert staged.stats().blocks_held == 0


def test_a_process_has_its_own_stages_and_nothing_else(whole: LLM, staged: LLM) -> None:
    # pipeline G10, G27
    alone, divided = whole.memory_report(), staged.memory_report()
    assert divided["weights"] == alone["weights"]
    blocks = [alone["kv_cache"] / whole._executor.num_blocks]
    blocks.append(divided["kv_cache"] / staged._executor.num_blocks)
    assert blocks[0] == blocks[1]


def test_doors_to_another_way_are_refused(
    staged: LLM, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pipeline G12, G54
    monkeypatch.setenv("LAYLINE_BATCH_PP", "0")
    with pytest.raises(UnsplitError, match="no rank has all layers; expected LAYLINE_BATCH_PP"):
        staged.generate(PROMPTS, GREEDY)
    monkeypatch.delenv("LAYLINE_BATCH_PP")
    assert found_in(staged.generate(PROMPTS, GREEDY)) == found_in(whole.generate(PROMPTS, GREEDY))


def test_one_step_at_a_time_overlaps_with_none(path: Path, whole: LLM) -> None:
    """The counter that shows overlap can fail to advance."""
    with load(path, pp_stages=2, pp_processes=2, overlap=False, tp=1) as llm:
        assert found_in(llm.generate(PROMPTS, GREEDY)) == found_in(whole.generate(PROMPTS, GREEDY))
        assert ranks_of(llm).num_overlapped == 0


@pytest.mark.parametrize("running", [1, 64])
def test_guessed_tokens_are_verified_on_every_stage(path: Path, whole: LLM, running: int) -> None:
    """A request draws several rows of a step, and may be the only one."""
    # pipeline G44
    prompts = [[7, 8, 9] * 6, *PROMPTS[2:]]
    flags = {"speculative": "ngram", "max_running": running}
    with load(path, pp_stages=2, pp_processes=2, **flags) as llm:
        assert found_in(llm.generate(prompts, GREEDY)) == found_in(whole.generate(prompts, GREEDY))
        assert llm.stats().drafted > 0


def test_grammars_are_followed_where_the_last_stage_is(tmp_path: Path) -> None:
    save_writer(tmp_path)
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=40, grammar=Grammar.regex("(ab|cd){2,5}x")
    )
    wanted = LLM(str(tmp_path), threads=1).generate(["x", "Paris"], params)
    with LLM(str(tmp_path), threads=1, pp_stages=2, pp_processes=2) as llm:
        found = llm.generate(["x", "Paris"], params)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]


def test_both_ends_of_tied_embeddings_and_threads(tmp_path: Path) -> None:
    """Threads of the run are divided over processes."""
    save_tiny(tmp_path, "Llama", num_hidden_layers=3, tie_word_embeddings=True)
    with load(tmp_path) as llm:
        wanted = found_in(llm.generate(PROMPTS, GREEDY))
    before = workers()
    with load(tmp_path, pp_stages=2, pp_processes=2, threads=4) as llm:
        assert found_in(llm.generate(PROMPTS, GREEDY)) == wanted
        assert [each.environ()["OMP_NUM_THREADS"] for each in workers(before)] == ["2", "2"]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (signal.SIGKILL, "ended unexpectedly, killed by SIGKILL"),
        (signal.SIGSTOP, "stopped answering: no heartbeat for 8 s"),
    ],
)
def test_a_stage_that_is_gone_ends_the_run(path: Path, how: signal.Signals, what: str) -> None:
    before = workers()
    with load(path, pp_stages=3, pp_processes=3) as llm:
        processes = workers(before)
        assert len(processes) == 3
        stream = llm.stream(PROMPTS[4], replace(GREEDY, max_tokens=50))
        next(stream)
        begin = time.monotonic()
        os.kill(processes[1].pid, how)
        wanted = rf"rank 1 \(stage 1, attention DP 0, TP 0\) {what} while step \d+ was waited for"
        with pytest.raises(RunError, match=wanted):
            list(stream)
        assert time.monotonic() - begin < 12
        with pytest.raises(RunError, match="rank 1"):
            llm.generate(PROMPTS, GREEDY)
        assert not any(each.is_running() for each in processes)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_gone_is_named_in_its_stage(path: Path, victim: int) -> None:
    """The others fail in collectives and links with it, and none of them is told instead."""
    before = workers()
    with load(path, pp_stages=2, pp_processes=2, tp=2) as llm:
        processes = workers(before)
        stream = llm.stream(PROMPTS[4], replace(GREEDY, max_tokens=50))
        next(stream)
        os.kill(processes[victim].pid, signal.SIGKILL)
        place = rf"rank {victim} \(stage {victim // 2}, attention DP 0, TP {victim % 2}\)"
        with pytest.raises(RunError, match=f"{place} ended unexpectedly, killed by SIGKILL"):
            list(stream)


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp_stages": 2, "tp": 2},
        {"pp_stages": 3, "pp_splits": (1, 2), "tp": 2, "attn_dp": 2},
        {"pp_stages": 2, "tp": 2, "attn_cp": 2},
        {"pp_stages": 3, "pp_processes": 2, "tp": 2, "attn_dp": 2},
    ],
    ids=str,
)
def test_stages_of_a_mesh_give_the_bits_of_the_mesh(path: Path, mesh: dict[str, Any]) -> None:
    """Each rank of the mesh drives a run of stages."""
    # pipeline G39, G40
    alone = {name: degree for name, degree in mesh.items() if not name.startswith("pp_")}
    with load(path, **alone) as llm:
        wanted = found_in(llm.generate(PROMPTS, GREEDY))
        weights = llm.memory_report()["weights"]
    before = workers()
    with load(path, **mesh) as llm:
        assert len(workers(before)) == 2 * mesh.get("pp_processes", 1)
        assert found_in(llm.generate(PROMPTS, GREEDY)) == wanted
        assert ranks_of(llm).num_overlapped > 0
        assert llm.memory_report()["weights"] == weights


@pytest.mark.parametrize(
    ("flags", "door", "message"),
    [
        ({"pp_processes": 2}, "", "pp_processes 2 needs more than one stage"),
        ({"pp_processes": 4}, "3", "pp_processes 4 is more than the 3 pipeline stages"),
        ({"pp_stages": 2, "pp_processes": 2, "device": "cuda"}, "", "pp_processes 2 .*device cpu"),
        ({"pp_stages": 2, "tp": 2, "device": "cuda"}, "", "tp 2 does not .*or device cpu"),
        (
            {"pp_stages": 2, "tp": 2, "speculative": "draft", "speculative_model": "x"},
            "",
            "speculative draft does not run with 2 pipeline stages",
        ),
    ],
)
def test_what_does_not_run_is_refused_before_a_worker_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], door: str, message: str
) -> None:
    monkeypatch.setenv("LAYLINE_PP_STAGES", door)
    monkeypatch.setattr("layline.engine.launch.start_rank", None)
    with pytest.raises(UsageError, match=message):
        LLM(str(path), **flags)


def test_one_stream_for_all_stages_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYLINE_PP_STREAMS", "0")
    with pytest.raises(UsageError, match="pp_processes 2 does not go with LAYLINE_PP_STREAMS=0"):
        LLM(str(path), pp_stages=2, pp_processes=2)
