"""How each contender is called: one small adapter a way of doing the work, all with the same two methods.

``shard`` gives this rank's part of a tensor that is the same everywhere; ``step`` runs forward and backward on such
parts and returns out, dq, dk, dv of the same tokens. Adapters of peers call the peer's own code and say in
``DISCLOSURES`` what was changed around it, if anything was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lab.bench.cases import Contender, Work
from lab.bench.closed import Machine, shapes_for
from startrail import SequenceParallel
from startrail.kernels import kernel_for
from startrail.layout import Layout
from startrail.mask import Mask, tiles_of
from startrail.plan import Plan

Results = tuple[Tensor, Tensor, Tensor, Tensor]
aten = torch.ops.aten

DISCLOSURES = {
    "plan": "this package",
    "compute": "every rank attends its own queries to the whole sequence with the same kernel; nothing is sent",
    "torch ring": "torch's _templated_ring_attention(_backward), unmodified, called with ATen's CPU flash op",
    "torch gather": "torch's _templated_ring_attention(_backward), unmodified, called with ATen's CPU flash op",
    "deepspeed": "DeepSpeed's DistributedAttention, unmodified, around torch's scaled_dot_product_attention",
}


class Runner(Protocol):
    def shard(self, x: Tensor) -> Tensor: ...

    def step(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results: ...

    def waiting(self) -> float | None:
        """Seconds that this rank has waited for transfers since it was last asked; None where that is not known."""


class PlanRunner:
    """Our own engine with one plan; with ``across``, places are dealt out to nodes in turn."""

    def __init__(self, contender: Contender, machine: Machine, work: Work) -> None:
        group = None
        if contender.across:
            group = dist.new_group(list(machine.interleaved()), sort_ranks=False)
        self.sp = SequenceParallel(contender.plan, group)
        self.causal = work.causal

    def shard(self, x: Tensor) -> Tensor:
        return self.sp.shard(x, 2)

    def step(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        qkv = [x.detach().requires_grad_() for x in (q, k, v)]
        out = self.sp.attention(*qkv, causal=self.causal)
        return (out.detach(), *torch.autograd.grad(out, qkv, dout))

    def waiting(self) -> float | None:
        seconds = self.sp.timings()["waiting"]
        self.sp.reset_counters()
        return seconds


class ComputeRunner:
    """The work without the network: this rank's queries against the whole sequence, gradients of the keys not summed."""

    def __init__(self, contender: Contender, machine: Machine, work: Work) -> None:
        self.rank, self.layout = dist.get_rank(), Layout("zigzag", machine.world, work.length)
        whole = self.layout.runs(0, machine.world)
        self.visible = tiles_of(Mask(work.causal), self.layout.runs(self.rank), whole)
        self.kernel = kernel_for(torch.device("cpu"), torch.float32, work.head_dim)
        self.scale = work.head_dim**-0.5
        self.repeats = machine.world
        generator = torch.Generator().manual_seed(0)
        shape = (work.batch, work.kv_heads, self.layout.local * machine.world, work.head_dim)
        self.k, self.v = (torch.randn(shape, generator=generator) for _ in range(2))

    def shard(self, x: Tensor) -> Tensor:
        parts = [x[:, :, start : start + count] for start, count in self.layout.runs(self.rank)]
        return torch.cat(parts, 2)

    def step(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        partial = self.kernel.forward(q, self.k, self.v, self.visible, self.scale)
        lse = partial.lse.to(q.dtype)
        sums = self.kernel.backward(dout, q, self.k, self.v, partial.out, lse, self.visible, self.scale)
        return (partial.out, *(total.value for total in sums))

    def waiting(self) -> float | None:
        return 0.0


class TorchRing:
    """torch's own ring attention; causal with its round-robin balance, which is the zigzag layout."""

    def __init__(self, contender: Contender, machine: Machine, work: Work) -> None:
        if work.length % (2 * machine.world):
            raise ValueError(f"torch's ring needs a length that 2 x {machine.world} ranks divide, not {work.length}")
        from torch.distributed.tensor.experimental._context_parallel import _attention

        self.cp, self.causal = _attention, work.causal
        self.method = "alltoall" if contender.way == "torch ring" else "allgather"
        self.layout = Layout("zigzag" if work.causal else "contiguous", machine.world, work.length)
        assert dist.group.WORLD is not None
        self.group, self.rank = dist.group.WORLD, dist.get_rank()

    def shard(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :, start : start + count] for start, count in self.layout.runs(self.rank)], 2)

    def step(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        self.cp._cp_options.enable_load_balance = self.causal
        self.cp.set_rotate_method(self.method)
        ends = {"dropout_p": 0.0, "is_causal": self.causal}
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse, *_ = self.cp._templated_ring_attention(self.group, 2, forward, query=q, key=k, value=v, **ends)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        saved = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse}
        grads = self.cp._templated_ring_attention_backward(
            self.group, 2, backward, grad_out=dout, grad_out_name="grad_out", **saved, **ends
        )
        return (out, *grads[:3])

    def waiting(self) -> float | None:
        return None


MAKERS: dict[str, Callable[[Contender, Machine, Work], Runner]] = {
    "plan": PlanRunner,
    "compute": ComputeRunner,
    "torch ring": TorchRing,
    "torch gather": TorchRing,
}


def make_runner(contender: Contender, machine: Machine, work: Work) -> Runner:
    return MAKERS[contender.way](contender, machine, work)


def why_not(contender: Contender, machine: Machine, work: Work) -> str | None:
    """Why a contender cannot do this work here, or None if it can. Asked before any rank starts."""
    try:
        if contender.way == "plan":
            shapes_for(Plan.parse(contender.plan), machine, work)
    except ValueError as error:
        return str(error).partition("; plans that fit")[0]
    return None
