"""Native products against float64 on the dequantised weights; what a row may depend on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.kernels.native.library import Matrix, NativeLibrary
from layline.kernels.native.weight import EIGHT, FOUR, GROUP, HALF, TILE, NativeWeight
from support.native import NAMES, every_native, native

FORMATS = [FOUR, FOUR | HALF, EIGHT, EIGHT | HALF]
STEPS = 32767  # An activation is rounded to this many steps of its group's largest.
TINY = 2.0**-100  # Groups below count as zeros.


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Parts:
    """Random values, scales and minima, and the float64 matrix they mean."""

    def __init__(self, rows: int, groups: int, layout: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        low, high, kind = (-127, 128, torch.int8) if layout & EIGHT else (0, 16, torch.uint8)
        shape = (rows, groups * GROUP)
        self.layout = layout
        self.values = torch.randint(low, high, shape, generator=generator, dtype=kind)
        self.values[0] = high - 1  # The largest sums must not overflow.
        scale = torch.rand(rows, groups, generator=generator) * 0.1 + 0.01
        minimum = torch.randn(rows, groups, generator=generator)
        if layout & HALF:
            scale, minimum = scale.half().float(), minimum.half().float()
        self.factors = [scale] if layout & EIGHT else [scale, minimum]
        spread = [part.double().repeat_interleave(GROUP, dim=1) for part in self.factors]
        products = self.values.double() * spread[0]
        added = torch.zeros_like(products) if layout & EIGHT else spread[1]
        self.matrix = products + added
        self.magnitude = products.abs() + added.abs()

    def pack(self, library: NativeLibrary) -> NativeWeight:
        shape = (self.values.shape[0], self.values.shape[1])
        # Everything beyond the rows must be written too: NaN there would show.
        fill = lambda size, dtype: torch.full(size, 255, dtype=dtype)
        weight = NativeWeight(library, shape, self.layout, fill)
        weight.fill(0, self.values, *self.factors)
        return weight

    def bound(self, x: torch.Tensor) -> torch.Tensor:
        """Half a step of each group's largest activation, and FP32 sums over the groups."""
        groups = self.values.shape[1] // GROUP
        largest = x.double().view(x.shape[0], groups, GROUP).abs().amax(-1)
        weights = self.matrix.abs().view(-1, groups, GROUP).sum(-1)
        rounding = (largest * 0.51 / STEPS + TINY) @ weights.T
        return rounding + 2.0**-23 * (groups + 3) * (x.double().abs() @ self.magnitude.T)


def activations(tokens: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 7), st.integers(0, 40)),
    layout=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    exponent=st.integers(-38, 30),
    seed=st.integers(0, 99),
)
def test_products_are_exact_but_for_the_activations_last_bit(
    name: str,
    sizes: tuple[int, int, int],
    layout: int,
    dtype: torch.dtype,
    exponent: int,
    seed: int,
) -> None:
    library = native(name)
    rows, groups, tokens = sizes
    parts = Parts(rows, groups, layout, seed)
    x = activations(tokens, groups * GROUP, seed)
    if dtype is not torch.float16:
        x[::3] *= 10.0**exponent
    x[1::5] = 0.0
    x = x.to(dtype)
    out = parts.pack(library).matmul(x)
    assert out.shape == (tokens, rows)
    assert out.dtype is torch.float32
    error = (out.double() - x.double() @ parts.matrix.T).abs()
    assert (error <= parts.bound(x)).all()
    assert (out[1::5] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", FORMATS)
def test_the_bound_would_see_two_columns_exchanged(name: str, layout: int) -> None:
    parts = Parts(16, 2, layout, seed=0)
    x = activations(3, 64, seed=1)
    weight = parts.pack(native(name))
    x[:, [4, 5]] = x[:, [5, 4]]
    error = (weight.matmul(x).double() - activations(3, 64, seed=1).double() @ parts.matrix.T).abs()
    assert (error > parts.bound(x)).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", FORMATS)
def test_a_row_depends_on_itself_alone(name: str, layout: int) -> None:
    """Not on its neighbours, its place, or the number of threads; to the bit."""
    parts = Parts(200, 5, layout, seed=2)
    weight = parts.pack(native(name))
    x = activations(300, 160, seed=3)
    torch.set_num_threads(1)
    alone = torch.cat([weight.matmul(row) for row in x.split(1)])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for tokens in (*range(1, 27), 239, 240, 241, 245, 300):
            first = 300 - tokens
            assert torch.equal(weight.matmul(x[first:]), alone[first:]), (threads, tokens)


def test_instruction_sets_agree_to_the_bit() -> None:
    libraries = every_native()
    if len(libraries) < 2:
        pytest.skip("fewer than two instruction sets work here")
    for layout in FORMATS:
        parts = Parts(40, 3, layout, seed=4)
        for tokens in (1, 2, 3, 6, 8, 9, 31):
            x = activations(tokens, 96, seed=tokens)
            first, *others = [parts.pack(library).matmul(x) for library in libraries]
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", FORMATS)
def test_what_is_not_finite_is_seen_in_its_row_only(
    name: str, bad: float, dtype: torch.dtype, layout: int
) -> None:
    weight = Parts(20, 3, layout, seed=5).pack(native(name))
    for tokens in (1, 5, 14):
        x = activations(tokens, 96, seed=6).to(dtype)
        before = weight.matmul(x)
        assert before.isfinite().all()
        x[tokens - 1, 40] = bad
        after = weight.matmul(x)
        assert after[tokens - 1].isnan().all()
        assert torch.equal(after[: tokens - 1], before[: tokens - 1])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_beyond_the_rows_is_written(name: str) -> None:
    library = native(name)
    parts = Parts(21, 2, FOUR, seed=7)
    weight = parts.pack(library)
    matrix = Matrix(weight.tiles.data_ptr(), 21, 2, FOUR)
    for tokens in (1, 3, 13):
        x, out = activations(tokens, 64, seed=8), torch.full((tokens * 21 + 64,), 7.0)
        pointers = (ctypes.addressof(matrix), x.data_ptr(), out.data_ptr())
        assert library.matmul(*pointers, tokens, 0, 1, library.pool) == 0
        assert torch.equal(out[: tokens * 21].view(tokens, 21), weight.matmul(x))
        assert (out[tokens * 21 :] == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_come_in_pieces(name: str) -> None:
    library = native(name)
    parts = Parts(50, 2, EIGHT, seed=9)
    whole = parts.pack(library)
    pieces = NativeWeight(library, (50, 64), EIGHT, lambda size, dtype: torch.empty(size).to(dtype))
    for first in (32, 0, 16):
        rows = slice(first, 50 if first == 32 else first + TILE)
        pieces.fill(first, parts.values[rows], parts.factors[0][rows])
    assert torch.equal(pieces.tiles, whole.tiles)


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_never_reaches_a_pointer(name: str) -> None:
    library = native(name)
    parts = Parts(32, 2, FOUR, seed=10)
    weight = parts.pack(library)
    for x in (torch.zeros(3, 32), torch.zeros(3, 96), torch.zeros(3, 64, device="meta")):
        with pytest.raises(ValueError, match="32 x 64"):
            weight.matmul(x)
    with pytest.raises(ValueError, match="not enough values"):
        weight.matmul(torch.zeros(64))
    scale, minimum = parts.factors
    wrong = [
        (0, parts.values.to(torch.int8), scale, minimum),
        (0, parts.values, scale),
        (0, parts.values, scale[:, :1], minimum),
        (0, parts.values[:, :32], scale, minimum),
        (16, parts.values, scale, minimum),
        (8, parts.values[:16], scale[:16], minimum[:16]),
        (0, parts.values[:8], scale[:8], minimum[:8]),
        (-16, parts.values[:16], scale[:16], minimum[:16]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"fit|tile"):
            weight.fill(*arguments)
    with pytest.raises(ValueError, match="multiple of 32"):
        NativeWeight(library, (16, 48), FOUR, lambda size, dtype: torch.empty(size, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
def test_strided_activations(name: str) -> None:
    weight = Parts(32, 2, FOUR, seed=11).pack(native(name))
    x = activations(6, 128, seed=12)
    assert torch.equal(weight.matmul(x[:, ::2]), weight.matmul(x[:, ::2].contiguous()))
    assert torch.equal(weight.matmul(x[::2, :64]), weight.matmul(x[:, :64].contiguous())[::2])
