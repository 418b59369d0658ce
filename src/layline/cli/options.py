"""Options that several commands share, as dataclasses that ``grammar.grouped`` unfolds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layline.cli.values import choice, integer, number, size
from layline.config import DEFAULT_MODEL, DEVICES, DTYPES, MAX_THREADS, EngineConfig
from layline.errors import SamplingError

if TYPE_CHECKING:
    from layline.sampling import SamplingParams

# What SamplingParams takes.
SEED_LIMIT = 1 << 63
MODEL_HELP = "a pulled name, a safetensors directory, a .gguf file or config:DIR"
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default=DEFAULT_MODEL),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="the same as MODEL", show_default=DEFAULT_MODEL),
]


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """What a model computes on; the names are ``LLM``'s keywords."""

    device: Annotated[
        str,
        typer.Option(
            "--device",
            parser=choice("--device", DEVICES),
            metavar=f"[{'|'.join(DEVICES)}]",
            help="what computes",
        ),
    ] = "cpu"
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            parser=choice("--dtype", DTYPES),
            metavar=f"[{'|'.join(DTYPES)}]",
            help="type of weights and arithmetic; auto leaves quantised files quantised",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            parser=integer("--threads", minimum=1, maximum=MAX_THREADS),
            metavar="INT",
            help="compute threads on the CPU",
            show_default="all usable cores",
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
            # A prompt of one token and one token after it.
            parser=integer("--max-model-len", minimum=2),
            metavar="INT",
            help="longest prompt and answer together, in tokens",
            show_default="the model's context",
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        typer.Option(
            "--kv-memory",
            parser=size("--kv-memory"),
            metavar="SIZE",
            help="most memory for the key-value cache, such as 512M or 2G",
            show_default="half of memory",
        ),
    ] = None
    max_running: Annotated[
        int,
        typer.Option(
            "--max-running",
            parser=integer("--max-running", minimum=1),
            metavar="INT",
            help="most requests decoded together",
        ),
    ] = EngineConfig.max_running


MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        parser=integer("--max-tokens", minimum=1),
        metavar="INT",
        help="most tokens to generate",
    ),
]

Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        parser=number("--temperature", "0 to 100"),
        metavar="FLOAT",
        help="0 is greedy: no draw at all",
    ),
]

TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        parser=number("--top-p", "above 0 and up to 1"),
        metavar="FLOAT",
        help="keep this share of probability",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. Ranges are checked by ``SamplingParams``."""

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k",
            parser=integer("--top-k", minimum=-1),
            metavar="INT",
            help="keep the k likeliest tokens; 0 keeps all",
        ),
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            parser=number("--min-p", "0 to 1"),
            metavar="FLOAT",
            help="drop tokens below this share of the likeliest one",
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            parser=integer("--seed", minimum=-SEED_LIMIT, maximum=SEED_LIMIT - 1),
            metavar="INT",
            help="makes the draws repeatable",
            show_default="a fresh one",
        ),
    ] = None
    stop: Annotated[
        list[str],
        typer.Option(
            "--stop", metavar="TEXT", help="end before this text; may be given several times"
        ),
    ] = field(default_factory=list)

    def params(self) -> SamplingParams:
        """The ``SamplingParams`` for one request. Raises SamplingError."""
        from layline.sampling import SamplingParams

        values = asdict(self)
        try:
            return SamplingParams(**{**values, "stop": tuple(values["stop"])})
        except SamplingError as error:
            raise SamplingError(as_flag(str(error), values)) from None


@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions(SamplingOptions):
    """Sampling for a conversation, where greedy answers of small models repeat themselves."""

    max_tokens: MaxTokens = 512
    temperature: Temperature = 0.7
    top_p: TopP = 0.95


def as_flag(message: str, values: dict[str, Any]) -> str:
    """``message`` about the field it begins with, as one about that field's flag.

    ``temperature -1.0 is ...`` becomes ``--temperature -1 is ...``.
    """
    name, _, rest = message.partition(" ")
    if name not in values:
        return message
    kept = repr(values[name])
    return f"--{name.replace('_', '-')} " + (
        kept.removesuffix(".0") + rest.removeprefix(kept) if rest.startswith(kept) else rest
    )
