"""One file per architecture, named as GGUF's general.architecture; the table below is the only list.

Each module exports `read_spec(m: Metadata) -> ModelSpec` and `build(spec, t: TensorTable) -> Program`.
"""

from importlib import import_module
from types import ModuleType

from ..errors import UserError
from ..gguf import File
from ..program import Program, TensorTable
from .metadata import Metadata

ARCHITECTURES = {
    "llama": "llama",
    "olmoe": "olmoe",
    "qwen2moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35moe",
    "qwen3moe": "qwen3moe",
}
"""GGUF architecture -> module of this package."""


def architecture(file: File) -> ModuleType:
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: architecture {name!r} is not supported; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    return import_module(f"{__name__}.{ARCHITECTURES[name]}")


def load_program(file: File) -> Program:
    """The file's model as a Program; every tensor of the file is accounted for."""
    module = architecture(file)
    table = TensorTable(file.tensors, str(file.path))
    spec = module.read_spec(Metadata(file))
    program: Program = module.build(spec, table)
    table.finish()
    return program
