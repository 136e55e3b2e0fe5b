"""Backends by name; each module exports `open_device(**options) -> Device` and is imported when it is asked for."""

from importlib import import_module
from typing import Any

from ..errors import UserError
from .base import Device

BACKENDS = {"reference": "reference", "null": "null", "cpu": "cpu", "cuda": "cuda"}
"""Name -> module of this package."""
AUTO = "cpu"


def open_device(name: str, **options: Any) -> Device:
    """The device of a backend; UserError names what is known, or what is missing."""
    name = AUTO if name == "auto" else name
    if name not in BACKENDS:
        raise UserError(f"--backend {name}: known are auto, {', '.join(BACKENDS)}")
    device: Device = import_module(f"{__name__}.{BACKENDS[name]}").open_device(**options)
    return device
