"""What is read of a step: all logits, or only as many candidates as the sampler looks at."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace import SamplingParams
from headrace.runner import Runner
from headrace.sampling import Candidates, Sampler
from models.tiny import Tiny, write

BACKENDS = ["reference", "cpu", *(["cuda"] if all(map(importlib.util.find_spec, ("torch", "triton"))) else [])]
PROMPT = list(range(3, 40))
MODEL = Tiny("qwen3moe", "Q8_0", n_layer=1, n_embd=64, head_dim=32, n_expert=4, n_expert_used=2, n_ff_exp=32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("candidates") / "m.gguf", MODEL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_the_greatest_of_the_logits(path: Path, backend: str) -> None:
    """Of a prompt in several windows, of one sequence and of two; recorded anew for each number."""
    with headrace.open(path, n_ctx=128, n_ubatch=16, n_seq_max=3, backend=backend) as engine:
        run, found = engine.runner, []
        for k in (None, 1, 64, None, 1, 40):
            seqs = [engine.cache.sequence() for _ in range(2)]
            rows = [run.prefill(seq, PROMPT[i:], n_candidates=k) for i, seq in enumerate(seqs)]
            rows += [run.decode(seqs, [5, 6], k), run.decode(seqs[:1], [7], k)]
            found.append((k, rows))
            for seq in seqs:
                engine.cache.release(seq)
    for k, rows in found:
        for all_logits, best in zip(found[0][1], rows):
            if k is None:
                np.testing.assert_array_equal(all_logits, best)
                continue
            order = np.argsort(-all_logits, axis=1, kind="stable")[:, :k]
            np.testing.assert_array_equal(best.ids, order)
            np.testing.assert_array_equal(best.logits, np.take_along_axis(all_logits, order, 1))


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.0), SamplingParams(seed=3, temperature=1.5), SamplingParams(seed=3, top_k=0),
    SamplingParams(seed=3, repeat_penalty=1.3),
], ids=["greedy", "default", "no top-k", "penalty"])  # fmt: skip
def test_a_text_is_that_of_all_logits(path: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    read, kinds = Runner._read_logits, set()

    def noted(runner: Runner, n: int, k: int | None) -> object:
        kinds.add(k)
        return read(runner, n, k)

    with headrace.open(path, n_ctx=128, backend="cpu") as engine:
        monkeypatch.setattr(Runner, "_read_logits", noted)
        tokens = [piece.token for piece in engine.generate(PROMPT, 24, params)]
        assert kinds == {params.n_candidates}
        engine.reset()
        sampler, (logits,) = Sampler(params), engine.runner.prefill(engine.sequence, PROMPT)
        for i, token in enumerate(tokens):
            assert not isinstance(logits, Candidates) and sampler.sample(logits, PROMPT + tokens[:i]) == token
            (logits,) = engine.runner.decode([engine.sequence], [token])
