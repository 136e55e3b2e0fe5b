"""Prefill attention on a CUDA device: TFLOP/s of candidate tiles, checked against torch, with the same bits from all.

    python bench/cuda_attention.py [--tokens 16384] [--past 0,16384] [--heads 16,2] [--dim 256]

The last `tokens` of a text of past + tokens; a micro-batch shifted against the first must give the same rows.
"""

import argparse
import json

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.backends.cuda.attention import attention_kernel

PAGE = 64
TILES = [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2)]


def attend(q, k, v, past, tile):
    """out [T, H, D] for queries at positions past.. over pages that lie in a shuffled order."""
    (t, n_head, dim), n_kv = q.shape, k.shape[1] // q.shape[2]
    bm, bn, warps, stages = tile
    out = torch.empty_like(q)
    positions = torch.arange(past, past + t, dtype=torch.int32, device="cuda")
    seq_start = torch.tensor([0, t], dtype=torch.int32, device="cuda")
    table = PAGES[: k.shape[0] // PAGE][None]

    c = max(16, triton.next_power_of_2(dim))
    kd, vd = (TensorDescriptor.from_tensor(x, [bn, c]) for x in (k, v))

    def run():
        attention_kernel[(n_head, triton.cdiv(t, bm) + 1)](
            q, kd, vd, out, q, positions, seq_start, table, dim**-0.5, 1, table.shape[1], n_head // n_kv,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), k.stride(0),
            TMA=True, PAGE=PAGE, WINDOW=0, HAS_SINKS=False, C=c, DIM=dim, BM=bm, BN=bn,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return out, run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--past", default="0,16384")
    parser.add_argument("--heads", default="16,2")
    parser.add_argument("--dim", type=int, default=256)
    args = parser.parse_args()
    n_head, n_kv = map(int, args.heads.split(","))
    torch.manual_seed(0)
    for past in map(int, args.past.split(",")):
        t, n = args.tokens, past + args.tokens
        PAGES = torch.randperm(n // PAGE, device="cuda").int()
        q = (2 * torch.randn(t, n_head, args.dim, device="cuda")).bfloat16()
        k, v = (torch.randn(n, n_kv * args.dim, device="cuda").half() for _ in "kv")
        rows = (PAGES.long()[:, None] * PAGE + torch.arange(PAGE, device="cuda")).reshape(-1)
        kl, vl = (x[rows].view(n, n_kv, args.dim).repeat_interleave(n_head // n_kv, 1) for x in (k, v))
        last = slice(t - 256, t)
        z = torch.einsum("thd,nhd->htn", q[last].half().float(), kl.float()) * args.dim**-0.5
        seen = torch.arange(n, device="cuda") <= torch.arange(past + t - 256, past + t, device="cuda")[:, None]
        want = torch.einsum("htn,nhd->thd", z.masked_fill(~seen, float("-inf")).softmax(-1), vl.float())
        first, flops = None, 4 * n_head * args.dim * (t * past + t * (t + 1) / 2)
        for tile in TILES:
            try:
                out, run = attend(q, k, v, past, tile)
                run()
                shifted, run_shifted = attend(q[96:], k, v, past + 96, tile)
                run_shifted()
            except triton.OutOfResources as e:
                print(json.dumps({"tile": tile, "error": str(e)[:80]}))
                continue
            first = out if first is None else first
            row = {
                "past": past, "tokens": t, "tile": tile, "max_error": float((out[last].float() - want).abs().max()),
                "same_as_first": bool((out == first).all()), "same_shifted": bool((shifted == out[96:]).all()),
                "tflops": round(flops / triton.testing.do_bench(run, warmup=30, rep=150) / 1e9),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
