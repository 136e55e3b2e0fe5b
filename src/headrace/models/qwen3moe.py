"""Qwen3 MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): q and k normalised per head, every FFN routed, no shared expert."""

from ..blocks import attention, embedding, head, moe_ffn
from ..program import Program, TensorTable
from ..spec import ModelSpec
from .metadata import Metadata


def read_spec(m: Metadata) -> ModelSpec:
    return m.model(m.attention(), m.moe(norm_weights=True))


def build(spec: ModelSpec, t: TensorTable) -> Program:
    steps = [embedding(t, spec)]
    for layer in range(spec.n_layer):
        steps += [attention(t, spec, layer, head_norm=True), moe_ffn(t, spec, layer)]
    return Program(spec, (*steps, head(t, spec)))
