"""What a request of the GPU to the CPU costs: experts of one token, ranks times layers, in one graph.

    python bench/cuda_hostexperts.py [-t 15,16,8] [--ranks 1,2,4,8]

Prints a JSON row per number of threads and ranks: microseconds of a request, and GB/s of the experts' bytes. What
remains at 0 bytes, on the line through the rows, is the round trip. Experts have the shape of Qwen3.6-35B-A3B's.
"""

import argparse
import json
import statistics
import time
from contextlib import closing

import numpy as np
import torch

from headrace.backends.base import Routing
from headrace.backends.cuda.device import CudaDevice, CudaWeight, HostBytes
from headrace.gguf import TensorInfo
from headrace.quants import TYPES, random_blocks

N_EXPERT, N_EMBD, N_FF, N_LAYER = 256, 2048, 512, 40


def experts(rng: np.random.Generator, *shape: int) -> CudaWeight:
    kind = TYPES["Q4_K"]
    one = random_blocks(kind, int(np.prod(shape)) // kind.block, rng, 0.02).reshape(-1)
    info = TensorInfo("w", kind, (N_EXPERT, *shape), 0, 0, N_EXPERT * one.nbytes)
    return CudaWeight(info, torch.zeros(8, device="cuda"), HostBytes(np.tile(one, N_EXPERT)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--threads", default="0")
    parser.add_argument("--ranks", default="1,2,4,6,8")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    gate, up, down = experts(rng, N_FF, N_EMBD), experts(rng, N_FF, N_EMBD), experts(rng, N_EMBD, N_FF)
    expert_bytes = sum(w.info.n_bytes for w in (gate, up, down)) / N_EXPERT
    for n_threads in map(int, args.threads.split(",")):
        with closing(CudaDevice()) as device:
            device.split_experts(0, n_threads)
            for n_ranks in map(int, args.ranks.split(",")):
                x, h = device.alloc((1, N_EMBD), "f32"), device.alloc((1, N_EMBD), "bf16")
                act, y = device.alloc((n_ranks, N_FF), "bf16"), device.alloc((n_ranks, N_EMBD), "bf16")
                ids = np.array([rng.permutation(N_EXPERT)[:n_ranks] for _ in range(N_LAYER)], np.int32)
                all_ids, weights = device.alloc(ids.shape, "i32"), device.alloc((1, n_ranks), "f32")
                device.upload(all_ids, ids)
                none = device.alloc((1,), "i32")

                def step() -> None:
                    if device.replay(n_ranks):
                        return
                    with device.record(n_ranks):
                        for layer in range(N_LAYER):
                            routing = Routing(all_ids[layer : layer + 1], weights, none, none)
                            device.decode_ops.expert_glu(act, h, routing, gate, up, "silu")
                            device.decode_ops.expert_down(y, act, routing, down)
                            device.decode_ops.combine(x, y, routing)

                seconds = []
                for _ in range(60):
                    start = time.perf_counter()
                    step()
                    device.compute.synchronize()
                    seconds.append(time.perf_counter() - start)
                request_s = statistics.median(seconds[10:]) / N_LAYER
                row = {
                    "threads": device.host_experts.team.n_threads, "ranks": n_ranks, "us": round(1e6 * request_s, 1),
                    "gbps": round(n_ranks * expert_bytes / request_s / 1e9, 1),
                }  # fmt: skip
                print(json.dumps(row), flush=True)
