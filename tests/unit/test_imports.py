"""Imports between packages point one way, and what must do without torch does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "layline"

# A package may import itself and whatever stands below it; names on one line are beside each other.
ORDER = (
    {"__main__"},
    {"cli"},
    {"gates"},
    {"serve"},
    {"engine"},
    {"models"},
    {"layers"},
    {"kernels"},
    {"pipeline"},
    {"boundary"},
    {"comm"},
    {"text"},
    {"weights"},
    {"config", "sampling"},
    {"cores"},
    {"grammar"},
    {"topology"},
    {"errors"},
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
# Public names that the package's __init__ offers, by the package that defines them.
LAZY = {
    "LLM": "engine",
    "SamplingParams": "sampling",
    "Grammar": "grammar",
    "__version__": "errors",
}

TORCH_FREE = (
    "layline",
    "layline.boundary",
    "layline.boundary.planning",
    "layline.config",
    "layline.engine",
    "layline.engine.balance",
    "layline.engine.blocks",
    "layline.engine.answers",
    "layline.engine.async_engine",
    "layline.engine.load",
    "layline.engine.core",
    "layline.engine.output",
    "layline.engine.pipeline_costs",
    "layline.engine.pipeline_memory",
    "layline.engine.pipeline_plan",
    "layline.engine.planned",
    "layline.engine.prefix",
    "layline.engine.progress",
    "layline.engine.request",
    "layline.engine.scheduler",
    "layline.engine.speculation.draft_facts",
    "layline.engine.speculation.make",
    "layline.engine.statistics",
    "layline.engine.waiting",
    "layline.errors",
    "layline.gates.scenarios",
    "layline.grammar",
    "layline.models",
    "layline.models.collectives",
    "layline.models.config",
    "layline.models.footprint",
    "layline.models.llama",
    "layline.models.mistral",
    "layline.models.qwen2",
    "layline.models.qwen3",
    "layline.models.registry",
    "layline.pipeline",
    "layline.pipeline.access",
    "layline.pipeline.cells",
    "layline.pipeline.controllers",
    "layline.pipeline.counters",
    "layline.pipeline.cuts",
    "layline.pipeline.device",
    "layline.pipeline.doors",
    "layline.pipeline.estimate",
    "layline.pipeline.faults",
    "layline.pipeline.fence",
    "layline.pipeline.guards",
    "layline.pipeline.lanes",
    "layline.pipeline.placement",
    "layline.pipeline.schedule",
    "layline.pipeline.streams",
    "layline.sampling",
    "layline.serve.app",
    "layline.serve.server",
    "layline.serve.summary",
    "layline.text",
    "layline.text.constraint",
    "layline.text.tokenizer",
    "layline.topology",
    "layline.weights",
    "layline.weights.cache",
    "layline.weights.checkpoint",
    "layline.weights.gguf_file",
)


def sources() -> Iterator[tuple[Path, str]]:
    """Every module and the package (or top module) it belongs to."""
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package != "__init__":
            yield path, package


def imported_packages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, package) of every import of Layline, inside functions too."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "layline" and len(parts) > 1:
                yield node.lineno, LAZY.get(parts[1], parts[1])


def wrong_way(package: str, source: str) -> list[str]:
    """The imports in ``source`` that point up or sideways."""
    found = []
    for line, target in imported_packages(ast.parse(source)):
        if target != package and RANK[target] <= RANK[package]:
            found.append(f"line {line}: {package} -> {target}")
    return found


def test_every_package_has_a_place() -> None:
    assert {package for _, package in sources()} <= set(RANK)


def test_arrows_point_one_way() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path, package in sources()
        if (found := wrong_way(package, path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


def test_the_check_sees_an_arrow_that_points_up() -> None:
    assert wrong_way("layers", "def f():\n    from layline.engine import kv\n") == [
        "line 2: layers -> engine"
    ]
    assert wrong_way("boundary", "import layline.pipeline.fence") != []
    assert wrong_way("engine", "from layline import LLM, SamplingParams") == []
    assert wrong_way("models", "from layline.layers import norm") == []


def test_no_underscore_name_crosses_a_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {alias.name}"
        for path, _ in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("layline")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert found == []


def existing(names: tuple[str, ...]) -> list[str]:
    """The listed modules, with every module of planning and each family's torch-free stack."""
    listed = set(names)
    for path in [*ROOT.glob("boundary/planning/**/*.py"), *ROOT.glob("models/*stack*.py")]:
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        listed.add(".".join(parts).removesuffix(".__init__"))
    return sorted(listed)


@pytest.mark.parametrize("heavy", ["torch", "transformers"])
def test_modules_that_do_without(heavy: str) -> None:
    # One process for all: whichever import brings the library in is named.
    code = (
        "import importlib, sys\n"
        f"for name in {existing(TORCH_FREE)!r}:\n"
        "    importlib.import_module(name)\n"
        f"    if {heavy!r} in sys.modules:\n"
        "        sys.exit(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{heavy} is imported by {done.stderr.strip()}"


def test_public_names_load_on_first_use() -> None:
    code = (
        "import sys, layline\n"
        "assert 'torch' not in sys.modules\n"
        "layline.SamplingParams\n"
        "assert 'torch' not in sys.modules\n"
        "layline.LLM\n"
        "assert 'layline.engine.llm' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
