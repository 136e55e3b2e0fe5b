"""From logits to the next token: penalties, filters, temperature and a seeded draw.

The chain and its defaults are llama.cpp's: penalties, top-k, typical, top-p, min-p, temperature; a filter sees the
distribution before the temperature. Same seed, logits and history: same token, whatever else runs in the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import UserError

Logits = NDArray[np.float32]
Kept = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids and their logits, the greatest first and equal ones by id."""

MOST_CANDIDATES = 64
"""With a greater top-k the token is chosen from all logits."""

N_PARTIAL = 1024
"""How many candidates are tried for top-p or min-p when top-k is off, before all are sorted."""


@dataclass(frozen=True)
class Candidates:
    """The greatest logits of a row, or of several, float32 [..., K], and their tokens, int32: by falling logit, equal
    ones by id, NaNs first."""

    logits: Logits
    ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: int | slice) -> "Candidates":
        return Candidates(self.logits[rows], self.ids[rows])

    def __setitem__(self, rows: slice, found: "Candidates") -> None:
        self.logits[rows], self.ids[rows] = found.logits, found.ids


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token; a value that switches a step off is in parentheses.

    temperature (<= 0: always the likeliest, no other step but the penalties matters), top_k (0), top_p (1), min_p (0),
    typical_p (1), repeat_penalty (1), presence_penalty (0), frequency_penalty (0) over the last repeat_last_n tokens
    (0: none, -1: all), seed (None: another one each time). UserError for a value outside its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "repeat_last_n", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == "seed" and value is None):
                raise UserError(f"{name} is {value!r}: a whole number is needed")
        for name in (
            "temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{name} is {value!r}: a finite number is needed")
        ranges = {
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "over 0, up to 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "0 (off) to 1"),
            "typical_p": (0 < self.typical_p <= 1, "over 0, up to 1 (off)"),
            "repeat_penalty": (0 < self.repeat_penalty <= 1000, "over 0, up to 1000; 1 is off"),
            "presence_penalty": (abs(self.presence_penalty) <= 1000, "-1000 to 1000; 0 is off"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 1000, "-1000 to 1000; 0 is off"),
            "repeat_last_n": (self.repeat_last_n >= -1, "-1 (all), 0 (off) or more"),
            "seed": (self.seed is None or self.seed >= 0, "0 or more"),
        }
        for name, (ok, wanted) in ranges.items():
            if not ok:
                raise UserError(f"{name} is {getattr(self, name)}: it must be {wanted}")

    @property
    def penalizes(self) -> bool:
        """Whether history changes the logits at all."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def n_candidates(self) -> int | None:
        """How many of the greatest logits give the token that all would: 1 or MOST_CANDIDATES, as few sizes are few
        recordings; None where all are needed."""
        if self.penalizes:
            return None
        if self.temperature <= 0 or self.top_k == 1:
            return 1
        return MOST_CANDIDATES if 1 < self.top_k <= MOST_CANDIDATES else None


class Sampler:
    """Draws tokens of one sequence: one uniform number of a Philox generator per token, none when greedy."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._rng = np.random.Generator(np.random.Philox(params.seed))

    def sample(self, logits: Logits | Candidates, history: Sequence[int]) -> int:
        """The next token from float32 [n_vocab] logits, or from as many Candidates as the parameters ask for (or all
        there are); `history` is prompt and output so far. The logits stay as they are. UserError if one is NaN: the
        model or its computation is broken."""
        params, values = self.params, logits.logits if isinstance(logits, Candidates) else logits
        if np.isnan(values.max()):  # a NaN anywhere makes the maximum NaN
            n_bad = np.count_nonzero(np.isnan(values))
            raise UserError(f"{n_bad} of {len(values)} logits are NaN: the model file or its computation is broken")
        if isinstance(logits, Candidates):
            assert params.n_candidates, "these parameters need all logits"
        elif params.penalizes:
            logits = penalized(logits, history, params)
        if params.temperature <= 0:
            return int(logits.ids[0] if isinstance(logits, Candidates) else logits.argmax())
        ids, kept = candidates(logits, params)
        weights = probabilities(kept, params.temperature)
        cumulative = np.cumsum(weights)
        drawn = np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")
        return int(ids[min(drawn, len(ids) - 1)])


def probabilities(logits: NDArray[np.float64], temperature: float = 1.0) -> NDArray[np.float64]:
    """Softmax over float64 [n] logits; an infinite maximum is shared by all that have it."""
    top = logits.max()
    if np.isinf(top):
        return np.asarray(logits == top, np.float64) / np.count_nonzero(logits == top)
    with np.errstate(over="ignore"):  # a tiny temperature
        raised = np.exp((logits - top) / temperature)
    return np.asarray(raised / raised.sum(), np.float64)


def penalized(logits: Logits, history: Sequence[int], params: SamplingParams) -> Logits:
    """A copy in which tokens of the recent history are less likely.

    A seen token's logit is divided by repeat_penalty (multiplied if it is negative), then loses frequency_penalty per
    occurrence and presence_penalty once.
    """
    recent = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
    seen, counts = np.unique(np.asarray(recent, np.int64), return_counts=True)
    values = logits[seen].astype(np.float64)
    values = np.where(values <= 0, values * params.repeat_penalty, values / params.repeat_penalty)
    values -= counts * params.frequency_penalty + params.presence_penalty
    changed = logits.copy()
    changed[seen] = values
    return changed


def candidates(logits: Logits | Candidates, params: SamplingParams) -> Kept:
    """What top-k, typical, top-p and min-p leave of float32 [n_vocab] logits or of Candidates, at least one token."""
    n_vocab = len(logits)
    if params.top_k or isinstance(logits, Candidates):
        return _filtered(_greatest(logits, min(params.top_k, n_vocab)), params, 1.0)
    if params.typical_p == params.top_p == 1.0 and params.min_p == 0.0:
        return np.arange(n_vocab), logits.astype(np.float64)
    if params.typical_p < 1.0:
        return _filtered(_greatest(logits, n_vocab), params, 1.0)
    # without top-k: how much all weigh, then only as many sorted ones as top-p or min-p needs
    top = float(logits.max())
    if n_vocab > N_PARTIAL and math.isfinite(top):
        total = float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))
        ids, kept = _greatest(logits, N_PARTIAL)
        mass = float(np.exp(kept - top).sum()) / total
        enough_by_p = params.top_p < 1.0 and mass >= params.top_p
        if enough_by_p or (params.min_p > 0.0 and kept[-1] - top < math.log(params.min_p)):
            return _filtered((ids, kept), params, mass)
    return _filtered(_greatest(logits, n_vocab), params, 1.0)


def _greatest(logits: Logits | Candidates, n: int) -> Kept:
    """The `n` greatest, sorted; among equal logits the lower ids first.

    The n-th greatest of 4 n groups' maxima bounds the n-th greatest logit from below, so that a pass of comparisons
    leaves few to sort: 0.3 ms instead of 1.5 ms for a partition of 248,320. Of Candidates they are the first.
    """
    if isinstance(logits, Candidates):
        return logits.ids[:n].astype(np.int64), logits.logits[:n].astype(np.float64)
    n_groups = 4 * n
    ids = np.arange(len(logits))
    if n_groups <= len(logits) // 4:
        maxima = logits[: len(logits) // n_groups * n_groups].reshape(-1, n_groups).max(axis=0)
        ids = np.flatnonzero(logits >= np.partition(maxima, n_groups - n)[n_groups - n])
    # one 64-bit key each, the order of the floats inverted above the id: numpy sorts these ten times faster than pairs
    bits = (logits[ids] + np.float32(0)).view(np.uint32)  # + 0 turns -0 into 0
    ascending = np.where(bits >> 31, bits, ~bits & 0x7FFFFFFF)
    ids = (np.sort(ascending.astype(np.uint64) << 32 | ids.astype(np.uint64))[:n] & 0xFFFFFFFF).astype(np.int64)
    return ids, logits[ids].astype(np.float64)


def _filtered(found: Kept, params: SamplingParams, mass: float) -> Kept:
    """Typical, top-p and min-p over sorted candidates that hold `mass` of the whole distribution."""
    ids, logits = found
    if params.typical_p < 1.0 and len(ids) > 1:
        p = probabilities(logits)
        with np.errstate(divide="ignore"):
            surprise = -np.log(p)
        entropy = float((p * np.where(p > 0, surprise, 0.0)).sum())
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        kept = np.sort(order[: _n_reaching(p[order], params.typical_p)])
        ids, logits = ids[kept], logits[kept]
    if params.top_p < 1.0:
        n = _n_reaching(probabilities(logits) * mass, params.top_p)
        ids, logits = ids[:n], logits[:n]
    if params.min_p > 0.0:
        n = max(1, int(np.count_nonzero(logits >= logits[0] + math.log(params.min_p))))
        ids, logits = ids[:n], logits[:n]
    return ids, logits


def _n_reaching(p: NDArray[np.float64], wanted: float) -> int:
    """How many from the start weigh `wanted` together; all if rounding keeps them below."""
    return min(int(np.searchsorted(np.cumsum(p), wanted, side="left")) + 1, len(p))
