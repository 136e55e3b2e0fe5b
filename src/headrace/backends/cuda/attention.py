"""Flash attention over the paged KV cache.

Keys are walked in tiles of BN that start at multiples of BN of the absolute position, in rising order; a tile that a
row does not see leaves its sums untouched to the last bit. So a row's result does not depend on its neighbours. Tiles
that every row sees skip the masks; multiply-adds are spelled out as fused ones, so that both loops round alike.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _page_rows(
    cache, line, kv, cache_row, TMA: tl.constexpr, C: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """[BN, C]: one head's part of BN rows of a cache, by descriptor or by address; columns from DIM on are 0."""
    c = tl.arange(0, C)[None, :]
    if TMA:
        rows = cache.load([line, kv])
        if C != DIM:  # the columns beyond belong to the next head
            rows = tl.where(c < DIM, rows, 0.0)
    else:
        at = cache + (line + tl.arange(0, BN)).to(tl.int64)[:, None] * cache_row + kv + c
        if C == DIM:
            rows = tl.load(at)
        else:
            rows = tl.load(at, mask=c < DIM, other=0.0)
    return rows


@triton.jit
def _tile(
    qt, m, total, acc, n0, pos, last, k_cache, v_cache, pages, kv, cache_row, scale,
    MASKED: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, C: tl.constexpr,
    DIM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of keys folded into (m, total, acc): the largest score, the sum of exponentials, the weighted values."""
    n = n0 + tl.arange(0, BN)
    line = tl.load(pages + n0 // PAGE) * PAGE + n0 % PAGE
    k = _page_rows(k_cache, line, kv, cache_row, TMA, C, DIM, BN)
    z = tl.dot(qt, k.T)
    if MASKED:
        visible = n[None, :] <= pos[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > pos[:, None] - WINDOW)
        z = tl.where(visible, z, float("-inf"))
    m_new = tl.maximum(m, tl.max(z, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new) * -scale
    p = tl.exp2(tl.fma(z, scale, base[:, None]))
    alpha = tl.where(m_new == m, 1.0, tl.exp2(tl.fma(m, scale, base)))
    total = tl.fma(total, alpha, tl.sum(p, 1))
    v = _page_rows(v_cache, line, kv, cache_row, TMA, C, DIM, BN)
    if MASKED:  # rows of the page that nobody wrote
        v = tl.where((n <= last)[:, None], v, 0.0)
    return m_new, total, tl.dot(p.to(v.dtype), v, acc * alpha[:, None])


@triton.jit(do_not_specialize=["n_seq", "n_block"])
def attention_kernel(
    q, k_cache, v_cache, out, sinks, positions, seq_start, block_table, scale, n_seq, n_block, group,
    q_token, q_head, out_token, out_head, cache_row,
    TMA: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    C: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: BM tokens of one sequence x one head. Grid: (H, tiles of the ubatch + n_seq); late tokens, which
    see the most keys, start first. The caches are [rows, n_kv * DIM]: with TMA tensor descriptors in
    blocks of [BN, C], else pointers; BN divides PAGE."""
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
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
    scale *= LOG2_E  # exponentials are powers of two
    rows = row0 + tl.arange(0, BM)
    live = rows < stop
    safe = tl.minimum(rows, stop - 1)
    pos = tl.load(positions + safe)
    c = tl.arange(0, C)
    qt = tl.load(
        q + safe.to(tl.int64)[:, None] * q_token + head * q_head + c[None, :], mask=c[None, :] < DIM, other=0.0
    )
    qt = qt.to(k_cache.dtype if TMA else k_cache.dtype.element_ty)
    kv = (head // group) * DIM
    pages = block_table + s * n_block
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if HAS_SINKS:  # one more logit, without a value
        m = tl.zeros((BM,), tl.float32) + tl.load(sinks + head) * LOG2_E / scale
        total += 1.0
    acc = tl.zeros((BM, C), tl.float32)
    pos0 = tl.load(positions + row0)
    last = tl.load(positions + tl.minimum(row0 + BM, stop) - 1)
    begin, shared = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(pos0 - WINDOW + 1, 0) // BN * BN
        shared = tl.maximum(last - WINDOW + BN, 0) // BN * BN  # from here on every row sees a tile's keys
        for n0 in range(begin, shared, BN):
            m, total, acc = _tile(qt, m, total, acc, n0, pos, last, k_cache, v_cache, pages, kv, cache_row, scale,
                                  True, TMA, PAGE, WINDOW, C, DIM, BN)  # fmt: skip
        begin = tl.maximum(begin, shared)
    full = tl.maximum((pos0 + 1) // BN * BN, begin)
    for n0 in range(begin, full, BN):
        m, total, acc = _tile(qt, m, total, acc, n0, pos, last, k_cache, v_cache, pages, kv, cache_row, scale,
                              False, TMA, PAGE, WINDOW, C, DIM, BN)  # fmt: skip
    for n0 in range(full, last + 1, BN):
        m, total, acc = _tile(qt, m, total, acc, n0, pos, last, k_cache, v_cache, pages, kv, cache_row, scale,
                              True, TMA, PAGE, WINDOW, C, DIM, BN)  # fmt: skip
    acc = acc / total[:, None]
    op = out + rows.to(tl.int64)[:, None] * out_token + head * out_head + c[None, :]
    tl.store(op, acc.to(out.dtype.element_ty), mask=live[:, None] & (c < DIM)[None, :])
