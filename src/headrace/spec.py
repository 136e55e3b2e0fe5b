"""What a model is: frozen descriptions read once from GGUF metadata.

All that the engine may know of a model is in a ModelSpec; architecture files (`models/`) build one from
metadata and nothing downstream reads metadata again. Pure: no device, no arrays of weights.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first `n_rot` dimensions of each head.

    `interleaved` rotates the pairs (0, 1), (2, 3), ... (GGUF's "norm" layout), else (i, i + n_rot / 2) ("neox").
    `scaling` is "none", "linear" or "yarn" with ggml's definitions (`ggml_rope_ext`).
    """

    n_rot: int
    freq_base: float = 10000.0
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    n_ctx_original: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def inverse_frequencies(self) -> NDArray[np.float32]:
        """Radians per position for each rotated pair, float32 [n_rot / 2], context scaling included."""
        i = np.arange(self.n_rot // 2, dtype=np.float64)
        freq = self.freq_base ** (-2.0 * i / self.n_rot)
        if self.scaling == "none":
            return freq.astype(np.float32)
        if self.scaling == "linear":
            return (freq / self.factor).astype(np.float32)
        low, high = (self._correction_dim(beta) for beta in (self.beta_fast, self.beta_slow))
        low, high = max(0.0, math.floor(low)), min(self.n_rot - 1.0, math.ceil(high))
        ramp = np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
        return (freq * (1.0 - ramp) + freq / self.factor * ramp).astype(np.float32)

    def _correction_dim(self, n_turns: float) -> float:
        """The dimension that makes `n_turns` rotations over the original context (YaRN, arXiv 2309.00071, eq. 23)."""
        return self.n_rot * math.log(self.n_ctx_original / (n_turns * 2 * math.pi)) / (2 * math.log(self.freq_base))

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin: YaRN's attention temperature (arXiv 2309.00071, section 3.4)."""
        if self.scaling != "yarn":
            return self.attn_factor
        return self.attn_factor * (1.0 + 0.1 * math.log(max(1.0, self.factor)))


@dataclass(frozen=True)
class AttentionSpec:
    """Causal grouped-query attention of one layer."""

    n_head: int
    n_head_kv: int
    head_dim: int
    rope: RopeSpec
    scale: float
    eps: float
    window: int = 0
    """Sliding window in tokens; 0 attends to everything before."""

    @property
    def q_width(self) -> int:
        return self.n_head * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_head_kv * self.head_dim


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated delta net (arXiv 2412.06464) as Qwen3.5 uses it: n_v_head heads of state [k_dim, v_dim]."""

    n_k_head: int
    n_v_head: int
    k_dim: int
    v_dim: int
    n_conv: int
    eps: float

    @property
    def qk_width(self) -> int:
        return self.n_k_head * self.k_dim

    @property
    def v_width(self) -> int:
        return self.n_v_head * self.v_dim

    @property
    def conv_width(self) -> int:
        """Channels that pass the short convolution: q, k and v side by side."""
        return 2 * self.qk_width + self.v_width


@dataclass(frozen=True)
class FfnSpec:
    """A dense feed-forward network with a gated activation."""

    n_ff: int
    eps: float
    activation: str = "silu"


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts: which of `n_expert` a token takes, and how their outputs are weighted.

    Gate values are the softmax (or sigmoid) over all logits; the `n_expert_used` largest are taken, ties to the
    lower id; with `norm_weights` they are divided by their sum; then multiplied by `weight_scale`.
    """

    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    eps: float
    gating: str = "softmax"
    norm_weights: bool = True
    weight_scale: float = 1.0
    activation: str = "silu"
    n_ff_shexp: int = 0
    """Width of the shared expert; 0: there is none."""


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. `attention[i]` is None where layer i is recurrent, `delta_net[i]` where it is not."""

    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    attention: tuple[AttentionSpec | None, ...]
    delta_net: tuple[DeltaNetSpec | None, ...]
    ffn: tuple[FfnSpec | MoeSpec, ...]
    n_layer_nextn: int = 0
    """Extra next-token-prediction blocks after the last layer; tolerated and not run."""

    def __post_init__(self) -> None:
        assert len(self.attention) == len(self.delta_net) == len(self.ffn) == self.n_layer
        assert all((a is None) != (d is None) for a, d in zip(self.attention, self.delta_net, strict=True))

    @property
    def is_moe(self) -> bool:
        return any(isinstance(f, MoeSpec) for f in self.ffn)

    @property
    def is_recurrent(self) -> bool:
        return any(d is not None for d in self.delta_net)
