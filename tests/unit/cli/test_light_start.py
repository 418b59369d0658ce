"""The command line starts without the heavy libraries, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "transformers", "tokenizers", "numpy", "gguf", "huggingface_hub", "rich"),
    *("starlette", "uvicorn", "prometheus_client", "msgspec", "asyncio"),
)

RUN = """
import sys
sys.argv = ["layline", *{arguments!r}]
from layline.cli.main import main
status = main()
print("loaded:", *[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
sys.exit(status)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["chat", "-h"],
        ["bench", "latency", "-h"],
        ["serve", "-h"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = python(RUN.format(arguments=arguments, heavy=HEAVY))
    assert done.returncode == 0
    assert done.stderr == "loaded:\n"
    assert "layline" in done.stdout


def test_a_mistake_imports_nothing_heavy() -> None:
    done = python(RUN.format(arguments=["generate", "x", "--max-tokens", "0"], heavy=HEAVY))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "loaded:"


def test_import_layline_imports_nothing_heavy() -> None:
    code = f"import sys, layline; print([n for n in {HEAVY!r} if n in sys.modules])"
    assert python(code).stdout == "[]\n"


def test_module_form_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "layline.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("layline ")


def test_help_lists_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "layline.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    listed = done.stdout.split("Commands:")[1].split()
    for name in ("pull", "generate", "chat", "serve", "plan", "gate", "bench", "doctor"):
        assert name in listed
