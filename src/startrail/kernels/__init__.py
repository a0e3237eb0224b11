"""Block kernels: one signature, several backends. ``kernel_for`` picks the one for a device and dtype."""

from __future__ import annotations

import torch

from startrail.kernels.accumulate import Partial, Sum, Sums, accumulator
from startrail.kernels.base import Kernel, nudge_zero_rows, row_sums, stand_in_out
from startrail.kernels.cpu import CpuKernel
from startrail.kernels.max_logits import largest_logits

__all__ = [
    "Kernel",
    "Partial",
    "Sum",
    "Sums",
    "accumulator",
    "kernel_for",
    "largest_logits",
    "nudge_zero_rows",
    "row_sums",
    "stand_in_out",
]


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> Kernel:
    """The fastest backend for these tensors, which says ``why`` it is; ``ValueError`` names what has none.

    >>> kernel = kernel_for(torch.device("cpu"), torch.bfloat16, 64)
    >>> print(f"{kernel.name}: {kernel.why}")
    cpu: ATen's flash attention for CPUs, in float32
    """
    if device.type == "cpu":
        return CpuKernel(dtype, softcap)
    if device.type == "cuda":
        from startrail.kernels.cuda import cuda_kernel

        return cuda_kernel(device, dtype, head_dim, softcap)
    raise ValueError(f"no attention kernel for device {device}; startrail runs on cpu and cuda")
