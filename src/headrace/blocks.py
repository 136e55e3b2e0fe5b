"""The steps that architectures share, over the op table.

Each block is a pair: a constructor that asks the file for its tensors and returns a Step, and the function that
the Step runs. A block never has a flag that only one architecture sets: such a block lives in that model's file.
"""

from typing import Any

from .backends.base import Tensor
from .errors import UserError
from .program import ExpertGroup, Run, Step, TensorTable, Weights
from .spec import AttentionSpec, FfnSpec, ModelSpec, MoeSpec


def embedding(t: TensorTable, spec: ModelSpec) -> Step:
    return Step("token_embd", run_embedding, None, (t.need("token_embd.weight", spec.n_vocab, spec.n_embd),))


def run_embedding(run: Run, w: Weights, _: Any) -> None:
    run.ops.embed(run.x, w.token_embd, run.state.token_ids)


def attention(t: TensorTable, spec: ModelSpec, layer: int, *, head_norm: bool = False) -> Step:
    """Grouped-query attention; `head_norm`: q and k pass an RMS norm of head width (Qwen3) before rope."""
    a, b = spec.attention[layer], f"blk.{layer}."
    assert a is not None
    weights = attention_weights(t, spec, layer)
    if head_norm:
        weights += (t.need(b + "attn_q_norm.weight", a.head_dim), t.need(b + "attn_k_norm.weight", a.head_dim))
    return Step(b + "attn", run_attention, a, weights, layer=layer)


def attention_weights(t: TensorTable, spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """What `project` and `attend` read; biases are taken where a file has them."""
    a, b, d = spec.attention[layer], f"blk.{layer}.", spec.n_embd
    assert a is not None
    return (
        t.need(b + "attn_norm.weight", d),
        t.need(b + "attn_q.weight", a.q_width, d),
        t.need(b + "attn_k.weight", a.kv_width, d),
        t.need(b + "attn_v.weight", a.kv_width, d),
        t.need(b + "attn_output.weight", d, a.q_width),
        *t.maybe(b + "attn_q.bias", a.q_width),
        *t.maybe(b + "attn_k.bias", a.kv_width),
        *t.maybe(b + "attn_v.bias", a.kv_width),
        *t.maybe(b + "attn_output.bias", d),
        *t.maybe("rope_freqs.weight", a.rope.n_rot // 2),
    )


def run_attention(run: Run, w: Weights, a: AttentionSpec) -> None:
    q, k, v = project(run, w, a)
    if w.attn_q_norm is not None:
        q, k = q.reshape(run.n_tokens, a.n_head, a.head_dim), k.reshape(run.n_tokens, a.n_head_kv, a.head_dim)
        run.ops.rms_norm(q, q, w.attn_q_norm, a.eps)
        run.ops.rms_norm(k, k, w.attn_k_norm, a.eps)
    attend(run, w, a, q, k, v)


def project(run: Run, w: Weights, a: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, then q [T, H * C], k and v [T, G * C]."""
    ops, n = run.ops, run.n_tokens
    h = run.new(n, run.x.shape[1])
    ops.rms_norm(h, run.x, w.attn_norm, a.eps)
    q, k, v = run.new(n, a.q_width), run.new(n, a.kv_width), run.new(n, a.kv_width)
    ops.linear(q, h, w.attn_q, w.attn_q_bias)
    ops.linear(k, h, w.attn_k, w.attn_k_bias)
    ops.linear(v, h, w.attn_v, w.attn_v_bias)
    return q, k, v


def attend(
    run: Run, w: Weights, a: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None
) -> None:  # fmt: skip
    """Rope, cache, attention and output projection, added to the residual stream.

    q holds T * H * C values, k and v T * G * C, contiguous; `gate` [T, H, C] scales what the heads found (sigmoid).
    """
    ops, n = run.ops, run.n_tokens
    q, k, v = (x.reshape(n, heads, a.head_dim) for x, heads in ((q, a.n_head), (k, a.n_head_kv), (v, a.n_head_kv)))
    ops.rope(q, run.state.positions, a.rope, w.rope_freqs)
    ops.rope(k, run.state.positions, a.rope, w.rope_freqs)
    ops.kv_store(run.cache, k, v, run.state)
    out = run.new(n, a.n_head, a.head_dim)
    ops.attention(out, q, run.cache, run.state, a)
    if gate is not None:
        ops.sigmoid_mul(out, gate)
    ops.linear(run.x, out.reshape(n, a.q_width), w.attn_output, w.attn_output_bias, add=True)


def dense_ffn(t: TensorTable, spec: ModelSpec, layer: int, *, norm: str = "ffn_norm") -> Step:
    """A gated FFN, its biases where a file has them; `norm` names the norm in front."""
    f, b = spec.ffn[layer], f"blk.{layer}."
    assert isinstance(f, FfnSpec)
    weights = (
        t.need(f"{b}{norm}.weight", spec.n_embd),
        t.need(b + "ffn_gate.weight", f.n_ff, spec.n_embd),
        t.need(b + "ffn_up.weight", f.n_ff, spec.n_embd),
        t.need(b + "ffn_down.weight", spec.n_embd, f.n_ff),
        *t.maybe(b + "ffn_gate.bias", f.n_ff),
        *t.maybe(b + "ffn_up.bias", f.n_ff),
        *t.maybe(b + "ffn_down.bias", spec.n_embd),
    )
    return Step(b + "ffn", run_dense_ffn, (f, norm), weights, layer=layer)


def run_dense_ffn(run: Run, w: Weights, params: tuple[FfnSpec, str]) -> None:
    f, norm = params
    ops, n = run.ops, run.n_tokens
    h, gate, up = run.new(n, run.x.shape[1]), run.new(n, f.n_ff), run.new(n, f.n_ff)
    ops.rms_norm(h, run.x, getattr(w, norm), f.eps)
    ops.linear(gate, h, w.ffn_gate, w.ffn_gate_bias)
    ops.linear(up, h, w.ffn_up, w.ffn_up_bias)
    ops.glu(gate, gate, up, f.activation)
    ops.linear(run.x, gate, w.ffn_down, w.ffn_down_bias, add=True)


def moe_ffn(t: TensorTable, spec: ModelSpec, layer: int, *, norm: str = "ffn_norm") -> Step:
    """Routed experts, and the shared expert if the spec has one; `norm` names the norm in front."""
    m, b, d = spec.ffn[layer], f"blk.{layer}.", spec.n_embd
    assert isinstance(m, MoeSpec)
    weights: tuple[str, ...] = (t.need(f"{b}{norm}.weight", d), t.need(b + "ffn_gate_inp.weight", m.n_expert, d))
    if m.n_ff_shexp:
        weights += (
            t.need(b + "ffn_gate_shexp.weight", m.n_ff_shexp, d),
            t.need(b + "ffn_up_shexp.weight", m.n_ff_shexp, d),
            t.need(b + "ffn_down_shexp.weight", d, m.n_ff_shexp),
            t.need(b + "ffn_gate_inp_shexp.weight", d),
        )
    return Step(b + "ffn", run_moe_ffn, (m, norm), weights, expert_group(t, b, m, d), layer)


def expert_group(t: TensorTable, b: str, m: MoeSpec, n_embd: int) -> ExpertGroup:
    if t.has(b + "ffn_down.0.weight"):
        raise UserError(
            f"{t.source}: one tensor per expert ({b}ffn_down.0.weight) is an old layout; convert the model again"
        )
    down = t.need(b + "ffn_down_exps.weight", m.n_expert, n_embd, m.n_ff_exp)
    if t.has(b + "ffn_gate_up_exps.weight"):
        return ExpertGroup(t.need(b + "ffn_gate_up_exps.weight", m.n_expert, 2 * m.n_ff_exp, n_embd), None, down)
    return ExpertGroup(
        t.need(b + "ffn_gate_exps.weight", m.n_expert, m.n_ff_exp, n_embd),
        t.need(b + "ffn_up_exps.weight", m.n_expert, m.n_ff_exp, n_embd),
        down,
    )


def run_moe_ffn(run: Run, w: Weights, params: tuple[MoeSpec, str]) -> None:
    m, norm = params
    ops, n = run.ops, run.n_tokens
    h = run.new(n, run.x.shape[1])
    ops.rms_norm(h, run.x, getattr(w, norm), m.eps)
    logits, routing = run.new(n, m.n_expert, dtype="f32"), run.routing(m.n_expert, m.n_expert_used)
    ops.linear(logits, h, w.ffn_gate_inp)
    ops.route(routing, logits, m)
    act, y = run.new(n * m.n_expert_used, m.n_ff_exp), run.new(n * m.n_expert_used, run.x.shape[1])
    ops.expert_glu(act, h, routing, w.experts.gate, w.experts.up, m.activation)
    ops.expert_down(y, act, routing, w.experts.down)
    shared = shared_expert(run, w, m, h) if m.n_ff_shexp else None  # first: a combine may wait for another processor
    ops.combine(run.x, y, routing)
    if shared is not None:
        ops.add(run.x, shared)


def shared_expert(run: Run, w: Weights, m: MoeSpec, h: Tensor) -> Tensor:
    """sigmoid(gate . h) * ffn(h), the gate one number a token."""
    ops, n = run.ops, run.n_tokens
    gate, up, g = run.new(n, m.n_ff_shexp), run.new(n, m.n_ff_shexp), run.new(n, 1, dtype="f32")
    ops.linear(gate, h, w.ffn_gate_shexp)
    ops.linear(up, h, w.ffn_up_shexp)
    ops.linear(g, h, w.ffn_gate_inp_shexp)
    ops.glu(gate, gate, up, m.activation)
    y = run.new(n, run.x.shape[1])
    ops.linear(y, gate, w.ffn_down_shexp)
    ops.sigmoid_mul(y, g)
    return y


def head(t: TensorTable, spec: ModelSpec) -> Step:
    """Final norm and logits of the wanted rows; without output.weight the embedding is tied."""
    output = "output.weight" if t.has("output.weight") else "token_embd.weight"
    weights = (t.need("output_norm.weight", spec.n_embd), t.need(output, spec.n_vocab, spec.n_embd))
    return Step("output", run_head, spec.eps, weights)


def run_head(run: Run, w: Weights, eps: float) -> None:
    if not run.n_out:
        return
    rows, h = run.new(run.n_out, run.x.shape[1], dtype="f32"), run.new(run.n_out, run.x.shape[1])
    run.ops.gather_rows(rows, run.x, run.state.out_rows)
    run.ops.rms_norm(h, rows, w.output_norm, eps)
    run.ops.linear(run.logits, h, w.token_embd if w.output is None else w.output)
