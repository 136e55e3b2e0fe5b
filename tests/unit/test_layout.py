"""The structure that docs/architecture.md promises: import layering, file sizes, tables that match folders."""

import ast
from pathlib import Path

import pytest

from headrace.models import ARCHITECTURES

SRC = Path(__file__).parents[2] / "src" / "headrace"
ROOT = SRC.parents[1]

LAYERS = [
    {"errors", "env", "stats", "config"},
    {"quants", "expertsplit", "rates"},
    {"gguf", "spec", "hostmem"},
    {"backends.base"},
    {"batch", "expertcache", "program", "sampling", "tokenizer", "pretokenizers", "chat", "kvcache", "trace"},
    {"blocks", "schedule", "placement", "budget", "predict", "plan", "stream"},
    {"models", "backends"},
    {"runner"},
    {"generate", "rehearsal"},
    {"engine", "synth"},
    {"commands", "__main__"},
]
"""A module may import from its own row and the rows above; packages stand for all their modules."""
PURE = {
    "placement",
    "budget",
    "predict",
    "spec",
    "expertsplit",
    "program",
    "plan",
    "schedule",
    "config",
    "errors",
    "stats",
    "sampling",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    for i, names in enumerate(LAYERS):
        if module in names or (module.split(".")[0] in names and module != "backends.base"):
            return i
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def imports(path: Path) -> set[str]:
    """Names of the headrace modules that a file imports, wherever the statement stands."""
    package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
    package = [p for p in package if p]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                name = ".".join([*target, alias.name])
                found.add(
                    name
                    if (SRC / name.replace(".", "/")).exists() or (SRC / (name.replace(".", "/") + ".py")).exists()
                    else ".".join(target)
                )
    return {name for name in found if name}


FILES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p))
def test_imports_point_upward(path: Path) -> None:
    mine = layer_of(module_of(path))
    for name in imports(path):
        assert layer_of(name) <= mine, f"{module_of(path)} imports {name}, which is further down the spine"


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p))
def test_backends_and_models_do_not_know_each_other(path: Path) -> None:
    top = module_of(path).split(".")[0]
    if top == "models":
        assert not any(name.startswith("backends") and name != "backends.base" for name in imports(path))
    if top == "backends":
        assert not any(name.split(".")[0] in ("models", "runner", "engine", "stream") for name in imports(path))


def test_pure_modules_know_no_device_library() -> None:
    for name in PURE:
        for node in ast.walk(ast.parse((SRC / f"{name}.py").read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {n.split(".")[0] for n in names} & {"torch", "triton", "numba", "llvmlite", "mmap"}, name


def test_only_env_reads_the_environment() -> None:
    for path in FILES:
        if module_of(path) != "env":
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_files_stay_short() -> None:
    for path in ROOT.rglob("*.py"):
        if ".venv" not in path.parts:
            assert len(path.read_text().splitlines()) <= 500, f"{path} is over 500 lines: split it"


def test_every_architecture_has_its_file() -> None:
    files = {p.stem for p in (SRC / "models").glob("*.py")} - {"__init__", "metadata"}
    assert files == set(ARCHITECTURES.values())
