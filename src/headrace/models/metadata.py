"""Reads the metadata keys that architectures share; every key is under the architecture's own prefix."""

import math
from typing import Any, TypeVar

from ..errors import UserError
from ..gguf import File
from ..spec import AttentionSpec, DeltaNetSpec, FfnSpec, ModelSpec, MoeSpec, RopeSpec

T = TypeVar("T", int, float, bool, str)


class Metadata:
    """Typed access to `<architecture>.<key>`; a missing key without default is a UserError that names it."""

    def __init__(self, file: File) -> None:
        self.file, self.prefix = file, file.architecture + "."

    def integer(self, key: str, default: int | None = None) -> int:
        return self._get(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._get(key, float, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._get(key, bool, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default)

    def size(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self.error(f"{self.prefix}{key} = {value} makes no sense; the least value is 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if not 0.0 < value < math.inf:
            raise self.error(f"{self.prefix}{key} = {value} makes no sense; it must be above 0")
        return value

    def array(self, key: str) -> list[Any] | None:
        """An array's values, a single value as one of them; None without the key."""
        value = self.file.metadata.get(self.prefix + key)
        return value if value is None else [value] if isinstance(value, int | float | str) else list(value)

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def refuse(self, key: str, *fine: Any) -> None:
        """Refuses a key whose value changes the model in a way that is not built; `fine` values change nothing."""
        value = self.file.metadata.get(self.prefix + key)
        if value is not None and value not in fine:
            raise self.error(f"{self.prefix}{key} = {value} is not supported")

    def error(self, text: str) -> UserError:
        return UserError(f"{self.file.path}: {text}")

    def _get(self, key: str, kind: type[T], default: T | None) -> T:
        if default is None:
            return self.file.get(self.prefix + key, kind)
        return self.file.get(self.prefix + key, kind, default=default)

    # what architectures share

    @property
    def n_vocab(self) -> int:
        """The vocabulary's size: rows of the embedding, which may exceed the tokenizer's list by padding."""
        info = self.file.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2:
            raise self.error("tensor 'token_embd.weight' is missing; this is no language model")
        return int(info.shape[0])

    @property
    def eps(self) -> float:
        return self.positive("attention.layer_norm_rms_epsilon")

    @property
    def n_layer(self) -> int:
        """Blocks in the file, next-token-prediction blocks included; each has several tensors."""
        n = self.size("block_count")
        if n > len(self.file.tensors):
            raise self.error(
                f"{self.prefix}block_count = {n}, but the file has {len(self.file.tensors)} tensors in all"
            )
        return n

    def rope(self, head_dim: int, *, interleaved: bool = False) -> RopeSpec:
        """llama.cpp's reading of the rope keys: a factor without a type is linear, a factor of 0 is none. YaRN's betas
        are honoured wherever a file has them; llama.cpp does so for a few architectures."""
        n_rot = self.size("rope.dimension_count", head_dim)
        if n_rot > head_dim or n_rot % 2:
            raise self.error(f"{self.prefix}rope.dimension_count = {n_rot} does not fit heads of width {head_dim}")
        scaling = self.text("rope.scaling.type", "linear")
        if scaling not in ("none", "linear", "yarn"):
            raise self.error(f"rope scaling {scaling!r} is not supported; known: none, linear, yarn")
        self.refuse("rope.scaling.yarn_ext_factor", 1.0)
        self.refuse("rope.scaling.yarn_log_multiplier", 0.0)
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 0.0)) or 1.0
        if not 0.0 < factor < math.inf:
            raise self.error(f"{self.prefix}rope.scaling.factor = {factor} makes no sense; it must be above 0")
        return RopeSpec(
            n_rot=n_rot, freq_base=self.positive("rope.freq_base", 10000.0), interleaved=interleaved,
            scaling="none" if factor == 1.0 else scaling, factor=factor,
            n_ctx_original=self.size("rope.scaling.original_context_length", self.size("context_length")),
            attn_factor=self.positive("rope.scaling.attn_factor", 1.0),
            beta_fast=self.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.positive("rope.scaling.yarn_beta_slow", 1.0),
        )  # fmt: skip

    def attention(self, *, interleaved_rope: bool = False) -> AttentionSpec:
        n_head = self.size("attention.head_count")
        n_head_kv = self.size("attention.head_count_kv", n_head)
        head_dim = self.integer("attention.key_length", self.size("embedding_length") // n_head)
        if n_head % n_head_kv or head_dim <= 0 or head_dim % 2:
            raise self.error(f"{n_head} heads, {n_head_kv} kv heads of width {head_dim} do not fit together")
        self.refuse("attention.value_length", head_dim)
        self.refuse("attention.clamp_kqv", 0.0)
        return AttentionSpec(
            n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim,
            rope=self.rope(head_dim, interleaved=interleaved_rope),
            scale=self.number("attention.scale", 0.0) or 1.0 / math.sqrt(head_dim), eps=self.eps,
        )  # fmt: skip

    def dense(self) -> FfnSpec:
        return FfnSpec(n_ff=self.size("feed_forward_length"), eps=self.eps)

    def moe(self, *, norm_weights: bool, n_ff_exp: int | None = None, n_ff_shexp: int = 0) -> MoeSpec:
        """Softmax routing; the expert width is `expert_feed_forward_length` unless the caller knows better."""
        n_expert, n_used = self.size("expert_count"), self.integer("expert_used_count")
        if not 0 < n_used <= n_expert:
            raise self.error(f"{n_used} of {n_expert} experts used per token makes no sense")
        self.refuse("expert_gating_func", 0, 1)
        self.refuse("expert_group_count", 0, 1)
        self.refuse("expert_weights_norm", norm_weights)
        return MoeSpec(
            n_expert=n_expert, n_expert_used=n_used,
            n_ff_exp=self.size("expert_feed_forward_length") if n_ff_exp is None else n_ff_exp,
            eps=self.eps, norm_weights=norm_weights,
            weight_scale=self.number("expert_weights_scale", 0.0) or 1.0, n_ff_shexp=n_ff_shexp,
        )  # fmt: skip

    def model(
        self,
        attention: AttentionSpec | tuple[AttentionSpec | None, ...],
        ffn: FfnSpec | MoeSpec,
        delta_net: tuple[DeltaNetSpec | None, ...] | None = None,
        n_layer_nextn: int = 0,
    ) -> ModelSpec:
        """A ModelSpec; a single AttentionSpec stands for every layer."""
        n_layer = self.n_layer - n_layer_nextn
        return ModelSpec(
            architecture=self.file.architecture, name=str(self.file.metadata.get("general.name", self.file.path.stem)),
            n_layer=n_layer, n_embd=self.size("embedding_length"), n_vocab=self.n_vocab,
            n_ctx_train=self.size("context_length"), eps=self.eps,
            attention=attention if isinstance(attention, tuple) else (attention,) * n_layer,
            delta_net=delta_net or (None,) * n_layer, ffn=(ffn,) * n_layer, n_layer_nextn=n_layer_nextn,
        )  # fmt: skip
