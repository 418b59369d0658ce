"""Block encodings against the gguf package's own dequantiser, on random valid blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layline.errors import TensorError, UnsupportedFormatError
from layline.weights.quantized import (
    FOUR_BIT,
    QuantizedTensor,
    block_layout,
    supported_encodings,
)

# Byte offsets of the float16 fields of each block.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(encoding: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes]: every bit random except that the float16 fields are finite."""
    rng = np.random.default_rng(seed)
    layout = block_layout(encoding)
    num_blocks = columns // layout.values
    blocks = rng.integers(0, 256, (rows, num_blocks, layout.bytes), dtype=np.uint8)
    for offset in HALVES[encoding]:
        halves = rng.normal(0, 0.1, (rows, num_blocks, 1)).astype(np.float16)
        blocks[:, :, offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def reference(encoding: str, blocks: np.ndarray) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[encoding]))


def quantized(encoding: str, rows: int, columns: int, seed: int = 0) -> QuantizedTensor:
    blocks = torch.from_numpy(random_blocks(encoding, rows, columns, seed))
    return QuantizedTensor(encoding, blocks, (rows, columns))


def test_every_named_encoding_is_covered() -> None:
    assert set(HALVES) == set(supported_encodings())


@pytest.mark.parametrize("encoding", supported_encodings())
@pytest.mark.parametrize("columns", [256, 1536])
def test_float32_values_equal_the_reference_bit_for_bit(encoding: str, columns: int) -> None:
    tensor = quantized(encoding, 37, columns)
    expected = reference(encoding, tensor.blocks.numpy())
    assert torch.equal(tensor.dequantize(torch.float32), expected)


@pytest.mark.parametrize("encoding", supported_encodings())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_is_the_float32_value_rounded_once(
    encoding: str, dtype: torch.dtype
) -> None:
    tensor = quantized(encoding, 5, 512, seed=1)
    expected = reference(encoding, tensor.blocks.numpy()).to(dtype)
    assert torch.equal(tensor.dequantize(dtype), expected)


@pytest.mark.parametrize("encoding", supported_encodings())
@pytest.mark.parametrize("num_rows", [70, 4100])
def test_chunks_of_rows_join_without_a_seam(encoding: str, num_rows: int) -> None:
    # 4100 rows of 1024 are past the size that goes in small pieces; the last piece is short.
    tensor = quantized(encoding, num_rows, 1024, seed=2)
    expected = reference(encoding, tensor.blocks.numpy())
    assert torch.equal(tensor.dequantize(torch.float32), expected)
    assert torch.equal(tensor.dequantize(torch.bfloat16), expected.bfloat16())


def test_out_may_be_a_strided_part_of_a_larger_tensor() -> None:
    tensor = quantized("Q4_1", 6, 64)
    whole = torch.full((8, 100), torch.nan)
    returned = tensor.dequantize(torch.float32, out=whole[1:7, 20:84])
    assert torch.equal(returned, tensor.dequantize(torch.float32))
    assert whole[0].isnan().all()
    assert whole[:, :20].isnan().all()
    assert whole[:, 84:].isnan().all()


@pytest.mark.parametrize("encoding", supported_encodings())
def test_rows_select_before_expanding(encoding: str) -> None:
    tensor = quantized(encoding, 20, 256)
    values = tensor.dequantize(torch.float32)
    index = torch.tensor([19, 0, 7, 7])
    assert torch.equal(tensor.rows(index).dequantize(torch.float32), values[index])
    sliced = tensor.rows(slice(3, 9))
    assert sliced.shape == (6, 256)
    assert torch.equal(sliced.dequantize(torch.float32), values[3:9])
    assert sliced.blocks.untyped_storage().data_ptr() == tensor.blocks.untyped_storage().data_ptr()


def test_no_rows_gives_an_empty_matrix() -> None:
    empty = quantized("Q8_0", 4, 64).rows(torch.empty(0, dtype=torch.int64))
    assert empty.dequantize(torch.float32).shape == (0, 64)


def test_blocks_at_an_odd_byte_offset_are_read() -> None:
    tensor = quantized("Q4_0", 3, 64)
    odd = torch.zeros(tensor.blocks.numel() + 1, dtype=torch.uint8)[1:].view(3, -1)
    odd.copy_(tensor.blocks)
    shifted = QuantizedTensor("Q4_0", odd, (3, 64))
    assert torch.equal(shifted.dequantize(torch.float32), tensor.dequantize(torch.float32))


@pytest.mark.parametrize("encoding", FOUR_BIT)
def test_q4_parts_rebuild_the_weight(encoding: str) -> None:
    tensor = quantized(encoding, 9, 768, seed=3)
    nibbles, scale, minimum = tensor.q4_parts()
    assert nibbles.dtype == torch.uint8
    assert nibbles.shape == (9, 768)
    assert int(nibbles.max()) == 15
    assert int(nibbles.min()) == 0
    assert scale.shape == minimum.shape == (9, 24)
    spread = nibbles.double().view(9, 24, 32) * scale.double().unsqueeze(-1)
    rebuilt = (spread + minimum.double().unsqueeze(-1)).view(9, 768)
    expected = reference(encoding, tensor.blocks.numpy())
    torch.testing.assert_close(rebuilt.float(), expected, rtol=1e-6, atol=1e-5)


def test_q4_parts_are_refused_for_other_encodings() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"Q4_0, Q4_1, Q4_K tensors, not for Q6_K"):
        quantized("Q6_K", 1, 256).q4_parts()


def test_q8_parts_rebuild_the_weight() -> None:
    tensor = quantized("Q8_0", 9, 768, seed=4)
    values, scale = tensor.q8_parts()
    assert values.dtype == torch.int8
    assert scale.shape == (9, 24)
    rebuilt = (values.double().view(9, 24, 32) * scale.double().unsqueeze(-1)).view(9, 768)
    expected = reference("Q8_0", tensor.blocks.numpy())
    torch.testing.assert_close(rebuilt.float(), expected, rtol=1e-6, atol=1e-5)
    with pytest.raises(UnsupportedFormatError, match="Q8_0, not for Q4_0"):
        quantized("Q4_0", 1, 256).q8_parts()


def test_unknown_encoding_names_the_supported_ones() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"Q2_K is not one of Q8_0, Q4_0.*Q6_K"):
        QuantizedTensor("Q2_K", torch.zeros(1, 84, dtype=torch.uint8), (1, 256))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TensorError, match="multiple of 32 values, not 33"):
        QuantizedTensor("Q8_0", torch.zeros(1, 34, dtype=torch.uint8), (1, 33))
    with pytest.raises(TensorError, match=r"\(2, 34\)"):
        QuantizedTensor("Q8_0", torch.zeros(1, 34, dtype=torch.uint8), (2, 32))
    with pytest.raises(TensorError, match=r"out of shape \(2, 64\)"):
        quantized("Q8_0", 2, 64).dequantize(torch.float32, out=torch.empty(2, 32))


def test_dequantize_leaves_the_blocks_alone() -> None:
    for encoding in supported_encodings():
        tensor = quantized(encoding, 2, 256)
        before = tensor.blocks.clone()
        tensor.dequantize(torch.bfloat16)
        assert torch.equal(tensor.blocks, before)
