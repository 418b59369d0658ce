"""Files named by a checkpoint folder: only inside it, only regular, only readable JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from layline.errors import CorruptFileError

_MAX_JSON_BYTES = 64 << 20


def file_inside(directory: Path, name: str) -> Path | None:
    """The file ``name`` of ``directory``, or None where there is none.

    A link must resolve to a place inside the folder. The one exception is the download cache's
    own layout, where ``models--X/snapshots/COMMIT/`` holds links into ``models--X/blobs/``.

    Raises:
        CorruptFileError: the name or the link leaves the folder, or is not a regular file.
    """
    path = directory / name
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise CorruptFileError(f"{directory}: file name {name!r} leaves the folder")
    try:
        resolved = path.resolve(strict=True)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        raise CorruptFileError(f"{path}: cannot be read ({error})") from None
    home = directory.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(resolved.is_relative_to(folder) for folder in allowed):
        raise CorruptFileError(f"{path}: links to {resolved}, which is outside the folder")
    if not resolved.is_file():
        raise CorruptFileError(f"{path}: is not a regular file")
    return path


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CorruptFileError: unreadable, over 64 MiB, not JSON, or not an object.
    """
    return parse_json_object(_bytes(path), str(path))


def read_json_array(path: Path) -> list[Any]:
    """The JSON array in ``path``.

    Raises:
        CorruptFileError: unreadable, over 64 MiB, not JSON, or not an array.
    """
    value = _parsed(_bytes(path), str(path))
    if not isinstance(value, list):
        raise CorruptFileError(f"{path}: expected a JSON array, found {type(value).__name__}")
    return value


def parse_json_object(raw: bytes, label: str) -> dict[str, Any]:
    """The JSON object in ``raw``, which errors call ``label``; a key may appear once.

    Raises:
        CorruptFileError: not UTF-8, not JSON, nested too deeply, or not an object.
    """
    value = _parsed(raw, label)
    if not isinstance(value, dict):
        raise CorruptFileError(f"{label}: expected a JSON object, found {type(value).__name__}")
    return value


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CorruptFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(raw) > _MAX_JSON_BYTES:
        raise CorruptFileError(f"{path}: larger than {_MAX_JSON_BYTES >> 20} MiB")
    return raw


def _parsed(raw: bytes, label: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CorruptFileError(f"{label}: not valid JSON ({reason})") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:60]!r} appears twice")
            seen.add(key)
    return value
