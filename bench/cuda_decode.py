"""Decode on a GPU after a prompt: experts gathered from the mapped file by their ids, or resident; the same tokens.

    python bench/cuda_decode.py --model FILE [--ncmoe 40,0] [--prompt 2048] [-n 128]

Prints one JSON row per placement: tokens/s, Python's share of a step, and whether the tokens equal the first row's.
"""

import argparse
import json
import statistics
import time

import numpy as np

import headrace

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ncmoe", default="40,0")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    first = None
    for n_cpu_moe in map(int, args.ncmoe.split(",")):
        with headrace.open(
            args.model,
            backend="cuda",
            n_cpu_moe=n_cpu_moe,
            n_batch=2048,
            n_ubatch=2048,
            n_ctx=args.prompt + args.n + 64,
        ) as engine:
            ids = np.random.default_rng(0).integers(0, engine.spec.n_vocab, args.prompt).tolist()
            (logits,) = engine.runner.prefill(engine.sequence, ids)
            tokens, steps_s = [], []
            for _ in range(args.n):
                tokens.append(int(logits.argmax()))
                start = time.perf_counter()
                (logits,) = engine.runner.decode([engine.sequence], tokens[-1:])
                steps_s.append(time.perf_counter() - start)
            first = first or tokens
            row = {
                "ncmoe": n_cpu_moe, "gathers": engine.stream.gathers,
                "tps": round(1 / statistics.median(steps_s[8:]), 1),
                "ms": round(1e3 * statistics.median(steps_s[8:]), 2), "same_tokens": tokens == first,
                "distinct": len(set(tokens)),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            if args.profile:
                import torch

                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
                    engine.runner.decode([engine.sequence], tokens[-1:])
                for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:12]:
                    print(f"{e.device_time_total / 1e3:9.3f} ms {e.count:6d}  {e.key[:80]}")
