"""The decode phase's mat-vec kernel on a CUDA device: rows a program, warps and unrolling, against the memory's speed.

    python bench/cuda_matvec.py

Prints one JSON row per variant and shape; Q4_K weights, several matrices in turn so that none stays in L2.
"""

import json

import torch
import triton
import triton.language as tl

from cuda_matmul import random_q4_k, timed_ms
from headrace.backends.cuda import decoders, matvec

SHAPES = [(8192, 2048), (2048, 4096), (512, 2048), (4096, 2048)]

if __name__ == "__main__":
    for n, k in SHAPES:
        n_copies = max(2, (200 << 20) // (n * k // 256 * 144))
        ws = [random_q4_k(n, k, seed) for seed in range(min(n_copies, 24))]
        x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(1, n, device="cuda", dtype=torch.float32)
        first = None
        for rows in (1, 2, 4, 8):
            for warps in (1, 2, 4):
                for unroll in (1, 2, 4, 8):

                    def run():
                        for w in ws:
                            matvec.matvec_kernel[(triton.cdiv(n, rows), 1)](
                                x, w, w, x, out, n, k // 256, k // 256 * 144, k, n, ADD=False, HAS_BIAS=False,
                                ACT=tl.bfloat16, DECODE=decoders.DECODERS["Q4_K"], BLOCK=256, BLOCK_BYTES=144,
                                ROWS=rows, UNROLL=unroll, num_warps=warps,
                            )  # fmt: skip

                    graph = torch.cuda.CUDAGraph()
                    run()
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph):
                        run()
                    us = 1e3 * timed_ms(graph.replay) / len(ws)
                    first = out.clone() if first is None else first
                    row = {
                        "n": n, "k": k, "rows": rows, "warps": warps, "unroll": unroll, "us": round(us, 2),
                        "gbps": round(n * k / 256 * 144 / us / 1e3), "same": bool((out == first).all()),
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)
