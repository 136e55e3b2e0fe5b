"""Qwen3 (0.6B to 32B): q and k normalised per head, dense FFNs."""

from ..blocks import attention, dense_ffn, embedding, head
from ..program import Program, TensorTable
from ..spec import ModelSpec
from .metadata import Metadata


def read_spec(m: Metadata) -> ModelSpec:
    return m.model(m.attention(), m.dense())


def build(spec: ModelSpec, t: TensorTable) -> Program:
    steps = [embedding(t, spec)]
    for layer in range(spec.n_layer):
        steps += [attention(t, spec, layer, head_norm=True), dense_ffn(t, spec, layer)]
    return Program(spec, (*steps, head(t, spec)))
