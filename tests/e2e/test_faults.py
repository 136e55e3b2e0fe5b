"""Engines that meet faults: files that are cut, copies that fail in the middle, many engines, engines in a row.

`Ladder` is the reference device as a GPU that streams: its copies run on the host memory ladder over a driver without
CUDA, so whole engines go through registered, staged and pageable copies with numbers to compare.
"""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.backends.base import HostEvent
from headrace.backends.cuda.hostcopy import HostCopier
from headrace.backends.reference import ReferenceDevice, ReferenceQueue
from headrace.errors import UserError
from headrace.hostmem import MappedRange
from models.tiny import Tiny, write
from unit.fake_driver import FakeDriver, Interrupted

if not sys.platform.startswith("linux"):
    pytest.skip("page-locking mapped files is Linux's", allow_module_level=True)
TOKENS = [5, 9, 200, 31, 7, 64, 90, 12, 3, 44, 61, 18] * 6


class Marker(HostEvent):
    """How much of a stream's work came before."""

    stream: Any = None
    n: int = 0


class CopyQueue(ReferenceQueue):
    """The ladder's stream; compute, which runs at once, waits for it where an event says so."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.copier = driver, None

    def copy(self, dst: Any, src: Any) -> None:
        self.driver.memory.append(dst)
        self.copier.copy(dst.ctypes.data, src.ctypes.data, src.nbytes, 1)

    def record(self, event: Any) -> None:
        event.stream, event.n = self.driver.stream(1), self.driver.stream(1).n_given

    def synchronize(self) -> None:
        self.driver.stream(1).synchronize()


class ComputeQueue(ReferenceQueue):
    def wait(self, event: Any) -> None:
        if event.stream:
            event.stream.synchronize()


class Ladder(ReferenceDevice):
    def __init__(self, driver: FakeDriver, **options: Any) -> None:
        super().__init__()
        self.info = replace(self.info, kind="gpu", total_bytes=1 << 34, free_bytes=1 << 34, copies_async=True)
        self.driver, self.options = driver, options
        self.compute, self.copy = ComputeQueue(), CopyQueue(driver)

    def event(self) -> Marker:
        return Marker()

    def pin(self, ranges: list[MappedRange], budget_bytes: int, register: bool = True) -> None:
        small = {"n_readers": 2, "n_buffers": 3, "buffer_bytes": 65536}
        self.copy.copier = HostCopier(
            self.driver, ranges, budget_bytes, **(small | {"register": register} | self.options)
        )

    def check(self) -> None:
        self.copy.copier.check()

    def close(self) -> None:
        self.copy.synchronize()
        if self.copy.copier:
            self.copy.copier.close()
        self.driver.close()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("faults") / "m.gguf", Tiny("qwen3moe", "Q8_0", n_layer=3))


@pytest.fixture(scope="module")
def expected(shipped: Path) -> np.ndarray:
    with headrace.open(shipped, backend="reference", n_ctx=128) as engine:
        return engine.logits(TOKENS, [5, -1])


@pytest.fixture
def path(shipped: Path, tmp_path: Path) -> Path:
    """A copy that a test may harm."""
    (tmp_path / "m.gguf").write_bytes(shipped.read_bytes())
    return tmp_path / "m.gguf"


Opener = Callable[..., headrace.Engine]


@pytest.fixture
def ladder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens an engine on a Ladder: opened(driver, **options of the copier)."""
    engines = []

    def opened(driver: FakeDriver, **options: Any) -> headrace.Engine:
        monkeypatch.setattr("headrace.engine.open_device", lambda *_, **__: Ladder(driver, **options))
        engines.append(headrace.open(path, n_ctx=128, n_ubatch=32, n_cpu_moe=9, backend="null"))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()
        assert not engine.device.driver.locked


@pytest.mark.parametrize(
    ("driver", "options"),
    [
        (FakeDriver(), {}),
        (FakeDriver(), {"register": False}),
        (FakeDriver(), {"register": False, "direct": True}),
        (FakeDriver(lambda n: True), {}),
    ],
    ids=["registered", "staged", "direct", "pageable"],
)
def test_every_rung_gives_the_same_logits(
    ladder: Opener, driver: FakeDriver, options: dict[str, Any], expected: np.ndarray
) -> None:
    engine = ladder(driver, **options)
    for _ in range(2):
        np.testing.assert_allclose(engine.logits(TOKENS, [5, -1]), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("register", [True, False])
def test_a_copy_that_fails_in_a_prefill_leaves_the_engine_usable(
    ladder: Opener, register: bool, expected: np.ndarray
) -> None:
    engine = ladder(FakeDriver(), register=register)
    driver = engine.device.driver
    right = engine.logits(TOKENS, [5, -1])
    np.testing.assert_allclose(right, expected, rtol=2e-4, atol=2e-4)
    n_copies = driver.n_copies
    for at in range(0, n_copies, 1 + n_copies // 9):
        driver.n_copies, driver.fail_at = 0, at
        with pytest.raises(UserError, match=r"m\.gguf: a copy to the GPU failed: .*719"):
            engine.logits(TOKENS, [5, -1])
        assert engine.sequence.n_past == 0
        driver.fail_at = -1
        assert (engine.logits(TOKENS, [5, -1]) == right).all()


@pytest.mark.parametrize("register", [True, False])
def test_an_interrupt_anywhere(ladder: Opener, register: bool, expected: np.ndarray) -> None:
    """Ctrl-C in any call of the driver, while opening, computing or closing: nothing stays locked, and an engine that
    was open goes on."""
    at, where = 1, {"open": 0, "compute": 0, "close": 0}
    while True:
        driver, step = Interrupted(at, behind=at % 2 == 0), "open"
        try:
            engine = ladder(driver, register=register)
            step = "compute"
            engine.logits(TOKENS[:40])
            step = "close"
            engine.close()
        except KeyboardInterrupt:
            where[step] += 1
            if step == "compute":
                np.testing.assert_allclose(engine.logits(TOKENS, [5, -1]), expected, rtol=2e-4, atol=2e-4)
            if step != "open":
                engine.close()
            assert not driver.locked
        else:
            break
        at += 1 + at // 3
    assert where["open"] and where["compute"]


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_cut_in_a_pass_is_an_error_that_stays(ladder: Opener, path: Path, direct: bool) -> None:
    """Staged reads come short: no logits, no hang, one line; and so from then on."""
    driver = FakeDriver()
    engine = ladder(driver, register=False, direct=direct)
    right = engine.logits(TOKENS, [5, -1])
    left = [7]

    def cut() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.truncate(path, path.stat().st_size // 3)

    driver.before_copy = cut
    with pytest.raises(UserError, match=r"m\.gguf: cannot read at byte \d+: the file ended"):
        engine.logits(TOKENS, [5, -1])
    assert engine.sequence.n_past == 0
    with pytest.raises(UserError, match=r"m\.gguf has \d+ bytes, not \d+: it was cut or replaced while it was open"):
        engine.logits(TOKENS)
    engine.device.copy.copier.close()
    assert right.any()


CUT = """
import os, sys, headrace
path, backend = sys.argv[1:]
with headrace.open(path, backend=backend, n_ctx=128) as engine:
    tokens = engine.generate([1, 2, 3], 50)
    next(tokens)
    size = os.path.getsize(path)
    os.truncate(path, 4096)
    for attempt in (lambda: next(tokens), lambda: engine.logits([1, 2, 3]), lambda: list(engine.generate([4], 2))):
        try:
            attempt()
        except headrace.UserError as e:
            assert f"m.gguf has 4096 bytes, not {size}" in str(e), e
            print("refused")
print("closed")
"""


@pytest.mark.parametrize("backend", ["cpu", "null"])
def test_a_file_cut_under_an_open_engine(path: Path, backend: str) -> None:
    """Also between two tokens of one text. In a process of its own: what reads pages that are gone dies (SIGBUS)."""
    run = subprocess.run([sys.executable, "-c", CUT, str(path), backend], capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout.split()) == (0, ["refused"] * 3 + ["closed"]), run.stderr


@pytest.mark.parametrize("backend", ["cpu", "null"])
def test_two_engines_in_one_process(path: Path, backend: str) -> None:
    """Taking turns, and at the same time in two threads; closing one leaves the other whole."""
    with headrace.open(path, backend=backend, n_ctx=128) as first:
        alone = [first.logits(TOKENS[: 20 + i]) for i in range(4)]
        with headrace.open(path, backend=backend, n_ctx=256) as second:
            found: dict[int, np.ndarray] = {}
            threads = [
                threading.Thread(target=lambda i=i, e=e: found.update({i: e.logits(TOKENS[: 20 + i])}))
                for i, e in enumerate((first, second))
            ]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert all((found[i] == alone[i]).all() for i in range(2))
            assert (second.logits(TOKENS[:22]) == alone[2]).all()
        assert (first.logits(TOKENS[:23]) == alone[3]).all()


def test_two_engines_on_the_ladder(ladder: Opener) -> None:
    """Two drivers as of two GPUs; the queues and slots of one know nothing of the other's failure."""
    one, two = ladder(FakeDriver(), register=False), ladder(FakeDriver())
    right = two.logits(TOKENS)
    one.device.driver.fail_at = one.device.driver.n_copies + 3
    with pytest.raises(UserError):
        one.logits(TOKENS)
    assert (two.logits(TOKENS) == right).all()
    one.close()
    assert (two.logits(TOKENS) == right).all() and two.device.driver.locked


def usage() -> tuple[int, int, int]:
    """(open files, threads, resident bytes) of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident


@pytest.mark.parametrize("kind", ["cpu", "null", "registered", "staged"])
def test_fifty_engines_in_a_row_leave_nothing(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind in ("registered", "staged"):
        monkeypatch.setattr(
            "headrace.engine.open_device",
            lambda *_, **__: Ladder(FakeDriver(), register=kind == "registered", n_readers=2),
        )

    def one() -> None:
        backend = kind if kind in ("cpu", "null") else "null"
        with headrace.open(path, n_ctx=64, n_cpu_moe=9, backend=backend) as engine:
            engine.logits([1, 2, 3])

    for _ in range(5):
        one()
    before = usage()
    for _ in range(50):
        one()
    after = usage()
    assert after[:2] == before[:2] and after[2] - before[2] < 16 << 20
