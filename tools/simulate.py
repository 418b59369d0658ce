"""Simulate what `make test` has no time for: every step on every mesh, and larger meshes.

Up to 8 ranks every policy, kind of batch, stage edge and step shape, without leaving out equal
plans; up to 16 ranks every edge on one step; up to 64 ranks every edge in sampled cases.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from layline.boundary.planning.moves import batch_kinds
from support.simulated_cases import (
    SHAPES,
    Case,
    Planner,
    check_every_edge,
    distinct_cases,
    meshes,
    sampled_cases,
    with_policies,
)


def small() -> Iterator[tuple[Case, Planner]]:
    """Every case of up to 8 ranks."""
    for mesh in meshes(range(1, 9)):
        for spec in with_policies(mesh):
            planner = Planner(spec)
            for kind in batch_kinds(spec):
                for shape in SHAPES:
                    yield Case(spec, kind, shape), planner


def larger() -> Iterator[tuple[Case, Planner]]:
    """Distinct plans of 9 to 16 ranks."""
    for case, planner in distinct_cases(range(9, 17)):
        yield dataclasses.replace(case, shape="ragged"), planner


def largest() -> Iterator[tuple[Case, Planner]]:
    """Cases of up to 64 ranks in which any two facts meet."""
    for case in sampled_cases([18, 24, 32, 48, 64]):
        yield case, Planner(case.spec)


def main() -> None:
    """Run all of it; the first fault ends it with an error that names the case."""
    for name, cases in (("small", small()), ("larger", larger()), ("largest", largest())):
        begin, count, rows = time.monotonic(), 0, 0
        for case, planner in cases:
            try:
                rows += check_every_edge(case, planner)
            except Exception as error:
                error.add_note(f"in {case}")
                raise
            count += 1
            if sys.stderr.isatty():
                print(f"\r{name}: {count} cases", end="", file=sys.stderr)
        seconds = time.monotonic() - begin
        print(f"\r{name} meshes: {count} cases, {rows} rows checked, {seconds:.0f} s")


if __name__ == "__main__":
    main()
