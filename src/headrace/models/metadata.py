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

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def refuse(self, key: str, *fine: Any) -> None:
        """Refuses a key whose value changes the model in a way that is not built; `fine` values change nothing."""
        value = self.file.metadata.get(self.prefix + key)
        if value is not None and value not in fine:
            raise UserError(f"{self.file.path}: {self.prefix}{key} = {value} is not supported")

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
            raise UserError(f"{self.file.path}: tensor 'token_embd.weight' is missing; this is no language model")
        return int(info.shape[0])

    def rope(self, head_dim: int, *, interleaved: bool = False) -> RopeSpec:
        scaling = self.text("rope.scaling.type", "none")
        if scaling not in ("none", "linear", "yarn"):
            raise UserError(f"{self.file.path}: rope scaling {scaling!r} is not supported; known: none, linear, yarn")
        if scaling == "none" and self.has("rope.scale_linear"):
            scaling = "linear"
        return RopeSpec(
            n_rot=self.integer("rope.dimension_count", head_dim), freq_base=self.number("rope.freq_base", 10000.0),
            interleaved=interleaved, scaling=scaling,
            factor=self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0)),
            n_ctx_original=self.integer("rope.scaling.original_context_length", self.integer("context_length")),
            attn_factor=self.number("rope.scaling.attn_factor", 1.0),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
        )  # fmt: skip

    def attention(self, *, interleaved_rope: bool = False) -> AttentionSpec:
        n_head = self.integer("attention.head_count")
        n_head_kv = self.integer("attention.head_count_kv", n_head)
        head_dim = self.integer("attention.key_length", self.integer("embedding_length") // max(1, n_head))
        if n_head <= 0 or n_head_kv <= 0 or n_head % n_head_kv or head_dim <= 0 or head_dim % 2:
            raise UserError(
                f"{self.file.path}: {n_head} heads, {n_head_kv} kv heads of width {head_dim} do not fit together"
            )
        self.refuse("attention.value_length", head_dim)
        return AttentionSpec(
            n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim,
            rope=self.rope(head_dim, interleaved=interleaved_rope),
            scale=self.number("attention.scale", 1.0 / math.sqrt(head_dim)),
            eps=self.number("attention.layer_norm_rms_epsilon"),
        )  # fmt: skip

    def dense(self) -> FfnSpec:
        return FfnSpec(n_ff=self.integer("feed_forward_length"), eps=self.number("attention.layer_norm_rms_epsilon"))

    def moe(self, *, norm_weights: bool, n_ff_shexp: int = 0) -> MoeSpec:
        n_expert, n_used = self.integer("expert_count"), self.integer("expert_used_count")
        if not 0 < n_used <= n_expert:
            raise UserError(f"{self.file.path}: {n_used} of {n_expert} experts used per token makes no sense")
        self.refuse("expert_gating_func", 1)
        self.refuse("expert_group_count", 0, 1)
        return MoeSpec(
            n_expert=n_expert, n_expert_used=n_used, n_ff_exp=self.integer("expert_feed_forward_length"),
            eps=self.number("attention.layer_norm_rms_epsilon"), norm_weights=norm_weights,
            weight_scale=self.number("expert_weights_scale", 1.0) or 1.0, n_ff_shexp=n_ff_shexp,
        )  # fmt: skip

    def model(
        self,
        n_layer: int,
        attention: AttentionSpec | tuple[AttentionSpec | None, ...],
        ffn: FfnSpec | MoeSpec | tuple[FfnSpec | MoeSpec, ...],
        delta_net: tuple[DeltaNetSpec | None, ...] | None = None,
        n_layer_nextn: int = 0,
    ) -> ModelSpec:
        """A ModelSpec; a single AttentionSpec or FFN stands for every layer."""
        if n_layer <= 0:
            raise UserError(f"{self.file.path}: {self.prefix}block_count leaves {n_layer} layers")
        return ModelSpec(
            architecture=self.file.architecture, name=str(self.file.metadata.get("general.name", self.file.path.stem)),
            n_layer=n_layer, n_embd=self.integer("embedding_length"), n_vocab=self.n_vocab,
            n_ctx_train=self.integer("context_length"), eps=self.number("attention.layer_norm_rms_epsilon"),
            attention=attention if isinstance(attention, tuple) else (attention,) * n_layer,
            delta_net=delta_net or (None,) * n_layer,
            ffn=ffn if isinstance(ffn, tuple) else (ffn,) * n_layer, n_layer_nextn=n_layer_nextn,
        )  # fmt: skip
