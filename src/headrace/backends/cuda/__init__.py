"""CUDA: experts streamed from host memory, products by Triton kernels. Needs the `cuda` extra (torch, triton)."""

from typing import Any

from ...errors import UserError


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
