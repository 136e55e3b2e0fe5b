"""OLMoE (1B-7B, arXiv 2409.02060): q and k normalised over their whole width, 64 experts, gate values as they are."""

from ..blocks import attend, attention_weights, embedding, head, moe_ffn, project
from ..program import Program, Run, Step, TensorTable, Weights
from ..spec import AttentionSpec, ModelSpec
from .metadata import Metadata


def read_spec(m: Metadata) -> ModelSpec:
    return m.model(m.attention(), m.moe(norm_weights=False, n_ff_exp=m.size("feed_forward_length")))


def build(spec: ModelSpec, t: TensorTable) -> Program:
    steps = [embedding(t, spec)]
    for layer in range(spec.n_layer):
        steps += [attention(t, spec, layer), moe_ffn(t, spec, layer)]
    return Program(spec, (*steps, head(t, spec)))


def attention(t: TensorTable, spec: ModelSpec, layer: int) -> Step:
    a, b = spec.attention[layer], f"blk.{layer}."
    assert a is not None
    norms = t.need(b + "attn_q_norm.weight", a.q_width), t.need(b + "attn_k_norm.weight", a.kv_width)
    return Step(b + "attn", run_attention, a, (*attention_weights(t, spec, layer), *norms), layer=layer)


def run_attention(run: Run, w: Weights, a: AttentionSpec) -> None:
    q, k, v = project(run, w, a)
    run.ops.rms_norm(q, q, w.attn_q_norm, a.eps)
    run.ops.rms_norm(k, k, w.attn_k_norm, a.eps)
    attend(run, w, a, q, k, v)
