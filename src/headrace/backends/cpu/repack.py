"""Regroups a whole matrix (or a stack of experts) for the interleaved kernels: in parallel, once, at load.

The source is the file's map; the caller gives its pages back tensor by tensor, so that the peak stays near the size of
the weights. Rows are a multiple of 16.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ...gguf import TensorInfo
from .kernels import BLOCK, GROUP_BYTES, ROW_BYTES, descriptor
from .matmul import regroup_rows
from .native import i64, op
from .team import Program, Team, take

GROUPS_AT_ONCE = 4


@op
def regroup_groups(tid, team, a):
    """fmt, nb, groups | src | dst"""
    fmt, nb, groups, src, dst = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4)
    src_bytes, dst_bytes = 16 * nb * i64(fmt, ROW_BYTES), nb * i64(fmt, GROUP_BYTES)
    g0 = take(team, 0, GROUPS_AT_ONCE)
    while g0 < groups:
        for g in range(g0, min(groups, g0 + GROUPS_AT_ONCE)):
            regroup_rows(fmt, src + g * src_bytes, nb, dst + g * dst_bytes)
        g0 = take(team, 0, GROUPS_AT_ONCE)


def can_repack(info: TensorInfo) -> bool:
    """Whole groups of 16 rows in every matrix."""
    return len(info.shape) > 1 and info.shape[-2] % 16 == 0


def repack(team: Team, info: TensorInfo, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [n_bytes] at a 64-byte border: the tensor's bytes in the interleaved layout."""
    assert can_repack(info), f"{info.name}: rows are no multiple of 16"
    fmt = descriptor(info.type.name)
    block = np.empty(raw.nbytes + 64, np.uint8)
    out = block[-block.ctypes.data % 64 :][: raw.nbytes]
    args = (
        fmt.ctypes.data, info.shape[-1] // int(fmt[BLOCK]), math.prod(info.shape[:-1]) // 16, raw.ctypes.data,
        out.ctypes.data,
    )  # fmt: skip
    team.run(Program([(regroup_groups, args)], (fmt, raw, out)))
    return out
