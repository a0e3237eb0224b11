"""One small adapter per contender.

``shard`` returns this rank's part of a tensor that all ranks have; ``attend`` runs forward and backward on such parts
and returns out, dq, dk, dv of the same tokens. Adapters of peers call the peer's own code; ``DISCLOSURES`` describes
exactly what is measured.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail import SequenceParallel, ring
from startrail._compat import cpu_flash_backward, cpu_flash_forward
from startrail.bench.yardstick import Results, Workload, own_device, own_dtype, whole_attention, with_gradients
from startrail.geometry.layout import LAYOUTS, Layout, contiguous, zigzag
from startrail.geometry.mask import Mask
from startrail.geometry.tiles import tiles_of
from startrail.kernels import kernel_for
from startrail.planner.topology import Machine
from workshop.trials.cases import Contender
from workshop.trials.links import interleaved


class Tolerance(NamedTuple):
    """Tolerances of torch.allclose."""

    relative: float
    absolute: float

    def allows(self, result: Tensor, expected: Tensor) -> bool:
        return torch.allclose(result, expected, rtol=self.relative, atol=self.absolute)


TOLERANCE = Tolerance(relative=1e-3, absolute=2e-5)
HALF = Tolerance(relative=3e-2, absolute=3e-2)  # in bfloat16

DISCLOSURES = {
    "plan": "our engine",
    "compute": "every rank attends its own queries to the whole sequence with the same kernel; nothing is sent",
    "textbook ring": "Ring Attention written out plainly on the same kernel, gradients sent with their keys",
    "torch ring": "torch's _templated_ring_attention(_backward), unmodified, with ATen's CPU flash op, rotating by "
    "all-to-all",
    "torch gather": "the same with torch's default rotation, all-gather, which holds all keys and values in memory",
    "ring-flash-attn": "ring-flash-attn's communication code, unmodified, on a substitute kernel: "
    "zigzag_ring_flash_attn (causal) and ring_flash_attn (full) find a stand-in for flash_attn that calls ATen's CPU "
    "flash op. flash-attn takes half precision only: for float32, .to(float32) is made to copy in its "
    "backward pass, as it does in half precision. Its package's __init__, which imports transformers, is not run. "
    "With a full mask it returns dq in bfloat16, and is checked to that precision",
    "yunchang": "yunchang's LongContextAttention (USP: Ulysses in a node, a ring over nodes), unmodified, on the same "
    "substitute kernel, in float32 and checked in the same way",
    "yunchang across": "the same with use_ulysses_low=False: Ulysses over the nodes, a ring in each",
    "deepspeed": "DeepSpeed's DistributedAttention, unmodified, around torch's scaled_dot_product_attention (its "
    "shared-memory all-reduce, which is not used, is not built)",
}


@dataclass
class BenchData:
    """Inputs, and the results of one process with the whole sequence."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    answers: Results

    def to(self, device: torch.device) -> BenchData:
        q, k, v, dout = (x.to(device, own_dtype(device)) for x in self.inputs)
        out, dq, dk, dv = (x.to(device) for x in self.answers)
        return BenchData((q, k, v, dout), (out, dq, dk, dv))


def make_data(work: Workload, seed: int = 0) -> BenchData:
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        x = torch.randn(work.batch, heads, work.length, work.head_dim, generator=generator)
        return x.to(own_dtype(own_device())).float()

    q, k, v, dout = random(work.q_heads), random(work.kv_heads), random(work.kv_heads), random(work.q_heads)
    attention = partial(whole_attention, causal=work.causal)
    if work.call.is_sparse:
        attention = partial(F.scaled_dot_product_attention, attn_mask=_visible(work), enable_gqa=True)
    return BenchData((q, k, v, dout), with_gradients(attention, q, k, v, dout))


def _visible(work: Workload) -> Tensor:
    """True where a query (row) sees a key."""
    intervals = torch.tensor([work.call.visible.visible(query, work.length) for query in range(work.length)])
    keys = torch.arange(work.length)
    return (intervals[:, :1] <= keys) & (keys < intervals[:, 1:])


class AttentionRunner(ABC):
    """A contender on this rank, with its part of the inputs. By default it shards tokens by ``layout``: zigzag, so that
    all ranks have the same work under a causal mask."""

    def __init__(self, contender: Contender, machine: Machine, work: Workload, data: BenchData | None) -> None:
        self.contender, self.machine, self.work = contender, machine, work
        self.layout = zigzag(range(machine.world), work.length)
        self.set_up()
        if data is not None:  # else the caller has inputs of its own
            self.data = data.to(own_device())
            self.inputs = [self.shard(x) for x in self.data.inputs]

    @abstractmethod
    def set_up(self) -> None: ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        """By default, autograd's gradients of ``attention``."""
        return with_gradients(self.attention, q, k, v, dout)

    def shard(self, x: Tensor) -> Tensor:
        return local_part(x, self.layout, dist.get_rank())

    def step(self) -> None:
        self.attend(*self.inputs)

    def mistake(self) -> str | None:
        """What is wrong with the results, or None. Wrong results are never timed."""
        results = self.attend(*self.inputs)
        for name, result, whole in zip(("out", "dq", "dk", "dv"), results, self.data.answers, strict=True):
            result, expected = result.float(), self.shard(whole)
            if not self.tolerance(name).allows(result, expected):
                return f"wrong {name}: off by up to {(result - expected).abs().max().item():.1e}"
        return None

    def tolerance(self, name: str) -> Tolerance:
        """Allowed error of one of out, dq, dk, dv."""
        return TOLERANCE if own_dtype(own_device()) == torch.float32 else HALF

    def waiting(self) -> float | None:
        """Seconds that this rank waited for transfers since the last call; None if unknown."""
        return None


def local_part(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The part of ``rank`` of a tensor (batch, heads, tokens, dim)."""
    return torch.cat([x[:, :, start : start + count] for start, count in layout.runs(rank)], 2)


def masked_layout(places: int, work: Workload) -> Layout:
    """The layout of the peers: zigzag for a causal mask, else contiguous."""
    return LAYOUTS["zigzag" if work.causal else "contiguous"](range(places), work.length)


@cache
def engine(plan: str, machine: Machine, across: bool = False) -> SequenceParallel:
    """One engine per plan for all its work, because each connects its own process groups."""
    group = dist.new_group(list(interleaved(machine)), sort_ranks=False) if across else None
    return SequenceParallel(plan, group)


class PlanRunner(AttentionRunner):
    """Our engine with one plan."""

    def set_up(self) -> None:
        self.sp = engine(self.contender.plan, self.machine, self.contender.across)
        self.sequence = self.sp.sequence(self.work.length, documents=self.work.documents or None)

    def shard(self, x: Tensor) -> Tensor:
        return self.sequence.shard(x, 2)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.sequence.attention(q, k, v, causal=self.work.causal, window=self.work.window)

    def waiting(self) -> float | None:
        seconds = self.sp.timings()["waiting"]
        self.sp.reset_counters()
        return seconds


class ComputeOnly(AttentionRunner):
    """The work without communication: this rank's queries against the whole sequence; key gradients are not summed."""

    def set_up(self) -> None:
        own, whole = self.layout.runs(dist.get_rank()), ((0, self.work.length),)
        self.visible = tiles_of(self.work.call.visible, own, whole)
        device = own_device()
        self.kernel = kernel_for(device, own_dtype(device), self.work.head_dim)
        self.scale = self.work.head_dim**-0.5

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        _, k, v, _ = self.data.inputs
        result = self.kernel.forward(q, k, v, self.visible, self.scale)
        out, lse = result.out, result.lse.float()
        dq, dk, dv = self.kernel.backward(dout, q, k, v, out, lse, self.visible, self.scale)
        return out, dq.value, dk.value, dv.value

    def mistake(self) -> str | None:
        out, dq, *_ = self.attend(*self.inputs)
        for name, result, whole in (("out", out, self.data.answers[0]), ("dq", dq, self.data.answers[1])):
            if not self.tolerance(name).allows(result.float(), self.shard(whole)):
                return f"wrong {name}"
        return None

    def waiting(self) -> float | None:
        return 0.0


class TorchRing(AttentionRunner):
    """torch's own ring attention; causal with its round-robin balance, which is the zigzag layout."""

    def set_up(self) -> None:
        assert dist.group.WORLD is not None
        self.cp = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
        self.group = dist.group.WORLD
        self.method = "alltoall" if self.contender.way == "torch ring" else "allgather"
        self.layout = masked_layout(self.machine.world, self.work)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        self.cp._cp_options.enable_load_balance = self.work.causal
        self.cp.set_rotate_method(self.method)
        given: dict[str, Any] = dict(query=q, key=k, value=v, dropout_p=0.0, is_causal=self.work.causal)
        out, lse, *_ = self.cp._templated_ring_attention(self.group, 2, cpu_flash_forward, **given)
        given |= dict(out=out, logsumexp=lse, grad_out=dout, grad_out_name="grad_out")
        dq, dk, dv, *_ = self.cp._templated_ring_attention_backward(self.group, 2, cpu_flash_backward, **given)
        return out, dq, dk, dv


@cache
def deepspeed() -> tuple[Any, Any]:
    """DeepSpeed's comm module and its DistributedAttention."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or every rank warns that it found no other
    comm, layer = import_module("deepspeed.comm"), import_module("deepspeed.sequence.layer")
    # Its shared-memory all-reduce is not used here, and compiling it takes a minute.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    return comm, layer.DistributedAttention


class DeepSpeed(AttentionRunner):
    """DeepSpeed's Ulysses. It takes (batch, tokens, heads, dim) with contiguous shards."""

    def set_up(self) -> None:
        comm, distributed_attention = deepspeed()
        comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.layout = contiguous(range(self.machine.world), self.work.length)
        self.distributed = distributed_attention(self.local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return whole_attention(q, k, v, self.work.causal).transpose(1, 2)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.distributed(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0).transpose(1, 2)


class TextbookRing(AttentionRunner):
    """Sends keys and values to the next rank while the current block is computed; in the backward pass their gradients
    follow them around the ring.

    It shares only the kernel, the masks and the layout with the engine, so that our plans are not compared with a weak
    ring of our own.
    """

    def set_up(self) -> None:
        self.visible = ring.visible_by_hop(self.layout, Mask(self.work.causal))
        self.waited = 0.0

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        arrive = ring.pass_on(x)

        def timed() -> Tensor:
            start = time.perf_counter()
            incoming = arrive()
            self.waited += time.perf_counter() - start
            return incoming

        return timed

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring.RingAttention.apply(q, k, v, self.visible, self.pass_on)

    def waiting(self) -> float | None:
        seconds, self.waited = self.waited, 0.0
        return seconds
