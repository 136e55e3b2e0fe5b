"""Random weights of sane magnitude in any tensor type, fast.

Random numbers are slower than a disk, so a pool of random blocks is made once for each (type, magnitude) and laid end
to end, its bits flipped by a second, smaller pool of another length: rows coincide only after the product of the
lengths, which are primes. (A pool alone repeats after 40,000 rows: a vocabulary of 248,320 had six-fold ties.)
"""

import math
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..quants import TYPES
from .shapes import Entry, Shape
from .writer import Tensor

POOL_BYTES, FLIP_BYTES = 8 << 20, 1 << 20
Bytes = NDArray[np.uint8]


def rng_of(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def fill(shape: Shape, e: Entry, t: Tensor, seed: int, router_skew: float) -> Iterator[memoryview]:
    """The tensor's bytes in pieces."""
    rng = rng_of(seed, e.name)
    if e.fill in FILLS:
        values = FILLS[e.fill](rng, e.shape) * e.gain
        yield memoryview(values.astype("<f4").tobytes())
    elif e.fill == "router":
        yield memoryview(router(rng, shape, router_skew).astype("<f4").tobytes())
    else:
        std = 1.0 if e.fill == "embedding" else e.gain / math.sqrt(e.shape[-1])
        yield from tile(pool(t.type, f"{std:.3g}", seed), flips(t.type, seed), t.n_bytes, rng)


def tile(blocks: Bytes, flip: Bytes, n_bytes: int, rng: np.random.Generator) -> Iterator[memoryview]:
    """n_bytes of `blocks ^ flip`, both [n, block_bytes], each repeated from a random start."""
    n_left = n_bytes // blocks.shape[1]
    i, j = int(rng.integers(len(blocks))), int(rng.integers(len(flip)))
    while n_left:
        n = min(n_left, len(blocks) - i, len(flip) - j)
        yield (blocks[i : i + n] ^ flip[j : j + n]).reshape(-1).data
        i, j, n_left = (i + n) % len(blocks), (j + n) % len(flip), n_left - n


def _dt(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """softplus(dt) log-uniform in 0.001 .. 0.1: states that remember tens to thousands of tokens."""
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
    return dt + np.log(-np.expm1(-dt))


FILLS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]] = {
    "norm": lambda rng, shape: 1 + 0.1 * rng.standard_normal(shape),
    "bias": lambda rng, shape: 0.1 * rng.standard_normal(shape),
    "sink": lambda rng, shape: rng.standard_normal(shape),
    "vector": lambda rng, shape: rng.standard_normal(shape) / math.sqrt(shape[-1]),
    "conv": lambda rng, shape: rng.standard_normal(shape) / math.sqrt(shape[-1]),
    "ssm_a": lambda rng, shape: -rng.uniform(1, 16, shape),
    "dt": _dt,
}


# routing


def router(rng: np.random.Generator, shape: Shape, skew: float) -> NDArray[np.float64]:
    """Router rows [n_expert, n_embd]: logits of magnitude 2, or larger for the quarter that shall be hot.

    At 2 the last expert that a token takes weighs little, as in trained models: a near tie that rounding decides
    otherwise changes less (at 1, KL to llama.cpp jumped from 0.004 to 0.4 on such tokens).
    An expert whose logits vary more is more often among the largest, whatever the token; which are hot differs
    per layer.
    """
    rows = 2 * rng.standard_normal((shape.n_expert, shape.n_embd)) / math.sqrt(shape.n_embd)
    hot = rng.permutation(shape.n_expert)[: n_hot(shape.n_expert)]
    rows[hot] *= hot_factor(shape.n_expert, shape.n_expert_used, skew)
    return rows


def n_hot(n_expert: int) -> int:
    return max(1, n_expert // 4)


@lru_cache
def hot_factor(n_expert: int, n_used: int, skew: float) -> float:
    """The factor on the hot quarter's logits that gives it the share `skew` of all assignments, by bisection."""
    n = n_hot(n_expert)
    if skew <= n / n_expert:
        return 1.0
    logits = np.random.default_rng(0).standard_normal((4096, n_expert))

    def share(factor: float) -> float:
        scaled = np.concatenate([logits[:, :n] * factor, logits[:, n:]], axis=1)
        return float((np.argpartition(-scaled, n_used - 1, axis=1)[:, :n_used] < n).mean())

    low, high = 1.0, 64.0
    if share(high) < skew:
        raise UserError(
            f"--router-skew {skew}: with {n_used} of {n_expert} experts used the hottest quarter can take "
            f"{share(high):.2f} at most"
        )
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if share(middle) < skew else (low, middle)
    return high


# blocks

FACTORS: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1}, "Q4_1": {0: 1, 2: -7.5}, "Q5_0": {0: 1}, "Q5_1": {0: 1, 2: -15.5}, "Q8_0": {0: 1},
    "Q2_K": {80: 1, 82: 1.5}, "Q3_K": {108: 1}, "Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5}, "Q6_K": {208: 1},
    "IQ1_S": {0: 1}, "IQ2_XXS": {0: 1}, "IQ2_XS": {0: 1}, "IQ2_S": {0: 1}, "IQ3_XXS": {0: 1}, "IQ3_S": {0: 1},
    "IQ4_NL": {0: 1}, "IQ4_XS": {0: 1}, "TQ1_0": {52: 1}, "TQ2_0": {64: 1},
    "MXFP4": {0: 1},
}  # fmt: skip
"""Offset in a block -> float16 there (MXFP4: an exponent), relative to d; minimums make the weights' mean 0."""
FLOATS = ("F32", "F16", "BF16")
FILLABLE = (*FLOATS, *FACTORS)


@lru_cache(maxsize=16)
def pool(kind: str, std: str, seed: int) -> Bytes:
    """uint8 [n, block_bytes]: blocks whose weights have mean 0 and the given standard deviation."""
    if kind in FLOATS:
        values = normals(seed) * np.float32(std)
        if kind == "F16":
            return values.astype("<f2").view(np.uint8).reshape(-1, 2)
        words = values.view("<u4") if kind == "F32" else ((values.view("<u4") + 0x8000) >> 16).astype("<u2")
        return words.view(np.uint8).reshape(len(values), -1)
    blocks, unit_std = unit_blocks(kind, seed)
    blocks, factor = blocks.copy(), float(std) / unit_std
    if kind == "MXFP4":
        blocks[:, 0] += round(math.log2(factor)) % 256
        return blocks
    for offset in FACTORS[kind]:
        field = blocks[:, offset : offset + 2].copy().view("<f2").astype(np.float32) * factor
        blocks[:, offset : offset + 2] = field.astype("<f2").view(np.uint8)
    return blocks


@lru_cache(maxsize=16)
def flips(kind: str, seed: int) -> Bytes:
    """uint8 [n, block_bytes]: bits that may be flipped in any block without changing its magnitude."""
    t, rng = TYPES[kind], rng_of(seed, f"{kind} flips")
    n = prime_below(FLIP_BYTES // t.block_bytes)
    if kind in FLOATS:
        flip = np.zeros((n, t.block_bytes), np.uint8)
        flip[:, -1] = rng.choice(np.array([0, 128], np.uint8), n)  # the sign, in little-endian
        return flip
    flip = random_bits(kind, n, rng)
    if kind == "Q8_0":
        flip = np.where(flip & 1, 255, 0).astype(np.uint8)  # -127 .. 126 stays within itself
    for offset in FACTORS[kind]:
        flip[:, offset : offset + (1 if kind == "MXFP4" else 2)] = 0
    return flip


@lru_cache(maxsize=1)
def normals(seed: int) -> NDArray[np.float32]:
    return rng_of(seed, "normals").standard_normal(prime_below(POOL_BYTES // 4), dtype=np.float32)


@lru_cache(maxsize=8)
def unit_blocks(kind: str, seed: int) -> tuple[Bytes, float]:
    """Random blocks with factors around 1, and the standard deviation of their weights."""
    t, rng = TYPES[kind], rng_of(seed, kind)
    n = prime_below(POOL_BYTES // t.block_bytes)
    blocks = random_bits(kind, n, rng)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + rng.integers(-1, 2, n)
    elif kind == "Q8_0":
        blocks[(blocks == 127) | (blocks == 128)] = 0  # no quantizer writes -128
    if kind != "MXFP4":
        # blocks differ in size, and in sign where no minimum centres their values
        size = np.exp2(rng.uniform(-0.5, 0.5, n))
        if len(FACTORS[kind]) == 1:
            size *= rng.choice([-1.0, 1.0], n)
        for offset, relative in FACTORS[kind].items():
            blocks[:, offset : offset + 2] = (size * relative).astype("<f2").view(np.uint8).reshape(n, 2)
    return blocks, float(t.decode(blocks[:1024]).std())


def random_bits(kind: str, n: int, rng: np.random.Generator) -> Bytes:
    """n blocks of random bits, with the minimum of each sub-block equal to its scale where the type has both."""
    block_bytes = TYPES[kind].block_bytes
    blocks = np.frombuffer(rng.bytes(n * block_bytes), np.uint8).reshape(n, block_bytes).copy()
    if kind in ("Q4_K", "Q5_K"):  # 12 bytes: 4 scales, 4 minimums, nibbles of 4 more of each
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    elif kind == "Q2_K":  # a nibble of scale and one of minimum
        blocks[:, :16] = (blocks[:, :16] & 15) * 17
    return blocks


def prime_below(n: int) -> int:
    return next(p for p in range(n, 1, -1) if all(p % q for q in range(2, math.isqrt(p) + 1)))
