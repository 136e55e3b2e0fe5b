"""headrace: Mixture-of-Experts language models whose experts do not fit on the GPU.

with headrace.open("model.gguf") as engine:
    for piece in engine.generate("def fibonacci(n):", n_predict=64):
        print(piece.text, end="")
"""

from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from .engine import Engine
    from .sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "UserError", "open"]


def open(path: Any = None, **config: Any) -> "Engine":
    """Opens a GGUF model (None: the demo model) as an Engine; keywords are the fields of `headrace.config.Config`."""
    from .engine import open_engine

    return open_engine(path, **config)


def __getattr__(name: str) -> Any:
    """Engine and SamplingParams on first use: `headrace --help` must not wait for numpy."""
    if name == "Engine":
        from .engine import Engine

        return Engine
    if name == "SamplingParams":
        from .sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
