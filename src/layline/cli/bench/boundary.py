"""``layline bench boundary``: what declared boundaries cost on the host, beside a layer by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from layline.cli.options import integer_option
from layline.cli.output import write_json, write_line


@dataclass(frozen=True, kw_only=True)
class BoundaryOptions:
    """What to measure."""

    layers: Annotated[
        int,
        integer_option("--layers", "decoder layers of the stack"),
    ] = 80
    hidden: Annotated[
        int,
        integer_option(
            "--hidden", "hidden size; the norms are real, attention and FFN pass their input on"
        ),
    ] = 576
    rows: Annotated[
        int,
        integer_option("--rows", "token rows of a step"),
    ] = 1
    repeats: Annotated[
        int,
        integer_option("--repeats", "interleaved repeats; medians are shown with quartiles"),
    ] = 200
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False


def boundary(options: BoundaryOptions) -> None:
    """Host time of prepare, finish and exit for a layer, beside the same layer without them."""
    from layline.cli.bench.boundary_cost import measure_cost

    cost = measure_cost(options.layers, options.hidden, options.rows, options.repeats)
    if options.json:
        write_json(cost.as_data())
        return
    write_line(
        f"{cost.layers} layers of hidden {cost.hidden}, {cost.rows} row(s), one rank, one thread, "
        f"{cost.repeats} interleaved repeats; microseconds a layer, median [quartiles]"
    )
    write_line(f"  with boundaries   {cost.declared}")
    write_line(f"  written by hand   {cost.by_hand}")
    write_line(f"  boundaries cost   {cost.difference}")
    write_line(
        f"  tensor operations a layer: {cost.operations:g} with boundaries, "
        f"{cost.operations_by_hand:g} by hand"
    )
    write_line(f"  construction of the stack: {cost.construction_ms:.1f} ms")
