"""Random-weight GGUF files with the shape of named models: for speed, memory and oracle checks without a download."""

from collections.abc import Callable
from pathlib import Path

from . import mixes, shapes, vocab, weights, writer
from .shapes import SHAPES, Shape, find_shape

__all__ = ["SHAPES", "Shape", "find_shape", "model", "synthesize"]


def model(shape: Shape, mix_name: str = "") -> tuple[list[shapes.Entry], list[writer.Tensor], mixes.Mix]:
    """The tensors that a file of this shape has: what fills them, and their types (mix_name "": the shape's own)."""
    mix = mixes.find_mix(mix_name or shape.mix)
    todo = list(shapes.entries(shape))
    kinds = mixes.tensor_types(shape, todo, mix)
    return todo, [writer.Tensor(e.name, e.shape, kind) for e, kind in zip(todo, kinds, strict=True)], mix


def synthesize(
    path: Path, shape: Shape, mix_name: str = "", *, seed: int = 0, router_skew: float = 0.0, sparse: bool = False,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> int:  # fmt: skip
    """Writes the file and returns its bytes; `progress` is told of every piece written. `sparse`: no weights."""
    todo, tensors, mix = model(shape, mix_name)
    if shape.n_expert:
        weights.hot_factor(shape.n_expert, shape.n_expert_used, router_skew)  # refuses before anything is written
    metadata = {
        "general.architecture": shape.arch, "general.name": f"{shape.name} (random weights)",
        "general.file_type": mix.file_type, "general.quantization_version": 2,
        **shapes.metadata(shape), **vocab.vocab_metadata(shape.n_vocab, shape.pre),
    }  # fmt: skip
    entry_of = {e.name: e for e in todo}
    return writer.save(
        path, metadata, tensors,
        None if sparse else lambda t: weights.fill(shape, entry_of[t.name], t, seed, router_skew), progress,
    )  # fmt: skip
