"""Runs that torchrun spreads over hosts: same text, and an end on both when one is lost.

Network namespaces stand in for hosts: each has a loopback interface and an address of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from layline import LLM, SamplingParams
from support.hosts import Host, two_hosts
from support.serving import save_talker, wait_for
from support.tiny import save_tiny

PORT = "29511"
STAGES = ("--pp-stages", "2", "--pp-processes", "2")
LOST = (
    "layline: rank 1 is done: rank 0 at 10.77.0.1, which drives the run, has ended it or cannot be "
    "reached"
)
Hosts = tuple[Host, Host]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as found:
        yield found


@pytest.fixture(scope="module")
def tiny(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def talker(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that goes on for thousands of tokens."""
    path = tmp_path_factory.mktemp("talker")
    save_talker(path, context=1 << 16)
    return path


@pytest.fixture(scope="module")
def alone(tiny: Path) -> tuple[str, list[int]]:
    """Text and ids of one process."""
    with LLM(str(tiny), threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        (output,) = llm.generate(["w3 w7 w9"], params)
    return output.text, output.token_ids


def short(model: Path) -> list[str]:
    arguments = ["generate", "w3 w7 w9", "--model", str(model), "--max-tokens", "12"]
    return [*arguments, "--temperature", "0", "--json"]


def endless(model: Path) -> list[str]:
    return ["generate", "w1 w2", "--model", str(model), "--max-tokens", "60000", *STAGES]


@dataclass
class Node:
    """A torchrun on a host, and the files that it and its ranks write to."""

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def lines(self) -> list[str]:
        """What Layline said in errors."""
        return [line for line in self.log.read_text().splitlines() if line.startswith("layline: ")]

    def exit_status(self) -> str | None:
        """That of its rank, as torchrun reports a failed one."""
        found = re.search(r"^ *exitcode *: (\S+)", self.log.read_text(), re.MULTILINE)
        return None if found is None else found[1]


@contextmanager
def torchrun(
    hosts: Hosts, folder: Path, arguments: Sequence[str], ranks: int = 1
) -> Iterator[tuple[Node, Node]]:
    """One command on both hosts, with so many ``ranks`` on each; nothing of it stays."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    nodes = []
    with ExitStack() as stack:
        for number, host in enumerate(hosts):
            run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            run += ["--nproc-per-node", str(ranks), "--node-rank", str(number)]
            run += ["--master-addr", hosts[0].address, "--master-port", PORT]
            out, log = folder / f"out-{number}", folder / f"log-{number}"
            process = subprocess.Popen(
                host.command(*run, "-m", "layline", *arguments),
                stdout=stack.enter_context(out.open("wb")),
                stderr=stack.enter_context(log.open("wb")),
                env=environment,
            )
            stack.callback(process.wait, 10)
            stack.callback(host.end_all)
            nodes.append(Node(process, out, log))
        yield nodes[0], nodes[1]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, STAGES), (1, ("--tp", "2")), (2, (*STAGES, "--tp", "2"))],
    ids=["stages", "tp", "stages-tp"],
)
def test_two_hosts_answer_like_one_process(
    hosts: Hosts,
    tiny: Path,
    tmp_path: Path,
    alone: tuple[str, list[int]],
    ranks: int,
    flags: tuple[str, ...],
) -> None:
    with torchrun(hosts, tmp_path, [*short(tiny), *flags], ranks) as nodes:
        for node in nodes:
            assert node.process.wait(60) == 0, node.log.read_text()
        assert [host.processes() for host in hosts] == [[], []]
    first, second = nodes
    found = json.loads(first.out.read_text())
    assert (found["text"], found["token_ids"]) == alone
    assert second.out.read_text() == "", "one process prints, once"


def lost_stage(what: str) -> str:
    title = r"layline: rank 1 \(stage 1, attention DP 0, TP 0\)"
    return rf"{title} {what} while step \d+ was waited for; the run is over"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_on_the_other_host(
    hosts: Hosts, talker: Path, tmp_path: Path, victim: int
) -> None:
    with torchrun(hosts, tmp_path, endless(talker)) as nodes:
        wait_for(lambda: nodes[0].out.stat().st_size > 2, seconds=60)
        begin = time.monotonic()
        hosts[victim].rank(victim).kill()
        assert [node.process.wait(30) for node in nodes] == [1, 1]
        assert time.monotonic() - begin < 15
        wait_for(lambda: not any(host.processes() for host in hosts))
    there, here = nodes[victim], nodes[1 - victim]
    assert there.lines() == []
    (line,) = here.lines()
    assert re.fullmatch(lost_stage("ended unexpectedly") if victim else re.escape(LOST), line), line
    assert here.exit_status() == "3"


def test_a_cut_cable_ends_the_run_on_both_hosts(hosts: Hosts, talker: Path, tmp_path: Path) -> None:
    with torchrun(hosts, tmp_path, endless(talker)) as nodes:
        wait_for(lambda: nodes[0].out.stat().st_size > 2, seconds=60)
        with hosts[1].cut_off():
            begin = time.monotonic()
            assert [node.process.wait(40) for node in nodes] == [1, 1]
            assert time.monotonic() - begin < 20
            wait_for(lambda: not any(host.processes() for host in hosts))
    (line,) = nodes[0].lines()
    assert re.fullmatch(lost_stage("stopped answering: no heartbeat for 8 s"), line), line
    assert nodes[1].lines() == [LOST]
    assert [node.exit_status() for node in nodes] == ["3", "3"]
