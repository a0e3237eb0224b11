"""Peers that are written around flash-attn, which needs a GPU: their communication code on a substitute kernel.

ring-flash-attn and yunchang import ``flash_attn``. Here they find a stand-in of that name with the two functions that
they call, on ATen's CPU flash op. Everything that they send and when they send it stays their own.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from startrail.bench.peers import TOLERANCE, Attender, Results
from startrail.layout import Layout

aten = torch.ops.aten
# Both packages hand dq back in bfloat16 when the mask is full, whatever the queries' dtype.
ROUNDED = {"rtol": 2**-8, "atol": TOLERANCE["atol"]}


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """flash-attn's own signature, whose names its callers inspect; tensors are (batch, tokens, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk, dv in place, as flash-attn does."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, softmax_lse, 0.0, causal, scale=softmax_scale
    )
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient.transpose(1, 2))


def _not_here(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError("the stand-in for flash_attn has no such function")


def stand_in() -> None:
    """Put the stand-in where ``import flash_attn`` finds it."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__version__ = "2.7.0"  # type: ignore[attr-defined]  # the first with these signatures
    package.flash_attn_func = _not_here  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    for function in (_flash_attn_forward, _flash_attn_backward):
        setattr(interface, function.__name__, function)
    for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        setattr(interface, name, _not_here)
    sys.modules |= {package.__name__: package, interface.__name__: interface}


class CopyingTo(TorchFunctionMode):
    """``x.to(dtype)`` makes a copy, also of a tensor that has this dtype already.

    Both packages start their sums with ``buffer.to(torch.float32)`` and write to the buffer again. In half precision,
    which is all that flash-attn takes, that is a copy; in float32 it is the buffer itself, and the sums are lost.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        return function(*args, **options | {"copy": True} if function is Tensor.to else options)


def in_float32(module: ModuleType, backward: str) -> None:
    """Have a package's backward pass run under `CopyingTo`."""
    original = getattr(module, backward)

    def copying(*arguments: Any, **options: Any) -> Any:
        with CopyingTo():
            return original(*arguments, **options)

    setattr(module, backward, copying)


@cache
def ring_flash_attn() -> tuple[ModuleType, ModuleType]:
    """ring-flash-attn's rings for full and for causal masks. Its ``__init__`` is passed over: it imports transformers
    for an adapter that plays no part here."""
    stand_in()
    spec = find_spec("ring_flash_attn")
    assert spec is not None and spec.submodule_search_locations is not None
    package = ModuleType("ring_flash_attn")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["ring_flash_attn"] = package
    return _rings("ring_flash_attn")


@cache
def yunchang() -> ModuleType:
    stand_in()
    package = import_module("yunchang")
    _rings("yunchang.ring")
    return package


def _rings(package: str) -> tuple[ModuleType, ModuleType]:
    plain, zigzag = (import_module(f"{package}.{name}") for name in ("ring_flash_attn", "zigzag_ring_flash_attn"))
    in_float32(plain, "ring_flash_attn_backward")
    in_float32(zigzag, "zigzag_ring_flash_attn_backward")
    return plain, zigzag


class Flash(Attender):
    """Tensors are (batch, tokens, heads, dim) inside; dq comes back in bfloat16 under a full mask."""

    tokens_first: Any  # called with q, k, v and causal=

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        qkv = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        out = self.tokens_first(*qkv, causal=self.work.causal)
        gradients = torch.autograd.grad(out, qkv, dout.transpose(1, 2).contiguous())
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return out.detach().transpose(1, 2), dq, dk, dv

    def tolerance(self, name: str) -> dict[str, float]:
        return ROUNDED if name == "dq" and not self.work.causal else TOLERANCE


class RingFlash(Flash):
    """ring-flash-attn: its zigzag ring for a causal mask, its plain one for a full mask."""

    def set_up(self) -> None:
        plain, zigzag = ring_flash_attn()
        causal = self.work.causal
        self.layout = Layout("zigzag" if causal else "contiguous", self.machine.world, self.work.length)
        self.tokens_first = zigzag.zigzag_ring_flash_attn_func if causal else plain.ring_flash_attn_func


class Yunchang(Flash):
    """yunchang's USP: Ulysses inside a node, a ring over the nodes. A node's share of the sequence is cut evenly."""

    def set_up(self) -> None:
        package = yunchang()
        nodes, ranks = self.machine.nodes, self.machine.ranks_per_node
        if package.globals.PROCESS_GROUP.RING_PG is None:  # its groups are global: made once, by everybody
            package.set_seq_parallel_pg(ranks, nodes, dist.get_rank(), self.machine.world)
        causal = self.work.causal
        self.layout = Layout("zigzag" if causal else "contiguous", nodes, self.work.length)
        self.tokens_first = package.LongContextAttention(ring_impl_type="zigzag" if causal else "basic")

    def shard(self, x: Tensor) -> Tensor:
        ranks = self.machine.ranks_per_node
        runs = self.layout.runs(self.place // ranks)
        node = torch.cat([x[:, :, start : start + count] for start, count in runs], 2)
        return node.chunk(ranks, 2)[self.place % ranks]
