"""Every failure class of a cut, re-created and seen red: by bits, by the race checker, or both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from layline.errors import CellNotReadyError, RunError, UsageError
from layline.pipeline.controllers import Listed, Policy, ScriptedController, Seeded
from layline.pipeline.faults import Fault, Faults
from layline.pipeline.streams import Streams, make_streams
from layline.pipeline.transport import CutOptions
from support.cut_chain import TIMEOUT_S, Chain, reference, same_bits, steps
from support.happens_before import HappensBefore

NO_FAULT = Faults()
SEEDS = 30

# Which races the checker must name, by fault: the first words of the two accesses.
RACES = {
    Fault.DROP_RX_WAIT: r"read by 'cut 0 rx #\d+' .* write by 'cut 0 tx #\d+'",
    Fault.DROP_TX_WAIT: r"write by 'cut 0 tx #\d+' .* read by 'cut 0 rx #\d+'",
    Fault.EARLY_RX_RECORD: r"read by 'cut 0 rx #\d+' .* write by 'cut 0 tx #\d+'",
    Fault.RETURN_SLOT_VIEW: r"read by 'layers of stage 1' .* write by 'cut 0 tx #\d+'",
    Fault.SKIP_GROWTH_SYNC: r"write by 'clear cut 0 slot 0' .* write by 'cut 0 tx #0'",
    Fault.FIRST_USE_CLEAR_LATE: r"write by 'clear cut 0 slot 0' .* write by 'cut 0 tx #0'",
    Fault.DROP_READBACK_WAIT: r"write by 'logits' .* read by 'read back logits'",
}
# What is slow or wrong without a race.
OTHERWISE = {
    Fault.SKIP_ISSUE_CHECK,
    Fault.ONE_SLOT_ONLY,
    Fault.KEEP_WIDER_LAYOUT,
    Fault.DRAIN_ALL_STEPS,
}
# Those of whole walks; test_loops.py sees them red.
OF_THE_RUNTIME = {
    Fault.SHARED_SCRATCH,
    Fault.DROP_ENTRY_FENCE,
    Fault.DROP_PUBLISH,
    Fault.DROP_BIRTH_BARRIER,
    Fault.DROP_LOAD_BARRIER,
    Fault.NEVER_SPLIT,
    Fault.SERIAL_CHUNKS,
    Fault.SKIP_PREWARM,
    Fault.EMPTY_UNDERFLOW,
}


def run_chain(
    fault: Fault | None,
    policy: Policy | None = None,
    *,
    stalled: Sequence[str] = (),
    poison: bool = False,
    drive: Callable[[Chain], list[Tensor]] | None = None,
) -> tuple[bool, HappensBefore]:
    """Whether a chain with ``fault`` gave other bits than no chain at all, and its checker."""
    faults = NO_FAULT if fault is None else Faults(frozenset({fault}))
    script, checker = ScriptedController(policy), HappensBefore()
    options = CutOptions(TIMEOUT_S, poison=poison, faults=faults)
    inputs = steps(12)
    with make_streams("cpu", controller=script, recorder=checker) as streams:
        chain = Chain(streams, 2, options=options)
        for name in stalled:
            script.stall(name)
        try:
            outputs = drive(chain) if drive else chain.run(inputs, window=4).outputs
        except (CellNotReadyError, RunError):
            return True, checker
    return not same_bits(outputs, reference(inputs, 2)), checker


def test_every_fault_is_seen_here() -> None:
    assert set(RACES) | OTHERWISE | OF_THE_RUNTIME == set(Fault)


@pytest.mark.parametrize("fault", RACES)
def test_the_checker_sees_a_race_in_every_interleaving(fault: Fault) -> None:
    """Also in those where no bit is wrong, because it needs no luck."""
    for seed in range(5):
        _, checker = run_chain(fault, Seeded(seed))
        assert any(re.search(RACES[fault], race) for race in checker.races), checker.races[:3]
    _, checker = run_chain(None, Seeded(0))
    assert checker.races == []


@pytest.mark.parametrize("fault", RACES)
def test_some_interleavings_show_a_race_in_the_bits_and_none_without(fault: Fault) -> None:
    red = [run_chain(fault, Seeded(seed))[0] for seed in range(SEEDS)]
    assert any(red)
    assert not any(run_chain(None, Seeded(seed))[0] for seed in range(SEEDS))


@pytest.mark.parametrize(
    ("fault", "policy", "stalled"),
    [
        (Fault.DROP_RX_WAIT, Listed("stage 0"), ["stage 1"]),
        (Fault.DROP_TX_WAIT, Listed("stage 1"), ["stage 0"]),
        (Fault.SKIP_GROWTH_SYNC, Listed("stage 0"), ["stage 1"]),
        (Fault.FIRST_USE_CLEAR_LATE, Listed("stage 0"), ["stage 1"]),
        (Fault.DROP_READBACK_WAIT, Listed("readback"), ["stage 1"]),
    ],
)
def test_a_stalled_end_shows_it_in_the_bits_at_once(
    fault: Fault, policy: Policy, stalled: list[str]
) -> None:
    # pipeline G17, G18
    assert run_chain(fault, policy, stalled=stalled)[0]
    assert not run_chain(None, policy, stalled=stalled)[0]


@pytest.mark.parametrize("fault", [Fault.DROP_TX_WAIT, Fault.RETURN_SLOT_VIEW])
def test_poison_shows_what_is_read_too_early_or_too_late(fault: Fault) -> None:
    """As NaN, where what an earlier step left could look right."""

    def drive(chain: Chain) -> list[Tensor]:
        same = [steps(1)[0]] * 8
        chain.cuts[0].prewarm(4096)
        return chain.run(same, window=4).outputs

    def is_red(fault: Fault | None, seed: int) -> bool:
        outputs: list[Tensor] = []

        def keep(chain: Chain) -> list[Tensor]:
            outputs.extend(drive(chain))
            return outputs

        run_chain(fault, Seeded(seed), poison=True, drive=keep)
        return any(bool(each.isnan().any()) for each in outputs)

    assert any(is_red(fault, seed) for seed in range(SEEDS))
    assert not any(is_red(None, seed) for seed in range(SEEDS))


def test_an_issue_out_of_order_overwrites_what_nobody_has_read() -> None:
    """Without the check a third send reuses the first slot, and the checker sees the race."""
    # pipeline G24

    def drive(chain: Chain) -> list[Tensor]:
        cells = []
        first, second = chain.stages
        (cut,) = chain.cuts
        cut.prewarm(4096)
        inputs = steps(12)
        for start in range(0, 12, 3):
            for x in inputs[start : start + 3]:
                cell = first.stream.run(
                    lambda x=x: first.compute({"hidden_states": x}),
                    writes=(first.state,),
                    label="layers of stage 0",
                )
                cut.send(cell, 4096, overlap=True)
            for _ in range(3):
                arrived = cut.receive()
                cells.append(
                    second.stream.run(
                        lambda arrived=arrived: second.compute(arrived.get()),
                        reads=arrived.buffers,
                        writes=(second.state,),
                        label="layers of stage 1",
                    )
                )
        return [chain.pending(cell).wait(TIMEOUT_S) for cell in cells]

    red, checker = run_chain(Fault.SKIP_ISSUE_CHECK, drive=drive)
    assert red
    assert checker.races == [], "ordered, and still wrong: only the check at issue can tell"


def test_overlap_can_be_lost_with_equal_bits() -> None:
    """What the slots' order shows, and bits and the checker cannot."""  # pipeline G22

    def slots(fault: Fault | None) -> list[int]:
        used: list[int] = []

        def drive(chain: Chain) -> list[Tensor]:
            run = chain.run(steps(12), window=4, overlap=True)
            used.extend(run.slots)
            return run.outputs

        red, checker = run_chain(fault, Seeded(1), drive=drive)
        assert not red
        checker.check()
        return used

    assert slots(None) == [0, 1] * 6
    assert slots(Fault.ONE_SLOT_ONLY) == [0] * 12


def test_a_payload_received_at_an_earlier_width_has_other_rows() -> None:
    # pipeline G20
    red, checker = run_chain(Fault.KEEP_WIDER_LAYOUT)
    assert red
    assert checker.races == []


def test_faults_are_named_and_none_by_default() -> None:
    assert not any(fault in NO_FAULT for fault in Fault)
    parsed = Faults.parse(["drop_rx_wait", "early_rx_record"])
    assert Fault.DROP_RX_WAIT in parsed
    assert Fault.DROP_TX_WAIT not in parsed
    with pytest.raises(
        UsageError, match=r"fault 'drop_rx_wiat' is not one of .*did you mean 'drop"
    ):
        Faults.parse(["drop_rx_wiat"])


def test_reading_a_step_back_can_drain_the_others() -> None:
    """Equal bits again; a held last stage tells the two apart."""  # pipeline G35

    def last_of(streams: Streams, script: ScriptedController, faults: Faults) -> Tensor:
        chain = Chain(streams, 2, options=CutOptions(TIMEOUT_S, faults=faults))
        pending = chain.issue(torch.ones(2, 8), overlap=False)
        script.run_all()
        script.hold("stage 1")
        chain.issue(torch.ones(2, 8), overlap=False)
        return pending.wait(TIMEOUT_S)

    for faults in (NO_FAULT, Faults(frozenset({Fault.DRAIN_ALL_STEPS}))):
        script = ScriptedController()
        with make_streams("cpu", controller=script) as streams:
            if faults.names:
                with pytest.raises(RunError, match="deadlock: the host waits"):
                    last_of(streams, script, faults)
            else:
                assert last_of(streams, script, faults).shape == (2, 8)
