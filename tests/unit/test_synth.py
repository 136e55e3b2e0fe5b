"""synth: shapes and type mixes against what public files have, the bytes against the gguf package and llama.cpp."""

import math
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import xllamacpp

from headrace.errors import UserError
from headrace.gguf import open_gguf
from headrace.models import ARCHITECTURES, load_program
from headrace.quants import TYPES
from headrace.synth import SHAPES, find_shape, model, synthesize, vocab, weights, writer
from headrace.synth.mixes import MIXES, use_more_bits

TINY = [name for name in SHAPES if name.startswith("tiny")]

PUBLIC = {
    "Qwen3.6-35B-A3B": ({"F32": 301, "Q4_K": 355, "Q5_K": 30, "Q6_K": 47}, 19.71),
    "Qwen3-30B-A3B": ({"F32": 241, "Q4_K": 289, "Q6_K": 49}, 17.28),
    "gpt-oss-120b": ({"F32": 433, "Q8_0": 146, "MXFP4": 108}, 59.02),
    "Qwen3-8B": ({"F32": 145, "Q4_K": 217, "Q6_K": 37}, 4.68),
    "Llama-3.1-8B": ({"F32": 65, "Q4_K": 193, "Q6_K": 33}, 4.58),
}
"""Tensors by type and GiB of the public Q4_K_M (gpt-oss: MXFP4) files, as loaders' logs show them."""


@pytest.mark.parametrize("name", PUBLIC)
def test_types_and_size_of_public_files(name: str) -> None:
    counts, gib = PUBLIC[name]
    _, tensors, _ = model(find_shape(name))
    assert Counter(t.type for t in tensors) == counts
    assert sum(t.n_bytes for t in tensors) / 2**30 == pytest.approx(gib, abs=0.006)


def test_use_more_bits_takes_half_of_the_layers() -> None:
    assert [i for i in range(16) if use_more_bits(i, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]


def test_rows_that_do_not_fit_a_block_fall_back() -> None:
    """1408 is no multiple of 256: llama.cpp writes Q5_0 for Q4_K and Q8_0 for Q6_K."""
    _, tensors, _ = model(find_shape("Qwen1.5-MoE-A2.7B"))
    assert {t.type for t in tensors if "ffn_down_exps" in t.name} == {"Q5_0", "Q8_0"}


@pytest.mark.parametrize("name", TINY)
def test_file_reads_the_same_everywhere(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    shape = find_shape(name)
    n_bytes = synthesize(path, shape)
    assert path.stat().st_size == n_bytes
    assert list(tmp_path.iterdir()) == [path]
    file, oracle = open_gguf(path), gguf.GGUFReader(path)
    assert {t.name: (*reversed(t.shape.tolist()), t.tensor_type.name, int(t.data_offset)) for t in oracle.tensors} == {
        t.name: (*t.shape, t.type.name, t.offset_bytes) for t in file.tensors.values()
    }
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert list(tokens) == [str(t) for t in oracle.fields["tokenizer.ggml.tokens"].contents()]
    assert len(tokens) == shape.n_vocab
    if shape.arch in ARCHITECTURES:
        load_program(file)
    for t in oracle.tensors:
        raw = np.frombuffer(t.data.tobytes(), np.uint8)
        values = gguf.dequantize(raw, t.tensor_type) if t.tensor_type.name not in ("F32", "F16") else t.data
        assert np.isfinite(values).all(), t.name


@pytest.mark.parametrize("name", TINY)
def test_llama_cpp_runs_it(name: str, tmp_path: Path) -> None:
    """It loads, tokenizes, and its distribution is neither flat nor a single token."""
    path = tmp_path / "tiny.gguf"
    synthesize(path, find_shape(name))
    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.verbosity = str(path), 256, 1, 0
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2
    p.warmup = p.fit_params = p.ui = False
    answer = xllamacpp.Server(p).handle_completions(
        {"prompt": "def f(x):\n    return x + 1\n", "temperature": 0, "n_predict": 12, "n_probs": 2, "ignore_eos": True}
    )
    steps = answer["choices"][0]["logprobs"]["content"]
    best = [step["top_logprobs"][0]["logprob"] for step in steps]
    gaps = [a["logprob"] - b["logprob"] for a, b in (step["top_logprobs"] for step in steps)]
    assert len({step["id"] for step in steps}) > 4
    assert math.log(1 / 1024) + 2 < np.mean(best) < -0.05
    assert min(gaps) > 0


@pytest.mark.parametrize("kind", weights.FILLABLE)
def test_weights_have_the_wanted_magnitude(kind: str) -> None:
    """Mean 0 and the standard deviation asked for (MXFP4: to a power of two), in every quarter of the tensor."""
    std, n_bytes = 0.02, 1 << 20
    pool = weights.pool(kind, str(std), 3)
    n_bytes -= n_bytes % pool.shape[1]
    data = b"".join(weights.tile(pool, weights.flips(kind, 3), n_bytes, np.random.default_rng(1)))
    raw = np.frombuffer(data, np.uint8)
    if kind in ("F32", "F16"):
        values = raw.view("<f4" if kind == "F32" else "<f2").astype(np.float64)
    else:
        values = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1).astype(np.float64)
    for part in np.array_split(values, 4):
        assert abs(part.mean()) < 0.1 * std
        factor = part.std() / std
        assert (0.65 < factor < 1.55) if kind == "MXFP4" else (0.9 < factor < 1.1)


def test_rows_never_repeat() -> None:
    """Also where a tensor is many times the pool; equal rows of the output head would tie."""
    pool = np.frombuffer(np.random.default_rng(0).bytes(97 * 18), np.uint8).reshape(97, 18)
    flip = np.frombuffer(np.random.default_rng(1).bytes(13 * 18), np.uint8).reshape(13, 18)
    data = b"".join(weights.tile(pool, flip, 18 * 2 * 600, np.random.default_rng(2)))
    assert len({data[i : i + 36] for i in range(0, len(data), 36)}) == 600
    kinds = {weights.pool(k, "0.02", 0).shape[0] % weights.flips(k, 0).shape[0] for k in ("Q4_K", "Q6_K", "F32")}
    assert 0 not in kinds


@pytest.mark.parametrize(("n_expert", "n_used", "skew"), [(128, 8, 0.65), (256, 8, 0.6), (64, 8, 0.7), (8, 2, 0.45)])
def test_router_skew_is_the_share_of_the_hot_quarter(n_expert: int, n_used: int, skew: float) -> None:
    shape = find_shape("Qwen3-30B-A3B", n_expert=n_expert, n_expert_used=n_used)
    rows = weights.router(np.random.default_rng(5), shape, skew)
    hidden = np.random.default_rng(6).standard_normal((4096, shape.n_embd))
    top = np.argsort(-(hidden @ rows.T), axis=1)[:, :n_used]
    counts = np.sort(np.bincount(top.ravel(), minlength=n_expert))[::-1]
    assert counts[: n_expert // 4].sum() / counts.sum() == pytest.approx(skew, abs=0.04)
    even = weights.router(np.random.default_rng(5), shape, 0.0)
    top = np.argsort(-(hidden @ even.T), axis=1)[:, :n_used]
    counts = np.sort(np.bincount(top.ravel(), minlength=n_expert))[::-1]
    assert counts[: n_expert // 4].sum() / counts.sum() < 0.4


def test_skew_out_of_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--router-skew"):
        synthesize(tmp_path / "x.gguf", find_shape("tiny-mixtral"), router_skew=0.9)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("n_vocab", [264, 1024, 9500, 151936, 248320])
def test_vocabulary_is_sound(n_vocab: int) -> None:
    tokens, merges = vocab.build_vocab(n_vocab)
    place = {token: i for i, token in enumerate(tokens)}
    assert len(place) == n_vocab == 256 + len(merges) + len(vocab.SPECIAL)
    for i, merge in enumerate(merges):
        left, right = merge.split(" ")
        assert place[left + right] == 256 + i
        assert place[left] < 256 + i and place[right] < 256 + i


def test_same_seed_same_file(tmp_path: Path) -> None:
    shape = find_shape("tiny-qwen3moe")
    data = []
    for i, seed in enumerate((0, 0, 1)):
        synthesize(tmp_path / f"{i}", shape, seed=seed)
        data.append((tmp_path / f"{i}").read_bytes())
    assert data[0] == data[1] != data[2]


def test_router_does_not_depend_on_the_mix(tmp_path: Path) -> None:
    shape = find_shape("tiny-qwen3moe")
    found = []
    for mix in ("Q4_K_M", "BF16"):
        synthesize(tmp_path / "x", shape, mix)
        (t,) = (t for t in gguf.GGUFReader(tmp_path / "x").tensors if t.name == "blk.1.ffn_gate_inp.weight")
        found.append(np.array(t.data))
    assert (found[0] == found[1]).all()


def test_options_change_the_tensors() -> None:
    shape = find_shape("Qwen3.6-35b-a3b", n_layer=2, n_nextn=1, fused_gate_up=True)
    entries, _, _ = model(shape)
    names = {e.name: e.shape for e in entries}
    assert names["blk.1.ffn_gate_up_exps.weight"] == (256, 1024, 2048)
    assert "blk.2.nextn.eh_proj.weight" in names and "blk.2.attn_q.weight" in names
    assert not any(name.startswith("blk.3.") for name in names)


def test_bad_requests_are_one_line() -> None:
    with pytest.raises(UserError, match="known: Qwen3"):
        find_shape("qwen9")
    with pytest.raises(UserError, match="Q4_K_M"):
        model(find_shape("tiny-llama"), "Q9_Z")
    with pytest.raises(UserError, match="n_layer"):
        find_shape("tiny-llama", n_layer=0)
    with pytest.raises(UserError, match="experts"):
        find_shape("tiny-qwen3moe", n_expert_used=99)


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_makes_a_file(mix: str, tmp_path: Path) -> None:
    synthesize(tmp_path / "x", find_shape("tiny-qwen3moe", n_layer=1), mix)
    assert open_gguf(tmp_path / "x").metadata["general.file_type"] == MIXES[mix].file_type


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken(tensor: writer.Tensor) -> list[memoryview]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        writer.save(tmp_path / "x", {}, [writer.Tensor("a", (32,), "F32")], broken)
    assert not list(tmp_path.iterdir())


def test_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the disk has"):
        writer.save(tmp_path / "x", {}, [writer.Tensor("a", (2**50,), "F32")], lambda t: [])
    with pytest.raises(UserError, match="no folder"):
        writer.save(tmp_path / "none" / "x", {}, [], lambda t: [])


def test_fillable_types_are_known() -> None:
    assert set(weights.FILLABLE) <= set(TYPES)
