"""The GGUF header parser: against the gguf package, and against hostile headers."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tiny_gguf import entry, raw_gguf, tensor, text, tiny_arrays, write_gguf

from layline.errors import CheckpointError, CorruptFileError, UnsupportedFormatError
from layline.weights.gguf_file import GGML_TYPES, GGUFFile, shorten


def opened(tmp_path: Path, raw: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    return GGUFFile(path)


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    import gguf

    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_arrays(tied=False, bias=True),
        encodings={"blk.0.ffn_up.weight": "Q8_0", "token_embd.weight": "Q4_1"},
        extra={"a.flag": True, "a.list": [1.5, 2.5], "a.names": ["x", "", "ü"], "a.empty": ""},
    )
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for expected in theirs.tensors:
        found = ours.tensors[expected.name]
        assert found.shape == tuple(int(n) for n in reversed(expected.shape))
        assert found.encoding == expected.tensor_type.name
        assert found.start == expected.data_offset
        assert found.nbytes == expected.n_bytes
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert dict(ours.metadata) == fields


def test_type_table_agrees_with_the_gguf_package() -> None:
    import gguf

    expected = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    # ggml halved the two floats of Q8_1 to float16; the package still has the old size. The type
    # is for activations and is not found in files.
    expected[9] = ("Q8_1", 32, 36)
    assert dict(GGML_TYPES) == expected


@pytest.mark.smollm2
def test_real_file_agrees_with_the_gguf_package(smollm2_file: Path) -> None:
    import gguf

    ours, theirs = GGUFFile(smollm2_file), gguf.GGUFReader(smollm2_file)
    assert [(t.name, t.data_offset, t.n_bytes) for t in theirs.tensors] == [
        (t.name, t.start, t.nbytes) for t in ours.tensors.values()
    ]
    key = "tokenizer.ggml.merges"
    assert ours.metadata[key] == theirs.fields[key].contents()
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == 49152


def test_arrays_are_located_but_not_decoded(tmp_path: Path) -> None:
    broken = struct.pack("<IQ", 8, 2) + text("fine") + text(b"\xff\xfe")
    file = opened(tmp_path, raw_gguf([entry("names", 9, broken), entry("n", 4, b"\7\0\0\0")]))
    assert file.metadata["n"] == 7
    assert file.metadata.array_length("names") == 2
    assert file.metadata.array_length("n") is None
    assert "names" in file.metadata
    with pytest.raises(CorruptFileError, match=r"names.*not valid UTF-8"):
        file.metadata["names"]


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    parts = ([entry("n", 10, struct.pack("<Q", 1 << 40))], [tensor("t", (4,), 0, 0)])
    file = opened(tmp_path, raw_gguf(*parts, version=2, data=b"\0" * 16))
    assert file.metadata["n"] == 1 << 40
    assert file.tensors["t"].shape == (4,)


def test_metadata_outlives_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path, raw_gguf([entry("a", 9, struct.pack("<IQI", 4, 1, 9))]))
    assert file.metadata["a"] == [9]
    file.close()
    with pytest.raises(CorruptFileError, match="closed before a was read"):
        file.metadata["a"]


HUGE = (1 << 64) - 1
ONE = [tensor("t", (32,), 0, 0)]
HOSTILE = {
    "empty": (b"", "the file is empty"),
    "not_gguf": (b"PK\3\4" + b"\0" * 40, "not a GGUF file"),
    "only_magic": (b"GGUF", "version need at least 4 bytes"),
    "many_entries": (raw_gguf(num_entries=HUGE), r"18446744073709551615 metadata entries need"),
    "many_tensors": (raw_gguf(num_tensors=HUGE), r"18446744073709551615 tensors need"),
    "key_too_long": (
        raw_gguf([struct.pack("<Q", HUGE) + b"k" * 20]),
        r"metadata key 0 at offset 24 claims 18446744073709551615 bytes",
    ),
    "string_too_long": (
        raw_gguf([entry("k", 8, struct.pack("<Q", 1 << 63))]),
        r"k at offset \d+ claims 9223372036854775808 bytes",
    ),
    "array_too_long": (
        raw_gguf([entry("k", 9, struct.pack("<IQ", 12, 1 << 61))]),
        r"2305843009213693952 values of k need",
    ),
    "strings_too_many": (
        raw_gguf([entry("k", 9, struct.pack("<IQ", 8, 1 << 61))]),
        r"2305843009213693952 strings of k need",
    ),
    "string_in_array_too_long": (
        raw_gguf([entry("k", 9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", HUGE) * 2)]),
        r"ends inside k, string 1 of 2",
    ),
    "last_string_too_long": (
        raw_gguf([entry("k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 1 << 40))]),
        r"last string of k passes the end",
    ),
    "nested_array": (
        raw_gguf([entry("k", 9, struct.pack("<IQ", 9, 1) + b"\0" * 24)]),
        "nested arrays are not read",
    ),
    "array_of_unknown": (
        raw_gguf([entry("k", 9, struct.pack("<IQ", 77, 1))]),
        "element type 77 is not read",
    ),
    "unknown_type": (raw_gguf([entry("k", 13, b"\0" * 8)]), "metadata k has unknown type 13"),
    "key_twice": (
        raw_gguf([entry("k", 0, b"\1"), entry("k", 0, b"\2")]),
        "metadata key k appears twice",
    ),
    "key_not_utf8": (raw_gguf([text(b"\xff" * 9) + b"\0" * 8]), "is not valid UTF-8"),
    "alignment_zero": (
        raw_gguf([entry("general.alignment", 4, struct.pack("<I", 0))]),
        "general.alignment is 0",
    ),
    "alignment_odd": (
        raw_gguf([entry("general.alignment", 4, struct.pack("<I", 24))]),
        "general.alignment is 24",
    ),
    "alignment_text": (raw_gguf([entry("general.alignment", 8, text("no"))]), "is no; expected"),
    "no_dimensions": (raw_gguf([], [tensor("t", (), 0, 0)]), "t has 0 dimensions"),
    "dimensions": (raw_gguf([], [tensor("t", (1,) * 5, 0, 0)]), "t has 5 dimensions"),
    "zero_size": (raw_gguf([], [tensor("t", (0,), 0, 0)]), "non-empty"),
    "size_overflow": (
        raw_gguf([], [tensor("t", (1 << 32, 1 << 32), 0, 0)], data=b"\0" * 64),
        r"tensor t needs bytes up to 737\d+",
    ),
    "broken_block": (
        raw_gguf([], [tensor("t", (33, 2), 3, 0)], data=b"\0" * 64),
        r"t of type Q4_1 has shape \[2, 33\]; rows must be .*multiples of 32",
    ),
    "offset_overflow": (
        raw_gguf([], [tensor("t", (32,), 0, (1 << 64) - 32)], data=b"\0" * 128),
        r"tensor t needs bytes up to 184467",
    ),
    "misaligned": (
        raw_gguf([], [tensor("t", (32,), 0, 4)], data=b"\0" * 256),
        "t starts at 4, not a multiple of 32",
    ),
    "overlap": (
        raw_gguf([], [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 96)], data=b"\0" * 256),
        "tensors a and b overlap",
    ),
    "same_name": (
        raw_gguf([], [tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)], data=b"\0" * 64),
        "tensor a appears twice",
    ),
    "truncated": (raw_gguf([], ONE, data=b"\0" * 127), r"t needs bytes up to \d+.*truncated"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_one_line_that_names_the_file(tmp_path: Path, name: str) -> None:
    raw, expected = HOSTILE[name]
    with pytest.raises(CorruptFileError, match=expected) as caught:
        opened(tmp_path, raw)
    message = str(caught.value)
    assert str(tmp_path / "x.gguf") in message
    assert "\n" not in message


def test_touching_tensors_are_not_an_overlap(tmp_path: Path) -> None:
    tensors = [tensor("b", (8,), 0, 32), tensor("a", (8,), 0, 0)]
    assert len(opened(tmp_path, raw_gguf([], tensors, data=b"\0" * 64)).tensors) == 2


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (raw_gguf(version=1), "version 1 is not read; versions 2 and 3"),
        (raw_gguf(version=4), "version 4"),
        (raw_gguf(version=3 << 24), "big-endian"),
        (raw_gguf([], [tensor("t", (32,), 99, 0)]), r"t has unknown ggml type 99; supported: F32"),
        (
            raw_gguf([entry("split.count", 2, struct.pack("<H", 3))]),
            "split into 3 files.*--merge",
        ),
    ],
)
def test_what_is_not_read_is_said(tmp_path: Path, raw: bytes, expected: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=expected):
        opened(tmp_path, raw)


def test_every_truncation_of_a_valid_file_is_an_error(tmp_path: Path) -> None:
    whole = raw_gguf(
        [entry("k", 8, text("value")), entry("a", 9, struct.pack("<IQ", 8, 2) + text("x") * 2)],
        ONE,
        data=b"\0" * 128,
    )
    opened(tmp_path, whole)
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            opened(tmp_path, whole[:length])


def test_names_in_errors_are_short_and_printable() -> None:
    assert shorten("plain") == "plain"
    assert shorten("a\nb") == r"'a\nb'"
    assert len(shorten("x" * 1000)) < 80
