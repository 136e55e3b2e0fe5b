"""Choosing experts and sorting the entries by expert, without atomics and without asking the host.

Three kernels: `topk_kernel` picks experts for a block of tokens and counts them; `scan_kernel` turns the counts of all
blocks into offsets; `order_kernel` writes every entry to its place. A token takes an expert at most once, so the stable
rank of an entry among those of its expert is the number of earlier tokens that took the expert.
"""

import triton
import triton.language as tl

TOKENS = 16
"""Tokens per block of topk_kernel and order_kernel."""
LOWEST = tl.constexpr(-(2**31))
"""Key of an expert that is not to be chosen (any more)."""


@triton.jit
def gate_of(x, top, total, SIGMOID: tl.constexpr):
    """Gate values of logits: their sigmoid, or the softmax of largest logit `top` and sum `total`."""
    return 1.0 / (1.0 + tl.exp(-x)) if SIGMOID else tl.exp(x - top) / total


@triton.jit(do_not_specialize=["n_tokens"])
def topk_kernel(
    logits, bias, ids, weights, counts, n_tokens, n_expert, weight_scale,
    TOP_K: tl.constexpr, E: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
    COUNT: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """ids, weights [T, TOP_K] by falling gate value, ties to the lower id, NaN last; if COUNT, counts [block, E].
    RANKS: TOP_K or more."""
    block = tl.program_id(0)
    t = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    e = tl.arange(0, E)[None, :]
    live = t < n_tokens
    x = tl.load(logits + t * n_expert + e, mask=live & (e < n_expert), other=float("-inf"))
    top = tl.where(live, tl.max(x, 1, keep_dims=True), 0.0)
    total = tl.sum(tl.exp(x - top), 1, keep_dims=True)
    score = gate_of(x, top, total, SIGMOID)
    if HAS_BIAS:
        score += tl.load(bias + e, mask=e < n_expert, other=0.0)
    # integers in the order of the scores: from sm_80 on a warp finds their maximum in one instruction
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST + 1)
    key = tl.where(e < n_expert, key, LOWEST)
    r = tl.arange(0, RANKS)[None, :]
    chosen = tl.zeros((TOKENS, RANKS), tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(key, 1, keep_dims=True)
        pick = tl.min(tl.where(key == best, e, E), 1, keep_dims=True)
        chosen = tl.where(r == rank, pick, chosen)
        key = tl.where(e == pick, LOWEST, key)
    wanted = live & (r < TOP_K)
    values = gate_of(tl.load(logits + t * n_expert + chosen, mask=wanted, other=float("-inf")), top, total, SIGMOID)
    if NORM:
        values /= tl.sum(values, 1, keep_dims=True)
    tl.store(ids + t * TOP_K + r, chosen, mask=wanted)
    tl.store(weights + t * TOP_K + r, values * weight_scale, mask=wanted)
    if COUNT:
        taken = live & (e < n_expert) & (key == LOWEST)
        tl.store(counts + block * E + tl.arange(0, E), tl.sum(taken.to(tl.int32), 0))


@triton.jit(do_not_specialize=["n_blocks"])
def scan_kernel(counts, totals, n_blocks, E: tl.constexpr, COLS: tl.constexpr, BLOCKS: tl.constexpr):
    """counts [n_blocks, E] becomes its exclusive running sum down the blocks; totals [E]. Grid: E / COLS."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    carry = tl.zeros((COLS,), tl.int32)
    for b0 in range(0, n_blocks, BLOCKS):
        b = b0 + tl.arange(0, BLOCKS)[:, None]
        p = counts + b * E + cols[None, :]
        c = tl.load(p, mask=b < n_blocks, other=0)
        tl.store(p, carry[None, :] + tl.cumsum(c, 0) - c, mask=b < n_blocks)
        carry += tl.sum(c, 0)
    tl.store(totals + cols, carry)


@triton.jit(do_not_specialize=["n_tokens"])
def order_kernel(
    ids, counts, totals, order, starts, n_tokens, n_expert,
    TOP_K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """order [T * TOP_K] and starts [n_expert + 1] from the scanned counts."""
    block = tl.program_id(0)
    t = block * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, E)
    total = tl.load(totals + e)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(starts + e + 1, end, mask=e < n_expert)
        tl.store(starts + e, end - total, mask=e == 0)
    took = tl.zeros((TOKENS, E), tl.int32)
    for r in tl.static_range(TOP_K):
        pick = tl.load(ids + t * TOP_K + r, mask=t < n_tokens, other=-1)
        took += (pick[:, None] == e[None, :]).to(tl.int32)
    place = (end - total + tl.load(counts + block * E + e))[None, :] + tl.cumsum(took, 0) - took
    for r in tl.static_range(TOP_K):
        pick = tl.load(ids + t * TOP_K + r, mask=t < n_tokens, other=-1)
        at = tl.sum(tl.where(pick[:, None] == e[None, :], place, 0), 1)
        tl.store(order + at, t * TOP_K + r, mask=t < n_tokens)
