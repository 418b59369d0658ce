"""How a checkpoint makes one vector of a text, from the files that sentence-transformers writes.

``modules.json`` lists what follows the model: a pooling of its hidden states, then perhaps a
normalisation to length one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layline.errors import CorruptFileError, UnsupportedModelError
from layline.weights.folders import file_inside, read_json_array, read_json_object

MODULES_NAME = "modules.json"
MODES = ("lasttoken", "mean")
_PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which hidden states become the vector: the last one only, or the mean of all.

    ``normalised`` vectors have length one.
    """

    last_only: bool
    normalised: bool


def read_pooling(directory: Path) -> Pooling | None:
    """The pooling of the checkpoint in ``directory``, None where it is none that embeds.

    Raises:
        CorruptFileError: a file is missing or is not what it should be.
        UnsupportedModelError: it has modules or a pooling that are not supported.
    """
    path = file_inside(directory, MODULES_NAME)
    if path is None:
        return None
    pooling: str | None = None
    kinds = []
    for entry in read_json_array(path):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise CorruptFileError(f"{path}: expected a list of modules with a type")
        kinds.append(entry["type"].rpartition(".")[2])
        if kinds[-1] == "Pooling":
            pooling = str(entry.get("path", ""))
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{path} lists the modules {', '.join(kinds) or 'none'}; expected Transformer, Pooling "
            "and perhaps Normalize"
        )
    assert pooling is not None
    config = file_inside(directory, f"{pooling}/config.json")
    if config is None:
        raise CorruptFileError(f"{directory}: no {pooling}/config.json, which {path.name} names")
    return Pooling(_mode(config) == "lasttoken", kinds[-1] == "Normalize")


def _mode(path: Path) -> str:
    config = read_json_object(path)
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in MODES:
        found = " and ".join(modes) or "nothing"
        raise UnsupportedModelError(f"{path} pools by {found}; expected one of {', '.join(MODES)}")
    return modes[0]


def _modes(config: Mapping[str, Any]) -> list[str]:
    named = config.get("pooling_mode")
    if named is not None:
        return [str(named)]
    chosen = [key for key, value in config.items() if key.startswith(_PREFIX) and value is True]
    return [key.removeprefix(_PREFIX).removesuffix("_tokens") for key in chosen]
