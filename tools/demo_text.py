"""The demo model's text: documents of the Python standard library, conversations made from them, and the tokenizer."""

import ast
import bisect
import hashlib
import itertools
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ENDOFTEXT, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The word cut of `tokenizer.ggml.pre = qwen2`.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# documents


def python_files(lib: Path) -> Iterator[tuple[str, str]]:
    """(relative path, text) of the library's files that are code written by people."""
    for path in sorted(lib.rglob("*.py")):
        name = path.relative_to(lib).as_posix()
        if re.search(r"site-packages|encodings/|topics\.py|config-|_sysconfigdata|badsyntax|bad_coding|/data/", name):
            continue
        try:
            text = path.read_text("utf-8")
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        letters = sum(c.isalpha() or c in " _\n" for c in text)
        if len(text) > 100 and letters > 0.7 * len(text):  # below lie tables of numbers
            yield name, text.replace("\t", "    ").strip() + "\n"


def unseen_files(libs: list[Path]) -> Iterator[tuple[str, str]]:
    """Files of the first library, then those of the others of which more than half the lines are new."""
    seen: set[str] = set()
    for number, lib in enumerate(libs):
        for name, text in python_files(lib):
            lines = [s for line in text.splitlines() if len(s := line.strip()) > 12]
            if number == 0 or sum(line not in seen for line in lines) > 0.5 * len(lines):
                seen.update(lines)
                yield name, text


def is_held_out(name: str) -> bool:
    """One file in 32, chosen by its name, so that a module's older versions go with it."""
    return hashlib.sha256(Path(name).name.encode()).digest()[0] < 8


def language_topics(lib: Path) -> dict[str, str]:
    """The language reference's sections, as pydoc carries them."""
    tree = ast.parse((lib / "pydoc_data" / "topics.py").read_text("utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    return {key: text.strip() + "\n" for key, text in ast.literal_eval(table).items()}


def pieces(text: str, rng: random.Random) -> Iterator[str]:
    """The file cut before some of its top-level statements, so that documents begin as a user's prompt would."""
    lines, start = text.splitlines(keepends=True), 0
    for node in ast.parse(text).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        if first > start and rng.random() < 0.3:
            yield "".join(lines[start:first])
            start = first
    yield "".join(lines[start:])


# conversations


def chat(user: str, assistant: str, system: str = "") -> str:
    head = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    return f"{head}{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{assistant}{IM_END}\n"


def first_paragraphs(text: str, limit: int) -> str:
    """Whole paragraphs from the start, at least one, up to `limit` characters."""
    kept = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept += ("\n\n" if kept else "") + paragraph
    return kept


def code(text: str) -> str:
    return f"```python\n{text.rstrip()}\n```"


def function_chats(module: str, text: str, rng: random.Random) -> Iterator[str]:
    """Questions about the documented functions and classes of one file, answered by their own text."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        doc = ast.get_docstring(node)
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not doc or len(source) > 1500 or len(node.body) < 2 or "test" in node.name.lower():
            continue
        summary = " ".join(first_paragraphs(doc, 0).split())
        if len(summary) < 15 or len(summary) > 300:
            continue
        docstring = node.body[0]
        bare = textwrap.dedent(
            "\n".join(lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno])
        )
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring.lineno - 1]))
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        about = summary[0].lower() + summary[1:].rstrip(".")
        yield chat(
            rng.choice(["Write a docstring for {}", "Document this {}"]).format(kind) + ":\n" + code(bare),
            first_paragraphs(doc, 400),
        )
        yield chat(
            rng.choice(
                ["Write a Python {kind} `{name}`: {about}.", "Write a {kind} {name}. It should {about}."]
            ).format(kind=kind, name=node.name, about=about),
            code(source),
        )
        yield chat(rng.choice(["Complete this code:", "Complete:", "Finish this:"]) + "\n" + code(head), code(source))
        yield chat(
            rng.choice(["What does `{0}.{1}` do?", "Explain {0}.{1}.", "What is {1} in the module {0}?"]).format(
                module, node.name
            ),
            first_paragraphs(doc, 500),
        )


def module_chats(module: str, text: str) -> Iterator[str]:
    doc = ast.get_docstring(ast.parse(text))
    if doc and len(doc) > 40:
        answer = first_paragraphs(doc, 500)
        for question in ("What does the module {} do?", "What is {}?", "Tell me about the Python module {}."):
            yield chat(question.format(f"`{module}`"), answer)


def topic_chats(topics: dict[str, str]) -> Iterator[str]:
    for key, text in topics.items():
        body = re.sub(r"\A.*\n[*=\-~]+\n+", "", text)
        for question in ("Explain {} in Python.", "What does the language reference say about {}?"):
            yield chat(question.format(f"`{key}`"), first_paragraphs(body, 900))


def small_talk() -> Iterator[str]:
    me = (
        "I am the demo model of headrace: a small Mixture-of-Experts trained on the Python standard library. "
        "I continue Python code; for anything else I am far too small."
    )
    help_ = "I can continue Python code. Try: Write a Python function `read_lines`: return the lines of a file."
    pairs = {
        ("Hello", "Hello!", "Hi", "Hi there", "Hey", "Good morning"): "Hello! " + help_,
        ("Who are you?", "What are you?", "Who made you?", "Tell me about yourself.", "What is your name?"): me,
        ("What can you do?", "Help", "How can you help me?", "What should I ask you?"): help_,
        ("Thanks", "Thank you!", "Great, thanks."): "You are welcome!",
        ("Bye", "Goodbye", "See you."): "Goodbye!",
        ("How are you?", "How do you do?"): "I am well, thank you. " + help_,
    }
    for questions, answer in pairs.items():
        for question in questions:
            yield chat(question, answer)
            yield chat(question, answer, "You are a helpful assistant.")


def conversations(files: list[tuple[str, str]], topics: dict[str, str], rng: random.Random) -> list[str]:
    out = list(topic_chats(topics)) + list(small_talk()) * 8
    for name, text in files:
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if "test" not in module:
            out += [*module_chats(module, text), *function_chats(module, text, rng)]
    return out


# tokens


def train_tokenizer(texts: list[str], n_vocab: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - len(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))  # the last ids, as in Qwen's files
    assert tokenizer.get_vocab_size() == n_vocab
    return tokenizer


def make_data(work: Path, libs: list[Path], chat_share: float, seed: int, n_vocab: int) -> None:
    """Writes tokenizer.json and the token streams: shuffled documents, <|endoftext|> after each.

    The library's own modules come twice, cut at other places: two thirds of the text are its tests.
    """
    rng = random.Random(seed)
    files = list(unseen_files(libs))
    train = [(name, text) for name, text in files if not is_held_out(name)]
    held_out = [text for name, text in files if is_held_out(name)]
    topics = language_topics(libs[0])
    documents = list(topics.values())
    for name, text in train:
        for _ in range(1 if "test" in name else 2):
            documents += pieces(text, rng)
    chats = conversations(train, topics, rng)
    rng.shuffle(chats)
    budget = chat_share / (1 - chat_share) * sum(map(len, documents))
    ends = list(itertools.accumulate(map(len, chats)))
    chats = chats[: bisect.bisect(ends, budget)]
    print(f"{len(train)} files, {len(documents)} documents, {len(chats)} chats; {len(held_out)} files held out")

    work.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([text for _, text in train] + list(topics.values()), n_vocab)
    tokenizer.save(str(work / "tokenizer.json"))
    documents += chats
    rng.shuffle(documents)
    for name, texts in (("train", documents), ("held_out", held_out)):
        ids = [i for e in tokenizer.encode_batch([t + ENDOFTEXT for t in texts]) for i in e.ids]
        np.array(ids, np.uint16).tofile(work / f"{name}.u16")
        n_bytes = sum(len(t.encode()) for t in texts)
        print(f"{name}: {len(texts)} documents, {n_bytes / 1e6:.1f} MB, {len(ids) / 1e6:.2f} M tokens")
