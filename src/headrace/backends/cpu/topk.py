"""The greatest logits of each row: every thread finds those of its part of the vocabulary, one merges them.

A logit and its id are one int64 that sorts as wanted: above the float as an integer of the same order, below the
complement of the id.
"""

from .native import bits_f32, i32, i64, inner, op, put_f32, put_i32, put_i64
from .team import barrier, share, size

CHUNK = 128
"""Logits that are passed over together when none of them is greater than the least that is kept."""
SIGN, MAGNITUDE, INFINITY = -(1 << 31), (1 << 31) - 1, 0x7F800000
LEAST = -(1 << 63)


@inner
def _rank(bits):
    """The bits of a float32, as an integer of its order: -0 is 0, and a NaN, whatever its sign, is the greatest."""
    magnitude = bits & MAGNITUDE
    if magnitude > INFINITY:
        return MAGNITUDE
    return magnitude if bits >= 0 else -magnitude


@inner
def _most(x, first, last):
    most = SIGN
    for i in range(first, last):
        most = max(most, _rank(i32(x, i)))
    return most


@inner
def _keep(best, k, key):
    """Puts a key in its place among the k greatest, if it is one of them."""
    if key <= i64(best, k - 1):
        return
    j = k - 1
    while j > 0 and key > i64(best, j - 1):
        put_i64(best, j, i64(best, j - 1))
        j -= 1
    put_i64(best, j, key)


@op
def top_k(tid, team, a):
    """M, V, K | values, ids [M, K] | logits, s0 | scratch: K int64 a row and thread"""
    n_rows, n, k, values, ids, logits, logits0 = (
        i64(a, 0),
        i64(a, 1),
        i64(a, 2),
        i64(a, 3),
        i64(a, 4),
        i64(a, 5),
        i64(a, 6),
    )
    scratch, row_bytes = i64(a, 7), 8 * k * size(team)
    begin, end = share(tid, team, n)
    for row in range(n_rows):
        best, x = scratch + row * row_bytes + 8 * k * tid, logits + row * logits0
        for j in range(k):
            put_i64(best, j, LEAST)
        for first in range(begin, end, CHUNK):
            last = min(first + CHUNK, end)
            if _most(x, first, last) > i64(best, k - 1) >> 32:
                for i in range(first, last):
                    _keep(best, k, (_rank(i32(x, i)) << 32) + (i ^ MAGNITUDE))
    barrier(team)
    begin, end = share(tid, team, n_rows)
    for row in range(begin, end):
        best = scratch + row * row_bytes
        for j in range(k, k * size(team)):
            _keep(best, k, i64(best, j))
        for j in range(k):
            rank, i = i64(best, j) >> 32, (i64(best, j) & MAGNITUDE) ^ MAGNITUDE
            put_f32(values, row * k + j, bits_f32(rank if rank >= 0 else SIGN - rank))
            put_i32(ids, row * k + j, i)
