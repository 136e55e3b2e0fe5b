"""Buffers of decoded weights that a stream of their own fills while the products before still run.

Decoding is bound by memory and products by arithmetic, so they share the processors well. Inside one recording the
order is: fill waits until the buffer's last product is done, the product waits for its fill; nothing else is ordered.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ScratchRing:
    """n buffers of n_weights 16-bit numbers, used in turn; the first use allocates."""

    def __init__(self, where: torch.device, n: int, n_weights: int, dtype: torch.dtype) -> None:
        self.where, self.n_weights, self.dtype = where, n_weights, dtype
        self.buffers: list[torch.Tensor] = []
        self.read_events: list[Any] = [None] * n
        self.turn = 0
        self.stream = torch.cuda.Stream(where) if where.type == "cuda" else None

    def start(self) -> None:
        """At the begin of a recording or an eager run: behind all that is queued so far, every buffer is free."""
        self.read_events = [None] * len(self.read_events)
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.where))

    @contextmanager
    def fill(self, behind: bool = False) -> Iterator[torch.Tensor]:
        """The next buffer, to be filled by what is launched inside; what is launched after may read it.

        `behind`: filling needs what was launched so far.
        """
        if not self.buffers:
            self.buffers = [torch.empty(self.n_weights, dtype=self.dtype, device=self.where) for _ in self.read_events]
        self.turn = (self.turn + 1) % len(self.buffers)
        if not self.stream:
            yield self.buffers[self.turn]
            return
        if behind:
            self.stream.wait_stream(torch.cuda.current_stream(self.where))
        elif event := self.read_events[self.turn]:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield self.buffers[self.turn]
        torch.cuda.current_stream(self.where).wait_stream(self.stream)

    def done(self) -> None:
        """The product that reads the last buffer was launched."""
        if self.stream:
            self.read_events[self.turn] = torch.cuda.current_stream(self.where).record_event()
