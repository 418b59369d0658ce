"""The mesh's flags: what they pass on, and how a mesh that cannot be is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from layline.cli.session import with_flags
from layline.config import EngineConfig
from support.model import smollm2_path

FLAGS = {
    "--tp": ("8", 8),
    "--attn-dp": ("2", 2),
    "--attn-cp": ("2", 2),
    "--dense-tp": ("1", 1),
    "--boundary-reduction": ("rsv", "rsv"),
    "--dp-padding": ("sum-len", "sum-len"),
    "--cp-layout": ("zigzag", "zigzag"),
    "--pp-stages": ("3", 3),
    "--pp-splits": ("4, 9", (4, 9)),
    "--pp-devices": ("0,0,1", (0, 0, 1)),
    "--pp-processes": ("2", 2),
}


def test_flags_are_keywords_of_the_engine(layline: Any, loader: Any) -> None:
    arguments = [part for flag, (text, _) in FLAGS.items() for part in (flag, text)]
    assert layline("generate", "x", *arguments).status == 0
    ((_, keywords),) = loader.opened
    for flag, (_, value) in FLAGS.items():
        assert keywords[flag.removeprefix("--").replace("-", "_")] == value
    assert EngineConfig(**{k: v for k, v in keywords.items() if v is not None}).tp == 8


def test_switches(layline: Any, loader: Any) -> None:
    layline("generate", "x", "--tp", "2", "--sequence-parallel", "--input-scattered")
    keywords = loader.opened[-1][1]
    assert keywords["sequence_parallel"] is True
    assert keywords["input_scattered"] is True


def test_stats_say_that_they_sum(layline: Any, loader: Any) -> None:
    assert "ranks" not in layline("generate", "x", "--stats").err
    loader.llm.peaks = [1 << 40, 1 << 40]
    err = layline("generate", "x", "--stats").err
    assert "GiB, the sum over 2 ranks and the process that drives them" in err


def test_a_command_ends_its_model(layline: Any, loader: Any) -> None:
    layline("generate", "x")
    assert loader.llm.ended == 1


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("attn_dp 2 x attn_cp 1 = 2 does", "--attn-dp 2 x --attn-cp 1 = 2 does"),
        ("does not divide tp 3; expected", "does not divide --tp 3; expected"),
        ("sequence_parallel does not go", "--sequence-parallel does not go"),
        ("'a tp.gguf' of this tp and that", "'a tp.gguf' of this tp and that"),
        ("device 'cuda' has 1 CUDA device", "--device 'cuda' has 1 CUDA device"),
    ],
)
def test_keywords_in_messages_become_flags(message: str, shown: str) -> None:
    assert with_flags(message) == shown


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--tp", "2"], ["--tp 2", "9 heads", "1, 3 or 9"]),
        (["--tp", "2", "--attn-dp", "3"], ["--attn-dp 3", "--tp 2", "1, 2"]),
        (["--tp", "3", "--ep", "3"], ["ep 3", "LlamaForCausalLM", "experts"]),
        (["--sequence-parallel"], ["--sequence-parallel", "--tp 1"]),
        (["--tp", "3", "--batch-invariant"], ["--batch-invariant", "--tp 3", "expected --tp 2"]),
        (["--tp", "3", "--attn-cp", "3", "--input-scattered"], ["--input-scattered", "--attn-cp"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_a_worker_starts(
    flags: list[str], parts: list[str]
) -> None:
    smollm2_path()
    code = (
        "import subprocess, sys\n"
        "def refuse(*_, **__): raise AssertionError('a process was started')\n"
        "subprocess.Popen = refuse\n"
        "from layline.cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "print('torch' in sys.modules)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "x", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == "False\n", "no library that takes seconds is loaded for it"
    assert done.stderr.startswith("layline: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr
