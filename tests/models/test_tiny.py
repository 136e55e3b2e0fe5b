"""The tiny models can show a bug: routing and attention are far from uniform, every expert is used."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from models.tiny import Tiny, write


class Recorder:
    """An op table that passes everything on and keeps what the router and the attention saw."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.gates: list[Any] = []
        self.ids: list[Any] = []
        self.peaks: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def route(self, out: Any, logits: Any, spec: Any, *rest: Any) -> None:
        self.ops.route(out, logits, spec, *rest)
        self.gates.append(softmax(np.array(logits)))
        self.ids.append(np.array(out.ids))

    def attention(self, out: Any, q: Any, cache: Any, state: Any, spec: Any, *rest: Any) -> None:
        """Keeps the greatest weight of the last token in each head."""
        self.ops.attention(out, q, cache, state, spec, *rest)
        p = np.arange(int(state.positions[-1]) + 1)
        k = np.array(cache.k)[state.block_table[0, p // state.page] * state.page + p % state.page]
        for head in range(spec.n_head):
            scores = k[:, head // (spec.n_head // spec.n_head_kv)].astype(np.float64) @ q[-1, head] * spec.scale
            self.peaks.append(softmax(scores).max())


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("mix", ["F32", "Q4_K_M"])
@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen2moe", "qwen35moe"])
def test_routing_and_attention_are_not_uniform(tmp_path: Path, architecture: str, mix: str) -> None:
    m = Tiny(architecture, mix, n_layer=4)
    ids = np.random.default_rng(1).integers(0, 128, 64).tolist()
    with headrace.open(write(tmp_path / "m.gguf", m), backend="reference") as engine:
        seen = engine.device.ops = Recorder(engine.device.ops)
        engine.logits(ids, rows=[63])
    for gates, chosen in zip(seen.gates, seen.ids):
        entropy = -(gates * np.log(gates + 1e-30)).sum(axis=1)
        assert entropy.mean() < 0.7 * np.log(m.n_expert)
        assert gates.max(axis=1).std() > 0.05, "the first choice's share hardly varies"
        counts = np.bincount(chosen.ravel(), minlength=m.n_expert)
        assert (counts > 0).all() and counts.max() < 0.9 * len(ids)
    assert np.mean(seen.peaks) > 5 / len(ids)
