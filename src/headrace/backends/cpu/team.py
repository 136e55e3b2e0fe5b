"""A team of threads that runs programs of native ops, without the GIL and without a fork and join per op.

A program is a list of (op, arguments), run start to end on every thread with one entry from Python. How to write an
op is told in native.py; what it may rely on:

- It is called on every thread as op(tid, team, args) with tid 0..size(team) - 1, and splits the work by tid, or by
  `take(team, i, chunk)`: the next start of a chunk from work counter i. All COUNTERS are 0 when an op starts.
- `barrier(team)` inside an op separates its phases; every thread must pass the same ones. Between two ops there is a
  barrier already, so an op needs none at its end. A counter serves one phase: a second one takes another counter, or
  `set_counter` by one thread and a barrier.
- Arguments are read from memory at each run: `Program.args[i]` is the int64 array of step i, and may be changed
  between runs (a token count, say). What the addresses point to is read anew too, so a program is recorded once and
  replayed with other data in the same buffers.
- It must not raise; anything it divides by is not 0.

A barrier costs 0.05-0.2 us on two cores, a program 2 us while the team spins and 60-90 us when it slept. Idle threads
spin for about a millisecond (the next program usually follows soon), then sleep until they are called.
"""

import os
import queue
import threading
import weakref

import numpy as np

from .native import (
    atomic_add,
    call3,
    entry,
    exchange,
    i64,
    inner,
    load_sync,
    pause,
    put_i64,
    store_release,
    yield_core,
)  # fmt: skip

COUNTERS = 8
"""Work counters of a team."""

# The team's memory: byte offsets, a cache line each.
_SIZE, _ARRIVED, _ROUND, _SEQ, _PROGRAM, _LEFT, _LED, _COUNTERS, _ASLEEP = (64 * i for i in range(9))
_SPINS_BEFORE_YIELD = 1024
PATIENCE = 20_000
"""Turns of a wait before an idle thread sleeps: 0.3 to 1 ms, by how long a processor's pause takes."""


@inner
def size(team):
    """Threads in the team."""
    return i64(team + _SIZE, 0)


@inner
def patience(team):
    """Turns of a wait before an idle thread of the team sleeps."""
    return i64(team + _SIZE, 1)


@inner
def spin(spins):
    """One turn of a wait; gives the core away now and then, for a team mate may be queued behind this thread."""
    if spins % _SPINS_BEFORE_YIELD == _SPINS_BEFORE_YIELD - 1:
        yield_core()
    else:
        pause()
    return spins + 1


@inner
def _clear_counters(team):
    for i in range(COUNTERS):
        put_i64(team + _COUNTERS, i, 0)


@inner
def _meet(team, clear):
    """Waits for all; the last to come clears the counters if asked to."""
    n = size(team)
    if n == 1:
        if clear:
            _clear_counters(team)
        return
    turn = load_sync(team + _ROUND)
    if atomic_add(team + _ARRIVED, 1) == n - 1:
        if clear:
            _clear_counters(team)
        store_release(team + _ARRIVED, 0)
        store_release(team + _ROUND, turn + 1)
    else:
        spins = 0
        while load_sync(team + _ROUND) == turn:
            spins = spin(spins)


@inner
def barrier(team):
    """Waits until every thread is here; what they wrote before is seen after."""
    _meet(team, False)


@inner
def take(team, i, chunk):
    """Takes `chunk` units of work from counter i; returns the first one's number."""
    return atomic_add(team + _COUNTERS + 8 * i, chunk)


@inner
def counter(team, i):
    return load_sync(team + _COUNTERS + 8 * i)


@inner
def set_counter(team, i, v):
    store_release(team + _COUNTERS + 8 * i, v)


@inner
def share(tid, team, n):
    """This thread's part of n equal units, as (first, past the last)."""
    k = size(team)
    return tid * n // k, (tid + 1) * n // k


@inner
def _run(tid, team):
    calls, n = i64(team + _PROGRAM, 0), i64(team + _PROGRAM, 1)
    for i in range(n):
        if i:
            _meet(team, True)
        call3(i64(calls, 2 * i), tid, team, i64(calls, 2 * i + 1))


@entry
def _work(tid, team, seq):
    """Runs programs as they come; returns the number of the last one when it is time to sleep, -1 at the end."""
    idle = 0
    while True:
        if load_sync(team + _SEQ) != seq:
            seq += 1
            idle = 0
            if i64(team + _PROGRAM, 1) < 0:
                return -1
            _run(tid, team)
            atomic_add(team + _LEFT, -1)
        elif idle < patience(team):
            idle = spin(idle)
        else:
            exchange(team + _ASLEEP + 64 * tid, 1)
            if load_sync(team + _SEQ) == seq:
                return seq
            exchange(team + _ASLEEP + 64 * tid, 0)
            idle = 0


@entry
def _awake(tid, team):
    return exchange(team + _ASLEEP + 64 * tid, 0)


@inner
def post(team, calls, n):
    """Makes a program visible to the others."""
    _clear_counters(team)
    put_i64(team + _PROGRAM, 0, calls)
    put_i64(team + _PROGRAM, 1, n)
    store_release(team + _LEFT, size(team) - 1)
    atomic_add(team + _SEQ, 1)


@inner
def asleep(team):
    """Bit set of the threads that sleep."""
    mask = 0
    for tid in range(1, size(team)):
        mask |= load_sync(team + _ASLEEP + 64 * tid) << tid
    return mask


@inner
def sleepers(team):
    """Bit set of the threads that must be called; 0 once thread 0 has done its part."""
    return asleep(team) if load_sync(team + _LED) != load_sync(team + _SEQ) else 0


@inner
def lead(team):
    """Thread 0's part of the posted program, if not done yet, then waits for the others."""
    if load_sync(team + _LED) != load_sync(team + _SEQ):
        _run(0, team)
        spins = 0
        while load_sync(team + _LEFT) > 0:
            spins = spin(spins)
        store_release(team + _LED, load_sync(team + _SEQ))


@entry
def _post(team, calls, n):
    post(team, calls, n)
    return 0


@entry
def _asleep(team):
    return asleep(team)


@entry
def _sleepers(team):
    return sleepers(team)


@entry
def _lead(team):
    lead(team)
    return 0


class Program:
    """Ops with their arguments, ready to run: calls is [(op, (int, ...)), ...].

    `keep` holds whatever owns the memory that the arguments point to. `args[i]` is step i's int64 array.
    """

    def __init__(self, calls, keep=()):
        self.args = [np.array(args or (0,), np.int64) for _, args in calls]
        self.keep = tuple(keep)
        self.table = np.array([(op.address, a.ctypes.data) for (op, _), a in zip(calls, self.args)], np.int64)
        self.address, self.n_calls = self.table.ctypes.data, len(calls)


class Team:
    """n_threads threads, the caller being one of them; use from one thread at a time.

    `close` ends the threads; it happens by itself when the team is forgotten or the interpreter ends.
    """

    def __init__(self, n_threads, patience=PATIENCE):
        if not 1 <= n_threads <= 62:
            raise ValueError(f"a team has 1 to 62 threads, not {n_threads}")
        self.n_threads = n_threads
        memory = np.zeros((_ASLEEP + 64 * n_threads) // 8 + 8, np.int64)
        self._memory, self.address = memory, memory.ctypes.data + -memory.ctypes.data % 64
        first = (self.address - memory.ctypes.data) // 8
        memory[first : first + 2] = n_threads, patience
        self._bells = [queue.SimpleQueue() for _ in range(n_threads)]
        self._posted = None
        threads = [
            threading.Thread(target=_thread, args=(tid, self.address, memory, self._bells[tid]), daemon=True)
            for tid in range(1, n_threads)
        ]
        for fn in (_post, _asleep, _sleepers, _lead, *((_work, _awake) if threads else ())):
            fn.call  # noqa: B018  compiles here, so that no Python code runs inside a step
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _close, self.address, memory, self._bells, threads)

    def run(self, program):
        """Runs the program on every thread; returns when all are done.

        A KeyboardInterrupt comes before or after the native part; if it left the program half started, the next run
        (or close) finishes that one first.
        """
        assert self.close.alive, "the team is closed"
        _finish(self.address, self._bells)
        self._posted = program
        if program.n_calls:
            _post.call(self.address, program.address, program.n_calls)
            _finish(self.address, self._bells)

    def wake(self):
        """Calls the threads that sleep: a program is about to come."""
        _ring(_asleep.call(self.address), self._bells)

    def finish(self):
        """Does what an interrupt left undone; the threads touch nothing afterwards."""
        if self.close.alive:
            _finish(self.address, self._bells)


def _finish(team, bells):
    """Does what is left of the posted program: nothing, or all from the waking on."""
    _ring(_sleepers.call(team), bells)
    _lead.call(team)


def _ring(mask, bells):
    while mask:
        tid = mask.bit_length() - 1
        bells[tid].put(None)
        mask ^= 1 << tid


def _thread(tid, team, memory, bell):
    """The life of threads 1..n-1; holds `memory`, not the Team, so that a forgotten team can end."""
    seq = 0
    while (seq := _work.call(tid, team, seq)) >= 0:
        bell.get()
        _awake.call(tid, team)


def _close(team, memory, bells, threads):
    _finish(team, bells)
    if threads:
        _post.call(team, 0, -1)
        for bell in bells:
            bell.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


def available_cores():
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
