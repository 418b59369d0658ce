"""Options that several commands share, as dataclasses that ``grammar.grouped`` unfolds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layline.boundary.policy import POLICIES
from layline.cli.values import choice, integer, number, number_list, size, trace_path
from layline.config import (
    AUTO_SPLITS,
    CP_LAYOUTS,
    DEFAULT_MODEL,
    DEVICES,
    DP_PADDINGS,
    DTYPES,
    KV_DTYPES,
    MAX_DEGREE,
    MAX_LAYERS,
    MAX_ORDINAL,
    MAX_SPECULATIVE_TOKENS,
    MAX_THREADS,
    SPECULATIVE,
    EngineConfig,
)
from layline.errors import SamplingError

if TYPE_CHECKING:
    from layline.grammar import Grammar
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


def integer_option(
    flag: str,
    meaning: str,
    *,
    minimum: int = 1,
    maximum: int | None = None,
    shown: str | bool = True,
) -> Any:
    """The option of a whole number; ``shown`` stands for its default in the help."""
    parser = integer(flag, minimum=minimum, maximum=maximum)
    return typer.Option(flag, parser=parser, metavar="INT", help=meaning, show_default=shown)


def degree(flag: str, meaning: str, *, shown: str | bool = True) -> Any:
    """The option of a mesh degree."""
    return integer_option(flag, meaning, maximum=MAX_DEGREE, shown=shown)


def trace_option(meaning: str) -> Any:
    """The option of a timeline's file."""
    return typer.Option(
        "--trace", parser=trace_path, metavar="FILE.json", help=meaning, show_default="none"
    )


def choice_option(flag: str, choices: tuple[str, ...], meaning: str) -> Any:
    """The option of one of a closed set of words."""
    parser = choice(flag, choices)
    return typer.Option(flag, parser=parser, metavar=f"[{'|'.join(choices)}]", help=meaning)


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
        integer_option(
            "--threads",
            "compute threads on the CPU, divided over ranks",
            maximum=MAX_THREADS,
            shown="all usable cores",
        ),
    ] = None

    def keywords(self) -> dict[str, Any]:
        """The keywords for ``LLM``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """How a model is divided over ranks; the names are ``LLM``'s keywords."""

    tp: Annotated[int, degree("--tp", "ranks that share the model; each is a process")] = 1
    attn_dp: Annotated[int, degree("--attn-dp", "parts of tp that attend to other requests")] = 1
    attn_cp: Annotated[int, degree("--attn-cp", "parts of tp that share a prompt's tokens")] = 1
    ep: Annotated[int, degree("--ep", "parts of tp that hold other experts")] = 1
    dense_tp: Annotated[
        int | None,
        integer_option(
            "--dense-tp",
            "ranks that share a dense FFN: tp, or 1 for a whole one on each",
            maximum=MAX_DEGREE,
            shown="tp",
        ),
    ] = None
    boundary_reduction: Annotated[
        str, choice_option("--boundary-reduction", POLICIES, "how FFN outputs may be reduced")
    ] = EngineConfig.boundary_reduction
    sequence_parallel: Annotated[
        bool,
        typer.Option("--sequence-parallel", help="keep rows of prompts divided between stages"),
    ] = False
    input_scattered: Annotated[
        bool,
        typer.Option("--input-scattered", help="divide rows before each attention's input"),
    ] = False
    quantised_all_reduce: Annotated[
        bool,
        typer.Option(
            "--quantised-all-reduce",
            help="send the sums between stages as int8 rows while prompts are prefilled",
        ),
    ] = False
    dp_padding: Annotated[
        str,
        choice_option("--dp-padding", DP_PADDINGS, "how attention DP ranks share a buffer"),
    ] = EngineConfig.dp_padding
    cp_layout: Annotated[
        str,
        choice_option("--cp-layout", CP_LAYOUTS, "how attention CP divides a prompt"),
    ] = EngineConfig.cp_layout
    pp_stages: Annotated[
        int | None,
        integer_option(
            "--pp-stages",
            "pipeline stages that the layers are cut into",
            maximum=MAX_DEGREE,
            shown="1",
        ),
    ] = None
    pp_splits: Annotated[
        # Typer would take a tuple for an option of several values.
        str | None,
        typer.Option(
            "--pp-splits",
            parser=number_list("--pp-splits", minimum=1, maximum=MAX_LAYERS, word=AUTO_SPLITS),
            metavar="auto|C1,C2,..",
            help="the layers that later stages begin with, or auto: by cost",
            show_default="even",
        ),
    ] = None
    pp_devices: Annotated[
        str | None,
        typer.Option(
            "--pp-devices",
            parser=number_list("--pp-devices", minimum=0, maximum=MAX_ORDINAL),
            metavar="D0,D1,..",
            help="the device of each stage",
            show_default="on the CPU 0,1,..; on CUDA 0,0,..",
        ),
    ] = None
    pp_processes: Annotated[
        int, degree("--pp-processes", "processes that pipeline stages are divided over")
    ] = EngineConfig.pp_processes

    def given(self) -> dict[str, Any]:
        """The keywords for ``LLM`` that differ from a single rank's."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Who proposes tokens ahead; the names are ``LLM``'s keywords."""

    speculative: Annotated[
        str,
        choice_option("--speculative", SPECULATIVE, "who guesses tokens that a step verifies"),
    ] = EngineConfig.speculative
    speculative_model: Annotated[
        str | None,
        typer.Option(
            "--speculative-model",
            metavar="MODEL",
            help="the draft model that guesses; its vocabulary is the model's",
            show_default="none",
        ),
    ] = None
    speculative_tokens: Annotated[
        int,
        integer_option(
            "--speculative-tokens",
            "most guesses of a request in a step",
            maximum=MAX_SPECULATIVE_TOKENS,
        ),
    ] = EngineConfig.speculative_tokens
    speculative_boundary_reduction: Annotated[
        str | None,
        typer.Option(
            "--speculative-boundary-reduction",
            parser=choice("--speculative-boundary-reduction", POLICIES),
            metavar=f"[{'|'.join(POLICIES)}]",
            help="how the draft model's FFN outputs may be reduced",
            show_default="as --boundary-reduction",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(SpeculationOptions, MeshOptions, ComputeOptions):
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
            help="most memory for a rank's key-value cache, such as 512M or 2G",
            show_default="half of memory",
        ),
    ] = None
    kv_dtype: Annotated[
        str,
        choice_option(
            "--kv-dtype",
            KV_DTYPES,
            "type of cached keys and values; auto is that of the run",
        ),
    ] = EngineConfig.kv_dtype
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="share the cached beginnings of prompts between requests",
        ),
    ] = EngineConfig.prefix_cache
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="plan and launch a step while the one before it runs",
            show_default="where another device or process runs it",
        ),
    ] = EngineConfig.overlap
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="the same bits for a request whatever runs beside it; slower, cpu only",
        ),
    ] = EngineConfig.batch_invariant
    max_running: Annotated[
        int,
        integer_option(
            "--max-running", "most requests decoded together, on each attention DP rank"
        ),
    ] = EngineConfig.max_running


MaxTokens = Annotated[
    int,
    integer_option("--max-tokens", "most tokens to generate"),
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

    def params(self, grammar: Grammar | None = None) -> SamplingParams:
        """The ``SamplingParams`` for one request. Raises SamplingError."""
        from layline.sampling import SamplingParams

        values = asdict(self)
        try:
            return SamplingParams(**{**values, "stop": tuple(values["stop"])}, grammar=grammar)
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
