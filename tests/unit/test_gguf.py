"""GGUF headers: what the `gguf` package writes is read back, and whatever is wrong with a file is said in one line."""

import os
import random
import re
import runpy
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import write_gguf
from headrace import gguf as reader
from headrace.errors import UserError
from headrace.gguf import File, open_gguf
from headrace.quants import TYPES, dequantize

NUMBERS = [np.uint8(200), np.int8(-5), np.uint16(60000), np.int16(-300), np.uint32(4_000_000_000), np.int32(-70000)]
NUMBERS += [np.uint64(1 << 63), np.int64(-(1 << 62)), np.float32(0.1), np.float64(0.1)]
TENSORS = {
    "a.weight": ("F32", (3, 5)), "b.weight": ("Q4_K", (2, 512)), "c.weight": ("Q8_0", (4, 3, 96)),
    "d.weight": ("F16", (7,)), "e.weight": ("IQ2_XXS", (2, 1, 3, 256)), "f.weight": ("Q1_0", (2, 128)),
}  # fmt: skip


def tensor_bytes(file: File, name: str) -> np.ndarray:
    t = file.tensors[name]
    return np.fromfile(file.shards[t.shard].path, np.uint8, t.n_bytes, offset=t.offset_bytes)


# what is there


def test_metadata_of_every_type(tmp_path: Path) -> None:
    values = {f"n.{v.dtype.name}": v for v in NUMBERS} | {"yes": True, "no": False, "text": "naïve \n☃", "empty": ""}
    arrays = {f"a.{v.dtype.name}": np.array([v, 1, v], v.dtype) for v in NUMBERS} | {"a.bool": np.array([True, False])}
    write_gguf(tmp_path / "m.gguf", TENSORS, values | arrays | {"strings": ["a", "", "☃☃", "d" * 300]})
    file = open_gguf(tmp_path / "m.gguf")
    for key, value in values.items():
        assert file.metadata[key] == value, key
        assert type(file.metadata[key]) in (int, float, bool, str), key
    for key, array in arrays.items():
        read = file.metadata[key]
        np.testing.assert_array_equal(read, array)
        assert read.dtype == array.dtype
        assert not read.flags.writeable
    strings = file.metadata["strings"]
    assert len(strings) == 4
    assert list(strings) == strings.to_list() == ["a", "", "☃☃", "d" * 300]
    assert (strings[2], strings[-1], strings[1:3]) == ("☃☃", "d" * 300, ["", "☃☃"])
    for i in (4, -5):
        with pytest.raises(IndexError):
            strings[i]
    with pytest.raises(TypeError):
        file.metadata["text"] = "other"  # type: ignore[index]
    assert len(set(file.metadata)) == len(values) + len(arrays) + 2  # and general.architecture


def test_tensors_are_where_the_package_finds_them(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", TENSORS, alignment=64)
    file, package = open_gguf(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert list(file.tensors) == list(TENSORS) == [t.name for t in package.tensors]
    for t in package.tensors:
        ours = file.tensors[t.name]
        assert (ours.type.name, ours.shape) == TENSORS[t.name]
        assert (ours.offset_bytes, ours.n_bytes, ours.shard) == (t.data_offset, t.n_bytes, 0)
        assert ours.offset_bytes % 64 == 0
        np.testing.assert_array_equal(tensor_bytes(file, t.name), written[t.name].reshape(-1))
    assert file.shards[0].size_bytes == (tmp_path / "m.gguf").stat().st_size


def test_every_tensor_type(tmp_path: Path) -> None:
    tensors = {name: (name, (2, max(t.block, 3 * 32))) for name, t in TYPES.items() if 96 % min(t.block, 96) == 0}
    assert len(tensors) == len(TYPES) - 1  # NVFP4's 64 do not divide 96
    tensors["NVFP4"] = ("NVFP4", (2, 64))
    written = write_gguf(tmp_path / "m.gguf", tensors)
    file = open_gguf(tmp_path / "m.gguf")
    for name, t in file.tensors.items():
        assert (t.type, t.shape) == (TYPES[name], tensors[name][1])
        decoded = dequantize(tensor_bytes(file, name), t.type, t.shape)
        np.testing.assert_array_equal(decoded, dequantize(written[name].reshape(-1), t.type, t.shape))


def test_version_2(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, TENSORS)
    path.write_bytes(patched(path.read_bytes(), 4, struct.pack("<I", 2)))
    assert list(open_gguf(path).tensors) == list(TENSORS)


def test_headers_longer_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is read in growing pieces; the borders may fall anywhere."""
    metadata = {"strings": [f"word {i}" for i in range(500)], "numbers": np.arange(300, dtype=np.uint32), "last": "x"}
    write_gguf(tmp_path / "m.gguf", TENSORS, metadata)
    for first_read in (1, 3, 24, 100, 1001, 5000):
        monkeypatch.setattr(reader, "FIRST_READ_BYTES", first_read)
        file = open_gguf(tmp_path / "m.gguf")
        assert file.metadata["strings"].to_list() == metadata["strings"]
        assert file.metadata["last"] == "x"
        assert list(file.tensors) == list(TENSORS)


def test_get(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {"n": 3, "f": 0.5, "yes": True, "text": "t", "array": [1, 2]})
    file = open_gguf(tmp_path / "m.gguf")
    assert file.architecture == "llama"
    assert (file.get("n", int), file.get("f", float), file.get("yes", bool), file.get("text", str)) == (
        3,
        0.5,
        True,
        "t",
    )
    assert file.get("n", float) == 3.0
    assert file.get("m", int, default=7) == 7
    for key, kind in [("n", str), ("yes", int), ("text", int), ("f", int), ("array", int), ("n", bool)]:
        with pytest.raises(UserError, match=rf"m\.gguf: metadata key '{key}' is .*, expected {kind.__name__}"):
            file.get(key, kind)
    with pytest.raises(UserError, match=r"m\.gguf: metadata key 'gone' is missing"):
        file.get("gone", int)


def test_a_vocabulary_is_not_decoded_before_it_is_looked_at(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {"strings": [f"word {i}" for i in range(20_000)]})
    tracemalloc.start()
    strings = open_gguf(tmp_path / "m.gguf").metadata["strings"]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.2 * (tmp_path / "m.gguf").stat().st_size
    assert strings[19_999] == "word 19999"


def test_invalid_utf8_in_a_token_is_replaced(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {"strings": ["ab", "cd"]})
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"cd", b"\xffd"))
    assert open_gguf(tmp_path / "m.gguf").metadata["strings"].to_list() == ["ab", "\ufffdd"]


# split sets


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", TENSORS, {"text": "t"}, split_max_tensors=2)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_shard_opens_the_set(shards: list[Path]) -> None:
    assert len(shards) == 3
    for given in shards:
        file = open_gguf(str(given))
        assert [s.path for s in file.shards] == shards
        assert [s.size_bytes for s in file.shards] == [p.stat().st_size for p in shards]
        assert file.metadata["text"] == "t"
        assert {name: t.shard for name, t in file.tensors.items()} == dict(zip(TENSORS, (0, 0, 1, 1, 2, 2)))
        package = {t.name: t for p in shards for t in gguf.GGUFReader(p).tensors}
        for name in TENSORS:
            np.testing.assert_array_equal(tensor_bytes(file, name), package[name].data.reshape(-1).view(np.uint8))


def test_bad_split_sets(shards: list[Path]) -> None:
    first, second, third = shards
    content = [p.read_bytes() for p in shards]

    third.unlink()
    fails(first, r"1 of 3 shards are missing, first m-00003-of-00003\.gguf; put all in one folder")
    third.write_bytes(content[1])
    fails(second, r"m-00003-of-00003\.gguf: says that it is shard 2 of 3, its name says 3 of 3")
    third.write_bytes(content[2][:-200])
    fails(first, r"m-00003-of-00003\.gguf: tensor '.\.weight' ends at byte \d+ of \d+; the file is truncated")
    third.write_bytes(b"")
    fails(first, r"m-00003-of-00003\.gguf: the file is empty")
    third.write_bytes(content[2].replace(b"e.weight", b"a.weight"))
    fails(first, r"m-00003-of-00003\.gguf: tensor 'a\.weight' is there twice")
    third.write_bytes(content[2])
    count = content[0].index(b"split.tensors.count") + len("split.tensors.count") + 4
    first.write_bytes(patched(content[0], count, struct.pack("<I", 7)))
    fails(second, r"m-00001-of-00003\.gguf: says the shards hold 7 tensors, they hold 6")

    other = first.with_name("other.gguf")
    other.write_bytes(content[1])
    fails(other, r"is shard 2 of 3; give it back its name NAME-00002-of-00003\.gguf")
    fails(first.with_name("m-00004-of-00003.gguf"), "shard 4 of 3 cannot be")


def test_a_shard_count_that_is_no_number(tmp_path: Path) -> None:
    for value in ("three", [1, 2], 0.5):
        write_gguf(tmp_path / "m.gguf", TENSORS, {"split.count": value})
        fails(tmp_path / "m.gguf", "split.count and split.no are no numbers")


# what is wrong


def fails(path: Path, pattern: str) -> None:
    """Opening fails with one line that names the file and matches the pattern."""
    with pytest.raises(UserError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert re.search(pattern, message), message
    assert len(message.splitlines()) == 1
    assert str(path.parent) in message
    assert len(message) < 400 + len(str(path))


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def header(
    *, version: int = 3, n_tensors: int = 0, n_keys: int = 0, body: bytes = b"", magic: bytes = b"GGUF"
) -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys) + body


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def two(second_offset: int, first: tuple[int, ...] = (32,), size: int = 4096) -> bytes:
    body = entry(b"t", first, 0, 0) + entry(b"u", (32,), 0, second_offset)
    return header(n_tensors=2, body=body) + bytes(size)


def key(kind: int, value: bytes, name: bytes = b"k") -> bytes:
    return header(n_keys=1, body=pair(name, kind, value))


def array(kind: int, n: int, content: bytes = b"") -> bytes:
    return key(9, struct.pack("<IQ", kind, n) + content)


def tensor(dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    return header(n_tensors=1, body=entry(name, dims, kind, offset)) + bytes(999)


HUGE = struct.pack("<Q", 1 << 63)
BAD = {
    "zero length": (b"", "the file is empty"),
    "three bytes": (b"GGU", "is no GGUF file"),
    "magic only": (b"GGUF", "ends inside the version; it is truncated"),
    "another format": (b"PK\x03\x04" + bytes(100), "is no GGUF file"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
    "web page": (b"\n<!doctype html><html>", "is a web page"),
    "older format": (b"tjgg" + bytes(100), "older than GGUF"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is a big-endian GGUF file"),
    "version 0": (header(version=0), "version 0; versions 2 and 3 are known"),
    "version 1": (header(version=1), "version 1; convert"),
    "version 4": (header(version=4), "version 4; versions 2 and 3 are known"),
    "many tensors": (header(n_tensors=1 << 60) + bytes(99), "number of tensors says 1152921504606846976, more than"),
    "many keys": (header(n_keys=1 << 40) + bytes(99), "number of metadata keys says 1099511627776, more than"),
    "no keys": (header(n_keys=1), "more than the file can hold"),
    "long key": (header(n_keys=1, body=HUGE + bytes(99)), "the length of the name of metadata key 0 says 9223"),
    "key not UTF-8": (key(4, bytes(9), b"\xff"), "name of metadata key 0 is not UTF-8"),
    "key twice": (header(n_keys=2, body=2 * pair(b"k", 4, bytes(4))), "metadata key 'k' is there twice"),
    "value type": (key(13, bytes(8)), "metadata key 'k' has the unknown value type 13"),
    "value cut": (key(10, bytes(4)), "the file ends inside metadata key 'k'"),
    "long string": (key(8, HUGE), "the length of metadata key 'k' says 9223"),
    "array type": (array(77, 1), "'k' has the unknown element type 77"),
    "array of arrays": (array(9, 1), "'k' is an array of arrays"),
    "long array": (array(5, 1 << 62), "length of metadata key 'k' says 4611"),
    "many strings": (array(8, 1 << 61), "length of metadata key 'k' says 2305"),
    "string too long": (array(8, 2, HUGE + bytes(8)), "file ends inside metadata key 'k'"),
    "last string too long": (array(8, 1, struct.pack("<Q", 1)), "ends inside metadata key 'k'"),
    "alignment 0": (key(4, struct.pack("<I", 0), b"general.alignment"), "general.alignment is 0"),
    "alignment 48": (key(4, struct.pack("<I", 48), b"general.alignment"), "48, which is no power of two"),
    "alignment text": (key(8, string(b"32"), b"general.alignment"), "general.alignment is '32'"),
    "dimensions": (tensor((1,) * 5), "tensor 't' has 5 dimensions"),
    "no dimension": (tensor(()), "tensor 't' has 0 dimensions"),
    "zero width": (tensor((0, 4)), r"tensor 't' of shape \[4, 0\] does not"),
    "width": (tensor((32, 8), 12), r"shape \[8, 32\] does not .* Q4_K .* 256"),
    "unknown type": (tensor(kind=99), "tensor 't' has the unknown type 99"),
    "known type": (tensor(kind=31), "tensor 't' has the type Q4_0_4_4, which cannot be read"),
    "huge tensor": (tensor((1 << 62,) * 4), "'t' ends at byte .* truncated"),
    "far offset": (two(1 << 62), "tensor 'u' ends at byte 4611686018427388.* truncated"),
    "misaligned": (two(130), "tensor 'u' starts at 130, which is not aligned to 32"),
    "overlap": (two(96), "tensors 't' and 'u' overlap"),
    "same place": (two(0), "tensors '.' and '.' overlap"),
    "tensor twice": (two(128).replace(b"u", b"t"), "tensor 't' is there twice"),
    "data cut": (two(128, size=200), r"tensor 'u' ends at byte \d+ of \d+; the file is truncated"),
    "long name": (tensor(kind=99, name=b"x" * 5000), "has the unknown type 99"),
    "newline": (tensor(kind=99, name=b"a\nb\x1b[1m"), r"'a\\nb\\x1b\[1m'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(tmp_path: Path, case: str) -> None:
    content, pattern = BAD[case]
    (tmp_path / "m.gguf").write_bytes(content)
    fails(tmp_path / "m.gguf", pattern)


def test_the_good_neighbours_of_bad_files(tmp_path: Path) -> None:
    """The builders above make files that open when nothing is wrong with them."""
    for content in (header(), two(128), two(160), header(n_keys=1, body=pair(b"k", 4, bytes(4)))):
        (tmp_path / "m.gguf").write_bytes(content)
        open_gguf(tmp_path / "m.gguf")


def test_no_file(tmp_path: Path) -> None:
    fails(tmp_path / "gone.gguf", r"gone\.gguf: No such file")
    (tmp_path / "folder.gguf").mkdir()
    fails(tmp_path / "folder.gguf", "is a folder or device")
    os.mkfifo(tmp_path / "pipe.gguf")
    fails(tmp_path / "pipe.gguf", "is a folder or device")


def test_no_architecture(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(header())
    with pytest.raises(UserError, match=r"m\.gguf: metadata key 'general\.architecture' is missing"):
        _ = open_gguf(tmp_path / "m.gguf").architecture


def test_every_truncation(tmp_path: Path) -> None:
    """A file cut at any byte of its header, or anywhere in its data, is refused; the last padding may be missing."""
    path, metadata = tmp_path / "m.gguf", {"n": 3, "text": "t", "a": np.arange(9), "strings": ["a", "bc"], "yes": True}
    write_gguf(path, TENSORS, metadata)
    content = path.read_bytes()
    last = max(t.offset_bytes + t.n_bytes for t in open_gguf(path).tensors.values())
    start = min(t.offset_bytes for t in open_gguf(path).tensors.values())
    for n in [*range(start), *range(start, last, 41), last - 1]:
        path.write_bytes(content[:n])
        fails(path, r"truncated|is empty|no GGUF file|more than the file can hold")
    path.write_bytes(content[:last])
    open_gguf(path)


def test_a_number_too_large_reads_nothing(tmp_path: Path) -> None:
    """A long file whose header lies: what it asks for exists, as holes, and is neither read nor kept."""
    for kind in (0, 5, 8, 10):
        with open(tmp_path / "m.gguf", "wb") as f:
            f.write(array(kind, 1 << 36))
            f.truncate(1 << 40)
        tracemalloc.start()
        if kind == 8:  # empty strings: the walk ends at the limit of a header; a small one here
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reader, "HEADER_LIMIT_BYTES", 1 << 22)
                fails(tmp_path / "m.gguf", "too far for a header")
        else:
            fails(tmp_path / "m.gguf", "metadata key 'k' ends at byte .*, too far for a header")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        tracemalloc.stop()


def test_mutations(tmp_path: Path) -> None:
    """Several hundred damaged files (the bench script makes thousands): each opens or fails with one line."""
    fuzz = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "fuzz_gguf.py"))
    good, path = fuzz["seeds"](tmp_path), tmp_path / "m.gguf"
    outcomes = Counter[str]()
    tracemalloc.start()
    for content in fuzz["mutations"](good, random.Random(1), 600):
        path.write_bytes(content)
        outcomes[fuzz["open_one"](path)] += 1
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes["ok"] > 60
    assert len(outcomes) > 20, outcomes
    assert peak_bytes < 16 << 20
