"""Which tensor type each tensor of a quantized file has: llama.cpp's rules for the mixes that people download.

The rules (`llama_tensor_get_type` in llama.cpp's llama-quant.cpp) reproduce the counts that logs of public files show,
for example 301 F32 + 355 Q4_K + 30 Q5_K + 47 Q6_K for Qwen3.5-35B-A3B at Q4_K_M.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import UserError
from ..quants import TYPES
from .shapes import Entry, Shape
from .weights import FILLABLE


@dataclass(frozen=True)
class Mix:
    """`base` for everything; `more` for attn_v and ffn_down of about half of the layers, `qkv` for a fused attn_qkv."""

    file_type: int
    """general.file_type, llama.cpp's llama_ftype."""
    base: str
    output: str
    more: str = ""
    qkv: str = ""
    experts: str = ""
    embedding: str = ""


MIXES = {
    "Q4_K_M": Mix(15, "Q4_K", "Q6_K", more="Q6_K", qkv="Q5_K"),
    "Q5_K_M": Mix(17, "Q5_K", "Q6_K", more="Q6_K", qkv="Q6_K"),
    "Q5_K_S": Mix(16, "Q5_K", "Q6_K"),
    "Q3_K_S": Mix(11, "Q3_K", "Q6_K"),
    "IQ4_NL": Mix(25, "IQ4_NL", "Q6_K"),
    "Q4_0": Mix(2, "Q4_0", "Q6_K"),
    "Q4_1": Mix(3, "Q4_1", "Q6_K"),
    "Q5_0": Mix(8, "Q5_0", "Q6_K"),
    "Q5_1": Mix(9, "Q5_1", "Q6_K"),
    "Q6_K": Mix(18, "Q6_K", "Q6_K"),
    "Q8_0": Mix(7, "Q8_0", "Q8_0"),
    "MXFP4_MOE": Mix(38, "Q8_0", "Q8_0", experts="MXFP4"),
    "F16": Mix(1, "F16", "F16"),
    "BF16": Mix(32, "BF16", "BF16"),
    "F32": Mix(0, "F32", "F32"),
}
"""The names that llama-quantize knows."""

GUESSED = 1024
"""llama_ftype of a file that no preset made."""

FALLBACK = {
    "IQ4_XS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL", "IQ2_S": "IQ4_NL", "IQ2_XS": "IQ4_NL",
    "IQ2_XXS": "IQ4_NL", "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
"""What a type of 256-wide blocks becomes where a row is no multiple of 256."""

PLAIN_FILLS = {"norm", "router", "conv", "dt", "ssm_a", "bias", "sink", "vector"}
"""Fills that public files keep in F32, whatever the mix."""


def find_mix(name: str) -> Mix:
    """A known mix, or any tensor type by itself: everything in it but the output (Q6_K)."""
    key = name.upper()
    if key in MIXES:
        return MIXES[key]
    if key in FILLABLE:
        return Mix(GUESSED, key, "Q6_K", embedding="Q4_K" if key.startswith(("IQ", "TQ")) else "")
    raise UserError(f"--type-mix {name}: known are {', '.join(dict.fromkeys([*MIXES, *FILLABLE]))}")


def use_more_bits(i: int, n: int) -> bool:
    """llama.cpp's rule for the layers that matter most: the first and last eighth, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def tensor_types(shape: Shape, todo: Sequence[Entry], mix: Mix) -> Iterator[str]:
    """The type of each entry, in order."""
    # attn_v is counted over the layers that have one, against all that have an attn_v or an attn_qkv
    n_v = sum(e.name.endswith(("attn_v.weight", "attn_qkv.weight")) for e in todo)
    i_v = 0
    for e in todo:
        kind = e.name.split(".")[-2] if e.name.endswith(".weight") else ""
        if e.fill in PLAIN_FILLS:
            yield "F32"
            continue
        name = _by_rule(shape, e, kind, mix, i_v, n_v)
        i_v += kind == "attn_v"
        yield _fits(name, e.shape[-1])


def _by_rule(shape: Shape, e: Entry, kind: str, mix: Mix, i_v: int, n_v: int) -> str:
    if kind == "output":
        return mix.output if e.shape[-1] % TYPES[mix.output].block == 0 else "Q8_0"
    if kind == "token_embd":
        return mix.embedding or mix.base
    if mix.experts and len(e.shape) == 3:
        return mix.experts
    if not mix.more:
        return mix.base
    if shape.n_expert == 8 and kind in ("attn_k", "attn_v", "attn_output"):
        return "Q5_K" if kind == "attn_output" else "Q8_0"
    if kind == "attn_v" and use_more_bits(i_v, n_v):
        return mix.more
    if kind.startswith("ffn_down") and use_more_bits(int(e.name.split(".")[1]), shape.n_layer):
        return mix.more
    return mix.qkv if kind == "attn_qkv" else mix.base


def _fits(name: str, width: int) -> str:
    if width % TYPES[name].block == 0:
        return name
    name = FALLBACK.get(name, "F16")
    return name if width % TYPES[name].block == 0 else "F16"
