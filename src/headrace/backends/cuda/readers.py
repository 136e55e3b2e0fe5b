"""Native reader threads: file pieces into a ring of page-locked buffers, ahead of the copy stream, without the GIL.

A job is one piece. A reader takes the next job, waits until the buffer's previous copy is done (`done[buffer]`, written
by the stream), reads, and publishes the job's number in `filled[buffer]`, for which the stream waits. So neither Python
nor the host waits on the path. Python threads doing the same fell from 16.9 to 0.8 GB/s beside a busy Python thread; a
native loop kept 17.7.

A number is always published, also for a piece that could not be read: the stream never hangs. The first failure is
kept and ends all reading; who queued the copies must ask for it (`failure`) once they are done, before what they
brought counts.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from .driver import Driver, DriverError

JOB = 8
"""int64 numbers a job: fd, offset, bytes to read, bytes that must come, address, buffer, number, awaited number."""
N_JOBS = 1 << 14
"""Jobs that may be queued; who posts more waits."""
POSTED, TAKEN, STOP, FAILING, SEMAPHORE, READY = 0, 8, 16, 24, 40, 48
FAILED, ERRNO, ERROR_FD, ERROR_OFFSET = 32, 33, 34, 35
"""Positions in the control block of int64."""
EINTR = 4

_libc: Any = ctypes.CDLL(None)


def _native(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_libc, name)
    function.restype, function.argtypes = result, arguments
    return function


_I64 = ctypes.c_int64
_pread = _native("pread", _I64, ctypes.c_int, _I64, _I64, _I64)
_memset = _native("memset", _I64, _I64, ctypes.c_int, _I64)
_usleep = _native("usleep", ctypes.c_int, ctypes.c_uint32)
_sem_init = _native("sem_init", ctypes.c_int, _I64, ctypes.c_int, ctypes.c_uint32)
_sem_wait = _native("sem_wait", ctypes.c_int, _I64)
_sem_post = _native("sem_post", ctypes.c_int, _I64)
_errno_address = _native("__errno_location", _I64)


@intrinsic
def _add(typing, address, value):  # type: ignore[no-untyped-def]
    """Adds to an int64, in one order for all threads; returns what was there."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        return b.atomic_rmw("add", b.inttoptr(args[0], ir.IntType(64).as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _load32(typing, address):  # type: ignore[no-untyped-def]
    """A uint32; what is read after it is not older."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        i32 = ir.IntType(32)
        return b.zext(b.load_atomic(b.inttoptr(args[0], i32.as_pointer()), "acquire", 4, typ=i32), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def _store32(typing, address, value):  # type: ignore[no-untyped-def]
    """Sets a uint32 behind everything that was written before."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        i32 = ir.IntType(32)
        b.store_atomic(b.trunc(args[1], i32), b.inttoptr(args[0], i32.as_pointer()), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit
def _post(control: int) -> None:
    """Makes the next job visible and wakes a reader."""
    _add(control + 8 * POSTED, 1)
    _sem_post(control + 8 * SEMAPHORE)


@njit(nogil=True)
def read_jobs(control: int, jobs: NDArray[np.int64], filled: int, done: int) -> None:
    """One reader's life: until `control[STOP]` is set."""
    _add(control + 8 * READY, 1)
    while True:
        while _sem_wait(control + 8 * SEMAPHORE) != 0:
            pass  # a signal
        if _add(control + 8 * STOP, 0):
            return
        job = _add(control + 8 * TAKEN, 1) % N_JOBS
        fd, offset, n, least = jobs[job, 0], jobs[job, 1], jobs[job, 2], jobs[job, 3]
        address, buffer, number, awaited = jobs[job, 4], jobs[job, 5], jobs[job, 6], jobs[job, 7]
        naps = 0
        while _load32(done + 4 * buffer) < awaited:
            if _add(control + 8 * STOP, 0):
                return
            naps += 1
            _usleep(min(20 + naps, 200))
        got = 0
        while got < least and not _add(control + 8 * FAILED, 0):
            k = _pread(fd, address + got, n - got, offset + got)
            if k > 0:
                got += k
                continue
            errno = _load32(_errno_address()) if k < 0 else 0
            if errno == EINTR:
                continue
            if _add(control + 8 * FAILING, 1) == 0:
                _add(control + 8 * ERRNO, errno)
                _add(control + 8 * ERROR_FD, fd)
                _add(control + 8 * ERROR_OFFSET, offset + got)
                _add(control + 8 * FAILED, 1)
            break
        if got < least:  # zeros are harmless weights, what the buffer held may be NaN in another type
            _memset(address + got, 0, n - got)
        _store32(filled + 4 * buffer, number)


@dataclass(frozen=True)
class ReadFailure:
    """`errno` is 0 where the file ended."""

    errno: int
    fd: int
    offset_bytes: int


class Readers:
    """Threads over the numbers `filled` and `done` (uint32 [n_buffers] each); `post` hands out work in order."""

    def __init__(self, filled: NDArray[np.uint32], done: NDArray[np.uint32]) -> None:
        self.control, self.jobs = np.zeros(64, np.int64), np.zeros((N_JOBS, JOB), np.int64)
        self.filled, self.done, self.threads = filled, done, list[threading.Thread]()
        self.address = self.control.ctypes.data
        _sem_init(self.address + 8 * SEMAPHORE, 0, 0)

    def start(self, n_threads: int) -> None:
        """To be closed also if this fails midway."""
        assert len(self.filled) + n_threads < N_JOBS // 2
        for _ in range(n_threads):
            self.threads.append(threading.Thread(target=self._read, daemon=True, name="headrace-reader"))
            self.threads[-1].start()
        # who queues copies may keep the GIL, which a thread needs until it is in native code
        while self.control[READY] < n_threads:
            time.sleep(0.0005)

    def _read(self) -> None:
        _post.compile((types.int64,))  # here no signal handler runs, and numba does not survive an interrupt
        read_jobs(self.address, self.jobs, self.filled.ctypes.data, self.done.ctypes.data)

    @property
    def n_posted(self) -> int:
        return int(self.control[POSTED])

    def post(self, fd: int, offset: int, n_bytes: int, n_least: int, address: int) -> int:
        """Queues a read of n_bytes, of which n_least must come, into the buffer at `address`, which is that of the next
        number. Returns the number."""
        n, n_buffers = self.n_posted, len(self.filled)
        # a slot is free once a reader has copied it: jobs further back than a ring and the readers are done
        while n - self.control[TAKEN] >= N_JOBS - n_buffers - len(self.threads):
            time.sleep(0.001)
        self.jobs[n % N_JOBS] = (fd, offset, n_bytes, n_least, address, n % n_buffers, n + 1, max(0, n + 1 - n_buffers))
        _post(self.address)
        return n + 1

    @property
    def failure(self) -> ReadFailure | None:
        if not self.control[FAILED]:
            return None
        return ReadFailure(*(int(self.control[i]) for i in (ERRNO, ERROR_FD, ERROR_OFFSET)))

    def close(self) -> None:
        """Stops the threads; whoever still waits for a number gets it."""
        self.control[STOP] = 1
        for _ in self.threads:
            _sem_post(self.address + 8 * SEMAPHORE)
        for t in self.threads:
            if t.ident:  # else it was not started, or an interrupt hid that it was, and it ends by itself
                t.join()
        self.filled[:] = self.n_posted


def portions(offset: int, n_bytes: int, buffer_bytes: int, align: int) -> Iterator[tuple[int, int, int]]:
    """Cuts a read into (start, skip, n): from the aligned `start`, `skip` bytes are not wanted and n are."""
    position, end = offset, offset + n_bytes
    while position < end:
        start = position // align * align
        stop = min(start + buffer_bytes, end)
        yield start, position - start, stop - position
        position = stop


class Ring:
    """Page-locked buffers that readers fill and a stream empties."""

    def __init__(self, driver: Driver, n_buffers: int, buffer_bytes: int) -> None:
        self.driver, self.n_buffers, self.buffer_bytes = driver, n_buffers, buffer_bytes
        self.block, self.page = mmap.mmap(-1, n_buffers * buffer_bytes), mmap.mmap(-1, mmap.PAGESIZE)
        self.address, numbers = np.frombuffer(self.block, np.uint8).ctypes.data, np.frombuffer(self.page, np.uint32)
        assert 2 * n_buffers <= len(numbers)
        self.readers = Readers(numbers[:n_buffers], numbers[n_buffers : 2 * n_buffers])
        self.locked: list[int] = []
        self.broken = False
        """A piece was queued in part."""

    def open(self, n_readers: int) -> None:
        """DriverError where it cannot be locked or streams know no numbers; to be closed also then."""
        page = self.readers.filled.ctypes.data
        lock(self.driver.register_writable, self.locked, self.address, len(self.block))
        lock(self.driver.register_writable, self.locked, page, len(self.page))
        self.numbers = self.driver.device_pointer(page)
        self.driver.check_stream_numbers(self.numbers)
        self.readers.start(n_readers)

    def copy(self, fd: int, offset: int, n_bytes: int, dst: int, stream: int, align: int) -> None:
        """Queues file bytes to device memory; with O_DIRECT, `align` is the block that reads must consist of."""
        for start, skip, n in portions(offset, n_bytes, self.buffer_bytes, align):
            n_before = self.readers.n_posted
            try:
                self.broken = True
                self._copy(fd, start, skip, n, dst + start + skip - offset, stream, align)
                self.broken = False
            except BaseException:
                self._mend(n_before, stream)
                raise

    def _copy(self, fd: int, start: int, skip: int, n: int, dst: int, stream: int, align: int) -> None:
        buffer = self.readers.n_posted % self.n_buffers
        address = self.address + buffer * self.buffer_bytes
        number = self.readers.post(fd, start, -(-(skip + n) // align) * align, skip + n, address)
        self.driver.wait_value(stream, self.numbers + 4 * buffer, number)
        self.driver.copy_to_device(dst, address + skip, n, stream)
        self.driver.write_value(stream, self.numbers + 4 * (self.n_buffers + buffer), number)

    def _mend(self, n_before: int, stream: int) -> None:
        """After a failure: gives back the buffer of a piece that was posted, for which the next reader would wait."""
        number = self.readers.n_posted
        if number > n_before:
            buffer = n_before % self.n_buffers
            self.driver.wait_value(stream, self.numbers + 4 * buffer, number)
            self.driver.write_value(stream, self.numbers + 4 * (self.n_buffers + buffer), number)
        self.broken = False

    def close(self) -> None:
        """Stops the readers, lets the streams run out, unlocks; may be called again after an interrupt."""
        self.readers.close()
        release(self.driver, self.locked)


def lock(register: Callable[[int, int], None], locked: list[int], address: int, n_bytes: int) -> None:
    """Locks a range, which `locked` holds from before: an interrupt may come right behind the driver's call."""
    locked.append(address)
    try:
        register(address, n_bytes)
    except DriverError:
        locked.pop()
        raise


def release(driver: Driver, locked: list[int]) -> None:
    """Unlocks addresses, of which one may not have come to be locked; the list is empty after it."""
    if locked:
        with suppress(DriverError):
            driver.finish()
    while locked:
        with suppress(DriverError):
            driver.unregister(locked[-1])
        locked.pop()


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
