"""Decoders of the IQ types, whose weights are rows of a codebook: see `headrace.quants.codebook_types`.

Codebooks of 4 or 8 numbers a row lie in `lut` as bytes, four numbers a word; so these decoders work on 64 groups j of
four weights, [R, 64], of which two make one row of 8.
"""

import triton
import triton.language as tl

from .scalar_types import f16_at


@triton.jit
def _u16(p):
    return tl.load(p.to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def _u32(p):
    return _u16(p) | (_u16(p + 2) << 16)


@triton.jit
def _with_eighth(code):
    """7 sign bits and an eighth that makes the number of minus signs even."""
    x = code ^ (code >> 4)
    x ^= x >> 2
    return code | (((x ^ (x >> 1)) & 1) << 7)


@triton.jit
def _words(lut, word):
    """Signed bytes of the words [R, 64], float32 [R, 64, 4]."""
    i = tl.arange(0, 4)[None, None, :]
    return ((tl.load(lut + word)[:, :, None] << (24 - 8 * i)) >> 24).to(tl.float32)


@triton.jit
def _signed(lut, word, signs, d):
    """d times the numbers of each word, minus where a bit of `signs` is set; all [R, 64]."""
    minus = (signs[:, :, None] >> tl.arange(0, 4)[None, None, :]) & 1
    w = d[:, :, None] * (_words(lut, word) * (1 - 2 * minus).to(tl.float32))
    return tl.reshape(w, (d.shape[0], 256))


@triton.jit
def _nibble(p, k):
    """The k-th nibble from p, low ones first."""
    return (tl.load(p + (k >> 1)).to(tl.int32) >> ((k & 1) * 4)) & 15


@triton.jit
def iq2_xxs(p, lut):
    j = tl.arange(0, 64)[None, :]
    part, s = (j >> 1) & 3, p[:, None] + 2 + (j >> 3) * 8
    row, word = tl.load(s + part).to(tl.int32), _u32(s + 4)
    signs = _with_eighth((word >> (7 * part)) & 127)
    d = f16_at(p)[:, None] * (((word >> 28) & 15).to(tl.float32) + 0.5) * 0.25
    return _signed(lut, 2 * row + (j & 1), signs >> (4 * (j & 1)), d)


@triton.jit
def iq2_xs(p, lut):
    j = tl.arange(0, 64)[None, :]
    w = _u16(p[:, None] + 2 + (j >> 1) * 2)
    d = f16_at(p)[:, None] * (_nibble(p[:, None] + 66, j >> 2).to(tl.float32) + 0.5) * 0.25
    return _signed(lut, 2 * (w & 511) + (j & 1), _with_eighth(w >> 9) >> (4 * (j & 1)), d)


@triton.jit
def iq2_s(p, lut):
    j = tl.arange(0, 64)[None, :]
    g = p[:, None] + (j >> 1)
    high = (tl.load(p[:, None] + 66 + (j >> 3)).to(tl.int32) >> (((j >> 1) & 3) * 2)) & 3
    row = tl.load(g + 2).to(tl.int32) | (high << 8)
    d = f16_at(p)[:, None] * (_nibble(p[:, None] + 74, j >> 2).to(tl.float32) + 0.5) * 0.25
    return _signed(lut, 2 * row + (j & 1), tl.load(g + 34).to(tl.int32) >> (4 * (j & 1)), d)


@triton.jit
def iq3_xxs(p, lut):
    j = tl.arange(0, 64)[None, :]
    word = _u32(p[:, None] + 66 + (j >> 3) * 4)
    signs = _with_eighth((word >> (7 * ((j >> 1) & 3))) & 127)
    d = f16_at(p)[:, None] * (((word >> 28) & 15).to(tl.float32) + 0.5) * 0.5
    return _signed(lut, tl.load(p[:, None] + 2 + j).to(tl.int32), signs >> (4 * (j & 1)), d)


@triton.jit
def iq3_s(p, lut):
    j = tl.arange(0, 64)[None, :]
    ninth = (tl.load(p[:, None] + 66 + (j >> 3)).to(tl.int32) >> (j & 7)) & 1
    row = tl.load(p[:, None] + 2 + j).to(tl.int32) | (ninth << 8)
    d = f16_at(p)[:, None] * (1 + 2 * _nibble(p[:, None] + 106, j >> 3)).to(tl.float32)
    return _signed(lut, row, _nibble(p[:, None] + 74, j), d)


@triton.jit
def _shifted(lut, row, negative, d):
    """d times (the numbers of a row of 8 plus or minus 1/8); all [R, 64]."""
    word = 2 * row + (tl.arange(0, 64)[None, :] & 1)
    shift = tl.where(negative, -0.125, 0.125)
    return tl.reshape(d[:, :, None] * (_words(lut, word) + shift[:, :, None]), (d.shape[0], 256))


@triton.jit
def iq1_s(p, lut):
    j = tl.arange(0, 64)[None, :]
    w = _u16(p[:, None] + 34 + (j >> 3) * 2)
    row = tl.load(p[:, None] + 2 + (j >> 1)).to(tl.int32) | (((w >> (3 * ((j >> 1) & 3))) & 7) << 8)
    d = f16_at(p)[:, None] * (2 * ((w >> 12) & 7) + 1).to(tl.float32)
    return _shifted(lut, row, (w >> 15) > 0, d)


@triton.jit
def iq1_m(p, lut):
    j = tl.arange(0, 64)[None, :]
    s = p + 48
    bits = (_u16(s) >> 12) | ((_u16(s + 2) >> 12) << 4) | ((_u16(s + 4) >> 12) << 8) | ((_u16(s + 6) >> 12) << 12)
    scale = (_u16(s[:, None] + (j >> 4) * 2) >> (3 * ((j >> 2) & 3))) & 7
    upper = _nibble(p[:, None] + 32, j >> 1)
    row = tl.load(p[:, None] + (j >> 1)).to(tl.int32) | ((upper & 7) << 8)
    d = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None] * (2 * scale + 1).to(tl.float32)
    return _shifted(lut, row, (upper >> 3) > 0, d)


@triton.jit
def iq4_nl(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 2 + i).to(tl.int32) >> (4 * j)) & 15
    w = f16_at(p)[:, None, None] * tl.load(lut + q).to(tl.float32)
    return tl.reshape(w, (p.shape[0], 32))


@triton.jit
def iq4_xs(p, lut):
    k = tl.arange(0, 8)[None, :]
    high = tl.load(p[:, None] + 2 + (k >> 2)).to(tl.int32) >> ((k & 3) * 2)
    low = tl.load(p[:, None] + 4 + (k >> 1)).to(tl.int32) >> ((k & 1) * 4)
    d = f16_at(p)[:, None] * (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
    j, i = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 8 + (j >> 1) * 16 + i).to(tl.int32) >> ((j & 1) * 4)) & 15
    w = tl.reshape(tl.load(lut + q).to(tl.float32), (p.shape[0], 8, 32)) * d[:, :, None]
    return tl.reshape(w, (p.shape[0], 256))
