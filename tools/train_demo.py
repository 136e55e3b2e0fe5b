"""Trains the demo model, a small Mixture-of-Experts that writes Python, and writes it as GGUF.

    pip install torch numpy tokenizers gguf
    python tools/train_demo.py all                       # data, train, export: minutes on one GPU
    python tools/train_demo.py all --steps 20 --batch 2 --eval-windows 2  # the same path on a CPU, far from trained

The three stages hand over files in `--work` (default build/demo), so each can run on another machine:

    data    standard library -> tokenizer.json, train.u16, held_out.u16   (needs tokenizers)
    train   tokens           -> weights.npz, log.txt                      (needs torch)
    export  weights          -> demo.gguf                                 (needs gguf)

Text: the Python standard library (PSF licence) of the running interpreter and of the other installations named by
`--lib`, plus conversations made from its docstrings. Seeded throughout; the same libraries, flags and device give the
same data, and on a CPU the same weights.
"""

import argparse
import json
import math
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from demo_text import ENDOFTEXT, IM_END, SPECIALS, make_data

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The model's sizes, GGUF's names: 7.95 M weights, 3.8 M of them used for a token."""

    n_vocab: int = 4096
    n_embd: int = 256
    n_layer: int = 7
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_exp: int = 128
    n_ctx: int = 2048
    eps: float = 1e-6
    freq_base: float = 10000.0


# model


def build_model(shape: Shape, dropout: float) -> Any:
    """The qwen3moe architecture in PyTorch, weights under GGUF's names, each stacked over the layers."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    s = shape

    class Demo(nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def matrix(*size: int) -> nn.Parameter:  # [..., rows, columns], the input along the columns
                return nn.Parameter(torch.randn(size) * size[-1] ** -0.5)

            q, kv, n = s.n_head * s.head_dim, s.n_head_kv * s.head_dim, s.n_layer
            self.token_embd = nn.Parameter(torch.randn(s.n_vocab, s.n_embd) * 0.02)  # tied with the output
            self.attn_norm = nn.Parameter(torch.ones(n, s.n_embd))
            self.attn_q = matrix(n, q, s.n_embd)
            self.attn_k = matrix(n, kv, s.n_embd)
            self.attn_v = matrix(n, kv, s.n_embd)
            self.attn_q_norm = nn.Parameter(torch.ones(n, s.head_dim))
            self.attn_k_norm = nn.Parameter(torch.ones(n, s.head_dim))
            self.attn_output = nn.Parameter(torch.zeros(n, s.n_embd, q))
            self.ffn_norm = nn.Parameter(torch.ones(n, s.n_embd))
            self.ffn_gate_inp = matrix(n, s.n_expert, s.n_embd)
            self.ffn_gate_exps = matrix(n, s.n_expert, s.n_ff_exp, s.n_embd)
            self.ffn_up_exps = matrix(n, s.n_expert, s.n_ff_exp, s.n_embd)
            self.ffn_down_exps = nn.Parameter(torch.zeros(n, s.n_expert, s.n_embd, s.n_ff_exp))
            self.output_norm = nn.Parameter(torch.ones(s.n_embd))
            angle = torch.outer(torch.arange(s.n_ctx), s.freq_base ** (-torch.arange(0, s.head_dim, 2) / s.head_dim))
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)

        def rope(self, x: Any) -> Any:
            """NeoX pairs: channel i turns with channel i + head_dim / 2."""
            a, b = x.chunk(2, -1)
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        def attention(self, x: Any, w: dict[str, Any]) -> Any:
            batch, length, _ = x.shape
            q = F.linear(x, w["attn_q"]).view(batch, length, s.n_head, s.head_dim)
            k = F.linear(x, w["attn_k"]).view(batch, length, s.n_head_kv, s.head_dim)
            v = F.linear(x, w["attn_v"]).view(batch, length, s.n_head_kv, s.head_dim).transpose(1, 2)
            q = self.rope(F.rms_norm(q, (s.head_dim,), w["attn_q_norm"], s.eps).transpose(1, 2)).to(v.dtype)
            k = self.rope(F.rms_norm(k, (s.head_dim,), w["attn_k_norm"], s.eps).transpose(1, 2)).to(v.dtype)
            k, v = (t.repeat_interleave(s.n_head // s.n_head_kv, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.linear(out.transpose(1, 2).flatten(2), w["attn_output"])

        def experts(self, x: Any, w: dict[str, Any]) -> tuple[Any, Any, Any]:
            """(output, balance loss, share of the picks per expert). Every expert runs on every token as one wide
            FFN; the hidden part of an expert that was not picked is multiplied by 0."""
            with torch.autocast(x.device.type, enabled=False):
                logits = F.linear(x.float(), w["ffn_gate_inp"])
                probability = logits.softmax(-1)
                top, index = probability.topk(s.n_expert_used, -1)
                weight = torch.zeros_like(probability).scatter(-1, index, top / top.sum(-1, keepdim=True))
            share = (weight > 0).float().mean((0, 1)) / s.n_expert_used
            # Switch Transformer's balance loss (arXiv 2101.03961, eq. 4) and ST-MoE's z loss (arXiv 2202.08906, eq. 5)
            balance = s.n_expert * (share * probability.mean((0, 1))).sum()
            extra = 0.01 * balance + 0.001 * logits.logsumexp(-1).square().mean()
            gate = F.linear(x, w["ffn_gate_exps"].flatten(0, 1))
            up = F.linear(x, w["ffn_up_exps"].flatten(0, 1))
            hidden = F.silu(gate) * up * weight.to(up.dtype).repeat_interleave(s.n_ff_exp, -1)
            return F.linear(hidden, w["ffn_down_exps"].transpose(0, 1).flatten(1)), extra, share

        def forward(self, ids: Any, targets: Any = None) -> tuple[Any, Any, Any]:
            """Logits [batch, length, n_vocab], or with `targets` the mean cross entropy; extra loss; shares."""
            names = [n for n, p in self.named_parameters() if p.shape[0] == s.n_layer]
            layers = zip(*(getattr(self, n).unbind(0) for n in names))
            x, extras, shares = F.embedding(ids, self.token_embd), [], []
            for weights in layers:
                w = dict(zip(names, weights))
                h = self.attention(F.rms_norm(x, (s.n_embd,), w["attn_norm"], s.eps), w)
                x = x + F.dropout(h, dropout, self.training)
                h, extra, share = self.experts(F.rms_norm(x, (s.n_embd,), w["ffn_norm"], s.eps), w)
                x = x + F.dropout(h, dropout, self.training)
                extras.append(extra)
                shares.append(share)
            logits = F.linear(F.rms_norm(x, (s.n_embd,), self.output_norm, s.eps), self.token_embd)
            out = logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            return out, torch.stack(extras).mean(), torch.stack(shares)

    return Demo()


def orthogonalised(gradient: Any) -> Any:
    """The nearest matrix with equal singular values, roughly: Muon's quintic Newton-Schulz iteration on the last two
    axes (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""
    x = gradient.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if wide else x).float()


# training


def train(work: Path, shape: Shape, args: argparse.Namespace) -> None:
    """Muon for the matrices, AdamW for embedding, router and norms; warm-up, then a linear fall to 0."""
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokens = {
        name: torch.from_numpy(np.fromfile(work / f"{name}.u16", np.uint16).astype(np.int32)).to(device)
        for name in ("train", "held_out")
    }
    model = build_model(shape, args.dropout).to(device)
    if args.init:
        model.load_state_dict(read_weights(args.init)[1])
    forward = torch.compile(model) if args.compile else model
    muon = [p for n, p in model.named_parameters() if p.ndim >= 3 and n != "ffn_gate_inp"]
    momenta = [torch.zeros_like(p) for p in muon]
    rest = [p for p in model.parameters() if all(p is not m for m in muon)]
    adam = torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(args.seed)
    window = torch.arange(args.length + 1, device=device)
    last_start = len(tokens["train"]) - args.length - 1
    # A prompt is a document's beginning after <|endoftext|>, so half of the windows begin there.
    documents = (tokens["train"][:last_start] == shape.n_vocab - len(SPECIALS)).nonzero().squeeze(1).cpu()
    log = (work / "log.txt").open("w")

    def say(text: str) -> None:
        print(text, flush=True)
        print(text, file=log, flush=True)

    def loss_of(ids: Any) -> tuple[Any, Any, Any]:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            return forward(ids[:, :-1], ids[:, 1:].long())

    @torch.no_grad()
    def held_out() -> tuple[float, Any]:
        """Mean loss over non-overlapping windows, and the share of the picks per layer and expert."""
        model.eval()
        stream = tokens["held_out"]
        starts = torch.arange(0, len(stream) - args.length - 1, args.length, device=device)[: args.eval_windows]
        parts = [loss_of(stream[chunk[:, None] + window]) for chunk in starts.split(args.batch)]
        model.train()
        counts = [len(chunk) for chunk in starts.split(args.batch)]
        mean = [sum(c * p[i] for c, p in zip(counts, parts)) / len(starts) for i in (0, 2)]
        return mean[0].item(), mean[1]

    n_weights = sum(p.numel() for p in model.parameters())
    per_step = args.batch * args.length
    say(f"{n_weights / 1e6:.2f} M weights, {args.steps} steps of {per_step} tokens, on {device}; {vars(args)}")
    start, mark = time.perf_counter(), (0, time.perf_counter())
    for step in range(1, args.steps + 1):
        anywhere = torch.randint(last_start, (args.batch - args.batch // 2,), generator=draw)
        beginnings = documents[torch.randint(len(documents), (args.batch // 2,), generator=draw)]
        at = torch.cat((anywhere, beginnings)).to(device)
        loss, extra, _ = loss_of(tokens["train"][at[:, None] + window])
        (loss + extra).backward()
        warm_up = max(1, args.steps // 50)
        rate = min(step / warm_up, (args.steps + 1 - step) / (args.steps - warm_up + 1))
        adam.param_groups[0]["lr"] = args.adam_lr * rate
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        adam.step()
        with torch.no_grad():
            for p, momentum in zip(muon, momenta):
                momentum.lerp_(p.grad, 0.05)
                update = orthogonalised(p.grad.lerp(momentum, 0.95))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - args.muon_lr * rate * args.weight_decay).add_(update, alpha=-args.muon_lr * rate * scale)
        model.zero_grad()
        if step % args.log_every == 0 or step == args.steps:
            value = loss.item()
            speed = (step - mark[0]) * per_step / (time.perf_counter() - mark[1])
            test, shares = held_out()
            say(
                f"step {step} train {value:.4f} held-out {test:.4f} extra {extra.item():.4f} "
                f"picks {shares.min().item():.3f}-{shares.max().item():.3f} "
                f"{speed / 1e3:.0f}k tokens/s {time.perf_counter() - start:.0f} s"
            )
            assert math.isfinite(value), "the loss is no number: lower the learning rates"
            mark = (step, time.perf_counter())
    say("share of the picks per layer: " + json.dumps([[round(v, 3) for v in row] for row in shares.tolist()]))
    weights = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    # float16 halves the file; the export rounds to 8 bits anyway. The router stays exact.
    np.savez(
        work / "weights.npz",
        shape=json.dumps(asdict(shape)),
        **{n: w if w.ndim < 2 or n == "ffn_gate_inp" else w.astype(np.float16) for n, w in weights.items()},
    )


def read_weights(path: Path) -> tuple[Shape, dict[str, Any]]:
    import torch

    archive = np.load(path)
    weights = {n: torch.from_numpy(archive[n]).float() for n in archive.files if n != "shape"}
    return Shape(**json.loads(str(archive["shape"]))), weights


# export


def export(work: Path, out: Path) -> None:
    """weights.npz and tokenizer.json -> a GGUF file: matrices Q8_0, norms and router F32."""
    import gguf

    archive = np.load(work / "weights.npz")
    s = Shape(**json.loads(str(archive["shape"])))
    bpe = json.loads((work / "tokenizer.json").read_text("utf-8"))
    vocab = bpe["model"]["vocab"] | {t["content"]: t["id"] for t in bpe["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens]

    writer = gguf.GGUFWriter(out, "qwen3moe")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("headrace demo")
    writer.add_description("A small Mixture-of-Experts trained on the Python standard library")
    writer.add_license("PSF-2.0")
    writer.add_size_label("8x1M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(s.n_vocab)
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.n_embd)
    writer.add_block_count(s.n_layer)
    writer.add_feed_forward_length(s.n_ff_exp * s.n_expert_used)
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_rope_freq_base(s.freq_base)
    writer.add_expert_count(s.n_expert)
    writer.add_expert_used_count(s.n_expert_used)
    writer.add_expert_feed_forward_length(s.n_ff_exp)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in bpe["model"]["merges"]])
    writer.add_bos_token_id(vocab[ENDOFTEXT])
    writer.add_eos_token_id(vocab[IM_END])
    writer.add_pad_token_id(vocab[ENDOFTEXT])
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)

    q8_0 = gguf.GGMLQuantizationType.Q8_0

    def add(name: str, weight: np.ndarray) -> None:
        weight = np.ascontiguousarray(weight, np.float32)
        if weight.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, q8_0), raw_dtype=q8_0)

    add("token_embd.weight", archive["token_embd"])
    for layer in range(s.n_layer):
        for name in archive.files:
            if name.startswith(("attn_", "ffn_")):
                add(f"blk.{layer}.{name}.weight", archive[name][layer])
    add("output_norm.weight", archive["output_norm"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["data", "train", "export", "all"])
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder of the files between stages")
    parser.add_argument("--out", type=Path, help="the GGUF file (default: demo.gguf in --work)")
    parser.add_argument("--lib", type=Path, action="append", help="a standard library; may be repeated, newest first")
    parser.add_argument("--chat-share", type=float, default=0.12, help="part of the text that is conversations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--init", type=Path, help="a weights.npz to continue from")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--length", type=int, default=Shape.n_ctx, help="tokens per window")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=250, help="steps between looks at the held-out files")
    parser.add_argument("--eval-windows", type=int, default=10**9, help="most held-out windows to look at")
    args = parser.parse_args()
    shape = Shape()
    if args.stage in ("data", "all"):
        libs = args.lib or [Path(sysconfig.get_path("stdlib"))]
        make_data(args.work, libs, args.chat_share, args.seed, shape.n_vocab)
    if args.stage in ("train", "all"):
        train(args.work, shape, args)
    if args.stage in ("export", "all"):
        export(args.work, args.out or args.work / "demo.gguf")


if __name__ == "__main__":
    main()
