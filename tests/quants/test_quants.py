"""Tensor types against ggml itself (the C functions that `xllamacpp` exports), the `gguf` package, and blocks written
out by hand."""

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import gguf.quants
import numpy as np
import pytest
import xllamacpp
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.testing import assert_array_equal

from headrace.quants import BY_ID, OTHER_TYPES, TYPES, TensorType, dequantize, quantize, random_blocks
from headrace.quants.codebooks import codebook
from headrace.quants.encode import ENCODERS

ALL = pytest.mark.parametrize("type", TYPES.values(), ids=TYPES)
ENCODED = pytest.mark.parametrize("name", ENCODERS)


class Traits(ctypes.Structure):
    """The first fields of ggml_type_traits (ggml.h)."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t), ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]  # fmt: skip


def ggml(id: int) -> Traits:
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    library.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    return library.ggml_get_type_traits(ctypes.c_int(id)).contents


def same(ours: np.ndarray, wanted: np.ndarray) -> None:
    """Equal bit for bit, but for the kind of NaN and the sign of zero."""
    assert ours.dtype == np.float32
    assert_array_equal(ours.reshape(-1), wanted.reshape(-1))


def any_bits(type: TensorType, n: int = 3000) -> np.ndarray:
    return np.random.default_rng(type.id).integers(0, 256, (n, type.block_bytes), np.uint8)


def blocks_of(type: TensorType, n: int = 3000) -> np.ndarray:
    return random_blocks(type, n, np.random.default_rng(type.id), 0.05)


# the table


@ALL
def test_sizes(type: TensorType) -> None:
    traits = ggml(type.id)
    assert traits.name.decode().upper() == type.name.upper()
    assert (type.block, type.block_bytes) == (traits.block, traits.block_bytes)
    assert (type.block, type.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[type.name]]
    assert GGMLQuantizationType[type.name] == type.id


def test_every_type_of_ggml_has_a_name_here() -> None:
    assert not set(BY_ID) & set(OTHER_TYPES)
    for t in GGMLQuantizationType:
        assert t.name == (BY_ID[t].name if t in BY_ID else OTHER_TYPES[t])
    for id, name in OTHER_TYPES.items():
        real = ggml(id).name.decode()
        assert real.upper() == name or real == "DEPRECATED" or f"TYPE_{name} REMOVED" in real, id


@ALL
def test_bytes_of_rows_and_shapes(type: TensorType) -> None:
    assert type.row_bytes(3 * type.block) == 3 * type.block_bytes
    assert type.n_bytes((5, 2, 3 * type.block)) == 30 * type.block_bytes
    if type.block > 1:
        with pytest.raises(AssertionError):
            type.row_bytes(type.block + type.block // 2)
        with pytest.raises(AssertionError):
            type.n_bytes((2, type.block // 2))  # blocks do not span rows


# decoding


@ALL
@pytest.mark.parametrize("make", [blocks_of, any_bits], ids=["valid", "any-bits"])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # infinite scales
def test_decode_equals_ggml(type: TensorType, make: Callable[[TensorType], np.ndarray]) -> None:
    raw = make(type)
    wanted = np.empty((len(raw), type.block), np.float32)
    if type.name == "F32":
        wanted = raw.view("<f4")
    else:
        ggml(type.id).to_float(raw.ctypes.data, wanted.ctypes.data, wanted.size)
    same(dequantize(raw.reshape(-1), type, wanted.shape), wanted)


@pytest.mark.parametrize("name", sorted(set(TYPES) - {"Q1_0"}))  # which the package cannot decode
def test_decode_equals_the_gguf_package(name: str) -> None:
    type = TYPES[name]
    raw = blocks_of(type)
    same(
        dequantize(raw.reshape(-1), type, (len(raw), type.block)),
        gguf.quants.dequantize(raw, GGMLQuantizationType(type.id)),
    )


@ALL
def test_decode_any_shape_and_in_pieces(type: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (3, 5, 2 * type.block if type.block > 1 else 7)
    raw = blocks_of(type, np.prod(shape) // type.block).reshape(-1)
    whole = type.decode(raw.reshape(-1, type.block_bytes)).reshape(shape)
    for weights in (type.block, 4 * type.block, 1 << 18):
        monkeypatch.setattr("headrace.quants.PIECE_WEIGHTS", weights)
        assert_array_equal(dequantize(raw, type, shape), whole)
    assert dequantize(raw[:0], type, (0, type.block)).shape == (0, type.block)
    with pytest.raises(AssertionError):
        dequantize(raw[:-1], type, shape)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "Q1_0"])
def test_odd_rows(name: str) -> None:
    """A width that is no multiple of 256: rows are decoded as they are alone."""
    type = TYPES[name]
    shape = (3, 7 * max(type.block, 32))
    raw = blocks_of(type, np.prod(shape) // type.block).reshape(3, -1)
    rows = [dequantize(row, type, shape[1:]) for row in raw]
    assert_array_equal(dequantize(raw.reshape(-1), type, shape), np.stack(rows))


def half(x: float) -> bytes:
    return struct.pack("<e", x)


def at(width: int, **weights: float) -> np.ndarray:
    """A block of zeros but for the weights given as _INDEX=value."""
    block = np.zeros(width)
    for i, value in weights.items():
        block[int(i[1:])] = value
    return block


def nibble_row(count: int) -> bytes:
    """Bytes whose low nibbles count up from 0 and whose high ones count down from 15."""
    return bytes(i % 16 | (15 - i % 16) << 4 for i in range(count))


UP, DOWN = np.arange(16.0), np.arange(15.0, -1, -1)
BY_HAND = {
    "F32": (struct.pack("<f", -1.5), [-1.5]),
    "F16": (half(0.25), [0.25]),
    "BF16": (b"\x40\xc0", [-3.0]),
    "Q4_0": (half(0.5) + nibble_row(16), 0.5 * (np.concatenate([UP, DOWN]) - 8)),
    "Q4_1": (half(0.5) + half(-2) + nibble_row(16), 0.5 * np.concatenate([UP, DOWN]) - 2),
    # fifth bits of weights 0, 15, 16 and 31
    "Q5_0": (
        half(2) + bytes([1, 0x80, 1, 0x80]) + nibble_row(16),
        2 * (np.concatenate([UP, DOWN]) - 16 + at(32, _0=16, _15=16, _16=16, _31=16)),
    ),
    "Q5_1": (
        half(2) + half(1) + bytes([1, 0x80, 1, 0x80]) + nibble_row(16),
        2 * (np.concatenate([UP, DOWN]) + at(32, _0=16, _15=16, _16=16, _31=16)) + 1,
    ),
    "Q8_0": (half(0.25) + np.arange(-16, 16, dtype=np.int8).tobytes(), 0.25 * np.arange(-16, 16)),
    # sub-block i has scale i and minimum 15 - i; all quants are 2
    "Q2_K": (nibble_row(16) + bytes([0xAA] * 64) + half(0.5) + half(0.25), np.repeat(0.5 * UP * 2 - 0.25 * DOWN, 16)),
    # all scales 33, that is 1; quants 1 with the third bit set in weights 0-31 only (bit 0 of all 32 bytes)
    "Q3_K": (
        bytes([1] * 32) + bytes([0x55] * 64) + bytes([0x11] * 8 + [0xAA] * 4) + half(0.5),
        np.where(np.arange(256) < 32, 0.5 * 1, 0.5 * (1 - 4)),
    ),
    # scales 1 2 3 4 and, by their nibbles and upper bits, 5 + 16 * 3 .. 8 + 16 * 3; minima 0
    "Q4_K": (
        half(0.5) + half(1) + bytes([0xC1, 0xC2, 0xC3, 0xC4, 0, 0, 0, 0, 5, 6, 7, 8]) + bytes([0x21] * 128),
        np.repeat(0.5 * np.array([1, 2 * 2, 3, 2 * 4, 53, 2 * 54, 55, 2 * 56]), 32),
    ),
    # the same with minima 1 2 3 4, 16 * 2 + 1 .. 4 and the fifth bits of sub-block 7
    "Q5_K": (
        half(0.5) + half(1) + bytes([0xC1, 0xC2, 0xC3, 0xC4, 0x81, 0x82, 0x83, 0x84, 0x15, 0x26, 0x37, 0x48])
        + bytes([0x80] * 32) + bytes([0x21] * 128),
        np.repeat([0.5 * 1 - 1, 0.5 * 4 - 2, 0.5 * 3 - 3, 0.5 * 8 - 4, 0.5 * 53 - 33, 0.5 * 108 - 34, 0.5 * 55 - 35,
                   0.5 * 56 * 18 - 36], 32),
    ),
    # quants: low nibbles 1 (first halves) and 2, upper bits 0 1 2 3 by quarter of 128; scales -8 .. 7
    "Q6_K": (
        bytes([0x21] * 128) + bytes([0b11100100] * 64) + np.arange(-8, 8, dtype=np.int8).tobytes() + half(0.5),
        0.5 * np.repeat(np.arange(-8, 8), 16) * (np.tile(np.repeat([1, 1 + 16, 2 + 32, 2 + 48], 32), 2) - 32),
    ),
    "IQ4_NL": (
        half(2) + nibble_row(16),
        2.0 * np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
                        113, 89, 69, 53, 38, 25, 13, 1, -10, -22, -35, -49, -65, -83, -104, -127]),
    ),
    # scales 33 + i by low nibbles 1 + i (two sub-blocks a byte) and upper bits 2, minus 32; all levels 1
    "IQ4_XS": (
        half(0.5) + bytes([0xAA, 0xAA, 0x21, 0x43, 0x65, 0x87]) + bytes([0x88] * 128),
        np.repeat(0.5 * np.arange(1, 9), 32),
    ),
    # digits 2 1 0 1 2 of 3^5: 2 * 81 + 27 + 0 + 3 + 2 = 194, as a fraction of 256: ceil(194 * 256 / 243) = 205;
    # of four: 2 * 27 + 9 + 0 + 1 = 64, times 3: ceil(192 * 256 / 243) = 203
    "TQ1_0": (
        bytes([205] * 48 + [203] * 4) + half(4),
        4.0 * np.repeat([1, 0, -1, 0, 1, 1, 0, -1, 0, 1, 1, 0, -1, 0], [32] * 5 + [16] * 5 + [4] * 4),
    ),
    "TQ2_0": (bytes([0b01100010] * 64) + half(4), 4.0 * np.tile(np.repeat([1, -1, 1, 0], 32), 2)),
    "MXFP4": (
        bytes([129]) + nibble_row(16),
        4 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, -6, -4, -3, -2, -1.5, -1, -0.5, 0,
                      6, 4, 3, 2, 1.5, 1, 0.5, 0]),
    ),
    # scales 1, 1.5, 2^-9 (the smallest) and 448; the levels 1 (low nibbles) and -2 (high)
    "NVFP4": (
        bytes([0x38, 0x3C, 0x01, 0x7E]) + bytes([0xC2] * 32),
        np.concatenate([np.repeat([d, -2 * d], 8) for d in (1, 1.5, 2**-9, 448)]),
    ),
    "Q1_0": (half(0.75) + bytes([0b00001101, 0x80] + [0] * 14), -0.75 + at(128, _0=1.5, _2=1.5, _3=1.5, _15=1.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_blocks_by_hand(name: str) -> None:
    raw, weights = BY_HAND[name]
    assert len(raw) == TYPES[name].block_bytes
    assert_array_equal(dequantize(np.frombuffer(raw, np.uint8), TYPES[name], (len(weights),)), weights)


def test_codebook_blocks_by_hand() -> None:
    """The IQ types with a codebook, at one row each: the value is row * sign * scale."""

    def stripes(values: np.ndarray, n: int) -> np.ndarray:
        """n times the values at 1.5, then at 2.5, over a block."""
        return np.resize(np.concatenate([np.tile(1.5 * values, n), np.tile(2.5 * values, n)]), 256)

    def decoded(name: str, raw: bytes) -> np.ndarray:
        assert len(raw) == TYPES[name].block_bytes
        return dequantize(np.frombuffer(raw, np.uint8), TYPES[name], (256,))

    # row 5 everywhere; sign code 3 (weights 0 and 1 minus, even so far), scale 7: 2 * (7 + 1/2) / 4
    row, minus = codebook("IQ2_XXS")[5], np.array([-1, -1, 1, 1, 1, 1, 1, 1])
    word = 3 | 3 << 7 | 3 << 14 | 3 << 21 | 7 << 28
    raw = half(2) + (bytes([5] * 4) + struct.pack("<I", word)) * 8
    assert_array_equal(decoded("IQ2_XXS", raw), np.tile(row * minus * 3.75, 32))
    # row 300, sign code 1: weight 0 and, to be even, weight 7; scales 1 and 2 by halves of 32
    row, minus = codebook("IQ2_XS")[300], np.array([-1, 1, 1, 1, 1, 1, 1, -1])
    raw = half(4) + struct.pack("<H", 300 | 1 << 9) * 32 + bytes([0x21] * 8)
    assert_array_equal(decoded("IQ2_XS", raw), stripes(row * minus, 2))
    # row 3 * 256 + 9, signs of weights 1 and 6
    row, minus = codebook("IQ2_S")[777], np.array([1, -1, 1, 1, 1, 1, -1, 1])
    raw = half(4) + bytes([9] * 32) + bytes([0b01000010] * 32) + bytes([0xFF] * 8) + bytes([0x21] * 8)
    assert_array_equal(decoded("IQ2_S", raw), stripes(row * minus, 2))
    # rows 8 and 9 of four weights each
    rows, minus = codebook("IQ3_XXS")[[8, 9]].reshape(-1), np.array([-1, -1, 1, 1, 1, 1, 1, 1])
    raw = half(2) + bytes([8, 9] * 32) + struct.pack("<I", word) * 8
    assert_array_equal(decoded("IQ3_XXS", raw), np.tile(rows * minus * 7.5, 32))
    # rows 8 and 256 + 9, sign of weight 7; scales 1 + 2 * 1 and 1 + 2 * 2
    rows, minus = codebook("IQ3_S")[[8, 265]].reshape(-1), np.array([1, 1, 1, 1, 1, 1, 1, -1])
    raw = half(0.5) + bytes([8, 9] * 32) + bytes([0xAA] * 8) + bytes([0x80] * 32) + bytes([0x21] * 4)
    assert_array_equal(decoded("IQ3_S", raw), stripes(rows * minus, 4))
    # rows 256 * 1 + 7 .. 256 * 4 + 7, scale 2 * 3 + 1, shifted down
    rows = codebook("IQ1_S")[[256 * i + 7 for i in (1, 2, 3, 4)]].reshape(-1)
    raw = half(0.5) + bytes([7] * 32) + struct.pack("<H", 0x8000 | 3 << 12 | 1 | 2 << 3 | 3 << 6 | 4 << 9) * 8
    assert_array_equal(decoded("IQ1_S", raw), np.tile((rows - 0.125) * 3.5, 8))
    # the scale 0.5 = 0x3800 by nibbles, 16 times 2 * 1 + 1; rows 256 * 2 + 7 shifted up, 256 * 5 + 7 down
    rows = np.concatenate([codebook("IQ1_M")[519] + 0.125, codebook("IQ1_M")[1287] - 0.125])
    scales = 1 | 1 << 3 | 1 << 6 | 1 << 9
    raw = bytes([7] * 32) + bytes([0xD2] * 16) + struct.pack("<4H", *(scales | nibble << 12 for nibble in (0, 0, 8, 3)))
    assert_array_equal(decoded("IQ1_M", raw), np.tile(rows * 1.5, 16))


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_codebooks_equal_the_package(name: str) -> None:
    package = getattr(gguf.quants, name)
    package.init_grid()
    assert_array_equal(codebook(name), package.grid.reshape(codebook(name).shape))


# encoding and random blocks


@ENCODED
def test_encode_equals_ggml_and_the_package(name: str) -> None:
    type, rng = TYPES[name], np.random.default_rng(0)
    x = rng.standard_normal((2000, 64), np.float32) * np.float32(0.1)
    x[0], x[1, :32], x[2] = 0, -1, np.arange(64) / 2 - 16  # zeros, a constant, halves
    x[3, ::2] = 1e-30
    raw = quantize(x, type)
    assert raw.dtype == np.uint8
    assert raw.size == type.n_bytes(x.shape)
    assert_array_equal(raw, gguf.quants.quantize(x, GGMLQuantizationType(type.id)).view(np.uint8).reshape(-1))
    if name != "F32":
        wanted = np.empty_like(raw)
        ggml(type.id).from_float(x.ctypes.data, wanted.ctypes.data, x.size)
        assert_array_equal(raw, wanted)
    error = np.abs(dequantize(raw, type, x.shape) - x)
    bound = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.5 / 127 + 2**-11, "Q4_0": 1 / 8}[name]
    peaks = np.abs(x).reshape(-1, type.block).max(1).repeat(type.block).reshape(x.shape)
    assert (error <= bound * peaks * 1.001 + (1e-7 if name == "F16" else 0)).all()


def test_encode_refuses_other_types() -> None:
    with pytest.raises(AssertionError, match="no encoder for Q4_K"):
        quantize(np.zeros(256), TYPES["Q4_K"])


@ALL
@pytest.mark.filterwarnings("error")
def test_random_blocks_have_the_wanted_deviation(type: TensorType) -> None:
    for scale in (0.01, 0.02, 0.3, 1.0, 2.5):
        raw = random_blocks(type, 100_000 // type.block, np.random.default_rng(3), scale)
        assert raw.shape == (100_000 // type.block, type.block_bytes)
        weights = dequantize(raw.reshape(-1), type, (raw.shape[0] * type.block,)).astype(np.float64)
        assert np.isfinite(weights).all()
        assert 0.85 * scale < weights.std() < 1.15 * scale, (scale, weights.std())
        assert abs(weights.mean()) < 0.05 * scale
        assert np.abs(weights).max() < 8 * scale
        assert len(np.unique(raw, axis=0)) > 0.3 * len(raw) or type.block == 1


def test_random_blocks_are_such_as_a_quantizer_writes() -> None:
    assert blocks_of(TYPES["Q8_0"])[:, 2:].view(np.int8).min() == -127
    twos = blocks_of(TYPES["TQ2_0"])[:, :64]
    assert not any((twos >> shift & 3 == 3).any() for shift in (0, 2, 4, 6))


@ALL
def test_random_blocks_follow_from_the_seed(type: TensorType) -> None:
    made = [random_blocks(type, 1001, np.random.default_rng(seed), 0.1) for seed in (1, 1, 2)]
    assert_array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])
    assert random_blocks(type, 0, np.random.default_rng(0), 0.1).shape == (0, type.block_bytes)
