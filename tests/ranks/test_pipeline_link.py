"""A cut between real processes over gloo: bits, a peer that is late, and one that dies."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
from torch import Tensor, distributed

from layline.errors import TransferError
from layline.pipeline.payload import layout_of, room_for
from layline.pipeline.process_link import LinkEnds, LinkReceiver, LinkSender
from layline.pipeline.streams import make_streams
from layline.pipeline.torch_wire import TorchWire
from layline.pipeline.transport import CutOptions
from layline.topology import Topology
from support.cut_chain import TIMEOUT_S, WIDTH, Stage, reference, same_bits, steps
from support.ranks import run_outcomes, run_processes

PAIR = Topology(tp=2)
STEPS = 20
Groups = dict[Any, Any]


def wires(rank: int, timeout_s: float = 20.0) -> TorchWire:
    """This rank's end of the cut from rank 0 to rank 1, on a group of its own."""
    group = distributed.new_group([0, 1], backend="gloo")
    # One that dies does so once the other one has made its connection, too.
    distributed.barrier(group=group)
    return TorchWire(LinkEnds("cut 0", 0, 1, peer=1 - rank), group, timeout_s=timeout_s)


def run_stage(topology: Topology, groups: Groups, overlap: bool) -> list[Tensor]:
    inputs = steps(STEPS)
    wire = wires(topology.rank)
    outputs: list[Tensor] = []
    with make_streams("cpu") as streams:
        stage = Stage(topology.rank, streams.stream(f"stage {topology.rank}"))
        if topology.rank == 0:
            link = LinkSender(
                "cut 0", stage.stream, streams, wire, options=CutOptions(TIMEOUT_S, poison=True)
            )
            for x in inputs:
                cell = stage.stream.run(
                    lambda x=x: stage.compute({"hidden_states": x}), label="layers"
                )
                link.send(cell, room_for((x.shape[0], WIDTH), x.dtype), overlap=overlap)
        else:
            receiver = LinkReceiver("cut 0", stage.stream, streams, wire)
            for _ in inputs:
                incoming = receiver.receive()
                stage.stream.run(
                    lambda incoming=incoming: outputs.append(
                        stage.compute(incoming.get())["hidden_states"]
                    ),
                    label="layers",
                )
        stage.stream.synchronize(TIMEOUT_S)
        # The last sends are the link's, behind the stage's own end.
        distributed.barrier(group=distributed.new_group([0, 1], backend="gloo"))
    return outputs


def test_two_processes_give_the_bits_of_one_thread() -> None:
    """With one slot and with two; the sender's memory is poisoned once it has been sent."""
    # pipeline G13, G16, G18, G20
    for overlap in (False, True):
        _, outputs = run_processes(PAIR, run_stage, overlap)
        assert same_bits(outputs, reference(steps(STEPS), 2))


def receive_from_nobody(topology: Topology, groups: Groups, how: str) -> str:
    wire = wires(topology.rank, timeout_s=1.0)
    if topology.rank == 0:
        if how == "dies":
            os._exit(7)
        time.sleep(4.0 if how == "late" else 0.0)
        return ""
    with make_streams("cpu") as streams:
        stage = streams.stream("stage 1")
        LinkReceiver("cut 0", stage, streams, wire).receive()
        try:
            stage.synchronize(TIMEOUT_S)
        except TransferError as error:
            return str(error)
    return "nothing was raised"


def test_a_stage_that_gets_nothing_says_from_whom() -> None:
    _, message = run_processes(PAIR, receive_from_nobody, "late")
    assert "stage 1 waited for #0 of cut 0 from stage 0 (rank 0) in vain (timeout 1 s)" in message


def test_a_stage_whose_neighbour_dies_says_so_too() -> None:
    dead, alive = run_outcomes(PAIR, receive_from_nobody, "dies")
    assert dead.exit_code == 7
    assert "stage 1 waited for #0 of cut 0 from stage 0 (rank 0) in vain" in alive.value


def send_to_nobody(topology: Topology, groups: Groups) -> str:
    wire = wires(topology.rank, timeout_s=1.0)
    if topology.rank == 1:
        time.sleep(4.0)
        return ""
    with make_streams("cpu") as streams:
        stage = streams.stream("stage 0")
        link = LinkSender("cut 0", stage, streams, wire, options=CutOptions(TIMEOUT_S))
        for _ in range(2):
            cell = stage.run(lambda: {"hidden_states": torch.ones(2, WIDTH)}, label="layers")
            link.send(cell, 256)
        try:
            stage.synchronize(TIMEOUT_S)
        except TransferError as error:
            return str(error)
    return "nothing was raised"


def test_a_stage_whose_payload_nobody_takes_says_so() -> None:
    message, _ = run_processes(PAIR, send_to_nobody)
    assert "stage 0 waited for stage 1 (rank 1) to take #0 of cut 0 in vain" in message


def send_in_another_order(topology: Topology, groups: Groups) -> str:
    """The sender skips a step: gloo would deliver the next one's bytes without a word."""
    wire = wires(topology.rank, timeout_s=2.0)
    payload = {"hidden_states": torch.ones(2, WIDTH)}
    if topology.rank == 0:
        layout = layout_of(payload)
        with contextlib.suppress(TransferError):
            wire.send(1, layout, torch.zeros(layout.size, dtype=torch.uint8))
        return ""
    try:
        wire.receive(0)
    except TransferError as error:
        return str(error)
    return "nothing was raised"


def test_a_skipped_step_is_noticed() -> None:
    outcomes = run_outcomes(PAIR, send_in_another_order, timeout_s=30.0)
    assert outcomes[1].value == (
        "cut 0: #1 of cut 0 came where #0 was due; the processes run different steps"
    )
