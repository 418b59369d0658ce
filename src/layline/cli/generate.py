"""``layline generate``: one prompt, one answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from layline.cli import session
from layline.cli.input import require_stdin, stdin_bytes, utf8
from layline.cli.options import MODEL_HELP, RunOptions, SamplingOptions
from layline.cli.output import note, size_text, write, write_json
from layline.cli.structured import StructuredOptions
from layline.config import DEFAULT_MODEL
from layline.engine.memory import peak_bytes
from layline.errors import RunError

if TYPE_CHECKING:
    from layline.engine.llm import LLM
    from layline.engine.output import GenerationOutput, StreamChunk
    from layline.engine.statistics import SchedulerStats
    from layline.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What ``generate`` prints, and where."""

    model: Annotated[str, typer.Option("--model", metavar="MODEL", help=MODEL_HELP)] = DEFAULT_MODEL
    chat: Annotated[
        bool, typer.Option("--chat", help="treat PROMPT as a user's message in the chat template")
    ] = False
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="print text as it is generated")
    ] = True
    json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of the text")
    ] = False
    stats: Annotated[
        bool, typer.Option("--stats", help="print speed and peak memory on stderr")
    ] = False


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="the text to continue; - reads it from stdin")
    ],
    output: OutputOptions,
    sampling: SamplingOptions,
    structured: StructuredOptions,
    run: RunOptions,
) -> int:
    """Generate text after PROMPT. Greedy unless --temperature says otherwise."""
    status = session.follow()
    if status is not None:
        return status
    text = prompt_text(prompt)
    params = sampling.params(structured.chosen())
    with session.open_llm(output.model, run) as llm:
        chunks = answer(llm, text, params, chat=output.chat)
        result = finish(chunks, show=output.stream and not output.json)
        if output.json:
            write_json(result.as_dict())
        elif not output.stream:
            write(result.text + "\n")
        if output.stats:
            drafts = llm.stats() if run.speculative != "off" else None
            note(stats_line(result, llm.worker_peaks(), drafts))
    return 0


def prompt_text(prompt: str) -> str:
    """The prompt itself, or stdin for ``-``. Raises PromptError when it is not UTF-8."""
    if prompt == "-":
        require_stdin("a prompt there, such as: echo hello | layline generate -")
        data = stdin_bytes().read()
        # Shells and editors end a file with a newline that nobody meant as part of the prompt.
        data = data.removesuffix(b"\n")
    else:
        data = prompt.encode("utf-8", errors="surrogateescape")
    return utf8(data, "PROMPT")


def answer(llm: LLM, text: str, params: SamplingParams, *, chat: bool) -> Iterator[StreamChunk]:
    """The stream of chunks that answers ``text``."""
    if chat:
        return llm.stream_chat([{"role": "user", "content": text}], params)
    return llm.stream(text, params)


def finish(chunks: Iterator[StreamChunk], *, show: bool) -> GenerationOutput:
    """Run the stream to its end, printing text when ``show``. Returns the whole output."""
    result: GenerationOutput | None = None
    last = ""
    for chunk in chunks:
        if show and chunk.text:
            write(chunk.text)
            last = chunk.text
        if chunk.output is not None:
            result = chunk.output
    if result is None:
        raise RunError("the engine ended the stream without a result; expected a last chunk")
    if show and not last.endswith("\n"):
        write("\n")
    return result


def stats_line(
    result: GenerationOutput, worker_peaks: Sequence[int], drafts: SchedulerStats | None = None
) -> str:
    """Speed of one answer and memory of this process and the workers in a line.

    ``drafts`` are the numbers of a run with speculation.
    """
    usage, timing = result.usage, result.timing
    decoded = usage.completion_tokens - 1
    parts = [f"{usage.prompt_tokens} prompt tokens, first token after {timing.ttft_s:.2f} s"]
    if decoded > 0 and timing.decode_s > 0:
        parts.append(f"{usage.completion_tokens} tokens, {decoded / timing.decode_s:.1f} tokens/s")
    if drafts is not None:
        parts.append(f"{drafts.accepted} of {drafts.drafted} drafts accepted")
    memory = f"peak memory {size_text(peak_bytes() + sum(worker_peaks))}"
    if worker_peaks:
        memory += f", the sum over {len(worker_peaks)} ranks and the process that drives them"
    parts.append(memory)
    return " · ".join(parts)
