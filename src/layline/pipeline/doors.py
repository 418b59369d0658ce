"""The pipeline's environment doors, read at each look. No torch here.

A given flag shadows its door. A bad flag is a UsageError; a bad door is reported, each distinct
message once, and leaves the pipeline off, or raises and keeps raising where the table says so
(devices). Toggles count only as exactly ``0`` or ``1``; an empty variable is an unset one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from layline.config import (
    AUTO_SPLITS,
    MAX_LAYERS,
    MAX_ORDINAL,
    EngineConfig,
    parse_numbers,
    shorten,
)
from layline.errors import PlacementError, UsageError
from layline.pipeline.fence import Fence, check_cuts, check_stages, even_fence, fence_of, listed
from layline.pipeline.placement import Inventory, Placement, place
from layline.pipeline.schedule import DEFAULT_CHUNK, ChunkRule

PREFIX = "LAYLINE_"
STAGES = f"{PREFIX}PP_STAGES"
SPLITS = f"{PREFIX}PP_SPLITS"
SPLIT = f"{PREFIX}PP_SPLIT"
DEVICES = f"{PREFIX}PP_DEVICES"
STREAMS = f"{PREFIX}PP_STREAMS"
SHARD = f"{PREFIX}PP_SHARD"
CHUNK = f"{PREFIX}PRIME_CHUNK"
CHUNK_SCHEDULE = f"{PREFIX}PRIME_CHUNK_SCHED"
# What a toggle must be to differ from its default.
TOGGLES = {
    SHARD: "0",
    STREAMS: "0",
    f"{PREFIX}PP_SHARED_MEMORY": "0",
    f"{PREFIX}PP_BIND": "0",
    f"{PREFIX}PP_OVERLAP": "1",
    f"{PREFIX}PP_ALLOW_UNSPLIT_BATCH": "1",
    f"{PREFIX}PP_FORCE_SAME_DEV_PIPELINED": "1",
    f"{PREFIX}BATCH_PP": "0",
    f"{PREFIX}SPEC_PP": "0",
    f"{PREFIX}PRIME_PP": "0",
    f"{PREFIX}PRIME_PIPE": "0",
}
DOORS = (STAGES, SPLITS, SPLIT, DEVICES, CHUNK, CHUNK_SCHEDULE, *TOGGLES)
Balanced = Callable[[int], Fence]
"""The fence that costs choose for a number of stages."""


@dataclass(frozen=True, kw_only=True)
class PipelineFlags:
    """What flags or keywords say; None leaves it to the door. ``splits`` may be ``auto``."""

    stages: int | None = None
    splits: tuple[int, ...] | str | None = None
    devices: tuple[int, ...] | None = None
    processes: int = 1

    @classmethod
    def of(cls, engine: EngineConfig) -> PipelineFlags:
        """The pipeline's part of a configuration."""
        splits, devices = engine.pp_splits, engine.pp_devices
        return cls(
            stages=engine.pp_stages,
            splits=splits if splits is None or isinstance(splits, str) else tuple(splits),
            devices=None if devices is None else tuple(int(device) for device in devices),
            processes=engine.pp_processes,
        )

    def check_alone(self) -> None:
        """Raise UsageError for a flag that means nothing without a number of stages."""
        for name, given, stages in (
            ("pp_splits", self.splits, None if self.splits is None else len(self.splits) + 1),
            ("pp_devices", self.devices, None if self.devices is None else len(self.devices)),
            ("pp_processes", self.processes, self.processes),
        ):
            if isinstance(given, tuple) or (isinstance(given, int) and given > 1):
                shown = listed(given) if isinstance(given, tuple) else given
                raise UsageError(
                    f"{name} {shown} needs more than one stage; expected pp_stages {stages}"
                )


class Doors:
    """The doors of one runtime: what they say now, what was warned of, what is settled.

    ``environ`` is read at every look; ``report`` gets each distinct warning once. ``balanced``
    gives the fence for ``auto`` cuts. Any thread may look.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        flags: PipelineFlags,
        report: Callable[[str], None],
        balanced: Balanced | None = None,
    ) -> None:
        self._environ = environ
        self._flags = flags
        self._report = report
        self._balanced = balanced
        self._reported: set[str] = set()
        self._placement_error: PlacementError | None = None
        self._built: Placement | None = None
        self._lock = threading.Lock()

    # Stages and cuts.

    def fence(self, num_layers: int) -> Fence | None:
        """The fence for a stack, or None while the door is shut.

        Raises UsageError for a flag that does not fit, and when the number of stages is another
        than the runtime was built with.
        """
        fence = self._wanted_fence(num_layers)
        if fence is not None and self._built is not None:
            built, asked = self._built.num_stages, len(fence) - 1
            if asked != built:
                raise UsageError(
                    f"the pipeline was built with {built} stages and now pp_stages is {asked}; "
                    f"expected {built}, or a new engine"
                )
        return fence

    def _wanted_fence(self, num_layers: int) -> Fence | None:
        num_stages = self._num_stages(num_layers)
        if num_stages is None:
            if self._flags.stages is None:
                self._flags.check_alone()
            return None
        splits = self._flags.splits
        if splits is None:
            return self._door_fence(num_stages, num_layers)
        if isinstance(splits, str):
            return self._balance(num_stages)
        check_cuts(splits, num_layers, num_stages)
        return fence_of(splits, num_layers)

    def _num_stages(self, num_layers: int) -> int | None:
        if self._flags.stages is not None:
            check_stages(self._flags.stages, num_layers)
            return self._flags.stages if self._flags.stages > 1 else None
        text = self._text(STAGES)
        number = whole_number(text)
        if text is None or number in (0, 1):
            return None
        if number is None:
            self.warn(
                f"{STAGES} {shorten(text)} is not a number of stages; expected 2 to {num_layers}; "
                "the pipeline stays off"
            )
            return None
        if number > num_layers:
            self.warn(
                f"{STAGES} {number} is more than the model's {num_layers} layers; expected 2 to "
                f"{num_layers}; the pipeline stays off"
            )
            return None
        return number

    def _door_fence(self, num_stages: int, num_layers: int) -> Fence | None:
        """By the cuts that the doors name; None, or even cuts for stages of a flag, if bad."""
        name, text = SPLITS, self._text(SPLITS)
        if text is None:
            name, text = SPLIT, self._text(SPLIT)
        if text is None:
            return even_fence(num_layers, num_stages)
        if name == SPLITS and text == AUTO_SPLITS:
            return self._balance(num_stages)
        cuts = numbers_or_none(text, least=1, most=MAX_LAYERS)
        if name == SPLIT and num_stages > 2:
            problem = f"is for 2 stages, and there are {num_stages}; expected {SPLITS}"
        elif cuts is None or (name == SPLIT and len(cuts) != 1):
            problem = "is not a list of cuts" if name == SPLITS else "is not a layer number"
        else:
            try:
                check_cuts(cuts, num_layers, num_stages)
            except UsageError:
                problem = f"does not cut {num_layers} layers into {num_stages} stages"
            else:
                return fence_of(cuts, num_layers)
        wanted = "a layer number" if num_stages == 2 else f"{num_stages - 1} increasing numbers"
        expected = (
            "" if "expected" in problem else f"; expected {wanted} from 1 to {num_layers - 1}"
        )
        from_flag = self._flags.stages is not None
        outcome = "the cuts are even" if from_flag else "the pipeline stays off"
        self.warn(f"{name} {shorten(text)} {problem}{expected}; {outcome}")
        # A flag asked for these stages; the bad door alone stays off.
        return even_fence(num_layers, num_stages) if from_flag else None

    def _balance(self, num_stages: int) -> Fence:
        if self._balanced is None:
            raise UsageError(
                "pp_splits auto needs the costs of the model's layers, which are not known here; "
                "expected layer numbers"
            )
        return self._balanced(num_stages)

    def freeze(self, placement: Placement) -> None:
        """Settle the number of stages and their devices: the runtime is built."""
        self._built = placement

    # Devices.

    def placement(self, num_stages: int, inventory: Inventory, num_processes: int = 1) -> Placement:
        """Where the stages are, once built always the same.

        Raises PlacementError for devices that cannot be used; one that a door caused is raised
        again at every later call, whatever the door says by then.
        """
        if self._placement_error is not None:
            raise self._placement_error
        if self._built is not None:
            return self._built
        if not self.streams:
            # One stream has one device, and cannot be in several processes.
            return place(num_stages, inventory, (0,) * num_stages)
        given = self._flags.devices
        text = self._text(DEVICES)
        if given is not None or text is None:
            return place(num_stages, inventory, given, num_processes)
        try:
            ordinals = parsed_devices(text, num_stages)
            return place(num_stages, inventory, ordinals, num_processes, name=DEVICES)
        except PlacementError as error:
            self._placement_error = error
            raise

    # Toggles.

    @property
    def shard(self) -> bool:
        """Each stage's weights are loaded onto its own device."""
        return self.streams and self._toggle("PP_SHARD")

    @property
    def streams(self) -> bool:
        """Stages have streams of their own. Without: one stream, one device, eager decode only."""
        return self._toggle("PP_STREAMS")

    @property
    def shared_memory(self) -> bool:
        """Processes of one machine hand over through memory; without, through messages."""
        return self._toggle("PP_SHARED_MEMORY")

    @property
    def bind(self) -> bool:
        """Stages in processes of their own keep to their share of the cores."""
        return self._toggle("PP_BIND")

    @property
    def overlap(self) -> bool:
        """Boundaries alternate their two slots in eager decode."""
        return self._toggle("PP_OVERLAP")

    @property
    def batch(self) -> bool:
        """Batched decode is split over the stages."""
        return self.streams and self._toggle("BATCH_PP")

    @property
    def verify(self) -> bool:
        """Verification of draft tokens is split over the stages."""
        return self.streams and self._toggle("SPEC_PP")

    @property
    def prime(self) -> bool:
        """Chunked prefill is split over the stages."""
        return self.streams and self._toggle("PRIME_PP")

    @property
    def prime_pipe(self) -> bool:
        """Chunks of a prompt are on several stages at a time."""
        return self.prime and self._toggle("PRIME_PIPE")

    @property
    def allow_unsplit_batch(self) -> bool:
        """An unsplit loop may read remote weights: for measuring only."""
        return self._toggle("PP_ALLOW_UNSPLIT_BATCH")

    @property
    def force_same_device_pipelined(self) -> bool:
        """Deferred decode may have two stages on one device: for soak tests only."""
        return self._toggle("PP_FORCE_SAME_DEV_PIPELINED")

    @property
    def prime_chunks(self) -> ChunkRule:
        """How prompts are divided into chunks."""
        dynamic = self._text(CHUNK_SCHEDULE) in (None, "dynamic")
        text = self._text(CHUNK)
        if text is None:
            return ChunkRule(dynamic=dynamic)
        size = whole_number(text)
        if size is None:
            self.warn(
                f"{CHUNK} {shorten(text)} is not a number of tokens; expected 0 (whole prompts) or "
                f"more; chunks have {DEFAULT_CHUNK}"
            )
            size = DEFAULT_CHUNK
        return ChunkRule(size=size, dynamic=dynamic)

    def in_effect(self) -> dict[str, str]:
        """The doors that are set, by name."""
        return {name: text for name in DOORS if (text := self._text(name)) is not None}

    def warn(self, message: str) -> None:
        """Report ``message``, the first time it is given."""
        with self._lock:
            if message in self._reported:
                return
            self._reported.add(message)
        self._report(message)

    def _text(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def _toggle(self, name: str) -> bool:
        full = f"{PREFIX}{name}"
        changed = self._environ.get(full) == TOGGLES[full]
        return changed == (TOGGLES[full] == "1")


def parsed_devices(text: str, num_stages: int) -> tuple[int, ...]:
    """The ordinals of the devices door. Raises PlacementError for what is no list of them."""
    ordinals = numbers_or_none(text, least=0, most=MAX_ORDINAL)
    if ordinals is None or len(ordinals) < 2:
        raise PlacementError(
            f"{DEVICES} {shorten(text)} is not a list of device numbers; expected {num_stages} of "
            f"them, such as {','.join(map(str, range(num_stages)))}"
        )
    return ordinals


def numbers_or_none(text: str, *, least: int, most: int) -> tuple[int, ...] | None:
    """Whole numbers separated by commas, None for anything else."""
    try:
        return parse_numbers(text, "", least=least, most=most)
    except UsageError:
        return None


def whole_number(text: str | None) -> int | None:
    """A number without a sign, None for anything else."""
    stripped = (text or "").strip()
    if not (stripped.isascii() and stripped.isdigit()) or len(stripped) > len(str(1 << 62)):
        return None
    return int(stripped)
