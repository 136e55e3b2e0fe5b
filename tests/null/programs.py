"""Random programs on the null device: real steps over tensors that exist only as shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from headrace import blocks
from headrace.backends.null import NullDevice
from headrace.config import Config
from headrace.gguf import TensorInfo
from headrace.kvcache import KVCache
from headrace.plan import Plan, make_plan
from headrace.program import Program, TensorTable
from headrace.quants import TYPES
from headrace.runner import Runner
from headrace.spec import AttentionSpec, FfnSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.stream import ExpertStream

N_EMBD, N_VOCAB = 32, 50
ATTENTION = AttentionSpec(2, 1, 16, RopeSpec(16), 0.25, 1e-6)


@dataclass(frozen=True)
class Layer:
    """The FFN of one layer: 0 experts make it dense; `types` are those of gate, up and down."""

    n_expert: int
    n_ff: int
    fused: bool = False
    types: tuple[str, str, str] = ("Q4_0", "Q4_0", "Q8_0")

    @property
    def spec(self) -> FfnSpec | MoeSpec:
        if not self.n_expert:
            return FfnSpec(self.n_ff, 1e-6)
        return MoeSpec(self.n_expert, min(2, self.n_expert), self.n_ff, 1e-6)


class Invented(TensorTable):
    """Has every tensor that is asked for, in the shape that is wanted."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__({}, "invented")
        self.layers, self.infos = layers, dict[str, TensorInfo]()

    def has(self, name: str) -> bool:
        return name == "output.weight" or ("gate_up" in name and self.layers[int(name.split(".")[1])].fused)

    def need(self, name: str, *shape: int) -> str:
        kind = TYPES["F32"]
        if "_exps" in name:
            layer = self.layers[int(name.split(".")[1])]
            kind = TYPES[layer.types[("gate", "up", "down").index(name.split("_")[1])]]
        n_bytes = int(np.prod(shape)) // kind.block * kind.block_bytes
        self.infos[name] = TensorInfo(name, kind, shape, 0, 0, n_bytes)
        return name


def program(layers: list[Layer]) -> tuple[Program, Mapping[str, TensorInfo]]:
    n = len(layers)
    spec = ModelSpec(
        "invented", "invented", n, N_EMBD, N_VOCAB, 4096, 1e-6, (ATTENTION,) * n, (None,) * n,
        tuple(layer.spec for layer in layers),
    )  # fmt: skip
    table = Invented(layers)
    steps = [blocks.embedding(table, spec)]
    for i, layer in enumerate(layers):
        steps.append(blocks.attention(table, spec, i))
        steps.append((blocks.moe_ffn if layer.n_expert else blocks.dense_ffn)(table, spec, i))
    return Program(spec, (*steps, blocks.head(table, spec))), table.infos


class Rig:
    """A Runner on a null device; `resident` names expert tensors that need no upload."""

    def __init__(
        self, layers: list[Layer], resident: frozenset[str], more_slots: int, device: NullDevice, **wishes: object
    ) -> None:  # fmt: skip
        self.device = device
        wishes = {"n_cpu_moe": len(layers)} | wishes
        self.program, infos = program(layers)
        plan = make_plan(self.program, infos, device.info, Config.of(**wishes), device.act_dtype)
        placements = {
            name: replace(p, feed="resident") if name in resident else p for name, p in plan.placements.items()
        }
        self.streamed = {name: infos[name] for name, p in placements.items() if p.feed == "stream"}
        self.groups = [
            [name for name in step.experts.tensors if name in self.streamed] for step in self.program.steps
            if step.experts
        ]  # fmt: skip
        n_slots = max((len(g) for g in self.groups), default=0) + more_slots if self.streamed else 0
        slot_bytes = max((info.n_bytes for info in self.streamed.values()), default=0)
        self.plan: Plan = replace(plan, placements=placements, n_slots=n_slots, slot_bytes=slot_bytes)
        self.host = {name: np.empty(info.n_bytes, np.uint8) for name, info in self.streamed.items()}
        weights = {
            name: device.load(infos[name], np.empty(0, np.uint8)) for name in placements if name not in self.streamed
        }
        self.stream = ExpertStream(
            device, self.program, self.streamed, n_slots, slot_bytes, weights, lambda info: self.host[info.name]
        )
        c = Config.of(**wishes)
        self.cache = KVCache(device, self.program.spec, plan.n_ctx, c.n_seq_max, c.cache_type_k, c.cache_type_v)
        self.runner = Runner(self.program, self.plan, device, self.cache, self.stream, weights)

    @cached_property
    def pass_bytes(self) -> int:
        """What one window brings over the link."""
        return sum(info.n_bytes for info in self.streamed.values())

    def unordered_lookahead(self, first_order: int) -> list[str]:
        """Layers of the pass since `first_order` whose experts were not on their way when the layer before, with
        room for both in the slots, began to compute."""
        orders = self.device.orders[first_order:]
        groups = [g for g in self.groups if g]
        late = []
        for now, following in pairwise(groups):
            if len(now) + len(following) <= self.plan.n_slots:
                begins = next(i for i, o in enumerate(orders) if any(name in now for name, _ in o.weights))
                given = {o.source for o in orders[:begins] if o.queue == "copy"}
                late += [name for name in following if name not in given]
        return late
