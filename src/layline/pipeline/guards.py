"""What a pipeline refuses, and what it warns of once. No torch here.

A loop without a stage split walks all layers on one stream. That is right, and slow beyond use
when weights are on other devices: their bytes would cross for every step.
"""

from __future__ import annotations

from collections.abc import Callable

from layline.errors import UnsplitError
from layline.pipeline.placement import Placement, Residency

UNSPLIT_ALLOWED = frozenset({"prime"})
"""Loops whose unsplit walk stays callable over remote weights: a gate's reference arm."""
FORCE_DOOR = "LAYLINE_PP_FORCE_SAME_DEV_PIPELINED"
UNSPLIT_DOOR = "LAYLINE_PP_ALLOW_UNSPLIT_BATCH"


def refuse_unsplit_if_remote(
    path: str, alternative: str, residency: Residency, *, allowed: bool = False
) -> None:
    """Raise UnsplitError when an unsplit walk would read weights of other devices.

    ``path`` names the loop that refuses, ``alternative`` what works in its place, ``residency``
    where the weights really are; ``allowed`` is the door for measurements.
    """
    remote = residency.remote_layers
    if not remote or allowed:
        return
    devices = sorted({residency.layers[layer] for layer in remote})
    named = ", ".join(map(str, devices))
    raise UnsplitError(
        f"{path} has no stage split and would read the weights of {len(remote)} of "
        f"{len(residency.layers)} layers from device{'s' if len(devices) > 1 else ''} {named} at "
        f"every step, as it runs on device {residency.primary}; expected {alternative} "
        f"({UNSPLIT_DOOR}=1 runs it all the same, to measure)"
    )


class UnwiredLoops:
    """What a runtime does about loops without a split: a warning once, or a refusal.

    ``report`` gets one line for each loop.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._warned: set[str] = set()

    def enter(
        self, loop: str, alternative: str, residency: Residency, *, allowed: bool = False
    ) -> None:
        """Call before ``loop`` walks all layers while a pipeline is open.

        Raises UnsplitError where weights are remote, except for prime, whose unsplit walk is
        there to be compared with.
        """
        if loop in UNSPLIT_ALLOWED:
            return
        refuse_unsplit_if_remote(loop, alternative, residency, allowed=allowed)
        if loop not in self._warned:
            self._warned.add(loop)
            self._report(
                f"{loop} has no stage split: it runs all layers on device {residency.primary}; "
                f"{alternative} uses the pipeline"
            )


def refuse_deferred(
    placement: Placement | None, *, streams: bool = True, forced: bool = False
) -> None:
    """Raise UnsplitError where logits must not be read back late.

    ``placement`` is None while the pipeline's door is shut. ``forced`` is the door for soak tests;
    it lifts the refusal of two stages on one device only.
    """
    if placement is None:
        raise UnsplitError(
            "deferred decode needs an open pipeline; expected pp_stages of 2 or more"
        )
    if not streams:
        raise UnsplitError(
            "deferred decode needs a stream for each stage; expected LAYLINE_PP_STREAMS unset"
        )
    if placement.multi_stream_same_device and not forced:
        raise UnsplitError(
            f"deferred decode {_shared(placement)}; expected one device for each stage "
            f"(pp_devices), or {FORCE_DOOR}=1 in a soak test"
        )


def refuse_chunk_pipeline(placement: Placement) -> None:
    """Raise UnsplitError where chunks of a prompt must not be on several stages at a time."""
    if placement.multi_stream_same_device:
        raise UnsplitError(
            f"the chunk pipeline {_shared(placement)}; expected one device for each stage "
            "(pp_devices), or LAYLINE_PRIME_PIPE=0 for one chunk at a time"
        )


def _shared(placement: Placement) -> str:
    homes = placement.homes()
    _, device = next(home for home in homes if homes.count(home) > 1)
    stages = [str(stage) for stage, home in enumerate(homes) if home[1] == device]
    return f"is refused with stages {', '.join(stages)} on device {device}"
