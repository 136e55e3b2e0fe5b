"""Damages GGUF files in thousands of ways and opens them: each must open or fail with one line, fast and small.

    python bench/fuzz_gguf.py [n_files] [seed]

The process runs under a limit of address space and every opening under an alarm, so a huge allocation or a hang is a
failure too. Prints the outcomes and the slowest opening; exits with 1 if anything but a UserError came out.
"""

import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gguf_files import write_gguf
from headrace.errors import UserError
from headrace.gguf import File, open_gguf

SPACE_BYTES = 64 << 20
"""Address space beyond what the process has at the start."""
OPEN_LIMIT_S = 2
EDGES = (0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62)
EDGES += ((1 << 63) - 1, 1 << 63, (1 << 64) - 33, (1 << 64) - 8, (1 << 64) - 1)
"""Numbers at which lengths, counts, offsets and types are likely to be misread."""
NAME = re.compile(rb"\.weight|n\.[a-z]+[0-9]*|yes|text|tokens|scores|flags|general\.[a-z]+|split\.count")


def seeds(folder: Path) -> list[bytes]:
    """Good files: every kind of metadata and several tensor types; the same in version 2; nearly empty."""
    numbers = [np.uint8(1), np.int8(-1), np.uint16(2), np.int16(-2), np.int32(-3), np.uint64(4), np.int64(-4)]
    metadata = {f"n.{x.dtype.name}": x for x in [*numbers, np.float32(0.5), np.float64(0.25)]}
    metadata |= {"yes": True, "text": "naïve", "general.alignment": 32, "tokens": [f"t{i}" for i in range(20)]}
    metadata |= {
        "scores": np.arange(20, dtype=np.float32),
        "flags": np.array([True, False]),
        "split.count": np.uint16(1),
    }
    tensors = {"a.weight": ("F32", (3, 5)), "b.weight": ("Q4_K", (2, 512)), "c.weight": ("Q8_0", (4, 3, 32))}
    path = folder / "seed.gguf"
    write_gguf(path, tensors, metadata)
    full = path.read_bytes()
    write_gguf(path, {})
    return [full, full[:4] + struct.pack("<I", 2) + full[8:], path.read_bytes()]


def mutations(good: list[bytes], rng: random.Random, n: int) -> Iterator[bytes]:
    """n damaged files: one to four damages each, most of them in the header."""
    for _ in range(n):
        data = bytearray(rng.choice(good))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            damage(data, rng)
        yield bytes(data)


def damage(data: bytearray, rng: random.Random) -> None:
    """Changes one thing in place: a byte, a bit, a number, a piece or the end."""
    kind, at = rng.randrange(7), rng.randrange(1 + min(len(data), 2000))
    n = rng.randrange(1, 60)
    if kind == 0:
        data[at : at + 1] = bytes([rng.randrange(256)])
    elif kind == 1:
        data[at : at + 1] = bytes(x ^ 1 << rng.randrange(8) for x in data[at : at + 1])
    elif kind == 2:
        del data[rng.randrange(len(data) + 1) :]
    elif kind == 3:
        del data[at : at + n]
    elif kind == 4:
        data[at:at] = data[at : at + n]
    else:  # a number, where there is one: in the first 24 bytes or after a name
        places = [4, 8, 16, *(m.end() + 4 * rng.randrange(9) for m in NAME.finditer(data))]
        value, fmt = rng.choice((*EDGES, 32 * rng.randrange(64))), rng.choice("IQ")
        at, size = rng.choice(places), struct.calcsize(fmt)
        data[at : at + size] = struct.pack(f"<{fmt}", value % (1 << 8 * size))


def look(file: File) -> None:
    """Reads all that the header gave."""
    for value in file.metadata.values():
        list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
    for t in file.tensors.values():
        size = file.shards[t.shard].size_bytes
        assert 0 <= t.offset_bytes <= t.offset_bytes + t.n_bytes <= size, t
        assert t.type.n_bytes(t.shape) == t.n_bytes, t


def open_one(path: Path) -> str:
    """`ok`, the kind of the error's line, or raises whatever else came out."""
    try:
        look(open_gguf(path))
    except UserError as error:
        line = str(error).removeprefix(f"{path}: ")
        assert len(line.splitlines()) == 1, line
        assert len(line) < 500, line
        return re.sub(r"'.*?'|\[.*?\]|\d+", "~", line)
    return "ok"


def alarm(*_: object) -> None:
    raise TimeoutError(f"opening took more than {OPEN_LIMIT_S} s")


def main(n: int = 5000, seed: int = 0) -> int:
    outcomes: Counter[str] = Counter()
    slowest_s, bad = 0.0, 0
    signal.signal(signal.SIGALRM, alarm)
    with tempfile.TemporaryDirectory() as folder:
        path, good = Path(folder) / "m.gguf", seeds(Path(folder))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for i, content in enumerate(mutations(good, random.Random(seed), n)):
            path.write_bytes(content)
            start_s = time.perf_counter()
            signal.alarm(OPEN_LIMIT_S)
            try:
                outcomes[open_one(path)] += 1
            except Exception:
                bad += 1
                print(f"file {i} of seed {seed}:\n{traceback.format_exc()}")
            signal.alarm(0)
            slowest_s = max(slowest_s, time.perf_counter() - start_s)
    for outcome, count in outcomes.most_common():
        print(f"{count:7} {outcome}")
    print(f"{n} files, {bad} bad, slowest {1e3 * slowest_s:.1f} ms, address space +{SPACE_BYTES >> 20} MiB")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
