"""Greedy text of whole files on every backend, against llama.cpp and against the reference."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import SamplingParams
from headrace.runner import Runner
from models import llamacpp
from models.tiny import N_VOCAB, Tiny, write

N_PREDICT = 64
PROMPT = [1, 258, 50, 60, 99, 300, 116, 104, 12, 340, 77, 5]
BACKENDS = ["reference", "cpu"]
FILES = [
    Tiny("qwen3moe", "Q4_K_M"),
    Tiny("qwen2moe", "Q8_0"),
    Tiny("llama", "F16", ("experts",)),
    Tiny("llama", "Q4_0", ("rope_freqs", "tied")),
    Tiny("qwen3", "BF16"),
    Tiny("qwen35moe", "MXFP4_MOE", n_layer=4),
    Tiny("qwen35moe", "IQ4_XS", n_layer=4),
]
NOISE = {"F16": 0.05, "BF16": 0.2}
"""Gap between llama.cpp's first and second token below which a backend may choose the other; else NOISE_8BIT."""
NOISE_8BIT = 0.6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("greedy")


@cache
def model(folder: Path, m: Tiny) -> tuple[Path, list[int], Any]:
    path = write(folder / f"{m.name}.gguf", m)
    return path, *llamacpp.greedy(path, PROMPT, N_PREDICT, N_VOCAB)


def generate(path: Path, **config: Any) -> list[int]:
    with headrace.open(path, n_ctx=512, **config) as engine:
        return [piece.token for piece in engine.generate(PROMPT, N_PREDICT, SamplingParams(temperature=0.0))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m", FILES, ids=lambda m: m.name)
def test_continuation_is_llama_cpps_until_a_tie(folder: Path, m: Tiny, backend: str) -> None:
    path, theirs, logprobs = model(folder, m)
    ours = generate(path, backend=backend)
    assert len(ours) == N_PREDICT
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if first is not None:
        second, best = np.sort(logprobs[first])[-2:]
        assert best - second < NOISE.get(m.mix, NOISE_8BIT), f"token {first} differs"
        assert ours[first] in np.argsort(-logprobs[first])[:3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m", FILES, ids=lambda m: m.name)
def test_decoding_agrees_with_prefilling(folder: Path, m: Tiny, backend: str) -> None:
    """Token by token, and the same tokens in one piece: the same choices, ties of rounding aside."""
    path, *_ = model(folder, m)
    with headrace.open(path, n_ctx=512, backend=backend) as engine:
        tokens = [piece.token for piece in engine.generate(PROMPT, N_PREDICT, SamplingParams(temperature=0.0))]
        logits = engine.logits([*PROMPT, *tokens[:-1]], range(len(PROMPT) - 1, len(PROMPT) + N_PREDICT - 1))
    loss = logits.max(axis=1) - logits[np.arange(N_PREDICT), tokens]
    assert loss.max() < (0.05 if backend == "reference" else NOISE_8BIT)
    assert (loss == 0).mean() > 0.9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m", [Tiny("qwen3moe", "Q8_0"), Tiny("qwen35moe", "Q8_0", n_layer=4)], ids=lambda m: m.name)
def test_a_decode_that_was_interrupted_leaves_no_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, m: Tiny, backend: str
) -> None:
    """Ctrl-C after a token's computation, before anybody knows of it: a recurrent state has moved on already."""
    read, n_calls = Runner._read_logits, 0

    def interrupted(runner: Runner, *args: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            raise KeyboardInterrupt
        return read(runner, *args)

    greedy = SamplingParams(temperature=0.0)
    with headrace.open(write(folder / "m.gguf", m), n_ctx=512, backend=backend) as engine:
        monkeypatch.setattr(Runner, "_read_logits", interrupted)
        said: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            said += (piece.token for piece in engine.generate(PROMPT, 20, greedy))
        then = [*PROMPT, *said, 7, 8, 9]
        after = [piece.token for piece in engine.generate(then, 16, greedy)]
        logits = engine.logits([*then, *after[:-1]], range(len(then) - 1, len(then) + 15))
    loss = logits.max(axis=1) - logits[np.arange(16), after]
    assert loss.max() < NOISE_8BIT
