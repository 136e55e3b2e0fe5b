"""Keys, values and recurrent states of all sequences on one device: paged, forkable, trimmable.

Attention layers share a pool of pages of `PAGE` tokens; a Sequence owns a list of them, forks share whole pages.
Recurrent layers keep one row of state per sequence; as a state cannot be trimmed, a sequence keeps snapshots and
`trim` falls back to the newest one that fits.
"""

from collections.abc import Iterator

import numpy as np

from .backends.base import DTYPE_BYTES, Device, KVLayer, RecurrentLayer
from .batch import Ints
from .errors import UserError
from .spec import ModelSpec

PAGE = 64
"""Tokens per page: the attention kernels' key tile."""
N_SNAPSHOT = 2
"""Snapshots of recurrent state kept per sequence: the newest prompt's start and end."""


class Sequence:
    """One text in the cache: its tokens so far and where they lie. Made by `KVCache.sequence`."""

    def __init__(self, state_slot: int) -> None:
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.state_slot = state_slot
        self.snapshots: dict[int, int] = {}
        """Length in tokens -> row that holds the recurrent state at that length."""

    @property
    def n_past(self) -> int:
        return len(self.tokens)


class KVCache:
    def __init__(self, device: Device, spec: ModelSpec, n_ctx: int, n_seq_max: int, type_k: str, type_v: str) -> None:
        self.device, self.spec, self.n_ctx = device, spec, n_ctx
        self.n_block = -(-n_ctx // PAGE)
        self.free_pages = list(range(self.n_block * n_seq_max - 1, -1, -1))
        self.n_users = [0] * len(self.free_pages)
        n_rows, n_slot = PAGE * len(self.free_pages), n_seq_max * (1 + N_SNAPSHOT * spec.is_recurrent)
        self.free_slots = list(range(n_seq_max - 1, -1, -1))
        self.free_snapshots = list(range(n_slot - 1, n_seq_max - 1, -1))
        self.layers: dict[int, KVLayer | RecurrentLayer] = {}
        for i, (a, d) in enumerate(zip(spec.attention, spec.delta_net)):
            if a:
                shape = (n_rows, a.n_head_kv, a.head_dim)
                self.layers[i] = KVLayer(device.alloc(shape, type_k), device.alloc(shape, type_v))
            if d:
                conv = device.alloc((n_slot, d.n_conv - 1, d.conv_width), "f32")
                self.layers[i] = RecurrentLayer(conv, device.alloc((n_slot, d.n_v_head, d.k_dim, d.v_dim), "f32"))

    # sequences

    def sequence(self) -> Sequence:
        if not self.free_slots:
            raise UserError("no room for another sequence; raise -np")
        return Sequence(self.free_slots.pop())

    def release(self, seq: Sequence) -> None:
        self.trim(seq, 0)
        self.free_slots.append(seq.state_slot)

    def fork(self, seq: Sequence) -> Sequence:
        """A new sequence with the same tokens; whole pages are shared, the last partial one is copied."""
        new = self.sequence()
        new.tokens = list(seq.tokens)
        n_whole = seq.n_past // PAGE
        new.pages = seq.pages[:n_whole]
        for page in new.pages:
            self.n_users[page] += 1
        if seq.n_past % PAGE:
            new.pages.append(self._take_page())
            self._copy_page(new.pages[-1], seq.pages[n_whole])
        self._copy_state(new.state_slot, seq.state_slot)
        return new

    def reserve(self, seq: Sequence, n_tokens: int) -> None:
        """Makes room for n_tokens more; raises UserError when the context is full."""
        if seq.n_past + n_tokens > self.n_ctx:
            raise UserError(f"{seq.n_past + n_tokens} tokens do not fit the context of {self.n_ctx}; raise n_ctx (-c)")
        while len(seq.pages) * PAGE < seq.n_past + n_tokens:
            seq.pages.append(self._take_page())

    def rows(self, seq: Sequence, start: int, stop: int) -> Ints:
        """Cache rows of positions start..stop, int32."""
        p = np.arange(start, stop)
        return (np.array(seq.pages, np.int32)[p // PAGE] * PAGE + p % PAGE).astype(np.int32)

    def block_table(self, seqs: list[Sequence]) -> Ints:
        """int32 [S, n_block], padded with page 0."""
        table = np.zeros((len(seqs), self.n_block), np.int32)
        for row, seq in zip(table, seqs):
            row[: len(seq.pages)] = seq.pages
        return table

    def trim(self, seq: Sequence, n_tokens: int) -> int:
        """Cuts a sequence to n_tokens, or to the newest snapshot before if it is recurrent; returns its length."""
        if n_tokens >= seq.n_past:
            return seq.n_past
        if self.spec.is_recurrent and n_tokens:
            n_tokens = max((n for n in seq.snapshots if n <= n_tokens), default=0)
            if n_tokens:
                self._restore(seq, n_tokens)
        for n in [n for n in seq.snapshots if n > n_tokens]:
            self.free_snapshots.append(seq.snapshots.pop(n))
        del seq.tokens[n_tokens:]
        n_keep = -(-n_tokens // PAGE)
        for page in seq.pages[n_keep:]:
            self._drop_page(page)
        del seq.pages[n_keep:]
        if n_tokens % PAGE and self.n_users[seq.pages[-1]] > 1:  # the next token would write into a shared page
            shared, seq.pages[-1] = seq.pages[-1], self._take_page()
            self._copy_page(seq.pages[-1], shared)
            self._drop_page(shared)
        return n_tokens

    def snapshot(self, seq: Sequence) -> None:
        """Keeps the recurrent state at the present length; the oldest snapshot makes room."""
        if not self.spec.is_recurrent or not seq.n_past or seq.n_past in seq.snapshots:
            return
        if len(seq.snapshots) == N_SNAPSHOT:
            self.free_snapshots.append(seq.snapshots.pop(min(seq.snapshots)))
        row = self.free_snapshots.pop()
        try:
            self._copy_state(row, seq.state_slot)
        except BaseException:
            self.free_snapshots.append(row)
            raise
        seq.snapshots[seq.n_past] = row

    def rewind(self, seq: Sequence) -> None:
        """After an interrupted ubatch: makes the recurrent state that of `seq.tokens` again, or of fewer tokens."""
        if self.spec.is_recurrent and seq.n_past:
            if seq.n_past in seq.snapshots:
                self._restore(seq, seq.n_past)
            else:
                self.trim(seq, seq.n_past - 1)

    # device memory

    def _take_page(self) -> int:
        if not self.free_pages:
            raise UserError("the KV cache is full; raise n_ctx (-c) or use fewer sequences")
        page = self.free_pages.pop()
        self.n_users[page] = 1
        return page

    def _drop_page(self, page: int) -> None:
        self.n_users[page] -= 1
        if not self.n_users[page]:
            self.free_pages.append(page)

    def _copy_page(self, dst: int, src: int) -> None:
        for layer in self.layers.values():
            if isinstance(layer, KVLayer):
                for t in (layer.k, layer.v):
                    self.device.compute.copy(t[dst * PAGE : (dst + 1) * PAGE], t[src * PAGE : (src + 1) * PAGE])

    def _restore(self, seq: Sequence, n_tokens: int) -> None:
        """The recurrent state of a snapshot; half copied it is no state, and the sequence forgets everything."""
        try:
            self._copy_state(seq.state_slot, seq.snapshots[n_tokens])
        except BaseException:
            self.trim(seq, 0)
            raise

    def _copy_state(self, dst: int, src: int) -> None:
        for layer in self._recurrent_layers():
            self.device.compute.copy(layer.conv[dst : dst + 1], layer.conv[src : src + 1])
            self.device.compute.copy(layer.s[dst : dst + 1], layer.s[src : src + 1])

    def _recurrent_layers(self) -> Iterator[RecurrentLayer]:
        return (layer for layer in self.layers.values() if isinstance(layer, RecurrentLayer))


def cache_bytes(spec: ModelSpec, n_ctx: int, n_seq_max: int, type_k: str, type_v: str) -> int:
    """Bytes that a KVCache of these sizes takes."""
    n_rows, n_slot = -(-n_ctx // PAGE) * PAGE * n_seq_max, n_seq_max * (1 + N_SNAPSHOT * spec.is_recurrent)
    kv = sum(a.kv_width * n_rows for a in spec.attention if a) * (DTYPE_BYTES[type_k] + DTYPE_BYTES[type_v])
    state = sum((d.n_conv - 1) * d.conv_width + d.n_v_head * d.k_dim * d.v_dim for d in spec.delta_net if d)
    return kv + 4 * n_slot * state
