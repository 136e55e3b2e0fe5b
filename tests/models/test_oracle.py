"""llama.cpp as the oracle, on tiny files of every architecture and many tensor types.

Two comparisons a file, both along llama.cpp's greedy continuation, so that one flipped token does not hide the rest.
First the same weights decoded to float32: only the order of sums differs, so all tokens are equal and log-probabilities
agree to TIGHT. Then the file itself: llama.cpp rounds activations in front of quantised weights to 8 bits (in front of
F16 and BF16 to 16), the reference does not. After the first comparison the difference is llama.cpp's rounding noise:
its mean is bounded for each type, and a token may differ only where llama.cpp's first and second are closer than that.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace
from headrace.models import ARCHITECTURES
from headrace.models.metadata import Metadata
from models import tiny
from models.llamacpp import greedy
from models.tiny import N_VOCAB, Tiny, write

N_PREDICT = 64
PROMPT = [1, 258, 50, 60, 99, 300, 116, 104, 12, 340, 77, 5]
TIGHT = 2e-4
"""Largest difference of a log-probability in llama.cpp's top 10 between float32 engines; the largest seen is 4e-5."""
NOISE = {"F16": 0.01, "BF16": 0.05, "Q8_0": 0.2}
"""Bound of the mean difference by mix, for logits of deviation 3; else NOISE_OTHER. docs/numerics.md has the table."""
NOISE_OTHER = 0.4


@dataclass(frozen=True)
class Comparison:
    """Our logits along llama.cpp's continuation: per position, whether the greedy token is the same, llama.cpp's gap
    between its first and second, and the largest difference of a log-probability among llama.cpp's 10 likeliest."""

    same: NDArray[np.bool_]
    gap: NDArray[np.float64]
    difference: NDArray[np.float64]
    kl: NDArray[np.float64]


def compare(path: Path, prompt: Sequence[int] = PROMPT, n_predict: int = N_PREDICT, **config: Any) -> Comparison:
    tokens, theirs = greedy(path, prompt, n_predict, N_VOCAB)
    assert len(tokens) == n_predict and np.isfinite(theirs).all()
    with headrace.open(path, cache_type_k="f32", cache_type_v="f32", n_ctx=512, **config) as engine:
        rows = range(len(prompt) - 1, len(prompt) - 1 + n_predict)
        logits = engine.logits([*prompt, *tokens[:-1]], rows).astype(np.float64)
    ours = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    top = np.argsort(-theirs, axis=1)[:, :10]
    pick = np.take_along_axis
    return Comparison(
        same=ours.argmax(axis=1) == tokens,
        gap=pick(theirs, top[:, :1], 1)[:, 0] - pick(theirs, top[:, 1:2], 1)[:, 0],
        difference=abs(pick(ours, top, 1) - pick(theirs, top, 1)).max(axis=1),
        kl=(np.exp(theirs) * (theirs - ours)).sum(axis=1),
    )


FILES = [
    Tiny("qwen3moe", "Q4_K_M"),
    Tiny("qwen3moe", "MXFP4_MOE", seed=1),
    Tiny("qwen2moe", "Q8_0"),
    Tiny("qwen3", "BF16", ("linear",)),
    Tiny("qwen3", "Q5_K", ("tied",)),
    Tiny("llama", "F16", ("experts",)),
    Tiny("llama", "Q4_0", ("rope_freqs", "tied")),
    Tiny("llama", "Q6_K", ("biases", "yarn")),
    Tiny("qwen35moe", "Q4_K_M", n_layer=4),
    Tiny("qwen35moe", "IQ4_XS", ("nextn", "fused"), n_layer=4),
    Tiny("qwen35moe", "F16", n_layer=4),
    Tiny("qwen35", "Q8_0", n_layer=5),
]
FILES += [
    Tiny(name, "Q4_K_M", n_head_kv=4, seed=2) for name in ARCHITECTURES if name not in {m.architecture for m in FILES}
]


@pytest.mark.parametrize("m", FILES, ids=lambda m: m.name)
def test_decoded_weights_agree_tightly(tmp_path: Path, m: Tiny) -> None:
    found = compare(write(tmp_path / "m.gguf", m, tiny.as_f32(tiny.weights(m))), backend="reference")
    assert found.difference.max() < TIGHT
    assert (found.same | (found.gap < 2 * TIGHT)).all()


@pytest.mark.parametrize("m", FILES, ids=lambda m: m.name)
def test_file_agrees_within_llama_cpps_rounding(tmp_path: Path, m: Tiny) -> None:
    found = compare(write(tmp_path / "m.gguf", m), backend="reference")
    mean = found.difference.mean()
    assert mean < NOISE.get(m.mix, NOISE_OTHER)
    assert (found.same | (found.gap < 2 * mean)).all(), f"gaps {found.gap[~found.same]} against noise of {mean}"


TYPES = [Tiny("qwen3moe", type_, n_layer=2) for type_ in sorted((*tiny.SCALE_FIELDS, *tiny.ENCODED))]


@pytest.mark.parametrize("m", TYPES, ids=lambda m: m.mix)
def test_every_type_agrees_within_rounding(tmp_path: Path, m: Tiny) -> None:
    found = compare(write(tmp_path / "m.gguf", m), n_predict=16, backend="reference")
    assert found.difference.mean() < NOISE_OTHER and found.same.sum() >= 12


@pytest.mark.parametrize("m", [Tiny("qwen3moe", options=("yarn",)), Tiny("qwen35moe", n_layer=4)], ids=lambda m: m.name)
def test_long_prompt_agrees_tightly(tmp_path: Path, m: Tiny) -> None:
    """Several micro-batches and cache pages; YaRN far beyond the original context."""
    prompt = np.random.default_rng(2).integers(0, 128, 430).tolist()
    found = compare(write(tmp_path / "m.gguf", m), prompt, 16, backend="reference", n_ubatch=100)
    assert found.difference.max() < TIGHT and found.same.all()


WRONG = [
    (Tiny("qwen3moe"), "moe", {"norm_weights": False}),
    (Tiny("qwen2moe"), "moe", {"norm_weights": True}),
    (Tiny("qwen3moe"), "moe", {"eps": 5e-4}),
    (Tiny("llama"), "rope", {"interleaved": False}),
    (Tiny("llama", options=("yarn",)), "rope", {"beta_fast": 24.0}),
    (Tiny("qwen3", options=("linear",)), "rope", {"factor": 2.49}),
    (Tiny("qwen35moe", n_layer=4), "rope", {"n_rot": 30}),
]


@pytest.mark.parametrize(("m", "part", "change"), WRONG, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_a_wrong_reading_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m: Tiny, part: str, change: dict[str, Any]
) -> None:
    """The bound of the float32 comparison is tight enough, and the weights are such that these matter."""
    right = getattr(Metadata, part)
    monkeypatch.setattr(Metadata, part, lambda *args, **kw: replace(right(*args, **kw), **change))
    assert compare(write(tmp_path / "m.gguf", m), n_predict=8, backend="reference").difference.max() > 5 * TIGHT


def main() -> None:
    """Prints the tables of docs/numerics.md: `PYTHONPATH=tests python tests/models/test_oracle.py`."""
    print("| file | float32: equal of 64 | largest, mean difference | own types: equal of 64 | gap where not ", end="")
    print("| mean, 90 %, largest difference | mean KL |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for m in FILES:
            path, weights = Path(folder) / "m.gguf", tiny.weights(m)
            a = compare(write(path, m, tiny.as_f32(weights)), backend="reference")
            b = compare(write(path, m, weights), backend="reference")
            gaps = ", ".join(f"{gap:.3f}" for gap in b.gap[~b.same])
            print(
                f"| {m.name} | {a.same.sum()} | {a.difference.max():.0e}, {a.difference.mean():.0e} | {b.same.sum()} "
                f"| {gaps} | {noise(b)} |"
            )
        print("\n| type | mean, 90 %, largest difference | mean KL |\n|---|---|---|")
        for m in TYPES:
            print(f"| {m.mix} | {noise(compare(write(path, m), backend='reference'))} |")


def noise(c: Comparison) -> str:
    d = c.difference
    return f"{d.mean():.3f}, {np.quantile(d, 0.9):.3f}, {d.max():.3f} | {c.kl.mean():.1e}"


if __name__ == "__main__":
    main()
