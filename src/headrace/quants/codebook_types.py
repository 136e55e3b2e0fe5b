"""Decoders of the IQ types: groups of 4 or 8 weights are rows of a codebook, with signs and scales apart.

Every decoder takes uint8 [n, block_bytes] and returns float32 [n, 256] (IQ4_NL: 32). Layouts: ggml-common.h.
"""

import numpy as np
from numpy.typing import NDArray

from .codebooks import codebook, sign_table
from .scalar_types import Bytes, Floats, fields, half, nibbles

NON_LINEAR = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
"""The 16 levels of IQ4_NL and IQ4_XS."""
SIGNS = sign_table()


def words(b: Bytes, kind: str) -> NDArray[np.uint32]:
    """Little-endian integers of the given numpy kind, as uint32."""
    return np.ascontiguousarray(b).view(kind).astype(np.uint32)


def sign_bits(b: Bytes) -> Floats:
    """One sign per bit: float32 [n, 8 w] of 1 and -1."""
    return 1 - 2 * np.unpackbits(b, 1, bitorder="little").astype(np.float32)


def _scaled(d: Floats, values: Floats) -> Floats:
    """Sub-block scales [n, s] times values of any shape with 256 a block."""
    return (d[..., None] * values.reshape(*d.shape, -1)).reshape(len(d), 256)


def iq4_nl(b: Bytes) -> Floats:
    """d, 16 bytes of nibbles that index the levels."""
    return half(b, 0) * NON_LINEAR[nibbles(b[:, 2:])]


def iq4_xs(b: Bytes) -> Floats:
    """d, 8 upper bit pairs and 8 lower nibbles of 6-bit scales, 8 sub-blocks of 16 bytes of nibbles."""
    high = words(b[:, 2:4], "<u2") >> (2 * np.arange(8, dtype=np.uint32)) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], 2).reshape(-1, 8)
    d = half(b, 0) * ((low | high << 4).astype(np.float32) - 32)
    return _scaled(d, NON_LINEAR[fields(b[:, 8:].reshape(-1, 8, 16), (0, 4), 15)])


def iq2_xxs(b: Bytes) -> Floats:
    """d, then per 32 weights four row numbers (bytes), four 7-bit sign codes and a 4-bit scale."""
    w = words(b[:, 2:], "<u4").reshape(-1, 8, 2)
    rows = np.ascontiguousarray(b[:, 2:]).reshape(-1, 8, 8)[..., :4]
    signs = SIGNS[w[..., 1, None] >> (7 * np.arange(4, dtype=np.uint32)) & 127]
    d = half(b, 0) * ((w[..., 1] >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    return _scaled(d, codebook("IQ2_XXS")[rows] * signs)


def iq2_xs(b: Bytes) -> Floats:
    """d, 32 words of a 9-bit row number and a 7-bit sign code, 8 bytes of 4-bit scales for 16 weights each."""
    w = words(b[:, 2:66], "<u2")
    return _scaled(_scales16(b[:, 66:], half(b, 0)), codebook("IQ2_XS")[w & 511] * SIGNS[w >> 9])


def iq2_s(b: Bytes) -> Floats:
    """d, 32 row numbers (low bytes), 32 bytes of signs, 8 of upper bit pairs, 8 of 4-bit scales."""
    high = np.stack([b[:, 66:74] >> s & 3 for s in (0, 2, 4, 6)], 2).reshape(-1, 32)
    rows = b[:, 2:34].astype(np.uint32) | high.astype(np.uint32) << 8
    values = codebook("IQ2_S")[rows].reshape(len(b), 256) * sign_bits(b[:, 34:66])
    return _scaled(_scales16(b[:, 74:], half(b, 0)), values)


def _scales16(b: Bytes, d: Floats) -> Floats:
    """Nibbles s as d (s + 1/2) / 4, low nibble first: [n, 16]."""
    s = np.stack([b & 15, b >> 4], 2).reshape(-1, 16).astype(np.float32)
    return d * (s + np.float32(0.5)) * np.float32(0.25)


def iq3_xxs(b: Bytes) -> Floats:
    """d, 64 row numbers, then per 32 weights four 7-bit sign codes and a 4-bit scale."""
    w = words(b[:, 66:], "<u4")
    signs = SIGNS[w[..., None] >> (7 * np.arange(4, dtype=np.uint32)) & 127]
    d = half(b, 0) * ((w >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    return _scaled(d, codebook("IQ3_XXS")[b[:, 2:66]].reshape(-1, 8, 4, 8) * signs)


def iq3_s(b: Bytes) -> Floats:
    """d, 64 row numbers, their ninth bits, 32 bytes of signs, 4 of 4-bit scales: d (1 + 2 s) for 32 weights each."""
    ninth = np.unpackbits(b[:, 66:74], 1, bitorder="little").astype(np.uint32) << 8
    values = codebook("IQ3_S")[b[:, 2:66] | ninth].reshape(len(b), 256) * sign_bits(b[:, 74:106])
    s = np.stack([b[:, 106:] & 15, b[:, 106:] >> 4], 2).reshape(-1, 8).astype(np.float32)
    return _scaled(half(b, 0) * (1 + 2 * s), values)


def iq1_s(b: Bytes) -> Floats:
    """d, 32 row numbers (low bytes), per 32 weights a word: four upper bit triples, a 3-bit scale, the shift's sign."""
    w = words(b[:, 34:], "<u2")
    rows = b[:, 2:34].reshape(-1, 8, 4) | (w[..., None] >> np.array([0, 3, 6, 9], np.uint32) & 7) << 8
    shift = np.where(w & 0x8000, np.float32(-0.125), np.float32(0.125))
    d = half(b, 0) * (2 * (w >> 12 & 7) + 1).astype(np.float32)
    return _scaled(d, codebook("IQ1_S")[rows] + shift[..., None, None])


def iq1_m(b: Bytes) -> Floats:
    """32 row numbers (low bytes), 32 nibbles of 3 upper bits and the shift's sign, four words of 3-bit scales for 16
    weights each, whose upper nibbles together are d."""
    s = words(b[:, 48:], "<u2")
    bits = (s >> 12 & 15) << (4 * np.arange(4, dtype=np.uint32))
    d = bits.sum(1).astype(np.uint16).view(np.float16).astype(np.float32)[:, None]
    scale = (s[..., None] >> np.array([0, 3, 6, 9], np.uint32) & 7).reshape(-1, 16)
    nibble = np.stack([b[:, 32:48] & 15, b[:, 32:48] >> 4], 2).reshape(-1, 32)
    rows = b[:, :32].astype(np.uint32) | (nibble & 7).astype(np.uint32) << 8
    shift = np.where(nibble & 8, np.float32(-0.125), np.float32(0.125))
    return _scaled(d * (2 * scale + 1).astype(np.float32), codebook("IQ1_M")[rows] + shift[..., None])
