"""Text to tokens and back, from a GGUF file's own vocabulary.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = gpt2; merging by the `tokenizers` library) and SentencePiece
(llama; merging by score, below). Special tokens, flags and end-of-generation tokens follow llama.cpp
(src/llama-vocab.cpp), whose `/tokenize` is the oracle of tests/unit/test_tokenizer.py and bench/tokenizer_oracle.py.
"""

import codecs
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .pretokenizers import PreTokenizer, pre_tokenizer

log = logging.getLogger(__name__)

KEY = "tokenizer.ggml."
SPACE = "\u2581"
SURROGATES = re.compile("[\ud800-\udfff]")
C_WHITESPACE = " \t\n\v\f\r"


UNDEFINED, UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 0, 1, 2, 4, 8, 16, 32
"""What a token is, as bits: the file's type plus what the text gives away. Plain numbers: an enum costs 1 s here."""
SPECIAL = CONTROL | UNKNOWN
OF_GGUF_TYPE = np.asarray([UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE], np.uint8)

END_OF_GENERATION = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    "<|ifm|im_end|>",
)  # fmt: skip
"""Texts that end a turn or a text in some family; llama.cpp stops at every one that a vocabulary has."""

FILL_IN_THE_MIDDLE = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
"""The metadata key's stem and the texts that stand in for it; pad, repository and separator end the generation."""

ALWAYS_TEXT = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""gpt-oss: markers that belong to the answer."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if it prints in Latin-1, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


class _Merger(Protocol):
    def encode(self, text: str, after_special: bool) -> Iterable[int]: ...


class _ByteLevel:
    """Byte-level BPE through the `tokenizers` library."""

    def __init__(self, ids: dict[str, int], merges: list[str], pre: PreTokenizer, source: str) -> None:
        # here: 30 ms that only a text needs
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
        if any(len(pair) != 2 for pair in pairs):
            raise UserError(f"{source}: {KEY}merges has an entry without a space; the file is damaged")
        try:
            bpe = models.BPE(vocab=ids, merges=pairs, ignore_merges=pre.ignore_merges, byte_fallback=pre.raw_utf8)
        except Exception as e:  # the library raises bare Exceptions
            raise UserError(f"{source}: {KEY}merges does not fit {KEY}tokens: {e}") from None
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        if not pre.raw_utf8:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False))
        self._engine = Tokenizer(bpe)
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
        self._ids, self._pre = ids, pre

    def encode(self, text: str, after_special: bool) -> list[int]:
        if self._pre.raw_utf8:
            text = text.replace(" ", SPACE)
        if not self._pre.newline_runs:
            return self._merge(text)
        ids: list[int] = []
        for run in re.findall(r"\n+|[^\n]+", text):
            whole = self._ids.get(run) if run[0] == "\n" else None
            ids += self._merge(run) if whole is None else [whole]
        return ids

    def _merge(self, text: str) -> list[int]:
        return self._engine.encode(text, add_special_tokens=False).ids


class _SentencePiece:
    """Merges by score: of all neighbours whose joined text is a token, the best-scored first, leftmost among equals.

    Not through the `tokenizers` library: its merge ranks are distinct, so equal scores would not merge leftmost first.
    """

    def __init__(
        self, ids: dict[str, int], scores: list[float], unknown: int | None, prefix: bool, source: str
    ) -> None:
        self._ids, self._scores, self._unknown, self._prefix, self._source = ids, scores, unknown, prefix, source
        # no token reaches over the start of a word: words merge alone, and the frequent ones are remembered
        crossing = re.compile(f"[^{SPACE}]{SPACE}")
        self._words = None if any(map(crossing.search, ids)) else re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
        self._word = lru_cache(1 << 16)(self._merge)

    def encode(self, text: str, after_special: bool) -> Iterable[int]:
        text = (SPACE if self._prefix and after_special else "") + text.replace(" ", SPACE)
        if self._words is None:
            return self._merge(text)
        words = self._words.findall(text)
        return [token for word in words for token in (self._word(word) if len(word) < 64 else self._merge(word))]

    def _merge(self, text: str) -> tuple[int, ...]:
        ids, scores = self._ids, self._scores
        size = [1] * len(text)  # of the symbol that starts here; 0: swallowed by its left neighbour
        after, before = list(range(1, len(text) + 1)), list(range(-1, len(text) - 1))

        def pair(left: int, right: int) -> tuple[float, int, int, int] | None:
            end = right + size[right]
            token = ids.get(text[left:end])
            return None if token is None else (-scores[token], left, right, end)

        queue = [p for i in range(1, len(text)) if (p := pair(i - 1, i))]
        heapify(queue)
        while queue:
            _, left, right, end = heappop(queue)
            if not size[left] or not size[right] or left + size[left] != right or right + size[right] != end:
                continue
            size[left], size[right] = end - left, 0
            after[left] = end
            if end < len(text):
                before[end] = left
                if p := pair(left, end):
                    heappush(queue, p)
            if before[left] >= 0 and (p := pair(before[left], left)):
                heappush(queue, p)
        found, at = [], 0
        while at < len(text):
            symbol = text[at : after[at]]
            at = after[at]
            token = ids.get(symbol)
            found += self._bytes(symbol) if token is None else [token]
        return tuple(found)

    def _bytes(self, symbol: str) -> list[int]:
        found = [self._ids.get(f"<0x{b:02X}>", self._unknown) for b in symbol.encode()]
        if None in found:
            raise UserError(f"{self._source}: no token for {symbol!r}, no byte tokens and no unknown token")
        return found  # type: ignore[return-value]


@dataclass(frozen=True)
class _Special:
    """A token whose text is found before merging; `eats_spaces`: white space behind it disappears (phi-3)."""

    text: str
    token: int
    control: bool
    eats_spaces: bool


class Detokenizer:
    """Tokens to text while they come: only complete UTF-8 leaves, each byte is looked at once."""

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool = False) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left: U+FFFD for an incomplete character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Tokenizer:
    """A vocabulary with its merging rules; made by `load_tokenizer`.

    `bos_id`, `eos_id`: None where the file has none. `eog_ids`: generation stops at each of them.
    """

    def __init__(
        self, tokens: list[str], ids: dict[str, int], attrs: NDArray[np.uint8], merger: _Merger, flags: "_Flags",
        eog_ids: frozenset[int], source: str,
    ) -> None:  # fmt: skip
        self.source, self.n_vocab, self.eog_ids = source, len(tokens), eog_ids
        self.bos_id, self.eos_id, self.add_bos, self.add_eos = flags.bos_id, flags.eos_id, flags.add_bos, flags.add_eos
        self._tokens, self._ids, self._attrs, self._merger, self._flags = tokens, ids, attrs, merger, flags
        found = [
            _Special(tokens[i], i, self.is_special(i), i in flags.eats_spaces)
            for i in np.flatnonzero(attrs & (SPECIAL | USER_DEFINED)).tolist()
        ]
        # the longest first over the whole text, not the leftmost: llama.cpp's order
        self._specials = sorted(found, key=lambda s: -len(s.text.encode()))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        `add_special` puts the BOS and EOS tokens around it that the file asks for; `parse_special` reads the text of
        control tokens (`<|im_start|>`) as these tokens: for templates, never for what a stranger wrote.
        """
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        after_special = True
        if not text.isascii():
            text = SURROGATES.sub("\ufffd", text)
        for fragment in self._fragments(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids += self._merger.encode(fragment, after_special)
            after_special = isinstance(fragment, int)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of tokens, bytes that are no UTF-8 as U+FFFD; the space that `encode` put in front is removed again."""
        kept = [i for i in ids if not (skip_special and self.is_special(i))]
        data = b"".join(map(self.token_bytes, kept))
        if self._flags.space_prefix and kept and not self._attrs[kept[0]] & (SPECIAL | USER_DEFINED):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def stream(self, skip_special: bool = False) -> Detokenizer:
        """A detokenizer for tokens that come one by one and continue a text (no leading space is removed)."""
        return Detokenizer(self, skip_special)

    def is_special(self, token: int) -> bool:
        """Whether a token is control or unknown: no part of the text."""
        return bool(self._attrs[self._checked(token)] & SPECIAL)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's are its text, an unused one has none."""
        text, attr = self._tokens[self._checked(token)], self._attrs[token]
        if attr & (SPECIAL | USER_DEFINED):
            return text.encode()
        if attr & NORMAL:
            if self._flags.byte_level:
                return b"".join(bytes((BYTE_OF[c],)) if c in BYTE_OF else c.encode() for c in text)
            return text.replace(SPACE, " ").encode()
        if attr & BYTE:
            return bytes((int(text[3:5], 16),))
        return b""

    def token_text(self, token: int) -> str:
        """A token as the file spells it."""
        return self._tokens[self._checked(token)]

    def token_id(self, text: str) -> int | None:
        """The token that the file spells so, or None."""
        return self._ids.get(text)

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise UserError(f"{self.source}: token {token} is outside the vocabulary of {self.n_vocab}")
        return token

    def _fragments(self, text: str, parse_special: bool) -> list[str | int]:
        fragments: list[str | int] = [text] if text else []
        for special in self._specials:
            if (special.control and not parse_special) or special.text not in text:
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                head, *rest = fragment.split(special.text)
                cut += [head] if head else []
                for part in rest:
                    cut.append(special.token)
                    part = part.lstrip(C_WHITESPACE) if special.eats_spaces else part
                    cut += [part] if part else []
            fragments = cut
        return fragments


@dataclass(frozen=True)
class _Flags:
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    byte_level: bool
    eats_spaces: frozenset[int]


class _Metadata:
    """Typed, checked access to the tokenizer keys of one file."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.values, self.source = metadata, source

    def array(self, name: str, kind: type | tuple[type, ...]) -> list[Any] | None:
        found = self.values.get(KEY + name)
        if found is None:
            return None
        if isinstance(found, str | int | float):
            raise UserError(f"{self.source}: {KEY}{name} is no array")
        items = next((getattr(found, name)() for name in ("to_list", "tolist") if hasattr(found, name)), None)
        items = list(found) if items is None else items
        if items and not all(isinstance(item, kind) for item in (items[0], items[-1])):
            raise UserError(f"{self.source}: {KEY}{name} holds {type(items[0]).__name__} values")
        return items

    def flag(self, name: str, default: bool) -> bool:
        found = self.values.get(KEY + name, default)
        if not isinstance(found, bool):
            raise UserError(f"{self.source}: {KEY}{name} is {found!r}, not true or false")
        return found

    def token(self, name: str, n_vocab: int, default: int | None = None) -> int | None:
        """A token id; one outside the vocabulary (4294967295 in many files) counts as not given."""
        found = self.values.get(f"{KEY}{name}_token_id", default)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
            raise UserError(f"{self.source}: {KEY}{name}_token_id is {found!r}, not a number")
        return found if found is not None and 0 <= found < n_vocab else None


def load_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer of a GGUF file from its metadata; `source` names the file in errors.

    248,320 tokens and as many merges load in 0.7 s. UserError: no tokenizer, one of another kind, an unknown
    pre-tokenizer, or tables that do not fit each other.
    """
    data = _Metadata(metadata, source)
    model = metadata.get(KEY + "model")
    if model is None:
        raise UserError(f"{source}: the file has no tokenizer ({KEY}model is missing)")
    if model not in ("gpt2", "gemma4", "llama"):
        raise UserError(f"{source}: tokenizer {model!r} ({KEY}model) is not supported; known: gpt2, gemma4, llama")
    tokens = data.array("tokens", str)
    if not tokens:
        raise UserError(f"{source}: {KEY}tokens is missing or empty")
    ids = {token: i for i, token in enumerate(tokens)}
    if "" in ids:
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise UserError(f"{source}: {KEY}tokens has {twice!r} twice")
    types = np.asarray(data.array("token_type", int) or [1] * len(tokens))
    if len(types) < len(tokens):
        raise UserError(f"{source}: {KEY}token_type has {len(types)} entries for {len(tokens)} tokens")
    known = (types >= 0) & (types < len(OF_GGUF_TYPE))
    attrs = OF_GGUF_TYPE[np.where(known, types, 0)[: len(tokens)]]

    if model == "llama":
        merger: _Merger
        scores = data.array("scores", (int, float)) or [0.0] * len(tokens)
        if len(scores) < len(tokens):
            raise UserError(f"{source}: {KEY}scores has {len(scores)} entries for {len(tokens)} tokens")
        prefix = data.flag("add_space_prefix", True)
        merger = _SentencePiece(ids, scores, data.token("unknown", len(tokens), 0), prefix, source)
        byte_level, add_bos, bos, eos = False, True, 1, 2
    else:
        pre = pre_tokenizer("gemma4" if model == "gemma4" else _pre_name(metadata, source), source)
        merges = data.array("merges", str)
        if merges is None and metadata.get(KEY + "pre") != "kimi-k2":
            raise UserError(f"{source}: {KEY}merges is missing; convert the model again with a current converter")
        merger = _ByteLevel(ids, merges or [], pre, source)
        byte_level, add_bos, bos, eos, prefix = not pre.raw_utf8, pre.add_bos, None, None, False

    for i in np.flatnonzero(attrs == BYTE).tolist():
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", tokens[i]):
            raise UserError(f"{source}: byte token {i} is {tokens[i]!r}, not <0x00> to <0xFF>")
    eog_ids = _end_of_generation(data, tokens, ids, attrs, eos)
    flags = _Flags(
        bos_id=data.token("bos", len(tokens), bos), eos_id=data.token("eos", len(tokens), eos),
        add_bos=data.flag("add_bos_token", add_bos), add_eos=data.flag("add_eos_token", False),
        space_prefix=prefix, byte_level=byte_level, eats_spaces=_eats_spaces(metadata, ids, attrs),
    )  # fmt: skip
    for name, wanted, token in (("bos", flags.add_bos, flags.bos_id), ("eos", flags.add_eos, flags.eos_id)):
        if wanted and token is None:
            raise UserError(f"{source}: {KEY}add_{name}_token is true, but there is no valid {KEY}{name}_token_id")
    return Tokenizer(tokens, ids, attrs, merger, flags, eog_ids, source)


def _pre_name(metadata: Mapping[str, Any], source: str) -> str:
    if name := str(metadata.get(KEY + "pre", "")):
        return name
    log.warning("%s: no %spre, so words are cut by the 'default' rule; output may suffer", source, KEY)
    return "default"


def _eats_spaces(metadata: Mapping[str, Any], ids: dict[str, int], attrs: NDArray[np.uint8]) -> frozenset[int]:
    """Special tokens behind which white space disappears: phi-3's, known by the model's name alone."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    found = np.flatnonzero(attrs & (SPECIAL | USER_DEFINED)).tolist()
    return frozenset(found) - frozenset(ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>"))


def _end_of_generation(
    data: _Metadata, tokens: list[str], ids: dict[str, int], attrs: NDArray[np.uint8], eos: int | None
) -> frozenset[int]:
    """Tokens at which generation ends, as llama.cpp collects them; corrects `attrs` of tokens known by their text."""
    found = set()
    for name, texts in FILL_IN_THE_MIDDLE.items():
        token = data.token(name, len(tokens))
        if token is None and (by_text := [ids[text] for text in texts if text in ids]):
            token = by_text[0]
            attrs[token] |= CONTROL
        if token is not None and name in ("fim_pad", "fim_rep", "fim_sep"):
            found.add(token)
    for text in END_OF_GENERATION:
        if text in ids:
            found.add(ids[text])
            attrs[ids[text]] |= CONTROL
    for text in ALWAYS_TEXT:
        if text in ids:
            attrs[ids[text]] = USER_DEFINED
    named = (data.token(name, len(tokens), eos if name == "eos" else None) for name in ("eos", "eot", "eom"))
    found |= {token for token in named if token is not None}
    texts_found = {tokens[i] for i in found}
    # gpt-oss and solar-open: <|end|> closes a message, not the turn
    calls = texts_found & {"<|call|>", "<|calls|>"}
    if calls and "<|end|>" in texts_found and texts_found & {"<|return|>", "<|flush|>"}:
        found.discard(ids["<|end|>"])
        attrs[ids["<|end|>"]] = USER_DEFINED
    # gemma4 has </s> as plain text
    if {"<|tool_response>", "</s>"} <= texts_found:
        found.discard(ids["</s>"])
        attrs[ids["</s>"]] = NORMAL
    return frozenset(found)
