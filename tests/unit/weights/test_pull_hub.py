"""Pulling a Hugging Face repository, with the hub replaced by a folder."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from layline.errors import CorruptFileError, ModelNotFoundError, PullError
from layline.weights.cache import find_model, pulled_names, record_file
from layline.weights.opening import open_checkpoint
from layline.weights.pull import pull

FIRST, SECOND = "a" * 40, "b" * 40


class FakeHub:
    """Two commits of one repository; ``fetched`` counts the downloads."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.main = FIRST
        self.fetched: list[str] = []
        self.damage = ""
        self.error: Exception | None = None

    def contents(self, commit: str) -> dict[str, bytes]:
        files = {p.name: p.read_bytes() for p in self.files.iterdir()}
        files["config.json"] = json.dumps({"commit": commit}).encode()
        return files

    def model_info(self, repository: str, *, revision: str | None, **_: Any) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        commit = self.main if revision in (None, "main") else revision
        siblings = []
        for name, content in self.contents(commit).items():
            large = name.endswith(".safetensors")
            lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if large else None
            siblings.append(SimpleNamespace(rfilename=name, size=len(content), lfs=lfs))
        return SimpleNamespace(sha=commit, siblings=siblings)

    def snapshot_download(
        self,
        repository: str,
        *,
        revision: str,
        cache_dir: Path,
        allow_patterns: list[str],
        **_: Any,
    ) -> str:
        self.fetched.append(revision)
        repo = cache_dir / ("models--" + repository.replace("/", "--"))
        folder, blobs = repo / "snapshots" / revision, repo / "blobs"
        for path in (folder, blobs):
            path.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents(revision).items():
            if not any(Path(name).match(pattern) for pattern in allow_patterns):
                continue
            blob = blobs / hashlib.sha256(content).hexdigest()
            if not blob.exists():
                blob.write_bytes(content[:-1] + b"!" if name == self.damage else content)
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(blob)
        return str(folder)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    files = tmp_path / "hub"
    files.mkdir()
    save_file({"a": torch.ones(4)}, files / "model.safetensors")
    (files / "modeling_evil.py").write_text("boom")
    (files / "pytorch_model.bin").write_bytes(b"pickle")
    (files / "tokenizer.model").write_bytes(b"spm")
    (files / "chat_template.jinja").write_text("{{ messages }}")
    fake = FakeHub(files)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_pull_records_the_commit_and_opens(hub: FakeHub, root: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = pull("org/name", progress=lambda done, total: seen.append((done, total)))
    assert folder.name == FIRST
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    ]
    assert seen[-1][0] == seen[-1][1]
    record = json.loads(record_file("org/name", root).read_text())
    assert record["commit"] == FIRST
    assert pulled_names(root) == ["org/name"]
    checkpoint = open_checkpoint("org/name")
    assert torch.equal(checkpoint.read("a"), torch.ones(4))


def test_the_commit_stays_until_a_revision_is_given(hub: FakeHub, root: Path) -> None:
    pull("org/name")
    hub.main = SECOND
    hub.error = AssertionError("the hub was asked")
    assert pull("org/name").name == FIRST
    hub.error = None
    assert hub.fetched == [FIRST]
    assert pull("org/name", revision="main").name == SECOND
    assert find_model("org/name", root).name == SECOND
    assert pull("org/name", revision=FIRST).name == FIRST
    assert find_model("org/name", root).name == FIRST


def test_damage_in_the_cache_is_found_and_repaired(hub: FakeHub, root: Path) -> None:
    path = pull("org/name") / "model.safetensors"
    good = path.read_bytes()
    hub.main = SECOND  # a repair brings the pinned commit, not the newest
    path.write_bytes(good[:-1])
    with pytest.raises(CorruptFileError, match=r"model.safetensors: .*run `layline pull org/name`"):
        open_checkpoint("org/name")
    repaired = pull("org/name")
    assert repaired.name == FIRST
    assert (repaired / "model.safetensors").read_bytes() == good
    path.resolve().write_bytes(good[:-1] + b"!")  # the same size: found by its checksum
    assert (pull("org/name") / "model.safetensors").read_bytes() == good


def test_a_download_that_does_not_verify_is_not_recorded(hub: FakeHub, root: Path) -> None:
    hub.damage = "model.safetensors"
    with pytest.raises(PullError, match=r"model.safetensors did not match.*removed; pull again"):
        pull("org/name")
    assert pulled_names(root) == []
    with pytest.raises(ModelNotFoundError):
        open_checkpoint("org/name")
    hub.damage = ""
    assert pull("org/name").name == FIRST


def test_offline(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PullError, match=r"org/name is not complete in .*\(offline\)"):
        pull("org/name", offline=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullError, match="offline"):
        pull("org/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    folder = pull("org/name")
    assert pull("org/name", offline=True) == folder
    assert pull("org/name", revision="main", offline=True) == folder
    with pytest.raises(PullError, match=f"at {SECOND}"):
        pull("org/name", revision=SECOND, offline=True)


def test_repositories_without_safetensors(hub: FakeHub, root: Path) -> None:
    (hub.files / "model.safetensors").unlink()
    with pytest.raises(PullError, match="org/name has no safetensors weights"):
        pull("org/name")
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionError("Name or service\nnot known"), r"no hub could be reached \(Name or ser"),
        (TimeoutError(), r"no hub could be reached \(TimeoutError\)"),
        (RuntimeError("odd"), r"the download failed \(odd\)"),
    ],
)
def test_hub_errors_are_one_line(hub: FakeHub, error: Exception, expected: str) -> None:
    hub.error = error
    with pytest.raises(PullError, match=expected) as caught:
        pull("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("RepositoryNotFoundError", "no repository 'org/name' on the hub"),
        ("RevisionNotFoundError", "org/name has no revision 'v9'"),
        ("GatedRepoError", "needs its licence accepted"),
    ],
)
def test_answers_of_the_hub(hub: FakeHub, kind: str, expected: str) -> None:
    error_class = getattr(huggingface_hub.errors, kind)
    hub.error = error_class.__new__(error_class)
    with pytest.raises(PullError, match=expected):
        pull("org/name", revision="v9")


def test_without_the_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        PullError, match=r"needs huggingface_hub; run `pip install 'layline\[hub\]'"
    ):
        pull("org/name")


@pytest.mark.parametrize(
    "record",
    ["", "[]", '{"repository": "org/name", "commit": "../../x", "files": {}}'],
)
def test_a_broken_record_is_no_record(root: Path, record: str) -> None:
    path = record_file("org/name", root)
    path.parent.mkdir(parents=True)
    path.write_text(record)
    assert pulled_names(root) == []
    with pytest.raises(ModelNotFoundError, match="has not been pulled"):
        find_model("org/name", root)
