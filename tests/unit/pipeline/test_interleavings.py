"""Hundreds of random programs in random interleavings, with the race checker on."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest
from torch import Tensor

from layline.pipeline.controllers import ScriptedController, Seeded
from layline.pipeline.payload import room_for
from layline.pipeline.streams import Streams, make_streams
from layline.pipeline.transport import CutOptions
from support.cut_chain import TIMEOUT_S, WIDTH, Chain, reference, same_bits, steps
from support.happens_before import HappensBefore

BATCHES, SEEDS_EACH = 8, 40


@dataclass(frozen=True)
class Program:
    """What a seed stands for."""

    num_stages: int
    ordinals: list[int]
    window: int
    overlap: bool
    prewarm: bool
    poison: bool
    stalled: list[str]
    inputs: list[Tensor]

    @classmethod
    def of(cls, seed: int) -> Program:
        draw = random.Random(seed)
        num_stages = draw.choice((1, 2, 2, 3, 4, 8))
        return cls(
            num_stages=num_stages,
            ordinals=[draw.randrange(num_stages) for _ in range(num_stages)],
            window=draw.randint(1, 4),
            overlap=draw.random() < 0.6,
            prewarm=draw.random() < 0.4,
            poison=draw.random() < 0.5,
            stalled=[
                name
                for name in [*(f"stage {n}" for n in range(num_stages)), "readback"]
                if draw.random() < 0.15
            ],
            inputs=steps(draw.randint(1, 8), seed=seed, most_rows=draw.choice((1, 6, 40))),
        )

    def run(self, streams: Streams, script: ScriptedController | None = None) -> Chain:
        chain = Chain(
            streams,
            self.num_stages,
            options=CutOptions(TIMEOUT_S, poison=self.poison),
            ordinals=self.ordinals,
        )
        for name in self.stalled if script else ():
            assert script is not None
            script.stall(name)
        if self.prewarm:
            for cut in chain.cuts:
                cut.prewarm(room_for((20, WIDTH), self.inputs[0].dtype))
        run = chain.run(self.inputs, window=self.window, overlap=self.overlap)
        assert same_bits(run.outputs, reference(self.inputs, self.num_stages))
        return chain


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_interleaving_gives_the_bits_of_one_thread(batch: int) -> None:
    """And no race, no undeclared access, no read of another stage's device."""
    # pipeline G16, G17, G18, G19, G20
    for seed in range(batch * SEEDS_EACH, (batch + 1) * SEEDS_EACH):
        script, checker = ScriptedController(Seeded(seed)), HappensBefore()
        with make_streams("cpu", controller=script, recorder=checker) as streams:
            try:
                Program.of(seed).run(streams, script)
            except BaseException as error:
                error.add_note(f"seed {seed}: {list(script.history)[-20:]}")
                raise
        checker.check()
        assert checker.num_accesses > 0
        assert checker.remote_reads == []


def test_free_running_threads_give_them_too() -> None:
    for seed in range(60):
        checker = HappensBefore(watched=False)
        with make_streams("cpu", recorder=checker) as streams:
            Program.of(seed).run(streams)
        checker.check()


def test_several_pipelines_run_beside_each_other() -> None:
    """As simulated ranks do: each host thread drives a set of streams of its own."""
    raised: list[BaseException] = []

    def drive(rank: int) -> None:
        try:
            for seed in range(10 * rank, 10 * rank + 10):
                with make_streams("cpu") as streams:
                    Program.of(seed).run(streams)
        except BaseException as error:
            raised.append(error)

    hosts = [threading.Thread(target=drive, args=(rank,)) for rank in range(4)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(TIMEOUT_S)
    assert raised == []
    assert not any(host.is_alive() for host in hosts)
