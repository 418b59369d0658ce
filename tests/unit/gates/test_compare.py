"""Bits, not numbers: what counts as equal, and where a difference is."""

from __future__ import annotations

import pytest
import torch

from layline.gates.compare import first_difference

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equal_bits_are_equal_nan_too(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, NAN], [-0.0, float("inf")]], dtype=dtype)
    assert first_difference([values], [values.clone()]) is None


def test_zero_and_minus_zero_differ() -> None:
    found = first_difference([torch.tensor([0.0])], [torch.tensor([-0.0])])
    assert found is not None
    assert found.index == (0,)


def test_the_first_is_named_with_both_values() -> None:
    one = torch.arange(12.0).view(3, 4)
    other = one.clone()
    other[1, 2], other[2, 0] = -7.0, -8.0
    found = first_difference([one, one], [one, other])
    assert found is not None
    assert (found.step, found.index, found.found, found.expected) == (1, (1, 2), 6.0, -7.0)
    assert (found.differing, found.of) == (2, 12)
    assert str(found) == (
        "step 1, value [1, 2] is 6.0 and on one stage -7.0; 2 of the step's 12 values differ"
    )


def test_other_shapes_types_and_counts_are_no_comparison() -> None:
    one = torch.zeros(2)
    with pytest.raises(ValueError, match=r"step 0 gave \[2\]"):
        first_difference([one], [torch.zeros(3)])
    with pytest.raises(ValueError, match=r"torch\.float64"):
        first_difference([one], [one.double()])
    with pytest.raises(ValueError, match="zip"):
        first_difference([one], [])
