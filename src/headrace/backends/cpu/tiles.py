"""Register tiles in LLVM vector code, 16 floats a vector: small products, dots with halves, softmax down columns.

All strides are in bytes. LLVM splits the vectors for narrower machines; tiles are sized for the registers. Each kernel
is an object of its own (jit.py), called through its address in `kernels()`: compiled once, not into every user.
"""

from functools import cache as once
from itertools import chain

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .floats import CONVERTS_HALVES, WIDE_REGISTERS, emit_exp
from .jit import jit
from .matmul import call7
from .native import _caller, _pointer, i64, inner

LANES = 16
VECTORS = 4 if WIDE_REGISTERS else 1
"""Vectors side by side in a tile of four rows."""
WIDE = LANES * VECTORS

F32, _I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, _HALVES = ir.VectorType(F32, LANES), ir.VectorType(ir.HalfType(), LANES)


@intrinsic
def call6(tyctx, fn, a, b, c, d, e, f):
    return _caller(6)


@intrinsic
def call8(tyctx, fn, a, b, c, d, e, f, g, h):
    return _caller(8)


@intrinsic
def call9(tyctx, fn, a, b, c, d, e, f, g, h, i):
    return _caller(9)


def spread(b, x):
    """A vector of x in every lane."""
    one = b.insert_element(ir.Constant(VECTOR, ir.Undefined), x, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), None)
    return b.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), zeros)


def fma(b, x, y, z):
    name = f"llvm.fmuladd.v{LANES}f32"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(VECTOR, [VECTOR] * 3), name), [x, y, z])


def load(b, address, ty=VECTOR, index=None):
    return b.load(_pointer(b, address, ty, index), typ=ty, align=2 if ty is _HALVES else 4)


def step(b, base, n, stride):
    """base + n * stride; n a number or a value."""
    return b.add(base, b.mul(n if isinstance(n, ir.Value) else I64(n), stride))


def store(b, value, address, index=None):
    b.store(value, _pointer(b, address, value.type, index), align=4)


def load_halves(b, address, index):
    """16 IEEE halves as floats; without a conversion instruction as native.f16 does it."""
    if CONVERTS_HALVES:
        return b.fpext(load(b, address, _HALVES, index), VECTOR)
    ints = ir.VectorType(_I32, LANES)

    def const(c):
        return ir.Constant(ints, [ir.Constant(_I32, c)] * LANES)

    bits = b.zext(load(b, address, ir.VectorType(ir.IntType(16), LANES), index), ints)
    magnitude = b.bitcast(b.shl(b.and_(bits, const(0x7FFF)), const(13)), VECTOR)
    magnitude = b.bitcast(b.fmul(magnitude, ir.Constant(VECTOR, [ir.Constant(F32, 2.0**112)] * LANES)), ints)
    return b.bitcast(b.or_(magnitude, b.shl(b.and_(bits, const(0x8000)), const(16))), VECTOR)


@intrinsic
def prefetch(tyctx, address):
    """Asks for a cache line without waiting."""

    def codegen(ctx, b, sig, args):
        p = _pointer(b, args[0], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [p.type, _I32, _I32, _I32])
        fn = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        b.call(fn, [p, _I32(0), _I32(2), _I32(1)])
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


# products -------------------------------------------------------------------------------------------------------------


def _tile(n_rows, n_vectors, halves=False):
    """tile(c, c_row, a, a_row, a_col, b, b_row, k, add): c[n_rows, 16 n_vectors] = a b (+ c if add) with every sum in
    a register; b of floats or halves."""

    def emit(e, *args):
        bld, (c, c_row, a, a_row, a_col, b, b_row, k, add) = e.b, (x.v for x in args)
        acc = [[cgutils.alloca_once(bld, VECTOR) for _ in range(n_vectors)] for _ in range(n_rows)]
        cells = [(acc[i][j], step(bld, c, i, c_row), I64(j)) for i in range(n_rows) for j in range(n_vectors)]
        with bld.if_else(bld.icmp_signed("!=", add, I64(0))) as (then, otherwise):
            with then:
                for cell, row, j in cells:
                    bld.store(load(bld, row, VECTOR, j), cell)
            with otherwise:
                for cell, _, _ in cells:
                    bld.store(ir.Constant(VECTOR, None), cell)
        with cgutils.for_range(bld, k) as loop:
            row = step(bld, b, loop.index, b_row)
            columns = [
                load_halves(bld, row, I64(j)) if halves else load(bld, row, VECTOR, I64(j)) for j in range(n_vectors)
            ]
            for i in range(n_rows):
                x = spread(bld, load(bld, step(bld, step(bld, a, i, a_row), loop.index, a_col), F32))
                for j in range(n_vectors):
                    bld.store(fma(bld, x, columns[j], bld.load(acc[i][j], typ=VECTOR)), acc[i][j])
        for cell, row, j in cells:
            store(bld, bld.load(cell, typ=VECTOR), row, j)

    return emit


@inner
def matmul(kernels, c, c_row, a, a_row, a_col, b, b_row, m, n, k, add):
    """c[m, n] = a[m, k] b[k, n] (+ c if add), n a multiple of 16, b and c with adjacent columns."""
    j = 0
    while j < n:
        bj, cj, i = b + 4 * j, c + 4 * j, 0
        if j + WIDE <= n:
            while i + 4 <= m:
                call9(i64(kernels, TILE_WIDE), cj + i * c_row, c_row, a + i * a_row, a_row, a_col, bj, b_row, k, add)
                i += 4
            while i < m:
                call9(i64(kernels, ROW_WIDE), cj + i * c_row, c_row, a + i * a_row, a_row, a_col, bj, b_row, k, add)
                i += 1
            j += WIDE
        else:
            while i + 4 <= m:
                call9(i64(kernels, TILE_NARROW), cj + i * c_row, c_row, a + i * a_row, a_row, a_col, bj, b_row, k, add)
                i += 4
            while i < m:
                call9(i64(kernels, ROW_NARROW), cj + i * c_row, c_row, a + i * a_row, a_row, a_col, bj, b_row, k, add)
                i += 1
            j += LANES


@inner
def matmul_halves(kernels, c, c_row, a, a_row, a_col, b, b_row, m, n, k):
    """c[m, n] += a[m, k] b[k, n] with b in halves, n a multiple of WIDE."""
    for j in range(0, n, WIDE):
        i = 0
        while i + 4 <= m:
            call9(
                i64(kernels, TILE_HALVES),
                c + 4 * j + i * c_row,
                c_row,
                a + i * a_row,
                a_row,
                a_col,
                b + 2 * j,
                b_row,
                k,
                1,
            )
            i += 4
        while i < m:
            call9(
                i64(kernels, ROW_HALVES),
                c + 4 * j + i * c_row,
                c_row,
                a + i * a_row,
                a_row,
                a_col,
                b + 2 * j,
                b_row,
                k,
                1,
            )
            i += 1


def _lane_sums(b, vectors):
    """One vector whose lane i is the sum of vector i's lanes; 1, 2, 4, 8 or 16 vectors."""
    n = LANES
    while n > 1:
        n //= 2
        low = [i for i in range(2 * LANES) if i % (2 * n) < n]
        if len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        else:
            low, pairs = [i % LANES for i in low], [(vectors[0], vectors[0])]
        lanes = [ir.Constant(ir.VectorType(_I32, LANES), x) for x in (low, [i + n for i in low])]
        vectors = [b.fadd(*(b.shuffle_vector(x, y, lane) for lane in lanes)) for x, y in pairs]
    return vectors[0]


def _dots(n_keys, n_rows):
    """dots(s, s_row, k, k_row, q, q_row, n): s[key, row] = k[key, :] . q[row, :]; k in halves, n a multiple of 16;
    summed in 16 lanes, then over them."""

    def emit(e, *args):
        b, (s, s_row, k, k_row, q, q_row, n) = e.b, (x.v for x in args)
        acc = [[cgutils.alloca_once(b, VECTOR) for _ in range(n_rows)] for _ in range(n_keys)]
        for cell in chain(*acc):
            b.store(ir.Constant(VECTOR, None), cell)
        with cgutils.for_range(b, b.lshr(n, I64(4))) as loop:
            queries = [load(b, step(b, q, i, q_row), VECTOR, loop.index) for i in range(n_rows)]
            for key in range(n_keys):
                x = load_halves(b, step(b, k, key, k_row), loop.index)
                for cell, y in zip(acc[key], queries, strict=True):
                    b.store(fma(b, x, y, b.load(cell, typ=VECTOR)), cell)
        total = _lane_sums(b, [b.load(cell, typ=VECTOR) for cell in chain(*acc)])
        for key in range(n_keys):
            target = step(b, s, key, s_row)
            if n_rows == 1:
                store(b, b.extract_element(total, _I32(key)), target)
            else:
                lanes = ir.Constant(ir.VectorType(_I32, n_rows), [key * n_rows + i for i in range(n_rows)])
                store(b, b.shuffle_vector(total, ir.Constant(VECTOR, ir.Undefined), lanes), target)

    return emit


@inner
def dots(kernels, s, s_row, k, k_row, q, q_row, n_keys, n_rows, n):
    """s[key, row] = k[key, :] . q[row, :] for few rows; k in halves, n a multiple of 16."""
    key = 0
    while key + 4 <= n_keys:
        i = 0
        if WIDE_REGISTERS:
            while i + 4 <= n_rows:
                call7(
                    i64(kernels, DOTS_4X4),
                    s + key * s_row + 4 * i,
                    s_row,
                    k + key * k_row,
                    k_row,
                    q + i * q_row,
                    q_row,
                    n,
                )
                i += 4
        while i < n_rows:
            call7(
                i64(kernels, DOTS_4X1), s + key * s_row + 4 * i, s_row, k + key * k_row, k_row, q + i * q_row, q_row, n
            )
            i += 1
        key += 4
    while key < n_keys:
        for i in range(n_rows):
            call7(
                i64(kernels, DOTS_1X1), s + key * s_row + 4 * i, s_row, k + key * k_row, k_row, q + i * q_row, q_row, n
            )
        key += 1


# softmax --------------------------------------------------------------------------------------------------------------


def _softmax(e, *args):
    """softmax(s, s_row, n_keys, m, total, factor): n_keys >= 1 more entries of 16 columns' softmax. m becomes the
    maximum so far, s = exp(s - m), factor = exp(old m - m), total = total * factor + the sum of s."""
    b, (s, s_row, n_keys, m, total, factor) = e.b, (x.v for x in args)
    most, sums = cgutils.alloca_once(b, VECTOR), cgutils.alloca_once(b, VECTOR)
    old = load(b, m)
    b.store(old, most)
    with cgutils.for_range(b, n_keys) as loop:
        x, y = load(b, step(b, s, loop.index, s_row)), b.load(most, typ=VECTOR)
        b.store(b.select(b.fcmp_ordered(">", x, y), x, y), most)
    new = b.load(most, typ=VECTOR)
    scale = emit_exp(b, b.fsub(old, new))
    b.store(b.fmul(load(b, total), scale), sums)
    with cgutils.for_range(b, n_keys) as loop:
        row = step(b, s, loop.index, s_row)
        p = emit_exp(b, b.fsub(load(b, row), new))
        store(b, p, row)
        b.store(b.fadd(b.load(sums, typ=VECTOR), p), sums)
    for value, address in ((new, m), (scale, factor), (b.load(sums, typ=VECTOR), total)):
        store(b, value, address)


@inner
def softmax_columns(kernels, s, s_row, n_keys, m, total, factor):
    call6(i64(kernels, SOFTMAX), s, s_row, n_keys, m, total, factor)


# kernels --------------------------------------------------------------------------------------------------------------

TILE_WIDE, ROW_WIDE, TILE_NARROW, ROW_NARROW, TILE_HALVES, ROW_HALVES = range(6)
DOTS_4X4, DOTS_4X1, DOTS_1X1, SOFTMAX = range(6, 10)


@once
def kernels():
    """int64 array of the kernels' addresses, in the order above."""
    tiles = [(4, VECTORS), (1, VECTORS), (4, 1), (1, 1), (4, VECTORS, True), (1, VECTORS, True)]
    dots = [(4, 4), (4, 1), (1, 1)]
    build = jit().address
    return np.array(
        [
            *(build("attend_tile_" + "_".join(str(int(x)) for x in t), 9, _tile(*t)) for t in tiles),
            *(build(f"attend_dots_{k}_{r}", 7, _dots(k, r)) for k, r in dots),
            build("attend_softmax", 6, _softmax),
        ],
        np.int64,
    )
