"""Qwen3.5 and Qwen3.6, dense: the layers of `qwen35moe` with an ordinary FFN."""

from ..spec import ModelSpec
from .metadata import Metadata
from .qwen35moe import build, hybrid_spec

__all__ = ["build", "read_spec"]


def read_spec(m: Metadata) -> ModelSpec:
    return hybrid_spec(m, m.dense())
