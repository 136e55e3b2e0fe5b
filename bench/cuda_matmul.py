"""Prefill products on a CUDA device: decoding, dense and grouped products, tile by tile, checked against torch.

    python bench/cuda_matmul.py [--quick]

Prints GB/s of decoding and TFLOP/s of products for candidate tiles, beside torch's own bf16 product. Random data.
"""

import argparse
import itertools
import json

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.backends.cuda import decoders, dequant, experts, gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products


def timed_ms(fn) -> float:
    return triton.testing.do_bench(fn, warmup=20, rep=60, return_mode="median")


def report(**row) -> None:
    print(json.dumps(row), flush=True)


def random_q4_k(n_rows: int, n_in: int, seed: int = 0) -> torch.Tensor:
    """Valid Q4_K rows: scale fields as fp16 small numbers, everything else random bits."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n_rows * n_in // 256, 144), np.uint8)
    raw[:, :4] = np.frombuffer(np.array([2e-4, 1e-3], np.float16).tobytes(), np.uint8)
    return torch.from_numpy(raw).to(DEVICE)


def run_dequant(raw, out, n_rows, n_in, rows, warps):
    grid = (triton.cdiv(n_rows, rows) * (n_in // 256),)
    dequant.dequant_kernel[grid](
        raw, raw, out, n_rows, n_in // 256, n_in // 256 * 144, raw, 0, 1,
        DECODE=decoders.DECODERS["Q4_K"], BLOCK=256, BLOCK_BYTES=144, ROWS=rows, SKIP=False, num_warps=warps,
    )  # fmt: skip


def bench_dequant(n_rows: int, n_in: int, quick: bool) -> None:
    raw, out = random_q4_k(n_rows, n_in), torch.empty(n_rows, n_in, dtype=DTYPE, device=DEVICE)
    for rows, warps in [(4, 4), (8, 4)] if quick else itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8)):
        ms = timed_ms(lambda: run_dequant(raw, out, n_rows, n_in, rows, warps))
        report(test="dequant Q4_K", rows=rows, warps=warps, ms=ms, gweights_s=n_rows * n_in / ms / 1e6)


TILES = [
    (128, 128, 8, 3),
    (128, 128, 4, 3),
    (128, 256, 8, 3),
    (128, 256, 8, 4),
    (256, 128, 8, 3),
    (64, 128, 4, 4),
    (64, 256, 8, 3),
]


def described(w, tile, tma):
    """16-bit weights as a kernel wants them: a tensor descriptor in blocks of [BN, BK], or a pointer."""
    return TensorDescriptor.from_tensor(w.view(-1, w.shape[-1]), [tile[1], gemm.BK]) if tma else w


def run_gemm(x, w, out, tile, tma):
    bm, bn, warps, stages = tile
    t, k = x.shape
    n = w.shape[0]
    w = described(w, tile, tma)
    grid = (triton.cdiv(t, bm) * triton.cdiv(n, bn),)
    gemm.gemm_kernel[grid](
        x, w, x, out, t, n, k, x.stride(0), out.stride(0), TMA=tma, ADD=False, HAS_BIAS=False, EVEN_K=k % 64 == 0,
        PRECISION="ieee", BM=bm, BN=bn, BK=64, GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def bench_gemm(t: int, n: int, k: int, quick: bool) -> None:
    x = torch.randn(t, k, device=DEVICE, dtype=DTYPE)
    w = torch.randn(n, k, device=DEVICE, dtype=DTYPE)
    out = torch.empty(t, n, device=DEVICE, dtype=DTYPE)
    ref = x @ w.T
    ms = timed_ms(lambda: x @ w.T)
    report(test="torch", shape=(t, n, k), ms=ms, tflops=2 * t * n * k / ms / 1e9)
    first = None
    for tile, tma in itertools.product(TILES[:1] if quick else TILES, (False, True)):
        try:
            out.fill_(float("nan"))
            run_gemm(x, w, out, tile, tma)
        except triton.runtime.errors.OutOfResources:
            continue
        err = ((out - ref).float().norm() / ref.float().norm()).item()
        first = out.clone() if first is None else first
        ms, same = timed_ms(lambda: run_gemm(x, w, out, tile, tma)), bool((out == first).all())
        tflops = round(2 * t * n * k / ms / 1e9)
        report(test="gemm", shape=(t, n, k), tile=tile, tma=tma, ms=ms, tflops=tflops, err=err, same=same)


def routing(t: int, n_expert: int, top_k: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(t, n_expert, generator=g).topk(top_k, 1).indices.to(DEVICE)
    order = torch.argsort(ids.flatten(), stable=True).to(torch.int32)
    counts = torch.bincount(ids.flatten(), minlength=n_expert)
    starts = torch.cat([torch.zeros(1, device=DEVICE), counts.cumsum(0)]).to(torch.int32)
    return ids, order, starts


def bench_experts(t: int, n_expert: int, top_k: int, d: int, f: int, n_chunk: int, quick: bool) -> None:
    ids, order, starts = routing(t, n_expert, top_k)
    x = torch.randn(t, d, device=DEVICE, dtype=DTYPE)
    gate, up = (torch.randn(n_chunk, f, d, device=DEVICE, dtype=DTYPE) * d**-0.5 for _ in range(2))
    down = torch.randn(n_chunk, d, f, device=DEVICE, dtype=DTYPE) * f**-0.5
    h = torch.empty(t * top_k, f, device=DEVICE, dtype=DTYPE)
    y = torch.empty(t * top_k, d, device=DEVICE, dtype=DTYPE)
    n = t * top_k
    share = (int(starts[n_chunk]) - int(starts[0])) / n
    more = [(32, 128, 4, 4), (16, 128, 4, 4), (64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 3)]
    tiles = [(128, 128, 8, 3)] if quick else [*TILES, *more]
    first = None
    for tile, tma in itertools.product(tiles, (False, True)):
        g, u, dw = (described(w, tile, tma) for w in (gate, up, down))
        bm, bn, warps, stages = tile
        n_tiles = triton.cdiv(n, bm) + n_expert
        te, tr = (torch.empty(n_tiles, dtype=torch.int32, device=DEVICE) for _ in range(2))
        e2 = triton.next_power_of_2(n_expert)
        experts.tile_map_kernel[(triton.cdiv(n_tiles, 16),)](starts, te, tr, n_expert, n_tiles, BM=bm, E=e2, BLOCK=16)

        def glu():
            experts.expert_glu_kernel[(triton.cdiv(f, bn), n_tiles)](
                x, g, u, x, x, h, order, starts, te, tr, 0, n_chunk, n, f, d, d, f, TMA=tma, TOP_K=top_k,
                HAS_BIAS=False, GELU=False, EVEN_K=d % 64 == 0, PRECISION="ieee", BM=bm, BN=bn, BK=64,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip

        def dn():
            experts.expert_down_kernel[(triton.cdiv(d, bn), n_tiles)](
                h, dw, x, y, order, starts, te, tr, 0, n_chunk, n, d, f, d, TMA=tma, HAS_BIAS=False, EVEN_K=f % 64 == 0,
                PRECISION="ieee", BM=bm, BN=bn, BK=64, num_warps=warps, num_stages=stages,
            )  # fmt: skip

        for name, fn, flops in (("glu", glu, 4 * n * d * f), ("down", dn, 2 * n * d * f)):
            try:
                fn()
            except triton.runtime.errors.OutOfResources:
                continue
            ms = timed_ms(fn)
            tflops = round(share * flops / ms / 1e9)
            report(test=name, tokens=t, chunk=n_chunk, tile=tile, tma=tma, ms=ms, tflops=tflops)
        first = (h.clone(), y.clone()) if first is None else first
        assert n_chunk < n_expert or ((h == first[0]).all() and (y == first[1]).all()), "tiles change bits"
        if n_chunk == n_expert and not tma:
            i = torch.randint(0, n, (64,))
            e = ids.flatten()[i]
            xi = x[i // top_k].float()
            ref = torch.nn.functional.silu(torch.einsum("nd,nfd->nf", xi, gate[e].float())) * torch.einsum(
                "nd,nfd->nf", xi, up[e].float()
            )
            err = ((h[i].float() - ref).norm() / ref.norm()).item()
            ref = torch.einsum("nf,ndf->nd", h[i].float(), down[e].float())
            report(test="error", tile=tile, glu=err, down=((y[i].float() - ref).norm() / ref.norm()).item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for Triton's interpreter")
    args = parser.parse_args()
    if args.tiny:
        triton.testing.do_bench = lambda fn, **kw: (fn(), 1.0)[1]
        bench_dequant(8, 512, True)
        bench_gemm(40, 72, 96, True)
        bench_experts(40, 6, 2, 96, 64, 6, True)
    else:
        bench_dequant(256 * 512, 2048, args.quick)
        bench_gemm(8192, 8192, 2048, args.quick)
        bench_gemm(8192, 2048, 4096, args.quick)
        bench_gemm(512, 2048, 4096, args.quick)
        bench_experts(8192, 256, 8, 2048, 512, 256, args.quick)
        bench_experts(2048, 256, 8, 2048, 512, 256, args.quick)
        for n_chunk in (32, 64, 128):
            bench_experts(16384, 256, 8, 2048, 512, n_chunk, True)
