"""The host memory ladder over a driver without CUDA: the same bytes on every rung, whatever is refused or fails."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import hostmem
from headrace.backends.cuda import readers
from headrace.backends.cuda.driver import DriverError
from headrace.backends.cuda.hostcopy import HostCopier, spans
from headrace.backends.cuda.readers import Readers, Ring, portions
from headrace.errors import UserError
from unit.fake_driver import FakeDriver
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


@pytest.mark.parametrize(
    ("rungs", "refuse", "options"),
    [
        ({"registered"}, lambda n: False, {}),
        ({"staged"}, lambda n: n >= 0, {}),
        ({"registered", "staged"}, lambda n: n == 2, {}),
        ({"registered", "staged"}, lambda n: n % 2 == 0, {}),
        ({"registered", "staged"}, lambda n: n in (0, 1), {}),
        ({"pageable"}, lambda n: True, {}),
        ({"registered", "pageable"}, lambda n: n in (-1, 3), {}),
        ({"staged"}, lambda n: False, {"register": False}),
        ({"staged"}, lambda n: False, {"register": False, "direct": True}),
        ({"registered", "staged"}, lambda n: n == 1, {"direct": True}),
        ({"pageable"}, lambda n: n == -1, {"register": False}),
    ],
)
def test_every_rung_gives_the_same_bytes(
    mapped: Mapped, rungs: set[str], refuse: Callable[[int], bool], options: dict[str, Any]
) -> None:
    with FakeDriver(refuse) as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, **SMALL, **options)
        assert set(copier.bytes_by_rung()) == rungs and copier.bytes_by_rung().total() == mapped.total
        check(copier, driver, mapped)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(refused=st.sets(st.integers(0, 8)), piece_bytes=st.integers(1, 300_000), direct=st.booleans(),
       ring=st.tuples(st.integers(1, 5), st.integers(1, 6), st.sampled_from([4096, 8192, 65536])))  # fmt: skip
def test_any_pieces_and_ring(
    mapped: Mapped, refused: set[int], piece_bytes: int, direct: bool, ring: tuple[int, int, int]
) -> None:
    mapped.pieces = mapped.host.ranges(mapped.infos, piece_bytes)
    with FakeDriver(lambda n: n in refused) as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, direct=direct, n_readers=ring[0], n_buffers=ring[1],
                            buffer_bytes=ring[2])  # fmt: skip
        for t, view in zip(mapped.infos, mapped.views):
            e = t.n_bytes // t.shape[0]
            for first in range(0, t.n_bytes, e):
                rungs = {copier.rung(s.piece) for s in spans(view.ctypes.data + first, e, copier.pieces) if s.piece}
                assert len(rungs) == 1, "an expert stands on one rung"
                assert copier.is_registered(view.ctypes.data + first, e) == (rungs == {"registered"})
        check(copier, driver, mapped)


def test_what_lies_in_no_piece_is_copied_too(mapped: Mapped) -> None:
    """The whole file, with the directory before the tensors, where a piece in the middle is left out."""
    with FakeDriver() as driver:
        copier = HostCopier(driver, [*mapped.pieces[:1], *mapped.pieces[2:]], PLENTY)
        out = np.zeros(len(mapped.content), np.uint8)
        copier.copy(out.ctypes.data, mapped.pieces[0].address - mapped.pieces[0].offset_bytes, len(out), 7)
        driver.stream(7).synchronize()
        assert out.tobytes() == mapped.content
        assert not copier.is_registered(mapped.pieces[1].address, 10)
        copier.close()


# budget, messages


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99, 1.0])
def test_the_budget_is_kept(mapped: Mapped, share: float, caplog: pytest.LogCaptureFixture) -> None:
    """Locked bytes and the ring stay within it, shared pages aside; what is beyond is read past the page cache."""
    budget = int(share * mapped.total)
    small = SMALL | {"n_buffers": 2, "buffer_bytes": 4096}
    with FakeDriver() as driver, caplog.at_level(logging.INFO, "headrace"):
        copier = HostCopier(driver, mapped.pieces, budget, **small)
        n_pages = 2 * 4096 * len(mapped.pieces)
        assert driver.peak_locked_bytes <= max(budget, 8192 + 4096) + n_pages
        warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
        if share == 1.0:
            assert copier.bytes_by_rung() == {"registered": mapped.total} and not warnings
        else:
            assert copier.bytes_by_rung()["staged"] >= mapped.total - budget
            direct = all(align > 1 for _, align in copier.sources.values())
            assert direct == ("cannot be read with O_DIRECT" not in caplog.text) == ("the disk's speed" in caplog.text)
            assert len(warnings) == 2 - direct and "--host-memory-limit" in caplog.text
        assert caplog.text.count("m.gguf:") == 1, "what is locked, once a shard"
        check(copier, driver, mapped)


@pytest.mark.parametrize(
    ("driver", "options", "said"),
    [
        (FakeDriver(read_only=False), {}, "cannot lock read-only mappings"),
        (FakeDriver(lambda n: n == 3), {}, "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        (FakeDriver(), {"register": False}, "--register-host off"),
        (FakeDriver(lambda n: True), {}, "raise the container's limit"),
        (FakeDriver(stream_numbers=False), {"register": False}, "cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED (801)"),
    ],
)
def test_one_warning_names_the_reason(
    mapped: Mapped, driver: FakeDriver, options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, **SMALL, **options)
        (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert said in record.getMessage() and "MiB" in record.getMessage()
        assert ("pageable" in said) or copier.bytes_by_rung()["registered"] < mapped.total
        check(copier, driver, mapped)


def test_a_file_system_without_o_direct(
    mapped: Mapped, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: object, flags: int, *rest: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)  # type: ignore[arg-type]

    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    with FakeDriver() as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, register=False, direct=True, **SMALL)
        assert "m.gguf cannot be read with O_DIRECT" in caplog.text
        check(copier, driver, mapped)


def test_another_file_of_the_same_name_is_not_read(mapped: Mapped) -> None:
    mapped.path.rename(mapped.path.with_name("old"))
    mapped.path.write_bytes(bytes(len(mapped.content)))
    with FakeDriver() as driver:
        check(HostCopier(driver, mapped.pieces, PLENTY, register=False, direct=True, **SMALL), driver, mapped)


@settings(max_examples=200, deadline=None)
@given(offset=st.integers(0, 100_000), n=st.integers(1, 100_000), pages=st.integers(1, 5), direct=st.booleans())
def test_portions_cover_a_read(offset: int, n: int, pages: int, direct: bool) -> None:
    align = 4096 if direct else 1
    at = offset
    for start, skip, n_wanted in portions(offset, n, pages * 4096, align):
        assert start % align == 0 and start + skip == at and 0 < skip + n_wanted <= pages * 4096 and skip < align
        at += n_wanted
    assert at == offset + n


# failures


def test_a_file_that_is_cut_is_an_error_and_no_hang(mapped: Mapped) -> None:
    """Staged: the pass runs out, the check names the file, and the copier stays refused."""
    for direct in (False, True):
        with FakeDriver() as driver:
            copier = HostCopier(driver, mapped.pieces, PLENTY, register=False, direct=direct, **SMALL)
            for slot, expected in zip(upload(copier, driver, mapped), mapped.bytes):
                assert (slot == expected).all()
            os.truncate(mapped.path, len(mapped.content) // 2)
            driver.memory += (slots := [np.zeros(t.n_bytes, np.uint8) for t in mapped.infos])
            with pytest.raises(UserError, match=r"m\.gguf: cannot read at byte \d+: the file ended"):
                for _ in range(3):
                    for slot, view in zip(slots, mapped.views):
                        copier.copy(slot.ctypes.data, view.ctypes.data, view.nbytes, 7)
                driver.stream(7).synchronize()
                copier.check()
            driver.stream(7).synchronize()
            with pytest.raises(UserError, match="open the model again"):
                copier.check()
            with pytest.raises(UserError, match="open the model again"):
                copier.copy(0, mapped.pieces[0].address, 1, 7)
            copier.close()
            assert not driver.locked
        mapped.path.write_bytes(mapped.content)


def test_a_file_that_cannot_be_read(mapped: Mapped) -> None:
    with FakeDriver() as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, register=False, **SMALL)
        fd = mapped.pieces[0].file.fileno()
        null = os.open(mapped.path.parent, os.O_RDONLY)  # a folder: EISDIR
        os.dup2(null, fd)
        os.close(null)
        with pytest.raises(UserError, match=r"m\.gguf: cannot read at byte \d+: Is a directory"):
            upload(copier, driver, mapped)
            copier.check()
        copier.close()


@pytest.mark.parametrize("register", [True, False])
def test_a_copy_that_fails_anywhere(mapped: Mapped, register: bool) -> None:
    """The error names the file; the next pass gives the right bytes, with no buffer lost and no reader waiting."""
    with FakeDriver() as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, register=register, **SMALL)
        upload(copier, driver, mapped)
        n_copies = driver.n_copies
        for at in range(n_copies):
            driver.n_copies, driver.fail_at = 0, at
            with pytest.raises(UserError, match=r"m\.gguf: a copy to the GPU failed: cuMemcpy.*719"):
                upload(copier, driver, mapped)
            driver.fail_at = -1
            driver.stream(7).synchronize()
            if at % 5 == 0:
                for slot, expected in zip(upload(copier, driver, mapped), mapped.bytes):
                    assert (slot == expected).all()
        check(copier, driver, mapped)


def test_a_driver_that_is_gone(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be taken back: the copier is closed to use, and still closes."""
    with FakeDriver() as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, register=False, **SMALL)
        upload(copier, driver, mapped)

        def gone(*args: object) -> None:
            raise DriverError("cuStreamWaitValue32: CUDA_ERROR_ILLEGAL_ADDRESS (700)")

        monkeypatch.setattr(driver, "wait_value", gone)
        with pytest.raises(UserError, match="ILLEGAL_ADDRESS"):
            upload(copier, driver, mapped)
        monkeypatch.undo()
        with pytest.raises(UserError, match="could not be taken back"):
            upload(copier, driver, mapped)
        copier.close()
        assert not driver.locked


def test_slow_copies_and_slow_readers(mapped: Mapped) -> None:
    """The readers wait for buffers, then the stream waits for readers."""
    with FakeDriver(before_copy=lambda: time.sleep(0.002)) as driver:
        copier = HostCopier(driver, mapped.pieces, PLENTY, register=False, **SMALL)
        check(copier, driver, mapped)


def test_more_jobs_than_the_queue_holds(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring of jobs goes round many times while the stream lags behind; the number of buffers does too."""
    with FakeDriver() as driver:
        gate = threading.Event()
        driver.before_copy = gate.wait  # type: ignore[assignment]
        copier = HostCopier(driver, mapped.pieces, PLENTY, register=False, n_readers=2, n_buffers=3, buffer_bytes=4096)
        slot, view = np.zeros(50 * 4096, np.uint8), mapped.views[0]
        threading.Timer(0.3, gate.set).start()
        for _ in range(readers.N_JOBS // 10):
            copier.copy(slot.ctypes.data, view.ctypes.data, 10 * 4096, 7)
        copier.copy(slot.ctypes.data, view.ctypes.data, 10 * 4096, 7)
        ring = copier.held.rings[0]
        assert ring.readers.n_posted > readers.N_JOBS and gate.is_set(), "it waited for the stream"
        driver.stream(7).synchronize()
        assert (slot[: 10 * 4096] == mapped.bytes[0][: 10 * 4096]).all()
        check(copier, driver, mapped)


def test_ring_and_readers_alone(mapped: Mapped) -> None:
    """Closing twice, closing while readers wait for a buffer that never gets free."""
    numbers = np.zeros(8, np.uint32)
    made = Readers(numbers[:2], numbers[2:4])
    made.start(3)
    block = np.zeros(8192, np.uint8)
    fd = mapped.pieces[0].file.fileno()
    for i in range(6):
        assert made.post(fd, 4096 * i, 4096, 4096, block.ctypes.data + 4096 * (i % 2)) == i + 1
    deadline = time.monotonic() + 20
    while numbers[1] < 2 or numbers[0] < 1:
        assert time.monotonic() < deadline
    assert block.tobytes() == mapped.content[:8192] and list(numbers[:2]) == [1, 2], "the third waits"
    made.close()
    made.close()
    assert list(numbers[:2]) == [6, 6], "whoever waits is let go"
    with FakeDriver(lambda n: True) as driver, pytest.raises(DriverError):
        Ring(driver, 2, 4096).open(1)
