"""Writes tiny GGUF models with random weights: any supported architecture x any mix of tensor types.

The `gguf` package does the writing, so the files also test our reader, and llama.cpp loads them. Weights are scaled
so that a bug shows - every branch changes the stream by a third or more, router and attention are far from uniform -
and yet rounding is not amplified from layer to layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quants
from numpy.typing import NDArray

N_VOCAB = 384
SILENT = [*range(128, 256), N_VOCAB - 1]
"""Tokens whose logit is 0, never the greatest: the end, and bytes of which a lone one is no text (llama.cpp's server
reports the log-probabilities of several such tokens as one)."""
Tensors = Iterator[tuple[str, tuple[int, ...], float]]
"""(name, shape, gain): a gain is the standard deviation times the root of the row width."""

SCALE_FIELDS = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
}  # fmt: skip
"""Offsets of the float16 scale (and minimum) in a block, for the types that the `gguf` package cannot encode."""

ENCODED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")
"""The types that it can."""
MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Middle of the quants where a minimum is subtracted."""

MIXES: dict[str, Callable[[str], str]] = {
    "Q4_K_M": lambda name: "Q6_K" if any(s in name for s in ("attn_v", "ffn_down", "output.w")) else "Q4_K",
    "MXFP4_MOE": lambda name: "MXFP4" if "_exps" in name else "Q8_0",
    "IQ4_XS": lambda name: "Q6_K" if name == "output.weight" else "IQ4_XS",
}
"""Tensor types by tensor name, like the public files' mixes; any other name of a mix is one type for all."""


@dataclass(frozen=True)
class Tiny:
    """One model file: `options` names what is built beyond the plain architecture (see the builders below)."""

    architecture: str
    mix: str = "F32"
    options: tuple[str, ...] = ()
    seed: int = 0
    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 512
    n_expert: int = 8
    n_expert_used: int = 3
    n_ff_exp: int = 256
    n_ff_shexp: int = 256
    n_ctx: int = 512

    @property
    def name(self) -> str:
        return "-".join((self.architecture, self.mix, *self.options))

    def has(self, option: str) -> bool:
        return option in self.options


# metadata


def metadata(m: Tiny) -> dict[str, Any]:
    """Every key that llama.cpp and headrace need, under its full name."""
    keys: dict[str, Any] = {
        "context_length": m.n_ctx, "embedding_length": m.n_embd, "block_count": m.n_layer,
        "feed_forward_length": m.n_ff, "attention.head_count": m.n_head, "attention.head_count_kv": m.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-3, "rope.freq_base": 10000.0,
    }  # fmt: skip
    if m.architecture.startswith("qwen3"):
        keys |= {"attention.key_length": m.head_dim, "attention.value_length": m.head_dim}
    if is_moe(m):
        keys |= {"expert_count": m.n_expert, "expert_used_count": m.n_expert_used}
        if m.architecture in ("llama", "olmoe"):
            keys |= {"feed_forward_length": m.n_ff_exp}
        else:
            keys |= {"expert_feed_forward_length": m.n_ff_exp}
    if m.architecture in ("qwen2moe", "qwen35moe"):
        keys |= {"expert_shared_feed_forward_length": m.n_ff_shexp}
    if m.architecture.startswith("qwen35"):
        n_rot = m.head_dim // 2
        keys |= {
            "rope.dimension_count": n_rot, "rope.dimension_sections": [n_rot // 6 + 1, n_rot // 6, n_rot // 6, 0],
            "ssm.conv_kernel": 4, "ssm.state_size": 64, "ssm.group_count": 2, "ssm.time_step_rank": 4,
            "ssm.inner_size": 256, "full_attention_interval": 4,
        }  # fmt: skip
    if m.has("yarn"):
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 4096}
    if m.has("linear"):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
    if m.has("nextn"):
        keys |= {"nextn_predict_layers": 1, "block_count": m.n_layer + 1}
    return {"general.name": m.name} | {f"{m.architecture}.{k}": v for k, v in keys.items()}


def is_moe(m: Tiny) -> bool:
    return m.architecture.endswith("moe") or m.has("experts")


def vocabulary(architecture: str) -> dict[str, Any]:
    """A byte-level BPE vocabulary: 256 bytes, two merges, and words out of reach; the last token ends a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) if b in printable else chr(256 + [c for c in range(256) if c not in printable].index(b))
               for b in range(256)]  # fmt: skip
    tokens = [*letters, "th", "the", *(f"w{i}" for i in range(N_VOCAB - 259)), "<end>"]
    pre = {"llama": "llama-bpe", "olmoe": "olmo"}.get(architecture, "qwen2")
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (N_VOCAB - 1) + [3],
        "tokenizer.ggml.merges": ["t h", "th e"], "tokenizer.ggml.eos_token_id": N_VOCAB - 1,
        "tokenizer.ggml.bos_token_id": N_VOCAB - 1, "tokenizer.ggml.padding_token_id": N_VOCAB - 1,
        "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


# tensors


def tensors(m: Tiny) -> Tensors:
    yield "token_embd.weight", (N_VOCAB, m.n_embd), 3 if m.has("tied") else m.n_embd**0.5
    for layer in range(m.n_layer + m.has("nextn")):
        b = f"blk.{layer}."
        yield b + "attn_norm.weight", (m.n_embd,), 0
        if m.architecture.startswith("qwen35") and (layer + 1) % 4 and layer < m.n_layer:
            yield from delta_net(m, b)
        else:
            yield from attention(m, b)
        norm = "post_attention_norm" if m.architecture.startswith("qwen35") else "ffn_norm"
        yield f"{b}{norm}.weight", (m.n_embd,), 0
        yield from (moe(m, b) if is_moe(m) else dense(m, b))
        if layer >= m.n_layer:
            yield b + "nextn.eh_proj.weight", (m.n_embd, 2 * m.n_embd), 1
            yield b + "nextn.enorm.weight", (m.n_embd,), 0
            yield b + "nextn.hnorm.weight", (m.n_embd,), 0
    yield "output_norm.weight", (m.n_embd,), 0
    if m.has("rope_freqs"):
        yield "rope_freqs.weight", (m.head_dim // 2,), 0
    if not m.has("tied"):
        yield "output.weight", (N_VOCAB, m.n_embd), 3


def attention(m: Tiny, b: str) -> Tensors:
    q, kv = m.n_head * m.head_dim, m.n_head_kv * m.head_dim
    qwen3 = m.architecture.startswith("qwen3")
    yield b + "attn_q.weight", (q * (1 + m.architecture.startswith("qwen35")), m.n_embd), 1.5
    yield b + "attn_k.weight", (kv, m.n_embd), 1.5
    yield b + "attn_v.weight", (kv, m.n_embd), 1
    yield b + "attn_output.weight", (m.n_embd, q), 0.7
    if qwen3 or m.architecture == "olmoe":
        yield b + "attn_q_norm.weight", (m.head_dim if qwen3 else q,), 0
        yield b + "attn_k_norm.weight", (m.head_dim if qwen3 else kv,), 0
    if m.architecture == "qwen2moe" or m.has("biases"):
        yield from ((b + f"attn_{x}.bias", (n,), 1) for x, n in (("q", q), ("k", kv), ("v", kv)))
    if m.has("biases"):
        yield b + "attn_output.bias", (m.n_embd,), 1


def delta_net(m: Tiny, b: str) -> Tensors:
    """2 k-heads and 4 v-heads of width 64."""
    yield b + "attn_qkv.weight", (512, m.n_embd), 1
    yield b + "attn_gate.weight", (256, m.n_embd), 1
    yield b + "ssm_conv1d.weight", (512, 4), 1
    yield b + "ssm_alpha.weight", (4, m.n_embd), 1
    yield b + "ssm_beta.weight", (4, m.n_embd), 1.5
    yield b + "ssm_dt.bias", (4,), 1
    yield b + "ssm_a", (4,), 0
    yield b + "ssm_norm.weight", (64,), 0
    yield b + "ssm_out.weight", (m.n_embd, 256), 0.7


def dense(m: Tiny, b: str) -> Tensors:
    for name, shape in (("gate", (m.n_ff, m.n_embd)), ("up", (m.n_ff, m.n_embd)), ("down", (m.n_embd, m.n_ff))):
        yield f"{b}ffn_{name}.weight", shape, 1
        if m.has("biases"):
            yield f"{b}ffn_{name}.bias", shape[:1], 1


def moe(m: Tiny, b: str) -> Tensors:
    e, f, d = m.n_expert, m.n_ff_exp, m.n_embd
    yield b + "ffn_gate_inp.weight", (e, d), 3
    yield b + "ffn_gate_exps.weight", (e, f, d), 1
    yield b + "ffn_up_exps.weight", (e, f, d), 1
    yield b + "ffn_down_exps.weight", (e, d, f), 1
    if m.architecture in ("qwen2moe", "qwen35moe"):
        yield b + "ffn_gate_shexp.weight", (m.n_ff_shexp, d), 1
        yield b + "ffn_up_shexp.weight", (m.n_ff_shexp, d), 1
        yield b + "ffn_down_shexp.weight", (d, m.n_ff_shexp), 1
        yield b + "ffn_gate_inp_shexp.weight", (d,), 1


# values


def tensor_type(mix: str, name: str, shape: tuple[int, ...]) -> Type:
    if len(shape) == 1 or "ffn_gate_inp" in name or "conv1d" in name:
        return Type.F32
    return Type[MIXES.get(mix, lambda _: mix)(name)]


def small(name: str, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Vectors that are no matrices: norms near 1, frequency factors, decay rates, biases."""
    if name.endswith("ssm_a"):
        return -np.exp(rng.uniform(-1.0, 1.5, n))
    if name == "rope_freqs.weight":
        return np.linspace(1.0, 8.0, n)
    if name.endswith("norm.weight"):
        return rng.uniform(0.6, 1.4, n) * (1.6 if "_q_norm" in name else 1.0)
    return rng.normal(0, 0.5, n) - (1.5 if "ssm_dt" in name else 0.0)


def encoded(rng: np.random.Generator, shape: tuple[int, ...], std: float, type_: Type) -> NDArray[Any]:
    """Random weights as the file holds them: real encodings where the `gguf` package has one, else valid random blocks
    whose scale fields are set for the wanted deviation."""
    if type_.name not in SCALE_FIELDS:
        values = rng.normal(0, std, shape).astype(np.float32)
        return values.astype(np.float16) if type_ == Type.F16 else quants.quantize(values, type_)
    n_elements, n_bytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // n_elements, n_bytes), np.uint8)
    if type_.name in ("Q4_K", "Q5_K"):  # the 8 minima equal the 8 scales
        blocks[..., 8:12], blocks[..., 12:16] = blocks[..., 4:8], (blocks[..., 12:16] & 15) * 17
    elif type_.name == "Q2_K":
        blocks[..., :16] = (blocks[..., :16] & 15) * 17
    raw = blocks.reshape(*shape[:-1], -1)
    scales = np.array([1.0, MIDDLE.get(type_.name, 0.0)], np.float16)
    set_scales(blocks, type_, scales)
    set_scales(blocks, type_, scales * (std / quants.dequantize(raw, type_).std()))
    return raw


def set_scales(blocks: NDArray[np.uint8], type_: Type, scales: NDArray[Any]) -> None:
    for offset, value in zip(SCALE_FIELDS[type_.name], scales.astype(np.float16)):
        blocks[..., offset : offset + 2] = np.frombuffer(value.tobytes(), np.uint8)


Arrays = dict[str, tuple[NDArray[Any], Type]]
"""What a file holds of each tensor: float32 and 16-bit values, or the bytes of its rows."""


def weights(m: Tiny) -> Arrays:
    rng = np.random.default_rng(m.seed)
    arrays: Arrays = {}
    for name, shape, gain in tensors(m):
        type_ = tensor_type(m.mix, name, shape)
        if len(shape) == 1 and "inp_shexp" not in name:
            array: NDArray[Any] = small(name, shape[0], rng).astype(np.float32)
        else:
            array = encoded(rng, shape, gain / shape[-1] ** 0.5, type_)
        if name in ("token_embd.weight", "output.weight"):
            array[SILENT] = 0
        arrays[name] = array, type_
    if m.has("tied"):  # signs keep a token from being its own likeliest successor
        norm, type_ = arrays["output_norm.weight"]
        arrays["output_norm.weight"] = norm * rng.choice(np.array([-1, 1], np.float32), norm.shape), type_
    return fused(arrays) if m.has("fused") else arrays


def fused(arrays: Arrays) -> Arrays:
    """The same weights with each layer's gate and up experts in one tensor."""
    out: Arrays = {}
    for name, (array, type_) in arrays.items():
        if "ffn_gate_exps" in name:
            up, _ = arrays[name.replace("gate", "up")]
            out[name.replace("gate", "gate_up")] = np.concatenate([array, up], axis=1), type_
        elif "ffn_up_exps" not in name:
            out[name] = array, type_
    return out


def as_f32(arrays: Arrays) -> Arrays:
    """The same weights decoded, so that an engine that rounds activations to suit a type has no reason to."""
    return {
        name: (array if type_ == Type.F32 else quants.dequantize(array, type_).astype(np.float32), Type.F32)
        for name, (array, type_) in arrays.items()
    }


def write(path: Path, m: Tiny, arrays: Arrays | None = None, **changes: Any) -> Path:
    """Writes the model with its own or the given weights; `changes` are metadata keys under the architecture's prefix,
    dots as two underscores, None to leave one out."""
    keys = metadata(m) | vocabulary(m.architecture)
    keys |= {f"{m.architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    writer = GGUFWriter(path, m.architecture)
    for key, value in keys.items():
        if value is not None:
            add(writer, key, value)
    for name, (array, type_) in (weights(m) if arrays is None else arrays).items():
        writer.add_tensor(name, array, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool, float: writer.add_float32, str: writer.add_string, list: writer.add_array,
        int: writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32,
    }  # fmt: skip
    adders[type(value)](key, value)
