"""Products of the decode phase: one program computes a few rows for one token, decoding the weights as it reads them.

The order of a sum is fixed by the width alone: lane k of a block adds up over the blocks, then the lanes are summed.
Weights are rounded to the activation dtype first, as in the prefill phase.
"""

import triton
import triton.language as tl

from .experts import _gelu, _silu


@triton.jit
def _dot_rows(base, rows, row_bytes, x, n_blocks, lut, act: tl.constexpr, DECODE: tl.constexpr, BLOCK: tl.constexpr,
              BLOCK_BYTES: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """float32 [ROWS]: rows of a quantised matrix times one token's x."""
    k = tl.arange(0, BLOCK)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    p = base + rows.to(tl.int64) * row_bytes
    for b in tl.range(0, n_blocks, loop_unroll_factor=UNROLL):  # several blocks' loads in flight
        w = DECODE(p + b * BLOCK_BYTES, lut).to(act).to(tl.float32)
        acc += w * tl.load(x + b * BLOCK + k).to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def matvec_kernel(
    x, w, lut, bias, out, n_out, n_blocks, row_bytes, x_stride, out_stride,
    ADD: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, DECODE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out [T, n_out] (+)= w x. Grid: (n_out / ROWS, T)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    inside = rows < n_out
    y = _dot_rows(w, tl.minimum(rows, n_out - 1), row_bytes, x + token * x_stride, n_blocks, lut, ACT, DECODE, BLOCK,
                  BLOCK_BYTES, ROWS, UNROLL)  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=inside, other=0.0)
    op = out + token * out_stride + rows
    if ADD:
        y += tl.load(op, mask=inside, other=0.0).to(tl.float32)
    tl.store(op, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def expert_glu_vec_kernel(
    x, gate, up, lut, gate_bias, up_bias, out, ids, n_ff, n_blocks, row_bytes, expert_bytes, x_stride,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr, ACT: tl.constexpr, DECODE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out [entry, n_ff] = act(gate x) * up x. Grid: (n_ff / ROWS, entries)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    entry = tl.program_id(1)
    e = tl.load(ids + entry).to(tl.int64)
    safe = tl.minimum(rows, n_ff - 1)
    xp = x + (entry // TOP_K).to(tl.int64) * x_stride
    at = e * expert_bytes
    g = _dot_rows(gate + at, safe, row_bytes, xp, n_blocks, lut, ACT, DECODE, BLOCK, BLOCK_BYTES, ROWS, UNROLL)
    u = _dot_rows(up + at, safe, row_bytes, xp, n_blocks, lut, ACT, DECODE, BLOCK, BLOCK_BYTES, ROWS, UNROLL)
    if HAS_BIAS:
        g += tl.load(gate_bias + e * n_ff + safe)
        u += tl.load(up_bias + e * n_ff + safe)
    h = (_gelu(g) if GELU else _silu(g)) * u
    tl.store(out + entry.to(tl.int64) * n_ff + rows, h.to(out.dtype.element_ty), mask=rows < n_ff)


@triton.jit
def expert_matvec_kernel(
    x, w, lut, bias, out, ids, n_out, n_blocks, row_bytes, expert_bytes, x_stride,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, DECODE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out [entry, n_out] = w x[entry // TOP_K]. Grid: (n_out / ROWS, entries)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    entry = tl.program_id(1)
    e = tl.load(ids + entry).to(tl.int64)
    safe = tl.minimum(rows, n_out - 1)
    xp = x + (entry // TOP_K).to(tl.int64) * x_stride
    y = _dot_rows(w + e * expert_bytes, safe, row_bytes, xp, n_blocks, lut, ACT, DECODE, BLOCK, BLOCK_BYTES, ROWS,
                  UNROLL)  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + e * n_out + safe)
    tl.store(out + entry.to(tl.int64) * n_out + rows, y.to(out.dtype.element_ty), mask=rows < n_out)
