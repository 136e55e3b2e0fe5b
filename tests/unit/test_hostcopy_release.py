"""What the host memory ladder holds is given back in every exit path."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import hostmem
from headrace.backends.cuda.hostcopy import HostCopier
from headrace.hostmem import HostMemory
from unit.fake_driver import FakeDriver, Interrupted
from unit.mapped import PLENTY, SMALL, Mapped, check, upload

pytest.importorskip("numba")
if not sys.platform.startswith("linux"):
    pytest.skip("page-locking mapped files is Linux's", allow_module_level=True)


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Mapped]:
    found = Mapped(tmp_path)
    assert len(found.pieces) > 4 and any(p.address % 4096 for p in found.pieces)
    yield found
    assert not hostmem.locked
    found.host.close()


@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_at_any_driver_call_gives_everything_back(mapped: Mapped, behind: bool) -> None:
    """While locking, copying and closing: closing again is enough; copies made after an interrupt are right."""
    mapped.pieces = mapped.pieces[:3]
    mapped.infos, mapped.views, mapped.bytes = (x[:1] for x in (mapped.infos, mapped.views, mapped.bytes))
    where = {"open": 0, "copy": 0, "close": 0}
    for at in range(1, 1000):
        with Interrupted(at, behind) as driver:
            copier, step = None, "open"
            driver.refuse = lambda n: n == 1
            try:
                copier = HostCopier(driver, mapped.pieces, PLENTY, **SMALL)
                step = "copy"
                upload(copier, driver, mapped)
                step = "close"
                copier.close()
            except KeyboardInterrupt:
                where[step] += 1
                if step == "copy":
                    assert copier
                    slots = upload(copier, driver, mapped)
                    assert (slots[0] == mapped.bytes[0]).all()
                if copier:
                    copier.close()
            else:
                if driver.calls < at:
                    break
            assert driver.locked == {} and not hostmem.locked, f"call {at}, {step}"
            if copier is None:
                gc.collect()
    assert all(where.values())


class AtOpcode:
    """Ctrl-C at the n-th bytecode of the ladder's own files, in this thread."""

    def __init__(self, at: int) -> None:
        self.at, self.n = at, 0

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("cuda/hostcopy.py", "cuda/readers.py")):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.n += 1
            if self.n == self.at:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)


def test_an_interrupt_at_any_bytecode_gives_everything_back(mapped: Mapped) -> None:
    """Between two calls, too: what is made is held before it owns anything. Every 97th place of one tensor's life."""
    mapped.pieces = mapped.pieces[:2]
    mapped.infos, mapped.views, mapped.bytes = (x[:1] for x in (mapped.infos, mapped.views, mapped.bytes))
    where = {"open": 0, "copy": 0, "close": 0}
    for at in range(1, 10**6, 97):
        with FakeDriver(lambda n: n == 1) as driver:
            copier, step = None, "open"
            driver.stream(7)
            try:
                with AtOpcode(at):
                    copier = HostCopier(driver, mapped.pieces, PLENTY, direct=at % 2 == 0, **SMALL)
                    step = "copy"
                    upload(copier, driver, mapped)
                    step = "close"
                    copier.close()
            except KeyboardInterrupt:
                where[step] += 1
                if step == "copy":
                    assert copier
                    (slot,) = upload(copier, driver, mapped)
                    copier.check()
                    assert (slot == mapped.bytes[0]).all()
                if copier:
                    copier.close()
                gc.collect()
            else:
                break
            assert driver.locked == {} and not hostmem.locked, f"bytecode {at}, {step}"
    assert all(where.values()), where
    deadline = time.monotonic() + 20
    while any(t.name == "headrace-reader" for t in threading.enumerate()):
        assert time.monotonic() < deadline


def test_a_copier_that_is_forgotten_gives_everything_back(mapped: Mapped) -> None:
    with FakeDriver() as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, **SMALL)
        staged = HostCopier(driver, mapped.pieces, PLENTY, register=False, **SMALL)
        upload(staged, driver, mapped)
        assert hostmem.locked.total() > mapped.total * 0.9
        del copier, staged
        gc.collect()
        assert driver.locked == {} and not hostmem.locked
        assert not [t for t in threading.enumerate() if t.name == "headrace-reader"]


def test_readers_that_cannot_start(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without room for more threads: pageable, with the reason; those that did start are gone."""
    start, n = threading.Thread.start, 0

    def failing(self: threading.Thread) -> None:
        nonlocal n
        if self.name == "headrace-reader":
            n += 1
            if n == 3:
                raise RuntimeError("can't start new thread")
        start(self)

    with FakeDriver() as driver:
        driver.stream(7)
        monkeypatch.setattr(threading.Thread, "start", failing)
        copier = HostCopier(driver, mapped.pieces, PLENTY, register=False, **SMALL)
        assert set(copier.bytes_by_rung()) == {"pageable"} and not driver.locked
        assert not [t for t in threading.enumerate() if t.name == "headrace-reader"]
        check(copier, driver, mapped)


EXITS = """
import sys, os, signal
from pathlib import Path
from unit.test_hostcopy_release import *
mapped = Mapped(Path(sys.argv[1]))
driver = FakeDriver(lambda n: n == 1)
real = driver.unregister
def unregister(address):
    real(address)
    print("unlocked", len(driver.locked), flush=True)
driver.unregister = unregister
copier = HostCopier(driver, mapped.pieces, PLENTY, **SMALL)
upload(copier, driver, mapped)
print("locked", len(driver.locked), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -signal.SIGINT)],
    ids=["end", "exit", "exception", "Ctrl-C"],
)
def test_the_end_of_the_interpreter_unlocks(tmp_path: Path, end: str, code: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", EXITS + end, str(tmp_path)], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    lines = run.stdout.split("\n")
    assert run.returncode == code and "locked 8" in lines and "unlocked 0" in lines, run.stderr


def test_two_at_once_and_fifty_in_a_row(mapped: Mapped) -> None:
    """Two copiers over two maps of one file; fifty opened and closed leave no file, thread or lock behind."""
    other = HostMemory(mapped.file)
    with FakeDriver() as driver:
        first = HostCopier(driver, mapped.pieces, PLENTY, **SMALL)
        second = HostCopier(driver, other.ranges(mapped.infos, 100_000), PLENTY, **SMALL)
        assert hostmem.locked.total() >= 2 * mapped.total
        second.close()
        assert hostmem.locked.total() >= mapped.total and driver.locked
        check(first, driver, mapped)

        def one() -> None:
            driver.n_registered = 0
            check(HostCopier(driver, mapped.pieces, PLENTY, direct=True, **SMALL), driver, mapped)

        driver.refuse = lambda n: n % 2 == 0
        one()
        before = len(os.listdir("/proc/self/fd")), threading.active_count(), rss_bytes()
        for _ in range(50):
            one()
        gc.collect()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before[:2]
        assert rss_bytes() - before[2] < 8 << 20
    other.close()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
