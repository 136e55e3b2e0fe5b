"""Flash attention over the paged KV cache.

Keys are walked in tiles of BN that start at multiples of BN of the absolute position, in rising order; a tile that a
row does not see leaves its sums untouched to the last bit. So a row's result does not depend on its neighbours.
"""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q, k_cache, v_cache, out, sinks, positions, seq_start, block_table, scale, n_seq, n_block, group,
    q_token, q_head, out_token, out_head, cache_row,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    C: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: BM tokens of one sequence x one head. Grid: (tiles of the ubatch + n_seq, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    s, first, n_before = 0, 0, 0
    stop = tl.load(seq_start + 1)
    n_tiles = tl.cdiv(stop, BM)
    while (s + 1 < n_seq) & (tile >= n_before + n_tiles):
        n_before += n_tiles
        s += 1
        first = stop
        stop = tl.load(seq_start + s + 1)
        n_tiles = tl.cdiv(stop - first, BM)
    row0 = first + (tile - n_before) * BM
    if row0 >= stop:
        return
    rows = row0 + tl.arange(0, BM)
    live = rows < stop
    safe = tl.minimum(rows, stop - 1)
    pos = tl.load(positions + safe)
    c = tl.arange(0, C)
    qt = tl.load(
        q + safe.to(tl.int64)[:, None] * q_token + head * q_head + c[None, :], mask=c[None, :] < DIM, other=0.0
    )
    qt = qt.to(k_cache.dtype.element_ty)
    kv = (head // group) * DIM
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if HAS_SINKS:  # one more logit, without a value
        m = tl.zeros((BM,), tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros((BM, C), tl.float32)
    last = tl.load(positions + tl.minimum(row0 + BM, stop) - 1)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(tl.load(positions + row0) - WINDOW + 1, 0) // BN * BN
    for n0 in range(begin, last + 1, BN):
        n = n0 + tl.arange(0, BN)
        page = tl.load(block_table + s * n_block + n // PAGE, mask=n <= last, other=0)
        line = (page * PAGE + n % PAGE).to(tl.int64) * cache_row + kv
        seen = (n <= last)[None, :] & (c < DIM)[:, None]
        kt = tl.load(k_cache + line[None, :] + c[:, None], mask=seen, other=0.0)
        z = tl.dot(qt, kt) * (scale * 1.4426950408889634)
        visible = n[None, :] <= pos[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > pos[:, None] - WINDOW)
        z = tl.where(visible, z, float("-inf"))
        m_new = tl.maximum(m, tl.max(z, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(z - base[:, None])
        alpha = tl.where(m_new == m, 1.0, tl.exp2(m - base))
        total = total * alpha + tl.sum(p, 1)
        vt = tl.load(v_cache + line[:, None] + c[None, :], mask=(n <= last)[:, None] & (c < DIM)[None, :], other=0.0)
        acc = tl.dot(p.to(vt.dtype), vt, acc * alpha[:, None])
        m = m_new
    acc = acc / total[:, None]
    op = out + rows.to(tl.int64)[:, None] * out_token + head * out_head + c[None, :]
    tl.store(op, acc.to(out.dtype.element_ty), mask=live[:, None] & (c < DIM)[None, :])
