"""llama.cpp on the CPU (PyPI `xllamacpp`) as an oracle: greedy continuations with every token's log-probability."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from numpy.typing import NDArray


def greedy(
    path: Path, prompt: Sequence[int], n_predict: int, n_vocab: int
) -> tuple[list[int], NDArray[np.float64]]:  # fmt: skip
    """The continuation's tokens and float64 [n_predict, n_vocab] log-probabilities in front of each of them.

    Attention in float32 with a float32 cache: what remains is the rounding of activations to 8 or 16 bits in products
    with weights of such types.
    """
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), 512, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # more would spin
    params.warmup = params.fit_params = params.ui = False
    params.verbosity = 0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    answer: Any = xllamacpp.Server(params).handle_completions(
        {"prompt": list(prompt), "temperature": 0, "n_predict": n_predict, "n_probs": n_vocab}
    )
    steps = answer["choices"][0]["logprobs"]["content"]
    logprobs = np.full((len(steps), n_vocab), -np.inf)
    for row, step in zip(logprobs, steps):
        for token in step["top_logprobs"]:
            row[token["id"]] = token["logprob"]
    return [step["id"] for step in steps], logprobs
