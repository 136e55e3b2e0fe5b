"""Weights in host memory, in the file's blocks or regrouped for speed."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...gguf import TensorInfo
from ...quants import TYPES, dequantize
from . import decoders, floatmat, kernels
from .formats import FORMATS
from .repack import can_repack, repack
from .team import Team

UNIT = 32
"""Numbers that the float kernels (floatmat.py) take at a time."""
REPACK_TYPES: frozenset[str] = frozenset(FORMATS)


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The same rows of every expert's matrix: what a product over experts reads of a weight."""

    weight: "CpuWeight"
    address: int
    expert_bytes: int

    @property
    def descriptor(self) -> NDArray[np.int64]:
        return self.weight.descriptor

    @property
    def arguments(self) -> tuple[int, ...]:
        """Descriptor, first row, bytes of an expert, whether the rows are as in the file."""
        return self.descriptor.ctypes.data, self.address, self.expert_bytes, self.weight.layout == "in_place"

    def fits(self, other: "ExpertRows") -> bool:
        """Whether both can read the same packed activations."""
        a, b = self.weight, other.weight
        return b.has_format and a.packing == b.packing and a.layout == b.layout


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
    def padded(self) -> "CpuWeight":
        """A float weight whose rows do not come in units of 32 numbers: as F32 with zeros behind."""
        n = self.info.shape[-1]
        wide = -(-n // UNIT) * UNIT
        values = np.zeros((*self.info.shape[:-1], wide), np.float32)
        values[..., :n] = self.floats
        info = replace(self.info, type=TYPES["F32"], shape=values.shape, n_bytes=values.nbytes)
        return CpuWeight(info, values.reshape(-1).view(np.uint8))

    @cached_property
    def transposed(self) -> NDArray[np.float32]:
        """A small matrix decoded with its axes exchanged."""
        return np.ascontiguousarray(self.floats.T)

    @property
    def has_format(self) -> bool:
        """Whether the tensor type has kernels on packed activations; the others are read as floats."""
        return self.info.type.name in FORMATS

    @cached_property
    def decoder(self) -> tuple[int, ...]:
        """Function that decodes a block, its table or 0, numbers of a block, bytes of a block and of a row."""
        t = self.info.type
        lut = decoders.table(t.name)
        where = 0 if lut is None else lut.ctypes.data
        return decoders.DECODERS[t.name].address, where, t.block, t.block_bytes, t.row_bytes(self.info.shape[-1])

    @cached_property
    def float_kernels(self) -> tuple[int, ...]:
        """The kernels of floatmat.dots; then the decoder, or 0 first where none is needed."""
        name = self.info.type.name
        if name in floatmat.KINDS:
            return *floatmat.dots(name), 0, *self.decoder[1:]
        return *floatmat.dots("F32"), *self.decoder

    @cached_property
    def descriptor(self) -> NDArray[np.int64]:
        """Of the tensor type's kernels (kernels.py)."""
        return kernels.descriptor(self.info.type.name)

    @cached_property
    def packing(self) -> tuple[Any, ...]:
        """Types with the same value read the same packed activations."""
        fmt = FORMATS[self.info.type.name]
        return fmt.block, fmt.sums, fmt.sum_scale

    def rows(self, first: int) -> ExpertRows:
        """Rows from `first` on of each expert of a weight [E, rows, n]."""
        _, n_rows, n = self.info.shape
        row_bytes = self.info.type.row_bytes(n)
        return ExpertRows(self, self.data.ctypes.data + first * row_bytes, n_rows * row_bytes)


def load_weight(team: Team, info: TensorInfo, raw: NDArray[np.uint8], layout: str) -> CpuWeight:
    """A weight from its bytes, which stay in use in place. "interleaved" regroups them if the type has that layout and
    its rows come in groups of 16; else they stay as they are."""
    if layout == "interleaved" and info.type.name in REPACK_TYPES and can_repack(info):
        return CpuWeight(info, repack(team, info, raw), layout)
    return CpuWeight(info, raw)
