"""Failure classes of a cut, re-created on purpose, so that gates can be seen red.

A runtime gets an empty set. A canary passes one name, and the code that keeps that class out leaves
its one line undone. Nothing else reads these names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from layline.errors import UsageError, one_of


class Fault(StrEnum):
    """What is left undone, or done too early. The comment says what then goes wrong."""

    # A slot is filled again while its receiver still reads it.
    DROP_RX_WAIT = "drop_rx_wait"
    # A slot is read before its producer has filled it.
    DROP_TX_WAIT = "drop_tx_wait"
    # The receiver says that it has read before it has.
    EARLY_RX_RECORD = "early_rx_record"
    # The receiver computes on the slot itself, which the next payload overwrites.
    RETURN_SLOT_VIEW = "return_slot_view"
    # The host does not wait until a new slot is cleared, so that the clear can wipe a payload.
    SKIP_GROWTH_SYNC = "skip_growth_sync"
    # The clear is issued after the host has waited, with the same end.
    FIRST_USE_CLEAR_LATE = "first_use_clear_late"
    # A slot may be filled again before the receive of what it holds was issued.
    SKIP_ISSUE_CHECK = "skip_issue_check"
    # Overlap is asked for and every step goes through one slot: equal bits, no overlap.
    ONE_SLOT_ONLY = "one_slot_only"
    # A payload narrower than the slot's last is received at the last one's width.
    KEEP_WIDER_LAYOUT = "keep_wider_layout"
    # Logits are copied to the host before the last stage has computed them.
    DROP_READBACK_WAIT = "drop_readback_wait"
    # Reading one step back waits for all steps: equal bits, no overlap.
    DRAIN_ALL_STEPS = "drain_all_steps"
    # All stages compute in the first one's scratch memory.
    SHARED_SCRATCH = "shared_scratch"
    # Stages do not wait for the caller's point before they walk.
    DROP_ENTRY_FENCE = "drop_entry_fence"
    # The caller uses a result that the last stage has not computed.
    DROP_PUBLISH = "drop_publish"
    # Stages walk over a cache that is still being cleared.
    DROP_BIRTH_BARRIER = "drop_birth_barrier"
    # The first step reads weights that are still being loaded.
    DROP_LOAD_BARRIER = "drop_load_barrier"
    # Every walk is unsplit: equal bits, and nothing of a pipeline.
    NEVER_SPLIT = "never_split"
    # Chunks go through the pipeline one at a time: equal bits, no overlap.
    SERIAL_CHUNKS = "serial_chunks"
    # Slots grow in the middle of a prefill, and drain the receiver there.
    SKIP_PREWARM = "skip_prewarm"
    # A prefill without chunks counts down from its last.
    EMPTY_UNDERFLOW = "empty_underflow"


@dataclass(frozen=True)
class Faults:
    """The failure classes to re-create; none unless a canary says so."""

    names: frozenset[Fault] = frozenset()

    @classmethod
    def parse(cls, names: Iterable[str]) -> Faults:
        """From names as a command line gives them. Raises UsageError for an unknown one."""
        known = {fault.value for fault in Fault}
        found = list(names)
        for name in found:
            if name not in known:
                raise UsageError(one_of("fault", name, sorted(known)))
        return cls(frozenset(Fault(name) for name in found))

    def __contains__(self, fault: Fault) -> bool:
        return fault in self.names
