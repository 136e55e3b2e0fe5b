"""SIMD code as Python: write the vector body once, it runs while the kernel is built.

An ``Emit`` wraps an LLVM builder, a ``V`` wraps one LLVM value and gives it
operators, so a kernel reads like ordinary arithmetic; a Python ``for`` unrolls,
``Emit.loop`` makes a run-time loop. Vectors are always 16 lanes of 32 bits
(64 bytes): LLVM splits them for narrower machines, and only the dot-product
instructions, which LLVM does not find by itself, are chosen per target here.
"""

import platform

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from ... import env

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16


def vec(elem, n=LANES):
    return ir.VectorType(elem, n)


def detected_isa():
    """Dot-product instructions of this processor."""
    if platform.machine() in ("aarch64", "arm64"):
        return "generic"
    f = llvm.get_host_cpu_features()
    if f.get("avx512vnni") and f.get("avx512bw"):
        return "avx512-vnni"
    if f.get("avxvnni"):
        return "avx-vnni"
    return "avx2" if f.get("avx2") else "generic"


ISA = env.cpu_isa() or detected_isa()
BIAS = 128 if "vnni" in ISA else 0  # added to stored signed bytes where dot4 wants an unsigned side


def _flt(ty):
    return isinstance(getattr(ty, "element", ty), (ir.HalfType, ir.FloatType))


class V:
    """One SSA value with operators. Integer >> is logical; use .sar() for arithmetic."""

    __slots__ = ("e", "v")

    def __init__(self, e, v):
        self.e, self.v = e, v

    @property
    def type(self):
        return self.v.type

    def _other(self, o):
        return o if isinstance(o, V) else self.e.const(o, self.type)

    def _bin(self, o, fi, ff):
        o = self._other(o)
        return V(self.e, getattr(self.e.b, ff if _flt(self.type) else fi)(self.v, o.v))

    def __add__(self, o):
        return self._bin(o, "add", "fadd")

    def __sub__(self, o):
        return self._bin(o, "sub", "fsub")

    def __mul__(self, o):
        return self._bin(o, "mul", "fmul")

    def __and__(self, o):
        return self._bin(o, "and_", None)

    def __or__(self, o):
        return self._bin(o, "or_", None)

    def __xor__(self, o):
        return self._bin(o, "xor", None)

    def __lshift__(self, o):
        return self._bin(o, "shl", None)

    def __rshift__(self, o):
        return self._bin(o, "lshr", None)

    def sar(self, o):
        return self._bin(o, "ashr", None)

    def __neg__(self):
        return V(self.e, self.e.b.fneg(self.v)) if _flt(self.type) else self._other(0) - self

    def bits(self, elem):
        """Reinterpret the same bits as a vector of elem."""
        n = self.type.count * _width(self.type.element) // _width(elem)
        return V(self.e, self.e.b.bitcast(self.v, vec(elem, n)))

    def zext(self, elem=I32):
        return V(self.e, self.e.b.zext(self.v, vec(elem, self.type.count)))

    def sext(self, elem=I32):
        return V(self.e, self.e.b.sext(self.v, vec(elem, self.type.count)))

    def f32(self):
        """To f32: widens half, converts signed integers."""
        to = vec(F32, self.type.count) if isinstance(self.type, ir.VectorType) else F32
        return V(self.e, (self.e.b.fpext if _flt(self.type) else self.e.b.sitofp)(self.v, to))

    def part(self, start, n):
        return self.e.shuffle(self, range(start, start + n))


def _width(ty):
    return {ir.HalfType: 16, ir.FloatType: 32}.get(type(ty)) or ty.width


class Emit:
    def __init__(self, builder, isa=None):
        self.b, self.isa = builder, isa or ISA

    # constants, memory -------------------------------------------------------
    def const(self, x, ty):
        if isinstance(ty, ir.VectorType):
            x = [x] * ty.count if isinstance(x, (int, float)) else list(x)
            return V(self, ir.Constant(ty, [ir.Constant(ty.element, c) for c in x]))
        return V(self, ir.Constant(ty, x))

    def zero(self, elem=I32, n=LANES):
        return V(self, ir.Constant(vec(elem, n), None))

    def _ptr(self, addr, off, ty):
        p = self.b.inttoptr(addr.v, I8.as_pointer())
        if not (isinstance(off, int) and off == 0):
            o = off.v if isinstance(off, V) else ir.Constant(I64, off)
            p = self.b.gep(p, [o], source_etype=I8)
        return self.b.bitcast(p, ty.as_pointer())

    def load(self, addr, off, elem, n=LANES, align=1):
        ty = vec(elem, n) if n > 1 else elem
        return V(self, self.b.load(self._ptr(addr, off, ty), typ=ty, align=align))

    def store(self, addr, off, val, align=1):
        self.b.store(val.v, self._ptr(addr, off, val.type), align=align)

    def splat(self, x, n=LANES):
        ty = vec(x.type, n)
        one = self.b.insert_element(ir.Constant(ty, ir.Undefined), x.v, ir.Constant(I32, 0))
        return V(self, self.b.shuffle_vector(one, ir.Constant(ty, ir.Undefined), ir.Constant(vec(I32, n), None)))

    def bcast(self, addr, off, elem=I32):
        return self.splat(self.load(addr, off, elem, 1))

    # shuffles, arithmetic ------------------------------------------------------
    def shuffle(self, a, idx, b=None):
        idx = list(idx)
        b = b.v if b else ir.Constant(a.type, ir.Undefined)
        return V(self, self.b.shuffle_vector(a.v, b, ir.Constant(vec(I32, len(idx)), idx)))

    def call(self, name, ret, *args):
        fn = cgutils.get_or_insert_function(self.b.module, ir.FunctionType(ret, [a.type for a in args]), name)
        return V(self, self.b.call(fn, [a.v for a in args]))

    def fma(self, a, b, c):
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def hsum(self, v):
        """Sum of a float vector's lanes, in any order."""
        while v.type.count > 1:
            n = v.type.count // 2
            v = v.part(0, n) + v.part(n, n)
        return V(self, self.b.extract_element(v.v, ir.Constant(I32, 0)))

    def _split(self, fn, n, *args):
        """Run fn on n-lane slices of 16-lane i32 vectors and join the results."""
        parts = [fn(*(a.part(i, n) for a in args)) for i in range(0, LANES, n)]
        while len(parts) > 1:
            parts = [self.shuffle(p, range(2 * p.type.count), q) for p, q in zip(parts[::2], parts[1::2])]
        return parts[0]

    def dot4(self, acc, u8, s8):
        """acc[i] += sum of 4 products of unsigned bytes, all below 128, and signed bytes."""
        u8, s8 = u8.bits(I32), s8.bits(I32)
        if self.isa == "avx512-vnni":
            return self.call("llvm.x86.avx512.vpdpbusd.512", acc.type, acc, u8, s8)
        if self.isa == "avx-vnni":
            return self._split(
                lambda a, u, s: self.call("llvm.x86.avx512.vpdpbusd.256", a.type, a, u, s), 8, acc, u8, s8
            )
        if self.isa == "avx2":
            return self._split(self._maddubs, 8, acc, u8, s8)
        return self.dot_slow(acc, u8, s8)

    def dot4s(self, acc, q, s8):
        """The same of signed bytes, q being stored + BIAS; acc must start at -BIAS * sum of s8."""
        q, s8 = q.bits(I32), s8.bits(I32)
        if self.isa == "avx2":

            def signed(a, q, s):
                q, s = q.bits(I8), s.bits(I8)
                return self._maddubs(
                    a,
                    self.call("llvm.abs.v32i8", q.type, q, self.const(0, ir.IntType(1))),
                    self.call("llvm.x86.avx2.psign.b", s.type, s, q),
                )

            return self._split(signed, 8, acc, q, s8)
        if self.isa == "generic":
            return self.dot_slow(acc, q, s8, signed=True)
        return self.dot4(acc, q, s8)

    def dot8(self, acc, u8, s8):
        """dot4 on 8 lanes (32 bytes)."""
        u8, s8 = u8.bits(I32), s8.bits(I32)
        if "vnni" in self.isa:
            return self.call("llvm.x86.avx512.vpdpbusd.256", acc.type, acc, u8, s8)
        return self._maddubs(acc, u8, s8) if self.isa == "avx2" else self.dot_slow(acc, u8, s8)

    def dot8s(self, acc, q, s8):
        """The same of two signed sides, where there is no VNNI."""
        q, s8 = q.bits(I8), s8.bits(I8)
        if self.isa == "avx2":
            magnitude = self.call("llvm.abs.v32i8", q.type, q, self.const(0, ir.IntType(1)))
            return self._maddubs(acc, magnitude, self.call("llvm.x86.avx2.psign.b", s8.type, s8, q))
        return self.dot_slow(acc, q.bits(I32), s8.bits(I32), signed=True)

    def _maddubs(self, a, u, s):
        p = self.call("llvm.x86.avx2.pmadd.ub.sw", vec(I16, 16), u.bits(I8), s.bits(I8))
        return a + self.call("llvm.x86.avx2.pmadd.wd", vec(I32, 8), p, self.const(1, vec(I16, 16)))

    def dot_slow(self, acc, u, s, signed=False):
        """dot4 in plain arithmetic, for any number of lanes."""
        for i in range(0, 32, 8):
            left = (u << (24 - i)).sar(24) if signed else (u >> i) & 255
            acc = acc + left * (s << (24 - i)).sar(24)
        return acc

    def dot2(self, acc, a16, b16):
        """acc[i] += sum of 2 products of signed 16-bit pairs."""
        a, b = a16.bits(I32), b16.bits(I32)
        if self.isa == "avx512-vnni":
            return self.call("llvm.x86.avx512.vpdpwssd.512", acc.type, acc, a, b)
        if self.isa == "avx-vnni":
            return self._split(lambda c, a, b: self.call("llvm.x86.avx512.vpdpwssd.256", c.type, c, a, b), 8, acc, a, b)
        if self.isa == "avx2":
            return self._split(
                lambda c, a, b: c + self.call("llvm.x86.avx2.pmadd.wd", c.type, a.bits(I16), b.bits(I16)), 8, acc, a, b
            )
        return acc + a.sar(16) * b.sar(16) + (a << 16).sar(16) * (b << 16).sar(16)

    def lut16(self, idx, table):
        """Bytes of a 16-entry table picked by 64 indices 0..15."""
        if self.isa in ("avx512-vnni", "avx-vnni", "avx2"):
            wide = self.isa == "avx512-vnni"
            name, n = ("llvm.x86.avx512.pshuf.b.512", 64) if wide else ("llvm.x86.avx2.pshuf.b", 32)
            t = self.const(list(table) * (n // 16), vec(I8, n))
            if wide:
                return self.call(name, t.type, t, idx)
            a, b = (self.call(name, t.type, t, idx.part(i, 32)) for i in (0, 32))
            return self.shuffle(a, range(64), b)
        out = self.zero(I8, 64)
        for i, v in enumerate(table):
            hit = V(self, self.b.icmp_unsigned("==", idx.v, self.const(i, idx.type).v))
            out = V(self, self.b.select(hit.v, self.const(v, idx.type).v, out.v))
        return out

    def lut32(self, idx, table):
        """Bytes of a 16-entry table picked by 32 indices 0..15."""
        both = self.shuffle(idx, [*range(32), *range(32)])
        return self.lut16(both, table).part(0, 32)

    # control -------------------------------------------------------------------
    def loop(self, n, carried, body):
        """Run body(i, carried) -> carried for i in 0..n-1 (n >= 1); returns the last."""
        b = self.b
        pre = b.block
        head, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(ir.Constant(I64, 0), pre)
        phis = []
        for c in carried:
            p = b.phi(c.type)
            p.add_incoming(c.v, pre)
            phis.append(p)
        new = body(V(self, i), [V(self, p) for p in phis])
        nxt = b.add(i, ir.Constant(I64, 1))
        i.add_incoming(nxt, b.block)
        for p, c in zip(phis, new):
            p.add_incoming(c.v, b.block)
        b.cbranch(b.icmp_signed("<", nxt, n.v), head, done)
        b.position_at_end(done)
        return list(new)
