"""Architectures: every tensor accounted for, bad files refused in one line, batching and fusing change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import headrace
from headrace.errors import UserError
from headrace.gguf import open_gguf
from headrace.models import ARCHITECTURES, load_program
from headrace.program import Program, arena_bytes
from models import tiny
from models.tiny import Tiny, write

MODELS = [
    Tiny("qwen3moe"),
    Tiny("qwen2moe"),
    Tiny("qwen3", options=("tied",)),
    Tiny("llama", options=("biases", "rope_freqs")),
    Tiny("llama", options=("experts",)),
    Tiny("qwen35moe", n_layer=4, options=("nextn",)),
    Tiny("qwen35", n_layer=5),
]
MODELS += [Tiny(name, n_head_kv=4) for name in ARCHITECTURES if name not in {m.architecture for m in MODELS}]
"""A new architecture joins by itself; the tests below pick models by place."""


def load(path: Path) -> Program:
    return load_program(open_gguf(path))


@pytest.mark.parametrize("m", MODELS, ids=lambda m: m.name)
def test_program_names_every_tensor(tmp_path: Path, m: Tiny) -> None:
    file = open_gguf(write(tmp_path / "m.gguf", m))
    program = load_program(file)
    used = {*program.resident_tensors, *program.expert_tensors}
    skipped = {name for name in file.tensors if m.has("nextn") and name.startswith(f"blk.{m.n_layer}.")}
    assert used == set(file.tensors) - skipped
    assert program.spec.n_layer == m.n_layer and program.spec.n_embd == m.n_embd
    assert sum(step.experts is not None for step in program.steps) == (m.n_layer if tiny.is_moe(m) else 0)
    assert arena_bytes(program, 7, 3, "f32") > 7 * m.n_embd * 4  # a dry run on shapes alone


def test_early_qwen2moe_files_name_one_width(tmp_path: Path) -> None:
    m = Tiny("qwen2moe", n_ff=768, n_ff_shexp=768, n_expert_used=3, n_ff_exp=256)
    late = load(write(tmp_path / "m.gguf", m))
    absent = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    assert load(write(tmp_path / "m.gguf", m, **absent)) == late


def test_recurrent_layers_by_list_or_by_interval(tmp_path: Path) -> None:
    m = Tiny("qwen35moe", n_layer=4)
    by_interval = load(write(tmp_path / "m.gguf", m))
    by_default = load(write(tmp_path / "m.gguf", m, full_attention_interval=None))
    flags = [True, True, True, False]
    by_list = load(write(tmp_path / "m.gguf", m, full_attention_interval=9, attention__recurrent_layers=flags))
    assert by_interval == by_default == by_list
    assert [d is not None for d in by_list.spec.delta_net] == flags


@pytest.mark.parametrize(
    ("keys", "scaling", "factor"),
    [
        ({}, "none", 1.0),
        ({"rope__scaling__factor": 4.0}, "linear", 4.0),
        ({"rope__scale_linear": 2.0}, "linear", 2.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "none", 4.0),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "yarn", 4.0),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 0.0}, "none", 1.0),
    ],
)
def test_rope_scaling_keys(tmp_path: Path, keys: dict[str, Any], scaling: str, factor: float) -> None:
    spec = load(write(tmp_path / "m.gguf", MODELS[0], weights_of(MODELS[0]), **keys)).spec
    assert spec.attention[0] is not None
    rope = spec.attention[0].rope
    assert (rope.scaling, rope.factor, rope.n_ctx_original) == (scaling, factor, MODELS[0].n_ctx)


# bad files

ABSURD: list[tuple[Tiny, dict[str, Any], str]] = [
    (MODELS[0], {"block_count": 0}, "block_count"),
    (MODELS[0], {"block_count": -3}, "block_count"),
    (MODELS[0], {"block_count": 2**31 - 1}, "block_count"),
    (MODELS[0], {"block_count": 2}, "blk.2."),
    (MODELS[0], {"block_count": 4}, "blk.3."),
    (MODELS[0], {"block_count": "three"}, "block_count"),
    (MODELS[0], {"embedding_length": 0}, "embedding_length"),
    (MODELS[0], {"embedding_length": 128}, "token_embd.weight"),
    (MODELS[0], {"context_length": 0}, "context_length"),
    (MODELS[0], {"attention__head_count": 0}, "head_count"),
    (MODELS[0], {"attention__head_count": -4}, "head_count"),
    (MODELS[0], {"attention__head_count": [4, 4, 4]}, "head_count"),
    (MODELS[0], {"attention__head_count_kv": 0}, "head_count_kv"),
    (MODELS[0], {"attention__head_count_kv": 3}, "3 kv heads"),
    (MODELS[0], {"attention__key_length": 0}, "width 0"),
    (MODELS[0], {"attention__key_length": 63}, "width 63"),
    (MODELS[0], {"attention__value_length": 32}, "value_length"),
    (MODELS[0], {"attention__layer_norm_rms_epsilon": 0.0}, "epsilon"),
    (MODELS[0], {"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon"),
    (MODELS[0], {"rope__dimension_count": 66}, "dimension_count"),
    (MODELS[0], {"rope__dimension_count": 31}, "dimension_count"),
    (MODELS[0], {"rope__freq_base": 0.0}, "freq_base"),
    (MODELS[0], {"rope__freq_base": float("inf")}, "freq_base"),
    (MODELS[0], {"rope__scaling__type": "longrope"}, "longrope"),
    (MODELS[0], {"rope__scaling__type": "yarn", "rope__scaling__factor": -2.0}, "factor"),
    (MODELS[0], {"expert_count": 0}, "expert_count"),
    (MODELS[0], {"expert_count": 16}, "ffn_gate_inp"),
    (MODELS[0], {"expert_used_count": 0}, "0 of 8 experts"),
    (MODELS[0], {"expert_used_count": 9}, "9 of 8 experts"),
    (MODELS[0], {"expert_feed_forward_length": 0}, "expert_feed_forward_length"),
    (MODELS[0], {"expert_gating_func": 2}, "expert_gating_func"),
    (MODELS[0], {"expert_group_count": 4}, "expert_group_count"),
    (MODELS[2], {"feed_forward_length": 0}, "feed_forward_length"),
    (MODELS[5], {"nextn_predict_layers": 0}, "blk.4."),
    (MODELS[5], {"nextn_predict_layers": 5}, "next-token"),
    (MODELS[5], {"nextn_predict_layers": -1}, "next-token"),
    (MODELS[5], {"full_attention_interval": 0}, "full_attention_interval"),
    (MODELS[5], {"attention__recurrent_layers": [True, False]}, "recurrent_layers"),
    (MODELS[5], {"ssm__group_count": 0}, "ssm.group_count"),
    (MODELS[5], {"ssm__group_count": 3}, "3 k-heads"),
    (MODELS[5], {"ssm__inner_size": 255}, "inner size"),
    (MODELS[5], {"rope__dimension_sections": [4, 4, 4, 4]}, "dimension_sections"),
    (MODELS[5], {"rope__dimension_sections": None}, "dimension_sections"),
]


@pytest.mark.parametrize(("m", "changes", "names"), ABSURD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_absurd_metadata_is_refused(tmp_path: Path, m: Tiny, changes: dict[str, Any], names: str) -> None:
    check_refused(write(tmp_path / "m.gguf", m, weights_of(m), **changes), names)


REQUIRED = {
    0: ("block_count", "embedding_length", "context_length", "attention.head_count", "expert_count"),
    1: ("expert_used_count", "attention.layer_norm_rms_epsilon"),
    2: ("feed_forward_length",),
    5: ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
}


@pytest.mark.parametrize(("i", "key"), [(i, key) for i, keys in REQUIRED.items() for key in keys])
def test_missing_key_is_named(tmp_path: Path, i: int, key: str) -> None:
    m = MODELS[i]
    check_refused(write(tmp_path / "m.gguf", m, weights_of(m), **{key.replace(".", "__"): None}), key)


def missing(arrays: tiny.Arrays) -> str:
    del arrays["blk.1.attn_k.weight"]
    return "blk.1.attn_k.weight"


def leftover(arrays: tiny.Arrays) -> str:
    arrays["blk.1.attn_sinks.weight"] = np.zeros(4, np.float32), Type.F32
    return "blk.1.attn_sinks.weight"


def wrong_shape(arrays: tiny.Arrays) -> str:
    array, type_ = arrays["blk.2.attn_output.weight"]
    arrays["blk.2.attn_output.weight"] = array[:100], type_
    return "blk.2.attn_output.weight"


def one_expert_per_tensor(arrays: tiny.Arrays) -> str:
    experts, type_ = arrays.pop("blk.0.ffn_down_exps.weight")
    for i, expert in enumerate(experts):
        arrays[f"blk.0.ffn_down.{i}.weight"] = expert, type_
    return "one tensor per expert"


def no_embedding(arrays: tiny.Arrays) -> str:
    del arrays["token_embd.weight"]
    return "token_embd.weight"


@pytest.mark.parametrize("damage", [missing, leftover, wrong_shape, one_expert_per_tensor, no_embedding])
def test_damaged_tensor_directory_is_refused(tmp_path: Path, damage: Callable[[tiny.Arrays], str]) -> None:
    arrays = dict(weights_of(MODELS[0]))
    names = damage(arrays)
    check_refused(write(tmp_path / "m.gguf", MODELS[0], arrays), names)


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    check_refused(write(tmp_path / "m.gguf", Tiny("mamba9")), "'mamba9' is not supported; known: llama, ")


def check_refused(path: Path, names: str) -> None:
    """One line that names the file and the culprit."""
    with pytest.raises(UserError) as error:
        load(path)
    text = str(error.value)
    assert names in text and path.name in text and "\n" not in text and len(text) < 400


CACHE: dict[Tiny, tiny.Arrays] = {}


def weights_of(m: Tiny) -> tiny.Arrays:
    if m not in CACHE:
        CACHE[m] = tiny.weights(m)
    return CACHE[m]


# computation

PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, 128, 41)]


def logits(path: Path, **config: Any) -> np.ndarray[Any, Any]:
    with headrace.open(path, backend="reference", cache_type_k="f32", cache_type_v="f32", **config) as engine:
        return engine.logits(PROMPT)


@pytest.mark.parametrize("m", MODELS, ids=lambda m: m.name)
def test_micro_batches_change_nothing(tmp_path: Path, m: Tiny) -> None:
    path = write(tmp_path / "m.gguf", m)
    whole = logits(path)
    for n_ubatch in (1, 7):
        np.testing.assert_allclose(logits(path, n_ubatch=n_ubatch), whole, atol=1e-3, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen35moe"])
@pytest.mark.parametrize("mix", ["F32", "Q4_K_M"])
def test_fused_gate_and_up_change_nothing(tmp_path: Path, architecture: str, mix: str) -> None:
    m = Tiny(architecture, mix, n_layer=2)
    separate, together = tiny.weights(m), tiny.fused(tiny.weights(m))
    assert len(together) == len(separate) - 2
    a, b = logits(write(tmp_path / "a.gguf", m, separate)), logits(write(tmp_path / "b.gguf", m, together))
    np.testing.assert_allclose(a, b, atol=1e-4, rtol=0)
