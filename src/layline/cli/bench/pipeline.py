"""``layline bench pipeline``: what pipeline stages in processes of their own gain and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from layline.cli.bench.latency import progress
from layline.cli.options import (
    ModelArgument,
    ModelOption,
    choice_option,
    integer_option,
    trace_option,
)
from layline.cli.output import write_json, write_line, write_timeline
from layline.cli.session import chosen_model
from layline.config import DEFAULT_MODEL, DTYPES


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What to measure."""

    pp_stages: Annotated[
        int, integer_option("--pp-stages", "stages, each a process with one thread", minimum=2)
    ] = 2
    pp_splits: Annotated[
        str | None,
        typer.Option(
            "--pp-splits", metavar="INT,...|auto", help="the cuts", show_default="even ones"
        ),
    ] = None
    batch: Annotated[
        int, integer_option("--batch", "requests of one stage, and of each microbatch")
    ] = 8
    new_tokens: Annotated[
        int, integer_option("--new-tokens", "tokens of each request that are timed")
    ] = 32
    chunks: Annotated[int, integer_option("--chunks", "chunks of the prompt", minimum=2)] = 8
    chunk_tokens: Annotated[int, integer_option("--chunk-tokens", "tokens of a chunk")] = 64
    repeats: Annotated[int, integer_option("--repeats", "how often; medians are shown")] = 5
    dtype: Annotated[str, choice_option("--dtype", DTYPES, "type of weights and arithmetic")] = (
        "auto"
    )
    trace: Annotated[
        str | None, trace_option("write a timeline of steps, transfers and waits, for Perfetto")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False


def pipeline(
    options: PipelineOptions, argument: ModelArgument = None, model: ModelOption = None
) -> None:
    """Microbatches, single steps and chunks over stages on the CPU, beside one stage."""
    from layline.cli.bench.facts import facts_of
    from layline.cli.bench.pipeline_run import PipelineLoad, as_table, measure_pipeline
    from layline.pipeline.trace import Timeline

    name = chosen_model(argument, model, DEFAULT_MODEL)
    load = PipelineLoad(
        model=name,
        stages=options.pp_stages,
        splits=options.pp_splits,
        batch=options.batch,
        new_tokens=options.new_tokens,
        chunks=options.chunks,
        chunk_tokens=options.chunk_tokens,
        repeats=options.repeats,
        compute={"dtype": options.dtype},
    )
    load.check(facts_of(name).context)
    timeline = None if options.trace is None else Timeline()
    data = measure_pipeline(load, progress, timeline)
    if timeline is not None and options.trace is not None:
        write_timeline(timeline, options.trace)
    if options.json:
        write_json(data)
    else:
        write_line(as_table(data))
