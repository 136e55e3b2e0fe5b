"""A byte-level BPE vocabulary of any size: 256 bytes, pairs and triples of common characters, special tokens.

Rank follows how common the characters are, so English text and code fall into pieces of two and three characters.
"""

from typing import Any

import numpy as np

CHARACTERS = " etaoinsrhldcumfpgwybvkxjqz\n_(),.=:'\"-0123456789[]{}<>+*/#;!?&|\\@$%^~`ETAOINSRHLDCUMFPGWYBVKXJQZ\t"
"""Common characters, most common first."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NORMAL, CONTROL = 1, 3


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: itself if it prints, else one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (b for b in range(256) if b not in set(plain))
    letters = {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(rest)}
    return [letters[b] for b in range(256)]


def build_vocab(n_vocab: int) -> tuple[list[str], list[str]]:
    """(tokens, merges): all tokens differ, and every longer one is merged from two earlier ones."""
    letters = byte_letters()
    common = [letters[b] for b in CHARACTERS.encode()]
    n, n_merged = len(common), n_vocab - 256 - len(SPECIAL)
    weight = np.arange(1, n + 1)
    pairs = np.argsort(np.outer(weight, weight), axis=None, kind="stable")[:n_merged]
    left = [common[i] for i in (pairs // n).tolist()]
    right = [common[i] for i in (pairs % n).tolist()]
    if n_merged > n * n:
        cube = np.multiply.outer(np.outer(weight, weight).ravel(), weight)
        triples = np.argsort(cube, axis=None, kind="stable")[: n_merged - n * n]
        couples = [a + b for a in common for b in common]
        left += [couples[i] for i in (triples // n).tolist()]
        right += [common[i] for i in (triples % n).tolist()]
    tokens = [*letters, *(a + b for a, b in zip(left, right)), *SPECIAL]
    assert len(tokens) == n_vocab, f"no vocabulary of {n_vocab} tokens from {n} characters"
    return tokens, [f"{a} {b}" for a, b in zip(left, right)]


def vocab_metadata(n_vocab: int, pre: str) -> dict[str, Any]:
    """The tokenizer's keys; `pre` names the pre-tokenizer."""
    tokens, merges = build_vocab(n_vocab)
    types = np.full(n_vocab, NORMAL, np.int32)
    types[-len(SPECIAL) :] = CONTROL
    end = n_vocab - len(SPECIAL)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end + 2, "tokenizer.ggml.padding_token_id": end,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
