"""Products with quantised weights, for every format at once: the ops schedule, a descriptor's kernels compute.

    pack            activations to int8 tiles, once for all products that read them
    mul_mat         y (+)= packed x W^T
    mul_mat_id      the same over experts, entries sorted by expert; packs by itself; gate and up in one op

Weights lie regrouped (interleaved), or as in the file: then few tokens go row by row, and for many 16 rows at a time
are regrouped into a thread's scratch, which costs little once 12 tokens share it.
"""

from numba.extending import intrinsic

from .floats import silu
from .kernels import ACT_BYTES, GROUP_BYTES, QUANTIZE, REGROUP, ROW, ROW_BYTES, TILE, WIDEST_TILE
from .native import _caller, call3, copy, f32, i32, i64, inner, op, put_f32
from .team import barrier, share, size, take

MANY = 12
"""Tokens from which regrouping on the fly pays."""
TILE_TOKENS = 8
SPARE = 8
"""Spare packed tokens per expert, for its last tile."""


@intrinsic
def call5(tyctx, fn, a, b, c, d, e):
    return _caller(5)


@intrinsic
def call7(tyctx, fn, a, b, c, d, e, f, g):
    return _caller(7)


@inner
def tile_index(fmt, n):
    return min(i64(fmt, WIDEST_TILE), 0 if n <= 1 else 1 if n == 2 else 2 if n <= 4 else 3)


@inner
def by_rows(n, in_place):
    """Whether n tokens go row by row through the file's blocks."""
    return in_place != 0 and n < MANY


@inner
def regroup_rows(fmt, w, nb, dst):
    """16 rows of nb blocks at w, as in the file, to one group at dst."""
    stride, row_bytes, group_bytes = nb * i64(fmt, ROW_BYTES), i64(fmt, ROW_BYTES), i64(fmt, GROUP_BYTES)
    for b in range(nb):
        call3(i64(fmt, REGROUP), w + b * row_bytes, stride, dst + b * group_bytes)


@inner
def row_product(fmt, w, xq, xstep, nb, y, ldy, n, add):
    """One row as in the file x n singly packed tokens."""
    t = 0
    while t < n:
        i = 2 if n - t >= 4 else 1 if n - t >= 2 else 0
        call7(i64(fmt, ROW + i), w, xq + t * xstep, xstep, nb, y + t * ldy * 4, ldy, add)
        t += 1 << i


@op
def pack(tid, team, a):
    """fmt, n, nb | x, x row bytes | xq, in place"""
    fmt, n, nb, x, ldx, xq = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    T = 1 if by_rows(n, i64(a, 6)) else 1 << tile_index(fmt, n)
    step = i64(fmt, ACT_BYTES) * nb
    first, last = share(tid, team, n)
    for t in range(first, last):
        tile = xq + (t // T * T) * step
        call5(i64(fmt, QUANTIZE), x + t * ldx, nb, tile, T, t % T)


@op
def mul_mat(tid, team, a):
    """fmt, n, nb, m | w, in place | xq | y, y row floats, add | scratch, bytes a thread"""
    fmt, n, nb, m, w, in_place = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    xq, y, ldy, add = i64(a, 6), i64(a, 7), i64(a, 8), i64(a, 9)
    mine = i64(a, 10) + tid * i64(a, 11)
    row_bytes, step = i64(fmt, ROW_BYTES) * nb, i64(fmt, ACT_BYTES) * nb
    if n == 0:
        return
    if by_rows(n, in_place):
        chunk = max(1, min(64, m // (size(team) * 8)))
        r0 = take(team, 0, chunk)
        while r0 < m:
            for r in range(r0, min(m, r0 + chunk)):
                row_product(fmt, w + r * row_bytes, xq, step, nb, y + r * 4, ldy, n, add)
            r0 = take(team, 0, chunk)
        return
    ti = tile_index(fmt, n)
    T, tile = 1 << ti, i64(fmt, TILE + ti)
    groups = (m + 15) // 16
    chunk = max(1, min(64, groups // (size(team) * 8)))
    g0 = take(team, 0, chunk)
    while g0 < groups:
        for g in range(g0, min(groups, g0 + chunk)):  # a group's weights stay in cache for all tokens
            if (g + 1) * 16 > m:
                tail(fmt, w, in_place, xq, step, nb, y, ldy, n, add, m, T, mine)
                continue
            group = w + g * 16 * row_bytes
            if in_place:
                regroup_rows(fmt, group, nb, mine)
                group = mine
            for t in range(0, n, T):
                call7(tile, group, xq + t * step, nb, y + (g * 16 + t * ldy) * 4, ldy, n - t, add)
        g0 = take(team, 0, chunk)


@inner
def tail(fmt, w, in_place, xq, step, nb, y, ldy, n, add, m, T, mine):
    """The last m % 16 rows (of a matrix as in the file): a group of them and zero rows, into scratch."""
    first, row_bytes, ti = m // 16 * 16, i64(fmt, ROW_BYTES) * nb, tile_index(fmt, n)
    rows = mine + i64(fmt, GROUP_BYTES) * nb
    for r in range(16):
        copy(rows + r * row_bytes, w + min(first + r, m - 1) * row_bytes, row_bytes)
    regroup_rows(fmt, rows, nb, mine)
    out = rows
    for t in range(0, n, T):
        call7(i64(fmt, TILE + ti), mine, xq + t * step, nb, out, 16, n - t, 0)
        for j in range(min(T, n - t)):
            for r in range(first, m):
                old = f32(y, (t + j) * ldy + r) if add else 0.0
                put_f32(y, (t + j) * ldy + r, old + f32(out, j * 16 + r - first))


@op
def mul_mat_id(tid, team, a):
    """fmt of x, nb, m, E | order, starts, entries a row of x | x, x row bytes | xq | y, y row floats |
    fmt, w, expert bytes, in place | the same of the second product, w2 = 0: none | scratch, bytes a thread

    y[i] = w[e] x[i // per] for every entry i of expert e; with a second product y = silu(w x) * (w2 x).
    """
    fmt, nb, m, n_expert = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3)
    order, starts, per, x, ldx, xq = i64(a, 4), i64(a, 5), i64(a, 6), i64(a, 7), i64(a, 8), i64(a, 9)
    in_place, step = i64(a, 15), i64(fmt, ACT_BYTES) * nb
    total = i32(starts, n_expert)
    if total == 0:
        return
    n_active = 0
    for e in range(n_expert):  # phase 1: quantise the entries of every expert that has some
        i, n = i32(starts, e), i32(starts, e + 1) - i32(starts, e)
        if n > 0:
            if n_active % size(team) == tid:
                T = 1 if by_rows(n, in_place) else 1 << tile_index(fmt, n)
                for t in range(n):
                    row = x + i32(order, i + t) // per * ldx
                    call5(i64(fmt, QUANTIZE), row, nb, xq + (i + SPARE * e + t // T * T) * step, T, t % T)
            n_active += 1
    barrier(team)
    parts = max(1, min((m + 15) // 16, 4 * size(team) // n_active))
    chunk = ((m + 15) // 16 + parts - 1) // parts * 16
    mine = i64(a, 20) + tid * i64(a, 21)
    e, past = -1, 0  # the expert that holds unit u, and how many experts with entries there are up to it
    u = take(team, 1, 1)  # phase 2: a part of an expert's rows; the units of a thread rise
    while u < n_active * parts:
        while past <= u // parts:
            e += 1
            past += i32(starts, e + 1) > i32(starts, e)
        i, n, r0 = i32(starts, e), i32(starts, e + 1) - i32(starts, e), u % parts * chunk
        if r0 < m:
            expert_rows(a, e, xq + (i + SPARE * e) * step, n, r0, min(m, r0 + chunk), order + 4 * i, mine)
        u = take(team, 1, 1)


@inner
def expert_rows(a, e, xq, n, r0, r1, entries, mine):
    """Rows r0..r1 of one expert for its n entries, a tile of tokens at a time, by way of scratch."""
    nb, y, ldy, w2 = i64(a, 1), i64(a, 10), i64(a, 11), i64(a, 17)
    width = r1 - r0
    span = max(16, width)
    first, second = mine, mine + 4 * TILE_TOKENS * span
    group = second + 4 * TILE_TOKENS * span
    fmt = i64(a, 0)
    in_place, step = i64(a, 15), i64(fmt, ACT_BYTES) * nb
    rows = by_rows(n, in_place)
    T = min(TILE_TOKENS, MANY) if rows else 1 << tile_index(fmt, n)
    if in_place == 0 or rows:
        for t in range(0, n, T):
            k = min(T, n - t)
            block_rows(i64(a, 12), i64(a, 13) + e * i64(a, 14), in_place, xq + t * step, nb, first, width, k, n, r0, r1)
            if w2:
                block_rows(i64(a, 16), w2 + e * i64(a, 18), i64(a, 19), xq + t * step, nb, second, width, k, n, r0, r1)
            scatter(first, second, w2, width, k, y, ldy, entries, t, r0)
        return
    for r in range(r0, r1, 16):  # in place, many entries: regroup 16 rows of both, then all tiles
        k16 = min(16, r1 - r)
        regroup_part(i64(a, 12), i64(a, 13) + e * i64(a, 14), nb, r, k16, group)
        other = group + 2 * i64(i64(a, 12), GROUP_BYTES) * nb
        if w2:
            regroup_part(i64(a, 16), w2 + e * i64(a, 18), nb, r, k16, other)
        for t in range(0, n, T):
            k = min(T, n - t)
            ti = tile_index(fmt, n)
            call7(i64(i64(a, 12), TILE + ti), group, xq + t * step, nb, first, 16, k, 0)
            if w2:
                call7(i64(i64(a, 16), TILE + ti), other, xq + t * step, nb, second, 16, k, 0)
            scatter_narrow(first, second, w2, 16, k16, k, y, ldy, entries, t, r)


@inner
def regroup_part(fmt, w, nb, r, n_rows, group):
    """Rows r.. (16, or fewer at the end, then repeated) of a matrix as in the file, regrouped."""
    row_bytes = i64(fmt, ROW_BYTES) * nb
    if n_rows == 16:
        regroup_rows(fmt, w + r * row_bytes, nb, group)
        return
    rows = group + i64(fmt, GROUP_BYTES) * nb
    for j in range(16):
        copy(rows + j * row_bytes, w + (r + min(j, n_rows - 1)) * row_bytes, row_bytes)
    regroup_rows(fmt, rows, nb, group)


@inner
def block_rows(fmt, w, in_place, xq, nb, out, width, k, n, r0, r1):
    """Rows r0..r1 x one tile of k tokens to out [k, width]; n is all the expert's tokens, which chose the packing."""
    row_bytes, step = i64(fmt, ROW_BYTES) * nb, i64(fmt, ACT_BYTES) * nb
    if in_place:
        for r in range(r0, r1):
            row_product(fmt, w + r * row_bytes, xq, step, nb, out + (r - r0) * 4, width, k, 0)
    else:
        tile = i64(fmt, TILE + tile_index(fmt, n))
        for r in range(r0, r1, 16):
            call7(tile, w + r * row_bytes, xq, nb, out + (r - r0) * 4, width, k, 0)


@inner
def scatter(first, second, w2, width, k, y, ldy, entries, t, r0):
    scatter_narrow(first, second, w2, width, width, k, y, ldy, entries, t, r0)


@inner
def scatter_narrow(first, second, w2, stride, width, k, y, ldy, entries, t, r0):
    """k rows of scratch to their entries' places in y, through silu and the second product if there is one."""
    for j in range(k):
        at = y + (i32(entries, t + j) * ldy + r0) * 4
        if w2:
            for i in range(width):
                put_f32(at, i, silu(f32(first, j * stride + i)) * f32(second, j * stride + i))
        else:
            copy(at, first + j * stride * 4, width * 4)


def packed_bytes(act_bytes, nb, n, n_expert=0):
    """Bytes of packed activations for n tokens or entries."""
    return act_bytes * nb * (n + TILE_TOKENS + SPARE * n_expert)


def thread_bytes(group_bytes, row_block_bytes, nb, width):
    """Scratch of one thread: results of two tiles, two groups and the rows of a partial one."""
    return (
        (2 * 4 * TILE_TOKENS * (width + 16) + 2 * (group_bytes + 16 * row_block_bytes + group_bytes) * nb + 4096)
        // 64
        * 64
    )
