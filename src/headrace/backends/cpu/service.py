"""Experts computed for another device: a team runs programs on request, through words in shared memory.

The device writes a layer's activations, expert ids and weights to host memory, then a request: which program, and last
a serial number. A thread of ours runs the program on the team and writes the serial number back, which the device
waits for. Neither side calls the other and no Python runs between them: a request costs the time that both need to see
each other's word.

Whoever starts work on the device says how many requests will come of it (`expect`). Until they are served the thread
spins, as long after as a team does; then it sleeps.
"""

import queue
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from ..base import Routing
from .calls import Tensor, at
from .native import atomic_add, entry, exchange, i64, load_sync, op, put_f32, put_i64, store_release
from .ops import CpuOps
from .router import sort_entries
from .team import Program, Team, lead, patience, post, share, sleepers, spin
from .weights import CpuWeight

WORDS = 16
"""int64 words that the two sides share, at a border of 64 bytes."""
SERIAL, CALLS, N_CALLS, DONE, GIVEN_UP = 0, 1, 2, 8, 9
"""The device writes the serial number of a request (1, 2, ...) behind the program's address and number of calls, in a
cache line; we write the serial number of the last request that is done to another, where the device leaves a 1 if it
waits no longer."""

# Words of the thread and of `expect`.
_SERVED, _POSTED, _EXPECTED, _STOP, _ASLEEP = (64 * i for i in range(5))
_END, _SLEEP, _RING = -1, 0, 1


@entry
def _serve(team, box, control):
    """Serves until there is something that takes Python: an end, a sleep, or a team that must be woken."""
    idle = 0
    exchange(control + _ASLEEP, 0)
    while True:
        served = i64(control + _SERVED, 0)
        if i64(control + _POSTED, 0) == 0 and load_sync(box + 8 * SERIAL) != served:
            put_i64(control + _POSTED, 0, 1)
            post(team, i64(box, CALLS), i64(box, N_CALLS))
        if i64(control + _POSTED, 0):
            if sleepers(team):
                return _RING
            lead(team)
            put_i64(control + _POSTED, 0, 0)
            store_release(control + _SERVED, served + 1)
            store_release(box + 8 * DONE, served + 1)
            idle = 0
        elif load_sync(control + _STOP):
            return _END
        elif idle < patience(team) or load_sync(control + _EXPECTED) > served:
            idle = spin(idle)
        else:
            exchange(control + _ASLEEP, 1)
            if load_sync(control + _EXPECTED) <= served and not load_sync(control + _STOP):
                return _SLEEP
            exchange(control + _ASLEEP, 0)
            idle = 0


@entry
def _expect(control, n, stop):
    """Announces requests, or the end; returns whether the thread must be called."""
    atomic_add(control + _EXPECTED, n)
    if stop:
        exchange(control + _STOP, 1)
    return load_sync(control + _ASLEEP)


@entry
def _settle(control):
    exchange(control + _EXPECTED, load_sync(control + _SERVED))
    return 0


@entry
def _is_asleep(control):
    return load_sync(control + _ASLEEP)


class Service:
    """Serves the requests that appear in `box`, int64 [WORDS], zeroed; the team is its own from now on."""

    def __init__(self, team: Team, box: NDArray[np.int64]) -> None:
        assert at(box) % 64 == 0 and len(box) == WORDS
        memory = np.zeros(6 * 8 + 8, np.int64)
        self._control, bell = at(memory) + -at(memory) % 64, queue.SimpleQueue()
        self._bell = bell
        for fn in (_serve, _expect, _settle):
            fn.call  # noqa: B018  compiles here
        thread = threading.Thread(target=_thread, args=(team, box, memory, self._control, bell), daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, self._control, memory, bell, thread)

    def expect(self, n: int) -> None:
        """n more requests will come. To be said before they are queued: an interrupt between the two then leaves a
        thread that spins, not a device that waits; see `settle`."""
        if n and _expect.call(self._control, n, 0):
            self._bell.put(None)

    def settle(self) -> None:
        """The device is idle: what was expected and has not come will not come."""
        _settle.call(self._control)

    @property
    def asleep(self) -> bool:
        return bool(_is_asleep.call(self._control))


def _thread(
    team: Team, box: NDArray[np.int64], memory: NDArray[np.int64], control: int, bell: queue.SimpleQueue
) -> None:
    """Holds what the native loop points to, not the Service, so that a forgotten one can end."""
    while (why := _serve.call(team.address, at(box), control)) != _END:
        if why == _RING:
            team.finish()
        else:
            bell.get()
            team.wake()  # while the device comes to its first request


def _close(control: int, memory: NDArray[np.int64], bell: queue.SimpleQueue, thread: threading.Thread) -> None:
    _expect.call(control, 0, 1)
    bell.put(None)
    if thread is not threading.current_thread():
        thread.join()


# programs -------------------------------------------------------------------------------------------------------------


@op
def begin(tid, team, a):
    """entries, E | ids, order, starts | y, floats of y: sorts the entries by expert, sets y to 0"""
    n, n_expert, ids, order, starts, y = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3), i64(a, 4), i64(a, 5)
    first, last = share(tid, team, i64(a, 6))
    for i in range(first, last):
        put_f32(y, i, 0.0)
    if tid == 0:
        sort_entries(ids, n, n_expert, order, starts)


def expert_program(
    ops: CpuOps, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor, gate: CpuWeight, up: CpuWeight | None,
    down: CpuWeight, activation: str,
) -> Program:  # fmt: skip
    """y[t] = sum over k, in order, of weights[t, k] * expert ids[t, k] of x[t].

    x, y float32 [T, D], ids int32 and weights float32 [T, K], all contiguous; read and written anew at each run.
    """
    (n_expert, n_embd, n_ff), (n, k) = down.info.shape, ids.shape
    assert all(v.flags.c_contiguous for v in (x, ids, weights, y))
    order, starts = np.zeros(n * k, np.int32), np.zeros(n_expert + 1, np.int32)
    routing = Routing(ids, weights, order, starts)
    act, out = (
        ops.scratch(4 * n * k * width, name).view(np.float32)[: n * k * width].reshape(n * k, width)
        for name, width in (("served act", n_ff), ("served out", n_embd))
    )
    with ops.collect() as calls:
        ops.call(
            begin, n * k, n_expert, at(ids), at(order), at(starts), at(y), y.size,
            out=(order, starts, y), keep=(ids,),
        )  # fmt: skip
        ops.expert_glu(act, x, routing, gate, up, activation)
        ops.expert_down(out, act, routing, down)
        ops.combine(y, out, routing)
    return Program(calls.calls, calls.keep)
