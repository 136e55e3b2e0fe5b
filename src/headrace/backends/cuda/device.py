"""The CUDA device: memory, streams, events and graphs from PyTorch; kernels from Triton.

Under TRITON_INTERPRET=1 the same code runs on the CPU with float16 activations, which is how CI tests it.
"""

import ctypes
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UserError
from ...gguf import TensorInfo
from ...hostmem import MappedRange
from ...spec import ModelSpec
from ..base import DeviceInfo, HostEvent, Lines
from .compiling import compile_ahead, compiling
from .decode_ops import DecodeOps
from .driver import cuda_driver
from .footprint import MEMORY, scratch_bytes, scratch_sizes
from .hostcopy import HostCopier
from .hostexperts import HostExperts, SplitOps
from .ops import CudaOps
from .tiles import Tiles

log = logging.getLogger("headrace")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "u8": torch.uint8}
N_GRAPHS = 256
"""Recordings kept; the least recently used goes first."""
SLOT_PADDING_BYTES = 512
"""Zeroed bytes behind every weight, so that a kernel may fetch a whole vector at its end."""


class HostBytes:
    """Pinned host memory as a kernel argument: the device reads it at the host's address."""

    dtype = torch.uint8

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@dataclass(frozen=True)
class CudaWeight:
    """GGUF bytes in device memory, uint8 [n_bytes]."""

    info: TensorInfo
    data: torch.Tensor
    host: "HostBytes | None" = None
    """Set where the experts are in pinned host memory and `data` is the slot they are fetched into."""
    lines: Lines | None = None
    """What the expert cache keeps of it."""

    def floats(self) -> torch.Tensor:
        """The bytes of an F32 tensor as float32."""
        assert self.info.type.name == "F32", f"{self.info.name} is {self.info.type.name}, not F32"
        return self.data[: self.info.n_bytes].view(torch.float32)


class CudaArena:
    """A bump allocator over one block; `take` gives the same addresses for the same sequence of requests."""

    ALIGN = 256

    def __init__(self, block: torch.Tensor) -> None:
        self.block, self.used = block, 0

    def take(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        n_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        start, self.used = self.used, self.used + -(-n_bytes // self.ALIGN) * self.ALIGN
        assert self.used <= len(self.block), "the plan's arena is too small for this step"
        return self.block[start : start + n_bytes].view(DTYPES[dtype]).view(shape)

    def reset(self) -> None:
        self.used = 0


class CudaQueue:
    """A stream. On the interpreter everything happens at once, in order."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.host: HostCopier | None = None

    def here(self) -> Any:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def copy(self, dst: torch.Tensor, src: Any) -> None:
        if self.host and isinstance(src, np.ndarray):
            self.host.copy(dst.data_ptr(), src.ctypes.data, src.nbytes, self.stream.cuda_stream)
            return
        source = src if isinstance(src, torch.Tensor) else torch.from_numpy(_writable(src))
        with self.here():
            dst.copy_(source, non_blocking=True)

    def record(self, event: Any) -> None:
        if event:
            event.record(self.stream)

    def wait(self, event: Any) -> None:
        if event:
            self.stream.wait_event(event)

    def synchronize(self) -> None:
        if self.stream:
            self.stream.synchronize()


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The same bytes as an array that claims to be writable: PyTorch warns of any other, even as a source."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memory, np.uint8).view(array.dtype).reshape(array.shape)


class CudaDevice:
    def __init__(self, index: int = 0, interpret: bool = False) -> None:
        self.where = torch.device("cpu") if interpret else torch.device("cuda", index)
        if interpret:
            name, total, free, capability = "Triton interpreter", 0, 0, (8, 0)
            self.compute = self.copy = CudaQueue(None)
        else:
            torch.cuda.set_device(self.where)
            name = torch.cuda.get_device_name(self.where)
            capability = torch.cuda.get_device_capability(self.where)
            free, total = torch.cuda.mem_get_info(self.where)
            self.compute, self.copy = CudaQueue(torch.cuda.Stream(self.where)), CudaQueue(torch.cuda.Stream(self.where))
        if capability < (7, 5):
            raise UserError(
                f"{name}: compute capability {capability[0]}.{capability[1]} is below 7.5; use --backend cpu"
            )
        self.act_dtype = "bf16" if capability >= (8, 0) and not interpret else "f16"
        self.info = DeviceInfo(name, "gpu", total, free, copies_async=not interpret, **({} if interpret else MEMORY))
        self.ops = CudaOps(self.where, DTYPES[self.act_dtype], Tiles.of(capability))
        self.decode_ops = DecodeOps(self.ops)
        self.graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self.host_experts: HostExperts | None = None
        self.n_requests: dict[Hashable, int] = {}
        """Of a recording, to the CPU."""

    @property
    def compile_s(self) -> float:
        return compiling.spent_s

    def alloc(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        try:
            with self.compute.here():
                return torch.zeros(shape, dtype=DTYPES[dtype], device=self.where)
        except torch.OutOfMemoryError:
            n_mib = math.prod(shape) * DTYPES[dtype].itemsize / 2**20
            raise MemoryError(f"{self.info.name}: {n_mib:.0f} MiB could not be allocated") from None

    def alloc_host(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=DTYPES[dtype], pin_memory=self.compute.stream is not None)

    def scratch_bytes(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> int:
        return scratch_bytes(spec, n_tokens, n_seq, self.ops.tiles)

    def reserve(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> None:
        """Without it every longer batch would leave the scratch of the ones before to their recordings."""
        try:
            for name, (n, dtype) in scratch_sizes(spec, n_tokens, n_seq).items():
                self.ops.scratch(name, n, self.ops.act_dtype if dtype == "act" else DTYPES[dtype])
        except torch.OutOfMemoryError:
            raise MemoryError(f"{self.info.name}: no memory for the ops' scratch") from None

    def compiled_ahead(self, run: Callable[[Any], None], progress: Any = None) -> AbstractContextManager[None]:
        from .rehearsal import Rehearsal

        return compile_ahead(lambda: run(Rehearsal(self)), progress) if self.compute.stream else nullcontext()

    def arena(self, n_bytes: int) -> CudaArena:
        return CudaArena(self.alloc((max(n_bytes, CudaArena.ALIGN),), "u8"))

    def event(self) -> Any:
        return torch.cuda.Event() if self.compute.stream else None

    def timer(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.compute.stream else HostEvent()

    def between_s(self, start: Any, stop: Any) -> float:
        if not self.compute.stream:
            return stop.time_s - start.time_s
        start.synchronize()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def load(self, info: TensorInfo, raw: NDArray[np.uint8], layout: str = "in_place") -> CudaWeight:
        assert layout == "in_place", "a GPU reads GGUF's own layout"
        data = self.alloc((info.n_bytes + SLOT_PADDING_BYTES,), "u8")
        self.compute.copy(data[: info.n_bytes], raw)
        return CudaWeight(info, data)

    def view(self, info: TensorInfo, slot: torch.Tensor) -> CudaWeight:
        return CudaWeight(info, slot)

    def gather_view(
        self, info: TensorInfo, slot: torch.Tensor, raw: NDArray[np.uint8], lines: Lines | None = None
    ) -> CudaWeight | None:  # fmt: skip
        copier = self.copy.host
        expert_bytes = info.n_bytes // info.shape[0]
        if copier and (expert_bytes % 8 or not copier.is_registered(raw.ctypes.data, raw.nbytes)):
            return None
        if not copier and self.compute.stream:
            return None
        return CudaWeight(info, slot, HostBytes(raw) if copier else torch.from_numpy(_writable(raw)), lines)

    def pin(self, ranges: list[MappedRange], budget_bytes: int, register: bool = True) -> None:
        """Page-locks mapped ranges within a budget, so that the copy queue reads them by DMA; the rest is staged."""
        if self.copy.stream:
            self.copy.host = HostCopier(cuda_driver(self.where.index), ranges, budget_bytes, register=register)

    def computed_view(self, info: TensorInfo, raw: NDArray[np.uint8]) -> CudaWeight | None:
        if not self.host_experts or self.host_experts.first_rank:
            return None
        return CudaWeight(info, torch.empty(0), HostBytes(raw))

    def split_experts(self, first_rank: int, n_threads: int) -> None:
        """From now on the CPU computes the routed experts of the decode phase from a rank on (see hostexperts.py)."""
        self.host_experts = HostExperts(self.where, first_rank, n_threads)
        self.decode_ops = SplitOps(self.ops, self.host_experts)

    def upload(self, dst: torch.Tensor, src: NDArray[Any], queue: CudaQueue | None = None) -> None:
        source = torch.from_numpy(np.ascontiguousarray(src))
        with (queue or self.compute).here():
            dst.copy_(source.pin_memory() if self.compute.stream else source, non_blocking=True)

    def download(self, src: torch.Tensor) -> NDArray[Any]:
        if not src.is_cuda:  # no copy will wait
            self.compute.synchronize()
        with self.compute.here():
            return src.cpu().numpy()

    def check(self) -> None:
        if self.host_experts:
            self.host_experts.check()
        if self.copy.host:
            self.copy.host.check()

    def replay(self, key: Hashable) -> bool:
        graph = self.graphs.get(key)
        if graph is None:
            return False
        self.graphs.move_to_end(key)
        with self._settled(), self.compute.here():
            if self.host_experts:
                self.host_experts.expect(self.n_requests[key])
            graph.replay()
        return True

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """The CPU waits no longer for requests that an exception inside kept from being sent."""
        try:
            yield
        except BaseException:
            if self.host_experts:
                self.compute.synchronize()
                self.host_experts.settle()
            raise

    @contextmanager
    def record(self, key: Hashable) -> Iterator[None]:
        """The first run of a shape only runs (kernels compile, scratch grows); the second is captured as a graph."""
        try:
            with self._settled(), self._recorded(key):
                yield
        except torch.OutOfMemoryError:
            raise MemoryError(f"{self.info.name}: no memory for the workspace of this batch") from None

    @contextmanager
    def _recorded(self, key: Hashable) -> Iterator[None]:
        if not self.compute.stream or key not in self.graphs:
            with self.compute.here():
                self.ops.decoded.start()
                yield
            if self.compute.stream:
                self.graphs[key] = None
                while len(self.graphs) > N_GRAPHS:
                    self.graphs.popitem(last=False)
            return
        graph = torch.cuda.CUDAGraph()
        n_before = self.host_experts.n_captured if self.host_experts else 0
        with torch.cuda.graph(graph, stream=self.compute.stream, capture_error_mode="thread_local"):
            self.ops.decoded.start()
            yield
        self.graphs[key] = graph
        self.n_requests[key] = (self.host_experts.n_captured if self.host_experts else 0) - n_before
        self.replay(key)

    def close(self) -> None:
        try:
            self.compute.synchronize()
            self.copy.synchronize()
            self.graphs.clear()
        finally:
            if self.host_experts:
                self.host_experts.close()
                self.host_experts = None
            if self.copy.host:
                self.copy.host.close()
                self.copy.host = None
