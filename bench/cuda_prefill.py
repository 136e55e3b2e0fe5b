"""Prefill on a GPU with experts streamed from the mapped file: speed against the link's bound, and the same bits.

    python bench/cuda_prefill.py --model FILE [--tests 512,2048,8192] [--ubatch 2048,8192] [--ncmoe 40,26,0]
                                 [--check] [--profile]

Prints one JSON row per test: tokens/s (median), bytes moved, GB/s, percent of the bound max(upload, compute).
"""

import argparse
import json
import statistics
import time

import numpy as np

import headrace

LINK_GBPS = 55.0


def options(ubatch: int, n_ctx: int, **more) -> dict:
    return {"backend": "cuda", "n_batch": ubatch, "n_ubatch": ubatch, "n_ctx": n_ctx, **more}


def measure(engine, ids: list[int], n_rep: int) -> tuple[float, float]:
    """(median seconds, bytes uploaded a pass); two passes warm up: one compiles, one is captured."""
    seconds, start_bytes = [], 0
    for i in range(2 + n_rep):
        engine.reset()
        before, start = engine.stream.uploaded_bytes, time.perf_counter()
        engine.runner.prefill(engine.sequence, ids)
        took, start_bytes = time.perf_counter() - start, engine.stream.uploaded_bytes - before
        if i >= 2:
            seconds.append(took)
    return statistics.median(seconds), start_bytes


def touched(engine, ids: list[int]) -> list[int]:
    """How many experts each layer's tokens go to, counted in a first run of this shape, which is not recorded."""
    ops, route, starts = engine.device.ops, engine.device.ops.route, []

    def counted(out, *args, **kwargs):
        route(out, *args, **kwargs)
        starts.append(out.starts.clone())

    ops.route = counted
    engine.reset()
    engine.runner.prefill(engine.sequence, ids)
    del ops.route
    return [int((s.diff() > 0).sum()) for s in starts]


def profile(engine, ids: list[int]) -> None:
    import torch

    engine.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        engine.runner.prefill(engine.sequence, ids)
    rows = sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:22]
    for e in rows:
        print(f"{e.device_time_total / 1e3:9.2f} ms {e.count:6d}  {e.key[:90]}")


def check(model: str, n_tokens: int) -> None:
    """The same logits, bit for bit, under settings that only say where and when bytes move."""
    base = None
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 1000, n_tokens).tolist()
    rows = list(range(0, n_tokens, 37))
    for more in (
        {}, {"schedule": "ubatch"}, {"prefetch_experts": 0}, {"prefetch_experts": 8, "n_cpu_moe": 13},
        {"n_cpu_moe": 0, "n_ubatch": 1024}, {"n_ubatch": 256},
    ):  # fmt: skip
        with headrace.open(model, **{**options(512, 4096), **more}) as engine:
            for _ in range(2):  # eager, then captured and replayed
                got = engine.logits(ids, rows)
                base = got if base is None else base
                same = bool((got == base).all())
                print(json.dumps({"check": more, "same": same, "finite": bool(np.isfinite(got).all())}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tests", default="2048,8192,16384")
    parser.add_argument("--ubatch", default="2048,8192")
    parser.add_argument("--ncmoe", default="40")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--check", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--profile", type=int, default=0, metavar="TOKENS")
    args = parser.parse_args()
    if args.check:
        check(args.model, args.check)
    tests = [int(n) for n in args.tests.split(",")]
    for n_cpu_moe in map(int, args.ncmoe.split(",")):
        for ubatch in map(int, args.ubatch.split(",")):
            start = time.perf_counter()
            with headrace.open(args.model, **options(ubatch, max(tests), n_cpu_moe=n_cpu_moe)) as engine:
                opened_s = time.perf_counter() - start
                rng = np.random.default_rng(0)
                for n in tests:
                    ids = rng.integers(0, engine.spec.n_vocab, n).tolist()
                    experts = touched(engine, ids) if n <= ubatch else []
                    s, n_bytes = measure(engine, ids, args.repeat)
                    upload_s = n_bytes / LINK_GBPS / 1e9
                    row = {
                        "test": f"pp{n}", "ncmoe": n_cpu_moe, "ubatch": ubatch, "tps": round(n / s), "s": round(s, 4),
                        "gb": round(n_bytes / 1e9, 2), "gbps": round(n_bytes / s / 1e9, 1),
                        "percent_of_upload_bound": round(100 * upload_s / s, 1), "open_s": round(opened_s, 1),
                        "touched": round(statistics.mean(experts), 1) if experts else None,
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)
                if args.profile:
                    profile(engine, rng.integers(0, engine.spec.n_vocab, args.profile).tolist())
