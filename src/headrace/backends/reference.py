"""The definition of every op in plain float32 numpy: readable first, slow on purpose.

Tensors are numpy arrays, weights are decoded when they are loaded, everything happens at once and in order. Temporaries
start as NaN, so a number that was never written shows.
"""

import math
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gguf import TensorInfo
from ..quants import dequantize
from ..spec import AttentionSpec, DeltaNetSpec, ModelSpec, MoeSpec, RopeSpec
from .base import DeviceInfo, HostEvent, KVLayer, RecurrentLayer, Routing, StepState

Array = NDArray[Any]
DTYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "u8": np.uint8}


@dataclass(frozen=True, eq=False)
class ReferenceWeight:
    """A weight and its bytes; `values` decodes them to float32 in the tensor's shape."""

    info: TensorInfo
    raw: Array

    @property
    def values(self) -> Array:
        return dequantize(self.raw[: self.info.n_bytes], self.info.type, self.info.shape)


@dataclass(frozen=True, eq=False)
class DecodedWeight:
    """A resident weight, decoded once."""

    info: TensorInfo
    values: Array


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -80, 80)))


def activate(x: Array, activation: str) -> Array:
    if activation == "silu":
        return x * sigmoid(x)
    assert activation == "gelu", activation
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class ReferenceOps:
    """The op table of `base.Ops`."""

    def embed(self, out: Array, table: Any, token_ids: Array) -> None:
        out[...] = table.values[token_ids]

    def rms_norm(self, out: Array, x: Array, weight: Any, eps: float) -> None:
        y = x / np.sqrt(np.mean(np.square(x, dtype=np.float32), -1, keepdims=True) + np.float32(eps))
        out[...] = y * weight.values if weight else y

    def l2_norm(self, out: Array, x: Array, eps: float) -> None:
        out[...] = x / np.sqrt(np.sum(np.square(x), -1, keepdims=True) + np.float32(eps))

    def linear(self, out: Array, x: Array, w: Any, bias: Any = None, *, add: bool = False) -> None:
        y = x @ np.atleast_2d(w.values).T
        if bias:
            y = y + bias.values
        out[...] = out + y if add else y

    def add(self, x: Array, y: Array) -> None:
        x += y

    def add_bias(self, x: Array, bias: Any) -> None:
        x += bias.values

    def glu(self, out: Array, gate: Array, up: Array, activation: str) -> None:
        out[...] = activate(gate, activation) * up

    def sigmoid_mul(self, x: Array, gate: Array) -> None:
        x *= sigmoid(gate)

    def rope(self, x: Array, positions: Array, rope: RopeSpec, freq_factors: Any = None) -> None:
        freq = rope.inverse_frequencies()
        if freq_factors:
            freq = freq / freq_factors.values
        angle = positions[:, None, None].astype(np.float32) * freq
        cos, sin = np.cos(angle) * np.float32(rope.magnitude), np.sin(angle) * np.float32(rope.magnitude)
        half = rope.n_rot // 2
        first, second = (
            (slice(0, rope.n_rot, 2), slice(1, rope.n_rot, 2)) if rope.interleaved
            else (slice(0, half), slice(half, rope.n_rot))
        )  # fmt: skip
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos

    def kv_store(self, cache: KVLayer, k: Array, v: Array, state: StepState) -> None:
        cache.k[state.kv_slots], cache.v[state.kv_slots] = k, v

    def attention(
        self, out: Array, q: Array, cache: KVLayer, state: StepState, spec: AttentionSpec, sinks: Any = None
    ) -> None:
        group = spec.n_head // spec.n_head_kv
        for s, t in tokens(state):
            p = int(state.positions[t])
            seen = np.arange(max(0, p - spec.window + 1) if spec.window else 0, p + 1)
            rows = state.block_table[s, seen // state.page] * state.page + seen % state.page
            k, v = (np.repeat(c[rows].astype(np.float32), group, 1) for c in (cache.k, cache.v))  # [n, H, C]
            z = np.einsum("hc,nhc->hn", q[t], k) * np.float32(spec.scale)
            if sinks:
                z = np.concatenate([z, sinks.values[:, None]], 1)
            out[t] = np.einsum("hn,nhc->hc", softmax(z)[:, : len(rows)], v)

    def route(self, out: Routing, logits: Array, spec: MoeSpec, bias: Any = None) -> None:
        gate = softmax(logits) if spec.gating == "softmax" else sigmoid(logits)
        score = gate + bias.values if bias else gate
        ids = np.argsort(-score, -1, kind="stable")[:, : spec.n_expert_used]
        weights = np.take_along_axis(gate, ids, -1)
        if spec.norm_weights:
            weights = weights / weights.sum(-1, keepdims=True)
        out.ids[...], out.weights[...] = ids, weights * np.float32(spec.weight_scale)
        out.order[...] = np.argsort(ids.ravel(), kind="stable")
        out.starts[...] = np.searchsorted(np.sort(ids.ravel()), np.arange(spec.n_expert + 1))

    def expert_glu(
        self, out: Array, x: Array, routing: Routing, gate: Any, up: Any, activation: str,
        gate_bias: Any = None, up_bias: Any = None,
    ) -> None:  # fmt: skip
        n_ff, n_used = out.shape[1], routing.ids.shape[1]
        g_all = gate.values
        g_all, u_all = (g_all, up.values) if up else (g_all[:, :n_ff], g_all[:, n_ff:])
        for i, e in enumerate(routing.ids.ravel()):
            g, u = g_all[e] @ x[i // n_used], u_all[e] @ x[i // n_used]
            if gate_bias:
                g, u = g + gate_bias.values[e], u + up_bias.values[e]
            out[i] = activate(g, activation) * u

    def expert_down(self, out: Array, h: Array, routing: Routing, down: Any, bias: Any = None) -> None:
        w = down.values
        for i, e in enumerate(routing.ids.ravel()):
            out[i] = w[e] @ h[i] + (bias.values[e] if bias else 0)

    def combine(self, x: Array, y: Array, routing: Routing) -> None:
        n, n_used = routing.ids.shape
        total = np.zeros_like(x)
        for r in range(n_used):
            total += routing.weights[:, r, None] * y.reshape(n, n_used, x.shape[1])[:, r]
        x += total

    def conv1d(self, out: Array, x: Array, weight: Any, cache: RecurrentLayer, state: StepState) -> None:
        w = weight.values
        for s, t in tokens(state):
            history = cache.conv[state.state_slots[s]]
            if state.positions[t] == 0:
                history[...] = 0
            window = np.concatenate([history, x[t : t + 1]])
            y = np.einsum("ic,ci->c", window, w)
            out[t] = y * sigmoid(y)
            history[...] = window[1:]

    def delta_net(
        self, out: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array, dt_bias: Any, a: Any,
        cache: RecurrentLayer, state: StepState, spec: DeltaNetSpec,
    ) -> None:  # fmt: skip
        g = a.values * np.logaddexp(0, alpha + dt_bias.values)
        b = sigmoid(beta)
        k_head = np.arange(spec.n_v_head) % spec.n_k_head
        for i, t in tokens(state):
            s = cache.s[state.state_slots[i]]  # [H, k_dim, v_dim]
            if state.positions[t] == 0:
                s[...] = 0
            s *= np.exp(g[t])[:, None, None]
            kt, qt = k[t, k_head], q[t, k_head] / np.float32(math.sqrt(spec.k_dim))
            u = b[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, kt))
            s += kt[:, :, None] * u[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", s, qt)

    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        out[...] = x[rows]

    def top_k(self, values: Array, ids: Array, logits: Array) -> None:
        n, k = logits.shape[1], ids.shape[1]
        rising = np.argsort(logits[:, ::-1], axis=1, kind="stable")  # NaNs last, equal ones by falling id
        ids[...] = n - 1 - rising[:, ::-1][:, :k]
        values[...] = np.take_along_axis(logits, ids, 1)


def tokens(state: StepState) -> Iterator[tuple[int, int]]:
    """(sequence, token) of every token of the ubatch in order."""
    for s in range(len(state.seq_start) - 1):
        for t in range(int(state.seq_start[s]), int(state.seq_start[s + 1])):
            yield s, t


class ReferenceArena:
    """Fresh NaN-filled arrays; the given size is only checked."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.used = n_bytes, 0

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        kind = np.dtype(DTYPES[dtype])
        self.used += -(-math.prod(shape) * kind.itemsize // 256) * 256
        assert self.used <= self.n_bytes, "the plan's arena is too small for this step"
        return np.full(shape, np.nan if kind.kind == "f" else -(2**30), kind)

    def reset(self) -> None:
        self.used = 0


class ReferenceQueue:
    """Everything is done when the call returns."""

    def copy(self, dst: Array, src: Array) -> None:
        dst[...] = src

    def record(self, event: HostEvent) -> None:
        event.record()

    def wait(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class ReferenceDevice:
    compile_s = 0.0
    act_dtype = "f32"

    def __init__(self) -> None:
        self.info = DeviceInfo("numpy", "cpu", 0, 1 << 40)
        self.ops = self.decode_ops = ReferenceOps()
        self.compute = self.copy = ReferenceQueue()

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.zeros(shape, DTYPES[dtype])

    alloc_host = alloc

    def scratch_bytes(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> int:
        return 0

    def reserve(self, spec: ModelSpec, n_tokens: int, n_seq: int) -> None: ...

    def compiled_ahead(self, run: Any, progress: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def arena(self, n_bytes: int) -> ReferenceArena:
        return ReferenceArena(n_bytes)

    def event(self) -> HostEvent:
        return HostEvent()

    timer = event

    def between_s(self, start: HostEvent, stop: HostEvent) -> float:
        return stop.time_s - start.time_s

    def load(self, info: TensorInfo, raw: Array, layout: str = "in_place") -> DecodedWeight:
        return DecodedWeight(info, dequantize(raw, info.type, info.shape))

    def view(self, info: TensorInfo, slot: Array) -> ReferenceWeight:
        return ReferenceWeight(info, slot)

    def computed_view(self, info: TensorInfo, raw: NDArray[np.uint8]) -> None: ...

    def gather_view(self, info: TensorInfo, slot: Array, raw: Array, lines: Any = None) -> None: ...

    def upload(self, dst: Array, src: Array, queue: Any = None) -> None:
        dst[...] = src

    def download(self, src: Array) -> Array:
        return src.copy()

    def check(self) -> None: ...

    def replay(self, key: Hashable) -> bool:
        return False

    @contextmanager
    def record(self, key: Hashable) -> Iterator[None]:
        yield

    def close(self) -> None: ...


def open_device(**_: Any) -> ReferenceDevice:
    return ReferenceDevice()
