"""GGUF headers: metadata and tensor directory of one file or a split set, bounds-checked, without reading weights.

Layout: the GGUF specification (ggml/docs/gguf.md), versions 2 and 3, little-endian. The header is read into memory in
one bounded read, never mapped, so a file that shrinks meanwhile cannot kill the process. No number from the file sizes
an allocation before it was checked against the file's length.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .quants import BY_ID, TensorType

T = TypeVar("T", int, float, bool, str)

MAGIC = b"GGUF"
FIRST_READ_BYTES = 16 << 20
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


class _NeedMore(Exception):
    """The header goes on beyond the bytes read so far."""


class _Reader:
    """A cursor over the first bytes of a file of `size` bytes."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self.path, self.data, self.size, self.pos = path, data, size, 0

    def fail(self, what: str) -> UserError:
        return UserError(f"{self.path}: {what}")

    def need(self, n: int, what: str) -> int:
        """The position of n bytes, after which the cursor moves."""
        start, self.pos = self.pos, self.pos + n
        if self.pos > len(self.data):
            if self.pos > self.size:
                raise self.fail(f"the file ends inside {what}; it is truncated or damaged")
            raise _NeedMore
        return start

    def scalar(self, kind: int, what: str) -> Any:
        fmt, n = SCALARS[kind]
        return struct.unpack_from(fmt, self.data, self.need(n, what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A uint64 count of things of at least so many bytes each, which must fit in the rest of the file."""
        n = int(self.scalar(UINT64, what))
        if n * least_bytes > self.size - self.pos:
            raise self.fail(f"{what} says {n}, more than the file can hold; it is truncated or damaged")
        return n

    def string(self, what: str) -> str:
        n = self.count(f"the length of {what}", 1)
        start = self.need(n, what)
        try:
            return self.data[start : start + n].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8; the file is damaged") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in SCALARS:
            return self.scalar(kind, what)
        if kind == STRING:
            n = self.count(f"the length of {what}", 1)
            start = self.need(n, what)
            return self.data[start : start + n].decode("utf-8", "replace")
        if kind != ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}; the file is damaged or of a newer version")
        return self.array(what)

    def array(self, what: str) -> Any:
        kind = int(self.scalar(UINT32, what))
        if kind in SCALARS:
            fmt, size = SCALARS[kind]
            n = self.count(f"the length of {what}", size)
            start = self.need(n * size, what)
            dtype = np.dtype(bool) if kind == BOOL else np.dtype(fmt)
            found: NDArray[Any] = np.frombuffer(self.data, dtype if kind != BOOL else np.uint8, n, start)
            return found.copy() if kind != BOOL else found != 0
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
        pos, data, size_of = self.pos, self.data, struct.Struct("<Q").unpack_from
        try:
            for _ in range(n):
                pos += 8 + size_of(data, pos)[0]
        except struct.error:
            pos += 8
        self.pos = pos
        self.need(0, what)


def open_gguf(path: str | Path) -> File:
    """Opens a model by its file or by any shard of a split set; raises UserError with one line on anything wrong."""
    path = Path(path)
    paths = _shard_paths(path)
    shards, tensors, metadata, first = [], {}, {}, None
    for i, p in enumerate(paths):
        meta, infos, shard = _read_shard(p, i)
        shards.append(shard)
        first = first or p
        if i == 0:
            metadata = meta
        n_split = meta.get("split.count", 1)
        if len(paths) > 1 and (n_split != len(paths) or meta.get("split.no") != i):
            raise UserError(
                f"{p}: says it is shard {meta.get('split.no')} of {n_split}, its name says {i} of {len(paths)}"
            )
        if len(paths) == 1 and n_split not in (0, 1):
            raise UserError(
                f"{p}: is one of {n_split} shards, but its name lacks the -00001-of-{n_split:05} that finds the others"
            )
        for info in infos:
            if info.name in tensors:
                raise UserError(f"{p}: tensor {info.name!r} is there twice")
            tensors[info.name] = info
    n_expected = metadata.get("split.tensors.count")
    if len(paths) > 1 and n_expected is not None and n_expected != len(tensors):
        raise UserError(f"{paths[0]}: the shards hold {len(tensors)} tensors, the first says {n_expected}")
    return File(path, tuple(shards), MappingProxyType(metadata), tensors)


def _shard_paths(path: Path) -> list[Path]:
    m = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", path.name)
    if not m or int(m[3]) < 2:
        return [path]
    n = int(m[3])
    if n > 10000 or not 1 <= int(m[2]) <= n:
        raise UserError(f"{path}: a shard number of {m[2]} of {m[3]} makes no sense")
    paths = [path.with_name(f"{m[1]}-{i:05}-of-{n:05}{m[4]}") for i in range(1, n + 1)]
    if missing := [p for p in paths if not p.exists()]:
        raise UserError(
            f"{path}: {len(missing)} of {n} shards are missing, first {missing[0].name}; put all in one folder"
        )
    return paths


def _read_shard(path: Path, index: int) -> tuple[dict[str, Any], list[TensorInfo], Shard]:
    try:
        size = path.stat().st_size
        n_read = min(size, FIRST_READ_BYTES)
        while True:
            with open(path, "rb") as f:
                data = f.read(n_read)
            try:
                meta, infos = _parse(_Reader(path, data, size if len(data) == n_read else len(data)), index)
                return meta, infos, Shard(path, size)
            except _NeedMore:
                n_read = min(size, 2 * n_read)
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give the .gguf file in it") from None
    except OSError as e:
        raise UserError(f"{path}: {e.strerror or e}") from None


def _parse(r: _Reader, shard: int) -> tuple[dict[str, Any], list[TensorInfo]]:
    _check_magic(r)
    n_tensors = r.count("the number of tensors", 24)
    n_keys = r.count("the number of metadata keys", 13)
    meta: dict[str, Any] = {}
    for i in range(n_keys):
        key = r.string(f"the name of metadata key {i}")
        if key in meta:
            raise r.fail(f"metadata key {key!r} is there twice")
        what = f"metadata key {key!r}"
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
    magic = r.data[:4]
    if r.data.startswith(b"version https://git-lfs"):
        raise r.fail("is a Git LFS pointer, not the model; run `git lfs pull`")
    if magic in (b"ggml", b"ggjt", b"lmgg", b"tjgg", b"fmgg"):
        raise r.fail("is in a format older than GGUF; convert the model again")
    if magic != MAGIC:
        raise r.fail("is no GGUF file (it does not start with GGUF)")
    r.need(4, "the header")
    version = int(r.scalar(UINT32, "the version"))
    if version & 0xFFFF == 0:
        raise r.fail("is a big-endian GGUF file; convert the model for little-endian machines")
    if version == 1:
        raise r.fail("is GGUF version 1; convert the model again")
    if version not in (2, 3):
        raise r.fail(f"is GGUF version {version}; versions 2 and 3 are known")


def _tensor_entry(r: _Reader, i: int) -> tuple[str, tuple[int, ...], int, int]:
    name = r.string(f"the name of tensor {i}")
    what = f"the entry of tensor {name!r}"
    n_dims = int(r.scalar(UINT32, what))
    if not 1 <= n_dims <= MAX_DIMS:
        raise r.fail(f"tensor {name!r} has {n_dims} dimensions")
    dims = tuple(int(r.scalar(UINT64, what)) for _ in range(n_dims))
    return name, dims[::-1], int(r.scalar(UINT32, what)), int(r.scalar(UINT64, what))


def _tensor_info(
    r: _Reader, name: str, shape: tuple[int, ...], type_id: int, offset: int, shard: int, start: int, align: int
) -> TensorInfo:
    kind = BY_ID.get(type_id)
    if kind is None:
        raise r.fail(f"tensor {name!r} has the unknown type {type_id}; a newer headrace may know it")
    n = 1
    for d in shape:
        n *= d
    if n <= 0 or shape[-1] % kind.block:
        raise r.fail(f"tensor {name!r} of shape {list(shape)} does not divide into {kind.name} blocks of {kind.block}")
    n_bytes = n // kind.block * kind.block_bytes
    if offset % align:
        raise r.fail(f"tensor {name!r} starts at {offset}, which is not aligned to {align}")
    if start + offset + n_bytes > r.size:
        raise r.fail(f"tensor {name!r} ends at byte {start + offset + n_bytes} of {r.size}; the file is truncated")
    return TensorInfo(name, kind, shape, shard, start + offset, n_bytes)


def _check_overlap(r: _Reader, infos: list[TensorInfo]) -> None:
    last: TensorInfo | None = None
    for info in sorted(infos, key=lambda t: t.offset_bytes):
        if last and last.offset_bytes + last.n_bytes > info.offset_bytes:
            raise r.fail(f"tensors {last.name!r} and {info.name!r} overlap; the file is damaged")
        last = info
