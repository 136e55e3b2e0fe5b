"""The op table of the decode phase on CUDA: products by matvec.py, the rest as in ops.py."""

from typing import Any

import torch
import triton

from ...spec import DeltaNetSpec, MoeSpec
from ..base import RecurrentLayer, Routing, StepState
from . import decode_deltanet, matvec
from .decoders import DECODERS, decode_block
from .ops import CudaOps

Tensor = torch.Tensor
ROWS = {256: 1, 128: 1, 64: 4, 32: 8}
"""Rows a program by the weights of a block (H200, Q4_K 512 x 2048: 4 rows 9.6 us, 1 row with unrolling 4.0)."""
UNROLL = 4
"""Blocks of a row whose loads are in flight together."""


class DecodeOps(CudaOps):
    """Shares scratch and tables with the prefill phase's ops."""

    def __init__(self, ops: CudaOps) -> None:
        self.__dict__ = ops.__dict__

    def _format(self, w: Any) -> tuple[int, dict[str, Any]]:
        """(weights a decode step yields, constants of the kernels)."""
        t = w.info.type
        block = decode_block(t.name, t.block)
        rows, act = ROWS[block], self.triton_act
        if t.name == "F32":
            act = triton.language.float32
        constants = {
            "ACT": act, "DECODE": DECODERS[t.name], "BLOCK": block, "BLOCK_BYTES": block * t.block_bytes // t.block,
            "ROWS": rows, "UNROLL": UNROLL, "num_warps": 1,
        }  # fmt: skip
        return block, constants

    def linear(self, out: Tensor, x: Tensor, w: Any, bias: Any = None, *, add: bool = False) -> None:
        t, n_in = x.shape
        n_out = w.info.shape[0] if len(w.info.shape) > 1 else 1
        block, constants = self._format(w)
        if t:
            matvec.matvec_kernel[(triton.cdiv(n_out, constants["ROWS"]), t)](
                x, w.data, self.lut(w.info.type.name), bias.floats() if bias else x, out, n_out, n_in // block,
                w.info.type.row_bytes(n_in), x.stride(0), out.stride(0),
                ADD=add, HAS_BIAS=bias is not None, **constants,
            )  # fmt: skip

    def expert_glu(
        self, out: Tensor, x: Tensor, routing: Routing, gate: Any, up: Any, activation: str,
        gate_bias: Any = None, up_bias: Any = None,
    ) -> None:  # fmt: skip
        n, n_ff = out.shape
        n_expert, _, d = gate.info.shape
        if not n:
            return
        if up and up.info.type != gate.info.type:  # a program decodes one type
            g, u = self.scratch("glu", 2 * n * n_ff, torch.float32)[: 2 * n * n_ff].view(2, n, n_ff)
            self._expert_product(g, x, routing, gate, gate_bias)
            self._expert_product(u, x, routing, up, up_bias)
            self.glu(out, g, u, activation)
            return
        block, constants = self._format(gate)
        row_bytes, expert_bytes = gate.info.type.row_bytes(d), gate.info.n_bytes // n_expert
        g = self.fetched(gate, routing)
        u = self.fetched(up, routing) if up else g[n_ff * row_bytes :]
        matvec.expert_glu_vec_kernel[(triton.cdiv(n_ff, constants["ROWS"]), n)](
            x, g, u, self.lut(gate.info.type.name), gate_bias.floats() if gate_bias else x,
            up_bias.floats() if up_bias else x, out, routing.ids, n_ff, d // block, row_bytes, expert_bytes,
            x.stride(0), TOP_K=routing.ids.shape[1], HAS_BIAS=gate_bias is not None, GELU=activation == "gelu",
            **constants,
        )  # fmt: skip

    def expert_down(self, out: Tensor, h: Tensor, routing: Routing, down: Any, bias: Any = None) -> None:
        if out.shape[0]:
            self._expert_product(out, h, routing, down, bias, last=True)

    def _expert_product(
        self, out: Tensor, x: Tensor, routing: Routing, w: Any, bias: Any, last: bool = False
    ) -> None:  # fmt: skip
        """out [entry, n_out] from x of as many rows or a row per token."""
        n, n_out = out.shape
        n_expert, _, n_in = w.info.shape
        block, constants = self._format(w)
        matvec.expert_matvec_kernel[(triton.cdiv(n_out, constants["ROWS"]), n)](
            x, self.fetched(w, routing, last), self.lut(w.info.type.name), bias.floats() if bias else x, out,
            routing.ids, n_out, n_in // block, w.info.type.row_bytes(n_in), w.info.n_bytes // n_expert, x.stride(0),
            TOP_K=n // x.shape[0], HAS_BIAS=bias is not None, **constants,
        )  # fmt: skip

    def route(self, out: Routing, logits: Tensor, spec: MoeSpec, bias: Any = None) -> None:
        """Leaves order and starts unwritten."""
        t = logits.shape[0]
        if t:
            self._top_k(out, logits, spec, bias, None, (t, 1, 1))

    def conv1d(self, out: Tensor, x: Tensor, weight: Any, cache: RecurrentLayer, state: StepState) -> None:
        t, n = x.shape
        n_conv, block = weight.info.shape[1], decode_deltanet.CHANNELS
        assert t == state.state_slots.shape[0], "a decode step has one token of each sequence"
        if t:
            decode_deltanet.conv_token_kernel[(triton.cdiv(n, block), t)](
                x, weight.floats(), out, cache.conv, state.state_slots, state.positions, n, x.stride(0), out.stride(0),
                TAPS=n_conv, ROWS=triton.next_power_of_2(n_conv), BLOCK=block, num_warps=1,
            )  # fmt: skip

    def delta_net(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, dt_bias: Any, a: Any,
        cache: RecurrentLayer, state: StepState, spec: DeltaNetSpec,
    ) -> None:  # fmt: skip
        t, kd = q.shape[0], triton.next_power_of_2(spec.k_dim)
        bv = min(decode_deltanet.COLUMNS, triton.next_power_of_2(spec.v_dim))
        assert t == state.state_slots.shape[0], "a decode step has one token of each sequence"
        if t:
            decode_deltanet.delta_token_kernel[(triton.cdiv(spec.v_dim, bv), spec.n_v_head, t)](
                q, k, v, alpha, beta, dt_bias.floats(), a.floats(), out, cache.s, state.state_slots, state.positions,
                spec.k_dim**-0.5, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                alpha.stride(0), beta.stride(0), out.stride(0), out.stride(1), spec.n_k_head, spec.n_v_head,
                KD=kd, DIM_K=spec.k_dim, DIM_V=spec.v_dim, BV=bv,
                num_warps=max(1, kd * bv // decode_deltanet.WARP_NUMBERS),
            )  # fmt: skip
