"""Decode on a GPU after a prompt: experts gathered from the mapped file by their ids, computed by the CPU, shared by
both, or resident.

    python bench/cuda_decode.py --model FILE [--ncmoe 40,0] [--expert-decode gather,cpu,split,split:4] [--prompt 2048]

Prints one JSON row per placement and way: tokens/s, and how it agrees with the first row, whose greedy tokens all
rows decode: the share of equal greedy tokens and the mean KL divergence per token (0 where the bits are the same).
`split:R` gives the ranks from R on to the CPU, `split` lets the plan choose.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

import headrace


def rows(args: argparse.Namespace) -> Any:
    for n_cpu_moe in map(int, args.ncmoe.split(",")):
        for way in args.expert_decode.split(",") if n_cpu_moe else ("gather",):
            name, _, rank = way.partition(":")
            yield {"n_cpu_moe": n_cpu_moe, "expert_decode": name, "split_rank": int(rank or -1)}


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def profile(engine: Any, token: int) -> None:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        engine.runner.decode([engine.sequence], [token])
    for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:16]:
        print(f"{e.device_time_total / 1e3:9.3f} ms {e.count:6d}  {e.key[:80]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ncmoe", default="40,0")
    parser.add_argument("--expert-decode", default="gather")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    first: list[np.ndarray] = []
    for config in rows(args):
        start = time.perf_counter()
        n_ctx = args.prompt + args.n + 64
        sizes = {"n_batch": 2048, "n_ubatch": 2048, "n_ctx": n_ctx, "n_threads": args.threads}
        with headrace.open(args.model, backend="cuda", **sizes, **config) as engine:
            ids = np.random.default_rng(0).integers(0, engine.spec.n_vocab, args.prompt).tolist()
            (logits,) = engine.runner.prefill(engine.sequence, ids)
            found, steps_s, open_s = [logits], [], time.perf_counter() - start
            for i in range(args.n):
                token = int((first or found)[i].argmax())
                begin = time.perf_counter()
                (logits,) = engine.runner.decode([engine.sequence], [token])
                steps_s.append(time.perf_counter() - begin)
                found.append(logits)
            first = first or found
            p, q = log_softmax(np.array(first)), log_softmax(np.array(found))
            equal = np.mean(p.argmax(1) == q.argmax(1))
            row = {
                "ncmoe": config["n_cpu_moe"], "expert_decode": config["expert_decode"],
                "cpu_rank": engine.plan.cpu_rank,
                "gathers": engine.stream.gathers, "tps": round(1 / statistics.median(steps_s[8:]), 1),
                "ms": round(1e3 * statistics.median(steps_s[8:]), 2), "worst_ms": round(1e3 * max(steps_s[8:]), 2),
                "equal_tokens": round(float(equal), 3), "kl": float(f"{(np.exp(p) * (p - q)).sum(1).mean():.2e}"),
                "distinct": len({int(x.argmax()) for x in found}), "open_s": round(open_s, 1),
                "cpu_gbps": round(engine.device.info.cpu_gbps, 1), "link_gbps": round(engine.device.info.link_gbps, 1),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            if args.profile:
                profile(engine, int(logits.argmax()))
