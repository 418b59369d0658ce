"""The measuring side of a worker: starts it, asks it, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from layline.errors import RunError

ENGINES = ("layline", "transformers", "llama.cpp")
LLAMA_PYTHON = "LAYLINE_BENCH_LLAMA_PYTHON"
MODULES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
WORKER = Path(__file__).with_name("worker.py")


def interpreter(engine: str) -> str:
    """The Python that runs ``engine``: another one may hold llama.cpp."""
    if engine == "llama.cpp":
        return os.environ.get(LLAMA_PYTHON) or sys.executable
    return sys.executable


def absent(engine: str, model: str) -> str | None:
    """Why ``engine`` cannot run ``model`` here, or None when it can be tried."""
    if engine == "layline":
        return None
    if model.startswith("config:"):
        return "cannot run config:DIR"
    if engine == "llama.cpp" and not model.endswith(".gguf"):
        return "reads only .gguf files"
    probe = (
        "import importlib.util, sys; "
        f"sys.exit(importlib.util.find_spec({MODULES[engine]!r}) is None)"
    )
    with contextlib.suppress(OSError):
        if subprocess.run([interpreter(engine), "-P", "-c", probe], check=False).returncode == 0:
            return None
    return "not installed"


def missing_engines(engines: Iterable[str], model: str) -> dict[str, str]:
    """Those of ``engines`` that cannot run ``model`` here, with the reason and what may help."""
    missing = {}
    for engine in engines:
        why = absent(engine, model)
        if why == "not installed" and engine == "llama.cpp":
            why = f"{why}; {LLAMA_PYTHON} can name a Python that has llama_cpp"
        if why is not None:
            missing[engine] = why
    return missing


class Worker:
    """One engine's process. Usable as a context manager, which ends it."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        # What libraries print is kept for the error message, and never mixed into the results.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [interpreter(engine), "-P", str(WORKER), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            encoding="utf-8",
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its reply. Raises RunError when the engine failed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RunError(f"the {self.engine} worker ended during {request['op']}{self.last()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RunError(f"{self.engine} failed during {request['op']}: {reply['error']}")
        return reply

    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds for ``new_tokens`` greedy tokens after each prompt. Raises RunError."""
        return float(self._generate(prompts, new_tokens)["seconds"])

    def decode_step(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds of one decode step after all prompts, the mean of ``steps``. Raises RunError."""
        reply = self._generate(prompts, steps + 1)
        if reply["first_seconds"] is None:
            raise RunError(f"the {self.engine} worker does not tell when decoding began")
        return float(reply["seconds"] - reply["first_seconds"]) / steps

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        reply = self.ask(op="generate", prompts=prompts, new_tokens=new_tokens)
        lengths = {len(row) for row in reply["tokens"]}
        if lengths != {new_tokens} or len(reply["tokens"]) != len(prompts):
            raise RunError(
                f"{self.engine} made {sorted(lengths)} tokens for {len(prompts)} prompts; "
                f"expected {new_tokens} each"
            )
        return reply

    def last(self) -> str:
        """The last line the process printed, for an error message."""
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    def close(self) -> None:
        """End the process by closing its input; kill it if that is not enough."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


@contextlib.contextmanager
def workers(engines: list[str]) -> Iterator[dict[str, Worker]]:
    """A worker for each engine, all ended at the end."""
    with contextlib.ExitStack() as stack:
        yield {engine: stack.enter_context(Worker(engine)) for engine in engines}


def first_output(command: list[str]) -> tuple[float, int]:
    """Run ``command``. Returns seconds until its first byte on stdout, and its peak memory.

    Peak memory is the kernel's maximum resident size in bytes. Raises RunError when it fails.
    """
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0 or not first:
            log.seek(0)
            said = log.read().decode("utf-8", errors="replace").strip().splitlines()
            raise RunError(
                f"{' '.join(command[1:4])} ended with status {process.returncode}; "
                f"expected text: {said[-1] if said else 'it printed nothing'}"
            )
    scale = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_maxrss * scale
