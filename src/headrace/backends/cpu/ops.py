"""The op table on the CPU: each op turns its tensors into addresses, strides and sizes, the arguments of kernels.

What a shape fixes is a constant of the call; positions, block tables and ids are read when it runs. Calls are run at
once, or collected for a program (calls.py). Whatever an address points into is kept alive with the call.
"""

import numpy as np

from ...spec import AttentionSpec, DeltaNetSpec, MoeSpec, RopeSpec
from ..base import KVLayer, RecurrentLayer, Routing, StepState
from . import attention, deltanet, router, rowops, tiles, topk
from .calls import Tensor, at, floats_at, rows
from .native import float_bits
from .products import Products
from .team import Team
from .weights import CpuWeight


class CpuOps(Products):
    """The op table of `base.Ops`."""

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        self.frequencies: dict[RopeSpec, Tensor] = {}

    # rows

    def rms_norm(self, out: Tensor, x: Tensor, weight: CpuWeight | None, eps: float) -> None:
        self._norm(out, x, weight, eps, 1)

    def l2_norm(self, out: Tensor, x: Tensor, eps: float) -> None:
        self._norm(out, x, None, eps, 0)

    def _norm(self, out: Tensor, x: Tensor, weight: CpuWeight | None, eps: float, mean: int) -> None:
        self.call(
            rowops.norm, *rows(out, x), floats_at(weight), float_bits(eps), mean, out=(out,), keep=(x, weight)
        )  # fmt: skip

    def _elementwise(self, out: Tensor, x: Tensor, y: Tensor, kind: int) -> None:
        self.call(rowops.elementwise, *rows(out, x, y), kind, out=(out,), keep=(x, y))

    def add(self, x: Tensor, y: Tensor) -> None:
        self._elementwise(x, x, y, rowops.ADD)

    def add_bias(self, x: Tensor, bias: CpuWeight) -> None:
        self._elementwise(x, x, bias.floats, rowops.ADD)

    def glu(self, out: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
        self._elementwise(out, gate, up, {"silu": rowops.SILU_GLU, "gelu": rowops.GELU_GLU}[activation])

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> None:
        if gate.shape == x.shape:
            self._elementwise(x, x, gate, rowops.TIMES_SIGMOID)
        else:
            assert gate.shape == (x.shape[0], 1) and gate.dtype == np.float32, "a gate of x's shape or one a token"
            x3 = x[:, None] if x.ndim == 2 else x
            self.call(
                rowops.scale_by_sigmoid, *x3.shape, at(x), *x3.strides[:2], at(gate), gate.strides[0],
                out=(x,), keep=(gate,),
            )  # fmt: skip

    def gather_rows(self, out: Tensor, x: Tensor, index: Tensor) -> None:
        assert out.dtype == x.dtype
        self.call(
            rowops.gather_rows, out.shape[0], out.shape[1] * out.itemsize, at(out), out.strides[0], at(x), x.strides[0],
            at(index), out=(out,), keep=(x, index),
        )  # fmt: skip

    def top_k(self, values: Tensor, ids: Tensor, logits: Tensor) -> None:
        (n_rows, n), k = logits.shape, ids.shape[1]
        assert 0 < k <= n and logits.dtype == np.float32 and values.flags.c_contiguous and ids.flags.c_contiguous
        scratch = self.scratch(8 * n_rows * k * self.team.n_threads)
        self.call(
            topk.top_k, n_rows, n, k, at(values), at(ids), at(logits), logits.strides[0], at(scratch),
            out=(values, ids), keep=(logits, scratch),
        )  # fmt: skip

    def combine(self, x: Tensor, y: Tensor, routing: Routing) -> None:
        n_tokens, n = x.shape
        scratch = self.scratch(4 * rowops.CHUNK * self.team.n_threads)
        self.call(
            rowops.combine, n_tokens, n, routing.ids.shape[1], at(x), x.strides[0], at(y), y.strides[0],
            at(routing.weights), at(scratch), out=(x,), keep=(y, routing, scratch),
        )  # fmt: skip

    def rope(self, x: Tensor, positions: Tensor, rope: RopeSpec, freq_factors: CpuWeight | None = None) -> None:
        """The cosines and sines are made once a program and shared by its layers."""
        table = self._rope_table(positions, rope, freq_factors)
        self.call(
            rowops.rope, x.shape[0], x.shape[1], rope.n_rot // 2, at(x), *x.strides[:2], at(table), rope.interleaved,
            out=(x,), keep=(table,),
        )  # fmt: skip

    def _rope_table(self, positions: Tensor, rope: RopeSpec, factors: CpuWeight | None) -> Tensor:
        key = (at(positions), len(positions), rope, floats_at(factors))
        tables = {} if self.collected is None else self.collected.tables
        if key not in tables:
            if rope not in self.frequencies:
                self.frequencies[rope] = rope.inverse_frequencies()
            freq, table = self.frequencies[rope], np.empty((len(positions), rope.n_rot), np.float32)
            self.call(
                rowops.rope_table, len(positions), rope.n_rot // 2, at(positions), at(freq), floats_at(factors),
                float_bits(rope.magnitude), at(table), out=(table,), keep=(positions, freq, factors),
            )  # fmt: skip
            tables[key] = table
        return tables[key]

    # attention

    def kv_store(self, cache: KVLayer, k: Tensor, v: Tensor, state: StepState) -> None:
        self.call(
            rowops.kv_store, *k.shape, at(state.kv_slots), *_cache(cache.k), *_cache(cache.v),
            at(k), *k.strides[:2], at(v), *v.strides[:2], out=(cache.k, cache.v), keep=(k, v, state),
        )  # fmt: skip

    def attention(
        self, out: Tensor, q: Tensor, cache: KVLayer, state: StepState, spec: AttentionSpec,
        sinks: CpuWeight | None = None,
    ) -> None:  # fmt: skip
        n_tokens, n_head, dim = q.shape
        n_seq, n_block = state.block_table.shape
        n_kv = cache.k.shape[1]
        group, few = n_head // n_kv, n_tokens <= max(attention.FEW_TOKENS, n_seq)
        tile_bytes = attention.tile_bytes(group, dim, few)
        n_split, length = attention.splits(n_block * state.page) if few else (0, 0)
        parts_bytes = n_tokens * n_head * n_split * attention.output_row.py_func(dim)
        scratch = self.scratch(tile_bytes * self.team.n_threads + parts_bytes)
        self.call(
            attention.attention,
            n_tokens, n_seq, n_kv, group, dim, float_bits(spec.scale), state.page, spec.window,
            at(q), *q.strides[:2], *_cache(cache.k), *_cache(cache.v), at(state.positions), at(state.seq_start),
            at(state.block_table), n_block, at(out), *out.strides[:2], floats_at(sinks), at(scratch), tile_bytes,
            at(scratch) + tile_bytes * self.team.n_threads, n_split, length, at(tiles.kernels()),
            out=(out,), keep=(q, cache, state, sinks, scratch),
        )  # fmt: skip

    # experts

    def route(self, out: Routing, logits: Tensor, spec: MoeSpec, bias: CpuWeight | None = None) -> None:
        n_tokens, n_expert = logits.shape
        n_used = spec.n_expert_used
        assert n_used <= n_expert and logits.dtype == np.float32 and all(
            x.flags.c_contiguous for x in (out.ids, out.weights, out.order, out.starts)
        )  # fmt: skip
        scratch = self.scratch(4 * (2 * n_expert + n_used) * self.team.n_threads)
        self.call(
            router.route, n_tokens, n_expert, n_used, at(logits), logits.strides[0], at(out.ids), at(out.weights),
            at(out.order), at(out.starts), floats_at(bias), spec.gating == "sigmoid", spec.norm_weights,
            float_bits(spec.weight_scale), at(scratch), out=(out.ids, out.weights, out.order, out.starts),
            keep=(logits, bias, scratch),
        )  # fmt: skip

    # recurrent layers

    def conv1d(self, out: Tensor, x: Tensor, weight: CpuWeight, cache: RecurrentLayer, state: StepState) -> None:
        taps_first = weight.transposed
        self.call(
            deltanet.conv1d, len(state.state_slots), x.shape[1], taps_first.shape[0], at(out), out.strides[0],
            at(x), x.strides[0], at(taps_first), at(cache.conv), at(state.state_slots), at(state.positions),
            at(state.seq_start), out=(out, cache.conv), keep=(x, taps_first, state),
        )  # fmt: skip

    def delta_net(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, dt_bias: CpuWeight,
        a: CpuWeight, cache: RecurrentLayer, state: StepState, spec: DeltaNetSpec,
    ) -> None:  # fmt: skip
        n_tokens = q.shape[0]
        strip_bytes = 4 * spec.k_dim * deltanet.STRIP
        gate_bytes = (12 * n_tokens * spec.n_v_head + 63) // 64 * 64
        scratch = self.scratch(gate_bytes + strip_bytes * self.team.n_threads)
        self.call(
            deltanet.delta_net, n_tokens, len(state.state_slots), spec.n_k_head, spec.n_v_head, spec.k_dim, spec.v_dim,
            *(n for x in (q, k, v, out) for n in (at(x), *x.strides[:2])), at(alpha), alpha.strides[0],
            at(beta), beta.strides[0], floats_at(dt_bias), floats_at(a), at(cache.s), at(state.state_slots),
            at(state.positions), at(state.seq_start), at(scratch), at(scratch) + gate_bytes, strip_bytes,
            *deltanet.kernels(), out=(out, cache.s), keep=(q, k, v, alpha, beta, dt_bias, a, state, scratch),
        )  # fmt: skip


def _cache(x: Tensor) -> tuple[int, int, int]:
    """Address, bytes of a row [G, C], whether it holds halves."""
    assert x.flags.c_contiguous and x.dtype in (np.float16, np.float32)
    return at(x), x.strides[0], x.dtype == np.float16
