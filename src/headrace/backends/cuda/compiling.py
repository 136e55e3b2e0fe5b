"""Triton's compiler: its costs, and compiling ahead, by all cores, what a model is going to launch.

A launch inside of `compile_ahead` becomes a compilation, which Triton hands to our pool (`triton.AsyncCompileMode`);
kernels that were not foreseen are compiled by their first launch. Threads are enough: nine tenths of a compilation are
native code, outside of the interpreter's lock (80 kernels on 2 cores: 20.6 s one after another, 11.2 s by 2 threads).
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import triton
from triton.runtime.jit import KernelInterface

from .readers import n_cores

log = logging.getLogger("headrace")
Progress = Callable[[int, int], None]


class Compiling:
    """Sums up the seconds of all compilations and cache reads of this process, by any thread; install once."""

    def __init__(self) -> None:
        self.spent_s, self.n_compiled, self.lock = 0.0, 0, threading.Lock()

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        with self.lock:
            self.spent_s += times.total / 1e6
            self.n_compiled += not cache_hit
            if not cache_hit and self.n_compiled == 1:
                log.warning("compiling GPU kernels: once for each kind of model and card, up to a minute")


compiling = Compiling()
triton.knobs.compilation.listener = compiling


class Job(Future[Any]):
    """A compilation: by the pool, or by who asks for its result before the pool has come to it."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self.compile_kernel = compile_kernel

    def work(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self.compile_kernel())
            except BaseException as e:
                self.set_exception(e)

    def result(self, timeout: float | None = None) -> Any:
        return self.compile_kernel() if self.cancel() else super().result(timeout)


class Jobs(Executor):
    """A thread per core, up to ten: a tenth of the work is under a lock. A Job that `pool` gave up can be asked for."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(min(10, n_cores()), "headrace-compile")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Job:
        job = Job(partial(fn, *args, **kwargs))
        self.pool.submit(job.work)
        return job


@contextmanager
def compile_ahead(launch_all: Callable[[], None], progress: Progress | None = None) -> Iterator[None]:
    """Compiles every kernel that `launch_all` launches, beside what is done inside; waits for the last at the end.

    `progress` is called with (kernels done, in all) while that is waited for, unless all came from Triton's cache.
    """
    jobs, n_before = Jobs(), compiling.n_compiled
    mode = triton.AsyncCompileMode(jobs)
    try:
        copy_context().run(_collect, mode, launch_all)
        yield
        kernels = list(mode.future_kernels.values())
        for i, kernel in enumerate(kernels):
            kernel.result(ignore_errors=True)  # its launch tells
            if progress and compiling.n_compiled > n_before:
                progress(i + 1, len(kernels))
    finally:
        jobs.pool.shutdown(wait=False, cancel_futures=True)


def _collect(mode: Any, launch_all: Callable[[], None]) -> None:
    """Runs in a context of its own, because leaving the mode would wait for all compilations."""
    mode.__enter__()
    launch, here = KernelInterface.__getitem__, threading.get_ident()

    def compile_only(kernel: Any, grid: Any) -> Any:
        return partial(kernel.warmup, grid=grid) if threading.get_ident() == here else launch(kernel, grid)

    KernelInterface.__getitem__ = compile_only
    try:
        launch_all()
    finally:
        KernelInterface.__getitem__ = launch
