"""The recurrent layers: short causal convolution, and the gated delta rule token by token.

Columns of a head's state S [k_dim, v_dim] never meet, so the threads share (sequence, head, strip of columns). A strip
of 32 columns is kept in L1 while its tokens pass; for a token or two the strips are 128 columns, which memory delivers
faster. S is read twice and written once a token.
"""

import math
from functools import cache as once
from itertools import chain

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from .floats import fast, sigmoid, silu
from .jit import jit
from .native import copy, f32, i32, i64, inner, op, put_f32
from .rowops import CHUNK, zero
from .team import barrier, share, take
from .tiles import F32, I64, LANES, VECTOR, call8, fma, load, spread, step, store

STRIP, WIDE_STRIP = 32, 128
FEW = 2
"""Tokens of a sequence up to which its state is worked on where it lies."""


@fast
def _product(out, x, y, n):
    for i in range(n):
        put_f32(out, i, f32(x, i) * f32(y, i))


@fast
def _add_product(out, x, y, n):
    for i in range(n):
        put_f32(out, i, f32(out, i) + f32(x, i) * f32(y, i))


@fast
def _four_taps(out, x0, x1, x2, x3, w, w_row, n):
    """The usual width in one pass."""
    w1, w2, w3 = w + w_row, w + 2 * w_row, w + 3 * w_row
    for i in range(n):
        y = f32(x0, i) * f32(w, i) + f32(x1, i) * f32(w1, i) + f32(x2, i) * f32(w2, i) + f32(x3, i) * f32(w3, i)
        put_f32(out, i, silu(y))


@fast
def _silu(x, n):
    for i in range(n):
        put_f32(x, i, silu(f32(x, i)))


@op
def conv1d(tid, team, a):
    """S, channels, taps | out, s0 | x, s0 | weight float32 [taps, channels] | conv | slots, positions, seq_start"""
    n_seq, n, taps, out, out0, x, x0 = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5), i64(a, 6)
    weight, conv, slots, positions, seq_start = i64(a, 7), i64(a, 8), i64(a, 9), i64(a, 10), i64(a, 11)
    pieces = (n + CHUNK - 1) // CHUNK
    first, last = share(tid, team, n_seq * pieces)
    for unit in range(first, last):
        s, column = unit // pieces, unit % pieces * CHUNK
        m, begin, end = min(CHUNK, n - column), i32(seq_start, s), i32(seq_start, s + 1)
        history = conv + 4 * (i32(slots, s) * (taps - 1) * n + column)
        if begin < end and i32(positions, begin) == 0:
            for i in range(taps - 1):
                zero(history + 4 * i * n, m)
        for t in range(begin, end):
            target, w = out + t * out0 + 4 * column, weight + 4 * column
            if taps == 4 and t - begin >= 3:
                x3 = x + t * x0 + 4 * column
                _four_taps(target, x3 - 3 * x0, x3 - 2 * x0, x3 - x0, x3, w, 4 * n, m)
                continue
            for i in range(taps):
                back = t - begin - (taps - 1) + i  # tokens after the first
                source = x + (begin + back) * x0 + 4 * column if back >= 0 else history + 4 * (taps - 1 + back) * n
                if i:
                    _add_product(target, source, w + 4 * i * n, m)
                else:
                    _product(target, source, w, m)
            _silu(target, m)
        for i in range(taps - 1):
            back = end - begin - (taps - 1) + i
            source = x + (begin + back) * x0 + 4 * column if back >= 0 else history + 4 * (taps - 1 + back) * n
            if end > begin:
                copy(history + 4 * i * n, source, 4 * m)


def _delta_step(n_vectors, n_rows):
    """step(s, s_row, n, k, q, v, gate, out): one token for 16 n_vectors columns of S at address s, row stride in bytes;
    k, q of length n, a multiple of n_rows; gate: decay, rate, scale. S *= decay; S += k (rate (v - S^T k))^T;
    out = S^T q scale. Sums run in n_vectors x n_rows registers."""

    def emit(e, *args):
        b, (s, s_row, n, k, q, v, gate, out) = e.b, (x.v for x in args)
        columns = [I64(c) for c in range(n_vectors)]
        learnt, answer = ([[cgutils.alloca_once(b, VECTOR) for _ in range(n_rows)] for _ in columns] for _ in range(2))
        for cell in chain(*learnt, *answer):
            b.store(ir.Constant(VECTOR, None), cell)

        def rows():
            """The first of n_rows rows at each turn."""
            return cgutils.for_range_slice(b, I64(0), n, I64(n_rows), inc=True)

        def add(cell, x, y):
            b.store(fma(b, x, y, b.load(cell, typ=VECTOR)), cell)

        def summed(cells):
            parts = [b.load(cell, typ=VECTOR) for cell in cells]
            while len(parts) > 1:
                parts = [b.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]

        with rows() as (first, _):
            for j in range(n_rows):
                i = b.add(first, I64(j))
                key, row = spread(b, load(b, k, F32, i)), step(b, s, i, s_row)
                for c, cells in zip(columns, learnt, strict=True):
                    add(cells[j], key, load(b, row, VECTOR, c))
        decay, rate, scale = (spread(b, load(b, gate, F32, I64(i))) for i in range(3))
        u = [
            b.fmul(rate, b.fsub(load(b, v, VECTOR, c), b.fmul(decay, summed(cells))))
            for c, cells in zip(columns, learnt, strict=True)
        ]
        with rows() as (first, _):
            for j in range(n_rows):
                i = b.add(first, I64(j))
                key, query = spread(b, load(b, k, F32, i)), spread(b, load(b, q, F32, i))
                row = step(b, s, i, s_row)
                for c, cells, change in zip(columns, answer, u, strict=True):
                    new = fma(b, key, change, b.fmul(decay, load(b, row, VECTOR, c)))
                    store(b, new, row, c)
                    add(cells[j], query, new)
        for c, cells in zip(columns, answer, strict=True):
            store(b, b.fmul(summed(cells), scale), out, c)

    return emit


@once
def kernels():
    """Addresses of the step for STRIP and for WIDE_STRIP columns."""
    build = jit().address
    narrow, wide = _delta_step(STRIP // LANES, 2), _delta_step(WIDE_STRIP // LANES, 1)
    return build("delta_narrow", 8, narrow), build("delta_wide", 8, wide)


@inner
def _softplus(x):
    return x if x > 20 else math.log1p(math.exp(x))


@inner
def _delta_plain(s, s_row, n, k, q, v, gate, out, width):
    """_delta_step for any width and n, column by column."""
    decay, rate, scale = f32(gate, 0), f32(gate, 1), f32(gate, 2)
    for c in range(width):
        total = np.float32(0)
        for i in range(n):
            total += f32(s + i * s_row, c) * f32(k, i)
        u, answer = rate * (f32(v, c) - decay * total), np.float32(0)
        for i in range(n):
            new = decay * f32(s + i * s_row, c) + f32(k, i) * u
            put_f32(s + i * s_row, c, new)
            answer += new * f32(q, i)
        put_f32(out, c, answer * scale)


@op
def delta_net(tid, team, a):
    """T, S, Hk, Hv, k_dim, v_dim | q, s0, s1 | k, s0, s1 | v, s0, s1 | out, s0, s1 | alpha, s0 | beta, s0 |
    dt_bias, a float32 | state | slots, positions, seq_start | gates float32 [T, Hv, 3] | scratch, bytes a thread |
    kernels of a strip and of a wide one"""
    n_tok, n_seq, n_k_head, n_head, k_dim, v_dim = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    q, q0, q1, k, k0, k1 = i64(a, 6), i64(a, 7), i64(a, 8), i64(a, 9), i64(a, 10), i64(a, 11)
    v, v0, v1, out, out0, out1 = i64(a, 12), i64(a, 13), i64(a, 14), i64(a, 15), i64(a, 16), i64(a, 17)
    alpha, alpha0, beta, beta0, dt_bias, decay = i64(a, 18), i64(a, 19), i64(a, 20), i64(a, 21), i64(a, 22), i64(a, 23)
    state, slots, positions, seq_start = i64(a, 24), i64(a, 25), i64(a, 26), i64(a, 27)
    gates, mem = i64(a, 28), i64(a, 29) + tid * i64(a, 30)
    scale = np.float32(1.0 / math.sqrt(np.float64(k_dim)))
    first, last = share(tid, team, n_tok * n_head)
    for i in range(first, last):
        t, h = i // n_head, i % n_head
        x = np.float64(f32(alpha + t * alpha0, h)) + f32(dt_bias, h)
        put_f32(gates, 3 * i, np.float32(math.exp(f32(decay, h) * _softplus(x))))
        put_f32(gates, 3 * i + 1, sigmoid(f32(beta + t * beta0, h)))
        put_f32(gates, 3 * i + 2, scale)
    barrier(team)
    strip_width = WIDE_STRIP if n_tok <= FEW * n_seq and v_dim % WIDE_STRIP == 0 else np.int64(STRIP)
    strips = (v_dim + strip_width - 1) // strip_width
    unit = take(team, 0, 1)
    while unit < n_seq * n_head * strips:
        s, h, column = unit // (n_head * strips), unit // strips % n_head, unit % strips * strip_width
        begin, end, width = i32(seq_start, s), i32(seq_start, s + 1), min(strip_width, v_dim - column)
        home = state + 4 * ((i32(slots, s) * n_head + h) * k_dim * v_dim + column)
        strip, strip_row, home_row = home, 4 * v_dim, 4 * v_dim
        if end - begin > FEW and width <= STRIP:
            strip, strip_row = mem, 4 * STRIP
            for i in range(k_dim):
                copy(strip + i * strip_row, home + i * home_row, 4 * width)
        if begin < end and i32(positions, begin) == 0:
            for i in range(k_dim):
                zero(strip + i * strip_row, width)
        for t in range(begin, end):
            kt, qt = k + t * k0 + h % n_k_head * k1, q + t * q0 + h % n_k_head * q1
            vt, target = v + t * v0 + h * v1 + 4 * column, out + t * out0 + h * out1 + 4 * column
            gate = gates + 12 * (t * n_head + h)
            if width == WIDE_STRIP:
                call8(i64(a, 32), strip, strip_row, k_dim, kt, qt, vt, gate, target)
            elif width == STRIP and k_dim % 2 == 0:
                call8(i64(a, 31), strip, strip_row, k_dim, kt, qt, vt, gate, target)
            else:
                _delta_plain(strip, strip_row, k_dim, kt, qt, vt, gate, target, width)
        if strip != home:
            for i in range(k_dim):
                copy(home + i * home_row, strip + i * strip_row, 4 * width)
        unit = take(team, 0, 1)
