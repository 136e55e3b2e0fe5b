"""Machine code kept between starts: used again while it is whole, made again when it is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
from numba import types

from headrace.backends.cpu import cache
from headrace.backends.cpu.native import Native


def add(x, y):
    return x + y


def truncated(body: bytes) -> bytes:
    return body[: len(body) // 2]


def one_bit_off(body: bytes) -> bytes:
    i = body.index(b"\x7fELF") + 200
    return body[:i] + bytes([body[i] ^ 8]) + body[i + 1 :]


@pytest.mark.parametrize("damage", [truncated, one_bit_off, lambda body: b""])
def test_damaged_code_is_made_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    compiled: list[str] = []
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_listener", compiled.append)
    for expected in (1, 1):
        assert Native(add, types.int64).call(2, 3) == 5 and len(compiled) == expected
    (file,) = (p for p in tmp_path.rglob("*") if p.is_file())
    file.write_bytes(damage(file.read_bytes()))
    for expected in (2, 2):
        assert Native(add, types.int64).call(2, 3) == 5 and len(compiled) == expected


def test_a_folder_that_cannot_be_written_costs_time_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))
    before_s = cache.spent_s()
    assert Native(add, types.int64).call(2, 3) == 5
    assert cache.spent_s() > before_s
    cache.write(tmp_path / "file" / "x", b"")
    assert "every start compiles" in caplog.text
