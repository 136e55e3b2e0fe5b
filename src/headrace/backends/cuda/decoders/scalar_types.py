"""Decoders of the types whose weights are numbers of a few bits, scaled: see `headrace.quants.scalar_types`."""

import triton
import triton.language as tl


@triton.jit
def f16_at(p):
    """The float16 at each address, float32."""
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
    bits = tl.load(p.to(tl.pointer_type(tl.uint16))[:, None] + k).to(tl.uint32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def q8_0(p, lut):
    k = tl.arange(0, 32)[None, :]
    q = tl.load(p.to(tl.pointer_type(tl.int8))[:, None] + 2 + k).to(tl.float32)
    return f16_at(p)[:, None] * q


@triton.jit
def _scales_k4(p):
    """d * scale and dmin * minimum of the 8 sub-blocks of Q4_K and Q5_K, float32 [R, 8]."""
    j = tl.arange(0, 8)[None, :]
    s = p[:, None] + 4
    low, high = tl.load(s + (j & 3)).to(tl.int32), tl.load(s + (j & 3) + 4).to(tl.int32)
    last = tl.load(s + (j & 3) + 8).to(tl.int32)
    scale = tl.where(j < 4, low & 63, (last & 15) | ((low >> 6) << 4))
    minimum = tl.where(j < 4, high & 63, (last >> 4) | ((high >> 6) << 4))
    return f16_at(p)[:, None] * scale.to(tl.float32), f16_at(p + 2)[:, None] * minimum.to(tl.float32)


@triton.jit
def q4_k(p, lut):
    d, m = _scales_k4(p)
    j, i = tl.arange(0, 8)[None, :, None], tl.arange(0, 32)[None, None, :]
    q = (tl.load(p[:, None, None] + 16 + (j >> 1) * 32 + i).to(tl.int32) >> ((j & 1) * 4)) & 15
    return tl.reshape(d[:, :, None] * q.to(tl.float32) - m[:, :, None], (p.shape[0], 256))


@triton.jit
def q6_k(p, lut):
    j = tl.arange(0, 16)[None, :]  # sub-block of 16
    d = f16_at(p + 208)[:, None] * tl.load(p.to(tl.pointer_type(tl.int8))[:, None] + 192 + j).to(tl.float32)
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
    return tl.reshape(f16_at(p)[:, None, None] * (q - 8).to(tl.float32), (p.shape[0], 32))


@triton.jit
def q4_1(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 4 + i).to(tl.int32) >> (4 * j)) & 15
    w = f16_at(p)[:, None, None] * q.to(tl.float32) + f16_at(p + 2)[:, None, None]
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
    return tl.reshape(f16_at(p)[:, None, None] * (q - 16).to(tl.float32), (p.shape[0], 32))


@triton.jit
def q5_1(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 8 + i).to(tl.int32) >> (4 * j)) & 15
    q |= _fifth_bits(p + 4, j, i)
    w = f16_at(p)[:, None, None] * q.to(tl.float32) + f16_at(p + 2)[:, None, None]
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
    d = f16_at(p + 80)[:, None] * (s & 15).to(tl.float32)
    m = f16_at(p + 82)[:, None] * (s >> 4).to(tl.float32)
    j, i = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 16 + (j >> 3) * 32 + (j & 1) * 16 + i).to(tl.int32) >> (((j >> 1) & 3) * 2)) & 3
    return tl.reshape(d[:, :, None] * q.to(tl.float32) - m[:, :, None], (p.shape[0], 256))


@triton.jit
def q3_k(p, lut):
    k = tl.arange(0, 16)[None, :]
    low = (tl.load(p[:, None] + 96 + (k & 7)).to(tl.int32) >> ((k >> 3) * 4)) & 15
    high = (tl.load(p[:, None] + 104 + (k & 3)).to(tl.int32) >> ((k >> 2) * 2)) & 3
    d = f16_at(p + 108)[:, None] * ((low | (high << 4)) - 32).to(tl.float32)
    j, i = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 32 + (j >> 3) * 32 + (j & 1) * 16 + i).to(tl.int32) >> (((j >> 1) & 3) * 2)) & 3
    h = (tl.load(p[:, None, None] + (j & 1) * 16 + i).to(tl.int32) >> (j >> 1)) & 1
    return tl.reshape(d[:, :, None] * (q - 4 * (1 - h)).to(tl.float32), (p.shape[0], 256))


@triton.jit
def mxfp4(p, lut):
    j, i = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 1 + i).to(tl.int32) >> (4 * j)) & 15
    e = tl.load(p).to(tl.int32)  # the table holds twice the value, so the scale is 2^(e - 128)
    bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)
    w = bits.to(tl.float32, bitcast=True)[:, None, None] * tl.load(lut + q).to(tl.float32)
    return tl.reshape(w, (p.shape[0], 32))


@triton.jit
def nvfp4(p, lut):
    s, i = tl.arange(0, 4)[None, :, None], tl.arange(0, 16)[None, None, :]
    q = (tl.load(p[:, None, None] + 4 + s * 8 + (i & 7)).to(tl.int32) >> ((i >> 3) * 4)) & 15
    code = tl.load(p[:, None] + tl.arange(0, 4)[None, :]).to(tl.int32)
    d = tl.load(lut + 16 + code).to(tl.float32, bitcast=True)  # the scales' bits follow the values
    return tl.reshape(d[:, :, None] * tl.load(lut + q).to(tl.float32), (p.shape[0], 64))


@triton.jit
def tq1_0(p, lut):
    k = tl.arange(0, 256)[None, :]
    n = tl.where(k < 160, k, tl.where(k < 240, k - 160, k - 240))
    shift = tl.where(k < 160, 5, tl.where(k < 240, 4, 2))  # 32 bytes of five digits, 16 of five, 4 of four
    byte = tl.where(k < 160, 0, tl.where(k < 240, 32, 48)) + (n & ((1 << shift) - 1))
    power = tl.load(lut + (n >> shift))
    q = (((tl.load(p[:, None] + byte).to(tl.int32) * power) & 255) * 3) >> 8
    return f16_at(p + 52)[:, None] * (q - 1).to(tl.float32)


@triton.jit
def tq2_0(p, lut):
    k = tl.arange(0, 256)[None, :]
    q = (tl.load(p[:, None] + (k >> 7) * 32 + (k & 31)).to(tl.int32) >> (((k >> 5) & 3) * 2)) & 3
    return f16_at(p + 64)[:, None] * (q - 1).to(tl.float32)


@triton.jit
def q1_0(p, lut):
    k = tl.arange(0, 128)[None, :]
    q = (tl.load(p[:, None] + 2 + (k >> 3)).to(tl.int32) >> (k & 7)) & 1
    return f16_at(p)[:, None] * (2 * q - 1).to(tl.float32)
