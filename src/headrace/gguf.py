"""GGUF headers: metadata and tensor directory of one file or a split set, bounds-checked, without reading weights.

Layout: the GGUF specification (ggml/docs/gguf.md), versions 2 and 3, little-endian. The header is read, never mapped,
so a file that shrinks meanwhile cannot kill the process, and no descriptor stays open. No number from the file sizes an
allocation before it was checked against the file's length and a limit.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .quants import BY_ID, OTHER_TYPES, TensorType

T = TypeVar("T", int, float, bool, str)

MAGIC = b"GGUF"
FIRST_READ_BYTES = 1 << 20
HEADER_LIMIT_BYTES = 256 << 20
"""A vocabulary of 248,320 tokens with its merges makes a header of 9 MB."""
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
SCALARS: dict[int, tuple[str, int]] = {
    UINT8: ("<B", 1), INT8: ("<b", 1), UINT16: ("<H", 2), INT16: ("<h", 2), UINT32: ("<I", 4), INT32: ("<i", 4),
    FLOAT32: ("<f", 4), BOOL: ("<?", 1), UINT64: ("<Q", 8), INT64: ("<q", 8), FLOAT64: ("<d", 8),
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes are. `shape` is in numpy's order, the reverse of GGUF's: a matrix is [n_out, n_in], a
    stack of experts [n_expert, n_out, n_in]; `offset_bytes` counts from the start of its shard's file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    shard: int
    offset_bytes: int
    n_bytes: int


class StringArray(Sequence[str]):
    """An array of strings that stays bytes until it is looked at; invalid UTF-8 reads as U+FFFD."""

    def __init__(self, data: bytes, n: int) -> None:
        self._data, self._n = data, n
        self._offsets: list[int] | None = None

    def __len__(self) -> int:
        return self._n

    def _bounds(self) -> list[int]:
        if self._offsets is None:
            self._offsets, pos, size_of = [], 0, struct.Struct("<Q").unpack_from
            for _ in range(self._n):
                self._offsets.append(pos + 8)
                pos += 8 + size_of(self._data, pos)[0]
            self._offsets.append(pos + 8)
        return self._offsets

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self._n))]
        if not -self._n <= i < self._n:
            raise IndexError(i)
        at = self._bounds()
        return self._data[at[i % self._n] : at[i % self._n + 1] - 8].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"<{self._n} strings>"

    def to_list(self) -> list[str]:
        at, data = self._bounds(), self._data
        return [data[a : b - 8].decode("utf-8", "replace") for a, b in pairwise(at)]


class File:
    """One GGUF model: the shards, the metadata (of the first shard) and the tensors of all shards."""

    def __init__(
        self, path: Path, shards: tuple[Shard, ...], metadata: Mapping[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path, self.shards, self.metadata, self.tensors = path, shards, metadata, tensors

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)

    def get(self, key: str, kind: type[T], *, default: T | None = None) -> T:
        """A scalar of the wanted kind; raises UserError if it is missing (and has no default) or of another kind."""
        value = self.metadata.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.path}: metadata key {key!r} is missing")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self.path}: metadata key {key!r} is {value!r:.40}, expected {kind.__name__}")
        return value


class _Reader:
    """A cursor over a file's header, of which as much is read as is asked for."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.size = path, file, os.fstat(file.fileno()).st_size
        self.data, self.pos = b"", 0

    def fail(self, what: str) -> UserError:
        return UserError(f"{self.path}: {what}")

    def take(self, n: int, what: str) -> bytes:
        """The next n bytes."""
        start, self.pos = self.pos, self.pos + n
        self.read_to(self.pos, what)
        return self.data[start : self.pos]

    def read_to(self, end: int, what: str) -> None:
        """Has the file's first `end` bytes in memory."""
        if end <= len(self.data):
            return
        if end > self.size:
            raise self.fail(f"the file ends inside {what}; it is truncated or damaged")
        if end > HEADER_LIMIT_BYTES:
            raise self.fail(f"{what} ends at byte {end}, too far for a header; the file is damaged")
        wanted = min(self.size, max(end, FIRST_READ_BYTES, 2 * len(self.data)))
        self.data += self.file.read(wanted - len(self.data))
        if end > len(self.data):
            raise self.fail(f"the file became shorter while {what} was read")

    def scalar(self, kind: int, what: str) -> Any:
        fmt, n = SCALARS[kind]
        return struct.unpack(fmt, self.take(n, what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A uint64 count of things of at least so many bytes each, which must fit in the rest of the file."""
        n = int(self.scalar(UINT64, what))
        if n * least_bytes > self.size - self.pos:
            raise self.fail(f"{what} says {n}, more than the file can hold; it is truncated or damaged")
        return n

    def string(self, what: str) -> bytes:
        return self.take(self.count(f"the length of {what}", 1), what)

    def name(self, what: str) -> str:
        try:
            return self.string(what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8; the file is damaged") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in SCALARS:
            return self.scalar(kind, what)
        if kind == STRING:
            return self.string(what).decode("utf-8", "replace")
        if kind != ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}; the file is damaged or of a newer version")
        return self.array(what)

    def array(self, what: str) -> Any:
        kind = int(self.scalar(UINT32, what))
        if kind in SCALARS:
            fmt, size = SCALARS[kind]
            n = self.count(f"the length of {what}", size)
            found: NDArray[Any] = np.frombuffer(self.take(n * size, what), np.uint8 if kind == BOOL else fmt)
            found = found != 0 if kind == BOOL else found
            found.setflags(write=False)
            return found
        if kind == STRING:
            n = self.count(f"the length of {what}", 8)
            start = self.pos
            self._skip_strings(n, what)
            return StringArray(self.data[start : self.pos], n)
        if kind == ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no model uses")
        raise self.fail(f"{what} has the unknown element type {kind}; the file is damaged or of a newer version")

    def _skip_strings(self, n: int, what: str) -> None:
        """Walks n lengths: the one loop that a large vocabulary's opening time depends on (0.1 us a string)."""
        size_of = struct.Struct("<Q").unpack_from
        while n:
            self.read_to(self.pos + 8, what)
            pos, data, last = self.pos, self.data, len(self.data) - 8
            while n and pos <= last:
                pos += 8 + size_of(data, pos)[0]
                n -= 1
            self.pos = pos
        self.read_to(self.pos, what)


def open_gguf(path: str | Path) -> File:
    """Opens a model by its file or by any shard of a split set; raises UserError with one line on anything wrong."""
    path = Path(path)
    paths = _shard_paths(path)
    headers = [_read_header(p, i) for i, p in enumerate(paths)]
    shards = tuple(Shard(p, size) for p, (_, _, size) in zip(paths, headers))
    metadata = headers[0][0]
    tensors: dict[str, TensorInfo] = {}
    for i, (p, (meta, infos, _)) in enumerate(zip(paths, headers)):
        _check_place(p, meta, i, len(paths))
        for info in infos:
            if info.name in tensors:
                raise UserError(f"{p}: tensor {info.name!r:.80} is there twice")
            tensors[info.name] = info
    n_expected = metadata.get("split.tensors.count")
    if len(paths) > 1 and isinstance(n_expected, int) and n_expected != len(tensors):
        raise UserError(f"{paths[0]}: says the shards hold {n_expected} tensors, they hold {len(tensors)}")
    return File(path, shards, MappingProxyType(metadata), tensors)


def _shard_paths(path: Path) -> list[Path]:
    m = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", path.name)
    if not m or int(m[3]) < 2:
        return [path]
    n = int(m[3])
    if not 1 <= int(m[2]) <= n:
        raise UserError(f"{path}: shard {int(m[2])} of {n} cannot be")
    paths = [path.with_name(f"{m[1]}-{i:05}-of-{n:05}{m[4]}") for i in range(1, n + 1)]
    if missing := [p for p in paths if not os.path.exists(p)]:
        raise UserError(
            f"{path}: {len(missing)} of {n} shards are missing, first {missing[0].name}; put all in one folder"
        )
    return paths


def _check_place(path: Path, meta: dict[str, Any], index: int, n: int) -> None:
    """Whether a shard's metadata agree with the place that its name gives it."""
    said, no = meta.get("split.count", 1), meta.get("split.no", 0)
    if not (isinstance(said, int) and isinstance(no, int)):
        raise UserError(f"{path}: split.count and split.no are no numbers; the file is damaged")
    if n == 1 and said > 1:
        raise UserError(
            f"{path}: is shard {no + 1} of {said}; give it back its name NAME-{no + 1:05}-of-{said:05}.gguf, by which "
            "the others are found"
        )
    if n > 1 and (said, no) != (n, index):
        raise UserError(f"{path}: says that it is shard {no + 1} of {said}, its name says {index + 1} of {n}")


def _read_header(path: Path, shard: int) -> tuple[dict[str, Any], list[TensorInfo], int]:
    """Metadata, tensors and size in bytes of one file."""
    try:
        if os.path.exists(path) and not path.is_file():  # a pipe would block
            raise UserError(f"{path}: is a folder or device; give the .gguf file itself")
        with open(path, "rb") as f:
            reader = _Reader(path, f)
            return *_parse(reader, shard), reader.size
    except OSError as e:
        raise UserError(f"{path}: {e.strerror or e}") from None


def _parse(r: _Reader, shard: int) -> tuple[dict[str, Any], list[TensorInfo]]:
    _check_magic(r)
    n_tensors = r.count("the number of tensors", 24)
    n_keys = r.count("the number of metadata keys", 13)
    meta: dict[str, Any] = {}
    for i in range(n_keys):
        key = r.name(f"the name of metadata key {i}")
        if key in meta:
            raise r.fail(f"metadata key {key!r:.80} is there twice")
        what = f"metadata key {key!r:.80}"
        meta[key] = r.value(int(r.scalar(UINT32, what)), what)
    align = meta.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(align) is not int or align <= 0 or align & (align - 1) or align > 1 << 30:
        raise r.fail(f"general.alignment is {align!r}, which is no power of two")
    raw = [_tensor_entry(r, i) for i in range(n_tensors)]
    start = -(-r.pos // align) * align
    infos = [_tensor_info(r, *entry, shard, start, align) for entry in raw]
    _check_overlap(r, infos)
    return meta, infos


def _check_magic(r: _Reader) -> None:
    if r.size == 0:
        raise r.fail("the file is empty")
    r.read_to(min(r.size, 24), "the header")
    magic, r.pos = r.data[:4], 4
    if r.data.startswith(b"version https://git-lfs"):
        raise r.fail("is a Git LFS pointer, not the model; run `git lfs pull`")
    if r.data.lstrip()[:1] == b"<":
        raise r.fail("is a web page, not the model; download the file itself")
    if magic in (b"ggml", b"ggjt", b"lmgg", b"tjgg", b"fmgg"):
        raise r.fail("is in a format older than GGUF; convert the model again")
    if magic != MAGIC:
        raise r.fail("is no GGUF file (it does not start with GGUF)")
    version = int(r.scalar(UINT32, "the version"))
    if version in (1 << 24, 2 << 24, 3 << 24):
        raise r.fail("is a big-endian GGUF file; convert the model for little-endian machines")
    if version == 1:
        raise r.fail("is GGUF version 1; convert the model again")
    if version not in (2, 3):
        raise r.fail(f"is GGUF version {version}; versions 2 and 3 are known")


def _tensor_entry(r: _Reader, i: int) -> tuple[str, tuple[int, ...], int, int]:
    name = r.name(f"the name of tensor {i}")
    what = f"the entry of tensor {name!r:.80}"
    n_dims = int(r.scalar(UINT32, what))
    if not 1 <= n_dims <= MAX_DIMS:
        raise r.fail(f"tensor {name!r:.80} has {n_dims} dimensions")
    dims = tuple(int(r.scalar(UINT64, what)) for _ in range(n_dims))
    return name, dims[::-1], int(r.scalar(UINT32, what)), int(r.scalar(UINT64, what))


def _tensor_info(
    r: _Reader, name: str, shape: tuple[int, ...], type_id: int, offset: int, shard: int, start: int, align: int
) -> TensorInfo:
    kind = BY_ID.get(type_id)
    if kind is None:
        known = f"type {OTHER_TYPES[type_id]}" if type_id in OTHER_TYPES else f"unknown type {type_id}"
        raise r.fail(
            f"tensor {name!r:.80} has the {known}, which cannot be read; use another quantization of the model"
        )
    n = 1
    for d in shape:
        n *= d
    if n <= 0 or shape[-1] % kind.block:
        raise r.fail(
            f"tensor {name!r:.80} of shape {list(shape)} does not divide into {kind.name} blocks of {kind.block}"
        )
    n_bytes = n // kind.block * kind.block_bytes
    if offset % align:
        raise r.fail(f"tensor {name!r:.80} starts at {offset}, which is not aligned to {align}")
    if start + offset + n_bytes > r.size:
        raise r.fail(f"tensor {name!r:.80} ends at byte {start + offset + n_bytes} of {r.size}; the file is truncated")
    return TensorInfo(name, kind, shape, shard, start + offset, n_bytes)


def _check_overlap(r: _Reader, infos: list[TensorInfo]) -> None:
    last: TensorInfo | None = None
    for info in sorted(infos, key=lambda t: t.offset_bytes):
        if last and last.offset_bytes + last.n_bytes > info.offset_bytes:
            raise r.fail(f"tensors {last.name!r:.80} and {info.name!r:.80} overlap; the file is damaged")
        last = info
