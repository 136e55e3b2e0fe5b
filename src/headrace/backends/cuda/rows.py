"""Kernels that work row by row: norms, rope, gates, copies. All memory-bound; reductions stay inside one program.

Tensors are [T, H, n] views with strides; `n_inner` is H, so that row r is (r // H, r % H). The token count is never
specialised, tiles depend on the width alone: results do not change with the micro-batch.
"""

import triton
import triton.language as tl


@triton.jit
def _row_pointer(base, rows, n_inner, outer_stride, inner_stride):
    return base + (rows // n_inner).to(tl.int64) * outer_stride + (rows % n_inner) * inner_stride


@triton.jit(do_not_specialize=["n_rows"])
def norm_kernel(
    x, weight, out, n_rows, n, n_inner, x_outer, x_inner, out_outer, out_inner, eps,
    L2: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMS norm with weight, or L2 norm."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)[None, :]
    mask = (rows < n_rows)[:, None] & (k < n)
    v = tl.load(_row_pointer(x, rows, n_inner, x_outer, x_inner)[:, None] + k, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(v * v, 1)[:, None]
    if L2:
        y = v / tl.sqrt_rn(total + eps)
    else:
        y = v * (1.0 / tl.sqrt_rn(total / n + eps))
    if HAS_WEIGHT:
        y *= tl.load(weight + k, mask=k < n, other=0.0)
    op = _row_pointer(out, rows, n_inner, out_outer, out_inner)[:, None] + k
    tl.store(op, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def glu(a, b):
    """silu(a) * b"""
    return a * _sigmoid(a) * b


@triton.jit
def geglu(a, b):
    """gelu(a) * b, the tanh form."""
    return a * _sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a)) * b


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def times_sigmoid(a, b):
    return a * _sigmoid(b)


@triton.jit(do_not_specialize=["n_rows"])
def binary_kernel(
    a, b, out, n_rows, n, n_inner, a_outer, a_inner, b_outer, b_inner, b_last, out_outer, out_inner,
    OP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = OP(a, b) elementwise; strides of 0 in b broadcast it."""
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < n
    va = tl.load(_row_pointer(a, row, n_inner, a_outer, a_inner) + k, mask=mask).to(tl.float32)
    vb = tl.load(_row_pointer(b, row, n_inner, b_outer, b_inner) + k * b_last, mask=mask).to(tl.float32)
    tl.store(_row_pointer(out, row, n_inner, out_outer, out_inner) + k, OP(va, vb).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gather_rows_kernel(x, rows, out, n, x_stride, BLOCK: tl.constexpr):
    """out [M, n] = x[rows]."""
    i = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + tl.load(rows + i).to(tl.int64) * x_stride + k, mask=k < n)
    tl.store(out + i.to(tl.int64) * n + k, v.to(out.dtype.element_ty), mask=k < n)


@triton.jit
def embed_kernel(
    table, lut, ids, out, n_embd, row_bytes, DECODE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr
):
    """out float32 [T, n_embd]: one program decodes one block of one token's row."""
    token, b = tl.program_id(0), tl.program_id(1)
    row = tl.load(ids + token + tl.arange(0, 1)).to(tl.int64)
    w = DECODE(table + row * row_bytes + b * BLOCK_BYTES, lut)
    k = tl.arange(0, BLOCK)[None, :]
    tl.store(out + token.to(tl.int64) * n_embd + b * BLOCK + k, w)


@triton.jit
def rope_kernel(
    x, positions, inverse_frequencies, factors, n_head, x_token, x_head, magnitude,
    HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_FACTORS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotates HALF pairs of every head of one token in place; PAIRS and HEADS are rounded up to powers of two."""
    token = tl.program_id(0)
    i = tl.arange(0, PAIRS)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    freq = tl.load(inverse_frequencies + i, mask=i < HALF, other=0.0)
    if HAS_FACTORS:
        freq /= tl.load(factors + i, mask=i < HALF, other=1.0)
    angle = tl.load(positions + token).to(tl.float32) * freq
    cos, sin = tl.cos(angle) * magnitude, tl.sin(angle) * magnitude
    mask = (i < HALF) & (head < n_head)
    base = x + token.to(tl.int64) * x_token + head * x_head
    if INTERLEAVED:
        p0 = base + 2 * i
        p1 = p0 + 1
    else:
        p0 = base + i
        p1 = p0 + HALF
    a = tl.load(p0, mask=mask).to(tl.float32)
    b = tl.load(p1, mask=mask).to(tl.float32)
    tl.store(p0, (a * cos - b * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(p1, (a * sin + b * cos).to(x.dtype.element_ty), mask=mask)


@triton.jit
def kv_store_kernel(k, v, k_cache, v_cache, rows, n, k_token, v_token, BLOCK: tl.constexpr):
    """Rows of n = G * C numbers to their cache rows; heads of k and v are contiguous."""
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64) * n
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(
        k_cache + row + i,
        tl.load(k + token.to(tl.int64) * k_token + i, mask=mask).to(k_cache.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        v_cache + row + i,
        tl.load(v + token.to(tl.int64) * v_token + i, mask=mask).to(v_cache.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def combine_kernel(x, y, weights, n, x_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, n] += weights[t, r] * y[t * TOP_K + r] over r in rank order."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < n
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(TOP_K):
        w = tl.load(weights + token * TOP_K + r)
        total += w * tl.load(y + (token * TOP_K + r) * n + k, mask=mask, other=0.0).to(tl.float32)
    xp = x + token * x_stride + k
    tl.store(xp, tl.load(xp, mask=mask) + total, mask=mask)
