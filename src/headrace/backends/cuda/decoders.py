"""Tile decoders: one Triton function per GGUF tensor type, passed to the generic kernels as a constexpr.

`decode(p, lut)` takes uint8 pointers [R] to the first byte of one block in each of R rows and returns the block's
weights as float32 [R, block]; `lut` points to the type's lookup table (see `TABLES`), or nowhere. Layouts are those
of `headrace.quants`, which is the definition; bytes are shared by neighbouring lanes, so they are fetched from cache.
"""

import triton
import triton.language as tl


@triton.jit
def _f16(p):
    return tl.load(p.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def f32(p, lut):
    k = tl.arange(0, 32)[None, :]
    return tl.load(p.to(tl.pointer_type(tl.float32))[:, None] + k)


@triton.jit
def f16(p, lut):
    k = tl.arange(0, 32)[None, :]
    return tl.load(p.to(tl.pointer_type(tl.float16))[:, None] + k).to(tl.float32)


@triton.jit
def bf16(p, lut):
    k = tl.arange(0, 32)[None, :]
    return tl.load(p.to(tl.pointer_type(tl.bfloat16))[:, None] + k).to(tl.float32)


@triton.jit
def q8_0(p, lut):
    k = tl.arange(0, 32)[None, :]
    q = tl.load(p.to(tl.pointer_type(tl.int8))[:, None] + 2 + k).to(tl.float32)
    return _f16(p)[:, None] * q


@triton.jit
def _scales_k4(p):
    """d * scale and dmin * minimum of the 8 sub-blocks of Q4_K and Q5_K, float32 [R, 8]."""
    j = tl.arange(0, 8)[None, :]
    s = p[:, None] + 4
    low, high = tl.load(s + (j & 3)).to(tl.int32), tl.load(s + (j & 3) + 4).to(tl.int32)
    last = tl.load(s + (j & 3) + 8).to(tl.int32)
    scale = tl.where(j < 4, low & 63, (last & 15) | ((low >> 6) << 4))
    minimum = tl.where(j < 4, high & 63, (last >> 4) | ((high >> 6) << 4))
    return _f16(p)[:, None] * scale.to(tl.float32), _f16(p + 2)[:, None] * minimum.to(tl.float32)


@triton.jit
def q4_k(p, lut):
    d, m = _scales_k4(p)
    j, i = tl.arange(0, 8)[None, :, None], tl.arange(0, 32)[None, None, :]
    q = (tl.load(p[:, None, None] + 16 + (j >> 1) * 32 + i).to(tl.int32) >> ((j & 1) * 4)) & 15
    return tl.reshape(d[:, :, None] * q.to(tl.float32) - m[:, :, None], (p.shape[0], 256))


@triton.jit
def q6_k(p, lut):
    j = tl.arange(0, 16)[None, :]  # sub-block of 16
    d = _f16(p + 208)[:, None] * tl.load(p.to(tl.pointer_type(tl.int8))[:, None] + 192 + j).to(tl.float32)
    jj = tl.arange(0, 16)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    half, quarter, part = jj >> 3, (jj >> 1) & 3, (jj & 1) * 16 + i
    low = tl.load(p[:, None, None] + half * 64 + (quarter & 1) * 32 + part).to(tl.int32)
    high = tl.load(p[:, None, None] + 128 + half * 32 + part).to(tl.int32)
    q = ((low >> ((quarter >> 1) * 4)) & 15) | (((high >> (quarter * 2)) & 3) << 4)
    w = d[:, :, None] * (q - 32).to(tl.float32)
    return tl.reshape(w, (p.shape[0], 256))


@triton.jit
def q4_0(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 2 + i).to(tl.int32) >> (4 * j)) & 15
    return tl.reshape(_f16(p)[:, None, None] * (q - 8).to(tl.float32), (p.shape[0], 32))


@triton.jit
def q4_1(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 4 + i).to(tl.int32) >> (4 * j)) & 15
    w = _f16(p)[:, None, None] * q.to(tl.float32) + _f16(p + 2)[:, None, None]
    return tl.reshape(w, (p.shape[0], 32))


@triton.jit
def _fifth_bits(p, j, i):
    """Bit 16 j + i of the 32 bits at p, as the fifth bit of a quant."""
    k = 16 * j + i
    return ((tl.load(p[:, None, None] + (k >> 3)).to(tl.int32) >> (k & 7)) & 1) << 4


@triton.jit
def q5_0(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 6 + i).to(tl.int32) >> (4 * j)) & 15
    q |= _fifth_bits(p + 2, j, i)
    return tl.reshape(_f16(p)[:, None, None] * (q - 16).to(tl.float32), (p.shape[0], 32))


@triton.jit
def q5_1(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 8 + i).to(tl.int32) >> (4 * j)) & 15
    q |= _fifth_bits(p + 4, j, i)
    w = _f16(p)[:, None, None] * q.to(tl.float32) + _f16(p + 2)[:, None, None]
    return tl.reshape(w, (p.shape[0], 32))


@triton.jit
def q5_k(p, lut):
    d, m = _scales_k4(p)
    j, i = tl.arange(0, 8)[None, :, None], tl.arange(0, 32)[None, None, :]
    q = (tl.load(p[:, None, None] + 48 + (j >> 1) * 32 + i).to(tl.int32) >> ((j & 1) * 4)) & 15
    q |= ((tl.load(p[:, None, None] + 16 + i).to(tl.int32) >> j) & 1) << 4
    return tl.reshape(d[:, :, None] * q.to(tl.float32) - m[:, :, None], (p.shape[0], 256))


@triton.jit
def q2_k(p, lut):
    s = tl.load(p[:, None] + tl.arange(0, 16)[None, :]).to(tl.int32)
    d = _f16(p + 80)[:, None] * (s & 15).to(tl.float32)
    m = _f16(p + 82)[:, None] * (s >> 4).to(tl.float32)
    j, i = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 16 + (j >> 3) * 32 + (j & 1) * 16 + i).to(tl.int32) >> (((j >> 1) & 3) * 2)) & 3
    return tl.reshape(d[:, :, None] * q.to(tl.float32) - m[:, :, None], (p.shape[0], 256))


@triton.jit
def q3_k(p, lut):
    k = tl.arange(0, 16)[None, :]
    low = (tl.load(p[:, None] + 96 + (k & 7)).to(tl.int32) >> ((k >> 3) * 4)) & 15
    high = (tl.load(p[:, None] + 104 + (k & 3)).to(tl.int32) >> ((k >> 2) * 2)) & 3
    d = _f16(p + 108)[:, None] * ((low | (high << 4)) - 32).to(tl.float32)
    j, i = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 32 + (j >> 3) * 32 + (j & 1) * 16 + i).to(tl.int32) >> (((j >> 1) & 3) * 2)) & 3
    h = (tl.load(p[:, None, None] + (j & 1) * 16 + i).to(tl.int32) >> (j >> 1)) & 1
    return tl.reshape(d[:, :, None] * (q - 4 * (1 - h)).to(tl.float32), (p.shape[0], 256))


@triton.jit
def iq4_nl(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 2 + i).to(tl.int32) >> (4 * j)) & 15
    w = _f16(p)[:, None, None] * tl.load(lut + q).to(tl.float32)
    return tl.reshape(w, (p.shape[0], 32))


@triton.jit
def iq4_xs(p, lut):
    k = tl.arange(0, 8)[None, :]
    high = tl.load(p[:, None] + 2 + (k >> 2)).to(tl.int32) >> ((k & 3) * 2)
    low = tl.load(p[:, None] + 4 + (k >> 1)).to(tl.int32) >> ((k & 1) * 4)
    d = _f16(p)[:, None] * (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
    j, i = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 8 + (j >> 1) * 16 + i).to(tl.int32) >> ((j & 1) * 4)) & 15
    w = tl.reshape(tl.load(lut + q).to(tl.float32), (p.shape[0], 8, 32)) * d[:, :, None]
    return tl.reshape(w, (p.shape[0], 256))


@triton.jit
def mxfp4(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 1 + i).to(tl.int32) >> (4 * j)) & 15
    e = tl.load(p).to(tl.int32)  # the table holds twice the value, so the scale is 2^(e - 128)
    bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)
    w = bits.to(tl.float32, bitcast=True)[:, None, None] * tl.load(lut + q).to(tl.float32)
    return tl.reshape(w, (p.shape[0], 32))


DECODERS = {
    "F32": f32, "F16": f16, "BF16": bf16, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0,
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}  # fmt: skip
"""Tensor type -> decoder. Float types decode 32 weights at a time, the others one block."""

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES = {
    "IQ4_NL": _NON_LINEAR, "IQ4_XS": _NON_LINEAR,
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}  # fmt: skip
"""int32 lookup tables by tensor type."""


def decode_block(name: str, block: int) -> int:
    """Weights that one call of a type's decoder yields per row."""
    return 32 if name in ("F32", "F16", "BF16") else block
