"""The op-case table: every op at odd sizes and odd contents, for every backend against the reference.

A case is a function of a Lab, which makes tensors and weights on a device from seeded numbers; it runs ops and returns
what they wrote. Numbers are scaled so that softmax and routing are far from uniform, and outputs start as NaN.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.backends.base import Device, KVLayer, RecurrentLayer, Routing, StepState
from headrace.gguf import TensorInfo
from headrace.quants import TYPES, random_blocks
from headrace.spec import AttentionSpec, DeltaNetSpec, MoeSpec, RopeSpec

PAGE = 16
Result = list[np.ndarray]


class Lab:
    """Seeded numbers as tensors, weights and states of one device; `decode` takes the ops of the decode phase."""

    def __init__(self, device: Device, seed: int = 0, decode: bool = False, layout: str = "in_place") -> None:
        self.device, self.rng, self.layout, self.decode = device, np.random.default_rng(seed), layout, decode
        self.ops = device.decode_ops if decode else device.ops
        self.kept: list[np.ndarray] = []

    def tensor(self, values: Any, dtype: str = "act") -> Any:
        values = np.asarray(values)
        dtype = self.device.act_dtype if dtype == "act" else dtype
        t = self.device.alloc(values.shape, dtype)
        if values.size:
            self.device.upload(t, values)
        return t

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """float32 numbers that float16 holds exactly, so that every backend starts from the same."""
        return (self.rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)

    def acts(self, *shape: int, scale: float = 1.0) -> Any:
        return self.tensor(self.normal(*shape, scale=scale))

    def f32(self, *shape: int, scale: float = 1.0) -> Any:
        return self.tensor(self.normal(*shape, scale=scale), "f32")

    def out(self, *shape: int, dtype: str = "act") -> Any:
        return self.tensor(np.full(shape, np.nan if dtype != "i32" else -7), dtype)

    def weight(self, type_name: str, *shape: int, scale: float = 1.0, gathered: bool = False) -> Any:
        """A matrix or stack of random blocks with a standard deviation of scale / sqrt(row width); if gathered, in host
        memory where the device fetches experts from there."""
        kind = TYPES[type_name]
        n = int(np.prod(shape)) // kind.block
        raw = random_blocks(kind, n, self.rng, scale * shape[-1] ** -0.5).reshape(-1)
        layout = self.layout if type_name in self.device.info.repack_types else "in_place"
        info = TensorInfo("w", kind, shape, 0, 0, raw.nbytes)
        if gathered and (view := self.device.gather_view(info, self.tensor(np.full(raw.nbytes, 255), "u8"), raw)):
            self.kept.append(raw)
            return view
        return self.device.load(info, raw, layout)

    def vector(self, values: np.ndarray) -> Any:
        raw = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
        return self.device.load(TensorInfo("v", TYPES["F32"], values.shape, 0, 0, raw.nbytes), raw)

    def get(self, *tensors: Any) -> Result:
        return [np.asarray(self.device.download(t)).astype(np.float64) for t in tensors]

    def state(self, *sequences: tuple[int, int], n_block: int = 8, page: int = PAGE) -> StepState:
        """A ubatch of sequences (tokens already there, tokens new), their pages shuffled."""
        n_seq = len(sequences)
        table = self.rng.permutation(n_seq * n_block).reshape(n_seq, n_block)
        positions = [np.arange(past, past + new) for past, new in sequences]
        rows = [table[s, p // page] * page + p % page for s, p in enumerate(positions)]
        i32 = [
            np.zeros(sum(n for _, n in sequences)), np.concatenate(positions), np.concatenate(rows),
            np.cumsum([0, *(n for _, n in sequences)]), table, self.rng.permutation(n_seq), np.zeros(1),
        ]  # fmt: skip
        return StepState(*(self.tensor(v.astype(np.int32), "i32") for v in i32), page=page)

    def routing(self, n: int, spec: MoeSpec, ids: np.ndarray | None = None) -> Routing:
        """Routed tokens; given ids stand for the router's choice."""
        r = Routing(
            self.out(n, spec.n_expert_used, dtype="i32"), self.out(n, spec.n_expert_used, dtype="f32"),
            self.out(n * spec.n_expert_used, dtype="i32"), self.out(spec.n_expert + 1, dtype="i32"),
        )  # fmt: skip
        logits = self.normal(n, spec.n_expert, scale=2.0)
        if ids is not None:
            logits[:] = -20
            np.put_along_axis(logits, ids, 5.0 - np.arange(spec.n_expert_used), 1)
        self.ops.route(r, self.tensor(logits, "f32"), spec)
        return r


@dataclass(frozen=True)
class Case:
    """`tolerance`: "bits", "exact" (float32 arithmetic) or "product" (activations may be quantised or 16-bit)."""

    name: str
    fn: Callable[[Lab], Result]
    tolerance: str = "exact"
    decode: bool = False
    """One token a sequence, by the ops of the decode phase."""

    def run(self, device: Device, layout: str = "in_place") -> Result:
        """What the ops wrote; the numbers depend on the name alone."""
        return self.fn(Lab(device, zlib.crc32(self.name.encode()), self.decode, layout))


def norm_case(lab: Lab, t: int, n: int) -> Result:
    x, out = lab.f32(t, n, scale=3), lab.out(t, n)
    lab.ops.rms_norm(out, x, lab.vector(lab.normal(n)), 1e-6)
    heads = lab.acts(t, 3, 2 * 32)  # q and gate side by side in each head
    q, k = lab.out(t, 3, 32), lab.out(t, 2, 32)
    lab.ops.rms_norm(q, heads[:, :, :32], lab.vector(lab.normal(32)), 1e-6)
    lab.ops.l2_norm(k, heads.reshape(t, 6, 32)[:, 2:4], 1e-3)
    y = lab.acts(t, n)
    lab.ops.rms_norm(y, y, None, 1e-6)
    return lab.get(out, q, k, y)


def gate_case(lab: Lab, t: int, n: int) -> Result:
    a, b, x = lab.acts(t, n, scale=3), lab.acts(t, n), lab.acts(t, n)
    lab.ops.glu(x, a, b, "silu")
    y = lab.acts(t, n)
    lab.ops.glu(y, a, y, "silu")  # in place on the second factor
    g = lab.out(t, n)
    lab.ops.glu(g, a, b, "gelu")
    heads, out = lab.acts(t, 2, 64, scale=3), lab.acts(t, 2, 32)
    lab.ops.sigmoid_mul(out, heads[:, :, 32:])
    one = lab.acts(t, n)
    lab.ops.sigmoid_mul(one, lab.f32(t, 1, scale=2))
    total = lab.f32(t, n)
    lab.ops.add(total, one)
    lab.ops.add_bias(total, lab.vector(lab.normal(n)))
    return lab.get(x, y, g, out, one, total)


def rows_case(lab: Lab, m: int) -> Result:
    x, out = lab.f32(9, 96), lab.out(m, 96, dtype="f32")
    lab.ops.gather_rows(out, x, lab.tensor(lab.rng.integers(0, 9, m).astype(np.int32), "i32"))
    return lab.get(out)


def top_k_case(lab: Lab, m: int, n: int, k: int, ties: bool = False) -> Result:
    logits = lab.normal(m, n, scale=3)
    if ties:
        logits = np.round(logits / 4) * np.float32(4)  # zeros of both signs among them
        logits[0, :: n // 3], logits[-1, -5:], logits[1, [7, n - 1]] = np.inf, np.nan, -np.inf
        logits[-1, n // 2] = -np.float32(np.nan)
    values, ids = lab.out(m, k, dtype="f32"), lab.out(m, k, dtype="i32")
    lab.ops.top_k(values, ids, lab.tensor(logits, "f32"))
    if ties:  # the ids tell the rest
        return lab.get(ids)
    return lab.get(values, ids)


def embed_case(lab: Lab, type_name: str, t: int = 4) -> Result:
    ids = np.resize([3, 0, 6, 3], t).astype(np.int32)
    out = lab.out(t, 512, dtype="f32")
    lab.ops.embed(out, lab.weight(type_name, 7, 512), lab.tensor(ids, "i32"))
    return lab.get(out)


def rope_case(lab: Lab, rope: RopeSpec, factors: bool = False, t: int = 3, heads: int = 5, dim: int = 64) -> Result:
    x = lab.acts(t, heads, dim)
    factor = lab.vector(np.linspace(1, 4, rope.n_rot // 2, dtype=np.float32)) if factors else None
    lab.ops.rope(x, lab.tensor(np.resize([0, 7, 301], t).astype(np.int32), "i32"), rope, factor)
    return lab.get(x)


def linear_case(lab: Lab, type_name: str, t: int, n_out: int, n_in: int) -> Result:
    x, w = lab.acts(t, n_in), lab.weight(type_name, n_out, n_in)
    out, added = lab.out(t, n_out, dtype="f32"), lab.f32(t, n_out)
    lab.ops.linear(out, x, w, lab.vector(lab.normal(n_out)))
    lab.ops.linear(added, x, w, add=True)
    return lab.get(out, added)


def row_case(lab: Lab, t: int, d: int) -> Result:
    """A one-dimensional weight, as the gate of a shared expert: one number a token, float32."""
    out = lab.out(t, 1, dtype="f32")
    lab.ops.linear(out, lab.acts(t, d), lab.vector(lab.normal(d)))
    return lab.get(out)


def attention_case(
    lab: Lab, *sequences: tuple[int, int], heads: int = 4, kv: int = 2, dim: int = 32, window: int = 0,
    sinks: bool = False, dtype: str = "f16", page: int = PAGE,
) -> Result:  # fmt: skip
    spec = AttentionSpec(heads, kv, dim, RopeSpec(dim), dim**-0.5, 1e-6, window)
    n_rows, t = 8 * page * len(sequences), sum(n for _, n in sequences)
    state = lab.state(*sequences, page=page)
    cache = KVLayer(lab.tensor(lab.normal(n_rows, kv, dim), dtype), lab.tensor(lab.normal(n_rows, kv, dim), dtype))
    lab.ops.kv_store(cache, lab.acts(t, kv, dim), lab.acts(t, kv, dim), state)
    out = lab.out(t, heads, dim)
    sink = lab.vector(lab.normal(heads)) if sinks else None
    lab.ops.attention(out, lab.acts(t, heads, dim, scale=4), cache, state, spec, sink)
    return lab.get(out, cache.k, cache.v)


def route_case(lab: Lab, t: int, spec: MoeSpec, bias: bool = False, ties: bool = False) -> Result:
    """A phase that decodes leaves the order unwritten."""
    logits = lab.normal(t, spec.n_expert, scale=3)
    if ties:
        logits = np.round(logits / 3) * 3
    r = Routing(
        lab.out(t, spec.n_expert_used, dtype="i32"), lab.out(t, spec.n_expert_used, dtype="f32"),
        lab.out(t * spec.n_expert_used, dtype="i32"), lab.out(spec.n_expert + 1, dtype="i32"),
    )  # fmt: skip
    lab.ops.route(r, lab.tensor(logits, "f32"), spec, lab.vector(lab.normal(spec.n_expert)) if bias else None)
    return lab.get(r.ids, r.weights, *(() if lab.decode else (r.order, r.starts)))


def experts_case(
    lab: Lab, type_name: str, t: int, d: int = 256, f: int = 96, *, used: int = 2, ids: str = "", fused: bool = False,
    bias: bool = False, up_type: str = "", down_type: str = "Q8_0", activation: str = "silu", n_expert: int = 5,
    gathered: bool = False,
) -> Result:  # fmt: skip
    spec = MoeSpec(n_expert, used, f, 1e-6)
    wanted = {"": None, "one": np.tile([3, 1], (t, 1)), "alone": np.array([[4, 0]] + [[1, 2]] * (t - 1))}[ids]
    r = lab.routing(t, spec, wanted)
    h, y, x = lab.out(t * used, f), lab.out(t * used, d), lab.f32(t, d)
    if fused:
        gate, up = lab.weight(type_name, n_expert, 2 * f, d, gathered=gathered), None
    else:
        types = (type_name, up_type or type_name)
        gate, up = (lab.weight(name, n_expert, f, d, gathered=gathered) for name in types)
    biases = [lab.vector(lab.normal(n_expert, n)) if bias else None for n in (f, f, d)]
    lab.ops.expert_glu(h, lab.acts(t, d), r, gate, up, activation, biases[0], biases[1])
    lab.ops.expert_down(y, h, r, lab.weight(down_type, n_expert, d, f, gathered=gathered), biases[2])
    lab.ops.combine(x, y, r)
    return lab.get(h, y, x)


def delta_case(
    lab: Lab, *sequences: tuple[int, int], k_heads: int = 2, v_heads: int = 4, dim: int = 32, alike: bool = False
) -> Result:  # fmt: skip
    """With `alike` a text of one token over and over, which hardly decays: all keys are equal."""
    spec = DeltaNetSpec(k_heads, v_heads, dim, dim, 4, 1e-6)
    state, t, n_slot = lab.state(*sequences), sum(n for _, n in sequences), len(sequences)
    width = spec.conv_width
    cache = RecurrentLayer(lab.f32(n_slot, 3, width), lab.f32(n_slot, v_heads, dim, dim, scale=0.3))
    conv = lab.out(t, width)
    x = np.repeat(lab.normal(1, width), t, 0) if alike else lab.normal(t, width)
    lab.ops.conv1d(conv, lab.tensor(x), lab.vector(lab.normal(width, 4)), cache, state)
    heads = conv.reshape(t, 2 * k_heads + v_heads, dim)
    q, k, out = lab.out(t, k_heads, dim), lab.out(t, k_heads, dim), lab.out(t, v_heads, dim)
    lab.ops.l2_norm(q, heads[:, :k_heads], 1e-6)
    lab.ops.l2_norm(k, heads[:, k_heads : 2 * k_heads], 1e-6)
    alpha, beta = (
        lab.f32(t, v_heads),
        lab.tensor(np.full((t, v_heads), 3.0) if alike else lab.normal(t, v_heads), "f32"),
    )
    a = -np.exp(lab.normal(v_heads, scale=0.5)) * (1e-3 if alike else 1)
    lab.ops.delta_net(
        out, q, k, heads[:, 2 * k_heads :], alpha, beta, lab.vector(lab.normal(v_heads)), lab.vector(a), cache, state,
        spec,
    )  # fmt: skip
    return lab.get(conv, out, cache.conv, cache.s)


def case(
    name: str, fn: Callable[..., Result], *args: Any, tolerance: str = "exact", decode: bool = False, **options: Any
) -> Case:  # fmt: skip
    return Case(name, lambda lab: fn(lab, *args, **options), tolerance, decode)


QUANTISED = [name for name in TYPES if name not in ("F32", "F16", "BF16")]
CASES = [
    *(case(f"norms {t}x{n}", norm_case, t, n) for t, n in ((0, 96), (1, 32), (3, 1408), (17, 768))),
    *(case(f"gates {t}x{n}", gate_case, t, n) for t, n in ((0, 96), (1, 32), (5, 1408))),
    *(case(f"gather {m}", rows_case, m) for m in (0, 1, 5)),
    *(case(f"top {k} of {m}x{n}", top_k_case, m, n, k, tolerance="bits")
      for m, n, k in ((0, 9, 1), (1, 9, 1), (3, 2049, 1), (1, 64, 64), (2, 70, 64), (5, 4999, 40), (64, 300, 7))),
    *(case(f"top {k} with ties", top_k_case, 3, 5000, k, ties=True, tolerance="bits") for k in (1, 6, 64)),
    *(case(f"embed {name}", embed_case, name) for name in TYPES),
    case("rope neox part", rope_case, RopeSpec(32)),
    case("rope interleaved", rope_case, RopeSpec(64, interleaved=True)),
    case("rope factors", rope_case, RopeSpec(64, 5e5), factors=True),
    case("rope linear", rope_case, RopeSpec(64, scaling="linear", factor=4.0)),
    case("rope yarn", rope_case, RopeSpec(64, 1e6, scaling="yarn", factor=4.0, n_ctx_original=256)),
    *(case(f"linear {n}", linear_case, n, 3, 70, 512, tolerance="product") for n in QUANTISED),
    case("linear F32", linear_case, "F32", 5, 33, 96),
    *(case(f"linear {n}", linear_case, n, 5, 33, 96, tolerance="product") for n in ("F16", "BF16")),
    *(case(f"linear Q8_0 {t}x{n}x{k}", linear_case, "Q8_0", t, n, k, tolerance="product")
      for t, n, k in ((0, 16, 32), (1, 16, 32), (2, 7, 96), (17, 48, 1408), (33, 96, 768))),
    *(case(f"linear Q4_K {t}", linear_case, "Q4_K", t, 80, 256, tolerance="product") for t in (1, 2, 8, 13, 40)),
    *(case(f"decode linear {n}", linear_case, n, 1, 37, 512, tolerance="product", decode=True) for n in TYPES),
    case("decode linear several", linear_case, "Q4_K", 5, 37, 256, tolerance="product", decode=True),
    *(case(f"linear one row {t}", row_case, t, 96, tolerance="product") for t in (0, 1, 17)),
    case("decode linear one row", row_case, 1, 768, tolerance="product", decode=True),
    case("attention one token", attention_case, (0, 1)),
    case("attention decode", attention_case, (77, 1), heads=8, kv=1),
    case("attention prompt", attention_case, (5, 40), heads=2, kv=2, dim=64),
    case("attention f32", attention_case, (3, 20), dtype="f32"),
    case("attention window", attention_case, (30, 33), window=9),
    case("attention sinks", attention_case, (10, 7), sinks=True, heads=1, kv=1),
    case("attention several", attention_case, (3, 20), (60, 1), (0, 17), heads=6, kv=2),
    case("attention pages of 64", attention_case, (150, 6), (0, 130), page=64),
    case("attention wide heads", attention_case, (20, 5), heads=4, kv=1, dim=128),
    case("attention widest heads", attention_case, (9, 1), (0, 19), heads=2, kv=1, dim=256, page=64),
    case("decode attention", attention_case, (400, 1), heads=8, kv=2, dim=64, page=64, decode=True),
    case("decode attention window", attention_case, (90, 1), (3, 1), window=17, decode=True),
    case("attention decode several", attention_case, (3, 1), (100, 1), (0, 1), window=50, sinks=True),
    *(case(f"route {t}", route_case, t, MoeSpec(16, 4, 32, 1e-6)) for t in (0, 1, 33)),
    case("route odd", route_case, 5, MoeSpec(6, 3, 32, 1e-6, norm_weights=False, weight_scale=2.5)),
    case("route sigmoid bias", route_case, 9, MoeSpec(8, 2, 32, 1e-6, gating="sigmoid"), bias=True),
    case("route ties", route_case, 20, MoeSpec(16, 4, 32, 1e-6), ties=True),
    case("route all", route_case, 3, MoeSpec(4, 4, 32, 1e-6)),
    case("route one", route_case, 7, MoeSpec(5, 1, 32, 1e-6)),
    case("route many", route_case, 18, MoeSpec(256, 8, 32, 1e-6)),
    case("route more", route_case, 2, MoeSpec(512, 10, 32, 1e-6)),
    *(case(f"decode route {t}", route_case, t, MoeSpec(16, 4, 32, 1e-6), decode=True) for t in (0, 1, 3)),
    case("decode route odd", route_case, 5, MoeSpec(6, 3, 32, 1e-6, norm_weights=False, weight_scale=2.5), decode=True),
    case("decode route sigmoid bias", route_case, 4, MoeSpec(160, 6, 32, 1e-6, gating="sigmoid"), bias=True,
         decode=True),
    case("decode route softmax bias", route_case, 3, MoeSpec(8, 2, 32, 1e-6), bias=True, decode=True),
    case("decode route ties", route_case, 5, MoeSpec(128, 8, 32, 1e-6), ties=True, decode=True),
    case("decode route all", route_case, 2, MoeSpec(5, 5, 32, 1e-6), decode=True),
    case("decode route more", route_case, 2, MoeSpec(512, 10, 32, 1e-6), decode=True),
    *(case(f"experts {n}", experts_case, n, 4, f=32, tolerance="product") for n in TYPES),
    *(case(f"decode experts {n}", experts_case, n, 1, f=32, used=1, tolerance="product", decode=True) for n in TYPES),
    case("decode experts several", experts_case, "Q4_K", 3, f=32, tolerance="product", decode=True),
    case("decode experts fused", experts_case, "Q8_0", 1, fused=True, tolerance="product", decode=True),
    case("decode experts two types", experts_case, "Q4_K", 2, d=256, f=32, up_type="Q6_K", bias=True,
         tolerance="product", decode=True),
    case("decode experts gathered", experts_case, "Q4_K", 2, d=256, f=32, ids="one", gathered=True, tolerance="product",
         decode=True),
    case("experts gathered", experts_case, "Q4_K", 7, d=256, f=32, ids="one", gathered=True, tolerance="product"),
    case("experts gathered fused", experts_case, "Q8_0", 5, f=32, ids="alone", fused=True, gathered=True, n_expert=9,
         tolerance="product"),
    case("decode experts biases", experts_case, "MXFP4", 1, bias=True, tolerance="product", decode=True),
    case("experts one a token", experts_case, "Q4_K", 9, used=1, tolerance="product"),
    case("experts gelu", experts_case, "Q8_0", 5, activation="gelu", tolerance="product"),
    *(case(f"experts tokens {t}", experts_case, "Q4_K", t, tolerance="product") for t in (0, 1, 2, 40)),
    case("experts all on one", experts_case, "Q5_K", 33, ids="one", tolerance="product"),
    case("experts one token alone", experts_case, "Q4_K", 12, ids="alone", tolerance="product"),
    case("experts fused", experts_case, "Q4_K", 9, fused=True, tolerance="product"),
    case("experts biases", experts_case, "MXFP4", 5, bias=True, tolerance="product"),
    case("experts two types", experts_case, "Q4_K", 9, up_type="Q6_K", tolerance="product"),
    case("experts odd width", experts_case, "Q8_0", 20, d=96, f=352, tolerance="product"),
    case("experts Q4_0 down", experts_case, "IQ4_XS", 6, d=512, f=64, down_type="Q4_0", tolerance="product"),
    case("delta one token", delta_case, (0, 1)),
    case("delta decode", delta_case, (9, 1), (40, 1)),
    case("delta prompt", delta_case, (5, 70)),
    case("delta of one token over and over", delta_case, (0, 70), alike=True),
    case("delta wide", delta_case, (0, 5), k_heads=1, v_heads=2, dim=128),
    case("decode delta", delta_case, (9, 1), (0, 1), (40, 1), dim=64, decode=True),
    case("decode delta fresh", delta_case, (0, 1), decode=True),
    case("decode delta wide", delta_case, (7, 1), (0, 1), k_heads=1, v_heads=3, dim=128, decode=True),
    case("decode delta odd", delta_case, (1, 1), (64, 1), (0, 1), k_heads=3, v_heads=9, dim=96, decode=True),
    case("decode delta widest", delta_case, (3, 1), k_heads=1, v_heads=1, dim=256, decode=True),
    case("delta several", delta_case, (0, 2), (7, 33), (50, 1), k_heads=1, v_heads=3),
]  # fmt: skip
