"""Tile sizes per kind of GPU: data, not tuning at run time (autotuning would change bits from run to run).

A tile is (BM, BN, warps, stages). The step along K is the same everywhere, so tiles change speed and never results:
on an H200 all sizes below gave the same bits as each other.
"""

from dataclasses import dataclass

Tile = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tiles:
    """Candidates by falling height; the first whose height does not exceed the tokens at hand is used."""

    gemm: tuple[Tile, ...]
    glu: tuple[Tile, ...]
    down: tuple[Tile, ...]
    attention: Tile
    attention_wide: Tile
    """For heads of more than 128 numbers."""
    scratch_weights: int
    """Weights decoded at a time, to 16 bits each; a launch of more experts fills the last wave of programs better."""
    tma: bool
    """Whether tensor descriptors load faster than addresses: they do where the hardware has them."""

    @staticmethod
    def of(capability: tuple[int, int]) -> "Tiles":
        """By shared memory: 227 KiB on sm_90 and sm_100, 163 on sm_80, 99 on sm_86, sm_89 and sm_120, 64 on sm_75."""
        if capability[0] in (9, 10):
            # H200, TFLOP/s (bench/cuda_matmul.py): 8192 tokens gemm 603, glu 435, down 377; 16384 glu 511, down 365
            return Tiles(
                gemm=((128, 128, 4, 3), (64, 128, 4, 4), (16, 64, 4, 4)),
                glu=((128, 128, 8, 3), (64, 128, 4, 4), (32, 128, 4, 4), (16, 128, 4, 4)),
                down=((128, 128, 4, 3), (64, 128, 4, 4), (32, 128, 4, 4), (16, 128, 4, 4)),
                # 16384 tokens, TFLOP/s: wide 418 (bench/cuda_attention.py)
                attention=(64, 64, 4, 3),
                attention_wide=(64, 64, 4, 1),
                scratch_weights=128 << 20,
                tma=True,
            )
        return Tiles(
            gemm=((128, 128, 8, 3), (64, 128, 4, 3), (16, 64, 4, 3)),
            glu=((128, 64, 8, 3), (64, 64, 4, 3), (32, 64, 4, 3), (16, 64, 4, 3)),
            down=((128, 128, 8, 3), (64, 128, 4, 3), (32, 128, 4, 3), (16, 128, 4, 3)),
            attention=(64, 32, 4, 2),
            # without tensor cores (sm_75) 64 rows of wide heads took 96 of the 64 KiB that there are
            attention_wide=(64, 32, 4, 2) if capability >= (8, 0) else (16, 32, 4, 2),
            scratch_weights=64 << 20,
            tma=capability[0] > 10,
        )


def pick(tiles: tuple[Tile, ...], height: float) -> Tile:
    return next((t for t in tiles if t[0] <= height), tiles[-1])
