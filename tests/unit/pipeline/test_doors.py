"""The environment doors: every row of the document's table, with its refusals and warnings."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.config import EngineConfig
from layline.errors import PlacementError, UsageError
from layline.pipeline.doors import DOORS, TOGGLES, Doors, PipelineFlags
from layline.pipeline.fence import Fence
from layline.pipeline.placement import Inventory, Placement
from layline.pipeline.schedule import ChunkRule

relaxed = settings(max_examples=200, deadline=None, database=None)

LAYERS = 12
CPU = Inventory()
FOUR_GPUS = Inventory("cuda", 4)
words = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=8)


class Opened:
    """Doors over a mapping that a test changes, and what they reported."""

    def __init__(self, flags: PipelineFlags | None = None, **values: str) -> None:
        self.environ: dict[str, str] = {}
        self.reports: list[str] = []
        self.doors = Doors(self.environ, flags or PipelineFlags(), self.reports.append, self.auto)
        self.set(**values)

    def set(self, **values: str) -> None:
        self.environ.update({f"LAYLINE_{name}": value for name, value in values.items()})

    @staticmethod
    def auto(num_stages: int) -> Fence:
        """A fence that no rule but the costs would give."""
        return (*range(num_stages), LAYERS)

    def fence(self) -> Fence | None:
        return self.doors.fence(LAYERS)


@pytest.mark.parametrize("value", [None, "", "0", "1", " 1 ", "00"])
def test_unset_0_and_1_change_nothing(value: str | None) -> None:  # pipeline G1
    opened = Opened(PP_SPLITS="nonsense", PP_SPLIT="x", PP_DEVICES="also")
    if value is not None:
        opened.set(PP_STAGES=value)
    assert opened.fence() is None
    assert opened.reports == []


@pytest.mark.parametrize("stages", range(2, LAYERS + 1))
def test_stages_are_even_by_default(stages: int) -> None:  # pipeline G2
    opened = Opened(PP_STAGES=str(stages))
    assert opened.fence() == tuple(stage * LAYERS // stages for stage in range(stages + 1))
    assert opened.reports == []


@pytest.mark.parametrize("value", ["two", "-2", "2.0", "+2", "2,3", "9" * 40, "²"])
def test_a_bad_number_of_stages_stays_off_with_a_warning(value: str) -> None:  # pipeline G7
    opened = Opened(PP_STAGES=value)
    assert opened.fence() is None
    (message,) = opened.reports
    assert message.startswith("LAYLINE_PP_STAGES '")
    assert "expected 2 to 12; the pipeline stays off" in message
    assert "\n" not in message


def test_more_stages_than_layers_stay_off_with_a_warning() -> None:  # pipeline G6
    opened = Opened(PP_STAGES="13")
    assert opened.fence() is None
    (message,) = opened.reports
    assert "LAYLINE_PP_STAGES 13 is more than the model's 12 layers; expected 2 to 12" in message
    assert opened.doors.fence(13) is not None


@pytest.mark.parametrize(
    ("stages", "splits", "fence"),
    [("2", "5", (0, 5, 12)), ("3", "1,2", (0, 1, 2, 12)), ("4", " 3 , 4,11", (0, 3, 4, 11, 12))],
)
def test_splits_set_the_cuts(stages: str, splits: str, fence: Fence) -> None:  # pipeline G3
    opened = Opened(PP_STAGES=stages, PP_SPLITS=splits)
    assert opened.fence() == fence
    assert opened.reports == []


@pytest.mark.parametrize(
    "splits", ["0,5", "5,12", "5,5", "6,5", "5", "4,5,6", "a,b", "4,", "4;5", "-1,5", "4.0,5", ","]
)
def test_bad_splits_stay_off_with_a_warning(splits: str) -> None:  # pipeline G3
    opened = Opened(PP_STAGES="3", PP_SPLITS=splits)
    assert opened.fence() is None
    (message,) = opened.reports
    assert message.startswith(f"LAYLINE_PP_SPLITS {splits!r} ")
    assert "expected 2 increasing numbers from 1 to 11; the pipeline stays off" in message


def test_splits_beat_split_even_when_they_are_bad() -> None:  # pipeline G4
    assert Opened(PP_STAGES="2", PP_SPLITS="3", PP_SPLIT="9").fence() == (0, 3, 12)
    assert Opened(PP_STAGES="2", PP_SPLITS="3", PP_SPLIT="junk").fence() == (0, 3, 12)
    assert Opened(PP_STAGES="3", PP_SPLITS="3,4", PP_SPLIT="9").fence() == (0, 3, 4, 12)
    bad = Opened(PP_STAGES="2", PP_SPLITS="30", PP_SPLIT="9")
    assert bad.fence() is None
    assert [message.split()[0] for message in bad.reports] == ["LAYLINE_PP_SPLITS"]
    assert Opened(PP_STAGES="2", PP_SPLITS="", PP_SPLIT="9").fence() == (0, 9, 12)


def test_split_is_the_spelling_for_two_stages() -> None:
    opened = Opened(PP_STAGES="2", PP_SPLIT="7")
    assert opened.fence() == (0, 7, 12)
    assert opened.reports == []


def test_split_with_more_stages_stays_off() -> None:  # pipeline G5
    opened = Opened(PP_STAGES="3", PP_SPLIT="7")
    assert opened.fence() is None
    (message,) = opened.reports
    assert "LAYLINE_PP_SPLIT '7' is for 2 stages, and there are 3" in message
    assert "expected LAYLINE_PP_SPLITS; the pipeline stays off" in message


@pytest.mark.parametrize("split", ["x", "0", "12", "99", "-3", "3,4", "3.5"])
def test_a_bad_split_stays_off(split: str) -> None:
    opened = Opened(PP_STAGES="2", PP_SPLIT=split)
    assert opened.fence() is None
    (message,) = opened.reports
    assert message.startswith(f"LAYLINE_PP_SPLIT {split!r} ")
    assert "expected a layer number from 1 to 11" in message


def test_auto_splits_ask_the_costs() -> None:
    assert Opened(PP_STAGES="3", PP_SPLITS="auto").fence() == (0, 1, 2, 12)
    doors = Doors({}, PipelineFlags(stages=3, splits="auto"), print)
    with pytest.raises(UsageError, match="pp_splits auto needs the costs"):
        doors.fence(LAYERS)


def test_each_distinct_warning_is_reported_once() -> None:  # pipeline G7
    opened = Opened(PP_STAGES="x")
    for _ in range(3):
        opened.fence()
    opened.set(PP_STAGES="y")
    opened.fence()
    opened.set(PP_STAGES="99")
    opened.fence()
    opened.set(PP_STAGES="x", PRIME_CHUNK="many")
    opened.fence()
    assert opened.doors.prime_chunks == opened.doors.prime_chunks
    assert len(opened.reports) == 4
    assert len(set(opened.reports)) == 4
    # What was warned of belongs to the object: another runtime says it again.
    again = Opened(PP_STAGES="x")
    again.fence()
    assert again.reports == opened.reports[:1]


def test_a_warning_from_many_threads_is_reported_once() -> None:  # pipeline G7
    opened = Opened(PP_STAGES="x")
    start = threading.Barrier(8)

    def look() -> None:
        start.wait(10)
        opened.fence()

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(opened.reports) == 1


# Devices.


def test_devices_are_named_by_stage() -> None:
    opened = Opened(PP_STAGES="3", PP_DEVICES="2,0,2")
    placement = opened.doors.placement(3, FOUR_GPUS)
    assert placement.devices == (2, 0, 2)
    assert placement.primary == 2
    assert Opened(PP_STAGES="2").doors.placement(2, FOUR_GPUS).devices == (0, 0)
    assert Opened(PP_STAGES="3").doors.placement(3, CPU).devices == (0, 1, 2)


BAD_DEVICES = {
    "a word": ("cuda", "not a list of device numbers; expected 2 of them, such as 0,1"),
    "one": ("1", "not a list of device numbers"),
    "negative": ("0,-1", "not a list of device numbers"),
    "trailing": ("0,1,", "not a list of device numbers"),
    "too many": ("0,1,2", "names 3 devices for 2 pipeline stages; expected 2"),
    "missing": ("0,7", "device 7, which is not there; this machine has cuda devices 0,1,2,3"),
    "no access": ("0,3", "needs device 0 to copy directly to device 3, and there is no peer"),
}


@pytest.mark.parametrize("name", BAD_DEVICES)
def test_bad_devices_raise_and_keep_raising(name: str) -> None:  # pipeline G8, G14
    value, message = BAD_DEVICES[name]
    inventory = Inventory("cuda", 4, frozenset({(0, 3)}))
    opened = Opened(PP_STAGES="2", PP_DEVICES=value)
    with pytest.raises(PlacementError, match=message) as first:
        opened.doors.placement(2, inventory)
    assert "LAYLINE_PP_DEVICES" in str(first.value)
    assert first.value.exit_status == 2
    opened.set(PP_DEVICES="0,1")
    with pytest.raises(PlacementError, match=message):
        opened.doors.placement(2, inventory)
    del opened.environ["LAYLINE_PP_DEVICES"]
    with pytest.raises(PlacementError, match=message):
        opened.doors.placement(2, inventory)
    assert opened.reports == []
    assert Opened(PP_DEVICES="0,1").doors.placement(2, inventory).devices == (0, 1)


@pytest.mark.parametrize("inventory", [Inventory("cuda", 0), Inventory("cuda", 1)])
def test_a_machine_without_the_devices(inventory: Inventory) -> None:  # pipeline G8
    with pytest.raises(PlacementError, match=r"device [01], which is not there"):
        Opened(PP_DEVICES="0,1").doors.placement(2, inventory)


def test_without_streams_devices_are_off() -> None:
    opened = Opened(PP_STAGES="2", PP_DEVICES="0,1", PP_STREAMS="0")
    doors = opened.doors
    assert opened.fence() == (0, 6, 12), "the eager seam stays"
    assert doors.placement(2, FOUR_GPUS).devices == (0, 0)
    assert not any((doors.shard, doors.batch, doors.verify, doors.prime, doors.prime_pipe))
    opened.set(PP_STREAMS="1")
    assert doors.placement(2, FOUR_GPUS).devices == (0, 1)
    assert all((doors.shard, doors.batch, doors.verify, doors.prime, doors.prime_pipe))
    assert Opened(PP_STREAMS="0", PP_DEVICES="bad").doors.placement(2, CPU).devices == (0, 0)


def test_what_is_built_keeps_its_stages_and_devices() -> None:  # pipeline G9
    opened = Opened(PP_STAGES="2", PP_DEVICES="1,0")
    doors = opened.doors
    doors.freeze(doors.placement(2, FOUR_GPUS))
    opened.set(PP_DEVICES="2,3", PP_SPLITS="4")
    assert doors.placement(2, FOUR_GPUS).devices == (1, 0)
    assert opened.fence() == (0, 4, 12), "cuts are read again"
    opened.set(PP_STAGES="3", PP_SPLITS="4,5")
    with pytest.raises(UsageError, match="built with 2 stages and now pp_stages is 3; expected 2"):
        opened.fence()
    opened.set(PP_STAGES="0")
    assert opened.fence() is None, "a shut door is a gate's reference arm"
    opened.set(PP_STAGES="2", PP_SPLITS="")
    assert opened.fence() == (0, 6, 12)


# Toggles.

PROPERTIES = {
    "PP_SHARD": "shard",
    "PP_STREAMS": "streams",
    "PP_SHARED_MEMORY": "shared_memory",
    "PP_BIND": "bind",
    "PP_OVERLAP": "overlap",
    "PP_ALLOW_UNSPLIT_BATCH": "allow_unsplit_batch",
    "PP_FORCE_SAME_DEV_PIPELINED": "force_same_device_pipelined",
    "BATCH_PP": "batch",
    "SPEC_PP": "verify",
    "PRIME_PP": "prime",
    "PRIME_PIPE": "prime_pipe",
}
OFF_BY_DEFAULT = {"PP_OVERLAP", "PP_ALLOW_UNSPLIT_BATCH", "PP_FORCE_SAME_DEV_PIPELINED"}


@pytest.mark.parametrize("name", PROPERTIES)
def test_toggles_are_read_at_each_look(name: str) -> None:  # pipeline G12
    opened = Opened()
    default = name not in OFF_BY_DEFAULT
    moved = "0" if default else "1"

    def look() -> bool:
        return bool(getattr(opened.doors, PROPERTIES[name]))

    assert look() is default
    opened.set(**{name: moved})
    assert look() is not default
    opened.set(**{name: "1" if default else "0"})
    assert look() is default
    opened.set(**{name: moved})
    assert look() is not default
    del opened.environ[f"LAYLINE_{name}"]
    assert look() is default


@relaxed
@given(st.sampled_from(sorted(PROPERTIES)), words)
def test_toggles_match_only_exactly(name: str, value: str) -> None:  # pipeline G12
    if value in ("0", "1"):
        return
    opened = Opened(**{name: value})
    assert getattr(opened.doors, PROPERTIES[name]) is (name not in OFF_BY_DEFAULT)


@pytest.mark.parametrize("value", ["00", "0 ", " 0", "false", "off", "no", "O"])
def test_what_looks_like_0_is_not(value: str) -> None:  # pipeline G12
    assert Opened(PRIME_PIPE=value).doors.prime_pipe


def test_shut_prime_split_shuts_its_pipeline() -> None:
    doors = Opened(PRIME_PP="0").doors
    assert not doors.prime
    assert not doors.prime_pipe


def test_every_toggle_is_tested_here() -> None:
    assert {f"LAYLINE_{name}" for name in PROPERTIES} == set(TOGGLES)


# Chunks.


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, ChunkRule()),
        ("", ChunkRule()),
        ("0", ChunkRule(size=0)),
        ("513", ChunkRule(size=513)),
        (" 64 ", ChunkRule(size=64)),
    ],
)
def test_chunk_sizes(value: str | None, rule: ChunkRule) -> None:
    opened = Opened(**({} if value is None else {"PRIME_CHUNK": value}))
    assert opened.doors.prime_chunks == rule
    assert opened.reports == []


@pytest.mark.parametrize("value", ["auto", "-1", "12.5", "4k", "9" * 30])
def test_a_chunk_size_that_is_none_is_4096(value: str) -> None:
    opened = Opened(PRIME_CHUNK=value)
    assert opened.doors.prime_chunks == ChunkRule(size=4096)
    (message,) = opened.reports
    assert "is not a number of tokens; expected 0 (whole prompts) or more" in message


@pytest.mark.parametrize(
    ("value", "dynamic"), [(None, True), ("dynamic", True), ("fixed", False), ("Dynamic", False)]
)
def test_any_other_schedule_is_fixed(value: str | None, dynamic: bool) -> None:
    values = {} if value is None else {"PRIME_CHUNK_SCHED": value}
    assert Opened(**values).doors.prime_chunks.dynamic is dynamic


# Flags.


def test_a_flag_shadows_its_door() -> None:
    bad = {"PP_STAGES": "x", "PP_SPLITS": "y", "PP_DEVICES": "z"}
    flags = PipelineFlags(stages=3, splits=(2, 3), devices=(0, 1, 0))
    opened = Opened(flags, **bad)
    assert opened.fence() == (0, 2, 3, 12)
    assert opened.doors.placement(3, FOUR_GPUS).devices == (0, 1, 0)
    assert opened.reports == []
    assert Opened(PipelineFlags(stages=1), PP_STAGES="4").fence() is None
    only_cuts = Opened(PipelineFlags(splits=(4,)), PP_STAGES="2", PP_SPLITS="9")
    assert only_cuts.fence() == (0, 4, 12)


def test_a_bad_door_beside_a_flag_stays_off_alone() -> None:
    opened = Opened(PipelineFlags(stages=3), PP_SPLITS="30,40")
    assert opened.fence() == (0, 4, 8, 12)
    (message,) = opened.reports
    assert message.endswith("; the cuts are even")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"stages": 13}, "pp_stages 13 does not fit the model's 12 layers; expected 1 to 12"),
        ({"stages": 3, "splits": (5, 12)}, "pp_splits 5,12 does not cut 12 layers into 3"),
        ({"stages": 3, "splits": (5,)}, "pp_splits 5 does not cut"),
        ({"splits": (5, 6)}, "pp_splits 5,6 needs more than one stage; expected pp_stages 3"),
        ({"devices": (0, 1)}, "pp_devices 0,1 needs more than one stage; expected pp_stages 2"),
        ({"processes": 2}, "pp_processes 2 needs more than one stage"),
    ],
)
def test_a_bad_flag_is_a_usage_error(flags: dict[str, Any], message: str) -> None:
    opened = Opened(PipelineFlags(**flags))
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            opened.fence()
    assert opened.reports == []


def test_bad_devices_of_a_flag() -> None:
    opened = Opened(PipelineFlags(stages=2, devices=(0, 9)))
    with pytest.raises(PlacementError, match="pp_devices 0,9 names device 9"):
        opened.doors.placement(2, FOUR_GPUS)


def test_flags_of_a_configuration() -> None:
    engine = EngineConfig(pp_stages=3, pp_splits="3,5", pp_devices=[0, 1, 0], pp_processes=2)
    assert PipelineFlags.of(engine) == PipelineFlags(
        stages=3, splits=(3, 5), devices=(0, 1, 0), processes=2
    )
    assert PipelineFlags.of(EngineConfig(pp_splits="auto")).splits == "auto"
    assert PipelineFlags.of(EngineConfig()) == PipelineFlags()


def test_doors_that_are_set_are_listed() -> None:
    opened = Opened(PP_STAGES="2", PRIME_PIPE="0", PP_SPLIT="")
    opened.environ["OTHER"] = "1"
    assert opened.doors.in_effect() == {"LAYLINE_PP_STAGES": "2", "LAYLINE_PRIME_PIPE": "0"}


def placed(doors: Doors) -> Placement | str:
    """The placement, or what is wrong with it."""
    try:
        return doors.placement(2, FOUR_GPUS)
    except PlacementError as error:
        return str(error)


@relaxed
@given(st.dictionaries(st.sampled_from(sorted(DOORS)), words))
def test_no_environment_breaks_the_doors(environ: dict[str, str]) -> None:
    """Whatever is set: a fence that fits, or none; only devices may raise, and then again."""
    reports: list[str] = []
    doors = Doors(environ, PipelineFlags(), reports.append, Opened.auto)
    fence = doors.fence(LAYERS)
    assert fence is None or (fence[0], fence[-1]) == (0, LAYERS)
    assert doors.fence(LAYERS) == fence
    assert doors.prime_chunks.size is None or doors.prime_chunks.size >= 0
    outcomes = [placed(doors) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], Placement) or "LAYLINE_PP_DEVICES" in outcomes[0]
    assert "\n" not in str(outcomes[0])
    assert all("\n" not in report for report in reports)
    assert len(set(reports)) == len(reports)
