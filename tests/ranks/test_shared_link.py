"""Links of real processes that share memory, or agree to exchange messages, and runs over them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, distributed

from layline import LLM, SamplingParams
from layline.cores import allowed_cores
from layline.engine.output import GenerationOutput
from layline.engine.sampled_ids import IdsIn, IdsOut
from layline.engine.stage_program import SAMPLED
from layline.errors import TransferError
from layline.pipeline.cells import Inlet
from layline.pipeline.link_choice import LinkPlan
from layline.pipeline.payload import Payload, room_for
from layline.pipeline.process_link import LinkEnds
from layline.pipeline.readback import PendingResult
from layline.pipeline.shared_link import SharedReceiver, SharedSender
from layline.pipeline.shared_memory import is_supported
from layline.pipeline.stages import stage_home
from layline.pipeline.streams import Streams, make_streams
from layline.topology import Topology
from support.cut_chain import TIMEOUT_S, WIDTH, Stage, reference, same_bits, steps
from support.ranks import run_outcomes, run_processes
from support.tiny import save_tiny

pytestmark = pytest.mark.skipif(not is_supported(), reason="no such memory on this machine")

PAIR = Topology(tp=2)
STEPS = 20
SHARED, MESSAGES = "memory shared between processes", "messages between processes"
Groups = dict[Any, Any]


def plan_of(rank: int, shares: bool = True, timeout_s: float = 20.0) -> LinkPlan:
    """This rank's part of the cut from rank 0 to rank 1, on a group of its own."""
    group = distributed.new_group([0, 1], backend="gloo")
    # One that dies does so once the other one has made its connection, too.
    distributed.barrier(group=group)
    return LinkPlan(LinkEnds("cut 0", 0, 1, peer=1 - rank), group, shares, timeout_s)


def rows(value: float) -> Payload:
    return {"hidden_states": torch.full((2, WIDTH), value)}


def run_stage(streams: Streams, rank: int, plan: LinkPlan) -> tuple[str, list[Tensor]]:
    """The chain's stage of this rank, and what the second one makes of all steps."""
    inputs = steps(STEPS)
    outputs: list[Tensor] = []
    stage = Stage(rank, streams.stream(f"stage {rank}"))
    if rank == 0:
        sender = plan.sender(stage.stream, streams)
        for x in inputs:
            compute = partial(stage.compute, {"hidden_states": x})
            if isinstance(sender, SharedSender):
                stage.stream.run(
                    lambda compute=compute: sender.put(compute()),  # type: ignore[misc]
                    label="layers",
                )
            else:
                cell = stage.stream.run(compute, label="layers")
                sender.send(cell, room_for((x.shape[0], WIDTH), x.dtype), overlap=True)
        kind = sender.kind
    else:
        receiver = plan.receiver(stage.stream, streams)
        for _ in inputs:
            incoming = receiver.receive()
            stage.stream.run(
                lambda incoming=incoming: outputs.append(  # type: ignore[misc]
                    stage.compute(incoming.get())["hidden_states"]
                ),
                label="layers",
            )
        kind = receiver.kind
    stage.stream.synchronize(TIMEOUT_S)
    # The last sends of messages are the link's, behind the stage's own end.
    distributed.barrier(group=plan.group)
    return kind, outputs


def run_stages(
    topology: Topology, groups: Groups, shares: Sequence[tuple[bool, bool]]
) -> list[tuple[str, list[Tensor]]]:
    found = []
    for each in shares:
        plan = plan_of(topology.rank, each[topology.rank])
        with make_streams("cpu") as streams:
            found.append(run_stage(streams, topology.rank, plan))
    return found


def test_two_processes_agree_and_give_the_bits_of_one_thread() -> None:
    """Memory where both may share it, messages on both ends where either may not."""
    # pipeline G13, G16, G18, G20
    shares = [(True, True), (False, True), (True, False), (False, False)]
    wanted = reference(steps(STEPS), 2)
    first, second = run_processes(PAIR, run_stages, shares)
    kinds = [SHARED if all(each) else MESSAGES for each in shares]
    assert [kind for kind, _ in first] == kinds
    assert [kind for kind, _ in second] == kinds
    assert all(same_bits(outputs, wanted) for _, outputs in second)


def meet_late(topology: Topology, groups: Groups) -> list[Any]:
    """Either end is late to make its own, and then to put or to take."""
    rank = topology.rank
    found: list[Any] = []
    for late in (0, 1):
        plan = plan_of(rank)
        with make_streams("cpu") as streams:
            stage = streams.stream(f"stage {rank}")
            if rank == late:
                time.sleep(0.3)
            end = plan.receiver(stage, streams) if rank else plan.sender(stage, streams)
            if rank == late:
                time.sleep(0.3)
            for number in range(3):
                if isinstance(end, SharedSender):
                    end.put(rows(number))
                else:
                    assert isinstance(end, SharedReceiver)
                    found.append(end.receive().get()["hidden_states"])
        distributed.barrier(group=plan.group)
        found.append(end.waited_s)
    return found


def test_a_peer_that_is_late_is_waited_for() -> None:
    # pipeline G18
    sent, taken = run_processes(PAIR, meet_late)
    numbers = [rows(number)["hidden_states"] for number in range(3)]
    for found in (taken[:3], taken[4:7]):
        assert same_bits(found, numbers)
    # The sender filled both slots before it waited for the late receiver.
    assert sent[1] > max(0.2, sent[0])
    assert taken[3] > max(0.2, taken[7])


def wait_for_nobody(topology: Topology, groups: Groups, how: str) -> str:
    """What a rank says whose neighbour makes no end, hands nothing on, takes nothing, or dies."""
    plan = plan_of(topology.rank, timeout_s=1.0)
    alive = 0 if how == "takes nothing" else 1
    if how in ("makes no end", "is gone"):
        if topology.rank != alive:
            time.sleep(0.3 if how == "makes no end" else 0.0)
            os._exit(7)
        time.sleep(0.3 if how == "is gone" else 0.0)
    with make_streams("cpu") as streams:
        stage = streams.stream(f"stage {topology.rank}")
        try:
            end: Any = (plan.receiver if topology.rank else plan.sender)(stage, streams)
            if topology.rank != alive:
                if how == "dies":
                    end.put(rows(0))
                    os._exit(7)
                time.sleep(2.5)
                return ""
            for number in range(3):
                task = partial(end.put, rows(number)) if alive == 0 else end.receive().get
                stage.run(task, label="layers")
            stage.synchronize(TIMEOUT_S)
        except TransferError as error:
            return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "hands nothing on",
            "stage 1 waited for #0 of cut 0 from stage 0 (rank 0) in vain (timeout 1 s)",
        ),
        ("dies", "stage 1 waited for #1 of cut 0 from stage 0 (rank 0) in vain (timeout 1 s)"),
        (
            "takes nothing",
            "stage 0 waited for stage 1 (rank 1) to take #2 of cut 0 in vain (timeout 1 s)",
        ),
    ],
)
def test_a_stage_that_waits_for_nobody_says_for_whom(how: str, message: str) -> None:
    first, second = run_outcomes(PAIR, wait_for_nobody, how)
    assert (first if how == "takes nothing" else second).value == message
    assert first.exit_code == (7 if how == "dies" else 0)


@pytest.mark.parametrize("how", ["makes no end", "is gone"])
def test_a_neighbour_that_makes_no_end_is_named(how: str) -> None:
    dead, alive = run_outcomes(PAIR, wait_for_nobody, how)
    assert dead.exit_code == 7
    wanted = "cut 0: rank 0 did not make its end of the link (timeout 1 s): "
    assert alive.value is not None, alive.error
    assert alive.value.startswith(wanted)
    assert "\n" not in alive.value


def drawn(number: int) -> Tensor:
    """The ids of a step, sometimes none."""
    return torch.arange(number % 4) * 7 + 1000 * number


def exchange_ids(topology: Topology, groups: Groups, shares: Sequence[bool]) -> list[Any]:
    """Rank 1 draws, and every step of rank 0 but the first goes on from what was drawn."""
    found: list[Any] = []
    for share in shares:
        group = distributed.new_group([0, 1], backend="gloo")
        ends = LinkEnds("sampled ids", 1, 0, peer=1 - topology.rank)
        plan = LinkPlan(ends, group, share, 20.0)
        with make_streams("cpu") as streams:
            stage: Any = SimpleNamespace(run=None)
            home = stage_home(topology.rank, streams.stream("stage"), stage)
            if topology.rank == 1:
                ids_out = IdsOut(plan, home, streams, depth=STEPS, most_ids=3)
                before: PendingResult | None = None
                for number in range(STEPS):
                    if before is not None:
                        ids_out.wanted(before)
                    task = partial(draw, number, ids_out.poster(number))
                    cell = home.stream.run(task, label=f"step {number}")
                    before = PendingResult(cell, home.stream, streams)
            else:
                ids_in = IdsIn(plan, home, streams)
                entries = [ids_in.entering(number) for number in range(STEPS - 1)]
                cells = [
                    home.stream.run(lambda entry=entry: entry.get()[SAMPLED], label="feed")  # type: ignore[misc]
                    for entry in entries
                ]
                home.stream.synchronize(TIMEOUT_S)
                found.append((isinstance(entries[0], Inlet), [cell.get() for cell in cells]))
            home.stream.synchronize(TIMEOUT_S)
            distributed.barrier(group=group)
    return found


def draw(number: int, post: Any) -> Any:
    """A step of the last stage: ``post`` is given what it drew."""
    time.sleep(number % 3 * 1e-3)
    if post is not None:
        post(drawn(number))
    return SimpleNamespace(drawn=SimpleNamespace(token_ids=drawn(number)))


def test_ids_come_back_on_a_board_and_in_messages() -> None:
    # pipeline G16
    found, _ = run_processes(PAIR, exchange_ids, (True, False))
    assert [on_a_board for on_a_board, _ in found] == [True, False]
    for _, ids in found:
        assert len(ids) == STEPS - 1
        assert all(torch.equal(each, drawn(number)) for number, each in enumerate(ids))


# Whole runs.

PROMPTS = [[5 + 7 * n % 150 for n in range(37)], [44, 2, 8, 100, 17, 61], [7] * 5, [3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
TWO: dict[str, Any] = {"pp_stages": 2, "pp_processes": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    save_tiny(directory, "Llama", num_hidden_layers=4)
    return directory


def load(path: Path, **flags: Any) -> LLM:
    return LLM(str(path), **{"batch_invariant": True, "threads": 1, **flags})


def found_in(outputs: Sequence[GenerationOutput]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in outputs]


def workers() -> list[psutil.Process]:
    """The ranks that this process has started, in their order."""
    found = [
        child for child in psutil.Process().children() if "layline.engine.worker" in child.cmdline()
    ]
    return sorted(found, key=lambda child: int(child.cmdline()[-3]))


def shared_by(process: psutil.Process) -> set[str]:
    """What memory of ours a process has open, by name."""
    links = [path.readlink().name for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    names = [name.removesuffix(" (deleted)") for name in links]
    return {name.partition(":")[2] for name in names if name.startswith("memfd:layline ")}


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[tuple[Any, ...]]:
    with load(path) as llm:
        return found_in(llm.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("door", ["", "0"])
def test_a_run_answers_alike_over_memory_and_over_messages(
    path: Path, wanted: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    # pipeline G13, G39
    monkeypatch.setenv("LAYLINE_PP_SHARED_MEMORY", door)
    with load(path, **TWO) as llm:
        assert found_in(llm.generate(PROMPTS, GREEDY)) == wanted
        shared = set() if door == "0" else {"layline cut 0", "layline sampled ids"}
        assert [shared_by(each) for each in workers()] == [shared, shared]


def test_more_guesses_than_requests_are_drawn_at_once(path: Path) -> None:
    """A board has room for a row of each guess."""
    # pipeline G44
    flags = {"speculative": "ngram", "max_running": 2}
    prompts = [[7, 8, 9] * 6, [5, 6] * 8, [3, 4] * 7]
    params = replace(GREEDY, max_tokens=20)
    with load(path, **flags) as llm:
        alone = found_in(llm.generate(prompts, params))
        assert llm.stats().drafted > 0
    with load(path, **TWO, **flags) as llm:
        assert found_in(llm.generate(prompts, params)) == alone


def busiest_thread(process: psutil.Process, before: dict[str, int]) -> str:
    """The thread that has run for longest since ``before``: its stage's stream, in a generation."""
    now = seconds_of(process)
    return max(now, key=lambda thread: now[thread] - before.get(thread, 0))


def seconds_of(process: psutil.Process) -> dict[str, int]:
    """By thread, for how long it has run, in nanoseconds."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        found[task.name] = int((task / "schedstat").read_text().split()[0])
    return found


def cores_of(process: psutil.Process, thread: str) -> set[int]:
    """The cores that a thread may run on, of which /proc tells ranges."""
    status = Path(f"/proc/{process.pid}/task/{thread}/status").read_text()
    (line,) = [each for each in status.splitlines() if each.startswith("Cpus_allowed_list:")]
    found: set[int] = set()
    for part in line.split()[1].split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("door", ["", "0"])
def test_a_stage_keeps_to_its_share_of_the_cores(
    path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """When threads take all of them, and unless the door is shut."""
    every = allowed_cores()
    if len(every) < 2:
        pytest.skip("one core: two stages have no share each")
    monkeypatch.setenv("LAYLINE_PP_BIND", door)
    share = len(every) // 2
    own = [set(sorted(every)[rank * share : (rank + 1) * share]) for rank in range(2)]
    with load(path, **TWO, threads=2 * share) as llm:
        stages = workers()
        llm.generate(PROMPTS, GREEDY)
        before = [seconds_of(each) for each in stages]
        llm.generate(PROMPTS * 4, replace(GREEDY, max_tokens=24))
        threads = [busiest_thread(*each) for each in zip(stages, before, strict=True)]
        found = [cores_of(*each) for each in zip(stages, threads, strict=True)]
    assert found == (own if door == "" else [set(every)] * 2)
    assert allowed_cores() == every


def test_stages_with_fewer_threads_than_cores_are_not_kept_to_any(path: Path) -> None:
    """Others may be meant to use the rest."""
    every = allowed_cores()
    with load(path, **TWO, threads=2 * (len(every) // 2 + 1)) as llm:
        llm.generate(PROMPTS[-1:], replace(GREEDY, max_tokens=2))
        for process in workers():
            assert all(cores_of(process, each) == every for each in seconds_of(process))
