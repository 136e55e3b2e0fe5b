"""The file's bytes in host memory: shards are mapped read-only, never copied.

A device gets weights as uint8 views of the map. Ranges that nobody needs any more in the page cache (they were
uploaded or repacked) are given back with `drop`.
"""

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .gguf import File, TensorInfo

PAGE_BYTES = mmap.PAGESIZE
RESERVE_BYTES = 1 << 30


def available_bytes() -> int:
    """RAM that this process may still use: the system's available memory, or less if its cgroup says so."""
    found = []
    with suppress(OSError, ValueError):
        meminfo = Path("/proc/meminfo").read_text()
        found.append(int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{n}").read_text()) for n in ("max", "current"))
        found.append(max(0, limit - used))
    return min(found) if found else os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def lockable_bytes() -> int:
    """What may be page-locked: the available RAM less a reserve of a tenth, at least 1 GiB, for everything else."""
    available = available_bytes()
    return max(0, available - max(RESERVE_BYTES, available // 10))


@dataclass(frozen=True)
class MappedRange:
    """A page-aligned range of a mapped shard: what a device may page-lock, or read with pread at `offset_bytes`."""

    path: Path
    offset_bytes: int
    address: int
    n_bytes: int


def merge_pages(spans: Iterable[tuple[int, int]], page_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges widened to whole pages, sorted, and merged where they touch or overlap."""
    out: list[tuple[int, int]] = []
    for a, b in sorted((a // page_bytes * page_bytes, -(-b // page_bytes) * page_bytes) for a, b in spans):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return out


class HostMemory:
    """Read-only maps of a File's shards; views stay valid until `close` and the last view are gone."""

    def __init__(self, file: File) -> None:
        self.file = file
        self._maps: list[mmap.mmap] = []
        for shard in file.shards:
            try:
                with open(shard.path, "rb") as f:
                    if os.fstat(f.fileno()).st_size != shard.size_bytes:
                        raise UserError(f"{shard.path}: the file changed while it was being opened; try again")
                    self._maps.append(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            except OSError as e:
                raise UserError(f"{shard.path}: cannot map the file: {e.strerror}") from None

    def bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [n_bytes], read-only."""
        return np.frombuffer(self._maps[info.shard], np.uint8, info.n_bytes, info.offset_bytes)

    def ranges(self, infos: Iterable[TensorInfo], piece_bytes: int = 1 << 30) -> list[MappedRange]:
        """The pages that hold the given tensors, merged where they touch, in pieces of at most piece_bytes."""
        out = []
        for shard, path in enumerate(s.path for s in self.file.shards):
            spans = [(t.offset_bytes, t.offset_bytes + t.n_bytes) for t in infos if t.shard == shard]
            if not spans:
                continue
            base = np.frombuffer(self._maps[shard], np.uint8, 1).ctypes.data
            for start, stop in merge_pages(spans, PAGE_BYTES):
                stop = min(stop, -(-self.file.shards[shard].size_bytes // PAGE_BYTES) * PAGE_BYTES)
                for a in range(start, stop, piece_bytes):
                    out.append(MappedRange(path, a, base + a, min(piece_bytes, stop - a)))
        return out

    def drop(self, info: TensorInfo) -> None:
        """Gives the whole pages of a tensor back to the system; reading them again reads the file again."""
        start = -(-info.offset_bytes // PAGE_BYTES) * PAGE_BYTES
        n_bytes = (info.offset_bytes + info.n_bytes) // PAGE_BYTES * PAGE_BYTES - start
        if n_bytes <= 0:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            self._maps[info.shard].madvise(mmap.MADV_DONTNEED, start, n_bytes)
        if hasattr(os, "posix_fadvise"):
            with open(self.file.shards[info.shard].path, "rb") as f:
                os.posix_fadvise(f.fileno(), start, n_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Forgets the maps; each is unmapped when its last view dies."""
        self._maps.clear()
