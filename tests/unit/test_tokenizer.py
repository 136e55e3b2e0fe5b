"""The tokenizer against llama.cpp's, on vocabularies trained here; then specials, streaming, errors."""

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import texts
from headrace.errors import UserError
from headrace.gguf import open_gguf
from headrace.pretokenizers import FAMILIES, PRE_TOKENIZERS
from headrace.tokenizer import BYTE_OF, SPACE, Tokenizer, load_tokenizer
from texts import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, LlamaTokenizer, metadata_of, write_model

N_TEXTS = 240
BPE_FAMILIES = [names.split()[-1] for names, pre in FAMILIES if not pre.raw_utf8]
"""One name of each rule; bench/tokenizer_oracle.py takes all names, and more texts."""


def bpe(pre: str = "qwen2", **more: Any) -> dict[str, Any]:
    tokens, types, merges = texts.bpe_vocabulary()
    ids = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")}
    return metadata_of(tokens, types, merges, pre=pre, **ids | more)


def spm(crossing: bool = False, **more: Any) -> dict[str, Any]:
    tokens, types, scores = texts.scored_vocabulary(crossing=crossing)
    return metadata_of(tokens, types, scores=scores, model="llama", **more)


def differences(metadata: dict[str, Any], folder: Path, n_texts: int, seed: int = 1) -> list[str]:
    """Texts whose tokens are not llama.cpp's, over the four combinations of special-token options."""
    mine = load_tokenizer(metadata, "m.gguf")
    write_model(folder / "m.gguf", metadata)
    llama = LlamaTokenizer(folder / "m.gguf")
    bad = []
    for i, text in enumerate(texts.texts(n_texts, seed)):
        options = {"add_special": i % 8 >= 4, "parse_special": i % 16 >= 8}
        if mine.encode(text, **options) != llama.encode(text, **options):
            bad.append(text)
    return bad


@pytest.mark.parametrize("pre", BPE_FAMILIES)
def test_byte_level_equals_llama_cpp(pre: str, tmp_path: Path) -> None:
    assert differences(bpe(pre), tmp_path, N_TEXTS) == []


def test_the_texts_tell_the_rules_apart() -> None:
    """If two rules gave the same tokens on these texts, the comparison above could not see a mix-up.

    Two spellings of the same rule are known: bailingmoe's lines end in one newline of many, so do qwen2's.
    """
    sample = texts.texts(N_TEXTS, 1)
    results: dict[tuple[Any, ...], str] = {}
    for pre in BPE_FAMILIES:
        tokenizer = load_tokenizer(bpe(pre), "m.gguf")
        found = tuple(tuple(tokenizer.encode(text, add_special=False)) for text in sample)
        twin = results.setdefault(found, pre)
        if (twin, pre) != ("grok-2", "llada-moe"):
            assert PRE_TOKENIZERS[twin].patterns == PRE_TOKENIZERS[pre].patterns, f"{pre} and {twin}"


def test_a_word_that_is_a_token_may_go_before_merges() -> None:
    """llama-bpe and dbrx cut alike; only the first takes whole words (tekken, minicpm5 and others do too)."""
    tokens, merges = [*sorted(BYTE_OF), "ab", "bc", "abc"], ["b c", "a b", "ab c"]
    for pre, wanted in (("llama-bpe", ["abc"]), ("dbrx", ["a", "bc"])):
        metadata = metadata_of(tokens, [NORMAL] * len(tokens), merges, pre=pre, add_bos_token=False)
        tokenizer = load_tokenizer(metadata, "m.gguf")
        assert [tokenizer.token_text(i) for i in tokenizer.encode("abc")] == wanted


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize("more", [{}, {"add_space_prefix": False, "add_eos_token": True}], ids=str)
def test_sentencepiece_equals_llama_cpp(crossing: bool, more: dict[str, Any], tmp_path: Path) -> None:
    assert differences(spm(crossing, **more), tmp_path, 2 * N_TEXTS) == []


@pytest.mark.parametrize(
    "metadata",
    [
        bpe("llama-bpe", add_bos_token=False),
        bpe("qwen2", add_bos_token=True, add_eos_token=True),
        {**spm(), "general.name": "Phi-3.5 MoE"},
    ],
    ids=["no-bos", "bos-eos", "phi-3"],
)
def test_flags_equal_llama_cpp(metadata: dict[str, Any], tmp_path: Path) -> None:
    assert differences(metadata, tmp_path, N_TEXTS) == []


def raw_utf8_vocabulary(pre: str) -> dict[str, Any]:
    """SentencePiece's spelling with BPE merges (gemma4, sarvam): every way to join two tokens to a third."""
    tokens, types, _ = texts.scored_vocabulary()
    known = {t for t, kind in zip(tokens, types) if kind == NORMAL}
    merges = [
        f"{t[:i]} {t[i:]}"
        for t, kind in zip(tokens, types)
        if kind == NORMAL and "\n" not in t and " " not in t
        for i in range(1, len(t))
        if t[:i] in known and t[i:] in known
    ]
    random.Random(2).shuffle(merges)
    model = "gemma4" if pre == "gemma4" else "gpt2"
    return metadata_of(tokens, types, merges, pre=pre, model=model, bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize("pre", ["gemma4", "sarvam-moe"])
def test_raw_utf8_equals_llama_cpp(pre: str, tmp_path: Path) -> None:
    assert differences(raw_utf8_vocabulary(pre), tmp_path, N_TEXTS) == []


@pytest.mark.parametrize(
    "metadata", [bpe("qwen2"), spm(), raw_utf8_vocabulary("sarvam-moe")], ids=["bpe", "spm", "raw"]
)
def test_every_token_has_llama_cpps_bytes(metadata: dict[str, Any], tmp_path: Path) -> None:
    mine = load_tokenizer(metadata, "m.gguf")
    write_model(tmp_path / "m.gguf", metadata)
    llama = LlamaTokenizer(tmp_path / "m.gguf")
    # between two letters: a lone byte is no text, and llama.cpp takes the first space away
    a = metadata["tokenizer.ggml.tokens"].index("a")
    for token in range(mine.n_vocab):
        wanted = llama.decode([a, token, a])
        if "\ufffd" not in wanted and " ?" not in wanted:
            assert "a" + mine.token_bytes(token).decode("utf-8", "replace") + "a" == wanted.lstrip()


@pytest.mark.parametrize("metadata", [bpe("qwen2"), bpe("llama-bpe"), spm(), spm(True)], ids=["b", "b-bos", "s", "s-x"])
def test_round_trip_and_stream(metadata: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(metadata, "m.gguf")
    for text in texts.texts(400, seed=9):
        ids = tokenizer.encode(text)
        assert all(type(i) is int for i in ids)
        # SentencePiece puts a space behind a special token and has one spelling for U+2581 and a space
        if metadata["tokenizer.ggml.model"] == "gpt2" or not any(
            s in text for s in [SPACE, *dict(texts.SPECIAL_TOKENS)]
        ):
            assert tokenizer.decode(ids, skip_special=True) == text
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in ids] + [stream.flush()]
        assert "".join(pieces) == b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_stream_gives_only_complete_characters(data: list[int]) -> None:
    tokenizer = load_tokenizer(metadata_of([c for c, _ in sorted(BYTE_OF.items(), key=lambda x: x[1])],
                                           [NORMAL] * 256, [], pre="qwen2"), "m.gguf")  # fmt: skip
    stream, done = tokenizer.stream(), ""
    for i, byte in enumerate(data):
        done += stream.push(byte)
        assert bytes(data[: i + 1]).decode("utf-8", "replace").startswith(done)
    assert done + stream.flush() == bytes(data).decode("utf-8", "replace") == tokenizer.decode(data)
    # after the flush it starts anew
    assert stream.push(0x61) == "a"


def test_stream_waits_for_a_character() -> None:
    tokenizer = load_tokenizer(bpe(), "m.gguf")
    by_byte = {b: tokenizer.token_id(c) for c, b in BYTE_OF.items()}
    stream = tokenizer.stream()
    assert [stream.push(by_byte[b]) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert stream.push(by_byte[0xF0]) == ""
    assert stream.flush() == "\ufffd"
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.stream().push(end) == "<|im_end|>"
    assert tokenizer.stream(skip_special=True).push(end) == ""
    assert tokenizer.decode([end, by_byte[0x61]], skip_special=True) == "a"
    assert tokenizer.decode([end, by_byte[0x61]]) == "<|im_end|>a"


def test_special_tokens_in_text() -> None:
    tokenizer = load_tokenizer(bpe("qwen2", add_bos_token=True, add_eos_token=True), "m.gguf")
    start, bos, eos = (tokenizer.token_id(t) for t in ("<|im_start|>", "<s>", "</s>"))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
    assert tokenizer.encode("") == [bos, eos]
    assert tokenizer.encode("", add_special=False) == []
    assert start in tokenizer.encode("<|im_start|>", parse_special=True)
    assert start not in tokenizer.encode("<|im_start|>")
    # user-defined ones always, the longest first even if another starts earlier
    assert tokenizer.encode("a<tool_call>{", add_special=False)[-1] == tokenizer.token_id("<tool_call>{")
    # typed as text in the file, known by its text as a control token
    assert tokenizer.is_special(tokenizer.token_id("<|endoftext|>"))
    assert tokenizer.decode(tokenizer.encode("a\ud800b", add_special=False)) == "a\ufffdb"


def test_metadata_may_be_lazy() -> None:
    class Lazy:
        def __init__(self, items: list[Any]) -> None:
            self._items = items

        def __len__(self) -> int:
            return len(self._items)

        def __getitem__(self, i: int) -> Any:
            return self._items[i]

    class WithList(Lazy):
        def to_list(self) -> list[Any]:
            return self._items

    for metadata in (bpe(), spm()):
        wanted = load_tokenizer(metadata, "m").encode("def f(x): 中文", parse_special=True)
        lists = {k: v for k, v in metadata.items() if isinstance(v, list)}
        for form in (Lazy, WithList, tuple):
            lazy = {**metadata, **{k: form(v) for k, v in lists.items()}}
            assert load_tokenizer(lazy, "m").encode("def f(x): 中文", parse_special=True) == wanted
        numbers = {k: np.asarray(v) for k, v in lists.items() if not isinstance(v[0], str)}
        assert load_tokenizer({**metadata, **numbers}, "m").encode("def f(x): 中文", parse_special=True) == wanted


def test_a_file_gives_the_same(tmp_path: Path) -> None:
    """Through the reader, whose arrays are lazy: strings and numbers."""
    for metadata in (bpe(), spm()):
        write_model(tmp_path / "m.gguf", metadata)
        read = load_tokenizer(open_gguf(tmp_path / "m.gguf").metadata, "m.gguf")
        made = load_tokenizer(metadata, "m.gguf")
        assert read.eog_ids == made.eog_ids
        for text in texts.texts(100, seed=3):
            assert read.encode(text, parse_special=True) == made.encode(text, parse_special=True)


def with_texts(*tokens: str, kind: int = CONTROL, **more: Any) -> Tokenizer:
    plain = sorted(BYTE_OF)
    return load_tokenizer(
        metadata_of([*plain, *tokens], [NORMAL] * 256 + [kind] * len(tokens), [], pre="qwen2", **more), "m.gguf"
    )


@pytest.mark.parametrize(
    ("tokens", "more", "wanted"),
    [
        (["<|im_end|>", "<|endoftext|>", "<x>"], {"eos_token_id": 256}, ["<|im_end|>", "<|endoftext|>"]),
        (["<x>", "<y>", "<z>"], {"eos_token_id": 257, "eot_token_id": 258}, ["<y>", "<z>"]),
        (["<x>", "<y>"], {"eos_token_id": 256, "eom_token_id": 257}, ["<x>", "<y>"]),
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], {}, ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
        (["<|fim_pad|>", "<|repo_name|>", "<|fim_prefix|>"], {}, ["<|fim_pad|>", "<|repo_name|>"]),
        (["<|file_sep|>", "<|fim_middle|>"], {}, ["<|file_sep|>"]),
        (["<|return|>", "<|call|>", "<|end|>", "<|start|>"], {"eos_token_id": 256}, ["<|return|>", "<|call|>"]),
        (["<|calls|>", "<|flush|>", "<|end|>"], {}, ["<|calls|>", "<|flush|>"]),
        (["<|end|>", "<|start|>"], {}, ["<|end|>"]),
        (["<turn|>", "</s>", "<|tool_response>"], {}, ["<turn|>", "<|tool_response>"]),
        (["<x>"], {"eos_token_id": 0}, ["!"]),
        (["<x>"], {"eos_token_id": 2**32 - 1}, []),
    ],
)  # fmt: skip
def test_end_of_generation(tokens: list[str], more: dict[str, int], wanted: list[str]) -> None:
    for kind in (CONTROL, NORMAL):
        tokenizer = with_texts(*tokens, kind=kind, **more)
        assert {tokenizer.token_text(i) for i in tokenizer.eog_ids} == set(wanted)
    harmony = with_texts("<|return|>", "<|call|>", "<|end|>", "<|channel|>")
    assert not harmony.is_special(258)
    assert not harmony.is_special(259)


def test_sentencepiece_bytes_and_unknown() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, "a", SPACE + "a"]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 3
    tokenizer = load_tokenizer(metadata_of(tokens, kinds, scores=[0.0] * len(tokens), model="llama"), "m.gguf")
    ids = tokenizer.encode("aé a")
    assert [tokenizer.token_text(i) for i in ids] == ["<s>", "▁a", "<0xC3>", "<0xA9>", "▁a"]
    assert tokenizer.decode(ids, skip_special=True) == "aé a"
    assert tokenizer.decode(ids) == "<s> aé a"
    tokens, kinds = ["<unk>", "<s>", "</s>", SPACE, "a"], [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL]
    no_bytes = metadata_of(tokens, kinds, scores=[0.0] * 5, model="llama")
    assert load_tokenizer(no_bytes, "m.gguf").encode("aé", add_special=False) == [3, 4, 0, 0]
    tokens[0] = "b"
    nothing = metadata_of(tokens, kinds, scores=[0.0] * 5, model="llama", unknown_token_id=99)
    with pytest.raises(UserError, match="no token for 'é'"):
        load_tokenizer(nothing, "m.gguf").encode("é")


PLAIN = metadata_of(sorted(BYTE_OF), [NORMAL] * 256, [], pre="qwen2")
ALL = metadata_of(["<unk>", "<s>", "</s>", "a"], [UNKNOWN, CONTROL, CONTROL, NORMAL], scores=[0.0] * 4, model="llama")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no tokenizer"),
        (PLAIN | {"tokenizer.ggml.model": "bert"}, "'bert'.*not supported; known: gpt2, gemma4, llama"),
        (PLAIN | {"tokenizer.ggml.model": "t5"}, "'t5'"),
        (PLAIN | {"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        (PLAIN | {"tokenizer.ggml.pre": "qwen99"}, "unknown pre-tokenizer 'qwen99'.*known: .*gpt-4o.*qwen35"),
        (PLAIN | {"tokenizer.ggml.tokens": []}, "tokens is missing"),
        (PLAIN | {"tokenizer.ggml.tokens": "abc"}, "tokens is no array"),
        (PLAIN | {"tokenizer.ggml.tokens": [1, 2, 3]}, "tokens holds int"),
        (PLAIN | {"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' twice"),
        (PLAIN | {"tokenizer.ggml.merges": None}, "merges is missing"),
        (PLAIN | {"tokenizer.ggml.merges": ["ab"]}, "without a space"),
        (PLAIN | {"tokenizer.ggml.merges": ["a b"]}, "merges does not fit"),
        (PLAIN | {"tokenizer.ggml.token_type": [1] * 5}, "5 entries for 256 tokens"),
        (PLAIN | {"tokenizer.ggml.token_type": [BYTE] * 256}, "byte token 0 is '!'"),
        (PLAIN | {"tokenizer.ggml.add_bos_token": True}, "no valid tokenizer.ggml.bos_token_id"),
        (PLAIN | {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 256}, "eos_token_id"),
        (PLAIN | {"tokenizer.ggml.add_bos_token": 1}, "not true or false"),
        (PLAIN | {"tokenizer.ggml.bos_token_id": "1"}, "not a number"),
        (ALL | {"tokenizer.ggml.scores": [0.0]}, "1 entries for 4 tokens"),
        (ALL | {"tokenizer.ggml.scores": ["x"] * 4}, "scores holds str"),
    ],
)
def test_errors_name_the_file_and_the_key(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as e:
        load_tokenizer(metadata, "m.gguf")
    assert str(e.value).startswith("m.gguf: ")
    assert "\n" not in str(e.value)


def test_a_missing_rule_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_tokenizer(PLAIN, "m.gguf")
        assert caplog.text == ""
        load_tokenizer({k: v for k, v in PLAIN.items() if not k.endswith(".pre")}, "m.gguf")
    assert "m.gguf: no tokenizer.ggml.pre" in caplog.text


def test_tokens_outside_the_vocabulary() -> None:
    tokenizer = with_texts("<x>", kind=USER_DEFINED)
    for token in (-1, tokenizer.n_vocab):
        for call in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special, tokenizer.stream().push):
            with pytest.raises(UserError, match=f"token {token} is outside the vocabulary of 257"):
                call(token)
    with pytest.raises(UserError, match="outside"):
        tokenizer.decode([0, 999])


def test_names_are_unique() -> None:
    assert sum(len(names.split()) for names, _ in FAMILIES) == len(PRE_TOKENIZERS)
