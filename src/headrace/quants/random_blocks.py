"""Random valid blocks of any type, fast enough to write model files with: 0.5 to 2 GB/s."""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .encode import ENCODERS
from .scalar_types import HALF_E8M0, HALF_UE4M3, Bytes, Floats

if TYPE_CHECKING:
    from . import TensorType

PIECE_BYTES = 1 << 19
"""Blocks are made in pieces that stay in the cache."""
CENTRE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""A block's second float16 in units of its first: with it the weights' mean is 0."""


def random_blocks(type: "TensorType", n_blocks: int, rng: np.random.Generator, scale: float) -> Bytes:
    """Random valid blocks, uint8 [n_blocks, block_bytes], whose weights have mean 0 and standard deviation `scale`.

    All bits are random but the blocks' scales, which differ by up to 2; float types are normal, of 65,536 values.
    A scale below the smallest that the type can hold (Q6_K: about 1e-4) gives zeros or the smallest.
    """
    out = np.empty((n_blocks, type.block_bytes), np.uint8)
    step = PIECE_BYTES // type.block_bytes
    if type.block == 1:
        values = ENCODERS[type.name](rng.standard_normal((1 << 16, 1), np.float32) * np.float32(scale))
        words = values.view(f"<u{type.block_bytes}")[:, 0]
        for i in range(0, n_blocks, step):
            piece = out[i : i + step].view(words.dtype)[:, 0]
            np.take(words, _bits(2 * len(piece), rng).view(np.uint16), out=piece, mode="clip")
        return out
    d = scale / _std(type)
    for i in range(0, n_blocks, step):
        piece = out[i : i + step]
        piece[...] = _bits(piece.size, rng).reshape(piece.shape)
        _make_valid(piece, type.name)
        _set_scales(piece, type, d)
    return out


def _bits(n_bytes: int, rng: np.random.Generator) -> Bytes:
    return rng.integers(0, 1 << 64, -(-n_bytes // 8), np.uint64).view(np.uint8)[:n_bytes]


def _make_valid(blocks: Bytes, name: str) -> None:
    """Replaces bit patterns that no quantizer writes, in place; scales, set later, may change too."""
    if name == "Q8_0":  # -128
        np.maximum(blocks.view(np.int8), -127, out=blocks.view(np.int8))
    elif name == "TQ2_0":  # a 2-bit 3: it becomes 1
        blocks ^= (blocks & (blocks >> np.uint8(1)) & np.uint8(0x55)) << np.uint8(1)


@cache
def _std(type: "TensorType") -> float:
    """The standard deviation of the weights of random blocks with scales around 1."""
    blocks = _bits(1024 * type.block_bytes, np.random.default_rng(0)).reshape(1024, type.block_bytes)
    _make_valid(blocks, type.name)
    _set_scales(blocks, type, 1.0)
    return float(type.decode(blocks).std(dtype=np.float64))


def _set_scales(blocks: Bytes, type: "TensorType", d: float) -> None:
    """Writes scales around d in place, each from the random bits that stand there."""
    if type.name == "MXFP4":
        _set_codes(blocks[:, 0], HALF_E8M0, d)
    elif type.name == "NVFP4":
        _set_codes(blocks[:, :4], HALF_UE4M3[:127], d)
    elif type.name == "IQ1_M":  # the upper nibbles of four words
        words, shifts = blocks[:, 48:].view("<u2"), np.arange(0, 16, 4, dtype=np.uint16)
        bits = (words[:, 0] & np.uint16(0xF000)) | (words[:, 1] >> np.uint16(4))
        size = _sizes(bits, d, signed=True).astype("<f2").view("<u2")[:, None]
        words[...] = (words & np.uint16(0x0FFF)) | (size >> shifts) << np.uint16(12)
    else:
        at = type.scales[0]
        size = _sizes(blocks[:, at : at + 2].copy().view("<u2")[:, 0], d, signed=type.name not in CENTRE)
        blocks[:, at : at + 2] = size.astype("<f2").view(np.uint8).reshape(-1, 2)
        if type.name in CENTRE:
            at = type.scales[1]
            blocks[:, at : at + 2] = (size * np.float32(CENTRE[type.name])).astype("<f2").view(np.uint8).reshape(-1, 2)


def _sizes(bits: NDArray[np.uint16], d: float, *, signed: bool) -> Floats:
    """0.7 d to 1.4 d from random 16-bit numbers, of either sign if so wished."""
    size = (bits & np.uint16(0x7FFF)).astype(np.float32)
    size *= np.float32(0.7 * d / 2**15)
    size += np.float32(0.7 * d)
    if signed:
        np.negative(size, out=size, where=bits >= 0x8000)
    return size


def _set_codes(codes: Bytes, values: Floats, d: float) -> None:
    """Codes of the two values around d, each so often that their mean square is that of d."""
    low = min(int(np.searchsorted(values, d, "right")) - 1, len(values) - 2)
    below, above = float(values[low]), float(values[low + 1])
    often = (d * d - below * below) / (above * above - below * below)
    codes[...] = np.uint8(low) + (codes < 256 * often)
