"""Qwen3.5 and Qwen3.6 MoE: three gated delta nets to one gated attention, every FFN routed with a shared expert.

    x += DeltaNet(norm(x))   or, on every 4th layer,   x += GatedAttention(norm(x))
    x += MoE(post_attention_norm(x))

Gated attention: one projection gives each head its query and, beside it, a gate of the same width; q and k are
normalised per head; rope turns the first quarter of a head; sigmoid(gate) scales what the head found.

Gated delta net (arXiv 2412.06464): q, k, v pass one short causal convolution with SiLU; q and k are normalised to
length 1; a state matrix per v-head decays by exp(a softplus(alpha + dt)) and learns v by the delta rule with rate
sigmoid(beta); its answer passes an RMS norm per head and a SiLU gate z. In GGUF `ssm_a` is already -exp(A_log), the
norms hold weight + 1, and the v-heads lie tiled over the k-heads (v-head h uses k-head h mod n_k_head).
"""

from ..blocks import attend, dense_ffn, embedding, head, moe_ffn
from ..program import Program, Run, Step, TensorTable, Weights
from ..spec import AttentionSpec, DeltaNetSpec, FfnSpec, ModelSpec, MoeSpec
from .metadata import Metadata


def read_spec(m: Metadata) -> ModelSpec:
    n_ff = m.integer("feed_forward_length", 0)
    moe = m.moe(norm_weights=True, n_ff_shexp=m.size("expert_shared_feed_forward_length", n_ff))
    return hybrid_spec(m, moe)


def hybrid_spec(m: Metadata, ffn: FfnSpec | MoeSpec) -> ModelSpec:
    """The layers' order, by `attention.recurrent_layers` or else every `full_attention_interval`-th attending."""
    n_nextn = m.integer("nextn_predict_layers", 0)
    n_layer = m.n_layer - n_nextn
    if n_nextn < 0 or n_layer < 1:
        raise m.error(f"{n_nextn} next-token-prediction blocks of {m.n_layer} blocks leave no model")
    interval, flags = m.size("full_attention_interval", 4), m.array("attention.recurrent_layers")
    recurrent = [(i + 1) % interval != 0 for i in range(n_layer)] if flags is None else [bool(f) for f in flags]
    if len(recurrent) < n_layer:
        raise m.error(f"{m.prefix}attention.recurrent_layers speaks of {len(recurrent)} of {n_layer} layers")
    attention, delta_net = read_attention(m), read_delta_net(m)
    return m.model(
        tuple(None if r else attention for r in recurrent[:n_layer]), ffn,
        tuple(delta_net if r else None for r in recurrent[:n_layer]), n_nextn,
    )  # fmt: skip


def read_attention(m: Metadata) -> AttentionSpec:
    """Rope's pairs take turns in counting time, height and width, as far as the sections go; for text all three are
    the token's position. A pair beyond its section would not turn, which no text model has."""
    a = m.attention()
    sections = [*(m.array("rope.dimension_sections") or []), 0, 0, 0][:4]
    n = sum(sections)
    if n < 1 or any(i % n >= 3 * sections[i % n % 3] for i in range(a.rope.n_rot // 2)):
        raise m.error(f"{m.prefix}rope.dimension_sections do not cover the {a.rope.n_rot // 2} rotated pairs")
    return a


def read_delta_net(m: Metadata) -> DeltaNetSpec:
    n_k_head, n_v_head, width = m.size("ssm.group_count"), m.size("ssm.time_step_rank"), m.size("ssm.state_size")
    if n_v_head % n_k_head or m.size("ssm.inner_size") != n_v_head * width:
        raise m.error(
            f"delta net: {n_k_head} k-heads, {n_v_head} v-heads of width {width} and an inner size of "
            f"{m.size('ssm.inner_size')} do not fit together"
        )
    return DeltaNetSpec(n_k_head, n_v_head, width, width, n_conv=m.size("ssm.conv_kernel"), eps=m.eps)


def build(spec: ModelSpec, t: TensorTable) -> Program:
    ffn = moe_ffn if spec.is_moe else dense_ffn
    steps = [embedding(t, spec)]
    for layer in range(spec.n_layer):
        mixer = gated_attention if spec.attention[layer] else delta_net
        steps += [mixer(t, spec, layer), ffn(t, spec, layer, norm="post_attention_norm")]
    for layer in range(spec.n_layer, spec.n_layer + spec.n_layer_nextn):
        t.skip(f"blk.{layer}.")
    return Program(spec, (*steps, head(t, spec)))


def gated_attention(t: TensorTable, spec: ModelSpec, layer: int) -> Step:
    a, b, d = spec.attention[layer], f"blk.{layer}.", spec.n_embd
    assert a is not None
    weights = (
        t.need(b + "attn_norm.weight", d),
        t.need(b + "attn_q.weight", 2 * a.q_width, d),
        t.need(b + "attn_k.weight", a.kv_width, d),
        t.need(b + "attn_v.weight", a.kv_width, d),
        t.need(b + "attn_q_norm.weight", a.head_dim),
        t.need(b + "attn_k_norm.weight", a.head_dim),
        t.need(b + "attn_output.weight", d, a.q_width),
    )
    return Step(b + "attn", run_gated_attention, a, weights, layer=layer)


def run_gated_attention(run: Run, w: Weights, a: AttentionSpec) -> None:
    ops, n = run.ops, run.n_tokens
    h, q_gate = run.new(n, run.x.shape[1]), run.new(n, 2 * a.q_width)
    q, k, v = run.new(n, a.n_head, a.head_dim), run.new(n, a.kv_width), run.new(n, a.kv_width)
    ops.rms_norm(h, run.x, w.attn_norm, a.eps)
    ops.linear(q_gate, h, w.attn_q)
    ops.linear(k, h, w.attn_k)
    ops.linear(v, h, w.attn_v)
    q_gate, k = q_gate.reshape(n, a.n_head, 2 * a.head_dim), k.reshape(n, a.n_head_kv, a.head_dim)
    ops.rms_norm(q, q_gate[:, :, : a.head_dim], w.attn_q_norm, a.eps)
    ops.rms_norm(k, k, w.attn_k_norm, a.eps)
    attend(run, w, a, q, k, v, gate=q_gate[:, :, a.head_dim :])


def delta_net(t: TensorTable, spec: ModelSpec, layer: int) -> Step:
    s, b, d = spec.delta_net[layer], f"blk.{layer}.", spec.n_embd
    assert s is not None
    weights = (
        t.need(b + "attn_norm.weight", d),
        t.need(b + "attn_qkv.weight", s.conv_width, d),
        t.need(b + "attn_gate.weight", s.v_width, d),
        t.need(b + "ssm_conv1d.weight", s.conv_width, s.n_conv),
        t.need(b + "ssm_alpha.weight", s.n_v_head, d),
        t.need(b + "ssm_beta.weight", s.n_v_head, d),
        t.need(b + "ssm_dt.bias", s.n_v_head),
        t.need(b + "ssm_a", s.n_v_head),
        t.need(b + "ssm_norm.weight", s.v_dim),
        t.need(b + "ssm_out.weight", d, s.v_width),
    )
    return Step(b + "attn", run_delta_net, s, weights, layer=layer)


def run_delta_net(run: Run, w: Weights, s: DeltaNetSpec) -> None:
    ops, n, n_k = run.ops, run.n_tokens, s.n_k_head
    h, qkv, conv, z = (run.new(n, width) for width in (run.x.shape[1], s.conv_width, s.conv_width, s.v_width))
    alpha, beta = run.new(n, s.n_v_head, dtype="f32"), run.new(n, s.n_v_head, dtype="f32")
    ops.rms_norm(h, run.x, w.attn_norm, s.eps)
    ops.linear(qkv, h, w.attn_qkv)
    ops.linear(z, h, w.attn_gate)
    ops.linear(alpha, h, w.ssm_alpha)
    ops.linear(beta, h, w.ssm_beta)
    ops.conv1d(conv, qkv, w.ssm_conv1d, run.cache, run.state)
    heads = conv.reshape(n, 2 * n_k + s.n_v_head, s.k_dim)
    q, k, out = run.new(n, n_k, s.k_dim), run.new(n, n_k, s.k_dim), run.new(n, s.n_v_head, s.v_dim)
    ops.l2_norm(q, heads[:, :n_k], s.eps)
    ops.l2_norm(k, heads[:, n_k : 2 * n_k], s.eps)
    ops.delta_net(out, q, k, heads[:, 2 * n_k :], alpha, beta, w.ssm_dt_bias, w.ssm_a, run.cache, run.state, s)
    ops.rms_norm(out, out, w.ssm_norm, s.eps)
    out = out.reshape(n, s.v_width)
    ops.glu(out, z, out, "silu")
    ops.linear(run.x, out, w.ssm_out, add=True)
