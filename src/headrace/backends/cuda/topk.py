"""The greatest logits of each row: programs find those of a block of the vocabulary, one program a row merges them.

A logit and its id are one int64 that sorts as wanted: above the float as an integer of the same order, below the
complement of the id. So no two are equal, and any order of the search gives the same.
"""

import triton
import triton.language as tl

from .footprint import VOCAB_BLOCK

BLOCK = VOCAB_BLOCK
KEYS_PER_WARP = 512
"""Of a search: 16 a thread stay in registers."""
SIGN, MAGNITUDE, INFINITY = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1), tl.constexpr(0x7F800000)
LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def _best(keys, K: tl.constexpr, RANKS: tl.constexpr):
    """int64 [RANKS]: the K greatest keys in falling order, then LEAST."""
    r = tl.arange(0, RANKS)
    best = tl.full((RANKS,), LEAST, tl.int64)
    for rank in range(K):
        top = tl.max(keys, 0)
        best = tl.where(r == rank, top, best)
        keys = tl.where(keys == top, LEAST, keys)
    return best


@triton.jit
def top_k_block_kernel(logits, keys, n, row_stride, K: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """keys [M, n_blocks, RANKS] of logits [M, n]; -0 counts as 0, a NaN, whatever its sign, as the greatest. Grid:
    (n_blocks, M)."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(logits + row * row_stride + i, mask=i < n, other=0.0).to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    rank = tl.where(magnitude > INFINITY, MAGNITUDE, tl.where(bits < 0, -magnitude, magnitude))
    key = tl.where(i < n, (rank.to(tl.int64) << 32) + (i ^ MAGNITUDE), LEAST)
    out = keys + (row * tl.num_programs(0) + block) * RANKS + tl.arange(0, RANKS)
    tl.store(out, _best(key, K, RANKS))


@triton.jit
def top_k_merge_kernel(keys, values, ids, n, K: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """values, ids [M, K] of keys [M, n]. Grid: (M,)."""
    row, i, r = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, RANKS)
    best = _best(tl.where(i < n, tl.load(keys + row * n + i, mask=i < n, other=0), LEAST), K, RANKS)
    rank = (best >> 32).to(tl.int32)
    value = tl.where(rank < 0, -rank | SIGN, rank).to(tl.float32, bitcast=True)
    tl.store(values + row * K + r, value, mask=r < K)
    tl.store(ids + row * K + r, ((best & MAGNITUDE) ^ MAGNITUDE).to(tl.int32), mask=r < K)
