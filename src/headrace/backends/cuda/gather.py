"""Experts from host memory by the ids on the device, into their places in a slot: nothing is read back.

The kernel reads the host's memory in place, 50 GB/s of PCIe 5.0 x16's 55 on an H200. An expert that has a line in the
expert cache (see headrace.expertcache) comes from there once the line is filled, and fills it on its first way.
"""

import triton
import triton.language as tl

WORDS = 2048
"""8-byte words a program copies: 16 KiB."""
BLOCK = 64
"""Earlier entries that a program looks through at a time for its expert."""


@triton.jit(do_not_specialize=["n_entries"])
def gather_kernel(
    host, slot, cache, line, filled, ids, n_entries, expert_bytes,
    CACHED: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the experts of all entries from host memory to their places in the slot, each once. Grid: (pieces of an
    expert, entries); a piece is WORDS words, the last one of an expert reaches back to overlap."""
    entry = tl.program_id(1)
    e = tl.load(ids + entry)
    earlier = 0
    for start in range(0, entry, BLOCK):
        i = start + tl.arange(0, BLOCK)
        earlier += tl.sum((tl.load(ids + i, mask=i < entry, other=-1) == e).to(tl.int32), 0)
    if earlier > 0:
        return
    n_words = expert_bytes // 8
    word = tl.minimum(tl.program_id(0) * WORDS, n_words - WORDS) + tl.arange(0, WORDS)
    source = host.to(tl.pointer_type(tl.int64)) + e.to(tl.int64) * n_words
    if CACHED:
        where = tl.load(line + e)
        kept = cache.to(tl.pointer_type(tl.int64)) + where.to(tl.int64) * n_words
        full = (where >= 0) & (tl.load(filled + e) != 0)
        if full:
            source = kept
        words = tl.load(source + word)
        if (where >= 0) & (not full):
            tl.store(kept + word, words)
    else:
        words = tl.load(source + word)
    tl.store(slot.to(tl.pointer_type(tl.int64)) + e.to(tl.int64) * n_words + word, words)


@triton.jit(do_not_specialize=["n_entries"])
def mark_kernel(ids, line, filled, use, n_entries, BLOCK: tl.constexpr):
    """After all of a layer's tensors were gathered: their lines are full; counts the uses. One program."""
    for start in range(0, n_entries, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < n_entries
        e = tl.load(ids + i, mask=inside, other=0)
        tl.atomic_add(use + e, 1, mask=inside)
        tl.store(filled + e, 1, mask=inside & (tl.load(line + e, mask=inside, other=-1) >= 0))
