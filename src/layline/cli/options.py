"""Options that several commands share, as dataclasses that ``grammar.grouped`` unfolds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layline.cli.values import choice, integer, number, size
from layline.config import DEVICES, DTYPES, MAX_THREADS

if TYPE_CHECKING:
    from layline.sampling import SamplingParams

MODEL_HELP = "a pulled name, a safetensors directory, a .gguf file or config:DIR"


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """What a model computes on; the names are ``LLM``'s keywords."""

    device: Annotated[
        str, typer.Option("--device", parser=choice("--device", DEVICES), help="cpu or cuda")
    ] = "cpu"
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            parser=choice("--dtype", DTYPES),
            help="auto (quantised files stay quantised), float32, bfloat16 or float16",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            parser=integer("--threads", minimum=1, maximum=MAX_THREADS),
            help="compute threads on the CPU; all cores when not given",
        ),
    ] = None

    def keywords(self) -> dict[str, Any]:
        """The keywords for ``LLM``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RunOptions(ComputeOptions):
    """Where and how a model runs; the names are ``LLM``'s keywords."""

    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            parser=integer("--max-model-len", minimum=1),
            help="longest prompt and answer together, in tokens",
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        typer.Option(
            "--kv-memory",
            parser=size("--kv-memory"),
            help="memory for the key-value cache, such as 512M or 2G",
        ),
    ] = None
    max_running: Annotated[
        int | None,
        typer.Option(
            "--max-running",
            parser=integer("--max-running", minimum=1),
            help="most requests decoded together",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. Ranges are checked by ``SamplingParams``."""

    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            parser=integer("--max-tokens", minimum=1),
            help="most tokens to generate",
        ),
    ] = 256
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", parser=number("--temperature"), help="0 is greedy: no draw at all"
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option("--top-p", parser=number("--top-p"), help="keep this share of probability"),
    ] = 1.0
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k",
            parser=integer("--top-k", minimum=-1),
            help="keep the k likeliest tokens; 0 keeps all",
        ),
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            parser=number("--min-p"),
            help="drop tokens below this share of the likeliest one",
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", parser=integer("--seed", minimum=0), help="makes the draws repeatable"
        ),
    ] = None
    stop: Annotated[
        list[str],
        typer.Option("--stop", help="end before this text; may be given several times"),
    ] = field(default_factory=list)

    def params(self) -> SamplingParams:
        """The ``SamplingParams`` for one request. Raises SamplingError."""
        from layline.sampling import SamplingParams

        values = asdict(self)
        return SamplingParams(**{**values, "stop": tuple(values["stop"])})


@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions(SamplingOptions):
    """Sampling for a conversation, where greedy answers of small models repeat themselves."""

    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            parser=integer("--max-tokens", minimum=1),
            help="most tokens in one answer",
        ),
    ] = 512
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", parser=number("--temperature"), help="0 is greedy: no draw at all"
        ),
    ] = 0.7
    top_p: Annotated[
        float,
        typer.Option("--top-p", parser=number("--top-p"), help="keep this share of probability"),
    ] = 0.95
