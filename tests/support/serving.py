"""A tiny model that can chat, the application on it in this process, and servers in others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx2
import psutil
import torch

from layline import LLM
from layline.engine.async_engine import AsyncEngine
from layline.engine.pipeline_plan import PipelinePlan, plan_pipeline
from layline.engine.planned import ModelPlan, open_plan
from layline.serve.app import build_app
from layline.serve.page.description import describe
from layline.serve.service import Service
from layline.serve.settings import ServeSettings
from layline.serve.summary import usable_kv_bytes
from support.tiny import tiny_model, tiny_tokenizer

NAME = "tiny"
_ENGINES: WeakKeyDictionary[LLM, AsyncEngine] = WeakKeyDictionary()
LONG = 1 << 14
TEMPLATE = "{% for m in messages %}w3 {{ m.role }} {{ m.content }} {% endfor %}w4"


def save_talker(directory: Path, context: int = LONG, *, never_ends: bool = True) -> Any:
    """A tiny checkpoint with a chat template; returns the transformers model.

    With ``never_ends`` its end-of-sequence id has a score of zero, which never wins.
    """
    model = tiny_model("Llama", max_position_embeddings=context)
    if never_ends:
        with torch.no_grad():
            model.lm_head.weight[2] = 0.0
    model.save_pretrained(directory)
    tiny_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "chat_template": TEMPLATE}), encoding="utf-8")
    return model


def plan_of(llm: LLM, **changes: Any) -> ModelPlan:
    """The plan that a loaded model runs by, or one of the same model with other flags."""
    flags = {**asdict(llm.engine_config), **changes}
    return open_plan(flags.pop("model"), flags, "ordinary")


def staged_plan_of(llm: LLM, **changes: Any) -> PipelinePlan | None:
    """The same over pipeline stages, None for one."""
    engine = replace(llm.engine_config, **changes)
    return plan_pipeline(plan_of(llm, **changes), engine, {}, print)


@contextmanager
def engine_on(llm: LLM, max_open: int | None) -> Iterator[AsyncEngine]:
    """The one asynchronous engine of a model: two at once would take each other's tokens.

    Blocks within each other share it.
    """
    engine = _ENGINES.get(llm)
    if engine is not None:
        before, engine._max_open = engine._max_open, max_open
        try:
            yield engine
        finally:
            engine._max_open = before
        return
    engine = _ENGINES[llm] = AsyncEngine(llm, max_open=max_open)
    try:
        yield engine
    finally:
        del _ENGINES[llm]
        engine.close()


@contextmanager
def service_on(llm: LLM, max_open: int | None = None, **settings: Any) -> Iterator[Service]:
    """A service on a loaded model; several may be open on one."""
    settings = {"allowed_hosts": ("testserver",), **settings}
    with engine_on(llm, max_open) as engine:
        yield Service(
            engine=engine,
            tokenizer=llm.tokenizer,
            max_model_len=llm.max_model_len,
            settings=ServeSettings(model_name=NAME, **settings),
            about=describe(plan_of(llm), llm.engine_config, staged_plan_of(llm)),
            kv_bytes=usable_kv_bytes(llm),
            pooling=llm.facts.pooling,
            hidden_size=llm.facts.config.hidden_size,
        )


@contextmanager
def client_on(service: Service, **options: Any) -> Iterator[Any]:
    """Asks the application without a socket."""
    from starlette.testclient import TestClient

    options = {"base_url": "http://127.0.0.1", **options}
    with TestClient(build_app(service), **options) as client:
        yield client


def sdk_on(client: Any, **options: Any) -> Any:
    """OpenAI's own client, asking through ``client``."""
    import openai

    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=client.base_url.join("/v1"), http_client=client, **options)


def events(response: Any) -> list[Any]:
    """The events of a stream that has ended; the last is the text "[DONE]"."""
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


@dataclass
class Server:
    """A ``layline serve`` process that accepts requests."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def metrics(self) -> dict[str, float]:
        """Every number of /metrics by its name and labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=10).text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def stop(self, timeout: float = 20) -> int:
        """SIGTERM, and the exit status."""
        self.process.terminate()
        return self.process.wait(timeout)

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "layline.engine.worker" in child.cmdline()]


@contextmanager
def serving(
    model: Path | str, folder: Path, *flags: str, program: Sequence[str] = ("-m", "layline")
) -> Iterator[Server]:
    """Start a server on a free port, wait until it says where it is, and end it.

    ``program`` is what Python is given to be the command line.
    """
    log = folder / f"serve-{time.monotonic_ns()}.log"
    command = [sys.executable, *program, "serve", str(model), "--port", "0", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, log.read_text()
            yield Server(process, found[0], log)
        finally:
            process.kill()


def wait_for(what: Any, seconds: float = 20) -> Any:
    """What ``what`` returns once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")
