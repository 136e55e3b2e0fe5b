"""Microseconds of each op but the products, in a recorded program, at the shapes of Qwen3-30B-A3B and Qwen3.6-35B-A3B.

    python bench/cpu_ops.py [-t THREADS] [-n TOKENS ...] [--past POSITIONS]

A program holds 50 calls of one op; the figure is the best of five replays over 50. "nothing" is a program of empty ops:
what a call and its barrier cost. With -t 1 it is the thread's own time, which other processes disturb less.
"""

import argparse
import time
from types import SimpleNamespace

import numpy as np

from headrace.backends.base import KVLayer, RecurrentLayer, Routing, StepState
from headrace.backends.cpu import open_device
from headrace.spec import AttentionSpec, DeltaNetSpec, MoeSpec, RopeSpec

CALLS, PAGE = 50, 64
rng = np.random.default_rng(0)


def floats(*shape):
    return rng.standard_normal(shape, np.float32)


def weight(*shape):
    values = floats(*shape)
    return SimpleNamespace(floats=values, transposed=np.ascontiguousarray(values.T))


def state(n_tokens, past):
    """One sequence of n_tokens new positions behind `past` others."""
    positions = np.arange(past, past + n_tokens, dtype=np.int32)
    n_block = -(-(past + n_tokens) // PAGE)
    return StepState(
        positions, positions, positions, np.array([0, n_tokens], np.int32),
        np.arange(n_block, dtype=np.int32)[None].copy(), np.zeros(1, np.int32), np.zeros(1, np.int32), PAGE,
    )  # fmt: skip


def cases(n, past, ops):
    """(name, call, floating-point operations)"""
    s = state(n, past)
    n_rows = s.block_table.size * PAGE
    x, wide, narrow, norm = floats(n, 2048), floats(n, 8192), np.empty((n, 8192), np.float32), weight(2048)
    q, k, v, out = floats(n, 32, 128), floats(n, 4, 128), floats(n, 4, 128), floats(n, 32, 128)
    kv = KVLayer(*(rng.standard_normal((n_rows, 4, 128)).astype(np.float16) for _ in range(2)))
    rope, head = RopeSpec(128, 1e6), weight(128)
    spec = AttentionSpec(32, 4, 128, rope, 128**-0.5, 1e-6)
    moe, logits, y = MoeSpec(128, 8, 768, 1e-6), floats(n, 128), floats(n * 8, 2048)
    routing = Routing(*(np.empty(shape, t) for shape, t in (
        ((n, 8), np.int32), ((n, 8), np.float32), (n * 8, np.int32), (129, np.int32))))  # fmt: skip
    d = DeltaNetSpec(16, 32, 128, 128, 4, 1e-6)
    recurrent = RecurrentLayer(floats(1, 3, d.conv_width), floats(1, 32, 128, 128))
    mixed, conv, taps = floats(n, d.conv_width), floats(n, d.conv_width), weight(d.conv_width, 4)
    heads, gates = floats(n, 64, 128) / np.float32(12), floats(n, 32)
    dt, a, answer = weight(32), SimpleNamespace(floats=-np.abs(floats(32))), floats(n, 32, 128)
    rows = rng.integers(0, n, n).astype(np.int32)
    ops.route(routing, logits, moe)
    return [
        ("nothing", lambda: ops.add(x[:0], x[:0]), 0),
        ("rms_norm 2048", lambda: ops.rms_norm(x, x, norm, 1e-6), 0),
        ("rms_norm 32 x 128", lambda: ops.rms_norm(q, q, head, 1e-6), 0),
        ("rope 32 x 128", lambda: ops.rope(q, s.positions, rope), 0),
        ("kv_store 4 x 128", lambda: ops.kv_store(kv, k, v, s), 0),
        ("attention 32/4 x 128", lambda: ops.attention(out, q, kv, s, spec), 2**14 * int((s.positions + 1).sum())),
        ("route 8 of 128", lambda: ops.route(routing, logits, moe), 0),
        ("combine 8 x 2048", lambda: ops.combine(x, y, routing), 0),
        ("glu 8192", lambda: ops.glu(narrow, wide, wide, "silu"), 0),
        ("add 2048", lambda: ops.add(x, x), 0),
        ("gather_rows 2048", lambda: ops.gather_rows(x, x, rows), 0),
        ("conv1d 8192", lambda: ops.conv1d(conv, mixed, taps, recurrent, s), 0),
        ("l2_norm 16 x 128", lambda: ops.l2_norm(heads[:, :16], heads[:, :16], 1e-6), 0),
        ("delta_net 32 x 128 x 128",
         lambda: ops.delta_net(
             answer, heads[:, :16], heads[:, 16:32], heads[:, 32:], gates, gates, dt, a, recurrent, s, d),
         6 * 32 * 128 * 128 * n),
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-t", type=int, default=0, help="threads (0: all cores)")
    parser.add_argument("-n", type=int, nargs="+", default=[1, 512], help="tokens")
    parser.add_argument("--past", type=int, default=0, help="positions already in the cache")
    args = parser.parse_args()
    device = open_device(args.t)
    clock = time.thread_time if device.team.n_threads == 1 else time.perf_counter
    print(f"{device.info.name}\n\n| op | tokens | us | GFLOP/s |\n|---|---|---|---|")
    for n in args.n:
        for name, call, flops in cases(n, args.past, device.ops):
            with device.record((name, n)):
                for _ in range(CALLS if n < 64 else 4):
                    call()
            times = []
            for _ in range(5):
                start_s = clock()
                device.replay((name, n))
                times.append(clock() - start_s)
            us = min(times) / (CALLS if n < 64 else 4) * 1e6
            print(
                f"| {name} | {n} | {us:.2f} | {flops / us / 1e3:.1f} |" if flops else f"| {name} | {n} | {us:.2f} | |"
            )
    device.close()


if __name__ == "__main__":
    main()
