"""Rotary embedding tables for every supported scaling.

Sources: linear and dynamic NTK scaling follow the definitions used by transformers; Llama 3's
wavelength-dependent scaling; YaRN (https://arxiv.org/abs/2309.00071). GGUF files may carry their
own per-frequency factors, which divide the inverse frequencies.
"""

from __future__ import annotations

import math

import torch

from layline.layers.rope_config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 [head_dim / 2] inverse frequencies; dynamic scaling gives its unscaled start."""
    base = _powers(rope.theta, head_dim)
    if factors is not None:
        return base / factors.float()
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim)
    return base


class RotaryTable:
    """Cosines and sines by position, [tokens, 1, head_dim] each, FP32.

    ``lengths`` [tokens], the length of each token's sequence, matters only to dynamic scaling.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_position: int,
        *,
        factors: torch.Tensor | None = None,
        device: torch.device,
    ) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._inverse = inverse_frequencies(rope, head_dim, factors).to(device)
        positions = torch.arange(max_position, device=device, dtype=torch.float32)
        self._table = self._rotations(positions[:, None] * self._inverse)

    @property
    def is_dynamic(self) -> bool:
        """True when a row's rotation depends on its sequence's length."""
        return self._rope.kind == "dynamic"

    def __call__(
        self, positions: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for ``positions`` [tokens] (int64). ``lengths`` is required for dynamic scaling."""
        if not self.is_dynamic:
            rows = self._table.index_select(0, positions)
        else:
            if lengths is None:
                raise ValueError("dynamic rope needs the length of each token's sequence")
            rows = self._rotations(positions.float()[:, None] * self._dynamic(lengths))
        cos, sin = rows.chunk(2, dim=1)
        return cos, sin

    def _dynamic(self, lengths: torch.Tensor) -> torch.Tensor:
        """Inverse frequencies for each row, [tokens, head_dim / 2]."""
        original, dim = self._rope.original_context, self._head_dim
        stretched = torch.clamp(lengths, min=original).double()
        growth = self._rope.factor * stretched / original - (self._rope.factor - 1)
        base = self._rope.theta * growth ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, device=lengths.device, dtype=torch.float64) / dim
        return (1.0 / base[:, None] ** exponents).float()

    def _rotations(self, angles: torch.Tensor) -> torch.Tensor:
        """[tokens, 2, head_dim]: cosines, then sines negated in the first half."""
        cos, sin = angles.cos(), angles.sin()
        pairs = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        return pairs * self._rope.attention_factor


def _powers(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return torch.as_tensor(1.0 / theta**exponents, dtype=torch.float32)


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Leave short wavelengths, divide long ones by the factor, blend between the two."""
    wavelength = 2 * math.pi / base
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / spread
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > longest, base / rope.factor, blended)
    return torch.where(wavelength < shortest, base, scaled)


def _yarn(base: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Interpolate low frequencies, keep high ones, ramp between the two correction dims."""

    def correction_dim(rotations: float) -> float:
        context = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # A ramp of width zero has no slope.
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return base / rope.factor * (1 - keep) + base * keep
