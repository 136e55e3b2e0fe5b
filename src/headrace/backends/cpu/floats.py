"""Scalar float functions that loops are vectorised over: exp, the activations, half precision.

`fast` marks functions over rows of floats whose products may be fused with sums; in `sums`, additions may also be
reordered into vector lanes (the order then depends on the row's length alone). Numba gives these licences to every
instruction inside, those of `exp` too.
"""

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ... import env
from .native import MACHINE, _pointer, f16, inner

fast = njit(nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
sums = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_EXP_LOW, _EXP_HIGH = -87.3, 88.0
_LN2_HIGH, _LN2_LOW = float(np.float32(0.693359375)), float(np.float32(-2.12194440e-4))


def emit_exp(b, x):
    """e^x for a float or a vector of them; see `exp`."""
    ty = x.type
    count = ty.count if isinstance(ty, ir.VectorType) else 0
    ints = ir.VectorType(_I32, count) if count else _I32

    def const(value, kind=ty):
        one = float(np.float32(value)) if kind is ty else value
        return ir.Constant(kind, [ir.Constant(kind.element, one)] * count) if count else ir.Constant(kind, one)

    def call(name, *args):
        suffix = f"v{count}f32" if count else "f32"
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(ty, [ty] * len(args)), f"llvm.{name}.{suffix}")
        return b.call(fn, args)

    low = b.fcmp_ordered("<", x, const(_EXP_LOW))
    z = b.select(low, const(_EXP_LOW), x)
    z = b.select(b.fcmp_ordered(">", z, const(_EXP_HIGH)), const(_EXP_HIGH), z)
    n = call("rint", b.fmul(z, const(1.0 / np.log(2.0))))
    r = call("fmuladd", n, const(-_LN2_HIGH), z)
    r = call("fmuladd", n, const(-_LN2_LOW), r)
    p = const(1 / 5040)
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = call("fmuladd", p, r, const(c))
    exponent = b.shl(b.add(b.fptosi(n, ints), const(127, ints)), const(23, ints))
    return b.select(low, const(0.0), b.fmul(p, b.bitcast(exponent, ty)))


@intrinsic
def exp(tyctx, x):
    """e^x in float32 within 1e-7 relative; 0 below -87.3, e^88 above 88, NaN stays NaN.

    e^x = 2^n e^r with n the nearest integer to x / ln 2; e^r by its series to r^7, whose rest is below 6e-9.
    """

    def codegen(ctx, b, sig, args):
        return emit_exp(b, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def put_f16(tyctx, address, i, v):
    """Writes v as element i of an array of IEEE halves, rounded to nearest even; overflow becomes infinity.

    Integer arithmetic, as in native.f16: without F16C, LLVM would call a library function that is not there.
    """

    def codegen(ctx, b, sig, args):
        bits = b.bitcast(args[2], _I32)
        magnitude = b.and_(bits, _I32(0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, _I32(13)), _I32(1))
        normal = b.lshr(b.add(b.add(magnitude, _I32(-(112 << 23) + 0xFFF)), odd), _I32(13))
        tiny = b.fadd(
            b.bitcast(magnitude, _F32), ir.Constant(_F32, 0.5)
        )  # the sum's last bit is 2^-24, a half's smallest step
        tiny = b.sub(b.bitcast(tiny, _I32), _I32(0x3F000000))
        huge = b.select(b.icmp_unsigned(">", magnitude, _I32(0x7F800000)), _I32(0x7E00), _I32(0x7C00))
        half = b.select(b.icmp_unsigned("<", magnitude, _I32(113 << 23)), tiny, normal)
        half = b.select(b.icmp_unsigned(">=", magnitude, _I32(0x477FF000)), huge, half)
        half = b.or_(half, b.lshr(b.and_(bits, _I32(-(1 << 31))), _I32(16)))
        b.store(b.trunc(half, _I16), _pointer(b, args[0], _I16, args[1]), align=1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def _f16_convert(tyctx, address, i):
    """native.f16 by the processor's own conversion."""

    def codegen(ctx, b, sig, args):
        return b.fpext(b.load(_pointer(b, args[0], ir.HalfType(), args[1]), typ=ir.HalfType(), align=1), _F32)

    return types.float32(types.int64, types.int64), codegen


_FEATURES = llvm.get_host_cpu_features()
WIDE_REGISTERS = bool(_FEATURES.get("avx512f")) and "avx512" in (env.cpu_isa() or "avx512")
"""32 registers of 16 floats."""
CONVERTS_HALVES = env.cpu_isa() != "generic" and (MACHINE in ("aarch64", "arm64") or bool(_FEATURES.get("f16c")))
half = _f16_convert if CONVERTS_HALVES else f16
"""Element i of an array of IEEE halves as float32, the fastest way here."""


@inner
def sigmoid(x):
    return np.float32(1) / (np.float32(1) + exp(-x))


@inner
def silu(x):
    return x / (np.float32(1) + exp(-x))


@inner
def gelu(x):
    """The tanh form: 0.5 x (1 + tanh z) = x / (1 + exp(-2 z))."""
    z = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1) + exp(np.float32(-2) * z))
