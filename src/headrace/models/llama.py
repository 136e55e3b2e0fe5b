"""Llama 2 and 3, Mistral and the many models of their shape, dense; and Mixtral, whose every FFN is routed.

Rope rotates neighbouring dimensions; Llama 3.1's context scaling comes as a tensor (`rope_freqs.weight`).
"""

from ..blocks import attention, dense_ffn, embedding, head, moe_ffn
from ..program import Program, TensorTable
from ..spec import ModelSpec
from .metadata import Metadata


def read_spec(m: Metadata) -> ModelSpec:
    n_expert = m.integer("expert_count", 0)
    ffn = m.moe(norm_weights=True, n_ff_exp=m.size("feed_forward_length")) if n_expert else m.dense()
    return m.model(m.attention(interleaved_rope=True), ffn)


def build(spec: ModelSpec, t: TensorTable) -> Program:
    ffn = moe_ffn if spec.is_moe else dense_ffn
    steps = [embedding(t, spec)]
    for layer in range(spec.n_layer):
        steps += [attention(t, spec, layer), ffn(t, spec, layer)]
    return Program(spec, (*steps, head(t, spec)))
