"""The op table on CUDA: each op picks tiles, and launches kernels from the files beside this one.

Nothing here allocates during a captured run: scratch is kept by name and only grows, outside of captures.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...spec import AttentionSpec, DeltaNetSpec, MoeSpec, RopeSpec
from ..base import KVLayer, RecurrentLayer, Routing, StepState
from . import attention, deltanet, experts, gather, gemm, router, rows, topk
from .decoders import DECODERS, decode_block, table
from .dequant import dequant_kernel
from .scratch import ScratchRing
from .tiles import Tiles, pick

Tensor = torch.Tensor


def _view3(x: Tensor) -> tuple[int, int, int, int]:
    """(n_rows, n_inner, outer stride, inner stride) of x [T, n] or [T, H, n]."""
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)


class CudaOps:
    def __init__(self, where: torch.device, act_dtype: torch.dtype, tiles: Tiles) -> None:
        self.where, self.act_dtype, self.tiles = where, act_dtype, tiles
        self.triton_act = tl.bfloat16 if act_dtype == torch.bfloat16 else tl.float16
        self.buffers: dict[str, Tensor] = {}
        self.kept: list[Tensor] = []
        self.tables: dict[Any, Tensor] = {}
        self.decoded = ScratchRing(where, 2, tiles.scratch_weights, act_dtype)

    def scratch(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """At least n numbers under a name; a smaller one stays alive for the recordings that know its address."""
        old = self.buffers.get(name)
        if old is None or old.numel() < n:
            if old is not None:
                self.kept.append(old)
            self.buffers[name] = old = torch.empty(n, dtype=dtype, device=self.where)
        return old

    # rows

    def embed(self, out: Tensor, table: Any, token_ids: Tensor) -> None:
        t, block = table.info.type, decode_block(table.info.type.name, table.info.type.block)
        n = out.shape[1]
        rows.embed_kernel[(out.shape[0], n // block)](
            table.data, self.lut(t.name), token_ids, out, n, t.row_bytes(n),
            DECODE=DECODERS[t.name], BLOCK=block, BLOCK_BYTES=block * t.block_bytes // t.block, num_warps=1,
        )  # fmt: skip

    def lut(self, name: str) -> Tensor:
        """The type's lookup table, int32 (a lone 0 if it needs none)."""
        if name not in self.tables:
            self.tables[name] = torch.from_numpy(table(name)).to(self.where)
        return self.tables[name]

    def rms_norm(self, out: Tensor, x: Tensor, weight: Any, eps: float) -> None:
        self._norm(out, x, weight.floats() if weight else None, eps, l2=False)

    def l2_norm(self, out: Tensor, x: Tensor, eps: float) -> None:
        self._norm(out, x, None, eps, l2=True)

    def _norm(self, out: Tensor, x: Tensor, weight: Tensor | None, eps: float, l2: bool) -> None:
        n = x.shape[-1]
        n_rows, n_inner, x_outer, x_inner = _view3(x)
        _, _, out_outer, out_inner = _view3(out)
        block = triton.next_power_of_2(n)
        per = max(1, 1024 // block)
        if n_rows:
            rows.norm_kernel[(triton.cdiv(n_rows, per),)](
                x, x if weight is None else weight, out, n_rows, n, n_inner,
                x_outer, x_inner, out_outer, out_inner, eps,
                L2=l2, HAS_WEIGHT=weight is not None, ROWS=per, BLOCK=block, num_warps=4,
            )  # fmt: skip

    def _binary(self, out: Tensor, a: Tensor, b: Tensor, op: Any) -> None:
        n = out.shape[-1]
        n_rows, n_inner, a_outer, a_inner = _view3(a)
        _, _, out_outer, out_inner = _view3(out)
        _, _, b_outer, b_inner = _view3(b) if b.dim() > 1 else (1, 1, 0, 0)
        if b.dim() == 2 and a.dim() == 3:
            b_inner = 0
        block = min(1024, triton.next_power_of_2(n))
        if n_rows:
            rows.binary_kernel[(n_rows, triton.cdiv(n, block))](
                a, b, out, n_rows, n, n_inner, a_outer, a_inner, b_outer, b_inner, 0 if b.shape[-1] == 1 else 1,
                out_outer, out_inner, OP=op, BLOCK=block, num_warps=4,
            )  # fmt: skip

    def add(self, x: Tensor, y: Tensor) -> None:
        self._binary(x, x, y, rows.plus)

    def add_bias(self, x: Tensor, bias: Any) -> None:
        self._binary(x, x, bias.floats(), rows.plus)

    def glu(self, out: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
        self._binary(out, gate, up, {"silu": rows.glu, "gelu": rows.geglu}[activation])

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> None:
        self._binary(x, x, gate, rows.times_sigmoid)

    def gather_rows(self, out: Tensor, x: Tensor, index: Tensor) -> None:
        m, n = out.shape
        block = min(1024, triton.next_power_of_2(n))
        if m:
            rows.gather_rows_kernel[(m, triton.cdiv(n, block))](x, index, out, n, x.stride(0), BLOCK=block)

    def top_k(self, values: Tensor, ids: Tensor, logits: Tensor) -> None:
        (m, n), k = logits.shape, ids.shape[1]
        ranks, n_blocks = triton.next_power_of_2(k), triton.cdiv(n, topk.BLOCK)
        width = triton.next_power_of_2(n_blocks * ranks)
        if m:
            keys = self.scratch("top_k", 2 * m * n_blocks * ranks, torch.int32).view(torch.int64)
            topk.top_k_block_kernel[(n_blocks, m)](
                logits, keys, n, logits.stride(0), K=k, RANKS=ranks, BLOCK=topk.BLOCK,
                num_warps=topk.BLOCK // topk.KEYS_PER_WARP,
            )  # fmt: skip
            topk.top_k_merge_kernel[(m,)](
                keys, values, ids, n_blocks * ranks, K=k, RANKS=ranks, WIDTH=width,
                num_warps=max(1, min(16, width // topk.KEYS_PER_WARP)),
            )  # fmt: skip

    def rope(self, x: Tensor, positions: Tensor, rope: RopeSpec, freq_factors: Any = None) -> None:
        t, n_head, _ = x.shape
        if rope not in self.tables:
            self.tables[rope] = torch.from_numpy(rope.inverse_frequencies()).to(self.where)
        freq, half = self.tables[rope], rope.n_rot // 2
        if t:
            rows.rope_kernel[(t,)](
                x, positions, freq, freq_factors.floats() if freq_factors else freq, n_head, x.stride(0), x.stride(1),
                rope.magnitude, HALF=half, PAIRS=triton.next_power_of_2(half), INTERLEAVED=rope.interleaved,
                HAS_FACTORS=freq_factors is not None, HEADS=triton.next_power_of_2(n_head), num_warps=4,
            )  # fmt: skip

    # products

    def linear(self, out: Tensor, x: Tensor, w: Any, bias: Any = None, *, add: bool = False) -> None:
        n_in = w.info.shape[-1]
        n_out = w.info.shape[0] if len(w.info.shape) > 1 else 1
        b = bias.floats() if bias else None
        if w.info.type.name == "F32":
            self._gemm(out, x, w.floats(), n_out, n_in, b, add, "tf32x3")
            return
        chunk = max(1, self.tiles.scratch_weights // n_in)
        for first in range(0, n_out, chunk):
            n = min(chunk, n_out - first)
            with self.decoded.fill() as weights:
                self._decode(weights, w, first, n, n_in)
            self._gemm(out[:, first : first + n], x, weights, n, n_in, None if b is None else b[first:], add, "ieee")
            self.decoded.done()

    def _decode(
        self, out: Tensor, w: Any, first: int, n_rows: int, n_in: int, starts: Tensor | None = None
    ) -> None:  # fmt: skip
        """Rows first.. of a weight in the activation dtype; with `starts` only those of experts that have entries."""
        t = w.info.type
        block = decode_block(t.name, t.block)
        row_bytes, n_blocks = t.row_bytes(n_in), n_in // block
        per = 2048 // block
        dequant_kernel[(triton.cdiv(n_rows, per) * n_blocks,)](
            w.data[first * row_bytes :], self.lut(t.name), out, n_rows, n_blocks, row_bytes,
            out if starts is None else starts, first // w.info.shape[-2] if starts is not None else 0, w.info.shape[-2],
            DECODE=DECODERS[t.name], BLOCK=block, BLOCK_BYTES=block * t.block_bytes // t.block, ROWS=per,
            SKIP=starts is not None, num_warps=2,
        )  # fmt: skip

    def _gemm(
        self, out: Tensor, x: Tensor, w: Tensor, n_out: int, n_in: int, bias: Tensor | None, add: bool, precision: str
    ) -> None:
        t = x.shape[0]
        if not t:
            return
        bm, bn, warps, stages = pick(self.tiles.gemm, t)
        if precision != "ieee":
            bm, bn, warps, stages = 64, 64, 4, 2
        w = self._described(w, n_out, n_in, bn)
        gemm.gemm_kernel[(triton.cdiv(t, bm) * triton.cdiv(n_out, bn),)](
            x, w, x if bias is None else bias, out, t, n_out, n_in, x.stride(0), out.stride(0),
            TMA=self.tiles.tma, ADD=add, HAS_BIAS=bias is not None, EVEN_K=n_in % gemm.BK == 0, PRECISION=precision,
            BM=bm, BN=bn, BK=gemm.BK, GROUP=8, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def _described(self, w: Tensor, n_rows: int, n_in: int, bn: int) -> Any:
        """16-bit weights as the products take them: rows in blocks of [bn, BK], or an address (see `Tiles.tma`)."""
        if not self.tiles.tma:
            return w
        return TensorDescriptor(w, [n_rows, n_in], [n_in, 1], [bn, gemm.BK])

    # experts

    def route(self, out: Routing, logits: Tensor, spec: MoeSpec, bias: Any = None) -> None:
        t, n_expert = logits.shape
        e, n_blocks = triton.next_power_of_2(n_expert), max(1, triton.cdiv(t, router.TOKENS))
        counts = self.scratch("counts", n_blocks * e, torch.int32)
        totals = self.scratch("totals", e, torch.int32)
        self._top_k(out, logits, spec, bias, counts, (n_blocks, router.TOKENS, 4))
        cols = min(e, 16)
        router.scan_kernel[(e // cols,)](counts, totals, n_blocks, E=e, COLS=cols, BLOCKS=64)
        router.order_kernel[(n_blocks,)](
            out.ids, counts, totals, out.order, out.starts, t, n_expert,
            TOP_K=spec.n_expert_used, E=e, TOKENS=router.TOKENS,
        )  # fmt: skip

    def _top_k(
        self, out: Routing, logits: Tensor, spec: MoeSpec, bias: Any, counts: Tensor | None, shape: tuple[int, int, int]
    ) -> None:  # fmt: skip
        """ids and weights, and the counts of each block if wanted; shape: blocks, tokens of one, warps of one."""
        n_blocks, n_tokens, warps = shape
        t, n_expert = logits.shape
        router.topk_kernel[(n_blocks,)](
            logits, bias.floats() if bias else logits, out.ids, out.weights, out.ids if counts is None else counts, t,
            n_expert, spec.weight_scale, TOP_K=spec.n_expert_used, E=triton.next_power_of_2(n_expert),
            SIGMOID=spec.gating == "sigmoid", HAS_BIAS=bias is not None, NORM=spec.norm_weights,
            COUNT=counts is not None, TOKENS=n_tokens, RANKS=triton.next_power_of_2(spec.n_expert_used),
            num_warps=warps,
        )  # fmt: skip

    def _tile_map(self, routing: Routing, bm: int) -> tuple[Tensor, Tensor, int]:
        n, n_expert = routing.order.numel(), routing.starts.numel() - 1
        n_tiles = triton.cdiv(triton.cdiv(n, bm) + min(n, n_expert), 16) * 16  # alike for the compiler for every n
        maps = self.scratch(f"tiles{bm}", 2 * n_tiles, torch.int32)
        te, tr = maps[:n_tiles], maps[n_tiles : 2 * n_tiles]
        e = triton.next_power_of_2(n_expert)
        experts.tile_map_kernel[(triton.cdiv(n_tiles, 16),)](
            routing.starts, te, tr, n_expert, n_tiles, BM=bm, E=e, BLOCK=16, num_warps=4
        )
        return te, tr, n_tiles

    def fetched(self, w: Any, routing: Routing, last: bool = False) -> Tensor:
        """The bytes of a weight; of one in host memory, after fetching the experts that are routed to.

        `last`: no other tensor of these experts is fetched after it.
        """
        if w.host is not None:
            n_expert = w.info.shape[0]
            expert_bytes, n = w.info.n_bytes // n_expert, routing.ids.numel()
            words = min(gather.WORDS, 1 << (expert_bytes // 8).bit_length() - 1)
            data, line, filled, use = w.lines or (w.data, routing.ids, routing.ids, routing.ids)
            gather.gather_kernel[(triton.cdiv(expert_bytes // 8, words), n)](
                w.host, w.data, data, line, filled, routing.ids, n, expert_bytes, CACHED=w.lines is not None,
                WORDS=words, BLOCK=gather.BLOCK, num_warps=4,
            )  # fmt: skip
            if w.lines and last:
                gather.mark_kernel[(1,)](routing.ids, line, filled, use, n, BLOCK=gather.BLOCK, num_warps=1)
        return w.data

    def _expert_chunks(self, n_expert: int, n_weights: int) -> Any:
        per = max(1, self.tiles.scratch_weights // n_weights)
        return ((first, min(per, n_expert - first)) for first in range(0, n_expert, per))

    def expert_glu(
        self, out: Tensor, x: Tensor, routing: Routing, gate: Any, up: Any, activation: str,
        gate_bias: Any = None, up_bias: Any = None,
    ) -> None:  # fmt: skip
        n, n_ff = out.shape
        n_expert, _, d = gate.info.shape
        if not n:
            return
        few = gate.host is not None  # of the experts are touched: only those are fetched and decoded
        for w in (gate, up):
            if w:
                self.fetched(w, routing)
        bm, bn, warps, stages = pick(self.tiles.glu, n / n_expert)
        te, tr, n_tiles = self._tile_map(routing, bm)
        for first, m in self._expert_chunks(n_expert, 2 * n_ff * d):
            n_rows = n_ff if up else 2 * n_ff  # without `up` an expert is its gate, then its up
            starts = routing.starts if few else None
            with self.decoded.fill(behind=few) as g:
                u = g[(m * n_rows if up else n_ff) * d :]
                self._decode(g, gate, first * n_rows, m * n_rows, d, starts)
                if up:
                    self._decode(u, up, first * n_rows, m * n_rows, d, starts)
            g, u = (self._described(w, (m - 1) * n_rows + n_ff, d, bn) for w in (g, u))
            experts.expert_glu_kernel[(triton.cdiv(n_ff, bn), n_tiles)](
                x, g, u, gate_bias.floats() if gate_bias else x, up_bias.floats() if up_bias else x, out, routing.order,
                routing.starts, te, tr, first, m, n, n_ff, d, x.stride(0), n_rows, TMA=self.tiles.tma,
                TOP_K=routing.ids.shape[1], HAS_BIAS=gate_bias is not None, GELU=activation == "gelu",
                EVEN_K=d % gemm.BK == 0, PRECISION="ieee", BM=bm, BN=bn, BK=gemm.BK, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            self.decoded.done()

    def expert_down(self, out: Tensor, h: Tensor, routing: Routing, down: Any, bias: Any = None) -> None:
        n, n_ff = h.shape
        n_expert, d, _ = down.info.shape
        if not n:
            return
        few = down.host is not None
        self.fetched(down, routing, last=True)
        bm, bn, warps, stages = pick(self.tiles.down, n / n_expert)
        te, tr, n_tiles = self._tile_map(routing, bm)
        for first, m in self._expert_chunks(n_expert, n_ff * d):
            with self.decoded.fill(behind=few) as weights:
                self._decode(weights, down, first * d, m * d, n_ff, routing.starts if few else None)
            w = self._described(weights, m * d, n_ff, bn)
            experts.expert_down_kernel[(triton.cdiv(d, bn), n_tiles)](
                h, w, bias.floats() if bias else h, out, routing.order, routing.starts, te, tr, first, m, n, d, n_ff,
                d, TMA=self.tiles.tma, HAS_BIAS=bias is not None, EVEN_K=n_ff % gemm.BK == 0, PRECISION="ieee",
                BM=bm, BN=bn, BK=gemm.BK, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            self.decoded.done()

    def combine(self, x: Tensor, y: Tensor, routing: Routing) -> None:
        t, n = x.shape
        block = min(1024, triton.next_power_of_2(n))
        if t:
            rows.combine_kernel[(t, triton.cdiv(n, block))](
                x, y, routing.weights, n, x.stride(0), TOP_K=routing.ids.shape[1], BLOCK=block
            )  # fmt: skip

    # attention

    def kv_store(self, cache: KVLayer, k: Tensor, v: Tensor, state: StepState) -> None:
        t, n_kv, dim = k.shape
        n = n_kv * dim
        block = min(1024, triton.next_power_of_2(n))
        if t:
            rows.kv_store_kernel[(t, triton.cdiv(n, block))](
                k, v, cache.k, cache.v, state.kv_slots, n, k.stride(0), v.stride(0), BLOCK=block
            )  # fmt: skip

    def attention(
        self, out: Tensor, q: Tensor, cache: KVLayer, state: StepState, spec: AttentionSpec, sinks: Any = None
    ) -> None:
        t, n_head, dim = q.shape
        n_seq, n_block = state.block_table.shape
        if not t:
            return
        c = max(16, triton.next_power_of_2(dim))
        bm, bn, warps, stages = self.tiles.attention_wide if c > 128 else self.tiles.attention
        bm, bn = bm if t >= bm else 16, min(bn, state.page)
        k, v = (x.view(x.shape[0], -1) for x in (cache.k, cache.v))
        if self.tiles.tma:
            k, v = (TensorDescriptor.from_tensor(x, [bn, c]) for x in (k, v))
        attention.attention_kernel[(n_head, triton.cdiv(t, bm) + n_seq)](
            q, k, v, out, sinks.floats() if sinks else q, state.positions, state.seq_start,
            state.block_table, spec.scale, n_seq, n_block, n_head // spec.n_head_kv,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), cache.k.stride(0),
            TMA=self.tiles.tma, PAGE=state.page, WINDOW=spec.window, HAS_SINKS=sinks is not None,
            C=c, DIM=dim, BM=bm, BN=bn, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    # recurrent layers

    def conv1d(self, out: Tensor, x: Tensor, weight: Any, cache: RecurrentLayer, state: StepState) -> None:
        t, n = x.shape
        n_seq, n_conv = state.state_slots.shape[0], weight.info.shape[1]
        where = (cache.conv, state.state_slots, state.positions, state.seq_start)
        if t:
            deltanet.conv_kernel[(triton.cdiv(t, 16), triton.cdiv(n, 128))](
                x,
                weight.floats(),
                out,
                *where,
                n_seq,
                t,
                n,
                x.stride(0),
                out.stride(0),
                TAPS=n_conv,
                TOKENS=16,
                BLOCK=128,
            )
            deltanet.conv_state_kernel[(n_seq, triton.cdiv(n, 128))](x, *where, n, x.stride(0), TAPS=n_conv, BLOCK=128)

    def delta_net(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, dt_bias: Any, a: Any,
        cache: RecurrentLayer, state: StepState, spec: DeltaNetSpec,
    ) -> None:  # fmt: skip
        t, n_seq, h, chunk = q.shape[0], state.state_slots.shape[0], spec.n_v_head, deltanet.CHUNK
        if not t:
            return
        n_chunks = triton.cdiv(t, chunk) + n_seq - 1
        n = n_chunks * h * chunk
        decay = self.scratch("decay", n, torch.float32)
        u0, w = (self.scratch(f"delta_{s}", n * d, self.act_dtype) for s, d in (("u", spec.v_dim), ("w", spec.k_dim)))
        p = self.scratch("delta_p", n * chunk, self.act_dtype)
        kd, vd = (max(16, triton.next_power_of_2(d)) for d in (spec.k_dim, spec.v_dim))
        scale = spec.k_dim**-0.5
        heads = (spec.n_k_head, h)
        dims = {"KD": kd, "DIM_K": spec.k_dim, "DIM_V": spec.v_dim, "CHUNK": chunk}
        deltanet.prepare_kernel[(n_chunks, h)](
            q, k, v, alpha, beta, dt_bias.floats(), a.floats(), decay, u0, w, p, state.seq_start, n_seq, scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            alpha.stride(0), beta.stride(0), *heads, VD=vd, num_warps=4, **dims,
        )  # fmt: skip
        bv = min(vd, 32)
        deltanet.scan_kernel[(vd // bv, h, n_seq)](
            q, k, out, decay, u0, w, p, cache.s, state.state_slots, state.positions, state.seq_start, scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), out.stride(0), out.stride(1), *heads, BV=bv,
            num_warps=4, num_stages=2, **dims,
        )  # fmt: skip
