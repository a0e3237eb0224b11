"""Peers built on flash-attn: the code of ring-flash-attn and yunchang on a substitute kernel from `fake_flash_attn`."""

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

from startrail.bench.yardstick import Results
from workshop.peers import fake_flash_attn
from workshop.peers.contenders import TOLERANCE, AttentionRunner, Tolerance, local_part, masked_layout

# With a full mask both packages return dq in bfloat16, whatever the dtype of the queries.
ROUNDED = Tolerance(2**-8, TOLERANCE.absolute)


@cache
def ring_flash_attn() -> tuple[ModuleType, ModuleType]:
    """ring-flash-attn's rings for full and causal masks. Its ``__init__`` is not run: it imports transformers for an
    adapter that is not used here."""
    fake_flash_attn.install()
    spec = find_spec("ring_flash_attn")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("ring-flash-attn is not installed (pip install 'startrail[bench]')")
    package = ModuleType("ring_flash_attn")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["ring_flash_attn"] = package
    return _rings("ring_flash_attn")


@cache
def varlen_flash_attn(name: str) -> ModuleType:
    """A module of ring-flash-attn for packed documents."""
    ring_flash_attn()
    module = import_module(f"ring_flash_attn.{name}_varlen")
    if hasattr(module, backward := f"{name}_varlen_backward"):
        fake_flash_attn.in_float32(module, backward)
    return module


@cache
def yunchang() -> ModuleType:
    fake_flash_attn.install()
    package = import_module("yunchang")
    _rings("yunchang.ring")
    return package


def _rings(package: str) -> tuple[ModuleType, ModuleType]:
    plain, zigzag = (import_module(f"{package}.{name}") for name in ("ring_flash_attn", "zigzag_ring_flash_attn"))
    fake_flash_attn.in_float32(plain, "ring_flash_attn_backward")
    fake_flash_attn.in_float32(zigzag, "zigzag_ring_flash_attn_backward")
    return plain, zigzag


class FlashPeer(AttentionRunner):
    """Tensors are (batch, tokens, heads, dim) inside; dq comes back in bfloat16 under a full mask."""

    tokens_first: Any  # called with q, k, v and causal=

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        qkv = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        out = self.tokens_first(*qkv, causal=self.work.causal)
        gradients = torch.autograd.grad(out, qkv, dout.transpose(1, 2).contiguous())
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return out.detach().transpose(1, 2), dq, dk, dv

    def tolerance(self, name: str) -> Tolerance:
        return ROUNDED if name == "dq" and not self.work.causal else TOLERANCE


class RingFlash(FlashPeer):
    """ring-flash-attn: its zigzag ring for a causal mask, its plain one for a full mask."""

    def set_up(self) -> None:
        plain, zigzag = ring_flash_attn()
        self.layout = masked_layout(self.machine.world, self.work)
        self.tokens_first = zigzag.zigzag_ring_flash_attn_func if self.work.causal else plain.ring_flash_attn_func


class Yunchang(FlashPeer):
    """yunchang's USP: ranks that share heads (Ulysses) hold neighbouring parts of one place's share of the ring.

    By default, Ulysses is inside a node and the ring goes over the nodes. ``yunchang across`` is its other order,
    ``use_ulysses_low=False``: Ulysses goes over the nodes, and every node has a ring.
    """

    def set_up(self) -> None:
        across = self.contender.way == "yunchang across"
        nodes, ranks = self.machine.nodes, self.machine.ranks_per_node
        node, inside = divmod(dist.get_rank(), ranks)
        self.sharers = nodes if across else ranks
        self.sharer, self.ring_place = (node, inside) if across else (inside, node)
        package = join_yunchang(self.sharers, self.machine.world, not across)
        self.layout = masked_layout(self.machine.world // self.sharers, self.work)
        self.tokens_first = package.LongContextAttention(ring_impl_type="zigzag" if self.work.causal else "basic")

    def shard(self, x: Tensor) -> Tensor:
        return local_part(x, self.layout, self.ring_place).chunk(self.sharers, 2)[self.sharer]


def join_yunchang(ulysses: int, world: int, low: bool) -> Any:
    """The package, with its process groups, which are global to it, set to these. ``low``: Ulysses is inside nodes."""
    package = yunchang()
    current = package.globals.PROCESS_GROUP
    if (ulysses, low) not in _groups:  # connected once, by all ranks
        package.set_seq_parallel_pg(ulysses, world // ulysses, dist.get_rank(), world, low)
        _groups[ulysses, low] = current.ULYSSES_PG, current.RING_PG
    current.ULYSSES_PG, current.RING_PG = _groups[ulysses, low]  # its layers read them when they are constructed
    return package


_groups: dict[tuple[int, bool], tuple[Any, Any]] = {}
