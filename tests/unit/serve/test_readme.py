"""What the README says of the server, done as it says: the command, the client, the answer."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.model import smollm2_path
from support.serving import serving

README = Path(__file__).parents[3] / "README.md"
ADDRESS = "http://127.0.0.1:8000"


def section(title: str) -> list[tuple[str, str]]:
    """(language, text) of every block of code in a section, in order."""
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no section {title!r}"
    return re.findall(r"^```(\w*)\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)


def test_the_blocks_are_where_they_are_looked_for() -> None:
    (_, shell), (language, client), (_, shown) = section("As a server")
    command, said = shell.splitlines()
    assert command == "$ .venv/bin/layline serve"
    assert said == f"serving smollm2-135m at {ADDRESS}"
    assert language == "python"
    assert f'base_url="{ADDRESS}/v1"' in client
    assert "stream=True" in client
    assert shown


@pytest.mark.smollm2
def test_the_client_of_the_readme_reads_a_stream(tmp_path: Path) -> None:
    smollm2_path()
    (_, shell), (_, client), (_, shown) = section("As a server")
    # The command as it stands there, but for a port that is free for sure.
    _, name, *flags = shlex.split(shell.splitlines()[0].removeprefix("$ "))
    assert (name, flags) == ("serve", [])
    with serving("smollm2-135m", tmp_path) as server:
        code = client.replace(ADDRESS, server.url)
        assert code != client
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
        )
        assert server.stop() == 0
    assert done.returncode == 0, done.stderr
    *answer, counts = done.stdout.strip().splitlines()
    assert "\n".join(answer).startswith("The sky is blue")
    # Other kernels may find other words after some; the prompt is the same everywhere.
    assert re.fullmatch(r"40 \+ \d+ tokens", counts)
    assert shown.startswith("The sky is blue")
    assert re.fullmatch(r"40 \+ \d+ tokens", shown.strip().splitlines()[-1])
