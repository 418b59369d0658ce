"""A rank reads its part of a tensor: the same values as in the whole, and no other bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_gguf import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, tiny_arrays, write_gguf

from layline.errors import TensorError
from layline.weights.checkpoint import Checkpoint, Region
from layline.weights.opening import open_checkpoint
from layline.weights.quantized import QuantizedTensor, block_layout

LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    LAYER + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    LAYER + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    LAYER + "self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
    LAYER + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    LAYER + "mlp.up_proj.weight": (FFN, HIDDEN),
    LAYER + "mlp.down_proj.weight": (HIDDEN, FFN),
}
KINDS = ("safetensors", "random", "gguf-F32", "gguf-Q8_0", "gguf-Q4_1", "gguf-Q5_0")


def values(part: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    if isinstance(part, QuantizedTensor):
        return part.dequantize(torch.float32)
    return part.float()


def write(directory: Path, kind: str) -> str:
    """A checkpoint with the tensors of SHAPES; GGUF ones have the llama order of q and k rows."""
    if kind.startswith("gguf"):
        arrays = tiny_arrays(bias=True)
        encoding = kind.removeprefix("gguf-")
        matrices = [name for name, array in arrays.items() if array.ndim > 1]
        encodings = {} if encoding == "F32" else dict.fromkeys(matrices, encoding)
        return str(write_gguf(directory / "model.gguf", arrays, encodings=encodings))
    (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    if kind == "random":
        return f"config:{directory}"
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Checkpoint]:
    checkpoint = open_checkpoint(write(tmp_path_factory.mktemp("part"), request.param))
    yield checkpoint
    checkpoint.close()


@st.composite
def regions(draw: st.DrawFn) -> tuple[str, Region]:
    name = draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[name]

    def part(size: int) -> tuple[int, int] | None:
        if draw(st.booleans()):
            return None
        unit = draw(st.sampled_from([1, 1, HEAD_DIM, 32]))
        cuts = draw(st.tuples(*[st.integers(0, size // unit)] * 2))
        return min(cuts) * unit, max(cuts) * unit

    return name, Region(shape, part(shape[0]), part(shape[1]) if len(shape) == 2 else None)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=regions(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_part_equals_the_slice_of_the_whole(
    opened: Checkpoint, drawn: tuple[str, Region], dtype: torch.dtype
) -> None:
    name, region = drawn
    whole = torch.full(region.shape, torch.nan, dtype=dtype)
    opened.read_into(name, whole)
    wanted = whole[slice(*(region.rows or (None, None)))]
    if region.columns is not None:
        wanted = wanted[:, slice(*region.columns)]
    # A strided target, as the merged projections of a layer are.
    out = torch.full((*region.size, 2), torch.nan, dtype=dtype)[..., 0]
    opened.read_into(name, out, region)
    assert out.shape == wanted.shape == region.size
    assert torch.equal(out, wanted)
    if opened.kind != "random":
        assert torch.equal(values(opened.read(name, region)).to(dtype), wanted)


def test_quantised_columns_stay_quantised_on_whole_blocks_only(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, "gguf-Q8_0"))
    name, shape = LAYER + "mlp.down_proj.weight", (HIDDEN, FFN)
    whole = values(checkpoint.read(name))
    for columns in ((0, 32), (32, 96), (64, 64), (0, 96)):
        part = checkpoint.read(name, Region(shape, columns=columns))
        assert isinstance(part, QuantizedTensor)
        assert part.shape == (HIDDEN, columns[1] - columns[0])
        assert torch.equal(values(part), whole[:, slice(*columns)])
    for columns in ((0, 48), (48, 96), (1, 2)):
        part = checkpoint.read(name, Region(shape, columns=columns))
        assert isinstance(part, torch.Tensor)
        assert torch.equal(part, whole[:, slice(*columns)])


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q4_K"])
def test_parts_of_four_bit_matrices_are_those_of_the_part(encoding: str) -> None:
    """A column slice's rows lie apart in memory; unpacking them must not read across."""
    layout = block_layout(encoding)
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 120, (6, 5 * layout.bytes), dtype=np.uint8)
    whole = QuantizedTensor(encoding, torch.from_numpy(blocks), (6, 5 * layout.values))
    nibbles, scale, minimum = whole.q4_parts()
    first, stop = layout.values, 4 * layout.values
    part = whole.covering(first, stop).q4_parts()
    for ours, theirs, unit in zip(part, (nibbles, scale, minimum), (1, 32, 32), strict=True):
        assert torch.equal(ours, theirs[:, first // unit : stop // unit])


def test_padding_rows_are_zero() -> None:
    blocks = torch.full((3, 34), 1, dtype=torch.uint8)
    padded = QuantizedTensor("Q8_0", blocks, (3, 32)).padded(5)
    assert padded.shape == (5, 32)
    values_ = padded.dequantize(torch.float32)
    assert values_[:3].all()
    assert not values_[3:].any()


def test_random_values_do_not_depend_on_how_a_tensor_is_divided(tmp_path: Path) -> None:
    """Tensors of several pieces, cut anywhere, in any order."""
    checkpoint = open_checkpoint(write(tmp_path, "random"))
    shape = (3000, 1000)
    whole = torch.empty(shape)
    checkpoint.read_into("a.weight", whole)
    assert whole.std().item() == pytest.approx(1000**-0.5, rel=0.01)
    # No stretch of values comes again.
    firsts = whole[:, 0].unique(return_counts=True)[1]
    assert firsts.max() == 1
    for rows in ((2999, 3000), (0, 1), (1047, 1050), (1048, 1049), (900, 2500)):
        for columns in (None, (999, 1000), (3, 700)):
            region = Region(shape, rows, columns)
            out = torch.empty(region.size)
            checkpoint.read_into("a.weight", out, region)
            expected = whole[slice(*rows), slice(*(columns or (None, None)))]
            assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["safetensors", "gguf-F32", "gguf-Q8_0"])
def test_a_part_of_another_shape_is_refused(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, kind))
    region = Region((HIDDEN, FFN + 32), columns=(0, 32))
    for action in (
        lambda: checkpoint.read(LAYER + "mlp.down_proj.weight", region),
        lambda: checkpoint.read_into(
            LAYER + "mlp.down_proj.weight", torch.empty(region.size), region
        ),
    ):
        with pytest.raises(TensorError, match=rf"expected \({HIDDEN}, {FFN + 32}\)"):
            action()


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((4, 4), (0, 5), None),
        ((4, 4), (3, 2), None),
        ((4, 4), (-1, 2), None),
        ((4, 4), None, (0, 5)),
        ((4,), None, (0, 2)),
        ((2, 4, 4), (0, 1), None),
        ((), (0, 1), None),
    ],
)
def test_parts_that_do_not_exist(
    shape: tuple[int, ...], rows: tuple[int, int] | None, columns: tuple[int, int] | None
) -> None:
    with pytest.raises(TensorError, match=r"(rows|columns) \("):
        Region(shape, rows, columns)


# Memory around a part is made unreadable, so that a read outside it ends the process.
GUARDED = """
import ctypes, mmap, sys
import torch
from layline.weights.checkpoint import Region
from layline.weights.opening import open_checkpoint
from layline.weights.quantized import QuantizedTensor

path, name = sys.argv[1:3]
checkpoint = open_checkpoint(path)
shape = checkpoint.infos()[name].shape
raw = checkpoint._raw(checkpoint._find(name)) if path.endswith("gguf") else checkpoint.read(name)
raw = raw.view(-1).view(torch.uint8).view(shape[0], -1)
row_bytes, begin, end = raw.shape[1], raw.data_ptr(), raw.data_ptr() + raw.numel()
libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
pages = range(-(-begin // page), end // page)

def allow(numbers, access):
    for number in numbers:
        assert libc.mprotect(ctypes.c_void_p(number * page), page, access) == 0

for (rows, columns), (readable_rows, readable_columns) in eval(sys.argv[3]):
    first, stop = (row_bytes * cut // shape[1] for cut in readable_columns or (0, shape[1]))
    kept = set()
    for row in range(*(readable_rows or (0, shape[0]))):
        start = begin + row * row_bytes
        kept.update(range((start + first) // page, -(-(start + stop) // page)))
    allow(set(pages) - kept, 0)
    region = Region(shape, rows, columns)
    out = torch.full(region.size, torch.nan)
    checkpoint.read_into(name, out, region)
    part = checkpoint.read(name, region)
    part = part.dequantize(torch.float32) if isinstance(part, QuantizedTensor) else part.float()
    assert torch.equal(part, out)
    print(len(set(pages) - kept) / len(pages))
    allow(pages, mmap.PROT_READ)
"""
BIG = (96, 32768)
"""One row of float32 is 32 pages, of Q8_0 more than eight; a head of q has 24 rows."""
PARTS = {
    "rows": (((24, 48), None), ((24, 48), None)),
    "columns": ((None, (16384, 32768)), (None, (16384, 32768))),
    "both": (((24, 72), (8192, 24576)), ((24, 72), (8192, 24576))),
    # Blocks that columns begin or end within are read too.
    "off blocks": ((None, (16400, 32752)), (None, (16384, 32768))),
}


def guarded(path: str, name: str, cases: object) -> subprocess.CompletedProcess[str]:
    """Read each first of ``cases`` while only its second can be read."""
    return subprocess.run(
        [sys.executable, "-c", GUARDED, path, name, repr(cases)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def big_file(directory: Path, kind: str) -> tuple[str, str]:
    matrix = np.random.default_rng(0).standard_normal(BIG, dtype=np.float32)
    if kind == "safetensors":
        (directory / "config.json").write_text("{}")
        save_file({"a.weight": torch.from_numpy(matrix)}, directory / "model.safetensors")
        return str(directory), "a.weight"
    arrays = tiny_arrays()
    stored, name = "blk.0.ffn_down.weight", LAYER + "mlp.down_proj.weight"
    if "permuted" in kind:
        stored, name = "blk.0.attn_q.weight", LAYER + "self_attn.q_proj.weight"
    arrays[stored] = matrix
    encodings = {stored: "Q8_0"} if "Q8_0" in kind else {}
    return str(write_gguf(directory / "model.gguf", arrays, encodings=encodings)), name


@pytest.mark.skipif(sys.platform != "linux", reason="guards pages with mprotect")
@pytest.mark.parametrize(
    "kind", ["safetensors", "gguf", "gguf-Q8_0", "gguf-permuted", "gguf-permuted-Q8_0"]
)
def test_no_byte_outside_the_part_is_read(tmp_path: Path, kind: str) -> None:
    path, name = big_file(tmp_path, kind)
    result = guarded(path, name, list(PARTS.values()))
    assert result.returncode == 0, result.stderr
    hidden = [float(line) for line in result.stdout.split()]
    assert len(hidden) == len(PARTS)
    # Most of what is outside was out of reach; pages on an edge are not.
    assert all(share > 0.3 for share in hidden)


@pytest.mark.skipif(sys.platform != "linux", reason="guards pages with mprotect")
@pytest.mark.parametrize("kind", ["safetensors", "gguf-Q8_0"])
def test_the_guard_catches_a_read_outside(tmp_path: Path, kind: str) -> None:
    path, name = big_file(tmp_path, kind)
    result = guarded(path, name, [PARTS["rows"], (((24, 48), None), ((24, 47), None))])
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout
