"""Speculation changes how many steps an answer takes and nothing else.

The references are transformers on float32 tiny models, and plain decoding with the same seed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.engine import core
from layline.engine.kv import slot_bytes
from layline.engine.output import GenerationOutput
from layline.engine.scheduler import BLOCK_SIZE
from layline.errors import PromptError, UsageError
from layline.grammar import Grammar
from support.fake_drafts import Garbage
from support.families import reference
from support.model import smollm2_path
from support.sampled import generate_watched
from support.speculative import BASE, LOOP, PROMPTS, Checkpoints, replace_proposer
from support.tiny import VOCAB, save_tiny, tiny_tokenizer
from support.writer import save_writer

TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
KINDS = ["ngram", "same", "near", "other"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen3": ("Qwen3", {}),
}
DRAWN = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.2, top_p=0.8, seed=5, max_tokens=TOKENS, logprobs=2),
    replace(GREEDY, repetition_penalty=1.05, frequency_penalty=0.1, presence_penalty=0.1),
    SamplingParams(temperature=0.1, top_k=4, seed=-2, max_tokens=TOKENS, min_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=TOKENS, logit_bias={7: 3.0, 8: -100.0}, logprobs=0),
    SamplingParams(temperature=0.3, min_p=0.1, seed=9, max_tokens=7, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama: Checkpoints) -> LLM:
    return llama.llm("off")


def said(output: GenerationOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.logprobs


def close(ours: GenerationOutput, theirs: GenerationOutput) -> None:
    """The same answer; log-probabilities up to what a batch of other rows moves them by."""
    assert said(ours)[:3] == said(theirs)[:3]
    assert (ours.logprobs is None) == (theirs.logprobs is None)
    for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    name, changes = FAMILIES[family]
    checkpoints = Checkpoints(tmp_path, name, **changes)
    wanted = [reference(checkpoints.model, prompt, TOKENS) for prompt in PROMPTS]
    accepted = {}
    for kind in ["off", *KINDS]:
        llm = checkpoints.llm(kind)
        found, logits, _ = generate_watched(llm, PROMPTS, GREEDY)
        for ids, rows, (theirs, their_ids) in zip(found, logits, wanted, strict=True):
            assert ids == their_ids, kind
            error = (rows[:TOKENS] - theirs[-TOKENS:]).abs().max() / theirs.abs().max()
            assert float(error) < 1e-4
        stats = llm.stats()
        assert stats.blocks_held == 0
        accepted[kind] = (stats.drafted, stats.accepted)
    assert accepted["off"] == (0, 0)
    assert 0 < accepted["same"][0] == accepted["same"][1], "a model agrees with itself"
    assert 0 < accepted["near"][1] < accepted["near"][0]
    assert accepted["other"][1] < accepted["other"][0]
    if family == "llama":
        assert accepted["ngram"][1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_those_of_plain_decoding(kind: str, llama: Checkpoints, plain: LLM) -> None:
    """Seeds, penalties, filters, bans and log-probabilities, alone and together."""
    wanted = plain.generate(PROMPTS, DRAWN)
    llm = llama.llm(kind, speculative_tokens=6)
    for ours, theirs in zip(llm.generate(PROMPTS, DRAWN), wanted, strict=True):
        close(ours, theirs)
    for prompt, params, theirs in zip(PROMPTS, DRAWN, wanted, strict=True):
        close(llm.generate([prompt], params)[0], theirs)
    stats = llm.stats()
    assert stats.drafted > 0
    if kind == "same":
        assert stats.accepted == stats.drafted
    if kind in ("near", "other"):
        assert stats.accepted < stats.drafted


def test_batch_invariant_logits_are_those_of_plain_decoding_to_the_bit(llama: Checkpoints) -> None:
    """Accepted rows; the same comparison without the mode finds what a batch moves."""
    prompts = PROMPTS[2:]
    found: dict[tuple[str, bool], list[torch.Tensor]] = {}
    for kind, invariant in (
        ("off", True), ("ngram", True), ("near", True), ("off", False), ("near", False)
    ):  # fmt: skip
        llm = llama.llm(kind, batch_invariant=invariant)
        ids, logits, _ = generate_watched(llm, prompts, GREEDY)
        # Rows behind the last token have been verified and not been wanted.
        found[kind, invariant] = [rows[: len(own)] for own, rows in zip(ids, logits, strict=True)]
        assert (llm.stats().accepted > 0) == (kind != "off")

    def same(kind: str, invariant: bool) -> bool:
        pairs = zip(found["off", invariant], found[kind, invariant], strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    assert same("ngram", True)
    assert same("near", True)
    assert not same("near", False)


def test_fewer_steps_are_run(llama: Checkpoints) -> None:
    counts = {}
    for kind in ("off", "ngram", "same"):
        llm = llama.llm(kind)
        step, count = llm.engine._step, []

        def counted(step: Any = step, count: list[int] = count) -> None:
            count.append(1)
            step()

        llm.engine._step = counted  # type: ignore[method-assign]
        llm.generate([LOOP], GREEDY)
        counts[kind] = len(count)
    # The prompt's step, then five tokens in each.
    assert counts["off"] == TOKENS
    assert counts["same"] == 1 + (TOKENS - 1 + 4) // 5
    assert counts["ngram"] < TOKENS


@pytest.mark.parametrize("kind", ["ngram", "same"])
def test_answers_end_within_accepted_drafts(kind: str, llama: Checkpoints, plain: LLM) -> None:
    """Stop strings, stop ids, end ids and max_tokens cut where they cut without drafts."""
    whole = plain.generate([LOOP], GREEDY)[0]
    llm = llama.llm(kind, speculative_tokens=7)
    cases = [replace(GREEDY, max_tokens=most) for most in range(1, 20)]
    for place in range(3, 30, 3):
        token = whole.token_ids[place]
        cases.append(replace(GREEDY, stop_token_ids=(token,)))
        cases.append(replace(GREEDY, stop=(f"w{token - 3}w",)))
        cases.append(replace(GREEDY, stop=(f"w{token - 3}",), include_stop_in_output=True))
        cases.append(replace(GREEDY, min_tokens=place, stop_token_ids=(token,)))
    for case in cases:
        ours, theirs = llm.generate([LOOP], case)[0], plain.generate([LOOP], case)[0]
        assert said(ours) == said(theirs), case
        assert llm.stats().blocks_held == 0
    together = llm.generate([LOOP] * len(cases), cases)
    for ours, theirs in zip(together, plain.generate([LOOP] * len(cases), cases), strict=True):
        assert said(ours) == said(theirs)
    assert llm.stats().accepted > 20


def test_an_end_id_among_accepted_drafts_ends_the_answer(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    plain = checkpoints.llm("off")
    token = plain.generate([LOOP], GREEDY)[0].token_ids[9]
    # The same weights, whose end is a token that they say.
    for kind in ("ngram", "same"):
        path = tmp_path / kind
        save_tiny(path, "Llama", max_position_embeddings=160, eos_token_id=token)
        llm = LLM(str(path), threads=1, **checkpoints.flags(kind))
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
        ours = llm.generate([LOOP], params)[0]
        theirs = LLM(str(path), threads=1).generate([LOOP], params)[0]
        assert said(ours) == said(theirs)
        assert ours.finish_reason == "stop"
        assert ours.token_ids[-1] == token
        assert llm.stats().drafted > 0


def kv_memory(llm: LLM, blocks: int, copies: int) -> int:
    """Bytes for ``blocks`` blocks beside the one that is never given out."""
    return (blocks + 1) * BLOCK_SIZE * slot_bytes(llm.facts.config, torch.float32) * copies


@pytest.mark.parametrize("kind", ["ngram", "same"])
@pytest.mark.parametrize("chunk", [5, 2048])
def test_preemption_and_prefix_hits(kind: str, chunk: int, llama: Checkpoints, plain: LLM) -> None:
    params = replace(GREEDY, max_tokens=50)
    prompts = [*PROMPTS, *PROMPTS[2:5]]
    wanted = [output.token_ids for output in plain.generate(prompts, params)]
    copies = 2 if kind == "same" else 1
    llm = llama.llm(
        kind,
        kv_memory=kv_memory(plain, 10, copies),
        max_model_len=96,
        prefill_tokens=chunk,
    )
    for _ in range(2):
        assert [output.token_ids for output in llm.generate(prompts, params)] == wanted
    stats = llm.stats()
    assert stats.blocks == 10
    assert stats.blocks_held == 0
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.accepted > 0
    if kind == "same":
        # Nothing that the draft model found in the cache was another sequence's.
        assert stats.accepted == stats.drafted


@pytest.mark.parametrize("kind", ["ngram", "same", "near"])
def test_a_pool_of_one_block(kind: str, llama: Checkpoints, plain: LLM) -> None:
    params = replace(GREEDY, max_tokens=9)
    prompts = [[3], LOOP[:7], [8, 9, 8, 9]]
    wanted = [output.token_ids for output in plain.generate(prompts, params)]
    copies = 1 if kind == "ngram" else 2
    llm = llama.llm(kind, kv_memory=kv_memory(plain, 1, copies), max_model_len=16)
    assert [output.token_ids for output in llm.generate(prompts, params)] == wanted
    with pytest.raises(PromptError):
        llm.generate([[3] * 16], params)
    stats = llm.stats()
    assert stats.blocks == 1
    assert stats.drafted > 0
    if kind == "same":
        assert stats.accepted == stats.drafted


def test_a_request_at_the_end_of_its_context(llama: Checkpoints, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    short = llama.llm("off", max_model_len=50)
    wanted = [output.token_ids for output in short.generate([LOOP, BASE], params)]
    for kind in ("ngram", "same"):
        llm = llama.llm(kind, max_model_len=50)
        found = llm.generate([LOOP, BASE], params)
        assert [output.token_ids for output in found] == wanted
        assert [len(ids) for ids in wanted] == [30, 13]


@pytest.mark.parametrize("token", [0, 7, VOCAB - 1])
def test_garbage_changes_no_answer(token: int, llama: Checkpoints, plain: LLM) -> None:
    wanted = [said(output)[:3] for output in plain.generate(PROMPTS, DRAWN)]
    llm = llama.llm("off")
    replace_proposer(llm, Garbage(token), most=8)
    assert [said(output)[:3] for output in llm.generate(PROMPTS, DRAWN)] == wanted
    stats = llm.stats()
    assert stats.accepted < stats.drafted // 2


def test_a_verifier_that_does_not_compare_is_seen(
    llama: Checkpoints, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary: what these tests compare is not equal by itself."""
    wanted = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
    monkeypatch.setattr(core, "is_verified", lambda entry: True)
    for kind in ("ngram", "near", "other"):
        llm = llama.llm(kind)
        found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert found != wanted, kind


def test_a_grammar_beside_requests_with_drafts(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    save_writer(tmp_path)
    free = replace(GREEDY, max_tokens=12)
    held = replace(free, grammar=Grammar.regex("[a-z]{2,40}"), ignore_eos=False)
    params = [held, free, replace(held, temperature=1.0, seed=4), free]
    prompts = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    path = str(tmp_path)
    wanted = [said(output) for output in LLM(path, threads=1).generate(prompts, params)]
    llm = LLM(path, threads=1, speculative="draft", speculative_model=path)
    assert [said(output) for output in llm.generate(prompts, params)] == wanted
    drafted = llm.stats().drafted
    assert drafted > 0
    assert said(llm.generate([prompts[0]], held)[0]) == wanted[0]
    assert llm.stats().drafted == drafted, "a request with a grammar has no drafts"


def test_streams_show_every_token_once(llama: Checkpoints, plain: LLM) -> None:
    wanted = plain.generate([LOOP], GREEDY)[0]
    chunks = list(llama.llm("same").stream(LOOP, GREEDY))
    assert [token for chunk in chunks for token in chunk.token_ids] == wanted.token_ids
    assert all(len(chunk.token_ids) == 1 for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == wanted.text


def test_a_request_that_is_closed_leaves_nothing(llama: Checkpoints, plain: LLM) -> None:
    wanted = plain.generate([BASE], GREEDY)[0].token_ids
    llm = llama.llm("near")
    with llm.stream(LOOP, GREEDY) as stream, llm.stream(BASE, GREEDY) as other:
        for _ in range(7):
            next(stream)
        stream.close()
        assert [token for chunk in other for token in chunk.token_ids] == wanted
    assert llm.stats().blocks_held == 0
    speculation: Any = llm.engine._speculation
    assert not speculation._paces
    assert not speculation._proposer._known
    executor: Any = llm.engine._executor
    assert len(executor._rows) == 0


def test_memory_of_the_draft_model_is_counted(llama: Checkpoints, plain: LLM) -> None:
    alone, both = plain.memory_report(), llama.llm("same").memory_report()
    assert both == {name: 2 * size for name, size in alone.items()}
    memory = kv_memory(plain, 40, 1)
    blocks = [llama.llm(kind, kv_memory=memory).stats().blocks for kind in ("off", "ngram", "same")]
    assert blocks == [40, 40, 19]
    with pytest.raises(UsageError, match=r"kv_memory .* holds 64 tokens; expected room for one"):
        llama.llm("same", kv_memory=kv_memory(plain, 10, 1))


def test_draft_models_that_do_not_fit(llama: Checkpoints, tmp_path: Path) -> None:
    def refused(**flags: Any) -> str:
        with pytest.raises(UsageError) as caught:
            LLM(llama.target, threads=1, speculative="draft", **flags)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    wider = tmp_path / "wider"
    save_tiny(wider, "Llama", vocab_size=VOCAB + 1)
    tiny_tokenizer(wider, VOCAB + 1)
    message = refused(speculative_model=str(wider))
    assert "has another vocabulary: id 199 is 'w196' in it and no token in the model" in message
    narrow = tmp_path / "narrow"
    save_tiny(narrow, "Llama", vocab_size=VOCAB - 9)
    assert "scores 190 ids, but the model's vocabulary has 199" in refused(
        speculative_model=str(narrow)
    )
    assert "needs a draft model; expected speculative_model" in refused()
    assert "speculative_boundary_reduction 'rsvv' is not one of" in refused(
        speculative_model=llama.near, speculative_boundary_reduction="rsvv"
    )
    heads = refused(speculative_model=llama.near, tp=7)
    assert "7" in heads


def test_a_draft_model_with_a_shorter_context(
    llama: Checkpoints, plain: LLM, tmp_path: Path
) -> None:
    """Drafts end where it cannot follow any more; the answer does not."""
    save_tiny(tmp_path, "Llama", max_position_embeddings=48)
    llm = LLM(llama.target, threads=1, speculative="draft", speculative_model=str(tmp_path))
    params = replace(GREEDY, max_tokens=100)
    wanted = plain.generate([LOOP], params)[0].token_ids
    assert llm.generate([LOOP], params)[0].token_ids == wanted
    stats = llm.stats()
    assert 0 < stats.drafted == stats.accepted <= 48 - len(LOOP)


@pytest.mark.smollm2
def test_smollm2_answers_the_same_with_ngrams() -> None:
    path = smollm2_path()
    prompts = [
        "The sun and the moon and the sun and the moon and the sun",
        "Count: one two three four five six seven",
        "Write a list.\n- a red apple\n- a green apple\n- a red apple\n- a green",
    ]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    found = {}
    for kind in ("off", "ngram"):
        llm = LLM(path, threads=1, dtype="float32", speculative=kind)
        found[kind] = [said(output) for output in llm.generate(prompts, params)]
        accepted = llm.stats().accepted
    assert found["ngram"] == found["off"]
    assert accepted > 10
