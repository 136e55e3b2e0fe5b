"""Products with float weights as they lie in the file (F32, F16, BF16), and, by way of decoded rows, of every type
without kernels of its own. Activations stay float32."""

from functools import cache as once

from llvmlite import ir
from numba.extending import intrinsic

from .jit import jit
from .matmul import call7
from .native import _caller, call3, copy, i32, i64, inner, op
from .simd import F16, F32, I16, I64, ISA, V, vec
from .team import barrier, size, take

KINDS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a weight."""
TOKENS = (1, 4)
TILE = 4 if "avx512" in ISA else 2
"""Rows and tokens of a register tile: 16 sums of 16 lanes fill half of AVX-512's registers, 4 a quarter of AVX2's."""
PANEL_ROWS, PANEL_TOKENS = 16, 64
"""A panel's activations stay in L2 (half a megabyte for 2048 numbers a token) while its rows pass by."""


@intrinsic
def call8(tyctx, fn, a, b, c, d, e, f, g, h):
    return _caller(8)


def _weights(e, kind, w, at):
    """16 weights from number `at` on, as float32."""
    if kind == "F32":
        return e.load(w, at * 4, F32)
    if kind == "F16":
        return e.load(w, at * 2, F16).f32()
    return V(e, e.b.bitcast((e.load(w, at * 2, I16).zext() << 16).v, vec(F32)))


def _put(e, at, total, add):
    with e.b.if_else(e.b.icmp_signed("!=", add.v, ir.Constant(I64, 0))) as (yes, no):
        with yes:
            e.store(at, 0, total + e.load(at, 0, F32, 1))
        with no:
            e.store(at, 0, total)


def emit_tile(kind):
    """tile(w, wstep, x, xstep, n, y, ldy, add): y[t * ldy + r] (+)= TILE rows of n weights . TILE tokens."""

    def emit(e, w, wstep, x, xstep, n, y, ldy, add):
        def step(i, c):
            w, x, acc = c[0], c[1], c[2:]
            rows = [_weights(e, kind, w + wstep * r, 0) for r in range(TILE)]
            tokens = [e.load(x + xstep * t, 0, F32) for t in range(TILE)]
            acc = [e.fma(rows[r], tokens[t], acc[TILE * r + t]) for r in range(TILE) for t in range(TILE)]
            return [w + 16 * KINDS[kind], x + 64, *acc]

        out = e.loop(n >> 4, [w, x, *(e.zero(F32) for _ in range(TILE * TILE))], step)[2:]
        for r in range(TILE):
            for t in range(TILE):
                _put(e, y + ldy * (4 * t) + 4 * r, e.hsum(out[TILE * r + t]), add)

    return emit


def emit_dot(kind, T):
    """dot(w, x, xstep, n, y, ldy, add): y[t * ldy] (+)= one row of n weights . x[t], n a multiple of 32."""

    def emit(e, w, x, xstep, n, y, ldy, add):
        def step(i, c):
            w, x, acc = c[0], c[1], c[2:]
            halves = [_weights(e, kind, w, at) for at in (0, 16)]
            acc = [
                e.fma(halves[h], e.load(x + xstep * t, 64 * h, F32), acc[2 * t + h]) for t in range(T) for h in (0, 1)
            ]
            return [w + 32 * KINDS[kind], x + 128, *acc]

        blocks = n >> 5
        out = e.loop(blocks, [w, x, *(e.zero(F32) for _ in range(2 * T))], step)[2:]
        for t in range(T):
            total = e.hsum(out[2 * t] + out[2 * t + 1])
            _put(e, y + ldy * (4 * t), total, add)

    return emit


@once
def dots(kind):
    """Addresses of the kernels: a row with 1 and with 4 tokens, a tile."""
    build = jit().address
    rows = [build(f"dot_{kind}_{t}", 7, emit_dot(kind, t)) for t in TOKENS]
    return *rows, build(f"dots_{kind}", 8, emit_tile(kind))


@inner
def row_dots(dot1, dot4, w, x, xstep, n, y, ldy, n_tokens, add):
    t = 0
    while t + 4 <= n_tokens:
        call7(dot4, w, x + t * xstep, xstep, n, y + t * ldy * 4, ldy, add)
        t += 4
    while t < n_tokens:
        call7(dot1, w, x + t * xstep, xstep, n, y + t * ldy * 4, ldy, add)
        t += 1


@inner
def weight_row(decode, lut, w, n, block, block_bytes, mine):
    """The row's address as the dots read it: itself, or decoded to float32 in scratch."""
    if decode == 0:
        return w
    for b in range(n // block):
        call3(decode, w + b * block_bytes, mine + b * block * 4, lut)
    return mine


@inner
def panel(a, w, n_rows, x, ldx, k, y, ldy, n, add, mine):
    """n_rows (at most PANEL_ROWS) rows at w times n tokens; a[3:11] are the kernels, the decoder and its sizes."""
    dot1, dot4, tile, step = i64(a, 3), i64(a, 4), i64(a, 5), i64(a, 10)
    if i64(a, 6):
        for r in range(n_rows):
            weight_row(i64(a, 6), i64(a, 7), w + r * step, k, i64(a, 8), i64(a, 9), mine + r * k * 4)
        w, step = mine, k * 4
    for t0 in range(0, n, PANEL_TOKENS):
        n_tokens, r = min(PANEL_TOKENS, n - t0), 0
        whole = n_tokens // TILE * TILE
        xt, yt = x + t0 * ldx, y + t0 * ldy * 4
        while r + TILE <= n_rows and whole:
            for t in range(0, whole, TILE):
                call8(tile, w + r * step, step, xt + t * ldx, ldx, k, yt + (t * ldy + r) * 4, ldy, add)
            for rest in range(r, r + TILE):
                at = yt + (whole * ldy + rest) * 4
                row_dots(dot1, dot4, w + rest * step, xt + whole * ldx, ldx, k, at, ldy, n_tokens - whole, add)
            r += TILE
        while r < n_rows:
            row_dots(dot1, dot4, w + r * step, xt, ldx, k, yt + r * 4, ldy, n_tokens, add)
            r += 1


@op
def mul_mat_float(tid, team, a):
    """n tokens, n_in, m | dot1, dot4, tile, decode or 0, lut, block, block bytes, row bytes | w | x, x row bytes |
    y, y row floats, add | scratch, bytes a thread"""
    n, k, m, row_bytes, w = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 10), i64(a, 11)
    x, ldx, y, ldy, add = i64(a, 12), i64(a, 13), i64(a, 14), i64(a, 15), i64(a, 16)
    mine = i64(a, 17) + tid * i64(a, 18)
    chunk = max(1, min(PANEL_ROWS, m // (size(team) * 4)))
    r0 = take(team, 0, chunk)
    while r0 < m and n > 0:
        n_rows = min(m, r0 + chunk) - r0
        panel(a, w + r0 * row_bytes, n_rows, x, ldx, k, y + r0 * 4, ldy, n, add, mine)
        r0 = take(team, 0, chunk)


@op
def expert_mat_float(tid, team, a):
    """As mul_mat_float, for experts: n_in, m, E | dot1, dot4, tile, decode, lut, block, block bytes, row bytes | w |
    order, starts, entries a row of x | x, x row bytes | gathered x | y, y row floats | scratch, bytes a thread |
    gathered y"""
    k, m, n_expert, row_bytes, w = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 10), i64(a, 11)
    order, starts, per, x, ldx, gx = i64(a, 12), i64(a, 13), i64(a, 14), i64(a, 15), i64(a, 16), i64(a, 17)
    y, ldy, mine, gy = i64(a, 18), i64(a, 19), i64(a, 20) + tid * i64(a, 21), i64(a, 22)
    total = i32(starts, n_expert)
    i = take(team, 0, 16)
    while i < total:
        for j in range(i, min(total, i + 16)):
            copy(gx + j * k * 4, x + i32(order, j) // per * ldx, k * 4)
        i = take(team, 0, 16)
    barrier(team)
    parts = (m + PANEL_ROWS - 1) // PANEL_ROWS
    u = take(team, 1, 1)
    while u < n_expert * parts:
        e, r0 = u // parts, u % parts * PANEL_ROWS
        first = i32(starts, e)
        n = i32(starts, e + 1) - first
        if n > 0:
            n_rows, at = min(m, r0 + PANEL_ROWS) - r0, w + (e * m + r0) * row_bytes
            panel(a, at, n_rows, gx + first * k * 4, k * 4, k, gy + (first * m + r0) * 4, m, n, 0, mine)
        u = take(team, 1, 1)
    barrier(team)
    i = take(team, 2, 16)
    while i < total:
        for j in range(i, min(total, i + 16)):
            copy(y + i32(order, j) * ldy * 4, gy + j * m * 4, m * 4)
        i = take(team, 2, 16)


@op
def embed(tid, team, a):
    """n tokens, n, | decode, lut, block, block bytes, row bytes | w | ids | out, out row bytes"""
    n, k, decode, lut, block, block_bytes = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    row_bytes, w, ids, out, ldo = i64(a, 6), i64(a, 7), i64(a, 8), i64(a, 9), i64(a, 10)
    t = take(team, 0, 1)
    while t < n:
        weight_row(decode, lut, w + i32(ids, t) * row_bytes, k, block, block_bytes, out + t * ldo)
        t = take(team, 0, 1)
