"""``layline plan``: open a model's configuration, plan it, and print, simulate or compare it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layline.boundary.layout import BatchVariant
from layline.cli import session
from layline.cli.options import MODEL_HELP, RunOptions, choice_option
from layline.cli.output import note, write_json, write_line
from layline.cli.values import BadValue
from layline.config import EngineConfig, door_environment, elastic_environment
from layline.errors import UsageError

if TYPE_CHECKING:
    from layline.engine.pipeline_plan import PipelinePlan
    from layline.engine.planned import ModelPlan


def svg_path(value: str) -> str:
    """The path of a drawing."""
    if not value.lower().endswith(".svg"):
        raise BadValue(
            f"--draw {value!r} does not end in .svg; expected a file for a drawing; the nearest is "
            f"{value + '.svg'!r}"
        )
    return value


VARIANTS = tuple(variant.value for variant in BatchVariant)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What ``plan`` shows and checks."""

    variant: Annotated[
        str, choice_option("--variant", VARIANTS, "the kind of batch to plan for")
    ] = BatchVariant.ORDINARY.value
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="walk every kind of batch on all ranks and check every row"
        ),
    ] = False
    analyze: Annotated[
        bool,
        typer.Option("--analyze", help="run the model and compare what ran with what is planned"),
    ] = False
    draw: Annotated[
        str | None,
        typer.Option(
            "--draw",
            parser=svg_path,
            metavar="FILE.svg",
            help="draw the schedule of the pipeline's stages",
            show_default="none",
        ),
    ] = None


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    options: PlanOptions,
    run: RunOptions,
) -> int:
    """Print what crosses each boundary of a model; needs its configuration only, no weights."""
    if options.analyze:
        # Under torchrun the other processes are ranks of the run.
        status = session.follow()
        if status is not None:
            return status
    elif not prints():
        return 0
    try:
        return show(model, options, run)
    except UsageError as error:
        raise type(error)(session.with_flags(str(error))) from None


def prints() -> bool:
    """False for all processes but one of those that torchrun started."""
    place = elastic_environment()
    return place is None or place[0] == 0


def show(model: str, options: PlanOptions, run: RunOptions) -> int:
    """Plan, check what is asked for, and print; the exit status."""
    from layline.cli.plan.data import as_data
    from layline.cli.plan.text import as_text
    from layline.engine.planned import open_plan

    planned = open_plan(model, run.keywords(), options.variant)
    if options.analyze:
        # One plan is printed and compared: the one with what the kernels here return.
        from layline.engine.analysis import with_kernel_sizes

        planned = with_kernel_sizes(planned)
    data: dict[str, Any] = as_data(planned)
    staged = open_pipeline(model, options, run, planned)
    if options.analyze:
        from layline.engine.analysis import refuse_staged_ranks

        refuse_staged_ranks(EngineConfig(**run.keywords(), model=model), staged)
    data["pipeline"] = None
    pipeline = [] if staged is None else [add_pipeline(options, planned, staged, data)]
    sections = [as_text(data), *pipeline]
    passed = True
    if options.simulate:
        from layline.cli.plan.checks import simulation

        data["simulation"], text = simulation(planned)
        sections.append(text)
        passed &= data["simulation"]["passed"]
    if options.analyze:
        from layline.cli.plan.checks import analysis

        data["analysis"], text = analysis(planned, {**run.keywords(), "model": model}, staged)
        sections.append(text)
        passed &= data["analysis"]["agrees"]
    if options.json:
        write_json(data)
    else:
        write_line("\n\n".join(sections))
    return 0 if passed else 1


def open_pipeline(
    model: str, options: PlanOptions, run: RunOptions, planned: ModelPlan
) -> PipelinePlan | None:
    """Plan the pipeline, None for one stage. Raises UsageError for a drawing of one stage."""
    from layline.engine.pipeline_plan import plan_pipeline

    engine = EngineConfig(**run.keywords(), model=model)
    found = plan_pipeline(planned, engine, door_environment(), warn)
    if found is None and options.draw is not None:
        raise UsageError(
            f"--draw {options.draw!r} draws the schedule of pipeline stages, and there is one "
            "stage; expected --pp-stages of at least 2"
        )
    return found


def add_pipeline(
    options: PlanOptions, planned: ModelPlan, found: PipelinePlan, data: dict[str, Any]
) -> str:
    """Add the pipeline to ``data`` and draw it where asked; its text."""
    from layline.cli.plan.drawing import write_drawing
    from layline.cli.plan.pipeline import pipeline_data, pipeline_text, process_memory, row_names

    data["pipeline"] = pipeline_data(found)
    data["memory_per_rank"].update(process_memory(found))
    text = pipeline_text(found)
    if options.draw is not None:
        title = f"{planned.facts.config.architecture}, {planned.facts.config.num_layers} layers"
        write_drawing(options.draw, title, row_names(found), found.schedules)
        data["pipeline"]["drawing"] = options.draw
        text += f"\n\nschedule drawn in {options.draw}"
    return text


def warn(message: str) -> None:
    """A warning about an environment door, on stderr."""
    note(f"layline: {message}")
