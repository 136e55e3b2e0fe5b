"""One ubatch on the host (Batch) and its mirror in device memory (StateBuffer).

All integers travel in one packed int32 copy, into fixed places, so that recorded work can be replayed on new data.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .backends.base import Device, StepState

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """The tokens of one ubatch and where they belong; fields as in StepState."""

    token_ids: Ints
    positions: Ints
    kv_slots: Ints
    seq_start: Ints
    block_table: Ints
    state_slots: Ints
    out_rows: Ints

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def n_seq(self) -> int:
        return len(self.state_slots)


def layout(n_tokens: int, n_seq: int, n_block: int, n_out: int) -> tuple[dict[str, int], int]:
    """Where each field of a batch starts in the packed int32 row, and the row's length; fields start on a 256-byte
    border."""
    sizes = {
        "token_ids": n_tokens, "positions": n_tokens, "kv_slots": n_tokens, "seq_start": n_seq + 1,
        "state_slots": n_seq, "out_rows": n_out, "block_table": n_seq * n_block,
    }  # fmt: skip
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // 64) * 64
    return offsets, end


def state_bytes(n_tokens: int, n_seq: int, n_block: int, n_out: int, n_batches: int) -> int:
    """Device bytes that a StateBuffer of these sizes takes: a row per batch of a window, and one for the selected."""
    return 4 * layout(n_tokens, n_seq, n_block, n_out)[1] * (n_batches + (n_batches > 1))


class StateBuffer:
    """Device memory for any Batch up to the stated sizes, and for all batches of a window.

    A window's batches are sent in one copy before its uploads begin: on a GPU a small copy queued later would wait
    behind them in the copy engine (measured: 516 instead of 380 ms for 8192 tokens). `select` then moves one of them
    to the place that recorded work reads.
    """

    def __init__(
        self, device: Device, n_tokens: int, n_seq: int, n_block: int, n_out: int, page: int, n_batches: int
    ) -> None:  # fmt: skip
        self.device, self.n_block, self.page = device, n_block, page
        self.offsets, end = layout(n_tokens, n_seq, n_block, n_out)
        self.host = np.zeros((n_batches, end), np.int32)
        self.staged = device.alloc((n_batches, end), "i32")
        self.buffer = device.alloc((end,), "i32") if n_batches > 1 else self.staged.reshape(end)
        self.selected = -1

    def stage(self, batches: list[Batch]) -> None:
        """Sends the batches of a window."""
        for row, batch in zip(self.host, batches):
            for name, offset in self.offsets.items():
                values = getattr(batch, name)
                row[offset : offset + values.size] = values.ravel()
        self.device.upload(self.staged[: len(batches)], self.host[: len(batches)])
        self.selected = -1

    def select(self, i: int) -> None:
        """Makes batch i of the window the one that `view` shows."""
        if i != self.selected and len(self.host) > 1:
            self.device.compute.copy(self.buffer, self.staged[i])
        self.selected = i

    def set_out_rows(self, rows: Ints) -> None:
        start = self.offsets["out_rows"]
        self.device.upload(self.buffer[start : start + len(rows)], rows)

    def view(self, n_tokens: int, n_seq: int, n_out: int) -> StepState:
        """The state as a ubatch of this shape sees it; the same shape gives the same addresses."""

        def part(name: str, n: int) -> "np.ndarray":  # type: ignore[type-arg]
            return self.buffer[self.offsets[name] : self.offsets[name] + n]  # type: ignore[return-value]

        return StepState(
            token_ids=part("token_ids", n_tokens), positions=part("positions", n_tokens),
            kv_slots=part("kv_slots", n_tokens), seq_start=part("seq_start", n_seq + 1),
            block_table=part("block_table", n_seq * self.n_block).reshape(n_seq, self.n_block),
            state_slots=part("state_slots", n_seq), out_rows=part("out_rows", n_out), page=self.page,
        )  # fmt: skip
