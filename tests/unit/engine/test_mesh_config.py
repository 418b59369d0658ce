"""The mesh's part of the configuration: what is refused, and how threads are divided."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from layline.config import EngineConfig, default_threads, elastic_environment, threads_of_rank
from layline.engine.balance import SampleRow
from layline.engine.elastic import Control, World, meet
from layline.engine.executor import RowSpec, SamplingRows
from layline.engine.launch import launch
from layline.engine.step import RankStep
from layline.errors import RunError, UsageError
from layline.layers.sampling_state import RowState
from layline.layers.spans import SequenceSpan
from layline.sampling import SamplingParams
from support.tiny import save_tiny

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tp 0": ({"tp": 0}, "tp 0 must be a positive integer"),
    "tp text": ({"tp": "2"}, "tp '2' must be a positive integer"),
    "tp huge": ({"tp": 5000}, "tp 5000 is too large; the most is 1024"),
    "dp over tp": ({"tp": 3, "attn_dp": 2}, r"attn_dp 2 x attn_cp 1 = 2 .* tp 3; .* 1, 3"),
    "ep over tp": ({"tp": 2, "ep": 3}, "ep 3 does not divide tp 2; expected one of 1, 2"),
    "dense_tp": ({"tp": 4, "dense_tp": 2}, "dense_tp 2 does not fit tp 4; expected 1 or 4"),
    "pp 0": ({"pp_stages": 0}, "pp_stages 0 must be a positive integer"),
    "pp huge": ({"pp_stages": 5000}, "pp_stages 5000 is too large; the most is 1024"),
    "splits word": ({"pp_splits": "autp"}, "pp_splits 'autp' has 'autp'; expected whole numbers"),
    "splits 0": ({"pp_splits": (0, 3)}, r"pp_splits \(0, 3\) has 0; expected whole numbers from 1"),
    "splits empty": ({"pp_splits": ()}, r"pp_splits \(\) is empty; expected whole numbers"),
    "splits bool": ({"pp_splits": [True]}, "has True; expected whole"),
    "splits order": ({"pp_splits": "9,4,4"}, "pp_splits 9,4,4 must increase; the nearest is 4,9"),
    "splits count": (
        {"pp_stages": 2, "pp_splits": "4,9"},
        "pp_splits 4,9 makes 3 stages, but pp_stages is 2; expected 1 layer numbers, or auto",
    ),
    "devices sign": ({"pp_devices": "0,-1"}, "pp_devices '0,-1' has '-1'; expected whole numbers"),
    "devices huge": ({"pp_devices": [1 << 20]}, "expected whole numbers from 0 to 65536"),
    "devices count": (
        {"pp_stages": 3, "pp_devices": "0,1"},
        "pp_devices 0,1 names 2 devices, but pp_stages is 3; expected 3, one for each stage",
    ),
    "processes 0": ({"pp_processes": 0}, "pp_processes 0 must be a positive integer"),
    "processes": ({"pp_stages": 2, "pp_processes": 3}, "3 is more than pp_stages 2; expected 1"),
    "padding": ({"dp_padding": "max_len"}, "'max_len' is not one of .*did you mean 'max-len'"),
    "layout": ({"cp_layout": "zig-zag"}, "did you mean 'zigzag'"),
    "flag": ({"sequence_parallel": 1}, "sequence_parallel 1 must be True or False"),
    "sp alone": ({"sequence_parallel": True}, "tp 1 has one; expected tp >= 2"),
    "sp dp": ({"tp": 2, "attn_dp": 2, "sequence_parallel": True}, "with attn_dp 2; .* attn_dp 1"),
    "sp cp": ({"tp": 2, "attn_cp": 2, "sequence_parallel": True}, "with attn_cp 2; .* attn_cp 1"),
    "is dense": ({"tp": 2, "dense_tp": 1, "input_scattered": True}, "dense_tp 1.*dense_tp 2"),
    "is alone": ({"input_scattered": True}, "input_scattered scatters rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mesh_that_cannot_be_is_refused(name: str) -> None:  # boundary G18
    flags, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        EngineConfig(**flags)


def test_a_mesh_is_the_topology_of_rank_0() -> None:
    topology = EngineConfig(tp=8, attn_dp=2, attn_cp=2, dense_tp=1).topology()
    assert (topology.attn_tp, topology.world_size, topology.rank) == (2, 8, 0)
    assert topology.dense_tp == 1
    assert EngineConfig(tp=2, sequence_parallel=True, input_scattered=True).topology().tp == 2


def test_stages_are_divided_over_processes() -> None:
    engine = EngineConfig(tp=2, pp_stages=6, pp_processes=3, pp_splits=[1, 2, 3, 4, 5])
    assert engine.topology().world_size == 6
    assert engine.pp_splits == (1, 2, 3, 4, 5)
    assert EngineConfig(pp_stages=6).topology().is_single, "one process drives all stages"
    assert EngineConfig(**asdict(engine)) == engine, "as a rank receives it"
    assert EngineConfig(pp_stages=2, pp_splits="auto").pp_splits == "auto"


DRAFT = {"speculative": "draft", "speculative_model": "self"}
ON_CUDA = "pipeline stages on device 'cuda' in this version; expected"


@pytest.mark.parametrize(
    ("flags", "door", "message"),
    [
        ({"pp_stages": 2, **DRAFT}, "", "speculative draft does not run with 2 pipeline stages"),
        (DRAFT, "3", "speculative draft does not run with 3 pipeline stages .* expected ngram"),
        ({"pp_stages": 2, "tp": 2, "device": "cuda"}, "", f"tp 2 does not run with 2 {ON_CUDA}"),
        (
            {"pp_stages": 3, "pp_processes": 2, "device": "cuda"},
            "",
            f"pp_processes 2 does not run with 3 {ON_CUDA}",
        ),
    ],
)
def test_what_stages_do_not_go_with_is_refused_before_a_weight_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    door: str,
    message: str,
) -> None:
    save_tiny(tmp_path, "Llama")
    monkeypatch.setenv("LAYLINE_PP_STAGES", door)
    for reads in (
        "layline.engine.model.load_alone",
        "layline.engine.pipeline_load.load_part",
        "layline.engine.launch.spawn",
    ):
        monkeypatch.setattr(reads, None)
    flags = {k: str(tmp_path) if v == "self" else v for k, v in flags.items()}
    with pytest.raises(UsageError, match=message):
        launch(EngineConfig(model=str(tmp_path), **flags))


def test_weights_on_one_device_do_not_go_with_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "Llama")
    monkeypatch.setenv("LAYLINE_PP_SHARD", "0")
    with pytest.raises(UsageError, match="pp_processes 2 does not go with LAYLINE_PP_SHARD=0"):
        launch(EngineConfig(model=str(tmp_path), pp_stages=2, pp_processes=2))


def test_a_bad_door_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "Llama")
    monkeypatch.setenv("LAYLINE_PP_STAGES", "99")
    _, executor = launch(EngineConfig(model=str(tmp_path)))
    executor.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "LAYLINE_PP_STAGES 99 is more than the model's 3 layers" in record.getMessage()


def test_threads_are_divided_over_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert default_threads() == 8
    assert [threads_of_rank(None, ranks) for ranks in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    assert [threads_of_rank(5, ranks) for ranks in (1, 2, 9)] == [5, 2, 1]


def test_a_world_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert elastic_environment() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert elastic_environment() == (2, 2, 2, 2, "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    assert elastic_environment() == (2, 2, 2, 2, "10.0.0.7")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert elastic_environment() is None
    with pytest.raises(UsageError, match="tp 2 needs 2 processes, but torchrun started 3"):
        World(0, 3, 0, 3).check(EngineConfig(tp=2).topology())
    with pytest.raises(UsageError, match=r"tp 4, or --nnodes times --nproc-per-node to be 2$"):
        World(0, 4, 0, 2).check(EngineConfig(tp=2).topology())
    World(0, 2, 0, 2).check(EngineConfig(tp=2, attn_dp=2).topology())


def drawn(rows: SamplingRows, fed: int, index: int) -> tuple[int, float]:
    part = RankStep(1, (SequenceSpan(4, 1, [1], 5),), (fed,), (True,))
    (state,) = rows.at(part, [SampleRow(0, index)])
    return state.num_produced, state.uniform()


def test_a_step_that_runs_twice_draws_the_same() -> None:
    rows = SamplingRows()
    params = SamplingParams(seed=1, presence_penalty=1.0)
    none: frozenset[int] = frozenset()
    rows.admit(
        0,
        RowSpec(
            params=params, seed=1, valid_vocab=50, prompt_ids=[3], eos_ids=none, banned_ids=none
        ),
    )
    first = drawn(rows, 3, 0)
    assert drawn(rows, 3, 0) == first
    second = drawn(rows, 11, 1)
    assert second != first
    assert drawn(rows, 11, 1) == second
    state = rows._requests[0].state
    assert isinstance(state, RowState)
    assert state.seen is not None
    assert state.seen.ids.tolist() == [11]
    rows.release(0)
    rows.release(0)
    with pytest.raises(KeyError):
        drawn(rows, 12, 2)


def greet(address: tuple[str, int], words: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=10)
    sock.sendall(words)
    return sock


def test_only_ranks_with_the_token_are_let_in() -> None:
    control = Control(World(0, 3, 0, 3))
    host, port, token = control.invitation.split()
    assert host == "127.0.0.1"
    address = (host, int(port))
    strangers = [
        b"GET / HTTP/1.1\r\nHost: somewhere.else.example.org\r\n\r\n",
        f"{'0' * len(token)} {1:8}".encode(),
        f"{token} {0:8}".encode(),
        f"{token} {3:8}".encode(),
        f"{token} {'x':>8}".encode(),
        b"\xff" * (len(token) + 9),
    ]
    socks = [greet(address, words) for words in strangers]
    socks += [greet(address, f"{token} {rank:8}".encode()) for rank in (2, 2, 1)]
    found = control.accept()
    assert sorted(found) == [1, 2]
    assert found[1].getpeername() == socks[-1].getsockname()
    assert found[2].getpeername() == socks[-3].getsockname()
    for sock in (*socks, *found.values()):
        sock.close()
    with pytest.raises(OSError, match="refused"):
        greet(address, b"")


def test_rank_0_listens_where_other_machines_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Control(World(0, 2, 0, 1, "127.0.0.1")).host == "127.0.0.1", "both are on this machine"
    assert Control(World(0, 2, 0, 2, "203.0.113.9")).host == "127.0.0.1"
    with pytest.raises(UsageError, match=r"cannot listen at MASTER_ADDR '203.0.113.9': Cannot as"):
        Control(World(0, 2, 0, 1, "203.0.113.9"))
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
    with pytest.raises(UsageError, match=r"MASTER_ADDR 'node0' is 127.0.1.1 on its own machine; "):
        Control(World(0, 2, 0, 1, "node0"))


def test_a_torchrun_that_has_ended_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RunError, match=r"^rank 1 cannot reach torchrun's store at 127.0.0.1: "):
        meet(World(1, 2, 0, 1, "127.0.0.1"))
