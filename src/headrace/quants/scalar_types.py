"""Decoders of the types whose weights are numbers of a few bits, scaled. Layouts: ggml-quants.h and ggml-common.h.

Every decoder takes uint8 [n, block_bytes] and returns float32 [n, block]. "d" is a block's scale, "q" its quants.
"""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)
"""Twice the value of each 4-bit float (OCP microscaling formats, v1.0)."""


def half_ue4m3() -> Floats:
    """Half the value of each byte as an unsigned 8-bit float, bias 7; ggml reads NaN as 0 and ignores the upper bit."""
    x = np.arange(256)
    e, m = x >> 3 & 15, (x & 7).astype(np.float32)
    values = np.where(e == 0, np.ldexp(m, -10), np.ldexp(1 + m / 8, e - 8)).astype(np.float32)
    values[0x7F] = 0
    return values


HALF_UE4M3 = half_ue4m3()
HALF_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128)
"""Half the value of each byte as an exponent: 2^(e - 128)."""


def half(b: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, float32 [n, 1]."""
    return b[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def fields(b: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Bit fields of bytes [n, ..., w], one plane per shift: [n, ..., len(shifts), w]."""
    return (b[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def nibbles(b: Bytes) -> Bytes:
    """Low nibbles of all bytes, then the high ones: [n, 2 w]."""
    return fields(b, (0, 4), 15).reshape(len(b), -1)


def f32(b: Bytes) -> Floats:
    """IEEE single precision."""
    return b.view("<f4").astype(np.float32)


def f16(b: Bytes) -> Floats:
    """IEEE half precision."""
    return b.view("<f2").astype(np.float32)


def bf16(b: Bytes) -> Floats:
    """The upper half of a float32."""
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


def q4_0(b: Bytes) -> Floats:
    """d, 16 bytes of nibbles: d (q - 8)."""
    return half(b, 0) * (nibbles(b[:, 2:]).astype(np.float32) - 8)


def q4_1(b: Bytes) -> Floats:
    """d, m, 16 bytes of nibbles: d q + m."""
    return half(b, 0) * nibbles(b[:, 4:]) + half(b, 2)


def _fifth_bits(b: Bytes) -> Bytes:
    """32 bits in 4 bytes as 0 or 16 each."""
    return np.unpackbits(b, 1, bitorder="little") << np.uint8(4)


def q5_0(b: Bytes) -> Floats:
    """d, 32 fifth bits, 16 bytes of nibbles: d (q - 16)."""
    return half(b, 0) * ((nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).astype(np.float32) - 16)


def q5_1(b: Bytes) -> Floats:
    """d, m, 32 fifth bits, 16 bytes of nibbles: d q + m."""
    return half(b, 0) * (nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])) + half(b, 2)


def q8_0(b: Bytes) -> Floats:
    """d, 32 int8."""
    return (half(b, 0) * b[:, 2:].view(np.int8)).astype(np.float32)


def q2_k(b: Bytes) -> Floats:
    """16 bytes of 4-bit scales and minima, 64 bytes of 2-bit quants, d, dmin; 16 sub-blocks of 16."""
    d: Floats = half(b, 80) * (b[:, :16] & 15)
    m: Floats = half(b, 82) * (b[:, :16] >> 4)
    q = fields(b[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    return (d[..., None] * q - m[..., None]).reshape(len(b), 256)


def q3_k(b: Bytes) -> Floats:
    """32 bytes of third bits, 64 bytes of 2-bit quants, 12 bytes of 6-bit scales, d: d (scale - 32) (q - 4)."""
    low = fields(b[:, 96:104], (0, 4), 15).reshape(-1, 16)
    high = fields(b[:, 104:108], (0, 2, 4, 6), 3).reshape(-1, 16)
    d = half(b, 108) * ((low | high << np.uint8(4)).astype(np.float32) - 32)
    q = fields(b[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    third = fields(b[:, :32], tuple(range(8)), 1).reshape(-1, 16, 16)
    return (d[..., None] * (q.astype(np.float32) - 4 * (1 - third.astype(np.float32)))).reshape(len(b), 256)


def _scales_k4(b: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the 8 sub-blocks of 32 of Q4_K and Q5_K: d, dmin, then 12 bytes of 6-bit numbers."""
    low, high, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, (last & 15) | (low >> 6) << np.uint8(4)], 1)
    minimum = np.concatenate([high & 63, (last >> 4) | (high >> 6) << np.uint8(4)], 1)
    return half(b, 0) * scale, half(b, 2) * minimum


def q4_k(b: Bytes) -> Floats:
    """d, dmin, 12 bytes of scales, 128 bytes of nibbles: 8 sub-blocks of d scale q - dmin minimum."""
    d, m = _scales_k4(b)
    q = fields(b[:, 16:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    return (d[..., None] * q - m[..., None]).reshape(len(b), 256)


def q5_k(b: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of fifth bits in front of the nibbles."""
    d, m = _scales_k4(b)
    q = fields(b[:, 48:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    q = q | fields(b[:, 16:48], tuple(range(8)), 1) << np.uint8(4)
    return (d[..., None] * q - m[..., None]).reshape(len(b), 256)


def q6_k(b: Bytes) -> Floats:
    """128 bytes of low nibbles, 64 of upper bit pairs, 16 int8 scales, d: d scale (q - 32), 16 sub-blocks of 16."""
    low = fields(b[:, :128].reshape(-1, 2, 64), (0, 4), 15).reshape(-1, 2, 4, 32)
    high = fields(b[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3)
    q = (low | high << np.uint8(4)).astype(np.float32).reshape(-1, 16, 16) - 32
    d = half(b, 208) * b[:, 192:208].view(np.int8)
    return (d[..., None] * q).reshape(len(b), 256)


def _trits(b: Bytes, n: int) -> Bytes:
    """n base-3 digits of each byte, the first digit of all bytes first: [..., n * w]. A byte is a fraction of 256."""
    powers = np.array([3**i for i in range(n)], np.uint8)[:, None]
    shifted = b[..., None, :] * powers  # modulo 256: what is left after the digits before
    return ((shifted.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(b), -1)


def tq1_0(b: Bytes) -> Floats:
    """48 bytes of five digits, 4 bytes of four, d: d (digit - 1)."""
    q = np.concatenate([_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)], 1)
    return half(b, 52) * (q.astype(np.float32) - 1)


def tq2_0(b: Bytes) -> Floats:
    """64 bytes of 2-bit quants, d: d (q - 1)."""
    q = fields(b[:, :64].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 256)
    return half(b, 64) * (q.astype(np.float32) - 1)


def mxfp4(b: Bytes) -> Floats:
    """An exponent byte e, 16 bytes of 4-bit floats: 2^(e - 127) each."""
    return HALF_E8M0[b[:, :1]] * E2M1[nibbles(b[:, 1:])]


def nvfp4(b: Bytes) -> Floats:
    """4 unsigned E4M3 scales, 32 bytes of 4-bit floats: 4 sub-blocks of 16 weights in 8 bytes each."""
    q = fields(b[:, 4:].reshape(-1, 4, 8), (0, 4), 15).reshape(-1, 4, 16)
    return (HALF_UE4M3[b[:, :4]][..., None] * E2M1[q]).reshape(len(b), 64)


def q1_0(b: Bytes) -> Floats:
    """d, 128 bits: d where set, -d where not."""
    return half(b, 0) * (2 * np.unpackbits(b[:, 2:], 1, bitorder="little").astype(np.float32) - 1)
