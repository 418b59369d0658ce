"""The offline interface on tiny models: batches, streams, stops, seeds, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.engine.local import LocalExecutor
from layline.engine.output import StreamChunk
from layline.errors import (
    ModelNotFoundError,
    PromptError,
    RunError,
    SamplingError,
    UnsupportedModelError,
    UsageError,
)
from support.tiny import CONTEXT, VOCAB, save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 11], [7] * 20, [3], [44, 2, 8, 100, 17, 61]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama")
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), threads=1)


def free_blocks(llm: LLM) -> tuple[int, int]:
    """Blocks that no request holds, and all."""
    stats = llm._engine.stats()
    return stats.blocks - stats.blocks_held, stats.blocks


def loaded_executor(llm: LLM) -> LocalExecutor:
    executor = llm._engine._executor
    assert isinstance(executor, LocalExecutor)
    return executor


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate([prompt], GREEDY)
        assert alone.token_ids == output.token_ids
        assert output.prompt_token_ids == prompt
        assert output.finish_reason == "length"
        assert output.usage.as_dict() == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 12,
            "total_tokens": len(prompt) + 12,
        }
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_one_prompt_as_text_or_ids(llm: LLM) -> None:
    by_text = llm.generate("w2 w6 w8", GREEDY)
    by_ids = llm.generate([5, 9, 11], GREEDY)
    assert len(by_text) == len(by_ids) == 1
    assert by_text[0].prompt_token_ids == [5, 9, 11]
    assert by_text[0].text == by_ids[0].text
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_run_at_once(directory: Path) -> None:
    few = LLM(str(directory), threads=1, max_running=2)
    outputs = few.generate(PROMPTS * 2, GREEDY)
    assert [o.token_ids for o in outputs[:4]] == [o.token_ids for o in outputs[4:]]
    assert all(len(output.token_ids) == 12 for output in outputs)


def test_streaming_gives_the_same_text_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[0]], GREEDY)
    chunks = list(llm.stream(PROMPTS[0], GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1].output
    assert last is not None
    assert last.text == whole.text
    assert chunks[-1].finish_reason == "length"


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    assert free_blocks(llm)[0] < free_blocks(llm)[1]
    stream.close()
    assert free_blocks(llm)[0] == free_blocks(llm)[1]
    assert llm.generate([PROMPTS[0]], GREEDY)[0].finish_reason == "length"


def test_streams_read_in_turn_lose_nothing(llm: LLM) -> None:
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS[:2]]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    pieces: list[list[StreamChunk]] = [[], []]
    for _ in range(12):
        for stream, taken in zip(streams, pieces, strict=True):
            taken.append(next(stream))
    for stream, taken, wanted in zip(streams, pieces, alone, strict=True):
        assert list(stream) == []
        assert [token for chunk in taken for token in chunk.token_ids] == wanted.token_ids
        assert taken[-1].output is not None
        assert taken[-1].output.text == wanted.text


def test_several_threads_share_one_model(llm: LLM) -> None:
    from concurrent.futures import ThreadPoolExecutor

    wanted = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for _ in range(5):
            outputs = pool.map(lambda prompt: llm.generate([prompt], GREEDY)[0], PROMPTS)
            assert [output.token_ids for output in outputs] == wanted
        streams = pool.map(lambda prompt: list(llm.stream(prompt, GREEDY)), PROMPTS)
        assert [[t for c in chunks for t in c.token_ids] for chunks in streams] == wanted
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_generating_beside_an_open_stream(llm: LLM) -> None:
    (wanted,) = llm.generate([PROMPTS[0]], GREEDY)
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    assert llm.generate([PROMPTS[1]], GREEDY)[0].finish_reason == "length"
    rest = list(stream)
    assert [t for chunk in [first, *rest] for t in chunk.token_ids] == wanted.token_ids


@pytest.mark.parametrize("how", ["close", "forget", "leave"])
def test_a_stream_that_was_never_read_leaves_nothing(llm: LLM, how: str) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert llm._engine.has_work
    if how == "close":
        stream.close()
    elif how == "leave":
        with stream:
            pass
    del stream
    assert not llm._engine.has_work
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_a_stream_closed_inside_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector may do: the step goes on, and the request is gone after it."""
    (wanted,) = llm.generate([PROMPTS[1]], GREEDY)
    kept, closed = llm.stream(PROMPTS[1], GREEDY), llm.stream(PROMPTS[0], GREEDY)
    ids = next(kept).token_ids
    sampler = loaded_executor(llm)._sampler
    sample = sampler.sample

    def closing(*arguments: Any) -> Any:
        closed.close()
        return sample(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample", closing)
        ids += next(kept).token_ids
    assert llm._engine._scheduler.num_unfinished == 1
    ids += [token for chunk in kept for token in chunk.token_ids]
    assert ids == wanted.token_ids
    assert list(closed) == []
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_a_stream_closed_while_another_thread_runs_a_step(llm: LLM) -> None:
    """As the garbage collector may do in a thread that the step itself waits for."""
    import threading

    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    holding, done = threading.Event(), threading.Event()

    def step() -> None:
        with llm._engine._lock:
            holding.set()
            done.wait(20)

    other = threading.Thread(target=step)
    other.start()
    assert holding.wait(20)
    stream.close()
    done.set()
    other.join()
    assert not llm._engine.has_work
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_memory_report_counts_matrices_and_cache(llm: LLM) -> None:
    report = llm.memory_report()
    layer = 48 * 48 + 2 * 16 * 48 + 48 * 48 + 3 * 48 * 80
    assert report["weights"] == 4 * (3 * layer + 2 * VOCAB * 48)
    assert report["kv_cache"] == loaded_executor(llm).num_blocks * 16 * 3 * 2 * 16 * 4


def test_a_step_that_is_interrupted_can_be_taken_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wanted,) = llm.generate([PROMPTS[0]], GREEDY)
    stream = llm.stream(PROMPTS[0], GREEDY)
    ids = [next(stream).token_ids[0] for _ in range(3)]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loaded_executor(llm)._sampler, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    ids += [token for chunk in stream for token in chunk.token_ids]
    assert ids == wanted.token_ids


def test_a_prompt_longer_than_one_step(directory: Path, llm: LLM) -> None:
    """Steps in which no prompt is complete sample nothing."""
    prompts = [[5 + n % 150 for n in range(50)], PROMPTS[0]]
    chunked = LLM(str(directory), threads=1, prefill_tokens=11)
    ours = chunked.generate(prompts, GREEDY)
    wanted = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in ours] == [output.token_ids for output in wanted]


def test_a_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[0]], GREEDY)
    ends = [len(llm.tokenizer.decode(whole.token_ids[: n + 1])) for n in range(12)]
    spanning = whole.text[ends[3] - 1 : ends[3] + 1]
    first = whole.text.index(spanning)
    assert first == ends[3] - 1, "the stop string must first appear across tokens 4 and 5"

    def run(minimum: int) -> str:
        params = SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, stop=(spanning,), min_tokens=minimum
        )
        return llm.generate([PROMPTS[0]], params)[0].text

    for minimum in (0, 1, 3, 4):
        assert run(minimum) == whole.text[:first]
    later = whole.text.find(spanning, first + 1)
    assert run(5) == (whole.text if later < 0 else whole.text[:later])


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[0]], GREEDY)
    words = whole.text
    stop = words[len(words) // 2 : len(words) // 2 + 3]
    cut = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,))
    chunks = list(llm.stream(PROMPTS[0], cut))
    output = chunks[-1].output
    assert output is not None
    assert output.finish_reason == "stop"
    assert output.text == words[: words.index(stop)]
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert whole.token_ids[: len(output.token_ids)] == output.token_ids


def test_stop_ids_and_end_of_sequence(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[0]], GREEDY)
    stop_id = whole.token_ids[4]
    first = whole.token_ids.index(stop_id)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop_id,))
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.finish_reason == "stop"
    assert output.token_ids == whole.token_ids[: first + 1]
    biased = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={2: 100.0})
    (ended,) = llm.generate([PROMPTS[0]], biased)
    assert ended.token_ids == [2]
    assert (ended.text, ended.finish_reason) == ("", "stop")
    late = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={2: 100.0}, min_tokens=5)
    assert len(llm.generate([PROMPTS[0]], late)[0].token_ids) == 6


def test_a_seeded_draw_ignores_batch_mates_and_position(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.5, max_tokens=10, seed=1234, ignore_eos=True)
    other = SamplingParams(temperature=0.7, max_tokens=10, seed=9, top_k=5, ignore_eos=True)
    (alone,) = llm.generate([PROMPTS[0]], drawn)
    for position in range(3):
        prompts = [PROMPTS[1], PROMPTS[2]]
        params = [other, other]
        prompts.insert(position, PROMPTS[0])
        params.insert(position, drawn)
        assert llm.generate(prompts, params)[position].token_ids == alone.token_ids
    again = SamplingParams(temperature=1.5, max_tokens=10, seed=1235, ignore_eos=True)
    assert llm.generate([PROMPTS[0]], again)[0].token_ids != alone.token_ids


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)
    assert llm.generate([PROMPTS[0]], GREEDY)[0].logprobs is None


def test_generation_stops_where_the_context_ends(llm: LLM) -> None:
    (output,) = llm.generate([[5] * (CONTEXT - 3)], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.token_ids) == 3
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (b"abc", "neither text nor a list of token ids"),
        (5.0, "neither text nor a list of token ids"),
        ([5, "w2"], "holds 'w2'; expected integers"),
        ([5, True], "holds True; expected integers"),
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([5] * CONTEXT, f"has {CONTEXT} tokens; expected at most {CONTEXT - 1}"),
        ([5, VOCAB], f"token id {VOCAB} is not in the vocabulary"),
        ([5, -1], "token id -1 is not in the vocabulary"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: object, text: str) -> None:
    with pytest.raises(PromptError, match=text):
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]
    with pytest.raises(PromptError, match=text):
        llm.stream(prompt, GREEDY)  # type: ignore[arg-type]
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_numpy_ids_are_ids(llm: LLM) -> None:
    import numpy as np

    wanted = llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    assert llm.generate(np.array(PROMPTS[0]), GREEDY)[0].token_ids == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [GREEDY], [GREEDY, None]])
def test_bad_params(llm: LLM, params: object) -> None:
    with pytest.raises(UsageError, match=r"SamplingParams|sampling parameters"):
        llm.generate(PROMPTS[:2] if params != [GREEDY, None] else [[5], [6]], params)  # type: ignore[arg-type]
    assert not llm._engine.has_work


def test_an_empty_text_is_refused_although_a_bos_would_be_added(llm: LLM) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        llm.generate("")


def test_one_bad_prompt_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"^prompt 1: the prompt is empty"):
        llm.generate([PROMPTS[0], []], GREEDY)
    assert not llm._engine.has_work
    assert free_blocks(llm)[0] == free_blocks(llm)[1]


def test_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(PromptError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_flags_are_checked(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"keyword 'max_runing' is not one of .* 'max_running'"):
        LLM(str(directory), max_runing=3)
    with pytest.raises(UsageError, match="dtype 'bf16' is not one of"):
        LLM(str(directory), dtype="bf16")
    with pytest.raises(UsageError, match="threads 0 must be a positive integer"):
        LLM(str(directory), threads=0)
    with pytest.raises(UsageError, match="max_model_len 65 is beyond"):
        LLM(str(directory), max_model_len=CONTEXT + 1)
    with pytest.raises(UsageError, match="kv_memory 1024 bytes holds 0 tokens"):
        LLM(str(directory), kv_memory=1024)
    for size in ("lots", "9" * 400, 1e9, True, "0"):
        with pytest.raises(UsageError, match=r"kv_memory .* is not a size"):
            LLM(str(directory), kv_memory=size)
    for device in (0, "cuda:01", "gpu"):
        with pytest.raises(UsageError, match=r"device .* is not one of cpu, cuda"):
            LLM(str(directory), device=device)
    with pytest.raises(UsageError, match="overlap 1 must be True, False or None"):
        LLM(str(directory), overlap=1)
    with pytest.raises(UsageError, match="seed 'x' must be an integer"):
        LLM(str(directory), seed="x")
    with pytest.raises(ModelNotFoundError):
        LLM("no-such-model")
    with pytest.raises(SamplingError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="0 CUDA devices"):
            LLM(str(directory), device="cuda")


def test_an_unknown_architecture_says_which_are_known(directory: Path, tmp_path: Path) -> None:
    import json
    import shutil

    shutil.copytree(directory, tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "architectures": ["LlamaForCausalLLM"]}))
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM; did you mean 'LlamaFor"):
        LLM(str(tmp_path / "odd"))


def test_ids_without_a_token_are_never_sampled(tmp_path: Path) -> None:
    """A tokenizer whose ids have a gap, in a model that likes the gap best."""
    import json

    from support.tiny import tiny_model, tiny_tokenizer

    model = tiny_model("Llama")
    with torch.no_grad():
        model.lm_head.weight[100:120] *= 50
    model.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    words = raw["model"]["vocab"]
    raw["model"]["vocab"] = {word: i for word, i in words.items() if not 100 <= i < 120}
    path.write_text(json.dumps(raw))
    llm = LLM(str(tmp_path), threads=1)
    assert llm.tokenizer.unused_ids == frozenset(range(100, 120))
    for temperature in (0.0, 2.0):
        params = SamplingParams(temperature=temperature, max_tokens=30, seed=1, ignore_eos=True)
        (output,) = llm.generate([[5, 9, 11]], params)
        assert not llm.tokenizer.unused_ids & set(output.token_ids)


def test_ids_beyond_the_tokenizer_are_never_sampled(tmp_path: Path) -> None:
    """The embedding has more rows than the tokenizer has ids; those rows are made to win."""
    from support.tiny import tiny_model, tiny_tokenizer

    model = tiny_model("Llama")
    with torch.no_grad():
        model.lm_head.weight[150:] *= 50
    model.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path, vocab_size=150)
    llm = LLM(str(tmp_path), threads=1)
    for temperature in (0.0, 2.0):
        params = SamplingParams(temperature=temperature, max_tokens=30, seed=1, ignore_eos=True)
        (output,) = llm.generate([[5, 9, 11]], params)
        assert len(output.token_ids) == 30
        assert max(output.token_ids) < 150


def test_a_closed_model_answers_nothing_more(directory: Path) -> None:
    llm = LLM(str(directory), threads=1)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for attempt in (
        lambda: llm.generate([PROMPTS[0]], GREEDY),
        lambda: llm.stream(PROMPTS[0], GREEDY),
        lambda: list(stream),
        llm.memory_report,
        llm.worker_peaks,
    ):
        with pytest.raises(RunError, match=r"^the engine is closed$"):
            attempt()
    stream.close()
    assert not llm._engine.has_work
