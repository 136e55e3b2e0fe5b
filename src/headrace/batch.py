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
    """Device bytes that a StateBuffer of these sizes takes: the batches of two windows, and the selected one."""
    return 4 * layout(n_tokens, n_seq, n_block, n_out)[1] * (2 * n_batches + 1)


class StateBuffer:
    """Device memory for any Batch up to the stated sizes, and for all batches of two windows.

    A window's batches are sent in one copy on the copy queue, in front of its uploads: from the compute queue they
    would wait in the copy engine behind uploads that are ready earlier (measured on an H200: 20 ms). The rows of two
    windows take turns, so that sending does not wait for the window before. `select` moves a batch to the place that
    recorded work reads.
    """

    def __init__(
        self, device: Device, n_tokens: int, n_seq: int, n_block: int, n_out: int, page: int, n_batches: int
    ) -> None:  # fmt: skip
        self.device, self.n_block, self.page = device, n_block, page
        self.offsets, end = layout(n_tokens, n_seq, n_block, n_out)
        self.host = np.zeros((n_batches, end), np.int32)
        self.staged = device.alloc((2, n_batches, end), "i32")
        self.buffer = device.alloc((end,), "i32")
        self.turn, self.selected = 0, -1
        self.sent, self.read = device.event(), [device.event(), device.event()]
        for event in self.read:
            device.compute.record(event)

    def stage(self, batches: list[Batch], *, uploads: bool) -> None:
        """Sends the batches of a window; `uploads` says whether experts are uploaded in it."""
        for row, batch in zip(self.host, batches):
            for name, offset in self.offsets.items():
                values = getattr(batch, name)
                row[offset : offset + values.size] = values.ravel()
        if len(batches) == 1 and not uploads:
            self.device.upload(self.buffer, self.host[0])
            self.selected = 0
            return
        compute, copy = self.device.compute, self.device.copy
        compute.record(self.read[self.turn])  # all that reads the window before is queued
        self.turn = 1 - self.turn
        copy.wait(self.read[self.turn])
        self.device.upload(self.staged[self.turn][: len(batches)], self.host[: len(batches)], copy)
        copy.record(self.sent)
        compute.wait(self.sent)
        self.selected = -1

    def select(self, i: int) -> None:
        """Makes batch i of the window the one that `view` shows."""
        if i != self.selected:
            self.device.compute.copy(self.buffer, self.staged[self.turn][i])
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
