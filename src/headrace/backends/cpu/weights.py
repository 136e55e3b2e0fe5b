"""Weights in host memory, in the file's blocks or regrouped for speed."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...gguf import TensorInfo
from ...quants import dequantize

REPACK_TYPES: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class CpuWeight:
    """A tensor's bytes, uint8, in the given layout ("in_place" or "interleaved")."""

    info: TensorInfo
    data: NDArray[np.uint8]
    layout: str = "in_place"

    @cached_property
    def floats(self) -> NDArray[np.float32]:
        """Decoded once, in the tensor's shape: for norms, biases and other small tensors."""
        assert self.layout == "in_place"
        return np.ascontiguousarray(dequantize(self.data[: self.info.n_bytes], self.info.type, self.info.shape))

    @cached_property
    def transposed(self) -> NDArray[np.float32]:
        """A small matrix decoded with its axes exchanged."""
        return np.ascontiguousarray(self.floats.T)


def load_weight(team: Any, info: TensorInfo, raw: NDArray[np.uint8], layout: str) -> CpuWeight:
    return CpuWeight(info, raw, layout)
