"""Vocabularies, difficult texts and llama.cpp's tokenizer for comparison: shared by tests and bench.

Vocabularies are trained here, without cutting words, so that merges reach over every place where a pre-tokenizer may
cut: a wrong cut changes the tokens.
"""

import json
import random
import sysconfig
import unicodedata
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from headrace.tokenizer import BYTE_OF, SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SNIPPETS = """\
The quick brown fox can't jump; it's 12,345.67 km away, they'RE sure, I'LL go and we'Ve 1000000 reasons (or 3).
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Straße, ÄPFEL, naïve café, Éire, ŒUVRE.
Ça n'est pas l'été où j'ai vu l'œuvre d'À-côté; qu'importe «l'hiver» ?
Türkiye'deki we'llness 'secret' o'double'sided I'mage 'realm' d'Très 'vest' 'told 'mine.
Table:  12   345    6789  0.5		77 a1b22c333d4444 x  y   z
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia. ¿Cuánto? ¡Mañana!
Съешь же ещё этих мягких французских булок, да выпей чаю. ЁЛКА №5, 2024 год.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΑΛΦΑ, βήτα· 100€.
我能吞下玻璃而不伤身体。今天是2024年12月1日，星期天！“你好”，他说：《红楼梦》……
私はガラスを食べられます。それは私を傷つけません。カタカナ、ひらがな、漢字１２３！
나는 유리를 먹을 수 있어요. 그래도 아프지 않아요. 한국어 12월 ㄱㄴㄷ
أنا قادر على أكل الزجاج و هذا لا يؤلمني. ١٢٣ السَّلَامُ عَلَيْكُمْ، كيف الحال؟
אני יכול לאכול זכוכית וזה לא מזיק לי. שָׁלוֹם
मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती। हिन्दी १२३४
ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ ๑๒๓ ภาษาไทย
আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না।
Tôi có thể ăn thủy tinh mà không hại gì. Việt Nam
I can eat glass 🙂👍🏽👩‍👩‍👧 🇩🇪 ✅ → ∑∫ ≤ ½ ² Ⅷ ™ © £ ¥ …
\tif (x[i] != 0x1F && !done) { return foo->bar("a\\n", 3.14e-10); }  // TODO: fix\r\n\r\n\n   \n
def f(x: int = 0) -> str:\n    '''It's 'quoted' text'''\n    return f"{x:>10}" + 'don\\'t' if x else None\n\n\n
https://example.org/a_b-c?d=e&f=%20#g user@example.com C:\\dir\\file.txt ~/.bashrc $HOME `ls -la | grep x`
<|im_start|>user\nHello<|im_end|>\n<s>[INST] hi [/INST]</s> <|endoftext|> <tool_call>{"name": "x"}</tool_call>
"""
SPECIAL_TOKENS = (
    ("<s>", CONTROL), ("</s>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<|endoftext|>", NORMAL),
    ("<tool_call>", USER_DEFINED), ("</tool_call>", USER_DEFINED), ("<tool_call>{", USER_DEFINED),
    ("  \t", USER_DEFINED), ("<spare>", UNUSED),
)  # fmt: skip
PIECES = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\v", "'", "'s", "'S", "'ll",
    "'RE", "'ſ", "1", "12", "123", "1234567", "٣", "Ⅷ", "½", "a", "A", "aB", "Ab", "é", "É", "ñ", "ß", "e\u0301",
    "\u0301", "ा", "д", "Д", "ω", "中", "文", "、", "。", "ひ", "カ", "ー", "한", "ㄱ", "！", "“", "”", "…", "—",
    ".", ",", "!", "?", "!!", "...", "/", "//", "_", "-", "(", ")", "[", "]", "{", "}", "<", ">", "=", "+", "$", "^",
    "~", "|", "`", "#", "@", "&", "%", "\\", '"', ";", ":", "*", "€", "∑", "🙂", "👩‍👩‍👧", "\u200b", "\u200d",
    "\ufeff", "\x00", "\x1f", "\x7f",
    "<|im_start|>", "<|im_end|>", "<s>", "<tool_call>", "<|endoftext|>", "  \t", "IMGIMGABZ", "<sentinel:3>", "▁", "▁▁",
    "ｱ", "ก", "က", "ᄀ", "⽊", "豈", "𐐀", "𝒜", "𠀀", "ǅ", "ʰ", "ª", "\ue000",
]  # fmt: skip


@cache
def letters() -> list[str]:
    """Every assigned character of the first two planes."""
    kinds = ("Cn", "Cs", "Co")
    return [c for c in map(chr, range(0x20000)) if unicodedata.category(c) not in kinds]


@cache
def library_text(n_chars: int) -> str:
    """Python source of the standard library: real code and English."""
    found, n_left = [], n_chars
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")[:n_left]
        found.append(text)
        n_left -= len(text)
    return "".join(found)


def texts(n: int, seed: int = 0) -> list[str]:
    """`n` texts: multilingual lines and cuts of them, library code, glued odd pieces, random characters; by seed."""
    rng = random.Random(seed)
    lines, code = SNIPPETS.splitlines(keepends=True), library_text(400_000)

    def snippet() -> str:
        line = rng.choice(lines)
        start = rng.randrange(len(line))
        return line[start : start + rng.randrange(1, 60)] + rng.choice(PIECES)

    def source() -> str:
        start = rng.randrange(len(code) - 200)
        return code[start : start + rng.randrange(1, 200)]

    def glued() -> str:
        return "".join(rng.choices(PIECES, k=rng.randrange(1, 16)))

    def noise() -> str:
        return "".join(rng.choice(letters() if rng.random() < 0.5 else PIECES) for _ in range(rng.randrange(1, 20)))

    makers = (snippet, source, glued, noise)
    start = ["", " ", "\n", "a", *lines]
    return start + [makers[i % 4]() for i in range(n - len(start))]


@cache
def bpe_vocabulary(n_merges: int = 3000) -> tuple[list[str], list[int], list[str]]:
    """(tokens, types, merges) of a byte-level vocabulary with special tokens at its end."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rng = random.Random(7)
    lines = SNIPPETS.splitlines(keepends=True) * 6 + library_text(100_000).splitlines(keepends=True)
    lines += ["".join(rng.choices(PIECES, k=8)) for _ in range(3000)]
    lines = [line for line in lines if not any(text in line for text, _ in SPECIAL_TOKENS)]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + n_merges, initial_alphabet=sorted(BYTE_OF), show_progress=False, min_frequency=2
    )
    engine.train_from_iterator(lines, trainer)
    model = json.loads(engine.to_str())["model"]
    plain = sorted(model["vocab"], key=model["vocab"].get)
    tokens = plain + [text for text, _ in SPECIAL_TOKENS]
    merges = [" ".join(pair) for pair in model["merges"]]
    return tokens, [NORMAL] * len(plain) + [kind for _, kind in SPECIAL_TOKENS], merges


def pair_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Every two bytes merge: a cut anywhere shows, whatever the characters around it."""
    letters = sorted(BYTE_OF)
    order = [(a, b) for a in letters for b in letters]
    random.Random(3).shuffle(order)
    tokens = letters + [a + b for a, b in order]
    return tokens, [NORMAL] * len(tokens), [f"{a} {b}" for a, b in order]


@cache
def scored_vocabulary(n_tokens: int = 3000, crossing: bool = False) -> tuple[list[str], list[int], list[float]]:
    """(tokens, types, scores) like SentencePiece's, with many equal scores; `crossing`: tokens over word ends."""
    rng = random.Random(11)
    found: dict[str, int] = {}
    for text in texts(6000, seed=5):
        text = SPACE + text.replace(" ", SPACE)
        for _ in range(6):
            start = rng.randrange(len(text))
            piece = text[start : start + rng.randrange(1, 6)]
            if "\0" not in piece and (crossing or SPACE not in piece[1:]):  # llama.cpp ends a token at NUL
                # every prefix too, so that merging can get there
                for end in range(1, len(piece) + 1):
                    found[piece[:end]] = found.get(piece[:end], 0) + 1
    best = sorted(found, key=lambda t: (-found[t], t))
    plain = [t for t in best if t not in dict(SPECIAL_TOKENS)][:n_tokens]
    start = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    extra = [t for t in SPECIAL_TOKENS if t[0] not in start]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(plain) + [kind for _, kind in extra]
    scores = [0.0] * len(start) + [-float(rng.randrange(60)) for _ in plain] + [0.0] * len(extra)
    return start + plain + [text for text, _ in extra], kinds, scores


def metadata_of(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None, model: str = "gpt2", pre: str | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """GGUF metadata of a vocabulary; `more` are further keys of tokenizer.ggml."""
    values = {"model": model, "pre": pre, "tokens": list(tokens), "token_type": list(types), "merges": merges}
    values |= {"scores": scores, **more}
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def write_model(path: Path, metadata: dict[str, Any]) -> None:
    """A llama model of one tiny layer around a vocabulary: enough for llama.cpp to load it."""
    n_vocab, width = len(metadata["tokenizer.ggml.tokens"]), 32
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 64, "embedding_length": width, "block_count": 1, "feed_forward_length": width,
        "attention.head_count": 1, "attention.head_count_kv": 1, "vocab_size": n_vocab,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    square = np.zeros((width, width), np.float16)
    table = np.zeros((n_vocab, width), np.float16)
    tensors = {"token_embd": table, "output": table, "output_norm": np.ones(width, np.float32)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        tensors[f"blk.0.{name}"] = square
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}"] = np.ones(width, np.float32)
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaTokenizer:
    """llama.cpp's `/tokenize` and `/detokenize` for one file."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 64, 1, -1
        params.warmup = params.fit_params = params.ui = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return self._post("/tokenize", content=text, add_special=add_special, parse_special=parse_special)["tokens"]  # type: ignore[no-any-return]

    def decode(self, ids: list[int]) -> str:
        return self._post("/detokenize", tokens=ids)["content"]  # type: ignore[no-any-return]
