"""The measurement behind ``layline bench boundary``: one stack twice, with and without boundaries.

Both walk the same norms over the same tensors; attention and FFN pass their input on, so that what
is left is the norms, which are alike, and the host's work around them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layline.boundary.factories import declare_attn, declare_ffn, make_stages
from layline.boundary.mesh import Mesh
from layline.boundary.residual import batch as residual_batch
from layline.boundary.stage import StageBoundary
from layline.layers.attention import TorchAttentionPlan
from layline.layers.forward_batch import ForwardBatch
from layline.layers.norm import RMSNorm
from layline.layers.spans import Phase

WARM_UP = 20
MICRO = 1e6


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles, in microseconds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        lower, middle, upper = statistics.quantiles(values * 2, n=4, method="inclusive")
        return cls(middle, lower, upper)

    def __str__(self) -> str:
        return f"{self.median:7.2f} [{self.lower:.2f}, {self.upper:.2f}]"


@dataclass(frozen=True)
class Cost:
    """What was measured; times are for one layer."""

    layers: int
    hidden: int
    rows: int
    repeats: int
    declared: Spread
    by_hand: Spread
    difference: Spread
    operations: float
    operations_by_hand: float
    construction_ms: float

    def as_data(self) -> dict[str, Any]:
        """The figures under the names of the fields, with units in microseconds a layer."""
        return asdict(self)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensor operations that reach a kernel or make a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Stack:
    """Norms of a stack of layers, and the boundaries over them."""

    def __init__(self, layers: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def norm() -> RMSNorm:
            return RMSNorm(torch.rand(hidden, generator=generator) + 0.5, 1e-5)

        self.norms = [(norm(), norm()) for _ in range(layers)]
        self.final = norm()
        begun = time.perf_counter()
        mesh = Mesh()
        self.layers: list[tuple[StageBoundary, ...]] = [
            make_stages(
                (declare_attn(), before),
                (declare_ffn(), after),
                previous=declare_ffn() if index else None,
                terminal=index == layers - 1,
                mesh=mesh,
            )
            for index, (before, after) in enumerate(self.norms)
        ]
        self.construction = time.perf_counter() - begun

    def declared(self, x: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Walk the layers through their boundaries."""
        residual_batch.start(forward_batch)
        for attn, ffn in self.layers:
            x = attn.prepare(x, forward_batch)
            if x.shape[0] != 0:
                x = _compute(x)
            x = attn.finish(x, forward_batch)
            x = ffn.prepare(x, forward_batch)
            with ffn.exit(forward_batch) as output:
                x = _compute(x)
            x = output.finish(x)
        normed: torch.Tensor = residual_batch.norm(x, forward_batch, self.final, skip_empty=True)
        return normed

    def by_hand(self, x: torch.Tensor, _: ForwardBatch) -> torch.Tensor:
        """The same arithmetic, written out."""
        residual: torch.Tensor | None = None
        for before, after in self.norms:
            if residual is None:
                residual, x = x, before(x)
            else:
                x, residual = before.add_norm(x, residual)
            if x.shape[0] != 0:
                x = _compute(x)
            x, residual = after.add_norm(x, residual)
            x = _compute(x)
        assert residual is not None
        return self.final.add_norm(x, residual)[0]


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x


@torch.inference_mode()
def measure_cost(layers: int, hidden: int, rows: int, repeats: int) -> Cost:
    """Measure on the CPU with one thread; torch's thread count is put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(Stack(layers, hidden), layers, hidden, rows, repeats)
    finally:
        torch.set_num_threads(threads)


def _measure(stack: Stack, layers: int, hidden: int, rows: int, repeats: int) -> Cost:
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1))
    nothing = torch.empty(0)
    plan = TorchAttentionPlan(0, {}, {})
    forward_batch = ForwardBatch(Phase.DECODE, nothing, nothing, slice(0), plan)
    assert torch.equal(stack.declared(x, forward_batch), stack.by_hand(x, forward_batch))

    def seconds(walk: Callable[[torch.Tensor, ForwardBatch], torch.Tensor]) -> float:
        begun = time.perf_counter()
        walk(x, forward_batch)
        return (time.perf_counter() - begun) / layers * MICRO

    def operations(walk: Callable[[torch.Tensor, ForwardBatch], torch.Tensor]) -> float:
        counter = _Counter()
        with counter:
            walk(x, forward_batch)
        return counter.count / layers

    for _ in range(WARM_UP):
        seconds(stack.declared), seconds(stack.by_hand)
    pairs = [(seconds(stack.declared), seconds(stack.by_hand)) for _ in range(repeats)]
    return Cost(
        layers=layers,
        hidden=hidden,
        rows=rows,
        repeats=repeats,
        declared=Spread.of([pair[0] for pair in pairs]),
        by_hand=Spread.of([pair[1] for pair in pairs]),
        difference=Spread.of([pair[0] - pair[1] for pair in pairs]),
        operations=operations(stack.declared),
        operations_by_hand=operations(stack.by_hand),
        construction_ms=stack.construction * 1e3,
    )
