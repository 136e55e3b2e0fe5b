"""GGUF's tensor types: block sizes and a numpy decoder each. This is the definition that every backend is held to.

To add a type add one row to TABLE, a decoder here, and one decoder per backend.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import codebook_types as iq
from . import scalar_types as scalar
from .encode import ENCODERS
from .random_blocks import random_blocks
from .scalar_types import Bytes, Floats

__all__ = [
    "BY_ID", "OTHER_TYPES", "TYPES", "Bytes", "Floats", "TensorType", "dequantize", "quantize", "random_blocks",
]  # fmt: skip


@dataclass(frozen=True)
class TensorType:
    """One type: `block` weights in `block_bytes` bytes; `decode` turns uint8 [n, block_bytes] into float32 [n, block].

    `scales` lists the byte offsets of a block's float16 scales (and minima); `id` is ggml's number.
    """

    name: str
    id: int
    block: int
    block_bytes: int
    decode: Callable[[Bytes], Floats] = field(repr=False)
    scales: tuple[int, ...] = ()

    def row_bytes(self, n: int) -> int:
        assert n % self.block == 0, f"{n} weights do not divide into {self.name} blocks of {self.block}"
        return n // self.block * self.block_bytes

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


# sizes and ids: ggml.h, ggml-common.h
TABLE = (
    TensorType("F32", 0, 1, 4, scalar.f32),
    TensorType("F16", 1, 1, 2, scalar.f16),
    TensorType("BF16", 30, 1, 2, scalar.bf16),
    TensorType("Q4_0", 2, 32, 18, scalar.q4_0, (0,)),
    TensorType("Q4_1", 3, 32, 20, scalar.q4_1, (0, 2)),
    TensorType("Q5_0", 6, 32, 22, scalar.q5_0, (0,)),
    TensorType("Q5_1", 7, 32, 24, scalar.q5_1, (0, 2)),
    TensorType("Q8_0", 8, 32, 34, scalar.q8_0, (0,)),
    TensorType("Q2_K", 10, 256, 84, scalar.q2_k, (80, 82)),
    TensorType("Q3_K", 11, 256, 110, scalar.q3_k, (108,)),
    TensorType("Q4_K", 12, 256, 144, scalar.q4_k, (0, 2)),
    TensorType("Q5_K", 13, 256, 176, scalar.q5_k, (0, 2)),
    TensorType("Q6_K", 14, 256, 210, scalar.q6_k, (208,)),
    TensorType("IQ2_XXS", 16, 256, 66, iq.iq2_xxs, (0,)),
    TensorType("IQ2_XS", 17, 256, 74, iq.iq2_xs, (0,)),
    TensorType("IQ3_XXS", 18, 256, 98, iq.iq3_xxs, (0,)),
    TensorType("IQ1_S", 19, 256, 50, iq.iq1_s, (0,)),
    TensorType("IQ4_NL", 20, 32, 18, iq.iq4_nl, (0,)),
    TensorType("IQ3_S", 21, 256, 110, iq.iq3_s, (0,)),
    TensorType("IQ2_S", 22, 256, 82, iq.iq2_s, (0,)),
    TensorType("IQ4_XS", 23, 256, 136, iq.iq4_xs, (0,)),
    TensorType("IQ1_M", 29, 256, 56, iq.iq1_m),
    TensorType("TQ1_0", 34, 256, 54, scalar.tq1_0, (52,)),
    TensorType("TQ2_0", 35, 256, 66, scalar.tq2_0, (64,)),
    TensorType("MXFP4", 39, 32, 17, scalar.mxfp4),
    TensorType("NVFP4", 40, 64, 36, scalar.nvfp4),
    TensorType("Q1_0", 41, 128, 18, scalar.q1_0, (0,)),
)
TYPES = {t.name: t for t in TABLE}
BY_ID = {t.id: t for t in TABLE}
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 42: "Q2_0",
}  # fmt: skip
"""ggml's other types, by id, for messages: withdrawn, never of weights, or newer."""
PIECE_WEIGHTS = 1 << 18


def dequantize(raw: Bytes, type: TensorType, shape: tuple[int, ...]) -> Floats:
    """Decodes a tensor's bytes, uint8 [n_bytes], to float32 of the given shape.

    In pieces: the decoders' temporaries, up to ten times the result, stay in the cache.
    """
    assert raw.size == type.n_bytes(shape), f"{raw.size} bytes are no {type.name} of shape {shape}"
    blocks = np.ascontiguousarray(raw).reshape(-1, type.block_bytes)
    out = np.empty((len(blocks), type.block), np.float32)
    step = PIECE_WEIGHTS // type.block
    for i in range(0, len(blocks), step):
        out[i : i + step] = type.decode(blocks[i : i + step])
    return out.reshape(shape)


def quantize(values: NDArray[Any], type: TensorType) -> Bytes:
    """Encodes float values whose rows are whole blocks, uint8 [n_bytes]; for the types in ENCODERS."""
    assert type.name in ENCODERS, f"there is no encoder for {type.name}"
    return ENCODERS[type.name](np.ascontiguousarray(values, np.float32).reshape(-1, type.block)).reshape(-1)
