"""Tile decoders: one Triton function per GGUF tensor type, passed to the generic kernels as a constexpr.

`decode(p, lut)` takes uint8 pointers [R] to the first byte of one block in each of R rows and returns the block's
weights as float32 [R, block]; `lut` points to the type's lookup table (see `table`), or nowhere. Layouts are those
of `headrace.quants`, which is the definition; bytes are shared by neighbouring lanes, so they are fetched from cache.
"""

import numpy as np
from numpy.typing import NDArray

from ....quants.codebook_types import NON_LINEAR
from ....quants.codebooks import codebook
from ....quants.scalar_types import E2M1, HALF_UE4M3
from . import codebook_types as iq
from . import scalar_types as scalar

DECODERS = {
    "F32": scalar.f32, "F16": scalar.f16, "BF16": scalar.bf16, "Q4_0": scalar.q4_0, "Q4_1": scalar.q4_1,
    "Q5_0": scalar.q5_0, "Q5_1": scalar.q5_1, "Q8_0": scalar.q8_0, "Q2_K": scalar.q2_k, "Q3_K": scalar.q3_k,
    "Q4_K": scalar.q4_k, "Q5_K": scalar.q5_k, "Q6_K": scalar.q6_k, "TQ1_0": scalar.tq1_0, "TQ2_0": scalar.tq2_0,
    "MXFP4": scalar.mxfp4, "NVFP4": scalar.nvfp4, "Q1_0": scalar.q1_0, "IQ1_S": iq.iq1_s, "IQ1_M": iq.iq1_m,
    "IQ2_XXS": iq.iq2_xxs, "IQ2_XS": iq.iq2_xs, "IQ2_S": iq.iq2_s, "IQ3_XXS": iq.iq3_xxs, "IQ3_S": iq.iq3_s,
    "IQ4_NL": iq.iq4_nl, "IQ4_XS": iq.iq4_xs,
}  # fmt: skip
"""Tensor type -> decoder. Float types decode 32 weights at a time, the others one block."""


def table(name: str) -> NDArray[np.int32]:
    """A type's lookup table: small numbers, a codebook with four a word, or bits of floats; a lone 0 without need."""
    match name:
        case "IQ4_NL" | "IQ4_XS":
            return NON_LINEAR.astype(np.int32)
        case "MXFP4":
            return E2M1.astype(np.int32)
        case "NVFP4":
            return np.concatenate([E2M1.astype(np.int32), HALF_UE4M3.view(np.int32)])
        case "TQ1_0":
            return 3 ** np.arange(5, dtype=np.int32)
        case "IQ1_S" | "IQ1_M" | "IQ2_XXS" | "IQ2_XS" | "IQ2_S" | "IQ3_XXS" | "IQ3_S":
            return codebook(name).astype(np.int8).view(np.int32).reshape(-1)
    return np.zeros(1, np.int32)


def decode_block(name: str, block: int) -> int:
    """Weights that one call of a type's decoder yields per row."""
    return 32 if name in ("F32", "F16", "BF16") else block
