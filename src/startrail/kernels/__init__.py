"""Attention of one block (a query shard with a key/value shard), forward and backward: one signature, several backends.

May import `geometry`. Start reading at `base`, then `reference`, the plainest backend.

- `base`: the ``Kernel`` that all backends implement, and the arithmetic around them
- `accumulate`: partial outputs that merge by log-sum-exp, and gradients that add up
- `cpu`, `cuda`, `reference`: the backends; `flash_ops` and `fa4` adapt the flash-attn packages for `cuda`
- `fused`, `triton_kernels`, `rearrange`: small kernels and copies that save launches on GPUs
- `diagonal`: causal squares cut into smaller ones
- `recurrences`, `elementwise`: linear attention and other recurrences, on `runs` of tokens; `convolution`, before them
- `max_logits`: the largest logits, for QK-clip; `device`: CUDA's current device and stream
"""

from __future__ import annotations

import torch

from startrail.kernels.accumulate import Partial, Sum, Sums, accumulator
from startrail.kernels.base import Kernel, nudge_zero_rows, pad_width, row_sums, surrogate_out
from startrail.kernels.cpu import CpuKernel
from startrail.kernels.max_logits import block_max_logits

__all__ = [
    "Kernel", "Partial", "Sum", "Sums", "accumulator", "block_max_logits", "kernel_for", "nudge_zero_rows", "pad_width",
    "row_sums", "surrogate_out",
]  # fmt: skip


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None, value_dim: int | None = None
) -> Kernel:
    """The fastest backend for these tensors, and the ``reason`` for the choice. ``value_dim``: the width of values if
    it differs from ``head_dim``. Raises ``ValueError`` without one.

    >>> kernel = kernel_for(torch.device("cpu"), torch.bfloat16, 64)
    >>> print(f"{kernel.name}: {kernel.reason}")
    cpu: ATen's flash attention for CPUs, in float32
    """
    if device.type == "cpu":
        return CpuKernel(dtype, softcap)
    if device.type == "cuda":
        from startrail.kernels.cuda import cuda_kernel

        return cuda_kernel(device, dtype, head_dim, softcap, value_dim)
    raise ValueError(f"no attention kernel for device {device}; startrail runs on cpu and cuda")
