"""Quantised rows to 16-bit scratch: the first half of every product with many tokens.

A layer's 805 M Q4_K weights take about half a millisecond on an H200, a twentieth of their upload, and the product
that follows is a plain 16-bit one. Scratch is a bounded chunk, never a whole layer.
"""

import triton
import triton.language as tl


@triton.jit
def dequant_kernel(
    src, lut, dst, n_rows, n_blocks, row_bytes, starts, first_expert, expert_rows,
    DECODE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr, ROWS: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """dst [n_rows, n_blocks * BLOCK] = the decoded rows at src; one program decodes one block of ROWS rows.

    With SKIP the rows are those of experts from first_expert on; experts without entries (`starts`) are left out."""
    pid = tl.program_id(0)
    b = pid % n_blocks
    row0 = (pid // n_blocks) * ROWS
    if SKIP:
        last = tl.minimum(row0 + ROWS, n_rows) - 1
        e0, e1 = first_expert + row0 // expert_rows, first_expert + last // expert_rows
        if tl.load(starts + e0) == tl.load(starts + e1 + 1):
            return
    rows = row0 + tl.arange(0, ROWS)
    inside = rows < n_rows
    safe = tl.minimum(rows, n_rows - 1).to(tl.int64)
    w = DECODE(src + safe * row_bytes + b * BLOCK_BYTES, lut)
    k = tl.arange(0, BLOCK)[None, :]
    out = dst + safe[:, None] * (n_blocks * BLOCK) + b * BLOCK + k
    tl.store(out, w.to(dst.dtype.element_ty), mask=inside[:, None])
