"""Measures how fast a model reads prompts (pp) and writes (tg), with llama-bench's flags and tables.

A test runs -r times after a warm-up; the table shows the average and the standard deviation of tokens per second.
Lists such as 512,2048 and ranges such as 128-2048*2 run every combination.

examples:
  headrace bench -m model.gguf                           pp512 and tg128
  headrace bench -m model.gguf -p 512,2048 -n 0 -ub 512,2048
  headrace bench -m model.gguf -pg 1024,128 -d 0,8192 -r 3
  headrace bench -m model.gguf -o jsonl >> results.jsonl
"""

import argparse
import itertools
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import UserError
from .options import add_config, config_of, list_of, progress

if TYPE_CHECKING:
    from ..engine import Engine

HELP = "measure prompt and generation speed, with llama-bench's flags"
FORMATS = ("md", "csv", "json", "jsonl", "sql")


@dataclass(frozen=True)
class Test:
    """n_prompt tokens at once, then n_gen tokens one by one, behind n_depth tokens that are not timed."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, ints = parser.add_argument, list_of(int)
    add(
        "-m",
        "--model",
        metavar="FILE",
        type=Path,
        action="append",
        help="GGUF file; may be repeated (without: the demo)",
    )
    add("-p", "--n-prompt", metavar="LIST", type=ints, action="extend", help="prompt lengths (default 512; 0: none)")
    add("-n", "--n-gen", metavar="LIST", type=ints, action="extend", help="tokens to write (default 128; 0: none)")
    add(
        "-pg", metavar="P,N", type=pair, action="append", default=[], help="read P tokens, then write N: timed together"
    )
    add("-d", "--n-depth", metavar="LIST", type=ints, action="extend", help="tokens already in the cache (default 0)")
    add("-r", "--repetitions", metavar="N", type=int, default=5, help="runs of each test (default 5)")
    add("-o", "--output", choices=FORMATS, default="md", help="format on stdout (default md)")
    add("--no-warmup", action="store_true", help="also time the first run")
    add("--progress", action="store_true", help="a line on stderr for every test, also when it is no terminal")
    add_config(parser, lists=True)


def pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    return int(first), int(second)


def run(args: argparse.Namespace) -> None:
    from .bench_output import printer

    if args.repetitions < 1:
        raise UserError(f"-r {args.repetitions}: at least 1")
    tests = list(tests_of(args))
    if not tests:
        raise UserError("nothing to measure: -p, -n or -pg must ask for some tokens")
    grid = config_of(args)
    n_ctx = max(t.n_depth + t.n_prompt + t.n_gen for t in tests)
    configs = [{"n_ctx": n_ctx} | dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    for config in configs:
        Config.of(**config)  # a bad value is told before anything runs
    emit = printer(args.output, [name for name, values in grid.items() if len(values) > 1 or name in SHOWN])
    command, done = shlex.join(["headrace", "bench", *sys.argv[2:]]), False
    for model in args.model or [None]:
        for config in configs:
            for row in measure(model, config, tests, args, command):
                emit(row)
                done = True
    if done:
        emit(None)


SHOWN = ("n_gpu_layers", "n_cpu_moe")
"""Config fields that have a column as soon as their flag is given."""


def tests_of(args: argparse.Namespace) -> Iterator[Test]:
    """llama-bench's order: for each depth the prompts, then the generations, then the pairs."""
    wants = [(n, 0) for n in args.n_prompt or [512]] + [(0, n) for n in args.n_gen or [128]] + args.pg
    for depth in args.n_depth or [0]:
        for n_prompt, n_gen in wants:
            if n_prompt < 0 or n_gen < 0 or depth < 0:
                raise UserError("-p, -n, -pg and -d take numbers of tokens, at least 0")
            if n_prompt or n_gen:
                yield Test(n_prompt, n_gen, depth)


def measure(
    model: Path | None, config: dict[str, Any], tests: list[Test], args: argparse.Namespace, command: str
) -> Iterator[dict[str, Any]]:  # fmt: skip
    from .. import open as open_model

    with progress("loading") as show:
        engine = open_model(model, load_progress=show, **config)
    with engine:
        about = {
            **machine(),
            "command": command,
            **model_row(engine),
            **asdict(Config.of(**config)),
            **plan_row(engine),
        }
        for i, test in enumerate(tests):
            if args.progress or sys.stderr.isatty():
                print(f"headrace bench: {i + 1}/{len(tests)} {test.name}", file=sys.stderr)
            if not args.no_warmup:
                once(engine, Test(min(test.n_prompt, engine.plan.n_ubatch), min(test.n_gen, 1), 0))
            samples = [once(engine, test) for _ in range(args.repetitions)]
            yield about | test_row(test, samples)


def once(engine: "Engine", test: Test) -> tuple[float, int]:
    """(seconds, bytes uploaded) of one run; random tokens, as speed must not depend on what is said."""
    import numpy as np

    rng = np.random.default_rng(0)
    ids = rng.integers(engine.spec.n_vocab, size=test.n_depth + test.n_prompt + test.n_gen).tolist()
    engine.reset()
    runner, seq = engine.runner, engine.sequence
    if test.n_depth:
        runner.prefill(seq, ids[: test.n_depth])
    moved_bytes, start_s = engine.stream.uploaded_bytes, time.perf_counter()
    if test.n_prompt:
        runner.prefill(seq, ids[test.n_depth : test.n_depth + test.n_prompt])
    for token in ids[test.n_depth + test.n_prompt :]:
        runner.decode([seq], [token])
    return time.perf_counter() - start_s, engine.stream.uploaded_bytes - moved_bytes


def test_row(test: Test, samples: list[tuple[float, int]]) -> dict[str, Any]:
    """llama-bench's columns of one test, and what crossed the link."""
    import statistics

    seconds = [s for s, _ in samples]
    speeds = [(test.n_prompt + test.n_gen) / s for s in seconds]
    moved_bytes = statistics.mean(n for _, n in samples)
    return {
        "n_prompt": test.n_prompt, "n_gen": test.n_gen, "n_depth": test.n_depth, "test": test.name,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "avg_ns": round(1e9 * statistics.mean(seconds)), "stddev_ns": round(1e9 * deviation(seconds)),
        "avg_ts": statistics.mean(speeds), "stddev_ts": deviation(speeds),
        "samples_ns": [round(1e9 * s) for s in seconds], "samples_ts": speeds,
        "moved_bytes": round(moved_bytes), "link_gbps": moved_bytes / statistics.mean(seconds) / 1e9,
    }  # fmt: skip


def deviation(values: list[float]) -> float:
    import statistics

    return statistics.stdev(values) if len(values) > 1 else 0.0


def model_row(engine: "Engine") -> dict[str, Any]:
    from math import prod

    infos = list(engine.file.tensors.values())
    return {
        "model_filename": str(engine.file.path), "model_type": model_type(engine),
        "model_size": sum(t.n_bytes for t in infos), "model_n_params": sum(prod(t.shape) for t in infos),
    }  # fmt: skip


def model_type(engine: "Engine") -> str:
    """Architecture and type mix, such as "qwen3moe Q4_K_M"."""
    from ..synth.mixes import MIXES

    number = engine.file.metadata.get("general.file_type")
    mix = next((name for name, m in MIXES.items() if m.file_type == number), "")
    return f"{engine.spec.architecture} {mix}".strip()


def plan_row(engine: "Engine") -> dict[str, Any]:
    """What was decided where the wish said auto."""
    from collections import Counter

    from ..backends import AUTO

    plan, config = engine.plan, engine.config
    layouts = Counter(p.layout for p in plan.placements.values())
    return {
        "backend": AUTO if config.backend == "auto" else config.backend, "device": plan.device.name,
        "n_threads": config.n_threads or n_cores(),
        "n_ctx": plan.n_ctx, "n_ubatch": plan.n_ubatch, "n_window": plan.n_window, "schedule": plan.schedule,
        "repack": "on" if layouts["interleaved"] else "off", "device_bytes": plan.device_bytes,
        "load_s": engine.stats.load_s,
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """This machine and this program: every result says where it comes from."""
    import os
    import platform

    from .. import __version__

    return {
        "version": __version__, "build_commit": commit(), "cpu_info": cpu_name(), "n_cpu": os.cpu_count() or 0,
        "os": platform.platform(), "python": platform.python_version(),
    }  # fmt: skip


def n_cores() -> int:
    """The cores that this process may use."""
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine())


def commit() -> str:
    """The commit of a source checkout, with + behind it if files were changed; "" where there is none."""
    import subprocess

    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, timeout=5, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return out.strip()
