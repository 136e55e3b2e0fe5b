"""Program + Plan + batch -> the ordered list of copies and computations. Pure, printable, compared in tests.

Two orders of the same work: ubatch-major runs every step for one micro-batch before the next; layer-major takes a
window of micro-batches through each streamed step while its experts are there, so they cross the link once per window.

An upload is issued as early as its slot allows: slots are a ring, tensor i of a pass goes to slot i % n_slots, and
its upload follows the release of tensor i - n_slots. More slots therefore mean more lookahead and nothing else changes.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .program import Program
from .spec import MoeSpec


@dataclass(frozen=True)
class Upload:
    """Starts copying a tensor into its slot, when the slot is free."""

    tensor: str


@dataclass(frozen=True)
class Acquire:
    """Compute waits until the step's experts are in their slots."""

    step: int


@dataclass(frozen=True)
class Compute:
    """Runs steps first..stop for one micro-batch of the window."""

    first: int
    stop: int
    ubatch: int


@dataclass(frozen=True)
class Release:
    """The slots of the step's experts are free once the compute queue has come so far."""

    step: int


Order = Upload | Acquire | Compute | Release


def schedule(program: Program, streamed: Collection[str], n_slots: int, n_ubatch: int) -> list[Order]:
    """Orders of one window of n_ubatch micro-batches; `streamed` names the tensors that come through slots."""
    groups = {i: _streamed(program, i, streamed) for i in range(len(program.steps))}
    queue = [name for names in groups.values() for name in names]
    assert not queue or n_slots >= max(map(len, groups.values())), "fewer slots than one step needs"
    orders: list[Order] = [Upload(name) for name in queue[:n_slots]]
    n_issued, n_released = len(orders), 0
    for first, stop in segments(len(program.steps), [i for i, names in groups.items() if names]):
        names = groups[first] if stop == first + 1 else []
        if names:
            orders.append(Acquire(first))
        orders += [Compute(first, stop, u) for u in range(n_ubatch)]
        if names:
            orders.append(Release(first))
            n_released += len(names)
            ahead = queue[n_issued : n_released + n_slots]
            orders += [Upload(name) for name in ahead]
            n_issued += len(ahead)
    return orders


def segments(n_steps: int, alone: list[int]) -> Iterator[tuple[int, int]]:
    """Cuts 0..n_steps so that each step of `alone` stands by itself; what lies between stays together."""
    start = 0
    for i in alone:
        if start < i:
            yield start, i
        yield i, i + 1
        start = i + 1
    if start < n_steps:
        yield start, n_steps


def _streamed(program: Program, i: int, streamed: Collection[str]) -> list[str]:
    experts = program.steps[i].experts
    return [name for name in experts.tensors if name in streamed] if experts else []


def gather_below(program: Program) -> int:
    """Below this many tokens in a pass the routed experts alone are fetched, where the device can; else whole tensors.

    The limit of two assignments an expert is llama.cpp's for uploads: there nine tenths of the experts are touched.
    """
    moe = (f for f in program.spec.ffn if isinstance(f, MoeSpec))
    return min((-(-2 * f.n_expert // f.n_expert_used) for f in moe), default=0)


def split(n_tokens: int, n_window: int, n_ubatch: int) -> list[list[tuple[int, int]]]:
    """Token ranges of a prompt: windows of at most n_window, each a list of micro-batches of at most n_ubatch."""
    return [
        [(a, min(a + n_ubatch, stop)) for a in range(start, stop, n_ubatch)]
        for start in range(0, n_tokens, n_window)
        for stop in [min(start + n_window, n_tokens)]
    ]
