"""Device memory that ends in the middle of a prompt, on Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import UserError
from models.tiny import Tiny, write

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.parametrize("op", ["linear", "attention", "expert_down"])
def test_memory_that_ends_in_a_prompt_is_one_line(tmp_path: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is as before: the same logits for the same tokens."""
    path = write(tmp_path / "m.gguf", Tiny("qwen3moe", "Q8_0", n_layer=1))
    with headrace.open(path, backend="cuda", n_ctx=64, n_ubatch=16) as engine:
        right = engine.logits([1, 2, 3], [-1])

        def full(*args: Any, **options: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

        monkeypatch.setattr(engine.device.ops, op, full)
        with pytest.raises(UserError, match=r"no memory for the workspace of this batch; lower -c or -ub"):
            engine.logits([4, 5, 6, 7], [-1])
        monkeypatch.undo()
        assert engine.sequence.n_past == 0 and (engine.logits([1, 2, 3], [-1]) == right).all()
