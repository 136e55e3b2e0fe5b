"""One block of any quantised type to float32, natively: decode(src, dst, lut). The definition is `headrace.quants`.

`lut` is the address of the type's table of float32 (a codebook and, behind it, the 128 sign patterns), or 0.
"""

from functools import cache as once

import numpy as np

from ...quants.codebook_types import NON_LINEAR, SIGNS
from ...quants.codebooks import codebook
from ...quants.scalar_types import E2M1
from .native import bits_f32, f16, f32, i8, inner, op, put_f32, u8, u16


@op
def F32(src, dst, lut):
    put_f32(dst, 0, f32(src, 0))


@op
def F16(src, dst, lut):
    put_f32(dst, 0, f16(src, 0))


@op
def BF16(src, dst, lut):
    put_f32(dst, 0, bits_f32(u16(src, 0) << 16))


@op
def Q8_0(src, dst, lut):
    d = f16(src, 0)
    for i in range(32):
        put_f32(dst, i, d * i8(src + 2, i))


@op
def Q4_0(src, dst, lut):
    d = f16(src, 0)
    for i in range(16):
        put_f32(dst, i, d * ((u8(src + 2, i) & 15) - 8))
        put_f32(dst, i + 16, d * ((u8(src + 2, i) >> 4) - 8))


@op
def Q4_1(src, dst, lut):
    d, m = f16(src, 0), f16(src, 1)
    for i in range(16):
        put_f32(dst, i, d * (u8(src + 4, i) & 15) + m)
        put_f32(dst, i + 16, d * (u8(src + 4, i) >> 4) + m)


@inner
def _fifth(src, i):
    return ((u8(src, i >> 3) >> (i & 7)) & 1) << 4


@op
def Q5_0(src, dst, lut):
    d = f16(src, 0)
    for i in range(16):
        put_f32(dst, i, d * (((u8(src + 6, i) & 15) | _fifth(src + 2, i)) - 16))
        put_f32(dst, i + 16, d * (((u8(src + 6, i) >> 4) | _fifth(src + 2, i + 16)) - 16))


@op
def Q5_1(src, dst, lut):
    d, m = f16(src, 0), f16(src, 1)
    for i in range(16):
        put_f32(dst, i, d * ((u8(src + 8, i) & 15) | _fifth(src + 4, i)) + m)
        put_f32(dst, i + 16, d * ((u8(src + 8, i) >> 4) | _fifth(src + 4, i + 16)) + m)


@op
def Q2_K(src, dst, lut):
    d, dmin = f16(src + 80, 0), f16(src + 80, 1)
    for j in range(16):
        s = u8(src, j)
        scale, m = d * (s & 15), dmin * (s >> 4)
        for i in range(16):
            q = (u8(src + 16, (j >> 3) * 32 + (j & 1) * 16 + i) >> (((j >> 1) & 3) * 2)) & 3
            put_f32(dst, 16 * j + i, scale * q - m)


@op
def Q3_K(src, dst, lut):
    d = f16(src + 108, 0)
    for j in range(16):
        low = (u8(src + 96, j & 7) >> (4 * (j >> 3))) & 15
        high = (u8(src + 104, j & 3) >> (2 * (j >> 2))) & 3
        scale = d * ((low | (high << 4)) - 32)
        for i in range(16):
            k = (j & 1) * 16 + i
            q = (u8(src + 32, (j >> 3) * 32 + k) >> (((j >> 1) & 3) * 2)) & 3
            put_f32(dst, 16 * j + i, scale * (q - 4 * (1 - ((u8(src, k) >> (j >> 1)) & 1))))


@inner
def _k4(src, j):
    """Scale and minimum of sub-block j of Q4_K and Q5_K, in one number."""
    low, high, last = u8(src, j & 3), u8(src, (j & 3) + 4), u8(src, (j & 3) + 8)
    if j < 4:
        return (low & 63) | ((high & 63) << 8)
    return ((last & 15) | ((low >> 6) << 4)) | (((last >> 4) | ((high >> 6) << 4)) << 8)


@op
def Q4_K(src, dst, lut):
    d, dmin = f16(src, 0), f16(src, 1)
    for j in range(8):
        s = _k4(src + 4, j)
        scale, m = d * (s & 255), dmin * (s >> 8)
        for i in range(32):
            q = (u8(src + 16, (j >> 1) * 32 + i) >> (4 * (j & 1))) & 15
            put_f32(dst, 32 * j + i, scale * q - m)


@op
def Q5_K(src, dst, lut):
    d, dmin = f16(src, 0), f16(src, 1)
    for j in range(8):
        s = _k4(src + 4, j)
        scale, m = d * (s & 255), dmin * (s >> 8)
        for i in range(32):
            q = (u8(src + 48, (j >> 1) * 32 + i) >> (4 * (j & 1))) & 15
            q |= ((u8(src + 16, i) >> j) & 1) << 4
            put_f32(dst, 32 * j + i, scale * q - m)


@op
def Q6_K(src, dst, lut):
    d = f16(src + 208, 0)
    for j in range(16):
        half, quarter = j >> 3, (j >> 1) & 3
        scale = d * i8(src + 192, j)
        for i in range(16):
            k = (j & 1) * 16 + i
            low = (u8(src, half * 64 + (quarter & 1) * 32 + k) >> (4 * (quarter >> 1))) & 15
            high = (u8(src + 128, half * 32 + k) >> (2 * quarter)) & 3
            put_f32(dst, 16 * j + i, scale * ((low | (high << 4)) - 32))


@inner
def _trits(src, dst, d, n_bytes, n_digits):
    for j in range(n_digits):
        power = 3**j
        for i in range(n_bytes):
            q = (((u8(src, i) * power) & 255) * 3) >> 8
            put_f32(dst, j * n_bytes + i, d * (q - 1))


@op
def TQ1_0(src, dst, lut):
    d = f16(src + 52, 0)
    _trits(src, dst, d, 32, 5)
    _trits(src + 32, dst + 4 * 160, d, 16, 5)
    _trits(src + 48, dst + 4 * 240, d, 4, 4)


@op
def TQ2_0(src, dst, lut):
    d = f16(src + 64, 0)
    for h in range(2):
        for j in range(4):
            for i in range(32):
                q = (u8(src, 32 * h + i) >> (2 * j)) & 3
                put_f32(dst, 128 * h + 32 * j + i, d * (q - 1))


@op
def Q1_0(src, dst, lut):
    d = f16(src, 0)
    for i in range(128):
        put_f32(dst, i, d * (2 * ((u8(src + 2, i >> 3) >> (i & 7)) & 1) - 1))


@op
def MXFP4(src, dst, lut):
    e = u8(src, 0)
    d = bits_f32(0x00200000 << e if e < 2 else (e - 1) << 23)
    for i in range(16):
        put_f32(dst, i, d * f32(lut, u8(src + 1, i) & 15))
        put_f32(dst, i + 16, d * f32(lut, u8(src + 1, i) >> 4))


@op
def NVFP4(src, dst, lut):
    for j in range(4):
        s = u8(src, j)
        e, m = s >> 3 & 15, s & 7
        d = bits_f32((e + 119) << 23) * (1 + m / 8) if e else m * (2.0**-10)
        if s == 0x7F or s == 0:
            d = 0.0
        for i in range(8):
            q = u8(src + 4, 8 * j + i)
            put_f32(dst, 16 * j + i, d * f32(lut, q & 15))
            put_f32(dst, 16 * j + i + 8, d * f32(lut, q >> 4))


@op
def IQ4_NL(src, dst, lut):
    d = f16(src, 0)
    for i in range(16):
        put_f32(dst, i, d * f32(lut, u8(src + 2, i) & 15))
        put_f32(dst, i + 16, d * f32(lut, u8(src + 2, i) >> 4))


@op
def IQ4_XS(src, dst, lut):
    d, high = f16(src, 0), u16(src + 2, 0)
    for j in range(8):
        low = (u8(src + 4, j >> 1) >> (4 * (j & 1))) & 15
        scale = d * ((low | (((high >> (2 * j)) & 3) << 4)) - 32)
        for i in range(16):
            q = u8(src + 8, 16 * j + i)
            put_f32(dst, 32 * j + i, scale * f32(lut, q & 15))
            put_f32(dst, 32 * j + i + 16, scale * f32(lut, q >> 4))


@inner
def _word(src, i):
    """A little-endian uint32 at any byte."""
    return u16(src, 2 * i) | (u16(src, 2 * i + 1) << 16)


@inner
def _signed_rows(dst, d, lut, row, width, signs, code):
    """`width` codebook values of a row, signs from pattern `code`, to dst."""
    for i in range(width):
        put_f32(dst, i, d * f32(lut, row * width + i) * f32(signs, code * 8 + i))


@op
def IQ2_XXS(src, dst, lut):
    d, signs = f16(src, 0), lut + 4 * 256 * 8
    for j in range(8):
        w = _word(src + 2 + 8 * j + 4, 0)
        scale = d * ((w >> 28) + 0.5) * 0.25
        for g in range(4):
            row = u8(src + 2 + 8 * j, g)
            _signed_rows(dst + 4 * (32 * j + 8 * g), scale, lut, row, 8, signs, (w >> (7 * g)) & 127)


@op
def IQ2_XS(src, dst, lut):
    d, signs = f16(src, 0), lut + 4 * 512 * 8
    for g in range(32):
        w = u16(src + 2, g)
        s = (u8(src + 66, g >> 2) >> (4 * ((g >> 1) & 1))) & 15
        _signed_rows(dst + 4 * 8 * g, d * (s + 0.5) * 0.25, lut, w & 511, 8, signs, w >> 9)


@op
def IQ2_S(src, dst, lut):
    d = f16(src, 0)
    for g in range(32):
        row = u8(src + 2, g) | (((u8(src + 66, g >> 2) >> (2 * (g & 3))) & 3) << 8)
        s = (u8(src + 74, g >> 2) >> (4 * ((g >> 1) & 1))) & 15
        scale, bits = d * (s + 0.5) * 0.25, u8(src + 34, g)
        for i in range(8):
            put_f32(dst, 8 * g + i, scale * f32(lut, 8 * row + i) * (1 - 2 * ((bits >> i) & 1)))


@op
def IQ3_XXS(src, dst, lut):
    d, signs = f16(src, 0), lut + 4 * 256 * 4
    for j in range(8):
        w = _word(src + 66, j)
        scale = d * ((w >> 28) + 0.5) * 0.5
        for g in range(8):
            code = (w >> (7 * (g >> 1))) & 127
            for i in range(4):
                v = f32(lut, 4 * u8(src + 2, 8 * j + g) + i) * f32(signs, 8 * code + 4 * (g & 1) + i)
                put_f32(dst, 32 * j + 4 * g + i, scale * v)


@op
def IQ3_S(src, dst, lut):
    d = f16(src, 0)
    for g in range(64):
        row = u8(src + 2, g) | (((u8(src + 66, g >> 3) >> (g & 7)) & 1) << 8)
        scale = d * (1 + 2 * ((u8(src + 106, g >> 4) >> (4 * ((g >> 3) & 1))) & 15))
        bits = u8(src + 74, g >> 1) >> (4 * (g & 1))
        for i in range(4):
            put_f32(dst, 4 * g + i, scale * f32(lut, 4 * row + i) * (1 - 2 * ((bits >> i) & 1)))


@op
def IQ1_S(src, dst, lut):
    d = f16(src, 0)
    for g in range(32):
        w = u16(src + 34, g >> 2)
        row = u8(src + 2, g) | (((w >> (3 * (g & 3))) & 7) << 8)
        scale, shift = d * (2 * ((w >> 12) & 7) + 1), -0.125 if w & 0x8000 else 0.125
        for i in range(8):
            put_f32(dst, 8 * g + i, scale * (f32(lut, 8 * row + i) + shift))


@op
def IQ1_M(src, dst, lut):
    bits = (u16(src + 48, 0) >> 12) | ((u16(src + 48, 1) >> 8) & 0xF0) | ((u16(src + 48, 2) >> 4) & 0xF00)
    bits |= u16(src + 48, 3) & 0xF000
    sign, e, m = 1 - 2 * (bits >> 15), (bits >> 10) & 31, bits & 1023
    d = sign * (bits_f32((e + 112) << 23) * (1 + m / 1024) if e else m * 2.0**-24)
    for g in range(32):
        n = (u8(src + 32, g >> 1) >> (4 * (g & 1))) & 15
        row = u8(src, g) | ((n & 7) << 8)
        s = (u16(src + 48, g >> 3) >> (3 * ((g >> 1) & 3))) & 7
        scale, shift = d * (2 * s + 1), -0.125 if n & 8 else 0.125
        for i in range(8):
            put_f32(dst, 8 * g + i, scale * (f32(lut, 8 * row + i) + shift))


DECODERS = {
    f.__name__: f
    for f in (
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS,
        IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0,
    )
}  # fmt: skip


@once
def table(name):
    """The type's lookup table, float32, or None."""
    if name in ("MXFP4", "NVFP4"):
        return E2M1
    if name in ("IQ4_NL", "IQ4_XS"):
        return NON_LINEAR
    if name.startswith("IQ"):
        return np.concatenate([codebook(name).ravel(), SIGNS.ravel()])
    return None
