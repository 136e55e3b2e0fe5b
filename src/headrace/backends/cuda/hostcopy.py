"""The host memory ladder of a CUDA device: how bytes of the mapped file get to the GPU.

Each piece of about 1 GiB, cut between experts, stands on its own rung:

- *registered*: its pages are locked, copies go by DMA at the link's speed;
- *staged*: reader threads fill a small ring of locked buffers, the copy stream waits for each by number;
- *pageable*: where not even the ring can be locked, the driver copies through its own small buffer.

All give the same bytes. What is not registered is warned of once, with the reason, the cost and the remedy.
"""

import bisect
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from ... import hostmem
from ...errors import UserError
from ...hostmem import PAGE_BYTES, MappedRange
from .driver import Driver, DriverError
from .readers import Ring, lock, n_cores, release

log = logging.getLogger("headrace")

N_BUFFERS, MOST_READERS = 16, 12
BUFFER_BYTES = 4 << 20
"""64 MiB in all stay in the last-level cache (H200, 16 cores, 8 to 12 readers: 50 GB/s; 24 x 16 MiB: 33 to 37)."""
DIRECT_BUFFER_BYTES = 16 << 20
"""A disk wants longer reads (the same machine: 1.6 to 1.8 GB/s, as the disk alone; with 4 MiB 1.0 to 1.3)."""
DIRECT_ALIGN = 4096
"""Offset, length and address of a read with O_DIRECT are multiples of it."""


@dataclass(frozen=True)
class Span:
    """Part of a copy that lies in one piece, or in none."""

    address: int
    n_bytes: int
    piece: MappedRange | None


def spans(address: int, n_bytes: int, pieces: list[MappedRange]) -> Iterator[Span]:
    """Cuts a copy at the borders of sorted, disjoint pieces, so that none crosses from one into another."""
    end = address + n_bytes
    while address < end:
        i = bisect.bisect_right(pieces, address, key=lambda p: p.address) - 1
        piece = pieces[i] if i >= 0 and address < pieces[i].address + pieces[i].n_bytes else None
        if piece:
            stop = piece.address + piece.n_bytes
        else:
            stop = pieces[i + 1].address if i + 1 < len(pieces) else end
        stop = min(stop, end)
        yield Span(address, stop - address, piece)
        address = stop


@dataclass
class Held:
    """What must be given back in every exit path."""

    driver: Driver
    locked: list[int] = field(default_factory=list)
    """Start addresses of page ranges, rising."""
    rings: list[Ring] = field(default_factory=list)
    files: list[FileIO] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)

    def release(self) -> None:
        """Waits for the streams, unlocks every page, closes the files; may be called again after an interrupt."""
        if self.process != os.getpid():
            return
        self.close_rings()
        for address in self.locked:
            hostmem.locked.pop(address, None)
        release(self.driver, self.locked)
        while self.files:
            self.files.pop().close()

    def close_rings(self) -> None:
        while self.rings:
            self.rings[-1].close()
            self.rings.pop()


class HostCopier:
    """Copies from pieces of mapped files to device memory; locks what it may of them.

    `budget_bytes` is what may be locked, and the RAM that there is: where it does not hold all pieces, those that are
    not locked are read with O_DIRECT, unless `direct` says otherwise. Without `register` none of the pieces is locked.
    """

    def __init__(
        self, driver: Driver, pieces: list[MappedRange], budget_bytes: int, *, register: bool = True,
        direct: bool | None = None, n_readers: int = 0, n_buffers: int = N_BUFFERS, buffer_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.driver, self.pieces = driver, sorted(pieces, key=lambda p: p.address)
        self.registered: set[int] = set()
        """Addresses of the pieces whose pages are locked."""
        self.borders: list[int] = []
        """Start and stop of each locked range, rising."""
        self.held = Held(driver)
        self._finalizer = weakref.finalize(self, self.held.release)
        total = sum(p.n_bytes for p in pieces)
        if direct is None:
            direct = total > budget_bytes
        buffer_bytes = buffer_bytes or (DIRECT_BUFFER_BYTES if direct else BUFFER_BYTES)
        try:
            reason = self._register(budget_bytes - n_buffers * buffer_bytes * (total > budget_bytes), register)
            if len(self.registered) < len(pieces):
                self._stage(n_readers or max(1, min(MOST_READERS, n_cores() - 2)), n_buffers, buffer_bytes, direct)
                self._warn(reason)
        except BaseException:
            self.close()
            raise
        for path, counts in self.by_shard().items():
            log.info("%s: %s", path.name, ", ".join(f"{n / 2**20:.0f} MiB {rung}" for rung, n in counts.items()))

    # choosing rungs

    def _register(self, budget_bytes: int, wanted: bool) -> str:
        """Locks pieces in order while the budget lasts; the first reason why one was left out."""
        if not wanted:
            return "--register-host off, or no memory is left for it"
        if not self.driver.can_register_read_only():
            return "the driver cannot lock read-only mappings"
        reason, locked_to = "", 0
        for piece in self.pieces:
            if budget_bytes < piece.n_bytes:
                reason = reason or "free memory, or --host-memory-limit, allows no more"
                continue
            # a page that two pieces share belongs to the first that locks it
            start = max(locked_to, piece.address // PAGE_BYTES * PAGE_BYTES)
            stop = -(-(piece.address + piece.n_bytes) // PAGE_BYTES) * PAGE_BYTES
            if start < stop:
                try:
                    lock(self.driver.register, self.held.locked, start, stop - start)
                except DriverError as e:
                    reason = reason or str(e)
                    continue
                locked_to, hostmem.locked[start] = stop, stop - start
                self.borders += [start, stop]
            self.registered.add(piece.address)
            budget_bytes -= piece.n_bytes
        return reason

    def _stage(self, n_readers: int, n_buffers: int, buffer_bytes: int, direct: bool) -> None:
        self.no_ring = ""
        self.sources: dict[Path, tuple[int, int]] = {}
        """Where to read a shard's staged pieces: file descriptor, and the block that reads consist of."""
        try:
            self.held.rings.append(Ring(self.driver, n_buffers, buffer_bytes))
            self.held.rings[0].open(n_readers)
        except (DriverError, OSError, RuntimeError) as e:
            self.held.close_rings()
            self.no_ring = f"a ring of {n_buffers * buffer_bytes / 2**20:.0f} MiB: {e}"
            return
        for piece in self.pieces:
            if piece.address not in self.registered and piece.path not in self.sources:
                file = self._open_direct(piece, self.held.rings[0]) if direct else None
                self.sources[piece.path] = (file.fileno(), DIRECT_ALIGN) if file else (piece.file.fileno(), 1)

    def _open_direct(self, piece: MappedRange, ring: Ring) -> FileIO | None:
        """The piece's file with O_DIRECT, or None with a message where the file system has no such thing."""
        with suppress(OSError, AttributeError):
            file = FileIO(str(piece.path), opener=lambda path, flags: os.open(path, flags | os.O_DIRECT))
            self.held.files.append(file)
            same = os.path.samestat(os.fstat(file.fileno()), os.fstat(piece.file.fileno()))
            start = piece.offset_bytes // DIRECT_ALIGN * DIRECT_ALIGN
            if same and os.preadv(file.fileno(), [memoryview(ring.block)[:DIRECT_ALIGN]], start):
                return file
        log.warning("%s cannot be read with O_DIRECT: reading goes through the page cache", piece.path)
        return None

    def _warn(self, reason: str) -> None:
        n_bytes, total = self.bytes_by_rung(), sum(p.n_bytes for p in self.pieces)
        pageable, rest = n_bytes["pageable"], n_bytes["staged"] + n_bytes["pageable"]
        if pageable:
            log.warning(
                "%.0f of %.0f MiB of experts are copied from pageable memory, at about an eighth of the link's speed: "
                "%s; nor could it lock %s. Free host memory or raise the container's limit",
                rest / 2**20, total / 2**20, reason, self.no_ring,
            )  # fmt: skip
        else:
            direct = any(align > 1 for _, align in self.sources.values())
            log.warning(
                "%.0f of %.0f MiB of experts are not page-locked but staged (%s): expect %s for them",
                rest / 2**20, total / 2**20, reason, "the disk's speed" if direct else "less than the link's speed",
            )  # fmt: skip

    # asking

    def rung(self, piece: MappedRange) -> str:
        if piece.address in self.registered:
            return "registered"
        return "staged" if self.held.rings else "pageable"

    def by_shard(self) -> dict[Path, Counter[str]]:
        """Bytes on each rung, per shard."""
        counts: dict[Path, Counter[str]] = {}
        for piece in self.pieces:
            counts.setdefault(piece.path, Counter())[self.rung(piece)] += piece.n_bytes
        return counts

    def bytes_by_rung(self) -> Counter[str]:
        return sum(self.by_shard().values(), Counter())

    def is_registered(self, address: int, n_bytes: int) -> bool:
        """Whether a kernel may read the range in place."""
        found = spans(address, n_bytes, self.pieces)
        return all(span.piece is not None and span.piece.address in self.registered for span in found)

    def check(self) -> None:
        """UserError if a queued copy brought wrong bytes; to be asked once the copies are done. It stays so."""
        for ring in self.held.rings:
            if ring.broken:
                raise UserError("a copy to the GPU failed and could not be taken back; open the model again")
            if failure := ring.readers.failure:
                path = next(path for path, (fd, _) in self.sources.items() if fd == failure.fd)
                why = os.strerror(failure.errno) if failure.errno else "the file ended: it was cut while it was open"
                raise UserError(f"{path}: cannot read at byte {failure.offset_bytes}: {why}; open the model again")

    # copying

    def copy(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        """Queues a copy to device address `dst`; returns at once (but for pageable memory)."""
        self.check()
        with self.driver.here():
            for span in spans(src, n_bytes, self.pieces):
                try:
                    self._copy(dst + span.address - src, span, span.piece, stream)
                except DriverError as e:
                    where = span.piece.path if span.piece else "host memory"
                    raise UserError(f"{where}: a copy to the GPU failed: {e}") from None

    def _copy(self, dst: int, span: Span, piece: MappedRange | None, stream: int) -> None:
        if piece and self.rung(piece) == "staged":
            fd, align = self.sources[piece.path]
            offset = piece.offset_bytes + span.address - piece.address
            self.held.rings[0].copy(fd, offset, span.n_bytes, dst, stream, align)
        else:
            self._from_map(dst, span.address, span.n_bytes, stream)

    def _from_map(self, dst: int, address: int, n_bytes: int, stream: int) -> None:
        """A copy may cross neither from one locked range into the next nor into pages that are not locked."""
        at, end = address, address + n_bytes
        while at < end:
            i = bisect.bisect_right(self.borders, at)
            stop = min(end, self.borders[i]) if i < len(self.borders) else end
            copy = self.driver.copy_to_device if i % 2 else self.driver.copy_pageable
            copy(dst + at - address, at, stop - at, stream)
            at = stop

    def close(self) -> None:
        """Stops the readers, unlocks every page, closes the files; the streams should be idle."""
        self.held.release()
        self.registered.clear()
        self._finalizer.detach()
