"""What Triton's compiler costs: it is asked once per process to report, and a first start says that it compiles."""

import logging
from typing import Any

import triton

log = logging.getLogger("headrace")


class Compiling:
    """Sums up the seconds of all compilations and cache reads of this process; install once."""

    def __init__(self) -> None:
        self.spent_s, self.n_compiled = 0.0, 0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        self.spent_s += times.total / 1e6
        if not cache_hit:
            self.n_compiled += 1
            if self.n_compiled == 1:
                log.warning("compiling GPU kernels: once for each kind of model and card, up to a minute")


compiling = Compiling()
triton.knobs.compilation.listener = compiling
