"""How each contender is called: one small adapter a way of doing the work.

``shard`` gives this rank's part of a tensor that is the same everywhere; ``attend`` runs forward and backward on such
parts and returns out, dq, dk, dv of the same tokens. Adapters of peers call the peer's own code; ``DISCLOSURES`` says
what a figure is of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lab.bench.cases import Contender, Work
from lab.bench.closed import Machine
from startrail import SequenceParallel
from startrail.kernels import kernel_for
from startrail.layout import Layout
from startrail.mask import Mask, tiles_of

Results = tuple[Tensor, Tensor, Tensor, Tensor]
TOLERANCE = {"rtol": 1e-3, "atol": 2e-5}
aten = torch.ops.aten

DISCLOSURES = {
    "plan": "our engine",
    "compute": "every rank attends its own queries to the whole sequence with the same kernel; nothing is sent",
    "textbook ring": "Ring Attention written out plainly on the same kernel, gradients travelling with their keys",
    "torch ring": "torch's _templated_ring_attention(_backward), unmodified, with ATen's CPU flash op, rotating by "
    "all-to-all",
    "torch gather": "the same with torch's default rotation, all-gather, which holds all keys and values at once",
    "deepspeed": "DeepSpeed's DistributedAttention, unmodified, around torch's scaled_dot_product_attention",
}


@dataclass
class Data:
    """Inputs, and the answers of one process that has all of the sequence."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    answers: Results


def make_data(work: Work, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        return torch.randn(work.batch, heads, work.length, work.head_dim, generator=generator)

    q, k, v, dout = random(work.q_heads), random(work.kv_heads), random(work.kv_heads), random(work.q_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=work.causal, enable_gqa=work.q_heads != work.kv_heads)
    return Data((q, k, v, dout), (out.detach(), *torch.autograd.grad(out, leaves, dout)))


class Attender(ABC):
    """A contender on this rank, with its part of the inputs. Holds tokens as ``layout`` and ``place`` say."""

    def __init__(self, contender: Contender, machine: Machine, work: Work, data: Data | None) -> None:
        self.contender, self.machine, self.work = contender, machine, work
        self.layout, self.place = Layout("zigzag", machine.world, work.length), dist.get_rank()
        self.set_up()
        if data is not None:  # else the caller has inputs of its own
            self.data = data
            self.inputs = [self.shard(x) for x in data.inputs]

    @abstractmethod
    def set_up(self) -> None: ...

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results: ...

    def shard(self, x: Tensor) -> Tensor:
        runs = self.layout.runs(self.place)
        return torch.cat([x[:, :, start : start + count] for start, count in runs], 2)

    def step(self) -> None:
        self.attend(*self.inputs)

    def mistake(self) -> str | None:
        """What is wrong with the results, if anything is: nothing wrong is ever timed."""
        results = self.attend(*self.inputs)
        for name, ours, whole in zip(("out", "dq", "dk", "dv"), results, self.data.answers, strict=True):
            right = self.shard(whole)
            if not torch.allclose(ours, right, **TOLERANCE):
                return f"wrong {name}: off by up to {(ours - right).abs().max().item():.1e}"
        return None

    def waiting(self) -> float | None:
        """Seconds that this rank has waited for transfers since it was last asked; None where that is not known."""
        return None


class Planned(Attender):
    """Our engine with one plan; with ``across``, places are dealt out to nodes in turn."""

    def set_up(self) -> None:
        group = None
        if self.contender.across:
            group = dist.new_group(list(self.machine.interleaved()), sort_ranks=False)
        self.sp = SequenceParallel(self.contender.plan, group)
        self.place = self.sp.rank

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        qkv = [x.detach().requires_grad_() for x in (q, k, v)]
        out = self.sp.attention(*qkv, causal=self.work.causal)
        return (out.detach(), *torch.autograd.grad(out, qkv, dout))

    def waiting(self) -> float | None:
        seconds = self.sp.timings()["waiting"]
        self.sp.reset_counters()
        return seconds


class Alone(Attender):
    """The work without the network: this rank's queries against the whole sequence, gradients of the keys not summed."""

    def set_up(self) -> None:
        whole = self.layout.runs(0, self.machine.world)
        self.visible = tiles_of(Mask(self.work.causal), self.layout.runs(self.place), whole)
        self.kernel = kernel_for(torch.device("cpu"), torch.float32, self.work.head_dim)
        self.scale = self.work.head_dim**-0.5

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        _, k, v, _ = self.data.inputs
        partial = self.kernel.forward(q, k, v, self.visible, self.scale)
        lse = partial.lse.to(q.dtype)
        sums = self.kernel.backward(dout, q, k, v, partial.out, lse, self.visible, self.scale)
        return (partial.out, *(total.value for total in sums))

    def mistake(self) -> str | None:
        out, dq, *_ = self.attend(*self.inputs)
        for name, ours, whole in (("out", out, self.data.answers[0]), ("dq", dq, self.data.answers[1])):
            if not torch.allclose(ours, self.shard(whole), **TOLERANCE):
                return f"wrong {name}"
        return None

    def waiting(self) -> float | None:
        return 0.0


class TorchRing(Attender):
    """torch's own ring attention; causal with its round-robin balance, which is the zigzag layout."""

    def set_up(self) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        world, length = self.machine.world, self.work.length
        if length % (2 * world):
            raise ValueError(f"torch's ring needs a length that 2 x {world} ranks divide, not {length}")
        assert dist.group.WORLD is not None
        self.cp, self.group = _attention, dist.group.WORLD
        self.method = "alltoall" if self.contender.way == "torch ring" else "allgather"
        self.layout = Layout("zigzag" if self.work.causal else "contiguous", world, length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        self.cp._cp_options.enable_load_balance = self.work.causal
        self.cp.set_rotate_method(self.method)
        options = {"dropout_p": 0.0, "is_causal": self.work.causal}
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse, *_ = self.cp._templated_ring_attention(self.group, 2, forward, query=q, key=k, value=v, **options)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        saved = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse}
        dq, dk, dv, *_ = self.cp._templated_ring_attention_backward(
            self.group, 2, backward, grad_out=dout, grad_out_name="grad_out", **saved, **options
        )
        return out, dq, dk, dv


class DeepSpeed(Attender):
    """DeepSpeed's Ulysses. It takes (batch, tokens, heads, dim) with contiguous shards."""

    def set_up(self) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        heads = min(self.work.q_heads, self.work.kv_heads)
        if heads % self.machine.world:
            raise ValueError(f"DeepSpeed Ulysses on {self.machine.world} ranks: {heads} key/value heads do not divide")
        self.layout = Layout("contiguous", self.machine.world, self.work.length)
        self.distributed = DistributedAttention(self.local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.work.causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
        qkv = [x.detach().requires_grad_() for x in (q, k, v)]
        out = self.distributed(*(x.transpose(1, 2).contiguous() for x in qkv), 0).transpose(1, 2)
        return (out.detach(), *torch.autograd.grad(out, qkv, dout))
