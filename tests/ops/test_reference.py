"""The reference against float64 formulas that are written another way: dense, in closed form, or by scalars.

Whatever is compared with the reference inherits its mistakes, so nothing here shares a line with it.
"""

import cmath
import math

import numpy as np
import pytest

from headrace.backends import open_device
from headrace.backends.base import KVLayer, RecurrentLayer, Routing, StepState
from headrace.spec import AttentionSpec, DeltaNetSpec, MoeSpec, RopeSpec
from ops.cases import Lab

Array = np.ndarray


@pytest.fixture
def lab() -> Lab:
    return Lab(open_device("reference"), seed=3)


def near(got: Array, right: Array, tolerance: float = 3e-6) -> None:
    right = np.asarray(right, np.float64)
    assert got.shape == right.shape and right.size
    error = np.abs(got - right).max() / np.sqrt(np.mean(right**2))
    assert error < tolerance, f"greatest error {error:.2g} of the RMS"


def wide(*arrays: Array) -> list[Array]:
    return [np.array(a, np.float64) for a in arrays]


# one row at a time


def test_norms(lab: Lab) -> None:
    x, w = lab.normal(4, 3, 96, scale=3), lab.normal(96)
    out = lab.out(4, 3, 96)
    lab.ops.rms_norm(out, x, lab.vector(w), 0.5)
    for row, found in zip(x.reshape(-1, 96), out.reshape(-1, 96)):
        mean_square = math.fsum(float(v) ** 2 for v in row) / 96
        near(found, [float(a) * float(b) / math.sqrt(mean_square + 0.5) for a, b in zip(row, w)])
    lab.ops.rms_norm(out, x, None, 0.0)
    near(np.linalg.norm(out, axis=-1), np.full((4, 3), math.sqrt(96)))
    lab.ops.l2_norm(out, x, 2.0)
    length = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    near(out, x / np.hypot(length, math.sqrt(2.0)))


def test_gates(lab: Lab) -> None:
    gate, up = lab.normal(3, 32, scale=4), lab.normal(3, 32)
    for activation, f in (
        ("silu", lambda z: z / (1 + math.exp(-z))),
        ("gelu", lambda z: z / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))),
    ):
        out = lab.out(3, 32)
        lab.ops.glu(out, gate, up, activation)
        near(out, [[f(float(a)) * float(b) for a, b in zip(*rows)] for rows in zip(gate, up)])
    x = up.copy()
    lab.ops.sigmoid_mul(x, gate[:, :1])
    near(x, [[float(v) * (0.5 + 0.5 * math.tanh(float(g) / 2)) for v in row] for row, (g, *_) in zip(up, gate)])


def test_sigmoid_of_great_numbers_is_finite(lab: Lab) -> None:
    x = np.ones((1, 2), np.float32)
    lab.ops.sigmoid_mul(x, np.array([[-300, 300]], np.float32))
    assert x[0, 0] < 1e-30 and x[0, 1] == 1


def test_linear_embed_and_rows(lab: Lab) -> None:
    w, x, b = lab.normal(7, 64), lab.normal(5, 64), lab.normal(7)
    out = lab.out(5, 7)
    lab.ops.linear(out, x, lab.vector(w), lab.vector(b))
    right = np.tensordot(x.astype(np.float64), w.astype(np.float64), (1, 1)) + b
    near(out, right)
    lab.ops.linear(out, x, lab.vector(w), add=True)
    near(out, 2 * right - b)
    one = lab.out(5, 1)
    lab.ops.linear(one, x, lab.vector(w[3]))
    near(one, right[:, 3:4] - b[3])
    rows = lab.out(3, 64)
    lab.ops.embed(rows, lab.vector(w), np.array([6, 0, 6], np.int32))
    assert (rows == w[[6, 0, 6]]).all()
    lab.ops.gather_rows(rows, x, np.array([4, 4, 1], np.int32))
    assert (rows == x[[4, 4, 1]]).all()


# rope


@pytest.mark.parametrize("rope", [
    RopeSpec(64), RopeSpec(32, 1e6), RopeSpec(64, interleaved=True), RopeSpec(16, interleaved=True),
    RopeSpec(64, scaling="linear", factor=2.5),
], ids=str)  # fmt: skip
def test_rope_is_a_complex_rotation(lab: Lab, rope: RopeSpec) -> None:
    x, positions, factors = lab.normal(3, 2, 64), [0, 5, 1000], np.linspace(1, 3, rope.n_rot // 2, dtype=np.float32)
    out = x.copy()
    lab.ops.rope(out, np.array(positions, np.int32), rope, lab.vector(factors))
    right = x.astype(np.float64)
    for t, p in enumerate(positions):
        for i in range(rope.n_rot // 2):
            a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + rope.n_rot // 2)
            turn = cmath.exp(1j * p / rope.factor * rope.freq_base ** (-2 * i / rope.n_rot) / float(factors[i]))
            for h in range(2):
                z = complex(x[t, h, a], x[t, h, b]) * turn
                right[t, h, a], right[t, h, b] = z.real, z.imag
    near(out, right, 2e-4)  # an angle of 1000 radians has 3e-5 of rounding in float32
    assert (out[..., rope.n_rot :] == x[..., rope.n_rot :]).all()


def test_products_after_rope_depend_on_distance_alone(lab: Lab) -> None:
    rope = RopeSpec(32, 1e4, scaling="yarn", factor=8.0, n_ctx_original=128)
    q, k = (np.repeat(lab.normal(1, 1, 32), 3, 0) for _ in range(2))
    lab.ops.rope(q, np.array([9, 40, 209], np.int32), rope)
    lab.ops.rope(k, np.array([2, 33, 202], np.int32), rope)
    dots = np.einsum("thc,thc->t", q, k)
    near(dots, np.full(3, float(dots[0])), 1e-4)


def test_yarn_turns_fast_pairs_as_before_and_slow_ones_less() -> None:
    plain, yarn = RopeSpec(128, 1e6), RopeSpec(128, 1e6, scaling="yarn", factor=4.0, n_ctx_original=4096)
    ratio = plain.inverse_frequencies() / yarn.inverse_frequencies()
    turns = 4096 * plain.inverse_frequencies().astype(np.float64) / (2 * math.pi)
    near(ratio[turns > 40], np.ones((turns > 40).sum()))
    near(ratio[turns < 0.8], np.full((turns < 0.8).sum(), 4.0))
    assert (np.diff(ratio) > -1e-6).all() and yarn.magnitude == pytest.approx(1 + 0.1 * math.log(4))


# attention


def chunks(lab: Lab, table: Array, page: int, parts: list[tuple[int, int]]) -> StepState:
    """The ubatch in which each sequence goes from the first to the second length."""
    positions = [np.arange(a, b) for a, b in parts]
    rows = [table[s, p // page] * page + p % page for s, p in enumerate(positions)]
    starts = np.cumsum([0, *(len(p) for p in positions)])
    seqs = np.arange(len(parts))[::-1]  # state rows in another order than the sequences
    i32 = (np.concatenate(positions), np.concatenate(positions), np.concatenate(rows), starts, table, seqs, [0])
    return StepState(*(np.array(v, np.int32) for v in i32), page=page)


@pytest.mark.parametrize(("heads", "kv", "window", "sinks"), [(4, 4, 0, False), (6, 2, 0, True), (8, 1, 7, True)])
def test_attention_is_a_dense_softmax(lab: Lab, heads: int, kv: int, window: int, sinks: bool) -> None:
    """Two sequences, fed in three ubatches through shuffled pages, against whole masked matrices."""
    spec, page, lengths = AttentionSpec(heads, kv, 16, RopeSpec(16), 0.3, 1e-6, window), 4, (19, 26)
    table = lab.rng.permutation(2 * 7).reshape(2, 7)
    q, k, v = ([lab.normal(n, h, 16, scale=s) for n in lengths] for h, s in ((heads, 3), (kv, 1), (kv, 1)))
    sink = lab.normal(heads, scale=2)
    cache = KVLayer(lab.out(56, kv, 16), lab.out(56, kv, 16))
    found: list[list[Array]] = [[], []]
    for parts in ([(0, 5), (0, 13)], [(5, 6), (13, 14)], [(6, 19), (14, 26)]):
        state = chunks(lab, table, page, parts)
        now = [np.concatenate([x[s][a:b] for s, (a, b) in enumerate(parts)]) for x in (q, k, v)]
        lab.ops.kv_store(cache, now[1], now[2], state)
        out = lab.out(len(now[0]), heads, 16)
        lab.ops.attention(out, now[0], cache, state, spec, lab.vector(sink) if sinks else None)
        n = parts[0][1] - parts[0][0]
        found[0].append(out[:n])
        found[1].append(out[n:])
    for s, n in enumerate(lengths):
        row, column = np.mgrid[:n, :n]
        seen = (column <= row) & ((column > row - window) if window else True)
        for h in range(heads):
            g = h * kv // heads
            z = np.where(seen, 0.3 * (q[s][:, h].astype(np.float64) @ k[s][:, g].T), -np.inf)
            p = np.exp(z)
            total = p.sum(1) + (math.exp(sink[h]) if sinks else 0)
            near(np.concatenate(found[s])[:, h], np.diag(1 / total) @ p @ v[s][:, g], 1e-5)


def test_attention_does_not_overflow(lab: Lab) -> None:
    state = chunks(lab, np.array([[0]]), 4, [(0, 3)])
    k, v = np.array([[[100.0]], [[-100.0]], [[90.0]]], np.float32), lab.normal(3, 1, 1)
    cache, out = KVLayer(lab.out(4, 1, 1), lab.out(4, 1, 1)), lab.out(3, 1, 1)
    lab.ops.kv_store(cache, k, v, state)
    lab.ops.attention(out, np.full((3, 1, 1), 100, np.float32), cache, state, AttentionSpec(1, 1, 1, RopeSpec(2), 1, 0))
    assert (out[:, 0, 0] == v[0, 0, 0]).all()


# experts


def empty_routing(lab: Lab, t: int, spec: MoeSpec) -> Routing:
    n = t * spec.n_expert_used
    shapes = ((t, spec.n_expert_used), (t, spec.n_expert_used), (n,), (spec.n_expert + 1,))
    return Routing(*(lab.out(*s, dtype=d) for s, d in zip(shapes, ("i32", "f32", "i32", "i32"))))


def test_top_k(lab: Lab) -> None:
    logits = np.round(lab.normal(6, 90, scale=3))  # ties, and zeros of both signs
    logits[1, [80, 2, 41]], logits[2, [8, 3]], logits[3, 5:] = np.nan, (np.inf, -np.inf), -np.inf
    for k in (1, 4, 90):
        values, ids = lab.out(6, k, dtype="f32"), lab.out(6, k, dtype="i32")
        lab.ops.top_k(values, ids, logits)
        for row, found, at in zip(logits.tolist(), values, ids.tolist()):
            assert at == sorted(range(90), key=lambda i: (row[i] == row[i], -row[i] if row[i] == row[i] else 0, i))[:k]
            np.testing.assert_array_equal(found, [row[i] for i in at])


@pytest.mark.parametrize("norm_weights", [True, False])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [True, False])
def test_route(lab: Lab, gating: str, norm_weights: bool, biased: bool) -> None:
    spec = MoeSpec(12, 5, 8, 1e-6, gating, norm_weights, 1.5)
    logits, bias = np.round(lab.normal(40, 12, scale=1.5)), np.round(lab.normal(12)) / 4  # many ties
    r = empty_routing(lab, 40, spec)
    lab.ops.route(r, logits.astype(np.float32), spec, lab.vector(bias.astype(np.float32)) if biased else None)
    entries: list[tuple[int, int]] = []
    for t, row in enumerate(logits.tolist()):
        whole = math.fsum(map(math.exp, row))
        gates = [math.exp(z) / whole if gating == "softmax" else 1 / (1 + math.exp(-z)) for z in row]
        score = [g + b if biased else g for g, b in zip(gates, bias.tolist())]
        ids = sorted(range(12), key=lambda e: (-round(score[e], 6), e))[:5]  # round: equal sums of float32
        assert r.ids[t].tolist() == ids
        share = math.fsum(gates[e] for e in ids) if norm_weights else 1
        near(r.weights[t], np.array([1.5 * gates[e] / share for e in ids]), 1e-5)
        entries += [(e, t * 5 + i) for i, e in enumerate(ids)]
    assert r.order.tolist() == [i for _, i in sorted(entries)]
    assert r.starts.tolist() == [sum(e < bound for e, _ in entries) for bound in range(13)]


@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_dense_sums_with_gates(lab: Lab, fused: bool) -> None:
    """sum over all e of gate[t, e] * down[e] (silu(gate[e] x) * up[e] x), gates 0 for who was not chosen."""
    t, d, f, spec = 9, 24, 10, MoeSpec(4, 2, 10, 1e-6)
    gate, up, down = lab.normal(4, f, d, scale=0.3), lab.normal(4, f, d, scale=0.3), lab.normal(4, d, f, scale=0.3)
    gate_bias, up_bias, down_bias = lab.normal(4, f), lab.normal(4, f), lab.normal(4, d)
    x, residual, r = lab.normal(t, d), lab.normal(t, d), empty_routing(lab, t, spec)
    lab.ops.route(r, lab.normal(t, 4, scale=2), spec)
    h, y, total = lab.out(t * 2, f), lab.out(t * 2, d), residual.copy()
    weights = (lab.vector(np.concatenate([gate, up], 1)), None) if fused else (lab.vector(gate), lab.vector(up))
    lab.ops.expert_glu(h, x, r, *weights, "silu", lab.vector(gate_bias), lab.vector(up_bias))
    lab.ops.expert_down(y, h, r, lab.vector(down), lab.vector(down_bias))
    lab.ops.combine(total, y, r)
    chosen = np.zeros((t, 4))
    np.put_along_axis(chosen, r.ids.astype(int), r.weights.astype(np.float64), 1)
    x, gate, up, down = wide(x, gate, up, down)
    a, b = (np.einsum("td,efd->etf", x, w) + bias[:, None] for w, bias in ((gate, gate_bias), (up, up_bias)))
    near(total, residual + np.einsum("te,etd->td", chosen, (a / (1 + np.exp(-a)) * b) @ down.transpose(0, 2, 1)
                                     + down_bias[:, None]))  # fmt: skip


# recurrent layers


PARTS = ([(0, 7), (0, 1)], [(7, 8), (1, 2)], [(8, 20), (2, 33)])
"""Two sequences in three ubatches: prompt and single token side by side, decode, prompt from the middle."""


def test_convolution(lab: Lab) -> None:
    """Against np.convolve of each channel's whole history; what the state held before is forgotten at position 0."""
    x, w = [lab.normal(20, 6), lab.normal(33, 6)], lab.normal(6, 4)
    cache, table = RecurrentLayer(lab.normal(2, 3, 6), lab.normal(1)), np.zeros((2, 1))
    found: list[list[Array]] = [[], []]
    for parts in PARTS:
        now = np.concatenate([x[s][a:b] for s, (a, b) in enumerate(parts)])
        out = lab.out(*now.shape)
        lab.ops.conv1d(out, now, lab.vector(w), cache, chunks(lab, table, 64, parts))
        n = parts[0][1] - parts[0][0]
        found[0].append(out[:n])
        found[1].append(out[n:])
    for s, values in enumerate(x):
        y = np.stack([np.convolve(values[:, c], w[c, ::-1].astype(float))[: len(values)] for c in range(6)], 1)
        near(np.concatenate(found[s]), y / (1 + np.exp(-y)))
        assert (cache.conv[1 - s] == values[-3:]).all()  # chunks() swaps the state rows


def closed_form(q: Array, k: Array, v: Array, log_decay: Array, rate: Array) -> tuple[Array, Array]:
    """One head's outputs and last state from zeros, without recursion: the updates u solve a triangular system,
    (I + tril(diag(b) (K K^T * D), -1)) U = diag(b) V with D[i, j] = exp(g[j + 1] + ... + g[i])."""
    total = np.cumsum(log_decay)
    decay = np.tril(np.exp(total[:, None] - total[None]))
    system = np.eye(len(k)) + np.tril(rate[:, None] * (k @ k.T) * decay, -1)
    u = np.linalg.solve(system, rate[:, None] * v)
    return (q @ k.T * decay) @ u, (k * decay[-1][:, None]).T @ u


def test_delta_rule(lab: Lab) -> None:
    spec, n_k, n_v, dim = DeltaNetSpec(2, 6, 8, 8, 4, 1e-6), 2, 6, 8
    q, k, v = ([lab.normal(n, h, dim) for n in (20, 33)] for h in (n_k, n_k, n_v))
    k = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in k]
    alpha, beta = ([lab.normal(n, n_v, scale=2) for n in (20, 33)] for _ in range(2))
    dt, a = lab.normal(n_v), -np.exp(lab.normal(n_v) - 2)
    cache, table = RecurrentLayer(lab.normal(1), lab.normal(2, n_v, dim, dim)), np.zeros((2, 1))
    found: list[list[Array]] = [[], []]
    for parts in PARTS:
        now = [np.concatenate([x[s][i:j] for s, (i, j) in enumerate(parts)]) for x in (q, k, v, alpha, beta)]
        out = lab.out(len(now[0]), n_v, dim)
        lab.ops.delta_net(out, *now, lab.vector(dt), lab.vector(a), cache, chunks(lab, table, 64, parts), spec)
        n = parts[0][1] - parts[0][0]
        found[0].append(out[:n])
        found[1].append(out[n:])
    for s in range(2):
        for h in range(n_v):
            g = float(a[h]) * np.log1p(np.exp(alpha[s][:, h].astype(float) + float(dt[h])))
            rate = 1 / (1 + np.exp(-beta[s][:, h].astype(float)))
            qh, kh, vh = wide(q[s][:, h % n_k], k[s][:, h % n_k], v[s][:, h])
            right, last = closed_form(qh, kh, vh, g, rate)
            near(np.concatenate(found[s])[:, h], right / math.sqrt(dim), 1e-5)
            near(cache.s[1 - s, h], last, 1e-5)


def test_a_rate_of_one_recalls_what_was_written_last(lab: Lab) -> None:
    """With no decay and rate 1, asking with the last key gives the last value exactly."""
    spec, n = DeltaNetSpec(1, 1, 8, 8, 4, 1e-6), 12
    k, v = lab.normal(n, 1, 8), lab.normal(n, 1, 8)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    out, one = lab.out(n, 1, 8), lab.vector(np.zeros(1, np.float32))
    cache, state = RecurrentLayer(lab.normal(1), lab.normal(1, 1, 8, 8)), chunks(lab, np.zeros((1, 1)), 64, [(0, n)])
    great = np.full((n, 1), 60, np.float32)
    lab.ops.delta_net(out, k * math.sqrt(8), k, v, great, great, one, one, cache, state, spec)
    near(out, v, 1e-5)
