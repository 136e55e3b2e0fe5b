"""Kernel calls: run at once, or collected for a program; and what an op's arguments are made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .team import Program, Team
from .weights import CpuWeight

Tensor = NDArray[Any]


def at(x: Tensor | None) -> int:
    """Address of the first number; 0 for nothing."""
    return 0 if x is None else x.__array_interface__["data"][0]


def floats_at(w: CpuWeight | None) -> int:
    return 0 if w is None else at(w.floats)


def span(x: Tensor) -> tuple[int, int]:
    """The addresses from the first byte to past the last."""
    extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.strides)) + x.itemsize if x.size else 0
    return at(x), at(x) + extent


def rows(*tensors: Tensor) -> list[int]:
    """n0, n1, n of tensors [..., n] of one shape, then address and byte strides of each; (address, 0, 0) for a
    one-dimensional one, which is repeated. Axes that lie one behind the other in every tensor become one."""
    shape = tensors[0].shape
    views = [x if x.ndim > 1 else np.broadcast_to(x, shape) for x in tensors]
    views = [x[:, None] if x.ndim == 2 else x for x in views]
    n0, n1, n = views[0].shape
    for x in views:
        assert x.shape == (n0, n1, n) and x.dtype == np.float32, "rows do not match"
        assert x.strides[2] == 4 or n < 2 or not n0, "the last axis must be adjacent numbers"
    strides = [x.strides[:2] for x in views]
    if n0 == 1:
        n0, n1, strides = n1, 1, [(inner, 0) for _, inner in strides]
    elif n1 > 1 and all(outer == n1 * inner for outer, inner in strides):
        n0, n1, strides = n0 * n1, 1, [(inner, 0) for _, inner in strides]
    return [n0, n1, n, *(v for x, s in zip(views, strides) for v in (at(x), *s))]


class Calls:
    """Calls in order, and the owners of the memory they point to.

    `tables` and `packed` hold what earlier calls of the same list have computed and later ones may use again.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[int, ...]]] = []
        self.keep: list[Any] = []
        self.tables: dict[Any, Tensor] = {}
        self.packed: dict[Any, tuple[tuple[int, int], Any, Tensor]] = {}
        """Kind of packing -> (bytes it was made from, their address, shape and strides, the result)."""

    def add(self, op: Any, args: tuple[int, ...], out: tuple[Tensor, ...], keep: tuple[Any, ...]) -> None:
        self.calls.append((op, args))
        self.keep += out + keep
        for x in out:
            self._forget(*span(x))

    def _forget(self, first: int, past: int) -> None:
        """What was packed from memory that is written now is no longer true."""
        for kind, ((begin, end), _, _) in list(self.packed.items()):
            if first < end and begin < past:
                del self.packed[kind]


class Caller:
    """Runs calls on a team, or lists them inside `collect`."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.collected: Calls | None = None
        self._blocks: dict[str, Tensor] = {}

    @contextmanager
    def collect(self) -> Iterator[Calls]:
        """Calls made inside are listed instead of run."""
        assert self.collected is None, "a recording inside a recording"
        self.collected = Calls()
        try:
            yield self.collected
        finally:
            self.collected = None

    def call(self, op: Any, *args: int, out: tuple[Tensor, ...], keep: tuple[Any, ...]) -> None:
        """op(args), which writes `out` and nothing else but scratch."""
        if self.collected is None:
            self.team.run(Program([(op, args)], out + keep))
        else:
            self.collected.add(op, args, out, keep)

    def scratch(self, n_bytes: int, name: str = "op") -> Tensor:
        """At least n_bytes at a 64-byte border, under a name. A name's users run one after the other; what they leave
        there may be overwritten by the next."""
        if name not in self._blocks or len(self._blocks[name]) < n_bytes:
            block = np.zeros(n_bytes + 64, np.uint8)
            start = -at(block) % 64
            self._blocks[name] = block[start : start + n_bytes]
        return self._blocks[name]
