"""The file's bytes in host memory: shards are mapped read-only, never copied.

A device gets weights as uint8 views of the map. Ranges that nobody needs any more in the page cache (they were
uploaded or repacked) are given back with `drop`.
"""

import io
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .gguf import File, TensorInfo

PAGE_BYTES = mmap.PAGESIZE
RESERVE_BYTES = 1 << 30


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """RAM that this process may still use: the system's available memory, or less if a cgroup around it says so."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        meminfo = (proc / "meminfo").read_text()
        found.append(int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024)
    for folder in memory_groups(proc, cgroups):
        with suppress(OSError, ValueError):
            found.append(_group_bytes(folder))
    return min(found) if found else os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def memory_groups(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Folders of the memory cgroups that hold this process, innermost first. A container may see its own group at the
    root, under another name than `proc` gives: folders that do not exist are harmless."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):  # version 2 names none
                base = cgroups / "memory" if controllers else cgroups
                inner = base / path.lstrip("/")
                yield from (inner, *(parent for parent in inner.parents if parent.is_relative_to(base)))


def _group_bytes(folder: Path) -> int:
    """What a cgroup (either version) leaves: its limit less what is used, where cached files count as free."""
    v2 = (folder / "memory.max").exists()
    limit, used = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = sum(int(stat.get(f"{'' if v2 else 'total_'}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(0, int((folder / limit).read_text()) - max(0, int((folder / used).read_text()) - cached))


locked: Counter[int] = Counter()
"""Bytes of mapped files that this process holds page-locked, by address: the system still counts them as available."""


def lockable_bytes() -> int:
    """What may be page-locked: the available RAM less a reserve of a tenth, at least 1 GiB, for everything else."""
    available = available_bytes()
    return max(0, available - max(RESERVE_BYTES, available // 10) - locked.total())


@dataclass(frozen=True)
class MappedRange:
    """Part of a mapped shard: a device may page-lock all pages it touches, or read it from `file` at `offset_bytes`."""

    path: Path
    file: io.FileIO
    offset_bytes: int
    address: int
    n_bytes: int


class HostMemory:
    """Read-only maps of a File's shards; views stay valid until `close` and the last view are gone."""

    def __init__(self, file: File) -> None:
        self.file = file
        self._maps: list[mmap.mmap] = []
        self._files: list[io.FileIO] = []
        for shard in file.shards:
            try:
                f = open(shard.path, "rb", buffering=0)  # noqa: SIM115
                self._files.append(f)
                if os.fstat(f.fileno()).st_size != shard.size_bytes:
                    raise UserError(f"{shard.path}: the file changed while it was being opened; try again")
                self._maps.append(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            except OSError as e:
                raise UserError(f"{shard.path}: cannot map the file: {e.strerror}") from None
        self._written_ns = [os.fstat(f.fileno()).st_mtime_ns for f in self._files]

    def check(self) -> None:
        """UserError if a shard was cut or written to since it was mapped: pages that are gone kill who reads them.

        2 us a shard. Between a check and the end of the reads behind it, a cut file can still end the process (SIGBUS).
        """
        for shard, f, written_ns in zip(self.file.shards, self._files, self._written_ns):
            now = os.fstat(f.fileno())
            if now.st_size != shard.size_bytes:
                what = f"has {now.st_size} bytes, not {shard.size_bytes}: it was cut or replaced"
            elif now.st_mtime_ns != written_ns:
                what = "was written to"
            else:
                continue
            raise UserError(f"{shard.path} {what} while it was open; restore it and open it again")

    def bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [n_bytes], read-only."""
        return np.frombuffer(self._maps[info.shard], np.uint8, info.n_bytes, info.offset_bytes)

    def ranges(self, infos: Iterable[TensorInfo], piece_bytes: int = 1 << 30) -> list[MappedRange]:
        """The given tensors in pieces of at most piece_bytes (more for a larger expert), cut between experts, or rows.

        Sorted, disjoint; what lies between tensors (under a page) goes with them.
        """
        pieces: list[tuple[int, int, int]] = []
        for t in sorted(infos, key=lambda t: (t.shard, t.offset_bytes)):
            at, end, unit = t.offset_bytes, t.offset_bytes + t.n_bytes, t.n_bytes // (t.shape[0] if t.shape[1:] else 1)
            while at < end:
                shard, start, stop = pieces[-1] if pieces else (-1, 0, 0)
                room = (start + piece_bytes - at) // unit * unit
                if shard != t.shard or at - stop >= PAGE_BYTES or room <= 0:
                    start, room = at, max(unit, piece_bytes // unit * unit)
                    pieces.append((t.shard, start, start))
                at = min(at + room, end)
                pieces[-1] = (t.shard, start, at)
        base = [np.frombuffer(m, np.uint8, 1).ctypes.data for m in self._maps]
        return [
            MappedRange(self.file.shards[shard].path, self._files[shard], start, base[shard] + start, stop - start)
            for shard, start, stop in pieces
        ]

    def drop(self, info: TensorInfo) -> None:
        """Gives the whole pages of a tensor back to the system; reading them again reads the file again."""
        start = -(-info.offset_bytes // PAGE_BYTES) * PAGE_BYTES
        n_bytes = (info.offset_bytes + info.n_bytes) // PAGE_BYTES * PAGE_BYTES - start
        if n_bytes <= 0:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            self._maps[info.shard].madvise(mmap.MADV_DONTNEED, start, n_bytes)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._files[info.shard].fileno(), start, n_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Forgets the maps, each is unmapped when its last view dies; closes the files."""
        self._maps.clear()
        for f in self._files:
            f.close()
