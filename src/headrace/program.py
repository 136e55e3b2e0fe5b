"""The forward pass as a flat list of steps.

A Step names a function over the op table, the resident tensors it reads and at most one ExpertGroup; a Program is
the steps in order. Everything else - placement, schedule, streaming - is derived from this list. Pure: no device.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .backends.base import DTYPE_BYTES, Arena, KVLayer, Ops, RecurrentLayer, Routing, StepState, Tensor, Weight
from .errors import UserError
from .gguf import TensorInfo
from .spec import ModelSpec


@dataclass(frozen=True)
class ExpertGroup:
    """The routed experts of one layer, by tensor name; `up` is None where `gate` is the fused ffn_gate_up_exps."""

    gate: str
    up: str | None
    down: str

    @property
    def tensors(self) -> tuple[str, ...]:
        """In the order in which a step reads them, which is the order of upload."""
        return tuple(name for name in (self.gate, self.up, self.down) if name)


@dataclass(frozen=True)
class Step:
    """One entry of a Program: `fn(run, w, params)` with `w` holding the weights by their short GGUF names."""

    name: str
    fn: "StepFn"
    params: Any
    weights: tuple[str, ...] = ()
    experts: ExpertGroup | None = None
    layer: int = -1


@dataclass(frozen=True)
class Program:
    spec: ModelSpec
    steps: tuple[Step, ...]

    @property
    def expert_tensors(self) -> tuple[str, ...]:
        """All routed expert tensors in upload order."""
        return tuple(name for step in self.steps if step.experts for name in step.experts.tensors)

    @property
    def resident_tensors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for step in self.steps for name in step.weights))


class Run:
    """What a step sees of the ubatch that is running.

    x float32 [T, n_embd] is the residual stream, updated in place; logits float32 [M, n_vocab] is the head's output;
    `cache` is the KVLayer or RecurrentLayer of the running step's layer.
    """

    def __init__(
        self, ops: Ops, arena: Arena, act_dtype: str, state: StepState, x: Tensor, logits: Tensor,
        caches: Mapping[int, KVLayer | RecurrentLayer],
    ) -> None:  # fmt: skip
        self.ops, self.state, self.x, self.logits, self.caches = ops, state, x, logits, caches
        self.arena, self.act_dtype = arena, act_dtype
        self.n_tokens, self.n_out = x.shape[0], logits.shape[0]
        self.cache: Any = None

    def new(self, *shape: int, dtype: str = "act") -> Tensor:
        """A temporary that lives until the step ends; "act" is the device's activation dtype."""
        return self.arena.take(shape, self.act_dtype if dtype == "act" else dtype)

    def routing(self, n_expert: int, n_expert_used: int) -> Routing:
        n = self.n_tokens
        return Routing(
            ids=self.new(n, n_expert_used, dtype="i32"), weights=self.new(n, n_expert_used, dtype="f32"),
            order=self.new(n * n_expert_used, dtype="i32"), starts=self.new(n_expert + 1, dtype="i32"),
        )  # fmt: skip


class Weights(SimpleNamespace):
    """A step's weights as attributes under their GGUF names: blk.3.attn_q.weight is `attn_q`, ….bias `attn_q_bias`.

    A tensor that the file does not have reads as None. `experts` is the layer's ExpertWeights.
    """

    def __getattr__(self, name: str) -> Weight | None:
        return None


@dataclass(frozen=True)
class ExpertWeights:
    """An ExpertGroup's weights where the step finds them: resident, or in slots."""

    gate: Weight
    up: Weight | None
    down: Weight


StepFn = Callable[[Run, Weights, Any], None]


def short_name(tensor: str) -> str:
    """blk.3.attn_q.weight -> attn_q, blk.3.attn_q.bias -> attn_q_bias, blk.3.ssm_a -> ssm_a."""
    parts = tensor.split(".")
    parts = parts[2:] if parts[0] == "blk" else parts
    return parts[0] if len(parts) == 1 or parts[1] == "weight" else f"{parts[0]}_{parts[1]}"


def run_step(step: Step, run: Run, weights: Weights) -> None:
    run.arena.reset()
    run.cache = run.caches.get(step.layer)
    step.fn(run, weights, step.params)


class TensorTable:
    """The file's tensors while a Program is built: each is asked for once by name with its expected shape.

    `finish` refuses what nobody asked for, so no tensor of a file is ever silently ignored.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], source: str) -> None:
        self.tensors, self.source = tensors, source
        self.used: set[str] = set()

    def need(self, name: str, *shape: int) -> str:
        """The name, after checks; raises UserError if the file lacks it or has it in another shape."""
        if name not in self.tensors:
            raise UserError(f"{self.source}: tensor {name!r} is missing; the file is incomplete or of a newer layout")
        found = self.tensors[name].shape
        if tuple(found) != shape:
            raise UserError(
                f"{self.source}: tensor {name!r} has shape {list(found)}, its metadata asks for {list(shape)}"
            )
        self.used.add(name)
        return name

    def maybe(self, name: str, *shape: int) -> tuple[str, ...]:
        """(name,) if the file has it, else ()."""
        return (self.need(name, *shape),) if name in self.tensors else ()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def skip(self, prefix: str) -> None:
        """Tolerates every tensor under a prefix (a next-token-prediction block, say)."""
        self.used.update(name for name in self.tensors if name.startswith(prefix))

    def finish(self) -> None:
        extra = sorted(set(self.tensors) - self.used)
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise UserError(f"{self.source}: unexpected tensor {extra[0]!r}{more}; this architecture does not use it")


@dataclass
class ShapeTensor:
    """A Tensor without memory: only its shape, for dry runs of a Program."""

    shape: tuple[int, ...]
    dtype: str = "f32"

    def reshape(self, *shape: int) -> "ShapeTensor":
        assert math.prod(shape) == math.prod(self.shape), f"cannot view {self.shape} as {shape}"
        return ShapeTensor(shape, self.dtype)

    def __getitem__(self, index: Any, /) -> "ShapeTensor":
        index = index if isinstance(index, tuple) else (index,)
        dims: list[int] = []
        for axis, n in enumerate(self.shape):
            i = index[axis] if axis < len(index) else slice(None)
            if isinstance(i, slice):
                dims.append(len(range(*i.indices(n))))
        return ShapeTensor(tuple(dims), self.dtype)


class ShapeArena:
    """Hands out ShapeTensors and remembers the most bytes that one step held, each take rounded up to `ALIGN`."""

    ALIGN = 256

    def __init__(self) -> None:
        self.n_bytes = self.peak_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: str) -> ShapeTensor:
        self.n_bytes += -(-math.prod(shape) * DTYPE_BYTES[dtype] // self.ALIGN) * self.ALIGN
        self.peak_bytes = max(self.peak_bytes, self.n_bytes)
        return ShapeTensor(shape, dtype)

    def reset(self) -> None:
        self.n_bytes = 0


class NoOps:
    """An op table that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def shape_state(n_tokens: int, n_seq: int, n_out: int, n_block: int, page: int) -> StepState:
    def i32(*shape: int) -> ShapeTensor:
        return ShapeTensor(shape, "i32")

    return StepState(
        token_ids=i32(n_tokens), positions=i32(n_tokens), kv_slots=i32(n_tokens), seq_start=i32(n_seq + 1),
        block_table=i32(n_seq, n_block), state_slots=i32(n_seq), out_rows=i32(n_out), page=page,
    )  # fmt: skip


def arena_bytes(program: Program, n_tokens: int, n_out: int, act_dtype: str) -> int:
    """Bytes of temporaries that the largest step needs for a ubatch of n_tokens: a dry run on shapes alone."""
    spec, arena = program.spec, ShapeArena()
    ops: Any = NoOps()
    run = Run(
        ops, arena, act_dtype, shape_state(n_tokens, 1, n_out, 1, 1), ShapeTensor((n_tokens, spec.n_embd)),
        ShapeTensor((n_out, spec.n_vocab)), {},
    )  # fmt: skip
    for step in program.steps:
        run_step(step, run, Weights(experts=SimpleNamespace(gate=None, up=None, down=None)))
    return arena.peak_bytes
