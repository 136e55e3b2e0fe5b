"""What a backend is: Device, Queue, Event, Tensor, Weight and the op table.

Nothing here computes. `reference.py` defines what every op means, `null.py` computes nothing and checks the
order of things, the others are fast. Model code (`blocks.py`, `models/`) sees only `Ops`.

Letters in shapes: T tokens of the ubatch, D n_embd, H heads, G kv heads, C head dimension, E experts,
R experts used per token, F expert width, V vocabulary, S sequences, M output rows.
"""

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..spec import AttentionSpec, DeltaNetSpec, ModelSpec, MoeSpec, RopeSpec

if TYPE_CHECKING:
    from ..gguf import TensorInfo
    from ..hostmem import MappedRange

DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "u8": 1}


class Tensor(Protocol):
    """Device memory with a shape. Views come from `reshape` (of a contiguous tensor) and basic slicing;
    the last axis of a view always has unit stride. numpy and torch arrays qualify as they are."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def reshape(self, *shape: int) -> "Tensor": ...
    def __getitem__(self, index: Any, /) -> "Tensor": ...


class Weight(Protocol):
    """A GGUF tensor that ops can read, in whatever form the backend keeps it (possibly in host memory)."""

    @property
    def info(self) -> "TensorInfo": ...


class Event(Protocol):
    """A marker in a Queue."""


@dataclass
class HostEvent:
    """The Event of a queue whose work is done when the call returns: the host's clock tells its time."""

    time_s: float = 0.0

    def record(self, stream: object = None) -> None:
        self.time_s = time.perf_counter()


class Queue(Protocol):
    """One in-order stream of device work. Nothing here makes the host wait but `synchronize`."""

    def copy(self, dst: Tensor, src: Any) -> None:
        """Copies bytes to `dst`: from a Tensor of the same device, or from a HostRegion's uint8 array."""

    def record(self, event: Event) -> None: ...
    def wait(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...


class Arena(Protocol):
    """A bump allocator for the temporaries of one step; `reset` forgets them all."""

    def take(self, shape: tuple[int, ...], dtype: str) -> Tensor: ...
    def reset(self) -> None: ...


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens take.

    ids int32 [T, R] by falling gate value (the rank order), weights float32 [T, R]; `order` int32 [T * R] lists the
    entries t * R + r sorted by expert (stable); those of expert e are order[starts[e]:starts[e + 1]], starts int32
    [E + 1]. With one token a sequence nobody needs the order, and `decode_ops` of a GPU leave both unwritten.
    """

    ids: Tensor
    weights: Tensor
    order: Tensor
    starts: Tensor


@dataclass(frozen=True)
class KVLayer:
    """Keys and values of one layer for all sequences: [n_page * page, G, C] each, in the cache's dtype."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class RecurrentLayer:
    """Delta-net state of one layer, float32: conv [n_slot, n_conv - 1, channels], s [n_slot, H, k_dim, v_dim]."""

    conv: Tensor
    s: Tensor


@dataclass(frozen=True)
class StepState:
    """What changes from ubatch to ubatch, all int32 in device memory, so that recorded work can be replayed.

    token_ids [T]; positions [T]; kv_slots [T]: row of the KV cache where each token goes; seq_start [S + 1]: the
    tokens of sequence s are seq_start[s]:seq_start[s + 1]; block_table [S, n_block]: position p of sequence s lies in
    row block_table[s, p // page] * page + p % page; state_slots [S]: row of the recurrent state (a sequence whose first
    token here has position 0 starts from zeros); out_rows [M]: the tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    seq_start: Tensor
    block_table: Tensor
    state_slots: Tensor
    out_rows: Tensor
    page: int


class Ops(Protocol):
    """The op table. Ops write into `out`; a reduction's order never depends on T, on placement or on layout.

    Activations (`Tensor` arguments without a stated dtype) are in the device's `act_dtype`, float32 or 16-bit, also
    mixed in one call; norms, softmax, routing and sums are computed in float32.
    """

    def embed(self, out: Tensor, table: Weight, token_ids: Tensor) -> None:
        """out float32 [T, D] = rows of table [V, D]."""

    def rms_norm(self, out: Tensor, x: Tensor, weight: Weight | None, eps: float) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over the last axis; [..., n], weight [n]; out may be x."""

    def l2_norm(self, out: Tensor, x: Tensor, eps: float) -> None:
        """out = x / sqrt(sum(x^2) + eps) over the last axis."""

    def linear(self, out: Tensor, x: Tensor, w: Weight, bias: Weight | None = None, *, add: bool = False) -> None:
        """out [T, n_out] = x [T, n_in] @ w[n_out, n_in]^T (+ bias), added to what out holds if `add`.
        A one-dimensional w is one row."""

    def add(self, x: Tensor, y: Tensor) -> None:
        """x += y, same shape [T, n]."""

    def add_bias(self, x: Tensor, bias: Weight) -> None:
        """x [T, n] += bias [n]."""

    def glu(self, out: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
        """out = activation(gate) * up, elementwise, [..., n]; activation "silu" or "gelu" (tanh form)."""

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> None:
        """x [T, ...] *= sigmoid(gate), gate of x's shape or [T, 1]."""

    def rope(self, x: Tensor, positions: Tensor, rope: RopeSpec, freq_factors: Weight | None = None) -> None:
        """Rotates x [T, H, C] in place: angle of pair i = positions * inverse_frequencies[i] / freq_factors[i]."""

    def kv_store(self, cache: KVLayer, k: Tensor, v: Tensor, state: StepState) -> None:
        """Writes k, v [T, G, C] to rows state.kv_slots of the cache."""

    def attention(
        self, out: Tensor, q: Tensor, cache: KVLayer, state: StepState, spec: AttentionSpec, sinks: Weight | None = None
    ) -> None:
        """out [T, H, C] = softmax(q k^T * scale) v over the positions 0..p of the token's own sequence (the last
        `window` of them if set); query head h reads kv head h // (H / G); sinks [H] join the softmax, valueless."""

    def route(self, out: Routing, logits: Tensor, spec: MoeSpec, bias: Weight | None = None) -> None:
        """Picks experts from float32 logits [T, E]; see MoeSpec. `bias` [E] takes part in the choice only. What is NaN
        gives no id out of range. `decode_ops` may leave order and starts unwritten."""

    def expert_glu(
        self, out: Tensor, x: Tensor, routing: Routing, gate: Weight, up: Weight | None, activation: str,
        gate_bias: Weight | None = None, up_bias: Weight | None = None,
    ) -> None:  # fmt: skip
        """out [T * R, F], row t * R + r = activation(gate[e] x[t]) * up[e] x[t] with e = ids[t, r]; gate, up [E, F, D].
        Without `up`, gate is the fused [E, 2 F, D]: gate rows, then up rows."""

    def expert_down(self, out: Tensor, h: Tensor, routing: Routing, down: Weight, bias: Weight | None = None) -> None:
        """out [T * R, D], row i = down[e] h[i] with e = ids.flat[i]; down [E, D, F]."""

    def combine(self, x: Tensor, y: Tensor, routing: Routing) -> None:
        """x float32 [T, D] += sum over r, in rank order, of weights[t, r] * y[t * R + r]."""

    def conv1d(self, out: Tensor, x: Tensor, weight: Weight, cache: RecurrentLayer, state: StepState) -> None:
        """Causal depthwise convolution over time with SiLU: out, x [T, channels], weight [channels, n_conv]; the last
        n_conv - 1 inputs of each sequence are read from and left in cache.conv."""

    def delta_net(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, dt_bias: Weight, a: Weight,
        cache: RecurrentLayer, state: StepState, spec: DeltaNetSpec,
    ) -> None:  # fmt: skip
        """The gated delta rule, token by token, per v-head h with k-head h % n_k_head:
        g = a * softplus(alpha + dt_bias), b = sigmoid(beta), S *= exp(g), S += k (b (v - S^T k))^T,
        out = S^T q / sqrt(k_dim). q, k [T, n_k_head, k_dim] (normalised by the caller), v, out [T, n_v_head, v_dim],
        alpha, beta [T, n_v_head]; S is read from and left in cache.s."""

    def gather_rows(self, out: Tensor, x: Tensor, rows: Tensor) -> None:
        """out [M, D] = x[rows], rows int32."""

    def top_k(self, values: Tensor, ids: Tensor, logits: Tensor) -> None:
        """values float32, ids int32 [M, K] = the K <= V greatest of each row of logits float32 [M, V] by falling value,
        ties to the lower id. A NaN comes before all numbers, so that none is overlooked."""


class Lines(NamedTuple):
    """What fetching ops need of one tensor's cache: data uint8 [n_lines * expert_bytes]; line, filled and use
    int32 [n_expert], shared by the tensors of a layer: where an expert's line is (-1: none), whether it holds the
    expert yet, and how often it was routed to."""

    data: Tensor
    line: Tensor
    filled: Tensor
    use: Tensor


@dataclass(frozen=True)
class DeviceInfo:
    """What the plan must know of a device: total and free bytes, and measured speeds (0: unknown)."""

    name: str
    kind: str
    total_bytes: int
    free_bytes: int
    link_gbps: float = 0.0
    flops: float = 0.0
    cpu_gbps: float = 0.0
    """GB/s of expert bytes that the host's CPU computes with, where they lie."""
    copies_async: bool = False
    """Has copies that run beside compute, and events: what lookahead needs."""
    repack_types: frozenset[str] = frozenset()
    """Tensor types that it computes faster from the "interleaved" layout (CPU)."""
    context_bytes: int = 0
    """Taken by the driver for this process, before anything is allocated; not part of `free_bytes`."""
    reserve_bytes: int = 0
    """To be left free for recordings, kernels and what allocations are rounded up by."""
    granule_bytes: int = 1
    """Large allocations are multiples of it."""


class Device(Protocol):
    """One place that computes. Memory comes from it, work is queued on it; it owns its two queues."""

    info: DeviceInfo
    ops: Ops
    decode_ops: Ops
    """The op table of the decode phase (one token a sequence); may be `ops` itself."""
    act_dtype: str
    compute: Queue
    copy: Queue

    @property
    def compile_s(self) -> float:
        """Seconds that this process has spent on compiling or loading kernels, as far as the device knows."""

    def scratch_bytes(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> int:
        """What the ops allocate for themselves at micro-batches of up to n_tokens of n_seq sequences."""

    def reserve(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> None:
        """Allocates the part of it that would grow from one micro-batch to the next."""

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Zeroed memory; a device that is out of memory raises MemoryError."""

    def alloc_host(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Zeroed host memory that ops write and `download` reads without a copy: for the little that is read after
        every step. `Queue.copy` and `upload` do not know it."""

    def compiled_ahead(
        self, run: "Callable[[Device], None]", progress: Callable[[int, int], None] | None = None
    ) -> AbstractContextManager[None]:
        """Compiles the kernels that `run` launches, beside what is done inside, and waits for them at the end: `run`
        gets a device of this kind that has no memory and computes nothing. `progress` of (kernels done, in all)."""

    def arena(self, n_bytes: int) -> Arena: ...
    def event(self) -> Event: ...

    def timer(self) -> Event:
        """An Event that also knows when its queue came to it."""

    def between_s(self, start: Event, stop: Event) -> float:
        """Seconds between two recorded timers, of either queue; waits until the device has come to both."""

    def load(self, info: "TensorInfo", raw: NDArray[np.uint8], layout: str = "in_place") -> Weight:
        """A resident weight from its GGUF bytes. Layout "in_place" may keep `raw` itself where the device reads host
        memory; "interleaved" is the CPU's regrouped copy."""

    def view(self, info: "TensorInfo", slot: Tensor) -> Weight:
        """The weight whose bytes lie, or will lie, at the start of a slot (uint8 [n])."""

    def gather_view(
        self, info: "TensorInfo", slot: Tensor, raw: NDArray[np.uint8], lines: Lines | None = None
    ) -> Weight | None:  # fmt: skip
        """A weight that stays in pinned host memory: ops fetch the experts that are routed to into their places in the
        slot, through `lines` of an expert cache if there are any. None where the device cannot."""

    def pin(self, ranges: "list[MappedRange]", budget_bytes: int, register: bool = True) -> None:
        """Makes ranges of the mapped file fast to copy from; nothing to do where copies are memcpy. What is beyond the
        budget is not page-locked and shall not fill the page cache; unless `register`, nothing is page-locked."""

    def computed_view(self, info: "TensorInfo", raw: NDArray[np.uint8]) -> Weight | None:
        """A weight in host memory, page-locked or not, all of whose routed experts `decode_ops` leave to the CPU; None
        where they do not."""

    def split_experts(self, first_rank: int, n_threads: int) -> None:
        """From now on `decode_ops` leave the routed ranks from first_rank on of experts in host memory to the CPU. Only
        a GPU is asked; to be called before `gather_view`."""

    def upload(self, dst: Tensor, src: NDArray[Any], queue: Queue | None = None) -> None:
        """Host to device on a queue (None: compute), without waiting; `src` may be reused on return."""

    def download(self, src: Tensor) -> NDArray[Any]:
        """Device to host; waits for the compute queue. What lies in host memory may come as it is, not as a copy."""

    def check(self) -> None:
        """UserError if a copy from the mapped file went wrong: results that were read since are void."""

    def replay(self, key: Hashable) -> bool:
        """Runs what `record(key)` recorded; False if there is no such recording."""

    def record(self, key: Hashable) -> AbstractContextManager[None]:
        """Ops called inside run, and are kept for `replay(key)` where the device can."""

    def close(self) -> None: ...


DeviceFactory = Callable[..., Device]
