"""Backends by name; each module exports `open_device(**options) -> Device` and is imported when it is asked for."""

import logging
from importlib import import_module
from typing import Any

from ..errors import UserError
from ..rates import Rates
from .base import Device

log = logging.getLogger("headrace")
BACKENDS = {"reference": "reference", "null": "null", "cpu": "cpu", "cuda": "cuda"}
"""Name -> module of this package."""


def choose_backend(name: str, n_gpu_layers: int = -1) -> str:
    """What "auto" means here: "cuda" where a GPU's driver answers and the extra packages are installed, else "cpu".

    -ngl 0 asks for the CPU. A GPU that cannot be used is a warning that says why.
    """
    if name != "auto":
        return name
    if n_gpu_layers == 0:
        return "cpu"
    from .cuda import unusable

    why = unusable()
    if why:
        log.warning("%s: computing on the CPU (--backend cpu does so without this line)", why)
    return "cpu" if why is not None else "cuda"


def measured_rates(backend: str, device: Device) -> Rates | None:
    """The speeds of a device, measured now (under a second) and kept; None where its backend has no way to."""
    measure = getattr(import_module(f"{__name__}.{BACKENDS[backend]}"), "measured_rates", None)
    return measure(device) if measure else None


def open_device(name: str, **options: Any) -> Device:
    """The device of a backend; UserError names what is known, or what is missing."""
    name = choose_backend(name)
    if name not in BACKENDS:
        raise UserError(f"--backend {name}: known are auto, {', '.join(BACKENDS)}")
    device: Device = import_module(f"{__name__}.{BACKENDS[name]}").open_device(**options)
    return device
