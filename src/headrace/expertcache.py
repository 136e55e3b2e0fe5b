"""Which experts live in spare device memory: a pure policy over observed use.

Each streamed layer has a fixed number of lines, each of which holds one expert. The map `line` says where: expert e
lies in line[e], or nowhere (-1). The decode step counts how often each expert is used; now and then `choose` turns the
counts into a new map. Nothing is copied for it: an expert's line is filled when the step fetches it next anyway.
"""

import numpy as np
from numpy.typing import NDArray

DECAY = 0.9
"""What is left of a count when a new map is chosen: a window of about ten choices."""
LOYALTY = 1.25
"""A newcomer must be used this much more than who holds a line: maps that flutter cost fetches."""

Ints = NDArray[np.int32]


def choose(use: NDArray[np.float32], line: Ints, n_lines: int) -> Ints:
    """The next map of a layer, int32 [n_expert]: the experts used most hold the lines; who stays keeps its line.

    use: float32 [n_expert], decayed counts. Ties go to who is there, then to the lower id; the unused never enter.
    """
    there = line >= 0
    score = np.where(there, use * LOYALTY, use)
    ranked = np.lexsort((np.arange(len(use)), ~there, -score))[:n_lines]
    chosen = np.zeros(len(use), bool)
    chosen[ranked] = there[ranked] | (use[ranked] > 0)
    stays = there & chosen
    out = np.where(stays, line, -1).astype(np.int32)
    free = np.setdiff1d(np.arange(n_lines, dtype=np.int32), line[stays])
    new = ranked[chosen[ranked] & ~there[ranked]]
    out[new] = free[: len(new)]
    return out


def lines_per_layer(budget_bytes: int, expert_bytes: list[int], n_expert: int) -> int:
    """How many lines every layer can have; expert_bytes: what one expert takes in each layer."""
    total = sum(expert_bytes)
    return min(n_expert, budget_bytes // total) if total else 0
