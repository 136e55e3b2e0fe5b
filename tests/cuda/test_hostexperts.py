"""Experts shared between GPU and CPU by rank: the kernels on Triton's interpreter, the CPU's part at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.backends import open_device
from headrace.errors import UserError
from headrace.spec import MoeSpec
from models.tiny import Tiny, write
from ops.cases import Lab, experts_case

torch = pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")

from headrace.backends.cuda.hostexperts import cpu_gbps  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
MODEL = Tiny(
    "qwen3moe",
    "Q8_0",
    n_layer=2,
    n_embd=64,
    n_head=2,
    n_head_kv=1,
    head_dim=32,
    n_expert=5,
    n_expert_used=3,
    n_ff_exp=32,
)


def summed(device: Any, t: int, **options: Any) -> np.ndarray:
    """What the experts add to the stream of t tokens, 4 of 6 experts each."""
    lab = Lab(device, 7, decode=True)
    return experts_case(lab, "Q4_K", t, f=32, used=4, n_expert=6, gathered=True, **options)[-1]


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize(("first", "options"), [(0, {}), (1, {"fused": True}), (3, {}), (4, {})])
def test_each_split_against_the_reference(first: int, options: dict[str, bool], t: int) -> None:
    device = open_device("cuda")
    device.split_experts(first, 2)
    right, got = summed(open_device("reference"), t, **options), summed(device, t, **options)
    device.close()
    error = np.sqrt(np.mean((right - got) ** 2) / np.mean(right**2))
    assert error < (0.03 if first < 4 else 2e-3)  # int8 activations where the CPU takes part, else float16


def test_layers_on_the_gpu_are_its_own() -> None:
    """The same bits as without a CPU, which has no part in experts that do not lie in host memory."""
    alone, device = open_device("cuda"), open_device("cuda")
    device.split_experts(0, 1)
    results = [experts_case(Lab(d, 3, decode=True), "Q8_0", 2, f=32)[-1] for d in (alone, device)]
    device.close()
    np.testing.assert_array_equal(*results)


def test_biases_are_refused() -> None:
    device = open_device("cuda")
    device.split_experts(0, 1)
    with pytest.raises(UserError, match="--expert-decode gather"):
        summed(device, 1, bias=True)
    device.close()


def test_a_layer_in_two_places_is_refused_by_cpu() -> None:
    device = open_device("cuda")
    device.split_experts(0, 1)
    lab = Lab(device, 7, decode=True)
    r, h = lab.routing(1, MoeSpec(4, 2, 32, 1e-6)), lab.out(2, 32)
    gate, up = (lab.weight("Q8_0", 4, 32, 64, gathered=True) for _ in range(2))
    lab.ops.expert_glu(h, lab.acts(1, 64), r, gate, up, "silu")
    with pytest.raises(UserError, match="keep them together"):
        lab.ops.expert_down(lab.out(2, 64), h, r, lab.weight("Q8_0", 4, 64, 32))
    device.close()


def test_a_cpu_that_does_not_answer_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device("cuda")
    device.split_experts(1, 1)
    device.check()
    monkeypatch.setattr("headrace.backends.cuda.hostexperts.MOST_TURNS", 5)
    monkeypatch.setattr(device.host_experts, "answer", lambda program: None)
    for _ in range(2):
        summed(device, 1)
        with pytest.raises(UserError, match="did not answer"):
            device.check()
    device.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write(tmp_path_factory.mktemp("split") / "m.gguf", MODEL)


def decoded(path: Path, **config: Any) -> np.ndarray:
    """Log-probabilities behind a prompt, one decoded token, and one of each of two sequences."""
    with headrace.open(path, backend="cuda", n_ctx=64, n_seq_max=2, n_cpu_moe=1, **config) as engine:
        found = [engine.runner.prefill(engine.sequence, [5, 6, 7])[0]]
        other = engine.cache.fork(engine.sequence)
        found += list(engine.runner.decode([engine.sequence], [30]))
        found += list(engine.runner.decode([engine.sequence, other], [32, 50]))
    x = np.array(found, np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@pytest.fixture(scope="module")
def gathered(path: Path) -> np.ndarray:
    return decoded(path)


@pytest.mark.parametrize("config", [
    {"expert_decode": "cpu"}, {"expert_decode": "split", "split_rank": 1}, {"expert_decode": "split"},
], ids=["cpu", "split 1", "split"])  # fmt: skip
def test_an_engine_stays_within_the_kl_of_gather(path: Path, gathered: np.ndarray, config: dict[str, Any]) -> None:
    got = decoded(path, **config)
    np.testing.assert_array_equal(gathered[0], got[0])  # the prompt is the GPU's
    kl = (np.exp(gathered) * (gathered - got)).sum(1)
    assert 0 < kl[1:].max() < 2e-3 and gathered.std() > 0.5


def test_the_cpu_needs_no_page_locked_memory(path: Path, gathered: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be gathered a decode step uploads nothing all the same."""
    from headrace.backends.cuda.device import CudaDevice

    monkeypatch.setattr(CudaDevice, "gather_view", lambda *args: None)
    with headrace.open(path, backend="cuda", n_ctx=64, n_cpu_moe=1, expert_decode="cpu") as engine:
        (logits,) = engine.runner.prefill(engine.sequence, [5, 6, 7])
        n = engine.stream.uploaded_bytes
        assert n and engine.stream.decodes and not engine.stream.gathers
        (logits,) = engine.runner.decode([engine.sequence], [30])
        assert engine.stream.uploaded_bytes == n
    x = logits.astype(np.float64) - logits.max()
    q = x - np.log(np.exp(x).sum())
    assert 0 < (np.exp(gathered[1]) * (gathered[1] - q)).sum() < 2e-3


def test_the_cpus_rate_is_measured() -> None:
    assert 0.05 < cpu_gbps(1, n_runs=3) < 1000
