"""By hand, not in the suite: the same random weights in `transformers` (float32, PyTorch) and in our reference.

    pip install torch transformers gguf; PYTHONPATH=src:tests python tests/models/against_transformers.py

Undoes what GGUF conversion does to a checkpoint: norms that hold weight + 1, -exp(A_log), v-heads tiled over k-heads,
Llama's q and k rows in the order of its rope. Prints the largest difference of a logit.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

import headrace
from models import tiny
from models.llamacpp import greedy
from models.tiny import N_VOCAB, Tiny, write

Array = NDArray[np.float32]
CONFIGS = {
    "llama": "LlamaConfig", "mixtral": "MixtralConfig", "olmoe": "OlmoeConfig", "qwen2moe": "Qwen2MoeConfig",
    "qwen3": "Qwen3Config", "qwen3moe": "Qwen3MoeConfig", "qwen35": "Qwen3_5TextConfig",
    "qwen35moe": "Qwen3_5MoeTextConfig",
}  # fmt: skip
NAMES = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_conv1d": "linear_attn.conv1d", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def checkpoint(m: Tiny) -> dict[str, Array]:
    """The model's weights under the names and in the layout of its `transformers` class."""
    arrays = tiny.weights(m)
    out: dict[str, Array] = {}
    for name, (array, _) in arrays.items():
        if not name.startswith("blk."):
            place = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
            out[place[name.split(".")[0]] + ".weight"] = minus_one(m, name, array)
            continue
        _, layer, short, *suffix = name.split(".")
        b, value = f"model.layers.{layer}.", untiled(m, short, minus_one(m, name, array))
        if short == "ssm_a":
            out[b + "linear_attn.A_log"] = np.log(-value)
        elif short == "ssm_dt":
            out[b + "linear_attn.dt_bias"] = value
        elif short == "ffn_gate_exps":
            up, _ = arrays[name.replace("gate", "up")]
            out[b + "mlp.experts.gate_up_proj"] = np.concatenate([value, up], axis=1)
        elif short == "ffn_down_exps":
            out[b + "mlp.experts.down_proj"] = value
        elif short != "ffn_up_exps":
            value = value[None] if short == "ffn_gate_inp_shexp" else value[:, None] if short == "ssm_conv1d" else value
            out[b + NAMES[short] + "." + suffix[0]] = value
    return out


def minus_one(m: Tiny, name: str, array: Array) -> Array:
    return array - 1 if m.architecture.startswith("qwen35") and "norm" in name and "ssm" not in name else array


def untiled(m: Tiny, short: str, array: Array) -> Array:
    """Qwen3.5: v-heads grouped by k-head (2 k-heads, 4 v-heads of width 64); Llama: rope halves instead of pairs."""
    if m.architecture == "llama" and short in ("attn_q", "attn_k"):
        return array.reshape(-1, m.head_dim // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if not (short.startswith("ssm") or short in ("attn_qkv", "attn_gate")) or short == "ssm_norm":
        return array
    if short == "ssm_out":
        return untiled_rows(array.T, 64).T
    if short in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate([array[:256], untiled_rows(array[256:], 64)])
    return untiled_rows(array, 64 if short == "attn_gate" else 1)


def untiled_rows(array: Array, width: int) -> Array:
    return array.reshape(2, 2, width, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def model(m: Tiny) -> Any:
    n_ff = m.n_ff_exp if m.has("experts") else m.n_ff
    config = getattr(transformers, CONFIGS["mixtral" if m.has("experts") else m.architecture])(
        vocab_size=N_VOCAB, hidden_size=m.n_embd, num_hidden_layers=m.n_layer, num_attention_heads=m.n_head,
        num_key_value_heads=m.n_head_kv, head_dim=m.head_dim, intermediate_size=m.n_ff_exp if m.architecture == "olmoe"
        else n_ff, num_experts=m.n_expert, num_local_experts=m.n_expert, num_experts_per_tok=m.n_expert_used,
        moe_intermediate_size=m.n_ff_exp, shared_expert_intermediate_size=m.n_ff_shexp, rms_norm_eps=1e-6,
        norm_topk_prob=m.architecture == "qwen3moe", tie_word_embeddings=False, max_position_embeddings=m.n_ctx,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | (
            {"partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
            if m.architecture.startswith("qwen35") else {}),
    )  # fmt: skip
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    net.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in checkpoint(m).items()})
    return net.eval()


def main() -> None:
    ids = np.random.default_rng(3).integers(0, 128, 100).tolist()
    for m in (
        Tiny("qwen35moe", n_layer=5), Tiny("qwen35", n_layer=5), Tiny("qwen3moe"), Tiny("qwen2moe"), Tiny("qwen3"),
        Tiny("llama"), Tiny("llama", options=("experts",)), Tiny("olmoe", n_head_kv=4),
    ):  # fmt: skip
        with torch.no_grad():
            theirs = model(m)(torch.tensor([ids])).logits[0].numpy()
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "m.gguf", m, attention__layer_norm_rms_epsilon=1e-6)  # fixed in the delta net
            _, llama_cpp = greedy(path, ids, 1, N_VOCAB)
            last = theirs[-1] - np.logaddexp.reduce(theirs[-1])
            with headrace.open(path, backend="reference", cache_type_k="f32", cache_type_v="f32") as engine:
                ours = engine.logits(ids)
            print(f"{m.name:20} deviation of logits {theirs.std():.2f}; llama.cpp, last position: ", end="")
            print(f"{abs(last - llama_cpp[0]).max():.1e}; headrace, all positions: {abs(ours - theirs).max():.1e}")


if __name__ == "__main__":
    main()
