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
def q4_k(p, lut):
    j = tl.arange(0, 8)[None, :]  # sub-block of 32
    s = p[:, None] + 4
    low, high = tl.load(s + (j & 3)).to(tl.int32), tl.load(s + (j & 3) + 4).to(tl.int32)
    last = tl.load(s + (j & 3) + 8).to(tl.int32)
    scale = tl.where(j < 4, low & 63, (last & 15) | ((low >> 6) << 4))
    minimum = tl.where(j < 4, high & 63, (last >> 4) | ((high >> 6) << 4))
    d = _f16(p)[:, None] * scale.to(tl.float32)
    m = _f16(p + 2)[:, None] * minimum.to(tl.float32)
    i = tl.arange(0, 32)[None, None, :]
    jj = tl.arange(0, 8)[None, :, None]
    q = tl.load(p[:, None, None] + 16 + (jj >> 1) * 32 + i).to(tl.int32)
    q = (q >> ((jj & 1) * 4)) & 15
    w = d[:, :, None] * q.to(tl.float32) - m[:, :, None]
    return tl.reshape(w, (p.shape[0], 256))


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


DECODERS = {"F32": f32, "F16": f16, "BF16": bf16, "Q8_0": q8_0, "Q4_K": q4_k, "Q6_K": q6_k}
"""Tensor type -> decoder. Float types decode 32 weights at a time, the others one block."""


def decode_block(name: str, block: int) -> int:
    """Weights that one call of a type's decoder yields per row."""
    return 32 if name in ("F32", "F16", "BF16") else block
