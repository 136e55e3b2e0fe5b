"""The thread team: programs, barriers, counters, sleep, interrupts, shutdown."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from headrace.backends.cpu import team as team_module
from headrace.backends.cpu.device import CpuDevice
from headrace.backends.cpu.native import f64, float_bits, i64, op, put_f32, put_i64
from headrace.backends.cpu.team import COUNTERS, Program, Team, barrier, counter, share, size, take


@op
def add_one(tid, team, a):
    x, n = i64(a, 0), i64(a, 1)
    first, last = share(tid, team, n)
    for i in range(first, last):
        put_i64(x, i, i64(x, i) + 1)


@op
def rotate(tid, team, a):
    """x[i] = old x[i + 1] in rounds: wrong without barriers."""
    x, y, n, rounds = i64(a, 0), i64(a, 1), i64(a, 2), i64(a, 3)
    first, last = share(tid, team, n)
    for _ in range(rounds):
        for i in range(first, last):
            put_i64(y, i, i64(x, (i + 1) % n))
        barrier(team)
        for i in range(first, last):
            put_i64(x, i, i64(y, i))
        barrier(team)


@op
def count(tid, team, a):
    """Takes 1000 units from each counter, marking each unit."""
    for c in range(COUNTERS):
        while True:
            first = take(team, c, 3)
            if first >= 1000:
                break
            for i in range(first, min(1000, first + 3)):
                put_i64(i64(a, 0), c * 1000 + i, i64(i64(a, 0), c * 1000 + i) + 1)


@op
def dirty(tid, team, a):
    put_i64(i64(a, 0), tid, counter(team, tid))
    barrier(team)
    take(team, tid, 7)


@op
def who(tid, team, a):
    put_i64(i64(a, 0), tid, size(team))
    if tid == 0:
        put_f32(i64(a, 1), 0, f64(a, 2))


@pytest.fixture(params=[1, 2, 3])
def team(request):
    team = Team(request.param)
    yield team
    team.close()


def test_every_thread_runs_and_reads_its_arguments(team):
    seen, real = np.zeros(8, np.int64), np.zeros(1, np.float32)
    team.run(Program([(who, (seen.ctypes.data, real.ctypes.data, float_bits(-1.5)))]))
    assert seen.tolist() == [team.n_threads] * team.n_threads + [0] * (8 - team.n_threads)
    assert real[0] == -1.5


def test_ops_run_in_order_and_programs_are_replayed(team):
    x, y = np.arange(101), np.zeros(101, np.int64)
    start = x.copy()
    program = Program(
        [(rotate, (x.ctypes.data, y.ctypes.data, 101, 50)), (add_one, (x.ctypes.data, 101))] * 3, keep=(x, y)
    )
    team.run(program)
    team.run(program)
    assert x.tolist() == (np.roll(start, -300) + 6).tolist()
    program.args[1][1] = 0
    team.run(program)
    assert x.tolist() == (np.roll(start, -450) + 8).tolist()


def test_counters_start_at_zero_and_hand_out_each_unit_once(team):
    marks = np.zeros(COUNTERS * 1000, np.int64)
    program = Program([(count, (marks.ctypes.data,))] * 4)
    team.run(program)
    team.run(program)
    assert (marks == 8).all()
    found = np.ones(8, np.int64)
    program = Program([(dirty, (found.ctypes.data,))] * 2)
    team.run(program)
    assert not found[: team.n_threads].any()


def test_empty_program(team):
    team.run(Program([]))


def test_an_idle_team_sleeps_and_wakes():
    team = Team(2)
    x = np.zeros(10, np.int64)
    program = Program([(add_one, (x.ctypes.data, 10))])
    for _ in range(3):
        team.run(program)
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.05
    assert (x == 3).all()
    team.close()


def test_close_twice_and_forgetting_end_the_threads():
    before = threading.active_count()
    team = Team(3)
    team.run(Program([]))
    team.close()
    team.close()
    forgotten = Team(3)
    assert threading.active_count() == before + 2
    del forgotten
    assert threading.active_count() == before
    with pytest.raises(AssertionError):
        team.run(Program([]))


def test_one_thread_starts_none():
    before = threading.active_count()
    team = Team(1)
    assert threading.active_count() == before
    team.close()


@pytest.mark.skipif(os.name != "posix", reason="needs setitimer")
def test_interrupts_anywhere_leave_the_team_whole():
    """A timer raises at random moments of 'run'; every program that was posted is done exactly once, in full."""
    team = Team(2)
    x = np.zeros(64, np.int64)
    y = np.zeros(64, np.int64)
    program = Program([(add_one, (x.ctypes.data, 64)), (rotate, (x.ctypes.data, y.ctypes.data, 64, 2))] * 5)

    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    caught = 0
    try:
        for i in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + (i % 100) * 2e-6)
                for _ in range(20):
                    team.run(program)
                time.sleep(0.01)
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    team.run(program)
    assert caught > 100
    assert x.min() == x.max() > 0
    team.close()


def test_synchronize_ends_what_an_interrupt_left_half_started(monkeypatch):
    """Between posting and leading; a runner puts states back afterwards, and nobody may write to them then."""
    device, finish, n_calls = CpuDevice(2), team_module._finish, 0
    x = np.zeros(64, np.int64)

    def interrupted(*args):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:  # the first is in front of posting
            raise KeyboardInterrupt
        finish(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(team_module, "_finish", interrupted)
        device.team.run(Program([(add_one, (x.ctypes.data, 64))]))
    device.compute.synchronize()
    assert (x == 1).all()
    device.compute.synchronize()
    assert (x == 1).all()
    device.close()
    device.compute.synchronize()


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit(3)", "1 / 0", "team.close()", "threading.Thread(target=f).start()"]
)
def test_the_interpreter_ends_without_hanging(ending):
    code = f"""
import threading, time
from headrace.backends.cpu.team import Team, Program
team = Team(3)
def f(): time.sleep(0.05)
team.run(Program([]))
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    expected = 3 if "Exit" in ending else 1 if "1 / 0" in ending else 0
    assert done.returncode == expected, done.stderr
