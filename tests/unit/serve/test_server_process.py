"""``layline serve`` as a process, asked by OpenAI's own client and by ones that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from support.serving import NAME, Server, serving, wait_for

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "w2 w6"}]
LONG = {"model": NAME, "messages": MESSAGES, "stream": True, "ignore_eos": True}


def sdk(server: Server, **options: Any) -> openai.OpenAI:
    options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


def is_idle(server: Server) -> bool:
    found = server.metrics()
    names = ("requests_running", "requests_waiting", "kv_blocks_used")
    return all(found[f"layline_{name}"] == 0 for name in names)


def test_the_openai_client_streams_a_chat(server: Server) -> None:
    client = sdk(server)
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**options, max_completion_tokens=20)
    stream = client.chat.completions.create(
        **options, max_completion_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert whole._request_id


def test_the_openai_client_reads_completions_and_logprobs(server: Server) -> None:
    client = sdk(server)
    found = client.completions.create(
        model=NAME, prompt=["w1", "w2"], max_tokens=3, n=2, logprobs=2, temperature=0
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for choice in found.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or []) == 3
    chat = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [1, 1, 1]


def test_the_openai_client_raises_its_own_errors(server: Server) -> None:
    client = sdk(server)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert (bad.value.param, bad.value.type) == ("response_format", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model=NAME, input="x")


def test_sixty_four_streams_at_once(server: Server) -> None:
    """Each client has a prompt and a length of its own, and gets what it gets alone."""

    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, int, str | None]:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": f"w{number} w{number * 2}"}],
            temperature=0,
            max_completion_tokens=16 + number % 9,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, tokens, reason = "", 0, None
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            elif chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        return text, tokens, reason

    async def together() -> list[tuple[str, int, str | None]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60
        ) as client:
            return await asyncio.gather(*[one(client, number) for number in range(64)])

    found = asyncio.run(together())
    client = sdk(server)
    for number in range(0, 64, 7):
        alone = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": f"w{number} w{number * 2}"}],
            temperature=0,
            max_completion_tokens=16 + number % 9,
        )
        assert found[number][0] == alone.choices[0].message.content
    assert [tokens for _, tokens, _ in found] == [16 + number % 9 for number in range(64)]
    assert {reason for _, _, reason in found} == {"length"}
    assert wait_for(lambda: is_idle(server), 2)


def raw(server: Server) -> socket.socket:
    """A connection without a client library."""
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("when", ["within the body", "before a token", "mid-stream", "no stream"])
def test_a_client_that_vanishes_costs_nothing(server: Server, when: str) -> None:
    before = server.metrics()
    request = post({**LONG, "n": 3, "stream": when != "no stream"})
    sock = raw(server)
    if when == "within the body":
        sock.sendall(request[:-10])
    else:
        sock.sendall(request)
    if when == "mid-stream":
        seen = b""
        while seen.count(b"data: ") < 20:
            seen += sock.recv(4096)
    elif when == "no stream":
        wait_for(lambda: server.metrics()["layline_requests_running"] == 3)
    sock.close()
    assert wait_for(lambda: is_idle(server), 2), "blocks are free within 2 seconds"
    after = server.metrics()
    aborted = 'layline_requests_finished_total{reason="abort"}'
    if when in ("mid-stream", "no stream"):
        assert after[aborted] - before.get(aborted, 0) == 3
    steps = "layline_steps_total"
    stopped = server.metrics()[steps]
    time.sleep(0.3)
    assert server.metrics()[steps] == stopped, "nothing runs for it"


def test_a_client_that_resets_its_connection(server: Server) -> None:
    sock = raw(server)
    sock.sendall(post(LONG))
    sock.recv(100)
    # Linger of 0 s: the connection ends with a reset, without a goodbye.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    sock.close()
    assert wait_for(lambda: is_idle(server), 2)


def test_nonsense_on_the_wire_ends_only_its_connection(server: Server) -> None:
    for data in (b"\x16\x03\x01nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G" * 100_000):
        with raw(server) as sock:
            try:
                sock.sendall(data)
                assert sock.recv(100).startswith((b"HTTP/1.1 400", b""))
            except OSError:
                pass  # It may be gone before all was sent.
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}


def test_the_log_has_the_plan_and_no_prompt(server: Server) -> None:
    text = server.log.read_text()
    assert "plan: LlamaForCausalLM, 3 layers" in text
    assert "memory of each of 1 rank" in text
    assert "fits in" in text
    assert "configuration: host=127.0.0.1" in text
    assert "w2 w6" not in text


def test_late_headers_and_bodies_end_the_connection(checkpoint: Any, tmp_path: Path) -> None:
    flags = ("--header-timeout", "0.5", "--body-timeout", "0.5", "--log-json", "--threads", "1")
    with serving(checkpoint[0], tmp_path, *flags, "--api-key", "k") as server:
        for data in (b"", b"GET / HTTP/1.1\r\nHost:"):
            with raw(server) as sock:
                sock.sendall(data)
                assert sock.recv(100) == b"", "closed without a word"
        with raw(server) as sock:
            # A second head on a connection that is kept: its first byte starts the clock again.
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while b'"ok"' not in answer:
                answer += sock.recv(4096)
            time.sleep(0.8)
            sock.sendall(b"GET /hea")
            assert sock.recv(100) == b""
        with raw(server) as sock:
            head, _, _ = post({}).partition(b"\r\n\r\n")
            sock.sendall(head + b"\r\nAuthorization: Bearer k\r\n\r\n")
            assert b"408" in sock.recv(4096)
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        server.stop()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        requests = [line for line in lines if line.get("path") == "/v1/models"]
        assert requests[0]["status"] == 401
        assert requests[0]["request_id"].startswith("req_")
        assert all(line["level"] in ("info", "warning") for line in lines)


def in_background(server: Server, most: int, found: dict[str, Any]) -> threading.Thread:
    """A stream of ``most`` tokens, read in a thread until it ends."""

    def read() -> None:
        try:
            stream = sdk(server).chat.completions.create(
                model=NAME,
                messages=MESSAGES,
                max_completion_tokens=most,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                found["tokens"] = found.get("tokens", 0) + 1
                found["reason"] = chunk.choices[0].finish_reason
        except Exception as error:
            found["error"] = error
        found["ended"] = time.monotonic()

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: found.get("tokens", 0) > 5)
    return thread


FLAGS = ("--served-model-name", NAME, "--threads", "1")


def test_a_signal_lets_open_answers_finish(checkpoint: Any, tmp_path: Path) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS) as server:
        found: dict[str, Any] = {}
        thread = in_background(server, 1500, found)
        server.process.terminate()
        wait_for(lambda: "SIGTERM" in server.log.read_text())
        with pytest.raises(httpx2.TransportError):
            wait_for(lambda: not httpx2.get(f"{server.url}/health"), 2)
        thread.join(60)
        assert found["reason"] == "length"
        assert "error" not in found
        assert server.process.wait(20) == 0


def test_a_drain_that_takes_too_long_tells_the_client(checkpoint: Any, tmp_path: Path) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS, "--drain-timeout", "0.5") as server:
        found: dict[str, Any] = {}
        thread = in_background(server, 16000, found)
        assert server.stop() == 0
        thread.join(20)
        assert isinstance(found["error"], openai.APIError)
        assert "stopping" in str(found["error"])


def test_a_second_signal_ends_at_once(checkpoint: Any, tmp_path: Path) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS) as server:
        found: dict[str, Any] = {}
        thread = in_background(server, 16000, found)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: "SIGINT" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM
        thread.join(20)
        assert "error" in found


def test_a_port_in_use_is_one_line(server: Server, checkpoint: Any) -> None:
    port = str(urlsplit(server.url).port)
    done = subprocess.run(
        [sys.executable, "-m", "layline", "serve", str(checkpoint[0]), "--port", port],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"layline: --port {port} on 127.0.0.1 cannot be listened on: address already in use; "
        "expected a free port, or 0 for any\n"
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_told_to_every_client(
    checkpoint: Any, tmp_path: Path, how: signal.Signals
) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS, "--tp", "2") as server:
        ranks = server.ranks()
        assert len(ranks) == 2
        found: list[dict[str, Any]] = [{}, {}]
        threads = [in_background(server, 16000, each) for each in found]
        begin = time.monotonic()
        os.kill(ranks[1].pid, how)
        wait_for(lambda: all("ended" in each for each in found), 15)
        for thread, each in zip(threads, found, strict=True):
            thread.join()
            assert each["ended"] - begin < 10
            assert isinstance(each["error"], openai.APIError)
            assert "rank" in str(each["error"])
        health = httpx2.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        refused = httpx2.post(f"{server.url}{CHAT}", json={**LONG, "stream": False})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert server.process.wait(15) == 3
        assert not any(rank.is_running() for rank in ranks)


def test_ranks_report_their_times_and_are_named_in_the_log(checkpoint: Any, tmp_path: Path) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS, "--tp", "2", "--log-json") as server:
        found = server.metrics()
        blocks = found["layline_kv_blocks"]
        # 3 layers, keys and values, 2 heads of 8 FP32 values, 16 tokens; each rank has one head.
        assert found["layline_kv_bytes"] == blocks * 3 * 2 * 2 * 8 * 4 * 16
        sdk(server).completions.create(model=NAME, prompt="w1", max_tokens=5)
        wait_for(lambda: is_idle(server))
        after = server.metrics()
        steps = after["layline_steps_total"]
        assert steps >= 1
        parts = ("schedule", "prepare", "execute", "sample", "wire", "deliver")
        for label in [*[f'part_seconds_count{{part="{part}"}}' for part in parts]]:
            wait_for(lambda name=label: server.metrics()[f"layline_step_{name}"] == steps)
        assert after['layline_stage_seconds_count{stage="0"}'] == steps
        for part in ("prepare", "execute", "sample"):
            assert after[f'layline_step_part_seconds_sum{{part="{part}"}}'] > 0
        server.stop()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        loaded = [line["rank"] for line in lines if "of weights" in line["message"]]
        assert [rank for rank in loaded if rank is not None] == [0, 1]
        assert any(line["message"].startswith("loaded in ") for line in lines)


def test_a_rank_that_dies_while_nothing_runs(checkpoint: Any, tmp_path: Path) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS, "--tp", "2") as server:
        assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
        os.kill(server.ranks()[0].pid, signal.SIGKILL)
        wait_for(lambda: httpx2.get(f"{server.url}/health").status_code == 503, 5)
        assert server.process.wait(15) == 3
        assert "the engine failed: rank 0" in server.log.read_text()
