"""Attention over the paged cache, in blocks of 64 keys with a running maximum and sum (FlashAttention's order).

A tile is some tokens of one sequence x the query heads that share a kv head: its rows. Scores are kept transposed,
[key, row], so that softmax runs down the columns with a row per vector lane, and both products are the same one:

    S[key, row] = K[key, :] Qt[:, row]          O[row, :] += S[:, row]^T V[key, :]

Only f16 -> f32 conversion touches keys and values besides. Few tokens (decode): the positions are also split in ranges
of fixed length for the threads, whose partial results are joined in order. In either form a row's sums do not depend on
the other rows.
"""

import numpy as np

from .floats import exp, half
from .native import copy, f32, f64, i32, i64, inner, op, put_f32, put_i32
from .rowops import add_scaled, scale_row, zero
from .team import barrier, share, take
from .tiles import LANES, WIDE, dots, matmul, matmul_halves, prefetch, softmax_columns

KEYS = 64
MAX_ROWS = 64
"""Rows of a tile, unless one token has more."""
FEW_TOKENS = 16
"""Up to so many, or one a sequence, positions are split between threads."""
FEW_ROWS = 12
"""Up to so many in the few-token form, halves are multiplied where they lie, not widened for all rows first."""
N_SPLIT_MAX, SPLIT_MIN = 32, 256
_MASKED, _LOWEST = np.float32(-3e38), np.float32(-1e30)


@inner
def _expand_row(out, x, is_f16, n):
    if is_f16:
        for i in range(n):
            put_f32(out, i, half(x, i))
    else:
        copy(out, x, 4 * n)


@inner
def _run(table, page, p, n):
    """(cache row of position p, how many of n positions follow each other there)"""
    return i32(table, p // page) * page + p % page, min(n, page - p % page)


@inner
def _prefetch_rows(address, row_bytes, n_rows, n_bytes):
    for i in range(n_rows):
        for j in range(0, n_bytes, 64):
            prefetch(address + i * row_bytes + j)


@inner
def _expand(out, out_row, cache, row_bytes, is_f16, head, table, page, start, n_keys, dim):
    """Positions start.. of one kv head as float32 rows."""
    at_head = cache + head * dim * (2 if is_f16 else 4)
    j = 0
    while j < n_keys:
        first, run = _run(table, page, start + j, n_keys - j)
        for i in range(run):
            _expand_row(out + (j + i) * out_row, at_head + (first + i) * row_bytes, is_f16, dim)
        j += run


@inner
def _mask(s, start, n_keys, n, low, high):
    for j in range(n_keys):
        for r in range(n):
            if start + j < i32(low, r) or start + j >= i32(high, r):
                put_f32(s, j * n + r, _MASKED)


@inner
def _first_position(position, window):
    return max(np.int64(0), position - window + 1) if window else np.int64(0)


@inner
def scratch_layout(n, dim):
    """Byte offsets for a tile of n rows: K, V, S, maximum (total, factor, low, high follow), O; Qt is at 0."""
    wide = (dim + 15) // 16 * 16
    k = 4 * dim * n
    v = k + 4 * KEYS * wide
    s = v + 4 * KEYS * wide
    m = s + 4 * KEYS * n
    o = m + 5 * 4 * n
    return k, v, s, m, o


@inner
def output_row(dim):
    """Bytes of a row of O: dim numbers padded to 16, then maximum and total."""
    return 4 * ((dim + 15) // 16 * 16 + 16)


@inner
def _load_queries(out, q, q0, q1, group, rows, n, dim, scale, by_row):
    """scale * q of each row (token, head of the group): as rows, or as columns [dim, n] with zeros beside them."""
    for r in range(n):
        source = q + r // group * q0 + r % group * q1
        if by_row and r < rows:
            scale_row(out + 4 * r * dim, source, scale, dim)
        elif r < rows:
            for c in range(dim):
                put_f32(out, c * n + r, f32(source, c) * scale)
        elif not by_row:
            for c in range(dim):
                put_f32(out, c * n + r, np.float32(0))


@inner
def _attend(a, mem, q, n_tok, head, positions, table, first_key, last_key, o, o_row):
    """One tile: rows (token, head of the group) over positions first_key..last_key, into o (see output_row)."""
    group, dim, scale, page, window = i64(a, 3), i64(a, 4), np.float32(f64(a, 5)), i64(a, 6), i64(a, 7)
    k_cache, k_bytes, k_f16 = i64(a, 11), i64(a, 12), i64(a, 13)
    v_cache, v_bytes, v_f16 = i64(a, 14), i64(a, 15), i64(a, 16)
    kernels, rows = i64(a, 30), n_tok * group
    n, wide = (rows + 15) // 16 * 16, (dim + 15) // 16 * 16
    direct = i64(a, 28) > 0 and k_f16 and v_f16 and rows <= FEW_ROWS and dim % WIDE == 0
    at_k, at_v, at_s, at_m, _ = scratch_layout(n, dim)
    k, v, s, m = mem + at_k, mem + at_v, mem + at_s, mem + at_m
    total, factor, low, high = m + 4 * n, m + 8 * n, m + 12 * n, m + 16 * n
    least_high, most_low = last_key, np.int64(0)
    for r in range(n):
        put_f32(m, r, _LOWEST)
        put_f32(total, r, np.float32(0))
        p = i32(positions, min(r, rows - 1) // group)
        begin = _first_position(p, window)
        put_i32(low, r, begin)
        put_i32(high, r, p + 1)
        least_high, most_low = min(least_high, p + 1), max(most_low, begin)
    for r in range(rows):
        zero(o + r * o_row, wide)
    _load_queries(mem, q, i64(a, 9), i64(a, 10), group, rows, n, dim, scale, direct)
    if direct:
        k_cache, v_cache = k_cache + 2 * head * dim, v_cache + 2 * head * dim
    start = first_key // KEYS * KEYS
    while start < last_key:
        n_keys = min(KEYS, last_key - start)
        if direct:
            if start + KEYS < last_key:
                row, run = _run(table, page, start + KEYS, min(KEYS, last_key - start - KEYS))
                _prefetch_rows(k_cache + row * k_bytes, k_bytes, run, 2 * dim)
                _prefetch_rows(v_cache + row * v_bytes, v_bytes, run, 2 * dim)
            j = 0
            while j < n_keys:
                row, run = _run(table, page, start + j, n_keys - j)
                dots(kernels, s + 4 * j * n, 4 * n, k_cache + row * k_bytes, k_bytes, mem, 4 * dim, run, rows, dim)
                j += run
        else:
            _expand(k, 4 * dim, k_cache, k_bytes, k_f16, head, table, page, start, n_keys, dim)
            _expand(v, 4 * wide, v_cache, v_bytes, v_f16, head, table, page, start, n_keys, dim)
            matmul(kernels, s, 4 * n, k, 4 * dim, 4, mem, 4 * n, n_keys, n, dim, 0)
        if start < most_low or start + n_keys > least_high:
            _mask(s, start, n_keys, n, low, high)
        for r in range(0, n, LANES):
            softmax_columns(kernels, s + 4 * r, 4 * n, n_keys, m + 4 * r, total + 4 * r, factor + 4 * r)
        for r in range(rows):
            if f32(factor, r) != 1:
                scale_row(o + r * o_row, o + r * o_row, f32(factor, r), wide)
        if direct:
            j = 0
            while j < n_keys:
                row, run = _run(table, page, start + j, n_keys - j)
                values = v_cache + row * v_bytes
                matmul_halves(kernels, o, o_row, s + 4 * j * n, 4, 4 * n, values, v_bytes, rows, dim, run)
                j += run
        else:
            matmul(kernels, o, o_row, s, 4, 4 * n, v, 4 * wide, rows, wide, n_keys, 1)
        start += KEYS
    for r in range(rows):
        put_f32(o + r * o_row, wide, f32(m, r))
        put_f32(o + r * o_row, wide + 1, f32(total, r))


@inner
def _join(out, parts, part_bytes, n_parts, sinks, head, dim):
    """out[dim] = the n_parts partial results joined in order, with the head's sink."""
    wide = (dim + 15) // 16 * 16
    most, total = _LOWEST, np.float32(0)
    if sinks:
        most = f32(sinks, head)
        total = np.float32(1)
    for i in range(n_parts):
        m, old = f32(parts + i * part_bytes, wide), most
        most = m if m > most else most
        total = total * exp(old - most) + f32(parts + i * part_bytes, wide + 1) * exp(m - most)
    for i in range(n_parts):
        weight = exp(f32(parts + i * part_bytes, wide) - most) / total
        if i:
            add_scaled(out, parts + i * part_bytes, weight, dim)
        else:
            scale_row(out, parts, weight, dim)


@inner
def _find_tile(seq_start, tile, per_tile):
    """(sequence, first token, tokens) of a tile."""
    s = 0
    while True:
        first, last = i32(seq_start, s), i32(seq_start, s + 1)
        n = (last - first + per_tile - 1) // per_tile
        if tile < n:
            break
        tile -= n
        s += 1
    first += tile * per_tile
    return s, first, min(per_tile, last - first)


@op
def attention(tid, team, a):
    """T, S, G | group, C, scale, page, window | q, s0, s1 | k cache, row bytes, is f16 | v cache, row bytes, is f16 |
    positions, seq_start, block_table, n_block | out, s0, s1 | sinks or 0 | scratch, bytes a thread |
    partial results, splits, split length | kernels (tiles.py)

    Splits 0: a unit of work is (tile, kv head). Else the few-token form: (token, kv head, range of positions)."""
    n_seq, n_kv, group, dim, window = i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 7)
    q, q0, q1, positions, seq_start = i64(a, 8), i64(a, 9), i64(a, 10), i64(a, 17), i64(a, 18)
    table, n_block, out, out0, out1, sinks = i64(a, 19), i64(a, 20), i64(a, 21), i64(a, 22), i64(a, 23), i64(a, 24)
    mem, parts, n_split, length = i64(a, 25) + tid * i64(a, 26), i64(a, 27), i64(a, 28), i64(a, 29)
    row_bytes = output_row(dim)
    n_tokens = i32(seq_start, n_seq)
    per_tile = 1 if n_split else max(1, MAX_ROWS // group)
    n_tiles = n_tokens
    if not n_split:
        n_tiles = 0
        for s in range(n_seq):
            n_tiles += (i32(seq_start, s + 1) - i32(seq_start, s) + per_tile - 1) // per_tile
    n_ranges = max(1, n_split)
    unit = take(team, 0, 1)
    while unit < n_tiles * n_kv * n_ranges:
        tile, g, split = n_tiles - 1 - unit // (n_kv * n_ranges), unit // n_ranges % n_kv, unit % n_ranges
        s, first, n = _find_tile(seq_start, tile, per_tile)  # the last tokens see most: they come first
        head, rows = g * group, n * group
        begin, end = _first_position(i32(positions, first), window), i32(positions, first + n - 1) + 1
        if n_split:
            begin, end = max(begin, split * length), min(end, (split + 1) * length)
            o, o_row = parts + ((first * n_kv * group + head) * n_split + split) * row_bytes, n_split * row_bytes
        else:
            o, o_row = mem + scratch_layout((rows + 15) // 16 * 16, dim)[4], row_bytes
        if begin < end:
            _attend(
                a, mem, q + first * q0 + head * q1, n, g, positions + 4 * first, table + 4 * s * n_block, begin, end,
                o, o_row,
            )  # fmt: skip
        if not n_split:
            for r in range(rows):
                t, h = first + r // group, head + r % group
                _join(out + t * out0 + h * out1, o + r * o_row, 0, 1, sinks, h, dim)
        unit = take(team, 0, 1)
    if n_split:
        barrier(team)
        start, stop = share(tid, team, n_tokens * n_kv * group)
        for row in range(start, stop):
            t, h = row // (n_kv * group), row % (n_kv * group)
            p = i32(positions, t)
            one, past = _first_position(p, window) // length, p // length + 1
            part = parts + (row * n_split + one) * row_bytes
            _join(out + t * out0 + h * out1, part, row_bytes, past - one, sinks, h, dim)


def tile_bytes(group: int, dim: int, few: bool) -> int:
    """Scratch of a thread, rounded up to a page."""
    rows = group if few else max(1, MAX_ROWS // group) * group
    rows = -(-rows // LANES) * LANES
    return -(-(scratch_layout.py_func(rows, dim)[4] + rows * output_row.py_func(dim)) // 4096) * 4096


def splits(n_positions: int) -> tuple[int, int]:
    """(number, length) of the ranges that the few-token form cuts a cache of so many positions into."""
    length = max(SPLIT_MIN, -(-n_positions // (N_SPLIT_MAX * KEYS)) * KEYS)
    return -(-n_positions // length), length
