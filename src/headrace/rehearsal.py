"""A model's passes in small, for a device that compiles what they launch: every kind of step, at every size."""

from collections.abc import Mapping
from dataclasses import replace

from .gguf import TensorInfo
from .placement import Placement
from .program import Program, Step, short_name
from .runner import Runner
from .sampling import MOST_CANDIDATES


def distinct(program: Program, tensors: Mapping[str, TensorInfo], placements: Mapping[str, Placement]) -> Program:
    """One step of each kind: the last with its function, parameters, and weights of its types, shapes and feeds."""

    def kind(step: Step) -> object:
        names = (*step.weights, *(step.experts.tensors if step.experts else ()))
        weights = [(short_name(n), tensors[n].type.name, tensors[n].shape, placements[n].feed) for n in names]
        return step.fn, step.params, tuple(weights)

    return replace(program, steps=tuple({kind(step): step for step in program.steps}.values()))


def rehearse(runner: Runner) -> None:
    """Prompts of a whole micro-batch, a half, a quarter, ... - tiles change by powers of two - and decode steps.

    A short prompt may fetch its experts, and the short rest of a long one has them uploaded: both are run.
    """
    cache, n = runner.cache, min(runner.plan.n_ubatch, runner.cache.n_ctx - 1)
    seq = cache.sequence()
    sizes = [n >> i for i in range(n.bit_length())]
    longer = [n + size for size in sizes[1:] if n + size < cache.n_ctx] if runner.stream.gathers else []
    for length in sizes + longer:
        cache.trim(seq, 0)
        runner.prefill(seq, [0] * length)
    for n_candidates in (None, 1, MOST_CANDIDATES):
        runner.decode([seq], [0], n_candidates)
