"""Dense products on 16-bit weights: out [T, N] = x [T, K] @ w [N, K]^T, K in steps of 64 in rising order.

The order of a sum depends on K alone - never on T, on the tile's height or on what else runs - which is what makes
results bit-identical across micro-batches and placements (docs/numerics.md).
"""

import triton
import triton.language as tl

BK = 64
"""Step along K, for every product of the prefill phase."""


@triton.jit(do_not_specialize=["n_tokens"])
def gemm_kernel(
    x, w, bias, out, n_tokens, n_out, n_in, x_stride, out_stride,
    TMA: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles are walked in groups of GROUP rows of tiles, so that the weights of a group stay in L2."""
    pid = tl.program_id(0)
    n_m, n_n = tl.cdiv(n_tokens, BM), tl.cdiv(n_out, BN)
    first = pid // (GROUP * n_n) * GROUP
    height = tl.minimum(n_m - first, GROUP)
    m0 = (first + pid % (GROUP * n_n) % height) * BM
    n0 = pid % (GROUP * n_n) // height * BN
    rows = m0 + tl.arange(0, BM)
    cols = n0 + tl.arange(0, BN)
    k = tl.arange(0, BK)
    xp = x + tl.minimum(rows, n_tokens - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    if not TMA:
        wp = w + tl.minimum(cols, n_out - 1).to(tl.int64)[None, :] * n_in + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, n_in, BK):
        if EVEN_K:
            a = tl.load(xp + k0)
        else:
            a = tl.load(xp + k0, mask=k[None, :] < n_in - k0, other=0.0)
        if TMA:
            b = w.load([n0, k0]).T
        elif EVEN_K:
            b = tl.load(wp + k0)
        else:
            b = tl.load(wp + k0, mask=k[:, None] < n_in - k0, other=0.0)
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    inside = (rows < n_tokens)[:, None] & (cols < n_out)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < n_out, other=0.0).to(tl.float32)[None, :]
    op = out + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    if ADD:
        acc += tl.load(op, mask=inside, other=0.0).to(tl.float32)
    tl.store(op, acc.to(out.dtype.element_ty), mask=inside)
