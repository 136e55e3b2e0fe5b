"""The quantised formats that have kernels of their own: how 16 rows are regrouped, and the inner product.

A regrouped matrix is stored as groups of 16 rows. Inside a group one block of K holds, for every 4 consecutive k, 16
rows x 4 bytes (one 64-byte vector, lane = row), so a dot product needs no horizontal sums and the scales of 16 rows
are one vector. Regrouping only permutes the bits: the size stays the same. The file's own blocks are regrouped once at
load, or 16 rows at a time into scratch.

Activations of T tokens (a tile) are packed block by block: int8 q[block / 4][T][4], then sums of q (int32 times
`sum_scale`, or plain int16 pairs where that is None), then one float32 scale a token.

A format has `block`, `row_bytes` (of one block of one row), `sums` (k per sum), `sum_scale`, and
    kernel(e, w, x, T, acc)     16 rows x T tokens over one block; returns the T new accumulators
    row(e, w, xs, lay, acc)     one row in the file's own layout x the tokens at addresses xs
    regroup(src, stride, dst)   one block of 16 rows (a numba function of addresses)
"""

from llvmlite import ir

from .native import copy, i32, inner, op, put_i32
from .simd import BIAS, F16, F32, I8, I16, I32, I64, V, vec


class Acts:
    """Offsets inside one block of packed activations of T tokens: q, sums, then scales."""

    def __init__(self, fmt, T, addr=None):
        self.T, self.addr = T, addr
        self.n_sums = fmt.block // fmt.sums
        self.wide = 2 if fmt.sum_scale is None else 4
        self.at_sum = fmt.block * T
        self.at_d = self.at_sum + self.n_sums * self.wide * T
        self.size = self.at_d + 4 * T

    def q(self, g, t):
        return (g * self.T + t) * 4

    def d(self, t):
        return self.at_d + 4 * t

    def sum(self, j, t):
        if self.wide == 4:
            return self.at_sum + (j * self.T + t) * 4
        return self.at_sum + (j // 2 * self.T + t) * 4 + j % 2 * 2


def _half(e, addr, off):
    """A scalar half as f32."""
    return V(e, e.b.fpext(e.load(addr, off, F16, 1).v, F32))


def _row32(e, q, signed, lay, xs, d, acc, sub=0):
    """acc += d * x scale * sum(q x) for 32 bytes q of one row and each token; they are the sub-th 32 k of their block.

    Signed q are biased where the instruction wants an unsigned side; the packed sums undo that, or Q4_0's own 8.
    """
    if signed and BIAS:
        q = q ^ -128
    out = []
    for t, x in enumerate(xs):
        v = e.load(x, 32 * sub, I8, 32)
        first = V(e, e.b.insert_element(e.zero(I32, 8).v, e.load(x, lay.sum(sub, 0), I32, 1).v, I32(0)))
        s = e.dot8s(first, q, v) if signed and not BIAS else e.dot8(first, q, v)
        out.append(e.fma(s.f32(), e.splat(d * e.load(x, lay.d(0), F32, 1), 8), acc[t]))
    return out


@inner
def _dwords(src, stride, dst, first, n):
    """4-byte words first.. of 16 rows, transposed: dst[word][row]."""
    for r in range(16):
        for i in range(n):
            put_i32(dst, i * 16 + r, i32(src + r * stride + first, i))


class Q8_0:
    block, row_bytes = 32, 34
    sums, sum_scale = 32, -BIAS
    lanes = 8

    def kernel(e, w, x, T, acc):
        d = e.load(w, 0, F16).f32()
        s = [e.bcast(x.addr, x.sum(0, t)) for t in range(T)]
        for g in range(8):
            q = e.load(w, 32 + 64 * g, I8, 64)
            s = [e.dot4s(s[t], q, e.bcast(x.addr, x.q(g, t))) for t in range(T)]
        return [e.fma(s[t].f32() * d, e.bcast(x.addr, x.d(t), F32), acc[t]) for t in range(T)]

    def row(e, w, xs, lay, acc):
        return _row32(e, e.load(w, 2, I8, 32), True, lay, xs, _half(e, w, 0), acc)

    @op
    def regroup(src, stride, dst):
        for r in range(16):
            copy(dst + 2 * r, src + r * stride, 2)
            for i in range(8):
                word = i32(src + r * stride + 2, i)
                put_i32(dst + 32, i * 16 + r, word ^ 0x80808080 if BIAS else word)


class Q4_0:
    block, row_bytes = 32, 18
    sums, sum_scale = 32, -8
    lanes = 8

    def kernel(e, w, x, T, acc):
        d = e.load(w, 0, F16).f32()
        s = [e.bcast(x.addr, x.sum(0, t)) for t in range(T)]
        for g in range(4):
            q = e.load(w, 32 + 64 * g, I8, 64)
            for h, u in ((g, q & 15), (g + 4, (q >> 4) & 15)):
                s = [e.dot4(s[t], u, e.bcast(x.addr, x.q(h, t))) for t in range(T)]
        return [e.fma(s[t].f32() * d, e.bcast(x.addr, x.d(t), F32), acc[t]) for t in range(T)]

    def row(e, w, xs, lay, acc):
        q = e.load(w, 2, I8, 16)
        u = e.shuffle(q & 15, range(32), (q >> 4) & 15)
        return _row32(e, u, False, lay, xs, _half(e, w, 0), acc)

    @op
    def regroup(src, stride, dst):
        for r in range(16):
            copy(dst + 2 * r, src + r * stride, 2)
        _dwords(src, stride, dst + 32, 2, 4)


class MXFP4:
    block, row_bytes = 32, 17
    sums, sum_scale = 32, -BIAS
    lanes = 8
    levels = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice e2m1

    def _scale(e, exponent):
        """2^(e - 128), subnormal for e < 2, from exponent bytes as i32."""
        normal = (exponent - 1) << 23
        small = e.const(0x00200000, exponent.type) << exponent
        is_small = e.b.icmp_signed("<", exponent.v, e.const(2, exponent.type).v)
        bits = V(e, e.b.select(is_small, small.v, normal.v))
        to = vec(F32, exponent.type.count) if isinstance(exponent.type, ir.VectorType) else F32
        return V(e, e.b.bitcast(bits.v, to))

    def kernel(e, w, x, T, acc):
        d = MXFP4._scale(e, e.load(w, 0, I8).zext())
        s = [e.bcast(x.addr, x.sum(0, t)) for t in range(T)]
        for g in range(4):
            q = e.load(w, 16 + 64 * g, I8, 64)
            for h, u in ((g, q & 15), (g + 4, (q >> 4) & 15)):
                u = e.lut16(u, [_byte(v + BIAS) for v in MXFP4.levels])
                s = [e.dot4s(s[t], u, e.bcast(x.addr, x.q(h, t))) for t in range(T)]
        return [e.fma(s[t].f32() * d, e.bcast(x.addr, x.d(t), F32), acc[t]) for t in range(T)]

    def row(e, w, xs, lay, acc):
        q = e.load(w, 1, I8, 16)
        u = e.lut32(e.shuffle(q & 15, range(32), (q >> 4) & 15), MXFP4.levels)
        exponent = V(e, e.b.zext(e.load(w, 0, I8, 1).v, I32))
        return _row32(e, u, True, lay, xs, MXFP4._scale(e, exponent), acc)

    @op
    def regroup(src, stride, dst):
        for r in range(16):
            copy(dst + r, src + r * stride, 1)
        _dwords(src, stride, dst + 16, 1, 4)


class Q4_K:
    block, row_bytes = 256, 144
    sums, sum_scale = 32, None
    lanes = 16
    nibbles_at = 16
    """Byte of a row's block where the nibbles begin."""

    def _scales(e, w, at):
        """Vectors of d, -dmin, and the packed 6-bit scales and minima, from the head of a group's block."""
        d, dmin = e.load(w, 0, F16).f32(), e.load(w, 32, F16).f32()
        a, b, c = (e.load(w, at + 64 * i, I32) for i in range(3))  # 4 scale bytes of a row in its lane
        sc = [a & 0x3F3F3F3F, (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)]
        mn = [b & 0x3F3F3F3F, ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)]
        return d, -dmin, sc, mn

    def _minima(e, x, T, mn, dmin):
        m = [e.zero() for _ in range(T)]
        for p in range(4):
            v = mn[p // 2] >> 16 * (p % 2)
            v = (v & 0xFF) | ((v & 0xFF00) << 8)  # two minima as an int16 pair
            m = [e.dot2(m[t], v, e.bcast(x.addr, x.sum(2 * p, t))) for t in range(T)]
        return [m[t].f32() * dmin for t in range(T)]

    def kernel(e, w, x, T, acc, fifth=None):
        d, dmin, sc, mn = Q4_K._scales(e, w, 64)
        f = Q4_K._minima(e, x, T, mn, dmin)
        base = 256 if fifth is None else 768
        for j in range(8):
            s = [e.zero() for _ in range(T)]
            for g in range(4):
                q = e.load(w, base + 256 * j + 64 * g, I8, 64)
                for h, u in ((g, q & 15), (g + 4, (q >> 4) & 15)):
                    if fifth is not None:
                        u = u | (((e.load(w, fifth + 64 * h, I8, 64) >> j) & 1) << 4)
                    s = [e.dot4(s[t], u, e.bcast(x.addr, x.q(8 * j + h, t))) for t in range(T)]
            k = ((sc[j // 4] >> 8 * (j % 4)) & 63).f32() * d
            f = [e.fma(s[t].f32(), k, f[t]) for t in range(T)]
        return [e.fma(f[t], e.bcast(x.addr, x.d(t), F32), acc[t]) for t in range(T)]

    def row(e, w, xs, lay, acc, fifth=None):
        d, dmin = _half(e, w, 0), _half(e, w, 2)
        a, b, c = e.load(w, 4, I32, 1), e.load(w, 8, I32, 1), e.load(w, 12, I32, 1)
        words = [
            a & 0x3F3F3F3F, (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030),
            b & 0x3F3F3F3F, ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030),
        ]  # fmt: skip
        v = e.zero(I32, 4)
        for i, word in enumerate(words):
            v = V(e, e.b.insert_element(v.v, word.v, I32(i)))
        v = v.bits(I8)  # 8 scales, 8 minima
        isum = [None] * len(xs)
        nibbles = 16 if fifth is None else 48
        high = None
        if fifth is not None:
            h = e.load(w, fifth, I8, 32)
            high = e.shuffle(h, [*range(32), *range(32)])
        for c2 in range(2):
            q = e.load(w, nibbles + 64 * c2, I8, 64)  # sub-blocks 4 c2 (low nibbles, first half), 4 c2 + 2 (second)
            for half, u in ((0, q & 15), (1, (q >> 4) & 15)):
                j = 4 * c2 + half
                if high is not None:
                    shift = e.const([j] * 32 + [j + 2] * 32, vec(I8, 64))
                    u = u | (((high >> shift) & 1) << 4)
                scale = e.shuffle(v, [j] * 8 + [j + 2] * 8).zext()
                for t, x in enumerate(xs):
                    xq = e.shuffle(e.load(x, 32 * j, I8, 32), range(64), e.load(x, 32 * (j + 2), I8, 32))
                    s = e.dot4(e.zero(), u, xq) * scale
                    isum[t] = s if isum[t] is None else isum[t] + s
        minima = e.shuffle(v, range(8, 16)).zext()
        out = []
        for t, x in enumerate(xs):
            xd = e.load(x, lay.d(0), F32, 1)
            m = minima * e.load(x, lay.at_sum, I16, 8).sext()
            m16 = e.shuffle(m, [*range(8), *[8] * 8], e.zero(I32, 8))
            f = e.fma(isum[t].f32(), e.splat(d * xd), acc[t])
            out.append(e.fma(m16.f32(), e.splat(-(dmin * xd)), f))
        return out

    @op
    def regroup(src, stride, dst):
        _regroup_k4(src, stride, dst, 16, dst + 256)


@inner
def _regroup_k4(src, stride, dst, nibbles_at, out):
    """d, dmin and scale bytes to the head, and nibbles: in the file a 32-byte chunk holds sub-blocks 2 c (low) and
    2 c + 1 (high), here a vector holds k-group g (low) and g + 4 (high) of one sub-block."""
    for r in range(16):
        row = src + r * stride
        copy(dst + 2 * r, row, 2)
        copy(dst + 32 + 2 * r, row + 2, 2)
        for i in range(3):
            put_i32(dst + 64, i * 16 + r, i32(row + 4, i))
        for j in range(8):
            chunk, shift = row + nibbles_at + 32 * (j >> 1), 4 * (j & 1)
            for g in range(4):
                low = (i32(chunk, g) >> shift) & 0x0F0F0F0F
                high = (i32(chunk, g + 4) >> shift) & 0x0F0F0F0F
                put_i32(out, (4 * j + g) * 16 + r, low | (high << 4))


class Q5_K:
    block, row_bytes = 256, 176
    sums, sum_scale = 32, None
    lanes = 16

    def kernel(e, w, x, T, acc):
        return Q4_K.kernel(e, w, x, T, acc, fifth=256)

    def row(e, w, xs, lay, acc):
        return Q4_K.row(e, w, xs, lay, acc, fifth=16)

    @op
    def regroup(src, stride, dst):
        _dwords(src, stride, dst + 256, 16, 8)
        _regroup_k4(src, stride, dst, 48, dst + 768)


class Q6_K:
    block, row_bytes = 256, 210
    sums, sum_scale = 16, -32
    lanes = 16

    def kernel(e, w, x, T, acc):
        d = e.load(w, 0, F16).f32()
        f = [e.zero(F32) for _ in range(T)]
        for j in range(16):
            l0, l1, h = (e.load(w, 288 + 192 * j + 64 * i, I8, 64) for i in range(3))
            q = [
                (l0 & 15) | ((h & 3) << 4), (l1 & 15) | ((h & 12) << 2),
                ((l0 >> 4) & 15) | (h & 0x30), ((l1 >> 4) & 15) | ((h >> 2) & 0x30),
            ]  # fmt: skip
            s = [e.bcast(x.addr, x.sum(j, t)) for t in range(T)]
            for g in range(4):
                s = [e.dot4(s[t], q[g], e.bcast(x.addr, x.q(4 * j + g, t))) for t in range(T)]
            k = e.load(w, 32 + 16 * j, I8).sext().f32() * d
            f = [e.fma(s[t].f32(), k, f[t]) for t in range(T)]
        return [e.fma(f[t], e.bcast(x.addr, x.d(t), F32), acc[t]) for t in range(T)]

    def row(e, w, xs, lay, acc):
        xq = [[e.load(x, 64 * i, I8, 64) for i in range(4)] for x in xs]
        neg = [[e.zero() - e.dot4(e.zero(), e.const(32, vec(I8, 64)), q) for q in row] for row in xq]
        d, sc = _half(e, w, 208), e.load(w, 192, I8, 16)
        isum = [None] * len(xs)
        for h in range(2):
            ql = e.load(w, 64 * h, I8, 64)
            qh = e.load(w, 128 + 32 * h, I64, 4)
            qh = e.shuffle(qh, [0, 1, 2, 3, 0, 1, 2, 3])
            for i, (lo, sh) in enumerate(((ql & 15, (0, 2)), ((ql >> 4) & 15, (4, 6)))):
                hi = (qh >> e.const([sh[0]] * 4 + [sh[1]] * 4, vec(I64, 8))) & 0x0303030303030303
                u = lo | (hi << 4).bits(I8)
                k = 8 * h + 4 * i
                scale = e.shuffle(sc, [k + j // 4 for j in range(16)]).sext()
                for t in range(len(xs)):
                    s = e.dot4(neg[t][2 * h + i], u, xq[t][2 * h + i]) * scale
                    isum[t] = s if isum[t] is None else isum[t] + s
        return [e.fma(isum[t].f32(), e.splat(d * e.load(x, lay.d(0), F32, 1)), acc[t]) for t, x in enumerate(xs)]

    @op
    def regroup(src, stride, dst):
        for r in range(16):
            row = src + r * stride
            copy(dst + 2 * r, row + 208, 2)
            for j in range(16):
                copy(dst + 32 + 16 * j + r, row + 192 + j, 1)
                half, quarter, part = j >> 3, (j >> 1) & 3, (j & 1) * 16
                low, shift = row + half * 64 + (quarter & 1) * 32 + part, 4 * (quarter >> 1)
                high, hshift = row + 128 + half * 32 + part, 2 * quarter
                l0, l1 = (i32(low, 0) >> shift) & 0x0F0F0F0F, (i32(low, 1) >> shift) & 0x0F0F0F0F
                l2, l3 = (i32(low, 2) >> shift) & 0x0F0F0F0F, (i32(low, 3) >> shift) & 0x0F0F0F0F
                h0, h1 = (i32(high, 0) >> hshift) & 0x03030303, (i32(high, 1) >> hshift) & 0x03030303
                h2, h3 = (i32(high, 2) >> hshift) & 0x03030303, (i32(high, 3) >> hshift) & 0x03030303
                out = dst + 288 + 192 * j
                put_i32(out, r, l0 | (l2 << 4))
                put_i32(out, 16 + r, l1 | (l3 << 4))
                put_i32(out, 32 + r, h0 | (h1 << 2) | (h2 << 4) | (h3 << 6))


class IQ4_XS:
    block, row_bytes = 256, 136
    sums, sum_scale = 32, -BIAS
    lanes = 8
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

    def kernel(e, w, x, T, acc):
        d = e.load(w, 0, F16).f32()
        high, low = e.load(w, 32, I16).zext(), e.load(w, 64, I32)
        f = [e.zero(F32) for _ in range(T)]
        for j in range(8):
            s = [e.bcast(x.addr, x.sum(j, t)) for t in range(T)]
            for g in range(4):
                q = e.load(w, 128 + 256 * j + 64 * g, I8, 64)
                for h, u in ((g, q & 15), (g + 4, (q >> 4) & 15)):
                    u = e.lut16(u, [_byte(v + BIAS) for v in IQ4_XS.levels])
                    s = [e.dot4s(s[t], u, e.bcast(x.addr, x.q(8 * j + h, t))) for t in range(T)]
            k = (((low >> 4 * j) & 15) | (((high >> 2 * j) & 3) << 4)) - 32
            f = [e.fma(s[t].f32(), k.f32() * d, f[t]) for t in range(T)]
        return [e.fma(f[t], e.bcast(x.addr, x.d(t), F32), acc[t]) for t in range(T)]

    def row(e, w, xs, lay, acc):
        d = _half(e, w, 0)
        high = V(e, e.b.zext(e.load(w, 2, I16, 1).v, I32))
        low = e.load(w, 4, I32, 1)
        for j in range(8):
            q = e.load(w, 8 + 16 * j, I8, 16)
            u = e.lut32(e.shuffle(q & 15, range(32), (q >> 4) & 15), IQ4_XS.levels)
            k = (((low >> 4 * j) & 15) | (((high >> 2 * j) & 3) << 4)) - 32
            acc = _row32(e, u, True, lay, xs, d * k.f32(), acc, j)
        return acc

    @op
    def regroup(src, stride, dst):
        for r in range(16):
            copy(dst + 2 * r, src + r * stride, 2)
            copy(dst + 32 + 2 * r, src + r * stride + 2, 2)
            put_i32(dst + 64, r, i32(src + r * stride + 4, 0))
            for j in range(8):
                for g in range(4):
                    put_i32(dst + 128, (4 * j + g) * 16 + r, i32(src + r * stride + 8 + 16 * j, g))


def _byte(v):
    """The signed form of a byte 0..255, as LLVM's constants want it."""
    return v - 256 if v > 127 else v


FORMATS = {c.__name__: c for c in (Q8_0, Q4_0, MXFP4, Q4_K, Q5_K, Q6_K, IQ4_XS)}
