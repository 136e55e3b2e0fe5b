"""One engine, many callers: what would mix two texts is refused in one line."""

import os
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace import SamplingParams
from headrace.errors import UserError
from models.tiny import Tiny, write

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("engine") / "m.gguf", Tiny("qwen3moe", "Q8_0", n_layer=1))


def test_a_generation_that_another_text_ended_says_so(path: Path) -> None:
    with headrace.open(path, n_ctx=128) as engine:
        whole = [p.token for p in engine.generate([1, 2, 3], 8, GREEDY)]
        for other in (lambda: engine.logits([5]), engine.reset, lambda: next(engine.generate([7, 8], 8, GREEDY))):
            first = engine.generate([1, 2, 3], 8, GREEDY)
            assert next(first).token == whole[0]
            other()
            with pytest.raises(UserError, match="another text"):
                next(first)
        assert [p.token for p in engine.generate([1, 2, 3], 8, GREEDY)] == whole


def test_a_progress_callback_cannot_use_the_engine(path: Path) -> None:
    with headrace.open(path, n_ctx=128) as engine:
        before = engine.logits([1, 2, 3])
        with pytest.raises(UserError, match="progress callback"):
            next(engine.generate([5, 6], 2, progress=lambda *_: engine.logits([4])))
        np.testing.assert_array_equal(engine.logits([1, 2, 3]), before)


def test_a_closed_engine_says_so(path: Path) -> None:
    with headrace.open(path, n_ctx=128) as engine:
        pieces = engine.generate([1, 2, 3])
        next(pieces)
    for use in (lambda: next(pieces), lambda: engine.logits([1]), engine.reset):
        with pytest.raises(UserError, match="closed"):
            use()
    engine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_open_its_own(path: Path) -> None:
    """Its threads did not come along: it would wait for them for ever."""
    with headrace.open(path, n_ctx=128, n_threads=1) as engine:
        pid = os.fork()
        if not pid:
            try:
                engine.logits([1])
            except UserError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize("ids", ["abc", [None], [1.7], [1, "2"]])
def test_token_ids_that_are_no_numbers_are_refused_in_one_line(path: Path, ids: object) -> None:
    with headrace.open(path, n_ctx=128) as engine, pytest.raises(UserError, match="must be whole numbers"):
        engine.logits(ids)  # type: ignore[arg-type]


def test_a_text_longer_than_the_context_is_refused_before_it_is_computed(path: Path) -> None:
    with headrace.open(path, n_ctx=128) as engine:
        with pytest.raises(UserError, match="has 129 tokens, the context 128"):
            engine.logits([1] * 129)
        assert engine.sequence.n_past == 0


def test_messages_go_through_the_chat_template() -> None:
    talk = [{"role": "user", "content": "Who are you?"}]
    with headrace.open(n_ctx=256) as engine:
        text = engine.chat.render(talk)
        want = [p.token for p in engine.generate(text, 8, GREEDY, parse_special=True)]
        assert [p.token for p in engine.generate(talk, 8, GREEDY)] == want
        with pytest.raises(UserError, match="n_predict is -5"):
            engine.generate(talk, -5)
