"""The CPU's product kernels against float64 on the very activations that they quantised: formats x layouts x tokens."""

import os
import subprocess
import sys

import numpy as np
import pytest

from headrace.backends.cpu import kernels, matmul
from headrace.backends.cpu.formats import FORMATS, Acts
from headrace.backends.cpu.repack import repack
from headrace.backends.cpu.team import Program, Team
from headrace.gguf import TensorInfo
from headrace.quants import TYPES, dequantize, random_blocks

K = 512
TOKENS = (1, 2, 3, 5, 8, 13, 40)
TEAMS = [Team(1), Team(2)]


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def weights(name: str, *shape: int, seed: int = 0) -> tuple[TensorInfo, np.ndarray, np.ndarray]:
    """(info, bytes at an odd address, float64 values)."""
    kind, rng = TYPES[name], np.random.default_rng(seed)
    n = int(np.prod(shape)) // kind.block
    raw = np.concatenate([np.zeros(3, np.uint8), random_blocks(kind, n, rng, 0.05).reshape(-1)])[3:]
    return TensorInfo("w", kind, shape, 0, 0, raw.nbytes), raw, dequantize(raw, kind, shape).astype(np.float64)


def unpacked(name: str, xq: np.ndarray, n: int, tile: int) -> np.ndarray:
    """The packed activations as float64 [n, K]."""
    f, size, blocks = FORMATS[name], Acts(FORMATS[name], 1).size, K // FORMATS[name].block
    tiles = -(-n // tile)
    a = xq[: size * tile * blocks * tiles].reshape(tiles, blocks, size * tile)
    q = a[..., : tile * f.block].reshape(tiles, blocks, f.block // 4, tile, 4).view(np.int8)
    d = a[..., -4 * tile :].copy().view(np.float32).transpose(0, 2, 1)[..., None]
    v = q.transpose(0, 3, 1, 2, 4).reshape(tiles, tile, blocks, f.block) * d.astype(np.float64)
    return v.reshape(tiles * tile, K)[:n]


@pytest.mark.parametrize("layout", ["in_place", "interleaved"])
@pytest.mark.parametrize("name", FORMATS)
def test_mul_mat(name: str, layout: str) -> None:
    desc, blocks = kernels.descriptor(name), K // FORMATS[name].block
    for m in (96, 70) if layout == "in_place" else (96,):
        info, raw, values = weights(name, m, K)
        w = raw if layout == "in_place" else repack(TEAMS[1], info, raw)
        for n in TOKENS:
            rng = np.random.default_rng(n)
            x, y = rng.standard_normal((n, K)).astype(np.float32), np.full((n, m + 5), 0.5, np.float32)
            xq = np.zeros(matmul.packed_bytes(int(desc[kernels.ACT_BYTES]), blocks, n), np.uint8)
            per_thread = matmul.thread_bytes(int(desc[kernels.GROUP_BYTES]), int(desc[kernels.ROW_BYTES]), blocks, 16)
            scratch, in_place, add = np.zeros(2 * per_thread, np.uint8), layout == "in_place", n % 2
            d = address(desc)
            pack = (d, n, blocks, address(x), x.strides[0], address(xq), in_place)
            product = (
                d, n, blocks, m, address(w), in_place, address(xq), address(y), m + 5, add,
                address(scratch), per_thread,
            )  # fmt: skip
            TEAMS[n % 2].run(Program([(matmul.pack, pack), (matmul.mul_mat, product)], (x, y, xq, w, scratch)))
            widest = 1 << min(kernels.WIDEST, 0 if n <= 1 else 1 if n == 2 else 2 if n <= 4 else 3)
            acts = unpacked(name, xq, n, 1 if in_place and n < matmul.MANY else widest)
            right = acts @ values.T + 0.5 * add
            assert np.abs(acts - x).max() < 0.04, "activations are quantised closely"
            assert np.abs(y[:, :m] - right).max() < 2e-5 * np.sqrt(np.mean(right**2)), (m, n)
            assert (y[:, m:] == 0.5).all(), "nothing is written beside the rows"


@pytest.mark.parametrize("layout", ["in_place", "interleaved"])
@pytest.mark.parametrize("name", FORMATS)
def test_mul_mat_id(name: str, layout: str) -> None:
    """Seven experts of which one is empty; in the last case all tokens go to two."""
    desc, blocks, n_expert, used = kernels.descriptor(name), K // FORMATS[name].block, 7, 2
    for m in (96, 40) if layout == "in_place" else (96,):
        (info, raw, w1), (_, raw2, w2) = weights(name, n_expert, m, K), weights(name, n_expert, m, K, seed=1)
        a, b = (raw, raw2) if layout == "in_place" else (repack(TEAMS[1], info, r) for r in (raw, raw2))
        for n, alike in ((1, False), (5, False), (40, False), (30, True)):
            rng = np.random.default_rng(n)
            ids = np.stack([rng.permutation(n_expert - 1)[:used] for _ in range(n)]).astype(np.int32)
            ids = np.full_like(ids, [3, 5]) if alike else ids
            order = np.argsort(ids.ravel(), kind="stable").astype(np.int32)
            starts = np.searchsorted(np.sort(ids.ravel()), np.arange(n_expert + 1)).astype(np.int32)
            x = rng.standard_normal((n, K)).astype(np.float32)
            g = np.einsum("nk,nmk->nm", np.repeat(x.astype(np.float64), used, 0), w1[ids.ravel()])
            u = np.einsum("nk,nmk->nm", np.repeat(x.astype(np.float64), used, 0), w2[ids.ravel()])
            for second, right in ((0, g), (1, g / (1 + np.exp(-g)) * u)):
                y = np.full((n * used, m), np.nan, np.float32)
                xq = np.zeros(matmul.packed_bytes(int(desc[kernels.ACT_BYTES]), blocks, n * used, n_expert), np.uint8)
                per_thread = matmul.thread_bytes(
                    int(desc[kernels.GROUP_BYTES]), int(desc[kernels.ROW_BYTES]), blocks, m
                )
                scratch, in_place, d = np.zeros(2 * per_thread, np.uint8), layout == "in_place", address(desc)
                expert_bytes = info.n_bytes // n_expert
                first, other = (d, address(a), expert_bytes, in_place), (d, address(b), expert_bytes, in_place)
                args = (
                    d, blocks, m, n_expert, address(order), address(starts), used, address(x), x.strides[0],
                    address(xq), address(y), m, *first, *(other if second else (0,) * 4), address(scratch), per_thread,
                )  # fmt: skip
                TEAMS[n % 2].run(Program([(matmul.mul_mat_id, args)], (order, starts, x, y, xq, scratch, a, b)))
                assert np.sqrt(np.mean((y - right) ** 2)) < 0.02 * np.sqrt(np.mean(right**2)), (m, n, second)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_other_instruction_sets(isa: str) -> None:
    """Two formats with the kernels that other processors get."""
    if os.environ.get("HEADRACE_ISA"):
        pytest.skip("already in such a process")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "Q8_0 or Q4_K"],
        env=os.environ | {"HEADRACE_ISA": isa}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:]
