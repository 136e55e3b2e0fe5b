"""Shapes of named models: their sizes, their GGUF metadata and the list of their tensors.

Sizes are those of the public GGUF files; names, shapes and keys are what llama.cpp's loaders ask for.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. 0, "" and False mean that the architecture has no such part."""

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    n_ff: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    freq_base: float = 10000.0
    n_rot: int = 0
    """Rotated dimensions of a head; 0: all."""
    eps: float = 1e-6
    pre: str = "qwen2"
    interval: int = 1
    """Every interval-th layer attends, the others are gated delta nets."""
    n_k_head: int = 0
    n_v_head: int = 0
    ssm_dim: int = 128
    n_conv: int = 4
    n_nextn: int = 0
    fused_gate_up: bool = False
    mix: str = "Q4_K_M"

    def __post_init__(self) -> None:
        for key in ("n_layer", "n_embd", "n_vocab"):
            if getattr(self, key) < 1:
                raise UserError(f"{self.name}: {key} must be at least 1")
        if self.n_vocab < 264:
            raise UserError(f"{self.name}: a vocabulary needs 256 bytes and some special tokens: at least 264")
        if self.n_expert and not 0 < self.n_expert_used <= self.n_expert:
            raise UserError(f"{self.name}: {self.n_expert_used} of {self.n_expert} experts used makes no sense")

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0 or layer >= self.n_layer


@dataclass(frozen=True)
class Traits:
    """What distinguishes an architecture's tensors. `qk_norm` is "head", "full" or "" (none)."""

    qk_norm: str = ""
    qkv_bias: bool = False
    gated_attn: bool = False
    ffn_norm: str = "ffn_norm"
    oai: bool = False
    """gpt-oss: sinks, and biases on everything."""


TRAITS = {
    "llama": Traits(),
    "qwen3": Traits(qk_norm="head"),
    "qwen3moe": Traits(qk_norm="head"),
    "qwen2moe": Traits(qkv_bias=True),
    "olmoe": Traits(qk_norm="full"),
    "qwen35": Traits(qk_norm="head", gated_attn=True, ffn_norm="post_attention_norm"),
    "qwen35moe": Traits(qk_norm="head", gated_attn=True, ffn_norm="post_attention_norm"),
    "gpt-oss": Traits(qkv_bias=True, ffn_norm="post_attention_norm", oai=True),
}

_QWEN3: dict[str, Any] = {"head_dim": 128, "n_vocab": 151936, "n_ctx": 40960, "freq_base": 1e6}
_QWEN35: dict[str, Any] = {
    "head_dim": 256, "n_vocab": 248320, "n_ctx": 262144, "freq_base": 1e7, "n_rot": 64, "interval": 4, "pre": "qwen35",
}  # fmt: skip
_OSS: dict[str, Any] = {
    "arch": "gpt-oss", "n_embd": 2880, "n_head": 64, "n_head_kv": 8, "head_dim": 64, "n_vocab": 201088,
    "n_ctx": 131072, "n_ff": 2880, "n_ff_exp": 2880, "n_expert_used": 4, "freq_base": 150000.0, "eps": 1e-5,
    "pre": "gpt-4o", "mix": "MXFP4_MOE",
}  # fmt: skip
_TINY: dict[str, Any] = {"n_embd": 256, "n_head": 8, "n_head_kv": 2, "head_dim": 64, "n_vocab": 1024, "n_ctx": 4096}
_TINY_MOE: dict[str, Any] = {"n_expert": 16, "n_expert_used": 4}

# fmt: off
SHAPES = {s.name: s for s in (
    Shape("Qwen3.6-35B-A3B", "qwen35moe", 40, 2048, 16, 2, n_expert=256, n_expert_used=8, n_ff_exp=512,
          n_ff_shexp=512, n_k_head=16, n_v_head=32, **_QWEN35),
    Shape("Qwen3-30B-A3B", "qwen3moe", 48, 2048, 32, 4, n_ff=6144, n_expert=128, n_expert_used=8, n_ff_exp=768,
          **_QWEN3),
    Shape("Qwen3-235B-A22B", "qwen3moe", 94, 4096, 64, 4, n_ff=12288, n_expert=128, n_expert_used=8, n_ff_exp=1536,
          **_QWEN3),
    Shape("gpt-oss-20b", n_layer=24, n_expert=32, **_OSS),
    Shape("gpt-oss-120b", n_layer=36, n_expert=128, **_OSS),
    Shape("OLMoE-1B-7B", "olmoe", 16, 2048, 16, 16, 128, 50304, 4096, n_ff=1024, n_expert=64, n_expert_used=8,
          n_ff_exp=1024, eps=1e-5, pre="olmo"),
    Shape("Mixtral-8x7B", "llama", 32, 4096, 32, 8, 128, 32000, 32768, n_ff=14336, n_expert=8, n_expert_used=2,
          n_ff_exp=14336, freq_base=1e6, eps=1e-5, pre="llama-bpe"),
    Shape("Qwen1.5-MoE-A2.7B", "qwen2moe", 24, 2048, 16, 16, 128, 151936, 8192, n_ff=5632, n_expert=60,
          n_expert_used=4, n_ff_exp=1408, n_ff_shexp=5632, freq_base=1e6),
    Shape("Qwen3-8B", "qwen3", 36, 4096, 32, 8, n_ff=12288, **_QWEN3),
    Shape("Llama-3.1-8B", "llama", 32, 4096, 32, 8, 128, 128256, 131072, n_ff=14336, freq_base=5e5, eps=1e-5,
          pre="llama-bpe"),
    Shape("tiny-qwen35moe", "qwen35moe", 4, n_ff_exp=256, n_ff_shexp=256, n_rot=32, interval=4, n_k_head=2,
          n_v_head=4, pre="qwen35", **_TINY, **_TINY_MOE),
    Shape("tiny-qwen35", "qwen35", 4, n_ff=512, n_rot=32, interval=4, n_k_head=2, n_v_head=4, pre="qwen35", **_TINY),
    Shape("tiny-qwen3moe", "qwen3moe", 3, n_ff=512, n_ff_exp=256, **_TINY, **_TINY_MOE),
    Shape("tiny-qwen2moe", "qwen2moe", 3, n_ff=512, n_ff_exp=128, n_ff_shexp=512,
          **{**_TINY, "n_head": 4, "n_head_kv": 4}, **_TINY_MOE),
    Shape("tiny-olmoe", "olmoe", 3, n_ff=256, n_ff_exp=256, pre="olmo", **{**_TINY, "n_head": 4, "n_head_kv": 4},
          **_TINY_MOE),
    Shape("tiny-mixtral", "llama", 3, n_ff=512, n_ff_exp=512, n_expert=8, n_expert_used=2, pre="llama-bpe",
          **{**_TINY, "n_head": 4}),
    Shape("tiny-gpt-oss", n_layer=4, n_expert=8,
          **{**_OSS, "n_embd": 256, "n_ff": 256, "n_ff_exp": 256, "n_vocab": 1024, "n_head": 8, "n_head_kv": 2}),
    Shape("tiny-qwen3", "qwen3", 3, n_ff=512, **_TINY),
    Shape("tiny-llama", "llama", 3, n_ff=512, pre="llama-bpe", **{**_TINY, "n_head": 4}),
)}
# fmt: on


def find_shape(name: str, **changes: Any) -> Shape:
    """The named shape (case does not matter) with some sizes changed; UserError if there is none."""
    found = {key.lower(): shape for key, shape in SHAPES.items()}.get(name.lower())
    if found is None:
        raise UserError(f"no shape {name!r}; known: {', '.join(SHAPES)}")
    return replace(found, **changes)


def metadata(s: Shape) -> dict[str, Any]:
    """The architecture's own keys, in llama.cpp's words."""
    keys: dict[str, Any] = {
        "block_count": s.n_layer + s.n_nextn, "context_length": s.n_ctx, "embedding_length": s.n_embd,
        "feed_forward_length": s.n_ff, "attention.head_count": s.n_head, "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_dim, "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps, "rope.freq_base": s.freq_base,
        "rope.dimension_count": s.n_rot or s.head_dim, "expert_count": s.n_expert,
        "expert_used_count": s.n_expert_used,
        "expert_feed_forward_length": 0 if s.arch in ("llama", "olmoe") else s.n_ff_exp,
        "expert_shared_feed_forward_length": s.n_ff_shexp, "nextn_predict_layers": s.n_nextn,
    }  # fmt: skip
    keys = {key: value for key, value in keys.items() if value}
    if s.interval > 1:
        keys |= {
            "rope.dimension_sections": rope_sections(s.n_rot), "full_attention_interval": s.interval,
            "ssm.conv_kernel": s.n_conv, "ssm.state_size": s.ssm_dim, "ssm.group_count": s.n_k_head,
            "ssm.time_step_rank": s.n_v_head, "ssm.inner_size": s.n_v_head * s.ssm_dim,
        }  # fmt: skip
    if TRAITS[s.arch].oai:
        keys |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
            "attention.sliding_window": 128,
        }  # fmt: skip
    return {f"{s.arch}.{key}": value for key, value in keys.items()}


def rope_sections(n_rot: int) -> list[int]:
    """How many pairs count time, height and width, which take turns (64 dimensions: 11, 11, 10); a fourth is 0."""
    return [-(-(n_rot // 2 - axis) // 3) for axis in range(3)] + [0]


@dataclass(frozen=True)
class Entry:
    """One tensor to write: shape in numpy order (rows first), what fills it, and a factor on its magnitude."""

    name: str
    shape: tuple[int, ...]
    fill: str = "matrix"
    gain: float = 1.0


def entries(s: Shape) -> Iterator[Entry]:
    """Every tensor of the model, in the order of public files: the head first, then block by block."""
    yield Entry("output.weight", (s.n_vocab, s.n_embd), gain=3.0)
    yield Entry("output_norm.weight", (s.n_embd,), "norm")
    yield Entry("token_embd.weight", (s.n_vocab, s.n_embd), "embedding")
    for layer in range(s.n_layer + s.n_nextn):
        block = [*(_attention(s) if s.attends(layer) else _delta_net(s)), *_ffn(s)]
        if layer >= s.n_layer:
            block += _nextn(s)
        for e in sorted(block, key=lambda e: e.name):
            yield replace(e, name=f"blk.{layer}.{e.name}")


def _residual_gain(s: Shape) -> float:
    """Blocks that add to the residual stream are made small, so that all of them together add about its own size."""
    return 2.0 / math.sqrt(2 * s.n_layer)


def _attention(s: Shape) -> Iterator[Entry]:
    t, q, kv = TRAITS[s.arch], s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    # without a norm after it, q and k are a little larger: a flat softmax would hide errors
    qk_gain = 1.0 if t.qk_norm else 1.4
    yield Entry("attn_norm.weight", (s.n_embd,), "norm")
    yield Entry("attn_q.weight", (2 * q if t.gated_attn else q, s.n_embd), gain=qk_gain)
    yield Entry("attn_k.weight", (kv, s.n_embd), gain=qk_gain)
    yield Entry("attn_v.weight", (kv, s.n_embd))
    yield Entry("attn_output.weight", (s.n_embd, q), gain=_residual_gain(s))
    if t.qk_norm:
        per_head = t.qk_norm == "head"
        yield Entry("attn_q_norm.weight", (s.head_dim if per_head else q,), "norm", gain=1.4)
        yield Entry("attn_k_norm.weight", (s.head_dim if per_head else kv,), "norm", gain=1.4)
    if t.qkv_bias:
        for name, width in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            yield Entry(f"{name}.bias", (width,), "bias")
    if t.oai:
        yield Entry("attn_output.bias", (s.n_embd,), "bias", gain=_residual_gain(s))
        yield Entry("attn_sinks.weight", (s.n_head,), "sink")


def _delta_net(s: Shape) -> Iterator[Entry]:
    v_width = s.n_v_head * s.ssm_dim
    conv_width = 2 * s.n_k_head * s.ssm_dim + v_width
    yield Entry("attn_norm.weight", (s.n_embd,), "norm")
    yield Entry("attn_qkv.weight", (conv_width, s.n_embd))
    yield Entry("attn_gate.weight", (v_width, s.n_embd))
    yield Entry("ssm_conv1d.weight", (conv_width, s.n_conv), "conv")
    yield Entry("ssm_dt.bias", (s.n_v_head,), "dt")
    yield Entry("ssm_a", (s.n_v_head,), "ssm_a")
    yield Entry("ssm_alpha.weight", (s.n_v_head, s.n_embd))
    yield Entry("ssm_beta.weight", (s.n_v_head, s.n_embd))
    yield Entry("ssm_norm.weight", (s.ssm_dim,), "norm")
    yield Entry("ssm_out.weight", (s.n_embd, v_width), gain=_residual_gain(s))


def _ffn(s: Shape) -> Iterator[Entry]:
    t, n, ff, gain = TRAITS[s.arch], s.n_embd, s.n_ff_exp, _residual_gain(s)
    yield Entry(f"{t.ffn_norm}.weight", (n,), "norm")
    if not s.n_expert:
        yield Entry("ffn_gate.weight", (s.n_ff, n))
        yield Entry("ffn_up.weight", (s.n_ff, n))
        yield Entry("ffn_down.weight", (n, s.n_ff), gain=2 * gain)
        return
    yield Entry("ffn_gate_inp.weight", (s.n_expert, n), "router")
    if s.fused_gate_up:
        yield Entry("ffn_gate_up_exps.weight", (s.n_expert, 2 * ff, n))
    else:
        yield Entry("ffn_gate_exps.weight", (s.n_expert, ff, n))
        yield Entry("ffn_up_exps.weight", (s.n_expert, ff, n))
    # a weighted mean of independent experts is smaller than each of them
    yield Entry("ffn_down_exps.weight", (s.n_expert, n, ff), gain=4 * gain)
    if s.n_ff_shexp:
        yield Entry("ffn_gate_inp_shexp.weight", (n,), "vector")
        yield Entry("ffn_gate_shexp.weight", (s.n_ff_shexp, n))
        yield Entry("ffn_up_shexp.weight", (s.n_ff_shexp, n))
        yield Entry("ffn_down_shexp.weight", (n, s.n_ff_shexp), gain=2 * gain)
    if t.oai:
        yield Entry("ffn_gate_inp.bias", (s.n_expert,), "bias")
        yield Entry("ffn_gate_exps.bias", (s.n_expert, ff), "bias")
        yield Entry("ffn_up_exps.bias", (s.n_expert, ff), "bias")
        yield Entry("ffn_down_exps.bias", (s.n_expert, n), "bias", gain=gain)


def _nextn(s: Shape) -> Iterator[Entry]:
    """What a next-token-prediction block has beyond an ordinary attending one."""
    yield Entry("nextn.eh_proj.weight", (s.n_embd, 2 * s.n_embd))
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield Entry(f"nextn.{name}.weight", (s.n_embd,), "norm")
