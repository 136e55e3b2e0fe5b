"""The whole engine on the CUDA kernels under Triton's interpreter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import SamplingParams
from headrace.backends.cuda.footprint import scratch_sizes
from models.tiny import Tiny, write

torch = pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
MODEL = Tiny(
    "qwen35moe", "Q8_0", n_layer=4, n_embd=64, head_dim=32, n_expert=5, n_expert_used=2, n_ff_exp=32, n_ff_shexp=32
)
IDS = np.random.default_rng(1).integers(0, 128, 70).tolist()
STREAMED = {"n_cpu_moe": 4, "prefetch_experts": 3, "schedule": "layer"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write(tmp_path_factory.mktemp("cuda") / "m.gguf", MODEL)


def logits(path: Path, **config: Any) -> np.ndarray:
    with headrace.open(path, n_ctx=128, **config) as engine:
        return engine.logits(IDS).astype(np.float64)


def greedy(path: Path, **config: Any) -> list[int]:
    with headrace.open(path, n_ctx=128, **config) as engine:
        return [piece.token for piece in engine.generate(IDS[:4], 2, SamplingParams(temperature=0.0))]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def test_streamed_is_resident_to_the_bit_and_the_reference_within_kl(path: Path) -> None:
    want, got = logits(path, backend="reference"), logits(path, backend="cuda", n_ubatch=64, **STREAMED)
    p, q = log_softmax(want), log_softmax(got)
    kl = (np.exp(p) * (p - q)).sum(1)
    assert kl.max() < 1e-4 and want.std() > 0.5  # 1.4e-5 was seen
    np.testing.assert_array_equal(logits(path, backend="cuda", n_cpu_moe=0), got)


def test_decoding_with_fetched_experts_gives_the_references_text(path: Path) -> None:
    assert greedy(path, backend="cuda", **STREAMED) == greedy(path, backend="reference")


def test_scratch_is_what_was_planned_and_never_grows(path: Path) -> None:
    with headrace.open(path, backend="cuda", n_ctx=128, n_ubatch=70, **STREAMED) as engine:
        ops = engine.device.ops
        planned = scratch_sizes(engine.spec, engine.plan.n_ubatch, 1)
        for n in (1, 70):
            engine.logits(IDS[:n], rows=[0])
        sizes = {name: buffer.numel() for name, buffer in ops.buffers.items()}
        assert {name: sizes[name] for name in planned} == {name: n for name, (n, _) in planned.items()}
        assert not ops.kept and set(sizes) <= {*planned, "glu"}


def test_what_the_cache_keeps_changes_no_bit_and_saves_the_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding fills and reads lines, a later prompt takes them too; the one of five experts that is kept changes."""
    monkeypatch.setattr("headrace.expertcache.INTERVAL", 2)
    found, moved = [], []
    for size in ("", "28KiB"):  # 4 layers of 5 experts of 6,528 bytes
        with headrace.open(path, n_ctx=128, backend="cuda", n_ubatch=64, expert_cache=size, **STREAMED) as engine:
            run, logits = engine.runner, [engine.runner.prefill(engine.sequence, IDS[:5])]
            logits += [run.decode([engine.sequence], [token]) for token in IDS[5:11]]
            engine.reset()
            before = engine.stream.uploaded_bytes
            logits.append(run.prefill(engine.sequence, IDS[:12]))
            found.append(logits)
            moved.append(engine.stream.uploaded_bytes - before)
    cache = engine.stream.cache
    assert engine.plan.n_lines == 1 and cache and cache.n_hits > 0 and cache.saved_bytes > 0
    assert moved[1] < moved[0]
    for without, kept in zip(*found):
        np.testing.assert_array_equal(without, kept)
