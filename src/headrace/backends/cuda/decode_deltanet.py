"""The gated delta net and its short convolution for the decode phase: token s is the one new token of sequence s.

One launch each, where chunks of deltanet.py take two: what a sequence keeps is read and written once, by programs that
own their part of it. A sequence whose token has position 0 starts from zeros, whatever its slot holds.
"""

import triton
import triton.language as tl

from .deltanet import softplus

CHANNELS = 64
"""Channels of a convolution program of one warp: 8192 are 128 programs, one for each processor of a large card."""
COLUMNS = 16
"""Columns of the state that a program holds: 64-byte rows, 256 programs for 32 heads of 128 x 128."""
WARP_NUMBERS = 2048
"""Numbers of the state that a warp holds, 64 registers a thread; sums over k_dim then stay inside a warp up to 128."""


@triton.jit
def conv_token_kernel(
    x, weight, out, conv, state_slots, positions, n, x_token, out_token,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = silu(sum over taps of weight[c, i] * input i), the last of which is the token and the others move up by one
    in conv. Grid: (channels / BLOCK, S); ROWS: TAPS or more."""
    s = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None]
    c = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (i < TAPS) & (c < n)
    kept = conv + tl.load(state_slots + s).to(tl.int64) * (TAPS - 1) * n + i * n + c
    fresh = tl.load(positions + s) == 0
    old = tl.load(kept, mask=inside & (i < TAPS - 1) & (fresh == 0), other=0.0)
    new = tl.load(x + s * x_token + c, mask=c < n, other=0.0).to(tl.float32)
    inputs = tl.where(i == TAPS - 1, new, old)
    total = tl.sum(inputs * tl.load(weight + c * TAPS + i, mask=inside, other=0.0), 0, keep_dims=True)
    tl.debug_barrier()  # a row is written by threads that did not read it
    tl.store(kept - n, inputs, mask=inside & (i > 0))
    tl.store(out + s * out_token + c, (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty), mask=c < n)


@triton.jit
def delta_token_kernel(
    q, k, v, alpha, beta, dt_bias, a, out, state, state_slots, positions, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, alpha_token, beta_token, out_token, out_head, n_k_head, n_v_head,
    KD: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One step of the gated delta rule (`Ops.delta_net`) on BV columns of one head's state, all in float32. Grid:
    (DIM_V / BV, H, S); KD is DIM_K rounded up to a power of two."""
    head, s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, j = tl.arange(0, KD), tl.program_id(0) * BV + tl.arange(0, BV)
    imask, jmask = i < DIM_K, j < DIM_V
    slot = tl.load(state_slots + s).to(tl.int64) * n_v_head + head
    at = state + slot * DIM_K * DIM_V + i[:, None] * DIM_V + j[None, :]
    inside = imask[:, None] & jmask[None, :]
    fresh = tl.load(positions + s) == 0
    st = tl.load(at, mask=inside & (fresh == 0), other=0.0)
    # one axis each: loads of [KD, 1] would take their layout, and the whole state change its own for them
    kt = tl.load(k + s * k_token + head % n_k_head * k_head + i, mask=imask, other=0.0).to(tl.float32)[:, None]
    qt = tl.load(q + s * q_token + head % n_k_head * q_head + i, mask=imask, other=0.0).to(tl.float32)[:, None]
    vt = tl.load(v + s * v_token + head * v_head + j, mask=jmask, other=0.0).to(tl.float32)
    x = tl.load(alpha + s * alpha_token + head).to(tl.float32) + tl.load(dt_bias + head)
    b = 1.0 / (1.0 + tl.exp(-tl.load(beta + s * beta_token + head).to(tl.float32)))
    st *= tl.exp(tl.load(a + head) * softplus(x))
    u = b * (vt - tl.sum(st * kt, 0))
    st += kt * u[None, :]
    tl.store(at, st, mask=inside)
    y = tl.sum(st * qt, 0) * scale
    tl.store(out + s * out_token + head * out_head + j, y.to(out.dtype.element_ty), mask=jmask)
