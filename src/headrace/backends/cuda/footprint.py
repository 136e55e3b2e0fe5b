"""Memory that the CUDA backend takes beside what a plan lays out. Without torch, so that any card can be planned."""

from typing import Any

from ...sampling import MOST_CANDIDATES
from ...spec import ModelSpec, MoeSpec
from .tiles import Tiles

CONTEXT_BYTES = 512 << 20
"""The driver's context with its kernels, before the first allocation (300 to 500 MiB by card and driver)."""
RESERVE_BYTES = 256 << 20
"""Left free: recorded graphs, Triton's modules, the allocator's rounding of what is small."""
GRANULE_BYTES = 2 << 20
"""PyTorch's allocator rounds up to it what is 10 MiB and larger."""
MEMORY: dict[str, Any] = {
    "context_bytes": CONTEXT_BYTES, "reserve_bytes": RESERVE_BYTES, "granule_bytes": GRANULE_BYTES
}  # fmt: skip
"""Fields of DeviceInfo."""
N_RINGS, CHUNK, ROUTER_TOKENS = 2, 64, 16
"""Buffers of decoded weights, tokens of a delta-net chunk and of a router program: as in ops.py and its kernels."""
VOCAB_BLOCK = 4096
"""Logits of which one program finds the greatest: as many as it leaves to the program that merges, of 262,144."""


def scratch_sizes(spec: ModelSpec, n_tokens: int, n_seq: int) -> dict[str, tuple[int, str]]:
    """Numbers and their type ("act": the activations') of the scratch that `CudaOps` keeps by name, at micro-batches of
    n_tokens of n_seq sequences."""
    sizes: dict[str, tuple[int, str]] = {}

    def at_least(name: str, n: int, dtype: str) -> None:
        sizes[name] = (max(sizes.get(name, (0, ""))[0], n), dtype)

    for moe in (f for f in spec.ffn if isinstance(f, MoeSpec)):
        n_experts = 1 << (moe.n_expert - 1).bit_length()
        at_least("counts", max(1, -(-n_tokens // ROUTER_TOKENS)) * n_experts, "i32")
        at_least("totals", n_experts, "i32")
        entries = n_tokens * moe.n_expert_used
        for height in (128, 64, 32, 16):
            n_tiles = -(-(-(-entries // height) + min(entries, moe.n_expert)) // 16) * 16
            at_least(f"tiles{height}", 2 * n_tiles, "i32")
    for net in {d for d in spec.delta_net if d}:
        n_rows = (-(-n_tokens // CHUNK) + n_seq - 1) * net.n_v_head * CHUNK
        at_least("decay", n_rows, "f32")
        at_least("delta_u", n_rows * net.v_dim, "act")
        at_least("delta_w", n_rows * net.k_dim, "act")
        at_least("delta_p", n_rows * CHUNK, "act")
    at_least("top_k", 2 * n_seq * -(-spec.n_vocab // VOCAB_BLOCK) * MOST_CANDIDATES, "i32")
    return sizes


def scratch_bytes(spec: ModelSpec, n_tokens: int, n_seq: int, tiles: Tiles) -> int:
    """All scratch, with the buffers of decoded weights."""
    sizes = scratch_sizes(spec, n_tokens, n_seq).values()
    return sum((2 if dtype == "act" else 4) * n for n, dtype in sizes) + N_RINGS * 2 * tiles.scratch_weights
