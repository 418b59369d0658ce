"""The vocabulary of a Hugging Face model directory.

What is added around a text is what the post-processor in tokenizer.json says; transformers, too,
ignores add_bos_token and add_eos_token in tokenizer_config.json when that file exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from layline.errors import CorruptFileError, UnsupportedFormatError
from layline.text.vocabulary import TokenBytes, Vocabulary, decoding_of

_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Without tokenizer.json, any of these is enough for transformers to convert from.
_CONVERTIBLE = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_LARGEST_TEMPLATE = 1 << 20


def read_directory(
    directory: Path, stated_bos: int | None, stated_eos: frozenset[int]
) -> Vocabulary | None:
    """Read the tokenizer files of ``directory``; None when there are none.

    Args:
        directory: a folder with tokenizer.json, or files that transformers can convert.
        stated_bos: the BOS id in the model's configuration, used when the tokenizer names none.
        stated_eos: the EOS ids in the generation and model configurations.

    Raises:
        CorruptFileError: a file is not what its name says, or ids contradict each other.
        UnsupportedFormatError: the files need transformers, which is missing or cannot read them.
    """
    settings = _settings(directory)
    serialized = _file(directory, "tokenizer.json")
    if serialized is not None:
        backend = _from_serialized(serialized)
    elif any(_file(directory, name) is not None for name in _CONVERTIBLE):
        backend = _converted(directory)
    else:
        return None
    backend.no_truncation()
    backend.no_padding()
    _add_listed_tokens(backend, settings, directory)
    names = {name: text for name in _NAMES if (text := _content(settings.get(name))) is not None}
    _mark_special(backend, names, settings)
    ids = {name: backend.token_to_id(text) for name, text in names.items()}
    bos_id = ids.get("bos_token") if "bos_token" in settings else stated_bos
    added = backend.get_added_tokens_decoder()
    decoding = decoding_of(backend)
    eos_id = ids.get("eos_token")
    return Vocabulary(
        backend=backend,
        size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        pieces=TokenBytes(
            backend.id_to_token,
            decoding,
            {token_id: token.content for token_id, token in added.items()},
            lambda token_id: backend.decode([token_id], skip_special_tokens=False),
        ),
        decoding=decoding,
        bos_id=bos_id,
        eos_ids=stated_eos | (frozenset() if eos_id is None else {eos_id}),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        names=names,
        templates=_templates(directory, settings),
    )


def _file(directory: Path, name: str) -> Path | None:
    """The file of that name, unless it is a link that leads out of the checkpoint.

    The cache of huggingface_hub links each file of a snapshot to a sibling folder "blobs"; that one
    way out is allowed.
    """
    path = directory / name
    if not path.is_file():
        return None
    if path.is_symlink():
        target = path.resolve()
        root = directory.resolve()
        allowed = [root]
        if root.parent.name == "snapshots":
            allowed.append(root.parent.parent / "blobs")
        if not any(target.is_relative_to(folder) for folder in allowed):
            raise CorruptFileError(f"{path} is a link to {target}, outside the checkpoint")
    return path


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = _file(directory, name)
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json behind it for the names it lacks."""
    return {
        **_read_json(directory, "special_tokens_map.json"),
        **_read_json(directory, "tokenizer_config.json"),
    }


def _from_serialized(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise CorruptFileError(f"{path} is not a tokenizer: {_one_line(error)}") from None


def _converted(directory: Path) -> tokenizers.Tokenizer:
    """Let transformers read the older vocabulary files."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UnsupportedFormatError(
            f"{directory} has no tokenizer.json, and converting its vocabulary files needs the "
            "package transformers, which is not installed"
        ) from None
    try:
        converted = AutoTokenizer.from_pretrained(
            str(directory), use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend = converted.backend_tokenizer
    except Exception as error:  # it raises whatever the reader for that format raises
        raise UnsupportedFormatError(
            f"{directory} has no tokenizer.json and transformers cannot convert its vocabulary "
            f"files: {_one_line(error)}"
        ) from None
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedFormatError(
            f"the tokenizer of {directory} is a {type(converted).__name__}, which cannot be "
            "turned into a tokenizer.json"
        )
    return backend


def _content(token: object) -> str | None:
    """A token in a configuration: a string, or an object with its "content"."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _listed_tokens(settings: Mapping[str, Any], directory: Path) -> dict[int, AddedToken]:
    """Tokens that the configuration lists beside tokenizer.json, by id."""
    listed: dict[int, AddedToken] = {}
    for text, token_id in _read_json(directory, "added_tokens.json").items():
        if isinstance(token_id, int):
            listed[token_id] = AddedToken(text, normalized=False)
    entries = settings.get("added_tokens_decoder")
    for key, entry in (entries if isinstance(entries, Mapping) else {}).items():
        content = _content(entry)
        if content is None or not str(key).isdecimal():
            raise CorruptFileError(
                f"{directory}: added_tokens_decoder entry {key!r} in tokenizer_config.json needs "
                "a number as its key and a content"
            )
        flags = {
            flag: bool(entry[flag])
            for flag in ("lstrip", "normalized", "rstrip", "single_word", "special")
            if isinstance(entry, Mapping) and flag in entry
        }
        listed[int(key)] = AddedToken(content, **flags)
    return listed


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], directory: Path
) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(_listed_tokens(settings, directory).items())
    new = [(token_id, token) for token_id, token in listed if token.content not in known]
    backend.add_tokens([token for _, token in new])
    for token_id, token in new:
        got = backend.token_to_id(token.content)
        if got != token_id:
            raise CorruptFileError(
                f"{directory}: added token {token.content!r} has id {token_id} in its "
                f"configuration, but the vocabulary gives it {got}"
            )


def _mark_special(
    backend: tokenizers.Tokenizer, names: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Make the named tokens special where the vocabulary has them; a name adds no new token."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    texts = [*names.values(), *_extra_special(settings)]
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(texts)
            if text not in special and backend.token_to_id(text) is not None
        ]
    )


def _extra_special(settings: Mapping[str, Any]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = settings.get(key)
        values = list(values.values()) if isinstance(values, Mapping) else values
        for value in values if isinstance(values, list) else []:
            if (text := _content(value)) is not None:
                yield text


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file beside the configuration wins over an entry in it."""
    templates: dict[str, str] = {}
    for source in (
        _read_json(directory, "chat_template.json").get("chat_template"),
        settings.get("chat_template"),
    ):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            for entry in source:
                if not (isinstance(entry, Mapping) and {"name", "template"} <= entry.keys()):
                    raise CorruptFileError(
                        f"{directory}: an entry of chat_template in tokenizer_config.json lacks "
                        "a name or a template"
                    )
                templates[str(entry["name"])] = str(entry["template"])
    if (path := _file(directory, "chat_template.jinja")) is not None:
        templates["default"] = _template_text(path)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        name = f"additional_chat_templates/{path.name}"
        if (checked := _file(directory, name)) is not None:
            templates[path.stem] = _template_text(checked)
    return templates


def _template_text(path: Path) -> str:
    if path.stat().st_size > _LARGEST_TEMPLATE:
        raise CorruptFileError(f"{path} is larger than {_LARGEST_TEMPLATE} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise CorruptFileError(f"{path} is not UTF-8: {error}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
