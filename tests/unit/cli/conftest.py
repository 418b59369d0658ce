"""A stand-in for the engine, and ways to run the command line in this process or another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from layline.cli import session
from layline.cli.main import main
from layline.engine.output import GenerationOutput, StreamChunk, Timing, Usage
from layline.engine.statistics import SchedulerStats
from layline.errors import LaylineError, PromptError


@dataclass
class FakeLLM:
    """Streams fixed pieces and remembers what it was asked. Not a model, only its interface."""

    pieces: list[str] = field(default_factory=lambda: ["Hel", "", "lo", " there"])
    context: int = 1000
    template: object | None = "template"
    finish_reason: str = "stop"
    on_chunk: Callable[[int], None] = lambda index: None
    requests: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    closed: int = 0
    finished: int = 0
    ended: int = 0
    peaks: list[int] = field(default_factory=list)
    lost: Callable[[], LaylineError | None] = lambda: None

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended += 1

    def failure(self) -> LaylineError | None:
        return self.lost()

    def worker_peaks(self) -> list[int]:
        return self.peaks

    def stats(self) -> SchedulerStats:
        return SchedulerStats(drafted=9, accepted=5)

    @property
    def tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(chat_template=self.template)

    def stream(self, prompt: str, params: Any = None) -> Iterator[Any]:
        return self.run(prompt, prompt, params)

    def stream_chat(self, messages: list[dict[str, str]], params: Any = None) -> Iterator[Any]:
        # A copy: the caller goes on changing its list.
        text = "".join(message["content"] for message in messages)
        return self.run([dict(message) for message in messages], text, params)

    def run(self, request: Any, text: str, params: Any) -> Iterator[Any]:
        if len(text) > self.context:
            raise PromptError(f"the prompt has {len(text)} tokens; expected at most {self.context}")
        self.requests.append(request)
        self.params.append(params)
        try:
            for index, piece in enumerate(self.pieces):
                self.on_chunk(index)
                last = index == len(self.pieces) - 1
                yield StreamChunk(
                    piece,
                    [index],
                    self.finish_reason if last else None,
                    self.output() if last else None,
                )
            self.finished += 1
        finally:
            self.closed += 1

    def output(self) -> GenerationOutput:
        count = len(self.pieces)
        return GenerationOutput(
            text="".join(self.pieces),
            token_ids=list(range(count)),
            prompt_token_ids=[7, 8],
            finish_reason=self.finish_reason,
            usage=Usage(2, count),
            logprobs=None,
            timing=Timing(ttft_s=0.5, decode_s=1.5),
        )


@dataclass
class Loader:
    """Replaces ``session.open_llm``: hands out the fake, or raises what it was told to."""

    llm: FakeLLM = field(default_factory=FakeLLM)
    error: BaseException | None = None
    opened: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, model: str, run: Any) -> FakeLLM:
        self.opened.append((model, run.keywords()))
        if self.error is not None:
            raise self.error
        return self.llm


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    """The command line opens a fake model."""
    made = Loader()
    monkeypatch.setattr(session, "open_llm", made)
    return made


@dataclass
class Result:
    """What a command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def layline(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the command line in this process."""

    def call(*arguments: str) -> Result:
        status = main(arguments)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call
