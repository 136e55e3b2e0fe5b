"""Encoders of the simple types, rounded as ggml does (ggml-quants.c, quantize_row_*_ref).

Every encoder takes float32 [n, block] and returns uint8 [n, block_bytes].
"""

import numpy as np

from .scalar_types import Bytes, Floats


def to_f32(x: Floats) -> Bytes:
    return x.astype("<f4").view(np.uint8)


def to_f16(x: Floats) -> Bytes:
    return x.astype("<f2").view(np.uint8)


def to_bf16(x: Floats) -> Bytes:
    """Rounded to nearest, ties to even; of finite numbers."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def to_q8_0(x: Floats) -> Bytes:
    """d makes the greatest magnitude 127; halves are rounded away from zero."""
    d = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    q = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([d.astype("<f2").view(np.uint8), q.view(np.uint8)], 1)


def to_q4_0(x: Floats) -> Bytes:
    """d makes the value of greatest magnitude -8."""
    d = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1) / np.float32(-8)
    q = np.minimum(np.trunc(x.astype(np.float64) * _inverse(d) + 8.5), 15).astype(np.uint8)
    return np.concatenate([d.astype("<f2").view(np.uint8), q[:, :16] | q[:, 16:] << np.uint8(4)], 1)


def _inverse(d: Floats) -> Floats:
    return np.divide(1, d, out=np.zeros_like(d), where=d != 0)


ENCODERS = {"F32": to_f32, "F16": to_f16, "BF16": to_bf16, "Q8_0": to_q8_0, "Q4_0": to_q4_0}
