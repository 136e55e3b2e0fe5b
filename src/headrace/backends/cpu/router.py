"""Which experts the tokens take: gate values, the largest of them, and the entries sorted by expert."""

import numpy as np

from .floats import exp, fast, sigmoid, sums
from .native import f32, f64, i32, i64, inner, op, put_f32, put_i32
from .team import barrier, share


@sums
def _maximum(x, n):
    most = f32(x, 0)
    for i in range(1, n):
        y = f32(x, i)
        most = y if y > most else most
    return most


@fast
def _exp(out, x, shift, n):
    for i in range(n):
        put_f32(out, i, exp(f32(x, i) - shift))


@sums
def _total(x, n):
    total = np.float32(0)
    for i in range(n):
        total += f32(x, i)
    return total


@inner
def _divide(x, by, n):
    for i in range(n):
        put_f32(x, i, f32(x, i) / by)


@inner
def _sigmoid(out, x, n):
    for i in range(n):
        put_f32(out, i, sigmoid(f32(x, i)))


@inner
def _sum(out, x, y, n):
    for i in range(n):
        put_f32(out, i, f32(x, i) + f32(y, i))


@inner
def _largest(ids, best, score, n, n_used):
    """The n_used largest in falling order; the first of equals wins. NaNs come last, so ids are always valid."""
    for e in range(n):
        x = f32(score, e)
        if e < n_used or x > f32(best, n_used - 1):
            j = min(e, n_used - 1)
            while j > 0 and x > f32(best, j - 1):
                put_f32(best, j, f32(best, j - 1))
                put_i32(ids, j, i32(ids, j - 1))
                j -= 1
            put_f32(best, j, x)
            put_i32(ids, j, e)


@inner
def sort_entries(ids, n, n_expert, order, starts):
    """Stable counting sort of the entries by expert."""
    for e in range(n_expert + 1):
        put_i32(starts, e, 0)
    for i in range(n):
        e = i32(ids, i)
        put_i32(starts, e + 1, i32(starts, e + 1) + 1)
    for e in range(n_expert):
        put_i32(starts, e + 1, i32(starts, e) + i32(starts, e + 1))
    for i in range(n):  # starts[e] runs to the end of e ...
        e = i32(ids, i)
        put_i32(order, i32(starts, e), i)
        put_i32(starts, e, i32(starts, e) + 1)
    for e in range(n_expert, 0, -1):  # ... which is where e + 1 starts
        put_i32(starts, e, i32(starts, e - 1))
    put_i32(starts, 0, 0)


@op
def route(tid, team, a):
    """T, E, R | logits, s0 | ids, weights, order, starts | bias or 0 | sigmoid, normalise | scale |
    scratch: 2 E + R floats a thread"""
    n_tok, n, n_used, logits, logits0 = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4)
    ids, weights, order, starts, bias = i64(a, 5), i64(a, 6), i64(a, 7), i64(a, 8), i64(a, 9)
    is_sigmoid, normalise, scale = i64(a, 10), i64(a, 11), np.float32(f64(a, 12))
    gate = i64(a, 13) + 4 * (2 * n + n_used) * tid
    biased, best = gate + 4 * n, gate + 8 * n
    first, last = share(tid, team, n_tok)
    for t in range(first, last):
        x, chosen, w = logits + t * logits0, ids + 4 * t * n_used, weights + 4 * t * n_used
        if is_sigmoid:
            _sigmoid(gate, x, n)
        else:
            _exp(gate, x, _maximum(x, n), n)
            _divide(gate, _total(gate, n), n)
        score = gate
        if bias:
            score = biased
            _sum(score, gate, bias, n)
        _largest(chosen, best, score, n, n_used)
        total = np.float32(0)
        for r in range(n_used):
            total += f32(gate, i32(chosen, r))
        by = scale / total if normalise else scale
        for r in range(n_used):
            put_f32(w, r, f32(gate, i32(chosen, r)) * by)
    barrier(team)
    if tid == 0:
        sort_entries(ids, n_tok * n_used, n, order, starts)
