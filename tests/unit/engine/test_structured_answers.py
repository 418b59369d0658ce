"""Answers that follow a grammar, through the whole engine and on a model that knows nothing."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from layline import LLM, Grammar, SamplingParams, errors
from layline.engine.answers import Submission
from layline.engine.async_engine import AsyncEngine
from layline.engine.scheduler import BLOCK_SIZE
from layline.errors import RunError, SamplingError, UsageError
from support.writer import END, save_writer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ä", "b c", '"']}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_schema(PERSON),
    Grammar.regex(r"[a-z]{3}-\d{2}"),
    Grammar.choice(["red", "green", "blue"]),
    Grammar.lark('start: "<" WORD ">"\nWORD: /[A-Za-z]{1,6}/'),
]
PROMPTS = ["The harbour", "In 2024", "Ein schöner Tag", "x"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("writer")
    save_writer(path)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), threads=1)


def params(grammar: Grammar, seed: int | None = 0, **more: Any) -> SamplingParams:
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=300, grammar=grammar, **more
    )


def check(grammar: Grammar, text: str) -> None:
    if grammar.kind == "json_schema":
        jsonschema_rs.validate(json.loads(grammar.text), json.loads(text))
    elif grammar.kind == "lark":
        assert re.fullmatch("<[A-Za-z]{1,6}>", text)
    else:
        assert re.fullmatch(grammar.text, text)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_answers_follow_their_grammars(llm: LLM, seed: int | None) -> None:
    given = [params(grammar, seed) for grammar in GRAMMARS]
    together = llm.generate(PROMPTS, given)
    for grammar, output in zip(GRAMMARS, together, strict=True):
        check(grammar, output.text)
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == END
    alone = [llm.generate(p, one)[0] for p, one in zip(PROMPTS, given, strict=True)]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]


def test_the_length_ends_an_answer_in_its_middle(llm: LLM) -> None:
    whole = llm.generate("x", params(GRAMMARS[0]))[0]
    cut = llm.generate("x", replace(params(GRAMMARS[0]), max_tokens=5))[0]
    assert cut.finish_reason == "length"
    assert cut.token_ids == whole.token_ids[:5]


def test_stop_strings_and_stop_ids_cut_the_text(llm: LLM) -> None:
    whole = llm.generate("x", params(GRAMMARS[1]))[0]
    stopped = llm.generate("x", params(GRAMMARS[1], stop=("-",)))[0]
    assert (stopped.text, stopped.finish_reason) == (whole.text.split("-")[0], "stop")
    by_id = llm.generate("x", params(GRAMMARS[1], stop_token_ids=(whole.token_ids[1],)))[0]
    assert by_id.token_ids == whole.token_ids[:2]


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 40}])
def test_a_complete_text_ends_whatever_was_asked(llm: LLM, more: dict[str, Any]) -> None:
    output = llm.generate("x", params(Grammar.regex("[ab]{12}"), **more))[0]
    assert re.fullmatch("[ab]{12}", output.text)
    assert output.finish_reason == "stop"


def test_min_tokens_and_ignore_eos_go_on_while_they_can(llm: LLM) -> None:
    short = llm.generate("x", params(Grammar.regex("[a-z]*"), seed=None, logit_bias={END: 90.0}))[0]
    assert (short.text, short.finish_reason) == ("", "stop")
    later = llm.generate(
        "x", params(Grammar.regex("[a-z]*"), seed=None, logit_bias={END: 90.0}, min_tokens=7)
    )[0]
    assert len(later.token_ids) == 8
    never = llm.generate(
        "x",
        replace(params(Grammar.regex("[a-z]*"), ignore_eos=True), max_tokens=30),
    )[0]
    assert (len(never.token_ids), never.finish_reason) == (30, "length")


def test_preemption_and_shared_prefixes_change_nothing(directory: Path, llm: LLM) -> None:
    schema = {**PERSON, "required": ["name", "age", "tags"]}
    given = [replace(params(Grammar.json_schema(schema), seed), max_tokens=70) for seed in range(6)]
    prompts = ["In 2024 they carried 1234567 people."] * 6
    wanted = llm.generate(prompts, given)
    slot = 3 * 2 * 2 * 8 * 4
    tight = LLM(
        str(directory),
        threads=1,
        max_model_len=7 * BLOCK_SIZE,
        kv_memory=8 * BLOCK_SIZE * slot,
        prefill_tokens=7,
    )
    found = tight.generate(prompts, given)
    assert tight.engine.stats().preemptions > 0
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for one in found:
        if one.finish_reason == "stop":
            jsonschema_rs.validate(schema, json.loads(one.text))


def test_streams_of_structured_answers(llm: LLM) -> None:
    whole = llm.generate("x", params(GRAMMARS[0]))[0]
    with llm.stream("x", params(GRAMMARS[0])) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text


@pytest.mark.parametrize(
    ("grammar", "told"),
    [(Grammar.regex("["), "invalid regex"), (Grammar.json_schema({"not": {}}), "not")],
)
def test_a_grammar_that_cannot_be_followed_queues_nothing(
    llm: LLM, grammar: Grammar, told: str
) -> None:
    with pytest.raises(SamplingError, match=told):
        llm.generate(["x", "y"], [params(GRAMMARS[0]), params(grammar)])
    assert not llm.engine.has_work
    with pytest.raises(SamplingError, match="grammar is dict"):
        SamplingParams(grammar={"kind": "regex"})  # type: ignore[arg-type]


# Complete for the compiler's first look, and more than it may hold a few tokens later.
TOO_COMPLEX = Grammar.regex("a{1000000000}")


def test_a_grammar_that_becomes_too_complex_is_an_error(llm: LLM) -> None:
    with pytest.raises(RunError, match="no token to sample"):
        llm.generate("x", params(TOO_COMPLEX))
    assert not llm.engine.has_work
    check(GRAMMARS[2], llm.generate("x", params(GRAMMARS[2]))[0].text)


@pytest.mark.skipif(
    not hasattr(errors, "RequestError"), reason="a failed row still fails the whole step"
)
def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(llm: LLM) -> None:
    ids = llm.tokenizer.encode("x")
    engine = AsyncEngine(llm, max_open=8)

    async def ask() -> list[Any]:
        bad = Submission(prompt_ids=ids, params=params(TOO_COMPLEX))
        good = Submission(prompt_ids=ids, params=params(GRAMMARS[0]))
        return await asyncio.gather(
            texts(engine, [bad]), texts(engine, [good]), return_exceptions=True
        )

    try:
        failed, (text,) = asyncio.run(ask())
    finally:
        engine.close()
    assert isinstance(failed, RunError)
    assert engine.failure is None
    check(GRAMMARS[0], text)


def test_without_the_library(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"llguidance.*layline\[structured\]"):
        llm.generate("x", params(GRAMMARS[0]))


async def texts(engine: AsyncEngine, given: list[Submission]) -> list[str]:
    found = [""] * len(given)
    async with await engine.submit(given) as answers:
        async for chunk in answers:
            found[chunk.index] += chunk.text
    return found


def test_the_asynchronous_engine(llm: LLM) -> None:
    ids = llm.tokenizer.encode("x")
    wanted = llm.generate([ids] * 4, [params(grammar) for grammar in GRAMMARS])
    engine = AsyncEngine(llm, max_open=8)

    async def ask() -> None:
        good = [Submission(prompt_ids=ids, params=params(grammar)) for grammar in GRAMMARS]
        bad = Submission(prompt_ids=ids, params=params(Grammar.regex("[")))
        with pytest.raises(SamplingError):
            await texts(engine, [*good, bad])
        assert await texts(engine, good) == [output.text for output in wanted]
        # What was refused, or given up while it was compiled, counts no more.
        waiting = asyncio.ensure_future(texts(engine, good))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for _ in range(3):
            await texts(engine, good + good)

    try:
        asyncio.run(ask())
    finally:
        engine.close()
    assert engine.load.waiting == engine.load.running == 0


def test_a_grammar_that_takes_too_long_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from layline.engine import compiling

    over = threading.Event()
    engine = AsyncEngine(llm, max_open=8)
    monkeypatch.setattr(compiling, "COMPILE_S", 0.05)
    monkeypatch.setattr(engine._compiling, "_compile", lambda grammar: over.wait(20))
    submission = Submission(prompt_ids=llm.tokenizer.encode("x"), params=params(Grammar.regex("a")))
    try:
        with pytest.raises(SamplingError, match="not compiled within"):
            asyncio.run(texts(engine, [submission]))
        assert engine.load.waiting == 0
    finally:
        over.set()
        engine.close()
