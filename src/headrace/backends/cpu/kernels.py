"""Machine code of the quantised formats, and the descriptor through which the product ops (matmul.py) reach it.

A descriptor is an int64 array, one for each format: addresses of the kernels, then sizes (see the names below). The ops
know no format; everything they need of one is in its descriptor.
"""

from functools import cache as once

import numpy as np
from llvmlite import ir

from . import simd
from .formats import FORMATS, Acts
from .jit import jit
from .simd import F32, I8, I16, I32, I64, V, vec

TILES = (1, 2, 4, 8)
"""Tokens a tile; the kernels of a descriptor are numbered by these."""
WIDEST = 3 if "avx512" in simd.ISA else 2
"""Index of the widest tile that fits the registers (16 of them with AVX2: 8 tokens spilled, 0.98 of ggml)."""
ROW_TOKENS = (1, 2, 4)

# fields of a descriptor
TILE, ROW, QUANTIZE, REGROUP, BLOCK, GROUP_BYTES, ACT_BYTES, ROW_BYTES, WIDEST_TILE = 0, 4, 7, 8, 9, 10, 11, 12, 13


def emit_tile(fmt, T):
    """tile(w, x, nb, y, ldy, valid, add): y[t * ldy + lane] (+)= 16 rows x T tokens over nb blocks, for t < valid."""

    def emit(e, w, x, nb, y, ldy, valid, add):
        def step(i, c):
            acc = fmt.kernel(e, c[0], Acts(fmt, T, c[1]), T, c[2:])
            return [c[0] + fmt.row_bytes * 16, c[1] + Acts(fmt, T).size, *acc]

        out = e.loop(nb, [w, x, *(e.zero(F32) for _ in range(T))], step)[2:]
        for t in range(T):
            with e.b.if_then(e.b.icmp_signed(">", valid.v, ir.Constant(I64, t))):
                _put(e, y + ldy * (4 * t), out[t], add)

    return emit


def emit_row(fmt, T):
    """row(w, x, xstep, nb, y, ldy, add): y[t * ldy] (+)= one row of file blocks x T tokens packed singly."""

    def emit(e, w, x, xstep, nb, y, ldy, add):
        lay = Acts(fmt, 1)

        def step(i, c):
            xs = [c[1] + xstep * t for t in range(T)]
            return [c[0] + fmt.row_bytes, c[1] + lay.size, *fmt.row(e, c[0], xs, lay, c[2:])]

        out = e.loop(nb, [w, x, *(e.zero(F32, fmt.lanes) for _ in range(T))], step)[2:]
        for t in range(T):
            _put(e, y + ldy * (4 * t), e.hsum(out[t]), add)

    return emit


def _put(e, at, value, add):
    """Stores a value, or adds it to what is there."""
    with e.b.if_else(e.b.icmp_signed("!=", add.v, ir.Constant(I64, 0))) as (yes, no):
        with yes:
            n = value.type.count if isinstance(value.type, ir.VectorType) else 1
            e.store(at, 0, value + e.load(at, 0, F32, n))
        with no:
            e.store(at, 0, value)


def emit_quantize(fmt):
    """quantize(src, nb, dst, T, t): nb blocks of f32 to int8 in place t of a packed tile of T tokens."""

    def emit(e, src, nb, dst, T, t):
        lay, b = Acts(fmt, 1), e.b

        def step(i, c):
            src, dst = c
            v = [e.load(src, 64 * i, F32) for i in range(fmt.block // 16)]
            a = [e.call("llvm.fabs.v16f32", x.type, x) for x in v]
            while len(a) > 1:
                a = [e.call("llvm.maxnum.v16f32", p.type, p, q) for p, q in zip(a[::2], a[1::2])]
            peak = e.call("llvm.vector.reduce.fmax.v16f32", F32, a[0])
            inverse = b.select(
                b.fcmp_ordered("==", peak.v, ir.Constant(F32, 0)), ir.Constant(F32, 0),
                b.fdiv(ir.Constant(F32, 127.0), peak.v),
            )  # fmt: skip
            inverse = e.splat(V(e, inverse))
            q = [V(e, b.fptosi(e.call("llvm.rint.v16f32", x.type, x * inverse).v, vec(I32))) for x in v]
            for i, x in enumerate(q):
                x = V(e, b.trunc(x.v, vec(I8))).bits(I32)
                for g in range(4):
                    e.store(dst, (T * (4 * i + g) + t) * 4, V(e, b.extract_element(x.v, ir.Constant(I32, g))))
            for j in range(lay.n_sums):
                s = q[j * fmt.sums // 16]
                for x in q[j * fmt.sums // 16 + 1 : (j + 1) * fmt.sums // 16]:
                    s = s + x
                s = e.call("llvm.vector.reduce.add.v16i32", I32, s)
                if fmt.sum_scale is None:
                    at = T * lay.at_sum + (T * (j // 2) + t) * 4 + j % 2 * 2
                    e.store(dst, at, V(e, b.trunc(s.v, I16)))
                else:
                    e.store(dst, T * lay.at_sum + (T * j + t) * 4, s * fmt.sum_scale)
            e.store(dst, T * lay.at_d + t * 4, peak * (1 / 127))
            return [src + 4 * fmt.block, dst + T * lay.size]

        e.loop(nb, [src, dst], step)

    return emit


@once
def descriptor(name):
    """The descriptor of a format, int64; its address stays valid."""
    fmt, build = FORMATS[name], jit().address
    tiles = [TILES[min(i, WIDEST)] for i in range(4)]
    return np.array(
        [
            *(build(f"tile_{name}_{t}", 7, emit_tile(fmt, t)) for t in tiles),
            *(build(f"row_{name}_{t}", 7, emit_row(fmt, t)) for t in ROW_TOKENS),
            build(f"quantize_{name}", 5, emit_quantize(fmt)), fmt.regroup.address, fmt.block, 16 * fmt.row_bytes,
            Acts(fmt, 1).size, fmt.row_bytes, WIDEST,
        ],
        np.int64,
    )  # fmt: skip
