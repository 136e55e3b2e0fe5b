"""CUDA: experts streamed from host memory, products by Triton kernels. Needs the `cuda` extra (torch, triton)."""

from typing import Any

from ...errors import UserError


def unusable() -> str | None:
    """Why there is no GPU to compute on: "" if there is no driver, a sentence if it could be put right; else None."""
    from importlib.util import find_spec

    from .nvml import driver_version

    if not driver_version():
        return ""
    if not find_spec("torch") or not find_spec("triton"):
        return "there is an NVIDIA GPU, but not the extra packages for it (pip install 'headrace[cuda]')"
    import torch

    if not torch.cuda.is_available():
        return "there is an NVIDIA driver, but PyTorch sees no GPU (headrace doctor says why)"
    major, minor = torch.cuda.get_device_capability(0)
    if (major, minor) < (7, 5):
        return f"{torch.cuda.get_device_name(0)} has compute capability {major}.{minor}, 7.5 is the least"
    return None


def measured_rates(device: Any) -> Any:
    """Rates of a device, see probe.py."""
    from . import probe

    return probe.measured_rates(device)


def open_device(index: int = 0, measure_cpu: bool = False, n_threads: int = 0, **_: Any) -> Any:
    """The first GPU, or Triton's interpreter under TRITON_INTERPRET=1; UserError names what is missing.

    `measure_cpu` fills in how fast link and CPU are with experts (half a second, at the first time on a machine).
    """
    try:
        import torch
        import triton
    except ImportError as e:
        raise UserError(f"--backend cuda needs the extra packages: pip install 'headrace[cuda]' ({e})") from None
    interpret = triton.knobs.runtime.interpret
    if not interpret and not torch.cuda.is_available():
        raise UserError(
            "--backend cuda: PyTorch sees no CUDA device; check the driver with nvidia-smi, or use --backend cpu"
        )
    from .device import CudaDevice

    device = CudaDevice(index, interpret)
    if measure_cpu:
        from .hostexperts import measured

        device.info = measured(device, n_threads)
    return device
