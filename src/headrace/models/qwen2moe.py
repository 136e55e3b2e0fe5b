"""Qwen2 MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biased q, k, v; gate values as they are; a gated shared expert."""

from ..blocks import attention, embedding, head, moe_ffn
from ..program import Program, TensorTable
from ..spec import ModelSpec
from .metadata import Metadata


def read_spec(m: Metadata) -> ModelSpec:
    """Early files have only `feed_forward_length`: the shared expert's width, which the used experts share evenly."""
    n_ff = m.integer("feed_forward_length", 0)
    moe = m.moe(
        norm_weights=False,
        n_ff_exp=m.size("expert_feed_forward_length", n_ff // m.size("expert_used_count")),
        n_ff_shexp=m.size("expert_shared_feed_forward_length", n_ff),
    )
    return m.model(m.attention(), moe)


def build(spec: ModelSpec, t: TensorTable) -> Program:
    steps = [embedding(t, spec)]
    for layer in range(spec.n_layer):
        steps += [attention(t, spec, layer), moe_ffn(t, spec, layer)]
    return Program(spec, (*steps, head(t, spec)))
