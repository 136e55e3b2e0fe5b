"""The host memory ladder of the CUDA device: how bytes of the mapped file get to the GPU.

Each piece of about 1 GiB stands on its own rung: *registered* (its pages are locked, copies go by DMA at the link's
speed) or *staged* (reader threads fill a small ring of locked buffers, the copy stream waits for each by number). Both
give the same bytes. Pieces beyond the budget, or that the driver refuses, are staged, with one warning of the cost.
"""

import bisect
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...hostmem import MappedRange
from . import driver
from .readers import Readers

log = logging.getLogger("headrace")

RING_BYTES = 16 << 20
N_RING = 24
DIRECT_ALIGN = 4096


@dataclass(frozen=True)
class Span:
    """Part of a copy that stands on one rung."""

    address: int
    n_bytes: int
    piece: MappedRange | None


def spans(address: int, n_bytes: int, pieces: list[MappedRange]) -> Iterator[Span]:
    """Cuts a copy at the borders of sorted, disjoint pieces, so that none crosses from one into another."""
    starts, end = [p.address for p in pieces], address + n_bytes
    while address < end:
        i = bisect.bisect_right(starts, address) - 1
        piece = pieces[i] if i >= 0 and address < pieces[i].address + pieces[i].n_bytes else None
        if piece:
            stop = piece.address + piece.n_bytes
        else:
            stop = starts[i + 1] if i + 1 < len(starts) else end
        stop = min(stop, end)
        yield Span(address, stop - address, piece)
        address = stop


class HostCopier:
    """Page-locks what it may of the given ranges and copies from any of them; `close` releases everything."""

    def __init__(self, ranges: list[MappedRange], budget_bytes: int, n_readers: int, direct: bool) -> None:
        self.pieces = sorted(ranges, key=lambda r: r.address)
        self.registered: set[int] = set()
        self.direct, self.n_readers, self.readers = direct, n_readers, None
        self.sequence, self.fds = 0, {}
        reason = "" if driver.can_register_read_only(0) else "the driver cannot lock read-only mappings"
        for piece in self.pieces:
            if reason or budget_bytes < piece.n_bytes:
                reason = reason or "--host-memory-limit or free memory leaves no more to lock"
                continue
            try:
                driver.register(piece.address, piece.n_bytes)
            except driver.DriverError as e:
                reason = str(e)
                continue
            self.registered.add(piece.address)
            budget_bytes -= piece.n_bytes
        total = sum(p.n_bytes for p in self.pieces)
        if reason and self.pieces:
            log.warning(
                "%.0f of %.0f MiB of experts are staged, not page-locked (%s): expect about 60 %% of the speed",
                (total - self.registered_bytes) / 2**20, total / 2**20, reason,
            )  # fmt: skip
        if self.registered:
            log.info("page-locked %.0f MiB of the mapped file", self.registered_bytes / 2**20)

    @property
    def registered_bytes(self) -> int:
        return sum(p.n_bytes for p in self.pieces if p.address in self.registered)

    def is_registered(self, address: int, n_bytes: int) -> bool:
        """Whether a kernel may read the range in place."""
        found = spans(address, n_bytes, self.pieces)
        return all(span.piece is not None and span.piece.address in self.registered for span in found)

    def copy(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        """Queues a copy to device address `dst`; returns at once."""
        for span in spans(src, n_bytes, self.pieces):
            at = dst + span.address - src
            if span.piece is None or span.piece.address in self.registered:
                driver.copy_to_device(at, span.address, span.n_bytes, stream)
            else:
                self._staged(at, span, span.piece, stream)

    def _staged(self, dst: int, span: Span, piece: MappedRange, stream: int) -> None:
        if self.readers is None:
            self._start_readers()
        file_offset = piece.offset_bytes + span.address - piece.address
        fd = self._fd(piece)
        skip = file_offset % DIRECT_ALIGN if self.direct else 0
        for start in range(0, span.n_bytes, RING_BYTES - DIRECT_ALIGN):
            n = min(RING_BYTES - DIRECT_ALIGN, span.n_bytes - start)
            buffer, self.sequence = self.sequence % N_RING, self.sequence + 1
            ring = self.ring.ctypes.data + buffer * RING_BYTES
            n_read = -(-(skip + n) // DIRECT_ALIGN) * DIRECT_ALIGN if self.direct else n
            self.readers.post(
                fd, file_offset + start - skip, n_read, ring, buffer, self.sequence, max(0, self.sequence - N_RING)
            )  # fmt: skip
            driver.wait_value(stream, self.flags + 4 * buffer, self.sequence)
            driver.copy_to_device(dst + start, ring + skip, n, stream)
            driver.write_value(stream, self.flags + 4 * (N_RING + buffer), self.sequence)

    def _fd(self, piece: MappedRange) -> int:
        if piece.path not in self.fds:
            self.fds[piece.path] = os.open(piece.path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        return self.fds[piece.path]

    def _start_readers(self) -> None:
        self.memory = np.zeros(N_RING * RING_BYTES + 2 * DIRECT_ALIGN, np.uint8)
        start = -self.memory.ctypes.data % DIRECT_ALIGN
        self.ring = self.memory[start : start + N_RING * RING_BYTES]
        self.numbers = np.zeros(2 * DIRECT_ALIGN // 4, np.uint32)
        start = -self.numbers.ctypes.data % DIRECT_ALIGN // 4
        self.marks = self.numbers[start : start + 2 * N_RING]
        driver.register_writable(self.ring.ctypes.data, self.ring.nbytes)
        driver.register_writable(self.marks.ctypes.data, DIRECT_ALIGN)
        self.flags = driver.device_pointer(self.marks.ctypes.data)
        self.readers = Readers(self.n_readers, N_RING, self.marks[:N_RING], self.marks[N_RING:])

    def close(self) -> None:
        """After the streams are idle: stops the readers, unlocks every page, closes the files."""
        if self.readers:
            self.readers.close()
            driver.unregister(self.ring.ctypes.data)
            driver.unregister(self.marks.ctypes.data)
            self.readers = None
        for address in self.registered:
            driver.unregister(address)
        self.registered.clear()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
