"""The CPU device: numpy memory, a team of threads, and recordings that are replayed with one call."""

import logging
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache as once
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...gguf import TensorInfo
from ...hostmem import MappedRange, available_bytes
from ...spec import ModelSpec
from ..base import DeviceInfo, HostEvent
from . import cache, machine
from .ops import CpuOps
from .team import Program, Team
from .weights import REPACK_TYPES, CpuWeight, load_weight

log = logging.getLogger("headrace")
Array = NDArray[Any]
DTYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "u8": np.uint8}
N_PROGRAMS = 32
"""Recordings kept; the least recently used goes first."""


def aligned_zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeros at a 64-byte border; the system gives the pages when they are touched."""
    kind = np.dtype(DTYPES[dtype])
    n_bytes = math.prod(shape) * kind.itemsize
    block = np.zeros(n_bytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + n_bytes].view(kind).reshape(shape)


class CpuArena:
    """A bump allocator over one block; the same sequence of requests gets the same addresses."""

    ALIGN = 256

    def __init__(self, n_bytes: int) -> None:
        self.block, self.used = aligned_zeros((max(n_bytes, 1),), "u8"), 0

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        kind = np.dtype(DTYPES[dtype])
        n_bytes = math.prod(shape) * kind.itemsize
        start, self.used = self.used, self.used + -(-n_bytes // self.ALIGN) * self.ALIGN
        assert self.used <= len(self.block), "the plan's arena is too small for this step"
        return self.block[start : start + n_bytes].view(kind).reshape(shape)

    def reset(self) -> None:
        self.used = 0


class CpuQueue:
    """Everything is done when the call returns; after an interrupt, when `synchronize` does."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def copy(self, dst: Array, src: Array) -> None:
        if dst.dtype == src.dtype and dst.shape == src.shape:
            dst[...] = src
        else:
            dst.reshape(-1).view(np.uint8)[: src.nbytes] = src.reshape(-1).view(np.uint8)

    def record(self, event: HostEvent) -> None:
        event.record()

    def wait(self, event: HostEvent) -> None: ...

    def synchronize(self) -> None:
        self.team.finish()


class CpuDevice:
    """n_threads: see machine.threads."""

    act_dtype = "f32"

    def __init__(self, n_threads: int = 0) -> None:
        cache.on_compile(lambda name: _announce())
        self.team = Team(machine.threads(n_threads))
        self.info = DeviceInfo(
            f"{machine.cpu_name()}, {self.team.n_threads} threads", "cpu", machine.total_bytes(), available_bytes(),
            repack_types=REPACK_TYPES,
        )  # fmt: skip
        self.ops = self.decode_ops = CpuOps(self.team)
        self.compute = self.copy = CpuQueue(self.team)
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()

    @property
    def compile_s(self) -> float:
        return cache.spent_s()

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Array:
        return aligned_zeros(shape, dtype)

    alloc_host = alloc

    def scratch_bytes(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> int:
        return 0

    def reserve(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> None: ...

    def compiled_ahead(self, run: Any, progress: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def arena(self, n_bytes: int) -> CpuArena:
        return CpuArena(n_bytes)

    def event(self) -> HostEvent:
        return HostEvent()

    timer = event

    def between_s(self, start: HostEvent, stop: HostEvent) -> float:
        return stop.time_s - start.time_s

    def load(self, info: TensorInfo, raw: NDArray[np.uint8], layout: str = "in_place") -> CpuWeight:
        return load_weight(self.team, info, raw, layout)

    def view(self, info: TensorInfo, slot: Array) -> CpuWeight:
        return CpuWeight(info, slot)

    def computed_view(self, info: TensorInfo, raw: NDArray[np.uint8]) -> None: ...

    def gather_view(self, info: TensorInfo, slot: Array, raw: NDArray[np.uint8], lines: Any = None) -> None: ...

    def pin(self, ranges: list[MappedRange], budget_bytes: int, register: bool = True) -> None: ...

    def upload(self, dst: Array, src: Array, queue: Any = None) -> None:
        dst[...] = src

    def download(self, src: Array) -> Array:
        return src.copy()

    def check(self) -> None: ...

    def replay(self, key: Hashable) -> bool:
        program = self.programs.get(key)
        if program is None:
            return False
        self.programs.move_to_end(key)
        self.team.run(program)
        return True

    @contextmanager
    def record(self, key: Hashable) -> Iterator[None]:
        """Ops called inside are collected, and run as one program at the end."""
        with self.ops.collect() as calls:
            yield
        program = Program(calls.calls, calls.keep)
        self.team.run(program)
        self.programs[key] = program
        while len(self.programs) > N_PROGRAMS:
            self.programs.popitem(last=False)

    def close(self) -> None:
        self.programs.clear()
        self.team.close()


@once
def _announce() -> None:
    log.warning("compiling CPU kernels for this processor: once for each tensor type, up to half a minute")


def open_device(n_threads: int = 0, **_: Any) -> CpuDevice:
    return CpuDevice(n_threads)
