"""``layline bench latency``: speed of one model, start-up and memory, beside other engines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from layline.cli.options import (
    ComputeOptions,
    MeshOptions,
    ModelArgument,
    ModelOption,
    integer_option,
)
from layline.cli.output import note, write_json, write_line
from layline.cli.session import chosen_model
from layline.cli.values import choice_list, integer_list
from layline.config import DEFAULT_MODEL

COMPETITORS = ("transformers", "llama.cpp")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """What to measure."""

    prompt_tokens: Annotated[
        int,
        integer_option("--prompt-tokens", "length of the prompt for prefill"),
    ] = 512
    new_tokens: Annotated[
        int,
        integer_option("--new-tokens", "tokens decoded per prompt"),
    ] = 64
    batch: Annotated[
        str,
        typer.Option(
            "--batch", metavar="INT,...", help="batch sizes to decode, separated by commas"
        ),
    ] = "1,8"
    repeats: Annotated[
        int,
        integer_option("--repeats", "how often; medians are shown with least and greatest"),
    ] = 5
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="TEXT,...",
            help="engines to measure in turn: transformers,llama.cpp",
            show_default="none",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False


def latency(
    options: LatencyOptions,
    compute: ComputeOptions,
    mesh: MeshOptions,
    argument: ModelArgument = None,
    model: ModelOption = None,
) -> None:
    """Prefill and decode speed, time to the first token from process start, peak memory."""
    from layline.cli.bench.client import missing_engines
    from layline.cli.bench.facts import facts_of
    from layline.cli.bench.measure import Settings, measure
    from layline.cli.bench.report import as_data, as_table
    from layline.weights.cache import find_model

    batches = integer_list("--batch", minimum=1)(options.batch)
    against: tuple[str, ...] = ()
    if options.against is not None:
        against = choice_list("--against", COMPETITORS)(options.against)
    name = chosen_model(argument, model, DEFAULT_MODEL)
    given = name.startswith("config:") or Path(name).exists()
    path = name if given else str(find_model(name))
    facts = facts_of(name)
    settings = Settings(
        name=name,
        path=path,
        has_tokenizer=facts.has_tokenizer,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        batches=batches,
        repeats=options.repeats,
        compute=compute.keywords(),
        mesh=mesh.given(),
    )
    settings.check(facts.context)
    missing = missing_engines(against, path)
    for engine, why in missing.items():
        note(f"layline: going on without {engine}: {why}")
    present = ["layline", *(engine for engine in against if engine not in missing)]
    samples, failed = measure(settings, present, progress)
    data = as_data(settings, samples, missing | failed)
    if options.json:
        write_json(data)
    else:
        write_line(as_table(data))


def progress(text: str) -> None:
    """One line a step, on a terminal only: a log has no use for it."""
    if sys.stderr.isatty():
        note(text)
