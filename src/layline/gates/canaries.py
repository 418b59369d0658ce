"""The failure classes of the specification's section E, each re-created on purpose.

A canary is an arm with one thing undone. It must turn the gate red, and the same arm with that
thing done must be green: else the canary shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from layline.gates import breaks
from layline.gates.arms import ArmOptions
from layline.gates.breaks import Bench, Build
from layline.gates.mutations import latest_positions, latest_tables
from layline.gates.scenarios import Scenario, ScenarioMaker
from layline.pipeline.faults import Fault


def _unchanged(_: Bench, broken: bool) -> ArmOptions:
    return ArmOptions()


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One failure class of section E, by ``number``; ``absent`` is why it cannot exist here.

    ``doors`` are changed in the broken arm alone. One that ``kills_device`` runs on the CPU only.
    """

    name: str
    number: int
    what: str
    build: Build = _unchanged
    scenario: Callable[[ScenarioMaker], Scenario] = lambda make: make.deferred(4, steps=6)
    doors: dict[str, bool] = field(default_factory=dict)
    kills_device: bool = False
    absent: str | None = None


CANARIES: tuple[Canary, ...] = (
    Canary(
        name="first_use_clear",
        number=1,
        what="a new slot is cleared after its first payload has come",
        build=breaks.with_script(Fault.SKIP_GROWTH_SYNC, "stage 0", stalled="stage 1"),
    ),
    Canary(
        name="slot_overwrite",
        number=2,
        what="a slot is filled again before it was read",
        build=breaks.with_script(Fault.DROP_RX_WAIT, "stage 0", stalled="stage 1"),
    ),
    Canary(
        name="early_read",
        number=3,
        what="a slot is read before it is filled",
        build=breaks.with_script(Fault.DROP_TX_WAIT, "stage 1", stalled="stage 0"),
    ),
    Canary(
        name="early_readback",
        number=3,
        what="logits are copied to the host before they are computed",
        build=breaks.with_script(Fault.DROP_READBACK_WAIT, "readback", stalled="stage 0"),
    ),
    Canary(
        name="slot_view",
        number=4,
        what="a stage computes on the slot itself",
        build=breaks.with_script(Fault.RETURN_SLOT_VIEW, "stage 0"),
    ),
    Canary(
        name="early_release",
        number=4,
        what="a slot is let go of before it was copied",
        build=breaks.with_script(Fault.EARLY_RX_RECORD, "stage 0", stalled="stage 1"),
    ),
    Canary(
        name="shared_position",
        number=5,
        what="stages share the positions of the latest step",
        build=breaks.from_the_latest(latest_positions),
    ),
    Canary(
        name="shared_scratch",
        number=6,
        what="stages compute in the same memory",
        build=breaks.shared_scratch,
        scenario=lambda make: make.deferred(4, steps=12),
    ),
    Canary(
        name="missing_barrier",
        number=7,
        what="the first step does not wait for weights that are still loaded",
        build=breaks.slow_load,
        scenario=lambda make: make.eager(2),
    ),
    Canary(
        name="birth_barrier",
        number=8,
        what="blocks are cleared while a step reads them",
        build=breaks.admission,
    ),
    Canary(
        name="unpublished_output",
        number=9,
        what="the caller uses logits that the last stage has not computed",
        build=breaks.unpublished,
        scenario=lambda make: make.eager(2),
    ),
    Canary(
        name="reused_block",
        number=10,
        what="the stages do not wait for what the caller has issued before",
        build=breaks.entry,
        scenario=lambda make: make.eager(2),
    ),
    Canary(
        name="nan_sentinel",
        number=11,
        what="the id of a row that is all NaN, -1, is looked up in the embedding",
        build=breaks.sentinel,
        kills_device=True,
        scenario=lambda make: make.eager(2),
    ),
    Canary(
        name="peer_pools",
        number=12,
        what="peer access without the allocator's pools",
        absent="the CPU has one memory and no peer access",
    ),
    Canary(
        name="module_handles",
        number=13,
        what="kernel modules are looked up for the process",
        absent="no kernel is loaded by device: torch and Triton keep modules by context",
    ),
    Canary(
        name="unsplit_walk",
        number=14,
        what="one guard less: all layers are walked over sharded weights",
        scenario=lambda make: make.batch(4, rounds=2),
        doors={"batch": False, "allow_unsplit_batch": True},
    ),
    Canary(
        name="wrong_device_cache",
        number=15,
        what="caches are allocated on the first stage's device",
        build=breaks.wrong_card,
    ),
    Canary(
        name="lost_fast_path",
        number=16,
        what="one request loses its fused path",
        absent="one walk serves every batch size: there is no path to lose",
    ),
    Canary(
        name="exactness_flag",
        number=17,
        what="one stage is loaded with another exactness than the others",
        build=breaks.exactness,
        scenario=lambda make: make.prime(2, 2),
    ),
    Canary(
        name="shared_table",
        number=18,
        what="stages share the block table of the latest microbatch",
        build=breaks.from_the_latest(latest_tables),
        scenario=lambda make: make.batch(4, rounds=2),
    ),
    Canary(
        name="lost_overlap",
        number=19,
        what="chunks go through the stages one at a time",
        build=breaks.freely(Fault.SERIAL_CHUNKS),
        scenario=lambda make: make.prime(4, 1),
    ),
    Canary(
        name="one_slot",
        number=19,
        what="every step goes through the same slot",
        build=breaks.freely(Fault.ONE_SLOT_ONLY),
    ),
    Canary(
        name="late_growth",
        number=20,
        what="slots grow in the middle of a prefill",
        build=breaks.freely(Fault.SKIP_PREWARM),
        scenario=lambda make: make.growing(),
    ),
    Canary(
        name="mutable_chunk_base",
        number=21,
        what="a chunk begins where the latest one does",
        build=breaks.from_the_latest(latest_positions),
        scenario=lambda make: make.prime(3, 1),
    ),
    Canary(
        name="local_kernel_choice",
        number=22,
        what="a prompt's last row is computed as a decode, because it is one row",
        build=breaks.by_row_count,
        scenario=lambda make: make.prime(3, 1, last=1),
    ),
    Canary(
        name="primary_device",
        number=23,
        what="the first stage's device serves",
        build=breaks.first_serves,
    ),
    Canary(
        name="pool_reuse",
        number=24,
        what="a stage's memory is given away while another stream uses it",
        absent="on the CPU memory lives as long as anyone refers to it",
    ),
    Canary(
        name="neutered_counter",
        number=25,
        what="counters do not move",
        build=breaks.stuck_counters,
        scenario=lambda make: make.eager(2),
    ),
    Canary(
        name="never_split",
        number=25,
        what="every walk is unsplit",
        build=breaks.freely(Fault.NEVER_SPLIT),
        scenario=lambda make: make.prime(3, 1),
    ),
    Canary(
        name="stale_residency",
        number=26,
        what="where weights are is decided once for all devices",
        build=breaks.stale_residency,
    ),
    Canary(
        name="empty_burst",
        number=27,
        what="a prefill without chunks counts down from its last",
        build=breaks.empty_burst,
        scenario=lambda make: make.eager(2),
    ),
)
