"""`headrace verify` on tiny models: what holds passes, a planted difference is found and its layer is named."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backends.reference import ReferenceOps
from headrace.commands import main
from headrace.commands.verify_runs import checks, kl, prompts
from models.tiny import Tiny, write

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
SMALL = {
    "n_layer": 3, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_expert": 4, "n_expert_used": 2,
    "n_ff_exp": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("verify") / "m.gguf", Tiny("qwen3moe", "Q8_0", **SMALL))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("verify") / "m.gguf", Tiny("qwen3moe", "Q8_0", **SMALL | {"n_layer": 2}))


def verify(capsys: pytest.CaptureFixture[str], path: Path, *args: str) -> tuple[int, str]:
    """The exit status and what was printed."""
    status = main(["verify", "-m", str(path), *args])
    return status, capsys.readouterr().out


# settings


def test_few_settings_hold_every_pair_of_values() -> None:
    axes = {"n_cpu_moe": (4, 2, 0), "prefetch_experts": (0, 1, 8), "schedule": ("a", "b"), "n_ubatch": (1, 2)}
    few, every = (checks(axes, {}, every) for every in (False, True))
    assert few[0].setting == every[0].setting == {k: v[0] for k, v in axes.items()}
    assert len(few) < 12 < len(every) == 2 * 3 * 4 + 4

    def pairs(found: list[Any]) -> set[Any]:
        return {(a, b) for c in found for a in c.setting.items() for b in c.setting.items() if a < b}

    assert pairs(few) == pairs(every)
    assert not any("prefetch_experts" in c.setting for c in every if c.setting["n_cpu_moe"] == 0)


def test_other_arithmetic_is_tried_one_by_one() -> None:
    found = checks({"schedule": ("a", "b")}, {"n_ubatch": (8, 4, 2), "repack": ("off", "on")}, False)
    assert [c.setting["schedule"] for c in found] == ["a", "b", "a", "a", "a"]
    assert [(c.setting["n_ubatch"], c.setting["repack"], c.exact) for c in found[2:]] == [
        (4, "off", False), (2, "off", False), (8, "on", False)]  # fmt: skip


def test_prompts_keep_few_rows_of_wide_logits_and_always_the_last() -> None:
    random, equal = prompts(1 << 18, [700], 3)
    assert len(random.ids) == 700 and len(random.rows) == 32 and random.rows[-1] == 699 and len(random.decoded) == 3
    assert len(set(equal.ids)) == 1 and prompts(100, [700], 0)[0].rows == list(range(700))


def test_kl_of_rows() -> None:
    a, b = np.log(np.array([[[0.5, 0.5]], [[0.25, 0.75]]], np.float32))
    np.testing.assert_allclose(kl(a, b), 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-5)
    assert kl(a, a + 7)[0] == pytest.approx(0, abs=1e-7)


# runs


def test_cpu_passes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = verify(
        capsys, path, "--backend", "cpu", "-ub", "128,64", "-p", "150", "-n", "2", "--against", "reference"
    )
    assert status == 0
    assert out.count("the same bits") == 2 and out.count("other arithmetic, KL") == 3 and "none differs" in out
    assert "KL from reference, 150 random tokens: " in out and "greedy tokens equal to reference's: " in out


def test_reference_skips_what_it_lacks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = verify(capsys, path, "--backend", "reference", "-ub", "16", "-t", "1", "-p", "40", "-n", "1")
    assert status == 0 and "skipped: --repack on" in out and "2 settings: none differs, 1 skipped" in out


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_planted_difference_is_found_and_named(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Experts of layer 1 that are a hair off in every second device, for token 20 of a prompt or behind it."""
    n_devices, made, right = [0], ReferenceOps.__init__, ReferenceOps.expert_down

    def init(ops: ReferenceOps) -> None:
        made(ops)
        n_devices[0] += 1
        ops.number = n_devices[0]  # type: ignore[attr-defined]

    def wrong(ops: Any, out: Any, h: Any, routing: Any, down: Any, bias: Any = None) -> None:
        right(ops, out, h, routing, down, bias)
        if ops.number % 2 and ops.number > 2 and down.info.name.startswith("blk.1."):
            n_tokens = len(routing.ids)
            if n_tokens == 1 and phase == "decode":
                out[0, 5] += 1e-4
            elif n_tokens > 1 and phase == "prefill":
                out[20 * routing.ids.shape[1], 5] += 1e-4

    monkeypatch.setattr(ReferenceOps, "__init__", init)
    monkeypatch.setattr(ReferenceOps, "expert_down", wrong)
    options = ("--backend", "reference", "-ub", "64", "-t", "1", "--repack", "off", "-p", "40", "-n", "3")
    status, out = verify(capsys, path, *options)
    assert status == 1 and "1 DIFFER" in out
    assert f"DIFFERS: 40 random {phase}, run 1" in out
    tokens = "1 of 40 tokens, the first is token 20" if phase == "prefill" else "3 of 3 tokens, the first is token 0"
    assert f"first difference: layer 1, step blk.1.ffn ({tokens}), 40 random {phase}, run 1" in out


def test_logits_that_are_no_numbers_are_no_match(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceOps, "expert_down", lambda *args: None)  # what nobody writes is NaN
    status, out = verify(capsys, path, "--backend", "reference", "-ub", "64", "-t", "1", "--repack", "off", "-p", "9")
    assert status == 1 and "no numbers" in out
    assert "first difference: layer 0, step blk.0.ffn (9 of 9 tokens" in out


def test_a_bug_tells_its_setting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ReferenceOps, "expert_down", broken)
    with pytest.raises(ZeroDivisionError) as found:
        main(["verify", "-m", str(path), "--backend", "reference", "-ub", "64", "-p", "9"])
    assert "'schedule': 'ubatch'" in found.value.__notes__[0]


def test_one_setting_proves_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backend", "cpu", "-ub", "64", "-t", "1", "--repack", "off", "--schedule", "layer", "-p", "9"]
    assert main(["verify", "-m", str(path), *options]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert main(["verify", "-m", str(path), "--backend", "null"]) == 2
    assert "computes nothing" in capsys.readouterr().err


@pytest.mark.skipif(not INTERPRETED, reason="needs torch, triton and TRITON_INTERPRET=1")
def test_cuda_streams_the_same_bits_and_a_slot_that_differs_is_named(
    short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--backend", "cuda", "-ncmoe", "2,0", "-ub", "8", "--schedule", "layer", "-p", "9", "-n", "1")
    options += ("--prefetch-experts", "8")
    status, out = verify(capsys, short, *options)
    assert status == 0 and "settings: none differs" in out, out
    assert out.count("other arithmetic, KL") == 2, "experts on the CPU, and shared with it"

    from headrace.backends.cuda.ops import CudaOps

    right = CudaOps.expert_down

    def wrong(ops: Any, out: Any, h: Any, routing: Any, down: Any, bias: Any = None) -> None:
        right(ops, out, h, routing, down, bias)
        if down.info.name.startswith("blk.1.") and len(down.data) > down.info.n_bytes:  # resident
            out[-1, 0] += 1

    monkeypatch.setattr(CudaOps, "expert_down", wrong)
    status, out = verify(capsys, short, *options, "--expert-decode", "gather")
    assert status == 1 and "first difference: layer 1, step blk.1.ffn" in out, out
