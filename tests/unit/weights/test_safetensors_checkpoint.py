"""Hugging Face folders: single and sharded files, and everything that can be wrong with them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from layline.errors import (
    CorruptFileError,
    ModelNotFoundError,
    TensorError,
    UnsupportedFormatError,
)
from layline.weights.opening import open_checkpoint
from layline.weights.safetensors import SafetensorsCheckpoint, read_header

INDEX = "model.safetensors.index.json"


def folder(tmp_path: Path, config: object = None) -> Path:
    directory = tmp_path / "model"
    directory.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config or {"model_type": "llama"})
    (directory / "config.json").write_text(text)
    return directory


def shard(directory: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    # Copies, because the library refuses tensors that share memory.
    save_file({key: value.clone() for key, value in tensors.items()}, directory / name)


def index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_single_file(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = folder(tmp_path, {"model_type": "llama", "hidden_size": 8})
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    stored = torch.randn(6, 8).to(dtype)
    shard(directory, "model.safetensors", {"a.weight": stored, "b": torch.ones(3)})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.kind == "safetensors"
    assert checkpoint.path == directory
    assert checkpoint.config["hidden_size"] == 8
    assert checkpoint.generation == {"eos_token_id": [1, 2]}
    assert checkpoint.vocabulary().directory == directory
    info = checkpoint.infos()["a.weight"]
    assert (info.shape, info.file) == ((6, 8), directory / "model.safetensors")
    assert (
        info.encoding
        == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[
            str(dtype).removeprefix("torch.")
        ]
    )
    read = checkpoint.read("a.weight")
    assert torch.equal(read, stored)
    assert read.data_ptr() == checkpoint.read("a.weight").data_ptr()  # a view of the map
    for target in (torch.float32, torch.bfloat16):
        out = torch.empty(8, 6, dtype=target).T
        checkpoint.read_into("a.weight", out)
        assert torch.equal(out, stored.to(target))
    assert torch.equal(read, stored)
    checkpoint.close()
    assert torch.equal(read, stored)


def test_scalars_and_large_tensors_copy_in_pieces(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    stored = torch.arange(5 << 20, dtype=torch.float32).view(-1, 1024)  # 20 MiB: two pieces
    shard(directory, "model.safetensors", {"big": stored, "scalar": torch.tensor(3.5)})
    checkpoint = open_checkpoint(directory)
    out = torch.empty(stored.shape)
    checkpoint.read_into("big", out)
    assert torch.equal(out, stored)
    assert torch.equal(checkpoint.read("big"), stored)  # pages that were given back come again
    scalar = torch.empty(())
    checkpoint.read_into("scalar", scalar)
    assert scalar.item() == 3.5


def test_the_index_decides_tensor_by_tensor(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    fresh, stale = torch.ones(4), torch.zeros(4)
    shard(directory, "one.safetensors", {"a": fresh, "b": stale, "unlisted": stale})
    shard(directory, "two.safetensors", {"a": stale, "b": fresh})
    # A file from before the model was split must not win either.
    shard(directory, "model.safetensors", {"a": stale, "b": stale})
    index(directory, {"a": "one.safetensors", "b": "two.safetensors"})
    checkpoint = open_checkpoint(directory)
    assert set(checkpoint.infos()) == {"a", "b"}
    assert torch.equal(checkpoint.read("a"), fresh)
    assert torch.equal(checkpoint.read("b"), fresh)
    assert checkpoint.infos()["b"].file.name == "two.safetensors"
    with pytest.raises(TensorError, match="unlisted"):
        checkpoint.read("unlisted")


def test_shards_in_a_subfolder(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    (directory / "weights").mkdir()
    shard(directory, "weights/one.safetensors", {"a": torch.ones(4)})
    index(directory, {"a": "weights/one.safetensors"})
    assert torch.equal(open_checkpoint(directory).read("a"), torch.ones(4))


def test_missing_shard(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    shard(directory, "one.safetensors", {"a": torch.ones(4)})
    index(directory, {"a": "one.safetensors", "b.weight": "two.safetensors"})
    with pytest.raises(CorruptFileError) as error:
        open_checkpoint(directory)
    message = one_line(error)
    assert "two.safetensors: missing" in message
    assert "b.weight" in message


def test_missing_shard_beside_a_whole_file_says_what_to_do(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    shard(directory, "model.safetensors", {"a": torch.ones(4)})
    index(directory, {"a": "one.safetensors"})
    with pytest.raises(CorruptFileError, match="remove the index"):
        open_checkpoint(directory)


def test_tensor_not_where_the_index_says(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    shard(directory, "one.safetensors", {"a": torch.ones(4)})
    shard(directory, "two.safetensors", {"b": torch.ones(4)})
    index(directory, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(TensorError) as error:
        open_checkpoint(directory)
    assert "one.safetensors: no tensor b" in one_line(error)


def test_truncated_file_names_file_and_tensor(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    path = directory / "model.safetensors"
    shard(directory, path.name, {"first": torch.ones(4), "last": torch.ones(400)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptFileError) as error:
        open_checkpoint(directory)
    message = one_line(error)
    assert str(path) in message
    assert "truncated" in message
    assert "last" in message or "first" in message


@pytest.mark.parametrize("length", [0, 7, 8, 20])
def test_file_that_ends_in_its_header(tmp_path: Path, length: int) -> None:
    directory = folder(tmp_path)
    path = directory / "model.safetensors"
    shard(directory, path.name, {"a": torch.ones(4)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", ""])
def test_index_path_that_leaves_the_folder(tmp_path: Path, name: str) -> None:
    directory = folder(tmp_path)
    shard(tmp_path, "x.safetensors", {"a": torch.ones(4)})
    index(directory, {"a": name})
    with pytest.raises(CorruptFileError, match="leaves the folder"):
        open_checkpoint(directory)


@pytest.mark.parametrize("linked", ["model.safetensors", "config.json"])
def test_link_that_leaves_the_folder(tmp_path: Path, linked: str) -> None:
    directory = folder(tmp_path)
    shard(directory, "model.safetensors", {"a": torch.ones(4)})
    outside = tmp_path / "outside"
    (directory / linked).rename(outside)
    (directory / linked).symlink_to(outside)
    with pytest.raises(CorruptFileError, match=f"{linked}: links to .*outside the folder"):
        open_checkpoint(directory)


def test_links_inside_the_folder_and_a_linked_folder_work(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    shard(directory, "real.safetensors", {"a": torch.ones(4)})
    (directory / "model.safetensors").symlink_to("real.safetensors")
    linked = tmp_path / "link"
    linked.symlink_to(directory)
    assert torch.equal(open_checkpoint(linked).read("a"), torch.ones(4))


def hub_snapshot(tmp_path: Path, blobs: Path) -> Path:
    snapshot = tmp_path / "hub" / "models--o--n" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / "1").write_text("{}")
    save_file({"a": torch.ones(4)}, blobs / "2")
    (snapshot / "config.json").symlink_to(blobs / "1")
    (snapshot / "model.safetensors").symlink_to(blobs / "2")
    return snapshot


def test_a_hub_snapshot_may_link_to_its_own_blobs_only(tmp_path: Path) -> None:
    own = hub_snapshot(tmp_path / "x", tmp_path / "x" / "hub" / "models--o--n" / "blobs")
    assert torch.equal(open_checkpoint(own).read("a"), torch.ones(4))
    other = hub_snapshot(tmp_path / "y", tmp_path / "y" / "hub" / "models--p--q" / "blobs")
    with pytest.raises(CorruptFileError, match="outside the folder"):
        open_checkpoint(other)


def test_dangling_link_is_missing(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    index(directory, {"a": "one.safetensors"})
    (directory / "one.safetensors").symlink_to("nowhere")
    with pytest.raises(CorruptFileError, match=r"one.safetensors: missing"):
        open_checkpoint(directory)


HEADERS = {
    "huge_header": (b"{}", b"", 1 << 60, "claims a header of 1152921504606846976 bytes"),
    "long_header": (b"{}", b"", 3, "claims a header of 3 bytes"),
    "not_json": (b"{nope", b"", None, "header: not valid JSON"),
    "not_utf8": (b'{"\xff": 1}', b"", None, "header: not valid JSON"),
    "deep": (b"[" * 100_000, b"", None, "header: not valid JSON"),
    "list": ([], b"", None, "expected a JSON object, found list"),
    "not_entry": ({"t": 3}, b"", None, "tensor t is not described by an object"),
    "no_dtype": ({"t": {"shape": [1]}}, b"", None, "tensor t has no dtype"),
    "negative": ({"t": entry([-1], 0, 4)}, b"\0" * 4, None, r"tensor t has shape \[-1\]"),
    "fraction": ({"t": entry([1.5], 0, 4)}, b"\0" * 4, None, r"tensor t has shape"),  # type: ignore[list-item]
    "boolean": ({"t": entry([True], 0, 4)}, b"\0" * 4, None, r"tensor t has shape"),
    "backwards": ({"t": entry([1], 4, 0)}, b"\0" * 4, None, "tensor t has data offsets"),
    "wrong_size": ({"t": entry([3], 0, 8)}, b"\0" * 8, None, "needs 12 bytes, but .* span 8"),
    "overflow": (
        {"t": entry([1 << 62, 1 << 62], 0, 8)},
        b"\0" * 8,
        None,
        "but its offsets span 8",
    ),
    "past_end": ({"t": entry([4], 0, 16)}, b"\0" * 8, None, "truncated: tensor t ends at byte 16"),
    "overlap": (
        {"s": entry([2], 0, 8), "t": entry([2], 4, 12)},
        b"\0" * 12,
        None,
        "tensors s and t overlap",
    ),
    "gap": (
        {"s": entry([1], 0, 4), "t": entry([1], 8, 12)},
        b"\0" * 12,
        None,
        "tensors s and t leave a gap",
    ),
    "trailing": ({"t": entry([1], 0, 4)}, b"\0" * 9, None, "cover bytes 0 to 4 of 9"),
    "twice": (b'{"t": {}, "t": {}}', b"", None, "key 't' appears twice"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    header, data, length, expected = HEADERS[case]
    path = tmp_path / "model.safetensors"
    raw_file(path, header, data, length)
    with pytest.raises(CorruptFileError, match=expected) as error:
        read_header(path)
    assert str(path) in one_line(error)


def test_zero_sized_tensors_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    raw_file(path, {"s": entry([0, 4], 0, 0), "t": entry([1], 0, 4)}, b"\0" * 4)
    assert read_header(path)["s"].shape == (0, 4)


def test_unread_dtype_names_tensor_type_and_choices(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    shard(directory, "model.safetensors", {"ids": torch.arange(4), "a": torch.ones(4)})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.infos()["ids"].encoding == "I64"
    checkpoint.read("a")
    with pytest.raises(UnsupportedFormatError, match=r"ids has type I64.*F32, F16, BF16"):
        checkpoint.read("ids")


def test_missing_and_mis_shaped_tensors(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    shard(directory, "model.safetensors", {"a.weight": torch.ones(4)})
    checkpoint = open_checkpoint(directory)
    with pytest.raises(TensorError, match=r"no tensor a.wight; did you mean 'a.weight'"):
        checkpoint.read("a.wight")
    with pytest.raises(TensorError, match=r"a.weight has shape \(4,\), expected \(5,\)"):
        checkpoint.read_into("a.weight", torch.empty(5))


@pytest.mark.parametrize(
    ("files", "kind", "expected"),
    [
        ((), ModelNotFoundError, "an empty folder"),
        (("readme.txt",), ModelNotFoundError, "no config.json and no safetensors"),
        (("config.json",), ModelNotFoundError, "random weights use config:"),
        (
            ("config.json", "pytorch_model.bin"),
            UnsupportedFormatError,
            r"only pickle weights \(pytorch_model.bin\).*convert the model to safetensors",
        ),
        (("m.gguf",), ModelNotFoundError, r"for GGUF give the file, .*m.gguf"),
        (
            ("config.json", "m-1.safetensors", "m-2.safetensors"),
            CorruptFileError,
            "2 safetensors files but no model.safetensors.index.json",
        ),
    ],
)
def test_folders_without_a_readable_model(
    tmp_path: Path, files: tuple[str, ...], kind: type[Exception], expected: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(kind, match=expected) as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in one_line(error)


def test_missing_config(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", {"a": torch.ones(4)})
    with pytest.raises(ModelNotFoundError, match=r"no config.json beside the weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": 1, "a": 2}'])
def test_invalid_json(tmp_path: Path, name: str, text: str) -> None:
    directory = folder(tmp_path)
    shard(directory, "model.safetensors", {"a": torch.ones(4)})
    (directory / name).write_text(text)
    with pytest.raises(CorruptFileError) as error:
        open_checkpoint(directory)
    assert str(directory / name) in one_line(error)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 3}, {"a": None}])
def test_absurd_index(tmp_path: Path, weight_map: object) -> None:
    directory = folder(tmp_path)
    shard(directory, "model.safetensors", {"a": torch.ones(4)})
    index(directory, weight_map)
    with pytest.raises(CorruptFileError, match=r"index\.json"):
        open_checkpoint(directory)


def test_one_oddly_named_file_is_enough(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    shard(directory, "adapter.safetensors", {"a": torch.ones(4)})
    assert set(SafetensorsCheckpoint(directory).infos()) == {"a"}
