"""``layline plan``: open a model's configuration, plan it, and print, simulate or compare it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from layline.boundary.layout import BatchVariant
from layline.cli import session
from layline.cli.options import MODEL_HELP, RunOptions, choice_option
from layline.cli.output import write_json, write_line
from layline.config import elastic_environment
from layline.errors import UsageError

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
    sections = [as_text(data)]
    passed = True
    if options.simulate:
        from layline.cli.plan.checks import simulation

        data["simulation"], text = simulation(planned)
        sections.append(text)
        passed &= data["simulation"]["passed"]
    if options.analyze:
        from layline.cli.plan.checks import analysis

        data["analysis"], text = analysis(planned, {**run.keywords(), "model": model})
        sections.append(text)
        passed &= data["analysis"]["agrees"]
    if options.json:
        write_json(data)
    else:
        write_line("\n\n".join(sections))
    return 0 if passed else 1
