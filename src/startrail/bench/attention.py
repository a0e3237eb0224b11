"""Attention on one process, to compare with: torch's own, whole or of visible blocks only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail.bench.workload import Workload
from startrail.planner.live import measure as live

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def own_device() -> torch.device:
    """This rank's device. A process that is not a rank gets the CPU: it will fork ranks and must not use a GPU."""
    return live.own_device() if dist.is_initialized() else torch.device("cpu")


def own_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs, as in training and as flash attention requires; float32 on CPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def random_inputs(work: Workload, tokens: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, for so many of the tokens of ``work``, on this rank's device."""
    device = own_device()
    heads = (work.q_heads, work.kv_heads, work.kv_heads, work.q_heads)
    sizes = ((work.batch, number, tokens, work.head_dim) for number in heads)
    return tuple(torch.randn(size, device=device, dtype=own_dtype(device)) for size in sizes)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention on one process with the whole sequence."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def visible_attention(ends: Sequence[int], window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on one process, document by document, so that only visible blocks are computed. Tensors are
    split at once: the gradient of a slice would be as large as the whole."""
    lengths = [stop - start for start, stop in pairwise(ends)]
    documents = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([_in_document(window, *qkv) for qkv in documents], 2)


def _in_document(window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if window is None or window >= q.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows, keys = torch.arange(window).unsqueeze(1), torch.arange(2 * window)
    visible = (keys > rows) & (keys <= rows + window)  # in its own block of keys and the one before
    queries, keys_of, values = (x.split(window, 2) for x in (q, k, v))
    outs = [F.scaled_dot_product_attention(queries[0], keys_of[0], values[0], is_causal=True)]
    for at, own in enumerate(queries[1:], start=1):
        both = [torch.cat(x[at - 1 : at + 1], 2) for x in (keys_of, values)]
        outs.append(F.scaled_dot_product_attention(own, both[0], both[1], visible[: own.shape[2], : both[0].shape[2]]))
    return torch.cat(outs, 2)


def with_gradients(attention: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """The result of ``attention``, and autograd's gradients of q, k and v for ``dout``."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return out.detach(), dq, dk, dv
