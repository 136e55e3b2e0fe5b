"""Products with weights: linear layers and experts, on packed activations or on floats."""

import numpy as np

from ..base import Routing
from . import floatmat, matmul, rowops
from .calls import Caller, Tensor, at, floats_at, span
from .kernels import ACT_BYTES, BLOCK, GROUP_BYTES, ROW_BYTES
from .weights import UNIT, CpuWeight, ExpertRows


class Products(Caller):
    """linear, expert_glu and expert_down of `base.Ops`."""

    def linear(
        self, out: Tensor, x: Tensor, w: CpuWeight, bias: CpuWeight | None = None, *, add: bool = False
    ) -> None:  # fmt: skip
        if not out.size:
            return
        assert x.dtype == out.dtype == np.float32 and x.strides[1] == 4, "rows of float32"
        if w.has_format:
            self._linear_packed(out, x, w, add)
        else:
            self._linear_floats(out, x, w, add)
        if bias is not None:
            self.add_bias(out, bias)

    def _linear_packed(self, out: Tensor, x: Tensor, w: CpuWeight, add: bool) -> None:
        n, n_in = x.shape
        fmt, in_place, packed = w.descriptor, w.layout == "in_place", self._packed(x, w)
        blocks = n_in // int(fmt[BLOCK])
        per_thread = matmul.thread_bytes(int(fmt[GROUP_BYTES]), int(fmt[ROW_BYTES]), blocks, 16)
        scratch = self.scratch(per_thread * self.team.n_threads)
        self.call(
            matmul.mul_mat, at(fmt), n, blocks, out.shape[1], at(w.data), in_place, at(packed), at(out),
            out.strides[0] // 4, add, at(scratch), per_thread, out=(out,), keep=(packed, w, scratch),
        )  # fmt: skip

    def _linear_floats(self, out: Tensor, x: Tensor, w: CpuWeight, add: bool) -> None:
        if x.shape[1] % UNIT:
            x, w = self._padded(x), w.padded
        n, n_in = x.shape
        per_thread = 4 * n_in * floatmat.PANEL_ROWS
        scratch = self.scratch(per_thread * self.team.n_threads)
        self.call(
            floatmat.mul_mat_float, n, n_in, out.shape[1], *w.float_kernels, at(w.data), at(x), x.strides[0],
            at(out), out.strides[0] // 4, add, at(scratch), per_thread, out=(out,), keep=(x, w, scratch),
        )  # fmt: skip

    def _packed(self, x: Tensor, w: CpuWeight) -> Tensor:
        """x as int8 for products with w; a program packs once what several products in a row read."""
        n, fmt, in_place = len(x), w.descriptor, w.layout == "in_place"
        kind, source = (w.packing, in_place and n < matmul.MANY), (at(x), x.shape, x.strides)
        known = {} if self.collected is None else self.collected.packed
        if kind in known and known[kind][1] == source:
            return known[kind][2]
        blocks = x.shape[1] // int(fmt[BLOCK])
        packed = self.scratch(matmul.packed_bytes(int(fmt[ACT_BYTES]), blocks, n), f"packed {kind}")
        self.call(
            matmul.pack, at(fmt), n, blocks, at(x), x.strides[0], at(packed), in_place, out=(packed,), keep=(x, fmt)
        )  # fmt: skip
        known[kind] = (span(x), source, packed)
        return packed

    def expert_glu(
        self, out: Tensor, x: Tensor, routing: Routing, gate: CpuWeight, up: CpuWeight | None, activation: str,
        gate_bias: CpuWeight | None = None, up_bias: CpuWeight | None = None,
    ) -> None:  # fmt: skip
        n_used, n_ff = routing.ids.shape[1], out.shape[1]
        first, second = (gate.rows(0), gate.rows(n_ff)) if up is None else (gate.rows(0), up.rows(0))
        if activation == "silu" and gate_bias is None and gate.has_format and first.fits(second):
            self._experts(out, x, routing, n_used, first, second)
            return
        both = self.scratch(8 * out.size, "gate and up").view(np.float32)[: 2 * out.size].reshape(len(out), 2 * n_ff)
        g, u = both[:, :n_ff], both[:, n_ff:]
        if up is None:
            self._experts(both, x, routing, n_used, first, None)
        else:
            self._experts(g, x, routing, n_used, first, None)
            self._experts(u, x, routing, n_used, second, None)
        self._expert_bias(g, routing, gate_bias)
        self._expert_bias(u, routing, up_bias)
        self.glu(out, g, u, activation)

    def expert_down(
        self, out: Tensor, h: Tensor, routing: Routing, down: CpuWeight, bias: CpuWeight | None = None
    ) -> None:  # fmt: skip
        self._experts(out, h, routing, 1, down.rows(0), None)
        self._expert_bias(out, routing, bias)

    def _experts(
        self, out: Tensor, x: Tensor, routing: Routing, per: int, first: ExpertRows, second: ExpertRows | None
    ) -> None:  # fmt: skip
        """out[i] = first[e] x[i // per], or with `second` silu(first[e] x) * second[e] x, for every entry i."""
        n, m = out.shape
        if not n:
            return
        if not first.weight.has_format:
            self._experts_floats(out, x, routing, per, first)
            return
        fmt, n_expert = first.descriptor, routing.starts.shape[0] - 1
        blocks = x.shape[1] // int(fmt[BLOCK])
        packed = self.scratch(matmul.packed_bytes(int(fmt[ACT_BYTES]), blocks, n, n_expert), "packed entries")
        formats = [fmt] if second is None else [fmt, second.descriptor]
        group_bytes, row_bytes = (max(int(f[field]) for f in formats) for field in (GROUP_BYTES, ROW_BYTES))
        per_thread = matmul.thread_bytes(group_bytes, row_bytes, blocks, m)
        scratch = self.scratch(per_thread * self.team.n_threads)
        self.call(
            matmul.mul_mat_id, at(fmt), blocks, m, n_expert, at(routing.order), at(routing.starts), per,
            at(x), x.strides[0], at(packed), at(out), out.strides[0] // 4, *first.arguments,
            *(second.arguments if second else (0, 0, 0, 0)), at(scratch), per_thread,
            out=(out,), keep=(x, routing, first, second, packed, scratch),
        )  # fmt: skip

    def _experts_floats(self, out: Tensor, x: Tensor, routing: Routing, per: int, experts: ExpertRows) -> None:
        if x.shape[1] % UNIT:
            x, experts = self._padded(x), experts.weight.padded.rows(0)
        n, m = out.shape
        k, n_expert = x.shape[1], routing.starts.shape[0] - 1
        entries = self.scratch(4 * n * (k + m), "entries")
        per_thread = 4 * k * floatmat.PANEL_ROWS
        scratch = self.scratch(per_thread * self.team.n_threads)
        self.call(
            floatmat.expert_mat_float, k, m, n_expert, *experts.weight.float_kernels, experts.address,
            at(routing.order), at(routing.starts), per, at(x), x.strides[0], at(entries), at(out), out.strides[0] // 4,
            at(scratch), per_thread, at(entries) + 4 * n * k, out=(out,), keep=(x, routing, experts, entries, scratch),
        )  # fmt: skip

    def _padded(self, x: Tensor) -> Tensor:
        """x with zeros behind its rows."""
        n, n_in = x.shape
        wide = -(-n_in // UNIT) * UNIT
        out = self.scratch(4 * n * wide, "padded").view(np.float32)[: n * wide].reshape(n, wide)
        self.call(rowops.pad_rows, n, n_in, wide, at(out), at(x), x.strides[0], out=(out,), keep=(x,))
        return out

    def embed(self, out: Tensor, table: CpuWeight, token_ids: Tensor) -> None:
        self.call(
            floatmat.embed, len(token_ids), out.shape[1], *table.decoder, at(table.data), at(token_ids),
            at(out), out.strides[0], out=(out,), keep=(table, token_ids),
        )  # fmt: skip

    def _expert_bias(self, y: Tensor, routing: Routing, bias: CpuWeight | None) -> None:
        if bias is not None:
            self.call(
                rowops.add_expert_bias, *y.shape, at(y), y.strides[0], at(routing.ids), floats_at(bias),
                out=(y,), keep=(routing, bias),
            )  # fmt: skip
