"""A device that computes nothing and remembers everything: it proves the streaming contract without a GPU.

Every copy and op is an Order with the byte ranges that it reads and writes, on one of two queues with events between
them. Two things come out of the list: `hazards`, by happens-before alone (an order is ordered after another only
through its queue or through an event that was recorded behind the one and waited for in front of the other), and a
virtual clock, on which copies take bytes / link and ops take FLOPs / rate.

Memory that starts undefined is watched too: a slot must hold the tensor that is read from it, and a temporary must
have been written since it was taken and be read before its step ends.
"""

import math
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gguf import TensorInfo
from ..hostmem import MappedRange
from ..spec import ModelSpec
from .base import DTYPE_BYTES, DeviceInfo, KVLayer, RecurrentLayer, Routing, StepState
from .hazards import Order, Range, covered, races, wrong_slots

WRITTEN = {
    "embed": (0,), "rms_norm": (0,), "l2_norm": (0,), "linear": (0,), "add": (0,), "add_bias": (0,), "glu": (0,),
    "sigmoid_mul": (0,), "rope": (0,), "kv_store": (0,), "attention": (0,), "route": (0,), "expert_glu": (0,),
    "expert_down": (0,), "combine": (0,), "conv1d": (0, 3), "delta_net": (0, 8), "gather_rows": (0,),
    "top_k": (0, 1),
}  # fmt: skip
"""Which arguments of an op are written; all others are read."""
UPDATED = {
    "add": (0,), "add_bias": (0,), "sigmoid_mul": (0,), "rope": (0,), "combine": (0,), "conv1d": (3,), "delta_net": (8,)
}  # fmt: skip
"""Which of the written are read too."""


@dataclass(frozen=True)
class NullTensor:
    """A shape at a place: strides in bytes, `first` the byte of the first element."""

    buffer: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def reshape(self, *shape: int) -> "NullTensor":
        assert self.contiguous and math.prod(shape) == math.prod(self.shape), f"{self.shape} is no view of {shape}"
        return NullTensor(self.buffer, self.first, shape, _packed(shape, self.itemsize), self.itemsize)

    @property
    def contiguous(self) -> bool:
        return self.strides == _packed(self.shape, self.itemsize)

    def __getitem__(self, index: Any, /) -> "NullTensor":
        index = index if isinstance(index, tuple) else (index,)
        first, shape, strides = self.first, [], []
        for axis, (n, stride) in enumerate(zip(self.shape, self.strides)):
            i = index[axis] if axis < len(index) else slice(None)
            if isinstance(i, slice):
                r = range(*i.indices(n))
                assert r.step == 1
                first, shape, strides = first + r.start * stride, [*shape, len(r)], [*strides, stride]
            else:
                assert -n <= i < n
                first += (i % n) * stride
        return NullTensor(self.buffer, first, tuple(shape), tuple(strides), self.itemsize)

    @property
    def span(self) -> Range:
        """The bytes from the first element to the last, gaps included."""
        if 0 in self.shape:
            return self.buffer, self.first, self.first
        last = self.first + sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        return self.buffer, self.first, last + self.itemsize


def _packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class NullWeight:
    """A weight's bytes on the device; with `gathered`, ops bring the experts that they need there themselves."""

    info: TensorInfo
    data: NullTensor
    gathered: bool = False


@dataclass
class NullEvent:
    """The moment behind what its queue had been given when it was recorded."""

    clock: dict[str, int] = field(default_factory=dict)
    time_s: float = 0.0


class NullQueue:
    def __init__(self, device: "NullDevice", name: str) -> None:
        self.device, self.name = device, name
        self.clock: dict[str, int] = {}
        self.time_s = 0.0

    def give(
        self, name: str, reads: tuple[Range, ...], writes: tuple[Range, ...], seconds: float,
        weights: tuple[tuple[str, Range], ...] = (), source: str = "",
    ) -> None:  # fmt: skip
        at = self.clock.get(self.name, 0)
        self.device.orders.append(
            Order(self.name, name, reads, writes, seconds, dict(self.clock), self.time_s, at, weights, source)
        )
        self.clock[self.name] = at + 1
        self.time_s += seconds

    def copy(self, dst: NullTensor, src: Any) -> None:
        on_device = isinstance(src, NullTensor)
        n_bytes = math.prod(dst.shape) * dst.itemsize
        rate = self.device.memory_gbps if on_device else self.device.info.link_gbps
        reads = (src.span,) if on_device else ()
        self.device.check_memory("copy", reads, (dst.span,))
        source = "" if on_device else self.device.host_tensors.get(_address(src), "")
        self.give("copy", reads, (dst.span,), n_bytes / rate / 1e9, source=source)
        if not on_device:
            self.device.link_bytes += n_bytes

    def record(self, event: NullEvent) -> None:
        event.clock, event.time_s = dict(self.clock), self.time_s

    def wait(self, event: NullEvent) -> None:
        for name, n in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), n)
        self.time_s = max(self.time_s, event.time_s)

    def synchronize(self) -> None:
        """The host has seen all of it, so whatever is given to any queue from now on comes after."""
        for queue in (self.device.compute, self.device.copy):
            event = NullEvent()
            self.record(event)
            queue.wait(event)


class NullOps:
    """Ops as orders on the compute queue; their ranges come from the arguments, their seconds from the shapes."""

    def __init__(self, device: "NullDevice") -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        if name not in WRITTEN:
            raise AttributeError(name)

        def op(*args: Any, **options: Any) -> None:
            updated = (0,) if options.get("add") else UPDATED.get(name, ())
            reads, writes = [], [s for i in WRITTEN[name] for s in _spans(args[i])]
            weights, seconds = [], _flops(name, args) / self.device.info.flops
            for i, arg in enumerate((*args, *options.values())):
                if isinstance(arg, NullWeight) and arg.gathered:
                    writes.append(arg.data.span)
                    n_bytes = args[2].ids.shape[0] * args[2].ids.shape[1] * arg.info.n_bytes // arg.info.shape[0]
                    seconds += n_bytes / self.device.info.link_gbps / 1e9
                elif i in updated or i not in WRITTEN[name]:
                    reads += _spans(arg)
                    weights += [(arg.info.name, arg.data.span)] if isinstance(arg, NullWeight) else []
            self.device.check_memory(name, reads, writes)
            self.device.compute.give(name, tuple(reads), tuple(writes), seconds, tuple(weights))

        return op


def _spans(arg: Any) -> Iterator[Range]:
    """The byte ranges of a tensor, a weight, or a group of tensors."""
    if isinstance(arg, NullTensor):
        yield arg.span
    elif isinstance(arg, NullWeight):
        yield arg.data.span
    elif isinstance(arg, KVLayer | RecurrentLayer | Routing | StepState):
        for value in vars(arg).values():
            if isinstance(value, NullTensor):
                yield value.span


def _address(src: NDArray[Any]) -> int:
    return int(src.__array_interface__["data"][0])


def _flops(name: str, args: tuple[Any, ...]) -> float:
    """Two per multiply-add of a product; other ops cost nothing."""
    if name == "linear":
        return 2.0 * args[1].shape[0] * math.prod(args[2].info.shape)
    if name == "expert_glu":
        return 4.0 * math.prod(args[0].shape) * args[1].shape[1]
    if name == "expert_down":
        return 2.0 * math.prod(args[0].shape) * args[1].shape[1]
    if name == "delta_net":  # two products with the state and one update of it
        return 6.0 * math.prod(args[0].shape) * args[1].shape[2]
    if name == "attention":
        return 4.0 * math.prod(args[0].shape) * args[3].block_table.shape[1] * args[3].page / 2
    return 0.0


class NullArena:
    """Each `reset` makes the block a buffer of another number, so that what a step left over is recognised."""

    ALIGN = 256

    def __init__(self, device: "NullDevice", n_bytes: int) -> None:
        self.device, self.n_bytes = device, n_bytes
        self.buffer = device.alloc((n_bytes,), "u8").buffer
        self.used = self.peak_bytes = 0
        device.temporaries[self.buffer] = []

    def take(self, shape: tuple[int, ...], dtype: str) -> NullTensor:
        size = DTYPE_BYTES[dtype]
        n_bytes = math.prod(shape) * size
        first, self.used = self.used, self.used + -(-n_bytes // self.ALIGN) * self.ALIGN
        self.peak_bytes = max(self.peak_bytes, self.used)
        assert self.used <= self.n_bytes, "the plan's arena is too small for this step"
        return NullTensor(self.buffer, first, shape, _packed(shape, size), size)

    def reset(self) -> None:
        self.device.freed.add(self.buffer)
        del self.device.temporaries[self.buffer]
        self.device.n_buffers += 1
        self.buffer, self.used = self.device.n_buffers, 0
        self.device.temporaries[self.buffer] = []


class NullDevice:
    """link_gbps and flops set the virtual clock; `memory_bytes` is what `alloc` may hand out; with `gathers`, decode
    fetches routed experts from host memory."""

    compile_s = 0.0
    act_dtype = "bf16"
    memory_gbps = 1000.0

    def __init__(self, link_gbps: float, flops: float, memory_bytes: int, gathers: bool = False) -> None:
        self.gathers = gathers
        self.info = DeviceInfo("null", "gpu", memory_bytes, memory_bytes, link_gbps, flops, copies_async=True)
        self.orders: list[Order] = []
        self.compute, self.copy = NullQueue(self, "compute"), NullQueue(self, "copy")
        self.ops = self.decode_ops = NullOps(self)
        self.allocated_bytes = self.link_bytes = self.n_buffers = 0
        self.recordings: dict[Hashable, list[Order]] = {}
        self.slots: set[int] = set()
        self.host_tensors: dict[int, str] = {}
        self.temporaries: dict[int, list[tuple[int, int]]] = {}
        """Buffer of an arena -> the byte ranges that were written since its reset."""
        self.freed: set[int] = set()
        self.misuses: list[str] = []
        self.closed = False

    def alloc(self, shape: tuple[int, ...], dtype: str) -> NullTensor:
        n_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        if self.allocated_bytes + n_bytes > self.info.total_bytes:
            raise MemoryError(f"null: {n_bytes} bytes do not fit")
        self.allocated_bytes += n_bytes
        return self.alloc_host(shape, dtype)

    def alloc_host(self, shape: tuple[int, ...], dtype: str) -> NullTensor:
        self.n_buffers += 1
        return NullTensor(self.n_buffers, 0, shape, _packed(shape, DTYPE_BYTES[dtype]), DTYPE_BYTES[dtype])

    def scratch_bytes(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> int:
        return 0

    def reserve(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> None: ...

    def compiled_ahead(self, run: Any, progress: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def arena(self, n_bytes: int) -> NullArena:
        return NullArena(self, n_bytes)

    def event(self) -> NullEvent:
        return NullEvent()

    timer = event

    def between_s(self, start: NullEvent, stop: NullEvent) -> float:
        return stop.time_s - start.time_s

    def load(self, info: TensorInfo, raw: NDArray[np.uint8], layout: str = "in_place") -> NullWeight:
        return NullWeight(info, self.alloc((info.n_bytes,), "u8"))

    def view(self, info: TensorInfo, slot: NullTensor) -> NullWeight:
        self.slots.add(slot.buffer)
        return NullWeight(info, slot[: info.n_bytes])

    def computed_view(self, info: TensorInfo, raw: NDArray[np.uint8]) -> None: ...

    def gather_view(
        self, info: TensorInfo, slot: NullTensor, raw: NDArray[np.uint8], lines: Any = None
    ) -> NullWeight | None:  # fmt: skip
        """Remembers, too, where the tensor lies in host memory."""
        self.host_tensors[_address(raw)] = info.name
        return NullWeight(info, slot[: info.n_bytes], gathered=True) if self.gathers else None

    def pin(self, ranges: list[MappedRange], budget_bytes: int, register: bool = True) -> None: ...

    def split_experts(self, first_rank: int, n_threads: int) -> None: ...

    def upload(self, dst: NullTensor, src: NDArray[Any], queue: "NullQueue | None" = None) -> None:
        self.check_memory("upload", (), (dst.span,))
        (queue or self.compute).give("upload", (), (dst.span,), 0.0)

    def download(self, src: NullTensor) -> NDArray[Any]:
        self.check_memory("download", (src.span,), ())
        self.compute.give("download", (src.span,), (), 0.0)
        self.compute.synchronize()
        return np.zeros(src.shape, np.float32)

    def check(self) -> None: ...

    def replay(self, key: Hashable) -> bool:
        if key not in self.recordings:
            return False
        for order in self.recordings[key]:
            self.compute.give(order.name, order.reads, order.writes, order.seconds, order.weights)
        return True

    @contextmanager
    def record(self, key: Hashable) -> Iterator[None]:
        n = len(self.orders)
        yield
        self.recordings[key] = self.orders[n:]

    def close(self) -> None:
        self.closed = True

    def check_memory(self, name: str, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        """Notes the use of freed memory, and of temporaries that nobody wrote."""
        for buffer, first, stop in (*reads, *writes):
            if first < stop and (self.closed or buffer in self.freed):
                self.misuses.append(f"{name} uses buffer {buffer} [{first}:{stop}] after it was freed")
        for buffer, first, stop in reads:
            if buffer in self.temporaries and covered(self.temporaries[buffer], first) < stop:
                self.misuses.append(f"{name} reads buffer {buffer} [{first}:{stop}], which was not written")
        for buffer, first, stop in writes:
            if buffer in self.temporaries:
                self.temporaries[buffer].append((first, stop))

    # what tests ask

    @property
    def elapsed_s(self) -> float:
        """When the last queue is done, on the virtual clock."""
        return max(self.compute.time_s, self.copy.time_s)

    def busy_s(self, queue: str) -> float:
        return sum(order.seconds for order in self.orders if order.queue == queue)

    def hazards(self) -> list[str]:
        """Everything that could go wrong on a device that runs its queues at any speed."""
        return [*self.misuses, *races(self.orders), *wrong_slots(self.orders, self.slots)]


def open_device(
    link_gbps: float = 25.0, flops: float = 1e14, memory_bytes: int = 1 << 40, gathers: bool = False, **_: Any
) -> NullDevice:  # fmt: skip
    return NullDevice(link_gbps, flops, memory_bytes, gathers)
