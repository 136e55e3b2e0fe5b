"""Which experts live in spare device memory: a pure policy over observed use.

Each streamed layer has a fixed number of lines, each of which holds one expert. The map `line` says where: expert e
lies in line[e], or nowhere (-1). The decode step counts how often each expert is used; now and then `choose` turns the
counts into a new map. Nothing is copied for it: an expert's line is filled when the step fetches it next anyway.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .backends.base import Device, Lines
from .gguf import TensorInfo

INTERVAL = 16
"""Decode steps between two choices."""
DECAY = 0.9
"""What is left of a count when a new map is chosen: a window of about ten choices."""
LOYALTY = 1.25
"""A newcomer must be used this much more than who holds a line: maps that flutter cost fetches."""

Ints = NDArray[np.int32]


class ExpertCache:
    """The lines of all streamed layers. `groups` names each layer's tensors; all have n_expert experts."""

    def __init__(self, device: Device, groups: Sequence[Sequence[TensorInfo]], n_lines: int) -> None:
        self.device, self.n_lines = device, n_lines
        n_layer, n_expert = len(groups), groups[0][0].shape[0]
        self.line = np.full((n_layer, n_expert), -1, np.int32)
        self.filled = np.zeros((n_layer, n_expert), np.int32)
        self.score = np.zeros((n_layer, n_expert), np.float32)
        self.state = device.alloc((3, n_layer, n_expert), "i32")
        device.upload(self.state[0], self.line)
        self.lines: dict[str, Lines] = {}
        for i, group in enumerate(groups):
            for info in group:
                data = device.alloc((n_lines * (info.n_bytes // n_expert),), "u8")
                self.lines[info.name] = Lines(data, self.state[0][i], self.state[1][i], self.state[2][i])
        self.row = {info.name: i for i, group in enumerate(groups) for info in group}
        self.expert_bytes = np.array([sum(info.n_bytes // n_expert for info in group) for group in groups])
        self.n_steps = self.n_used = self.n_hits = self.saved_bytes = 0

    def after_step(self) -> None:
        """Once a step's logits were read, so that reading the counts waits for nothing: every INTERVAL steps a new map.

        Hits are counted as uses of experts whose line was full when the interval began.
        """
        self.n_steps += 1
        if self.n_steps % INTERVAL:
            return
        before = self.filled & (self.line >= 0)
        _, filled, use = self.device.download(self.state)
        hits = (use * before).sum(1)
        self.n_used, self.n_hits = self.n_used + int(use.sum()), self.n_hits + int(hits.sum())
        self.saved_bytes += int((hits * self.expert_bytes).sum())
        self.score = DECAY * self.score + use
        line = np.stack([choose(s, l, self.n_lines) for s, l in zip(self.score, self.line)])
        self.filled = np.where(line == self.line, filled, 0).astype(np.int32)
        self.line = line
        self.device.upload(self.state, np.stack([self.line, self.filled, np.zeros_like(self.line)]))

    def held(self, name: str) -> list[tuple[int, int]]:
        """(expert, line) of a tensor's experts that are surely here, by rising expert."""
        i = self.row[name]
        return [(int(e), int(self.line[i, e])) for e in np.flatnonzero(self.filled[i] & (self.line[i] >= 0))]


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
