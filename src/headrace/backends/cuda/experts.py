"""Grouped products over experts on a chunk of decoded experts [first, first + n) in 16-bit scratch.

The entries (token, rank) are sorted by expert (`Routing.order`, `starts`); `tile_map` cuts each expert's entries into
tiles of BM rows without asking the host: tile i belongs to expert tile_expert[i] and starts at its tile_row[i]-th
entry; unused tiles have expert -1. The grid covers the most tiles that any routing can need.
"""

import triton
import triton.language as tl


@triton.jit
def tile_map_kernel(
    starts, tile_expert, tile_row, n_expert, n_tiles, BM: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK tiles of the map; E is n_expert rounded up to a power of two."""
    e = tl.arange(0, E)
    start = tl.load(starts + e, mask=e < n_expert, other=0)
    count = tl.load(starts + e + 1, mask=e < n_expert, other=0) - start
    tiles = tl.cdiv(tl.where(e < n_expert, count, 0), BM)
    end = tl.cumsum(tiles, 0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.sum((end[None, :] <= i[:, None]).to(tl.int32), 1)
    hit = e[None, :] == expert[:, None]
    row = tl.sum(tl.where(hit, start[None, :] + (i[:, None] - (end - tiles)[None, :]) * BM, 0), 1)
    tl.store(tile_expert + i, tl.where(expert < n_expert, expert, -1), mask=i < n_tiles)
    tl.store(tile_row + i, row, mask=i < n_tiles)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit(do_not_specialize=["n_entries"])
def expert_glu_kernel(
    x, gate, up, gate_bias, up_bias, out, order, starts, tile_expert, tile_row, first, n_chunk, n_entries, n_ff, n_in,
    x_stride, expert_rows,
    TMA: tl.constexpr, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [entry, n_ff] = act(gate x[entry // TOP_K]) * up x: both products share the tile of x."""
    tile = tl.program_id(1)
    e = tl.load(tile_expert + tile)
    if (e < first) | (e >= first + n_chunk):
        return
    rows = tl.load(tile_row + tile) + tl.arange(0, BM)
    inside = rows < tl.load(starts + e + 1)
    entry = tl.load(order + tl.minimum(rows, n_entries - 1))
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    xp = x + (entry // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    row0 = (e - first) * expert_rows + tl.program_id(0) * BN
    if not TMA:
        wrow = ((e - first) * expert_rows + tl.minimum(cols, n_ff - 1)).to(tl.int64) * n_in
        gp = gate + wrow[None, :] + k[:, None]
        up_p = up + wrow[None, :] + k[:, None]
    g = tl.zeros((BM, BN), tl.float32)
    u = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, n_in, BK):
        if EVEN_K:
            a = tl.load(xp + k0)
        else:
            a = tl.load(xp + k0, mask=k[None, :] < n_in - k0, other=0.0)
        if TMA:
            bg, bu = gate.load([row0, k0]).T, up.load([row0, k0]).T
        elif EVEN_K:
            bg, bu = tl.load(gp + k0), tl.load(up_p + k0)
        else:
            bg = tl.load(gp + k0, mask=k[:, None] < n_in - k0, other=0.0)
            bu = tl.load(up_p + k0, mask=k[:, None] < n_in - k0, other=0.0)
        a = a.to(bg.dtype)
        g = tl.dot(a, bg, g, input_precision=PRECISION)
        u = tl.dot(a, bu, u, input_precision=PRECISION)
    if HAS_BIAS:
        g += tl.load(gate_bias + e * n_ff + cols, mask=cols < n_ff, other=0.0)[None, :]
        u += tl.load(up_bias + e * n_ff + cols, mask=cols < n_ff, other=0.0)[None, :]
    h = (_gelu(g) if GELU else _silu(g)) * u
    op = out + entry.to(tl.int64)[:, None] * n_ff + cols[None, :]
    tl.store(op, h.to(out.dtype.element_ty), mask=inside[:, None] & (cols < n_ff)[None, :])


@triton.jit(do_not_specialize=["n_entries"])
def expert_down_kernel(
    h, down, bias, out, order, starts, tile_expert, tile_row, first, n_chunk, n_entries, n_out, n_in, expert_rows,
    TMA: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [entry, n_out] = down h[entry]."""
    tile = tl.program_id(1)
    e = tl.load(tile_expert + tile)
    if (e < first) | (e >= first + n_chunk):
        return
    rows = tl.load(tile_row + tile) + tl.arange(0, BM)
    inside = rows < tl.load(starts + e + 1)
    entry = tl.load(order + tl.minimum(rows, n_entries - 1)).to(tl.int64)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    hp = h + entry[:, None] * n_in + k[None, :]
    row0 = (e - first) * expert_rows + tl.program_id(0) * BN
    if not TMA:
        wrow = ((e - first) * expert_rows + tl.minimum(cols, n_out - 1)).to(tl.int64) * n_in
        wp = down + wrow[None, :] + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, n_in, BK):
        if EVEN_K:
            a = tl.load(hp + k0)
        else:
            a = tl.load(hp + k0, mask=k[None, :] < n_in - k0, other=0.0)
        if TMA:
            b = down.load([row0, k0]).T
        elif EVEN_K:
            b = tl.load(wp + k0)
        else:
            b = tl.load(wp + k0, mask=k[:, None] < n_in - k0, other=0.0)
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + e * n_out + cols, mask=cols < n_out, other=0.0)[None, :]
    op = out + entry[:, None] * n_out + cols[None, :]
    tl.store(op, acc.to(out.dtype.element_ty), mask=inside[:, None] & (cols < n_out)[None, :])
