"""The streaming contract on model files, through the whole engine and the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace
from headrace.commands import main
from headrace.engine import Engine, open_engine
from headrace.runner import Runner
from models.tiny import Tiny, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("null") / "m.gguf", Tiny("qwen3moe", "Q4_K_M", n_layer=5))


def opened(model: Path, **config: object) -> Engine:
    return open_engine(model, backend="null", **({"n_ctx": 512, "n_cpu_moe": 99} | config))


def test_a_pass_has_no_hazards_and_moves_each_byte_once_per_window(model: Path) -> None:
    with opened(model, n_ubatch=32) as engine:
        engine.logits(list(range(200)), [-1])
        expected = sum(engine.file.tensors[name].n_bytes for name in engine.program.expert_tensors)
        assert engine.plan.schedule == "layer" and engine.device.link_bytes == expected
        assert engine.device.hazards() == []
    with opened(model, n_ubatch=32, schedule="ubatch") as engine:
        engine.logits(list(range(200)), [-1])
        assert engine.device.link_bytes == 7 * expected and engine.device.hazards() == []


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.sampled_from([-1, 0, 1, 2, 3, 5, 8]), n_cpu_moe=st.integers(0, 5), n_ubatch=st.sampled_from([7, 16, 64]),
    schedule=st.sampled_from(["layer", "ubatch"]), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    data=st.data(),
)  # fmt: skip
def test_no_hazards_whatever_the_settings(
    model: Path, slots: int, n_cpu_moe: int, n_ubatch: int, schedule: str, lengths: list[int], data: st.DataObject
) -> None:
    with opened(
        model, prefetch_experts=slots, n_cpu_moe=n_cpu_moe, n_ubatch=n_ubatch, schedule=schedule
    ) as engine:  # fmt: skip
        for n in lengths:  # prompts and single tokens in any order
            if data.draw(st.booleans()) and engine.sequence.n_past:
                engine.runner.decode([engine.sequence], [1])
            else:
                engine.runner.prefill(engine.sequence, [1] * n, [n - 1])
        assert engine.device.hazards() == []
        assert engine.device.allocated_bytes == engine.plan.device_bytes


@pytest.mark.parametrize("tiny", [
    Tiny("qwen35moe", n_layer=5), Tiny("qwen35moe", "Q8_0", ("nextn",), n_layer=4), Tiny("qwen2moe"), Tiny("olmoe"),
    Tiny("qwen3moe", "F32", ("fused",)), Tiny("llama", "Q8_0", ("experts",)), Tiny("qwen3"),
], ids=lambda m: m.name)  # fmt: skip
def test_architectures_end_to_end(tiny: Tiny, tmp_path: Path) -> None:
    """Prompt, tokens, a continued prompt with its snapshots; memory to the byte. Zeros are logits too."""
    path = write(tmp_path / "m.gguf", tiny)
    with headrace.open(path, backend="null", n_ubatch=32, n_ctx=200, n_cpu_moe=99) as engine:
        for prompt in ([5] * 90, [5] * 100, [5] * 40):
            assert len(list(engine.generate(prompt, n_predict=4))) == 4
        assert (engine.logits([1, 2, 3], [0, 2]) == 0).all()
        device = engine.device
        assert device.hazards() == [] and device.allocated_bytes == engine.plan.device_bytes
        assert device.link_bytes == engine.stream.uploaded_bytes > 0 or not engine.spec.is_moe
        assert engine.runner.arena.peak_bytes <= engine.plan.arena_bytes


def test_command_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A null device is a backend like others: `run` writes the text of token 0."""
    assert main(["run", "-m", str(model), "--backend", "null", "-p", "abc", "-n", "5", "--temp", "0"]) == 0
    assert capsys.readouterr().out == "\0\0\0\0\0\n"


def test_a_failing_step_frees_its_slots(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model, n_ubatch=32) as engine:
        calls: Iterator[int] = iter(range(10**6))
        original = Runner._steps

        def failing(self: Runner, *args: object) -> None:
            if next(calls) == 7:
                raise RuntimeError("injected")
            original(self, *args)

        monkeypatch.setattr(Runner, "_steps", failing)
        with pytest.raises(RuntimeError):
            engine.runner.prefill(engine.sequence, [1] * 90)
        assert engine.sequence.n_past == 0
        engine.runner.prefill(engine.sequence, [1] * 90)
        assert engine.device.hazards() == [] and engine.sequence.n_past == 90
