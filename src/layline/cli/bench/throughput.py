"""``layline bench throughput``: many requests at once, what the engine adds, what sharing saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from layline.cli.bench.latency import progress
from layline.cli.options import ComputeOptions, ModelArgument, ModelOption, integer_option
from layline.cli.output import note, write_json, write_line
from layline.cli.session import chosen_model
from layline.cli.values import choice, integer_list
from layline.config import DEFAULT_MODEL


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """What to measure."""

    batch: Annotated[
        str,
        typer.Option(
            "--batch", metavar="INT,...", help="requests that decode together, separated by commas"
        ),
    ] = "1,8,16,64"
    new_tokens: Annotated[
        int,
        integer_option("--new-tokens", "decode steps of each batch", minimum=2),
    ] = 32
    prefix_tokens: Annotated[
        int,
        integer_option("--prefix-tokens", "length of the prompt that is cached"),
    ] = 500
    repeats: Annotated[
        int,
        integer_option("--repeats", "how often; medians are shown"),
    ] = 5
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            parser=choice("--against", ("llama.cpp",)),
            metavar="[llama.cpp]",
            help="an engine to decode the same batches, in turn",
            show_default="none",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False


def throughput(
    options: ThroughputOptions,
    compute: ComputeOptions,
    argument: ModelArgument = None,
    model: ModelOption = None,
) -> None:
    """Tokens per second by batch, host time of a step beside its compute, cached prefixes."""
    from pathlib import Path

    from layline.cli.bench.client import missing_engines
    from layline.cli.bench.facts import facts_of
    from layline.cli.bench.throughput_run import Load, as_table, measure_throughput
    from layline.weights.cache import find_model

    batches = integer_list("--batch", minimum=1)(options.batch)
    name = chosen_model(argument, model, DEFAULT_MODEL)
    rival = options.against
    path = name
    if rival is not None:
        given = name.startswith("config:") or Path(name).exists()
        path = name if given else str(find_model(name))
        for engine, why in missing_engines([rival], path).items():
            note(f"layline: going on without {engine}: {why}")
            rival = None
    load = Load(
        model=name,
        path=path,
        batches=batches,
        new_tokens=options.new_tokens,
        prefix_tokens=options.prefix_tokens,
        repeats=options.repeats,
        compute=compute.keywords(),
        rival=rival,
    )
    load.check(facts_of(name).context)
    data = measure_throughput(load, progress)
    if options.json:
        write_json(data)
    else:
        write_line(as_table(data))
