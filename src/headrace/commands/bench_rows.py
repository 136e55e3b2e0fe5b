"""The columns of a bench result: llama-bench's, what was decided, where it ran, and what crossed the link."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine import Engine
    from ..trace import Span

LINK_COLUMNS = ("link_gbps", "bound_ts", "bound_percent", "copy_s", "compute_s", "overlap")


@dataclass(frozen=True)
class Test:
    """n_prompt tokens at once, then n_gen tokens one by one, behind n_depth tokens that are not timed."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_tokens(self) -> int:
        """The tokens that are timed."""
        return self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True)
class Sample:
    """One run: seconds by the device's clock (the virtual one of a null device), and what crossed the link."""

    seconds: float
    moved_bytes: int | None


def test_row(test: Test, samples: list[Sample]) -> dict[str, Any]:
    """llama-bench's columns of one test."""
    import statistics

    seconds = [s.seconds for s in samples]
    speeds = [test.n_tokens / s for s in seconds]
    return {
        "n_prompt": test.n_prompt, "n_gen": test.n_gen, "n_depth": test.n_depth, "test": test.name,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "avg_ns": round(1e9 * statistics.mean(seconds)), "stddev_ns": round(1e9 * deviation(seconds)),
        "avg_ts": statistics.mean(speeds), "stddev_ts": deviation(speeds),
        "samples_ns": [round(1e9 * s) for s in seconds], "samples_ts": speeds,
    }  # fmt: skip


def link_row(
    avg_ts: float, n_tokens: int, moved_bytes: int | None, spans: "list[Span]", peak_gbps: float
) -> dict[str, Any]:  # fmt: skip
    """What crossed the link and how near that is to the bound, min(tokens / upload seconds, resident speed); None
    where it is not known. The resident speed is that of the traced computations alone, without their waits; `spans`
    holds no computations that fetch experts themselves."""
    from ..trace import busy_s, length_s

    row: dict[str, Any] = {"moved_bytes": moved_bytes} | dict.fromkeys(LINK_COLUMNS)
    if not moved_bytes:
        return row
    row["link_gbps"] = avg_ts * moved_bytes / n_tokens / 1e9
    copy_s, compute_s = busy_s(spans, "copy"), busy_s(spans, "compute")
    if copy_s:
        row |= {"copy_s": copy_s, "compute_s": compute_s, "overlap": overlap(length_s(spans), copy_s, compute_s)}
    if peak_gbps:
        bound_ts = n_tokens / max(moved_bytes / peak_gbps / 1e9, compute_s if copy_s else 0.0)
        row |= {"bound_ts": bound_ts, "bound_percent": 100 * avg_ts / bound_ts}
    return row


def overlap(wall_s: float, copy_s: float, compute_s: float) -> float | None:
    """The share of the shorter of two kinds of work that went on beside the other, 0 to 1."""
    shorter, longer = sorted((copy_s, compute_s))
    return min(1.0, max(0.0, 1 - (wall_s - longer) / shorter)) if shorter else None


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

    from ..backends import choose_backend

    plan, config = engine.plan, engine.config
    layouts = Counter(p.layout for p in plan.placements.values())
    copier = getattr(engine.device.copy, "host", None)  # a GPU's, if something is streamed
    n_bytes = copier.bytes_by_rung() if copier else Counter()
    return {
        "backend": choose_backend(config.backend, config.n_gpu_layers), "device": plan.device.name,
        "n_threads": config.n_threads or n_cores(),
        "n_ctx": plan.n_ctx, "n_ubatch": plan.n_ubatch, "n_window": plan.n_window, "schedule": plan.schedule,
        "repack": "on" if layouts["interleaved"] else "off", "device_bytes": plan.device_bytes,
        "streamed_bytes": plan.n_bytes("stream"),
        **{f"{rung}_bytes": n_bytes[rung] for rung in ("registered", "staged", "pageable")},
        "load_s": engine.stats.load_s, "lock_s": engine.stats.lock_s, "compile_s": engine.stats.compile_s,
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
