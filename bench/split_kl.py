"""What the CPU's int8 activations change in a model when it computes the routed ranks from R on: KL per token.

    python bench/split_kl.py [MODEL]

Everything else is the reference in float32, so the figures hold for `--expert-decode cpu` (R = 0) and `split` on any
device. One line per R, over 256 tokens of Python source (or arbitrary tokens, for a vocabulary without text).
"""

import json
import sys

import numpy as np
from numpy.typing import NDArray

import headrace
from headrace.engine import demo_path

N_TOKENS = 256


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    y = x.astype(np.float64) - x.max(1, keepdims=True)
    return y - np.log(np.exp(y).sum(1, keepdims=True))


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else demo_path()
    with (
        headrace.open(path, backend="reference", n_ctx=512) as engine,
        headrace.open(path, backend="cpu", n_ctx=512, repack="off") as other,
    ):
        with open(json.decoder.__file__) as source:
            ids = [i % engine.spec.n_vocab for i in engine.tokenize(source.read())[:N_TOKENS]]
        ops, cpu, weights = engine.device.ops, other.device.ops, other.stream.weights
        glu, down = ops.expert_glu, ops.expert_down
        n_used = max(getattr(m, "n_expert_used", 0) for m in engine.spec.ffn)
        right = log_softmax(engine.logits(ids))
        for first in range(n_used):

            def take(out, call, *args, first=first):
                """The rows of the CPU's ranks from its own op."""
                found = np.zeros(out.shape, np.float32)
                call(found, *args)
                theirs = np.arange(len(out)) % n_used >= first
                out[theirs] = found[theirs]

            def split_glu(out, x, routing, gate, up, activation, take=take):
                glu(out, x, routing, gate, up, activation)
                mine = (weights[gate.info.name], weights[up.info.name] if up else None)
                take(out, cpu.expert_glu, np.ascontiguousarray(x), routing, *mine, activation)

            def split_down(out, h, routing, w, take=take):
                down(out, h, routing, w)
                take(out, cpu.expert_down, np.ascontiguousarray(h), routing, weights[w.info.name])

            ops.expert_glu, ops.expert_down = split_glu, split_down
            got = log_softmax(engine.logits(ids))
            kl = (np.exp(right) * (right - got)).sum(1)
            equal = f"{(right.argmax(1) == got.argmax(1)).sum()} of {len(ids)} tokens equal"
            print(f"ranks from {first} of {n_used}: KL {kl.mean():.1e}, largest {kl.max():.1e}, {equal}", flush=True)
