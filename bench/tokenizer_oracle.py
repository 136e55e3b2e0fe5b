"""Compares every tokenizer rule with llama.cpp's `/tokenize` (PyPI `xllamacpp`): texts, then every code point.

  python bench/tokenizer_oracle.py                       5000 texts per pre-tokenizer and SentencePiece vocabulary
  python bench/tokenizer_oracle.py --code-points         also each of 208,512 code points in eight surroundings
  python bench/tokenizer_oracle.py --pre qwen35 gpt-4o   some only

A vocabulary trained without word cuts, or one that merges every two bytes, shows a wrong cut anywhere. Exit status 1
if a text differs. Code points differ only where the Unicode tables of llama.cpp and Oniguruma have another version.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import texts  # noqa: E402
from headrace.pretokenizers import FAMILIES  # noqa: E402
from headrace.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

CODE_POINTS = [*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE0200)]


def cases(only: list[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """(name, metadata) of each vocabulary under comparison."""
    tokens, types, merges = texts.bpe_vocabulary()
    ids = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")}
    for names, pre in FAMILIES:
        for name in names.split():
            if not pre.raw_utf8 and (not only or name in only):
                yield name, texts.metadata_of(tokens, types, merges, pre=name, **ids)
    for crossing in (False, True):
        name = "spm-crossing" if crossing else "spm"
        tokens, types, scores = texts.scored_vocabulary(crossing=crossing)
        if not only or name in only:
            yield name, texts.metadata_of(tokens, types, scores=scores, model="llama")


def open_both(metadata: dict[str, object]) -> tuple[Tokenizer, texts.LlamaTokenizer]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocabulary.gguf")
        texts.write_model(path, metadata)
        return load_tokenizer(metadata, "vocabulary"), texts.LlamaTokenizer(path)


def compare_texts(metadata: dict[str, object], n_texts: int) -> list[str]:
    """The texts whose tokens differ."""
    mine, llama = open_both(metadata)
    return [
        text
        for i, text in enumerate(texts.texts(n_texts, seed=42))
        if mine.encode(text, parse_special=i % 2 == 0) != llama.encode(text, parse_special=i % 2 == 0)
    ]


def compare_code_points(metadata: dict[str, object]) -> list[int]:
    """The code points that cut a text elsewhere than in llama.cpp."""
    tokens, types, merges = texts.pair_vocabulary()
    pre = str(metadata["tokenizer.ggml.pre"])
    mine, llama = open_both(texts.metadata_of(tokens, types, merges, pre=pre, add_bos_token=False))

    def around(point: int) -> str:
        c = chr(point)
        return f"a{c}b {c}{c} A{c}1{c}2.{c}!  {c}\n{c}é'{c}中{c}\n"

    def differing(points: list[int]) -> list[int]:
        text = "".join(map(around, points))
        if mine.encode(text, add_special=False) == llama.encode(text, add_special=False):
            return []
        if len(points) == 1:
            return points
        half = len(points) // 2
        return differing(points[:half]) + differing(points[half:])

    return [p for i in range(0, len(CODE_POINTS), 32) for p in differing(CODE_POINTS[i : i + 32])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5000, help="texts per vocabulary")
    parser.add_argument("--pre", nargs="*", default=[], help="names of tokenizer.ggml.pre, spm or spm-crossing")
    parser.add_argument("--code-points", action="store_true", help="every code point, for the first name of a family")
    parser.add_argument("--out", type=Path, help="append a JSON line per vocabulary to this file")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    first = {names.split()[0] for names, _ in FAMILIES}
    n_bad = 0
    for name, metadata in cases(args.pre):
        start_s = time.perf_counter()
        bad = compare_texts(metadata, args.n)
        row = {"vocabulary": name, "n_texts": args.n, "n_texts_differ": len(bad)}
        if args.code_points and (name in first or name in args.pre) and "spm" not in name:
            points = compare_code_points(metadata)
            assigned = [p for p in points if unicodedata.category(chr(p)) not in ("Cn", "Co")]
            row |= {"n_code_points": len(CODE_POINTS), "n_code_points_differ": len(points)}
            row |= {"n_assigned_differ": len(assigned), "examples": [f"{p:04X}" for p in assigned[:8]]}
        row["seconds"] = round(time.perf_counter() - start_s, 1)
        print(json.dumps(row), flush=True)
        for text in bad[:3]:
            print(f"  differs: {text!r}")
        n_bad += len(bad)
        if args.out:
            extra = {"machine": platform.processor() or platform.machine(), "commit": commit.strip()}
            with args.out.open("a") as f:
                f.write(json.dumps(row | extra | {"command": " ".join(sys.argv)}) + "\n")
    return n_bad > 0


if __name__ == "__main__":
    sys.exit(main())
