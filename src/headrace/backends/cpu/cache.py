"""Where the CPU backend's machine code is kept, and the key that decides whether it may be used again.

The key covers the source of every file that can take part in a kernel, the versions of numba and llvmlite, and the
Python version; the CPU and its features are added by who compiles for them. A cache that cannot be written is told
once: it costs the compile time at every start.
"""

import hashlib
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import llvmlite
import numba

from ... import env

log = logging.getLogger("headrace")
_listener: Callable[[str], None] = str  # ignores the name
_clock = {"depth": 0, "spent_s": 0.0}


def on_compile(listener: Callable[[str], None]) -> None:
    """Sets what is called with a kernel's name before it is compiled (never when it comes from the cache)."""
    global _listener
    _listener = listener


def compiling(name: str) -> None:
    _listener(name)


@contextmanager
def timed() -> Iterator[None]:
    """Around making or loading machine code; `spent_s` sums up the outermost of nested ones."""
    start_s = time.perf_counter()
    _clock["depth"] += 1
    try:
        yield
    finally:
        _clock["depth"] -= 1
        if not _clock["depth"]:
            _clock["spent_s"] += time.perf_counter() - start_s


def spent_s() -> float:
    """Seconds that this process has spent on machine code so far."""
    return _clock["spent_s"]


@cache
def source_key() -> str:
    h = hashlib.sha256()
    here = Path(__file__).parent
    for path in [*sorted(here.rglob("*.py")), *sorted((here.parents[1] / "quants").glob("*.py"))]:
        h.update(path.name.encode() + path.read_bytes())
    h.update(f"{numba.__version__} {llvmlite.__version__} {sys.version_info} {env.cpu_isa()}".encode())
    return h.hexdigest()[:24]


def folder() -> Path:
    return env.cache_dir() / "kernels" / source_key()


def read(path: Path) -> bytes | None:
    """The file's content if it was written whole by `write`, else None."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = data[32:]
    return body if hashlib.sha256(body).digest() == data[:32] else None


def write(path: Path, body: bytes) -> None:
    """Writes atomically, after its own checksum; where that fails it says so once."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(body).digest() + body)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        _not_kept(path.parent, error.strerror)


@cache
def _not_kept(folder: Path, reason: str) -> None:
    log.warning("cannot keep compiled kernels in %s (%s): every start compiles; set HEADRACE_CACHE_DIR", folder, reason)
