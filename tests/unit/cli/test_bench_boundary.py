"""``layline bench boundary``: both walks do the same work, and the figures are all there."""

from __future__ import annotations

import json

import pytest

from layline.cli.bench.boundary_cost import measure_cost
from layline.cli.main import main


def test_boundaries_add_no_kernel_and_no_copy() -> None:
    cost = measure_cost(layers=4, hidden=32, rows=3, repeats=2)
    assert cost.operations == cost.operations_by_hand
    assert cost.operations > 2


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "boundary", "--layers", "3", "--hidden", "16", "--repeats", "2"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layers"] == 3
    assert data["declared"]["median"] > 0
    assert main(arguments) == 0
    assert "boundaries cost" in capsys.readouterr().out
    assert main(["bench", "boundary", "--layers", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
