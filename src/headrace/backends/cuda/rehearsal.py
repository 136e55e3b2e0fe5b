"""A CudaDevice without memory: its tensors are PyTorch's "meta" tensors, which have shapes, strides and offsets.

So launches have the constants and alignments of real ones; compiling.py turns them into compilations.
"""

from collections import OrderedDict
from typing import Any

import torch
from numpy.typing import NDArray

from .decode_ops import DecodeOps
from .device import CudaDevice, CudaQueue
from .ops import CudaOps


class Rehearsal(CudaDevice):
    """Behaves like `device`; nothing is allocated, copied or computed, and what is downloaded is zeros."""

    def __init__(self, device: CudaDevice) -> None:
        self.where, self.info, self.act_dtype = torch.device("meta"), device.info, device.act_dtype
        self.compute = self.copy = CudaQueue(None)
        self.ops = CudaOps(self.where, device.ops.act_dtype, device.ops.tiles)
        self.decode_ops = DecodeOps(self.ops)
        self.graphs, self.host_experts, self.n_requests = OrderedDict(), None, {}

    def split_experts(self, first_rank: int, n_threads: int) -> None:
        """The CPU is not asked: the two kernels that do are compiled by the first step."""

    def download(self, src: torch.Tensor) -> NDArray[Any]:
        zeros: NDArray[Any] = torch.zeros(src.shape, dtype=src.dtype).numpy()
        return zeros
