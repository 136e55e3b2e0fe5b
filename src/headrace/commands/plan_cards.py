"""Cards and links that are not here, for `plan --card`: published figures and the share of them that is measured."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UserError
from ..rates import Rates

if TYPE_CHECKING:
    from ..backends.base import DeviceInfo

GIB = 2**30
DISPLAY_BYTES = 256 << 20
"""Taken by the driver and a desktop before anything runs."""
PRODUCT_SHARE, MEMORY_SHARE = 0.79, 0.86
"""Of the published figures, what `doctor` measures (H200: 783 of 989 TFLOP/s, 4152 of 4800 GB/s)."""
STAGED_SHARE, PAGEABLE_GBPS = 0.8, 6.5
"""Copies through pinned pieces against page-locked ones (H200: 44 of 55 GB/s), and copies of pageable memory."""


@dataclass(frozen=True)
class Card:
    """Memory, dense 16-bit products with float32 sums, memory bandwidth, compute capability (NVIDIA's data sheets)."""

    name: str
    gib: float
    tflops: float
    gbps: float
    capability: tuple[int, int]


CARDS = {
    c.name.lower(): c
    for c in (
        Card("RTX 3060", 12, 25.5, 360, (8, 6)), Card("RTX 3090", 24, 71.0, 936, (8, 6)),
        Card("RTX 4060", 8, 30.2, 272, (8, 9)), Card("RTX 4070", 12, 58.3, 504, (8, 9)),
        Card("RTX 4090", 24, 165.2, 1008, (8, 9)), Card("RTX 5070", 12, 61.7, 672, (12, 0)),
        Card("RTX 5090", 32, 209.5, 1792, (12, 0)), Card("H200", 139, 989.0, 4800, (9, 0)),
    )
}  # fmt: skip
ANY = "rtx 3060"
"""Computes for a card of which only the memory is given."""
LINKS = {
    (3, 8): 6.3, (3, 16): 12.5, (4, 4): 6.4, (4, 8): 13.0, (4, 16): 25.5, (5, 4): 13.0, (5, 8): 27.0, (5, 16): 55.0,
}  # fmt: skip
"""GB/s of page-locked copies by PCIe generation and width: 5.0 x16 is measured, others keep its share or less."""


def card(text: str) -> Card:
    """A card by name, or one with this much memory; UserError lists the names."""
    from ..config import size_bytes

    if text.lower() in CARDS:
        return CARDS[text.lower()]
    try:
        n_bytes = size_bytes(text)
    except ValueError:
        n_bytes = None
    if not n_bytes:
        raise UserError(
            f"--card {text}: give a size such as 12GiB, or one of {', '.join(c.name for c in CARDS.values())}"
        )
    like = CARDS[ANY]
    return Card(f"{text} card", n_bytes / GIB, like.tflops, like.gbps, like.capability)


def link_gbps(text: str) -> float:
    """GB/s of a link such as "PCIe 4.0 x16", "4x16" or "20GB/s"; UserError lists those that are known."""
    if match := re.fullmatch(r"([0-9.]+) *GB/s", text.strip(), re.IGNORECASE):
        return float(match[1])
    match = re.fullmatch(r"(?:PCIe *)?([3-5])(?:\.0)? *x *([0-9]+)", text.strip(), re.IGNORECASE)
    if match and (found := LINKS.get((int(match[1]), int(match[2])))):
        return found
    known = ", ".join(f"PCIe {gen}.0 x{width}" for gen, width in LINKS)
    raise UserError(f"--link {text}: give a speed such as 20GB/s, or one of {known}")


def rates(c: Card, gbps: float) -> Rates:
    return Rates(
        link_gbps=gbps, staged_gbps=STAGED_SHARE * gbps, pageable_gbps=min(PAGEABLE_GBPS, gbps),
        hbm_gbps=MEMORY_SHARE * c.gbps, matmul_tflops=PRODUCT_SHARE * c.tflops,
    )  # fmt: skip


def device_info(c: Card, gbps: float) -> "DeviceInfo":
    """The card as a device on which nothing runs yet."""
    from ..backends.base import DeviceInfo
    from ..backends.cuda.footprint import CONTEXT_BYTES, MEMORY

    total = int(c.gib * GIB)
    free = max(0, total - DISPLAY_BYTES - CONTEXT_BYTES)
    return DeviceInfo(c.name, "gpu", total, free, link_gbps=gbps, copies_async=True, **MEMORY)
