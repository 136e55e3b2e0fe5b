"""A CUDA driver without CUDA: device memory is host memory, each stream a thread that runs its queue in order.

It is as strict as the real one: a range is locked once, a copy lies in one locked range or in none, only what is locked
is unlocked. It can be told to refuse, fail and dawdle.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.backends.cuda.driver import Driver, DriverError

PAGE = 4096


class FakeStream:
    def __init__(self) -> None:
        self.todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.n_given = self.n_done = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while work := self.todo.get():
            work()
            self.n_done += 1

    def give(self, work: Callable[[], None]) -> None:
        self.n_given += 1
        self.todo.put(work)

    def synchronize(self) -> None:
        deadline = time.monotonic() + 20
        while self.n_done < self.n_given:
            assert time.monotonic() < deadline, "a stream hangs"
            time.sleep(0.0005)


class FakeDriver:
    """`refuse(n)` says whether the n-th registration is refused (writable ones: -1); `fail_at` names the n-th copy that
    fails; `before_copy` runs in the stream."""

    def __init__(
        self, refuse: Callable[[int], bool] = lambda n: False, read_only: bool = True, fail_at: int = -1,
        before_copy: Callable[[], None] = lambda: None, stream_numbers: bool = True,
    ) -> None:  # fmt: skip
        self.refuse, self.read_only, self.fail_at, self.before_copy = refuse, read_only, fail_at, before_copy
        self.stream_numbers = stream_numbers
        self.locked: dict[int, int] = {}
        self.peak_locked_bytes = self.n_registered = self.n_copies = 0
        self.n_bad_unlocks = self.n_here = 0
        self.streams: dict[int, FakeStream] = {}
        self.memory: list[Any] = []
        """What copies may still write to when whoever queued them has failed."""

    def stream(self, number: int) -> FakeStream:
        if number not in self.streams:
            self.streams[number] = FakeStream()
        return self.streams[number]

    def can_register_read_only(self) -> bool:
        return self.read_only

    def register(self, address: int, n_bytes: int) -> None:
        self.n_registered += 1
        self._lock(address, n_bytes, self.n_registered - 1)

    def register_writable(self, address: int, n_bytes: int) -> None:
        self._lock(address, n_bytes, -1)

    def _lock(self, address: int, n_bytes: int, n: int) -> None:
        assert address % PAGE == n_bytes % PAGE == 0 and n_bytes > 0
        if self.refuse(n):
            raise DriverError("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2)")
        assert all(address + n_bytes <= a or a + size <= address for a, size in self.locked.items()), "locked twice"
        self.locked[address] = n_bytes
        self.peak_locked_bytes = max(self.peak_locked_bytes, sum(self.locked.values()))

    def unregister(self, address: int) -> None:
        if address not in self.locked:
            self.n_bad_unlocks += 1
            raise DriverError("cuMemHostUnregister: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED (713)")
        del self.locked[address]

    def device_pointer(self, address: int) -> int:
        assert address in self.locked
        return address

    def copy_to_device(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        self.n_copies += 1
        if self.n_copies - 1 == self.fail_at:
            raise DriverError("cuMemcpyHtoDAsync: CUDA_ERROR_LAUNCH_FAILED (719)")
        touched = [(a, n) for a, n in self.locked.items() if a < src + n_bytes and src < a + n]
        if touched and not (len(touched) == 1 and touched[0][0] <= src and src + n_bytes <= sum(touched[0])):
            raise DriverError("cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE (1)")

        def work() -> None:
            self.before_copy()
            ctypes.memmove(dst, src, n_bytes)

        self.stream(stream).give(work)

    copy_pageable = copy_to_device

    @contextmanager
    def here(self) -> Iterator[None]:
        self.n_here += 1
        try:
            yield
        finally:
            self.n_here -= 1

    def wait_value(self, stream: int, address: int, value: int) -> None:
        number = ctypes.c_uint32.from_address(address)

        def work() -> None:
            deadline = time.monotonic() + 20
            while number.value < value:
                assert time.monotonic() < deadline, "a stream waits for a number that nobody writes"
                time.sleep(0.0002)

        self.stream(stream).give(work)

    def write_value(self, stream: int, address: int, value: int) -> None:
        def work() -> None:
            ctypes.c_uint32.from_address(address).value = value

        self.stream(stream).give(work)

    def check_stream_numbers(self, address: int) -> None:
        if not self.stream_numbers:
            raise DriverError("cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED (801)")
        assert ctypes.c_uint32.from_address(address).value == 0

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Ends the threads, after all that was queued."""
        for stream in self.streams.values():
            stream.todo.put(None)
            stream.thread.join()
        self.streams.clear()
        self.memory.clear()

    def __enter__(self) -> "FakeDriver":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class Interrupted(FakeDriver):
    """Ctrl-C right before or behind the n-th driver call."""

    def __init__(self, at: int, behind: bool) -> None:
        super().__init__()
        self.at, self.behind, self.calls = at, behind, 0

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in vars(Driver) or name.startswith("_") or name == "here":
            return value

        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.at and not self.behind:
                raise KeyboardInterrupt
            found = value(*args)
            if self.calls == self.at and self.behind:
                raise KeyboardInterrupt
            return found

        return call
