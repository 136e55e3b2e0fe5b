"""How byte-level BPE families cut text into words before merging: the table of `tokenizer.ggml.pre` names.

Merges never cross a word, so a wrong cut gives other tokens than the model was trained on. The names and the cuts are
llama.cpp's (src/llama-vocab.cpp and src/unicode.cpp), written for the Oniguruma engine of the `tokenizers` package.
Where llama.cpp departs from a model's original pattern (it lets every non-ASCII letter count as upper and lower case
in gpt-4o and tekken, for example), the cut is llama.cpp's: bench/tokenizer_oracle.py compares all of them.
"""

from dataclasses import dataclass

from .errors import UserError


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns applied in turn: every match, and every gap between matches, is a piece for the next pattern.

    `ignore_merges`: a whole word that is a token is taken as it is. `add_bos`: the default where the file does not
    say. `raw_utf8`: tokens are plain text with U+2581 for a space and <0xXX> for bytes, as SentencePiece writes them.
    `newline_runs`: a run of newlines that is a token is taken as it is.
    """

    patterns: tuple[str, ...] = ()
    ignore_merges: bool = False
    add_bos: bool = False
    raw_utf8: bool = False
    newline_runs: bool = False


CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LINES = r"\s*[\r\n]+"
SPACES = r"\s+(?!\S)|\s+"
KANA_KANJI = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{LINES}|{SPACES}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{SYMBOLS}|{LINES}|{SPACES}"

ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK3_WORD = rf"{ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
DEEPSEEK3 = rf"{DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}|{SPACES}"

THREES_FROM_RIGHT = r"\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}++"
"""Digits in threes counted from the right; what stands before them stays with their first group."""

LETTERLIKE = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
EAST_ASIAN = "[[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]&&[^\\s]]+"
# U+8C48 where the model has its look-alike U+F900: llama.cpp's source lost the difference
AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b820-\U0002ceaf"
    "\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)


def _cased(letters: str, tail: str, numbers: str) -> str:
    """The gpt-4o shape: upper-case letters, then lower-case ones; a letter beyond ASCII counts as both."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    first = r"[^\r\n\p{L}\p{N}]?"
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return f"{first}{upper}*{lower}+{tail}|{first}{upper}+{lower}*{tail}|{numbers}|{symbols}|{LINES}|{SPACES}"


def _marked(numbers: str) -> str:
    """The same shape without case: llama.cpp reads every letter class of these patterns as any letter."""
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return f"{MARKED_WORD}{CONTRACTION}?|{numbers}|{symbols}|{LINES}|{SPACES}"


_HALVING = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"

FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 glm5 chatglm-bpe", PreTokenizer((LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((QWEN2,)),
    ),
    (
        "qwen35",
        PreTokenizer((rf"{CONTRACTION}|{MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}|{SPACES}",)),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", GPT2)),
    ),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer((_cased(r"\p{L}", f"{CONTRACTION}?", r"\p{N}{1,3}"),)),
    ),
    (
        "granite-embed-multi-97m",
        PreTokenizer((_cased(r"\p{L}\p{M}", f"{CONTRACTION}?", r"\p{N}{1,3}"),), ignore_merges=True),
    ),
    ("tekken", PreTokenizer((_cased(r"\p{L}", "", r"\p{N}"),), ignore_merges=True, add_bos=True)),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{LETTERLIKE}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
                r"\s+\z",
                EAST_ASIAN,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}"))),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", KANA_KANJI, DEEPSEEK3)),
    ),
    (
        "spark2_5",
        PreTokenizer(
            (r"\p{N}{1,3}", KANA_KANJI, rf"{DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{SPACES}", r"\p{N}"),
        ),
    ),
    (
        "k2-horizon",
        PreTokenizer(
            (
                rf"{CONTRACTION}|'ſ|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\x{{200c}}\x{{200d}}]+|\p{{N}}{{1,3}}"
                rf"|{SYMBOLS}|{LINES}|{SPACES}",
            )
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            (
                rf"[{HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{HAN}]]+{CONTRACTION}?"
                rf"|\p{{N}}{{1,3}}|{SYMBOLS}|{LINES}|{SPACES}",
            )
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{WORD}|\p{{N}}|{SYMBOLS}|\s*[\r\n]|{SPACES}",),
        ),
    ),
    (
        "seed-coder",
        PreTokenizer((rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}|{SPACES}",)),
    ),
    ("ufakzeka", PreTokenizer((rf"{WORD}|\p{{N}}|{SYMBOLS}|{LINES}|{SPACES}",))),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((" ?[^(\\s|.,!?…。，、।۔،)]+",))),
    ("viking", PreTokenizer((" ?[^(\\s|.,!?…。，、।۔،)]+", r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(?:IMGIMG)[A-I]{1,4}Z",
                "[\\t\\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ),
            add_bos=True,
        ),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[ㄅ-ㄯ]+|" + KANA_KANJI,
                _marked(r"\p{N}"),
            ),
            ignore_merges=True,
        ),
    ),
    ("tiny_aya cohere2moe", PreTokenizer((THREES_FROM_RIGHT, _marked(r"\p{N}{1,3}")))),
    ("afmoe", PreTokenizer((THREES_FROM_RIGHT, AFMOE_SCRIPTS, DEEPSEEK3))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"))),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", QWEN2))),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}",
            )
        ),
    ),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", rf"{CONTRACTION}|{WORD}|\p{{N}}+|{SYMBOLS}|{LINES}|{SPACES}"), ignore_merges=True),
    ),
    ("jais-2", PreTokenizer((rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{LINES}|{_HALVING}",))),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((r"[^\n]+|\n+",), add_bos=True, raw_utf8=True, newline_runs=True)),
    ("sarvam-moe", PreTokenizer((r"[^\n]+|\n+",), raw_utf8=True)),
)
PRE_TOKENIZERS = {name: pre for names, pre in FAMILIES for name in names.split()}


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """The table's entry for a `tokenizer.ggml.pre` name; UserError for one that is not in it."""
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"{source}: unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
