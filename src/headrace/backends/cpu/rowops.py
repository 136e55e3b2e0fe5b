"""Ops that go over rows of float32: norms, elementwise products and sums, rope, combining and gathering rows.

Rows are [n0, n1, n] with byte strides for the first two axes and adjacent numbers in the last; long rows are cut into
pieces of CHUNK numbers for the threads. Argument lists are in the docstrings, sizes in numbers, strides in bytes.
"""

import math

import numpy as np

from .floats import fast, gelu, put_f16, sigmoid, silu, sums
from .native import copy, f32, f64, i32, i64, inner, op, put_f32
from .team import share

CHUNK = 1024
ADD, SILU_GLU, GELU_GLU, TIMES_SIGMOID = range(4)


@inner
def zero(x, n):
    for i in range(n):
        put_f32(x, i, np.float32(0))


@sums
def sum_squares(x, n):
    total = np.float32(0)
    for i in range(n):
        total += f32(x, i) * f32(x, i)
    return total


@fast
def scale_row(out, x, scale, n):
    for i in range(n):
        put_f32(out, i, f32(x, i) * scale)


@fast
def _scale_row_by(out, x, scale, weight, n):
    for i in range(n):
        put_f32(out, i, f32(x, i) * scale * f32(weight, i))


@op
def norm(tid, team, a):
    """n0, n1, n | out, s0, s1 | x, s0, s1 | weight or 0 | eps | 1 for the mean of squares, 0 for their sum"""
    n0, n1, n = i64(a, 0), i64(a, 1), i64(a, 2)
    out, out0, out1, x, x0, x1 = i64(a, 3), i64(a, 4), i64(a, 5), i64(a, 6), i64(a, 7), i64(a, 8)
    weight, eps, mean = i64(a, 9), f64(a, 10), i64(a, 11)
    first, last = share(tid, team, n0 * n1)
    for row in range(first, last):
        i, j = row // n1, row % n1
        source, target = x + i * x0 + j * x1, out + i * out0 + j * out1
        squares = np.float64(sum_squares(source, n))
        if mean:
            squares /= n
        scale = np.float32(1.0 / math.sqrt(squares + eps))
        if weight:
            _scale_row_by(target, source, scale, weight, n)
        else:
            scale_row(target, source, scale, n)


@fast
def _add(out, x, y, n):
    for i in range(n):
        put_f32(out, i, f32(x, i) + f32(y, i))


@fast
def _silu_glu(out, gate, up, n):
    for i in range(n):
        put_f32(out, i, silu(f32(gate, i)) * f32(up, i))


@fast
def _gelu_glu(out, gate, up, n):
    for i in range(n):
        put_f32(out, i, gelu(f32(gate, i)) * f32(up, i))


@fast
def _times_sigmoid(out, x, gate, n):
    for i in range(n):
        put_f32(out, i, f32(x, i) * sigmoid(f32(gate, i)))


@op
def elementwise(tid, team, a):
    """n0, n1, n | out, s0, s1 | x, s0, s1 | y, s0, s1 | kind: ADD, ...; out may be x or y"""
    n0, n1, n = i64(a, 0), i64(a, 1), i64(a, 2)
    out, out0, out1, x, x0, x1 = i64(a, 3), i64(a, 4), i64(a, 5), i64(a, 6), i64(a, 7), i64(a, 8)
    y, y0, y1, kind = i64(a, 9), i64(a, 10), i64(a, 11), i64(a, 12)
    pieces = (n + CHUNK - 1) // CHUNK
    first, last = share(tid, team, n0 * n1 * pieces)
    for unit in range(first, last):
        row, start = unit // pieces, unit % pieces * CHUNK
        i, j, m = row // n1, row % n1, min(CHUNK, n - start)
        target = out + i * out0 + j * out1 + 4 * start
        left, right = x + i * x0 + j * x1 + 4 * start, y + i * y0 + j * y1 + 4 * start
        if kind == ADD:
            _add(target, left, right, m)
        elif kind == SILU_GLU:
            _silu_glu(target, left, right, m)
        elif kind == GELU_GLU:
            _gelu_glu(target, left, right, m)
        else:
            _times_sigmoid(target, left, right, m)


@op
def scale_by_sigmoid(tid, team, a):
    """n0, n1, n | x, s0, s1 | gate, s0: x[i] *= sigmoid(gate[i])"""
    n0, n1, n = i64(a, 0), i64(a, 1), i64(a, 2)
    x, x0, x1, gate, gate0 = i64(a, 3), i64(a, 4), i64(a, 5), i64(a, 6), i64(a, 7)
    first, last = share(tid, team, n0 * n1)
    for row in range(first, last):
        i, j = row // n1, row % n1
        at = x + i * x0 + j * x1
        scale_row(at, at, sigmoid(f32(gate + i * gate0, 0)), n)


@op
def gather_rows(tid, team, a):
    """n_rows, row bytes | out, s0 | x, s0 | rows int32"""
    n, n_bytes, out, out0, x, x0, rows = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5), i64(a, 6)
    first, last = share(tid, team, n)
    for i in range(first, last):
        copy(out + i * out0, x + i32(rows, i) * x0, n_bytes)


@op
def pad_rows(tid, team, a):
    """n rows, numbers, numbers with padding | out (rows adjacent) | x, s0"""
    n_rows, n, wide, out, x, x0 = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    first, last = share(tid, team, n_rows)
    for i in range(first, last):
        copy(out + 4 * i * wide, x + i * x0, 4 * n)
        zero(out + 4 * (i * wide + n), wide - n)


@fast
def add_scaled(out, x, scale, n):
    """out += scale * x"""
    for i in range(n):
        put_f32(out, i, f32(out, i) + scale * f32(x, i))


@op
def combine(tid, team, a):
    """T, D, R | x, s0 | y, s0 (rows t * R + r) | weights [T, R] | scratch: CHUNK floats a thread"""
    n_tokens, n, n_used = i64(a, 0), i64(a, 1), i64(a, 2)
    x, x0, y, y0, weights = i64(a, 3), i64(a, 4), i64(a, 5), i64(a, 6), i64(a, 7)
    total = i64(a, 8) + 4 * CHUNK * tid
    pieces = (n + CHUNK - 1) // CHUNK
    first, last = share(tid, team, n_tokens * pieces)
    for unit in range(first, last):
        t, start = unit // pieces, unit % pieces * CHUNK
        m = min(CHUNK, n - start)
        source = y + t * n_used * y0 + 4 * start
        scale_row(total, source, f32(weights, t * n_used), m)
        for r in range(1, n_used):
            add_scaled(total, source + r * y0, f32(weights, t * n_used + r), m)
        target = x + t * x0 + 4 * start
        _add(target, target, total, m)


@op
def add_expert_bias(tid, team, a):
    """n entries, n | y, s0 | ids int32 | bias float32 [E, n]: y[i] += bias[ids[i]]"""
    n_rows, n, y, y0, ids, bias = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    first, last = share(tid, team, n_rows)
    for i in range(first, last):
        _add(y + i * y0, y + i * y0, bias + 4 * n * i32(ids, i), n)


# rope -----------------------------------------------------------------------------------------------------------------


@op
def rope_table(tid, team, a):
    """T, pairs | positions | frequencies float32 | factors float32 or 0 | magnitude |
    table float32 [T, 2, pairs]: cos, sin

    The angle is rounded to float32 as everybody does; its cosine and sine are then exact to a rounding."""
    n, pairs, positions, freq, factors = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4)
    magnitude, table = f64(a, 5), i64(a, 6)
    first, last = share(tid, team, n)
    for t in range(first, last):
        p = np.float32(i32(positions, t))
        for i in range(pairs):
            turn = f32(freq, i)
            if factors:
                turn /= f32(factors, i)
            angle = np.float64(p * turn)
            put_f32(table, 2 * t * pairs + i, np.float32(math.cos(angle) * magnitude))
            put_f32(table, (2 * t + 1) * pairs + i, np.float32(math.sin(angle) * magnitude))


@fast
def _turn_halves(x, cos, sin, pairs):
    for i in range(pairs):
        p, q = f32(x, i), f32(x, pairs + i)
        put_f32(x, i, p * f32(cos, i) - q * f32(sin, i))
        put_f32(x, pairs + i, p * f32(sin, i) + q * f32(cos, i))


@fast
def _turn_neighbours(x, cos, sin, pairs):
    for i in range(pairs):
        p, q = f32(x, 2 * i), f32(x, 2 * i + 1)
        put_f32(x, 2 * i, p * f32(cos, i) - q * f32(sin, i))
        put_f32(x, 2 * i + 1, p * f32(sin, i) + q * f32(cos, i))


@op
def rope(tid, team, a):
    """T, H, pairs | x, s0, s1 | table | interleaved"""
    n, n_head, pairs, x, x0, x1 = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    table, interleaved = i64(a, 6), i64(a, 7)
    first, last = share(tid, team, n * n_head)
    for unit in range(first, last):
        t, h = unit // n_head, unit % n_head
        cos = table + 8 * t * pairs
        if interleaved:
            _turn_neighbours(x + t * x0 + h * x1, cos, cos + 4 * pairs, pairs)
        else:
            _turn_halves(x + t * x0 + h * x1, cos, cos + 4 * pairs, pairs)


# key and value cache --------------------------------------------------------------------------------------------------


@inner
def _store_row(row, is_f16, x, n):
    if is_f16:
        for i in range(n):
            put_f16(row, i, f32(x, i))
    else:
        copy(row, x, 4 * n)


@op
def kv_store(tid, team, a):
    """T, G, C | slots int32 | k cache, row bytes, is f16 | v cache, row bytes, is f16 | k, s0, s1 | v, s0, s1"""
    n, n_head, dim, slots = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3)
    first, last = share(tid, team, n)
    for t in range(first, last):
        for which in range(2):
            cache, row_bytes, is_f16 = i64(a, 4 + 3 * which), i64(a, 5 + 3 * which), i64(a, 6 + 3 * which)
            x, x0, x1 = i64(a, 10 + 3 * which), i64(a, 11 + 3 * which), i64(a, 12 + 3 * which)
            row = cache + i32(slots, t) * row_bytes
            for h in range(n_head):
                _store_row(row + h * dim * (2 if is_f16 else 4), is_f16, x + t * x0 + h * x1, dim)
