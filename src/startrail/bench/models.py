"""Whole training steps of the tiny GPT and DiT as work for the benchmark: forward, loss, backward, gradients summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail.bench.cases import Contender, Work
from startrail.bench.closed import Machine
from startrail.bench.peers import engine, own_device
from startrail.bench.ring import RingAttention, TextbookRing
from startrail.training.dit import DiT, flow_matching_loss
from startrail.training.gpt import GPT
from startrail.training.loss import chunked_cross_entropy, global_mean, sum_gradients
from startrail.training.shapes import DIT_SHAPES, GPT_SHAPES

TOLERANCE = 1e-5  # of the loss
GRADIENTS = 1e-3  # of the largest gradient of each parameter
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Cut = Callable[[Tensor, int], Tensor]  # this rank's part of a tensor along a dimension


class Model:
    """One of the two models with a batch of one sequence; ``loss`` takes an attention and a way to cut the sequence."""

    def __init__(self, work: Work) -> None:
        self.work, self.device = work, own_device()
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        width, side = work.q_heads * work.head_dim, 32
        if work.model == "gpt":
            heads = {"heads": work.q_heads, "kv_heads": work.kv_heads}
            shape = replace(GPT_SHAPES["gpt-tiny"], width=width, layers=work.layers, **heads)
            self.net: torch.nn.Module = GPT(shape)
            self.tokens = torch.randint(shape.vocab, (work.batch, work.length), generator=generator).to(self.device)
            self.labels = F.pad(self.tokens[:, 1:], (0, 1), value=-100)  # shifted before anything is cut
        else:
            grid = {"rows": work.length // side, "columns": side}
            dit = replace(DIT_SHAPES["dit-tiny"], width=width, layers=work.layers, heads=work.q_heads, **grid)
            self.net = DiT(dit)
            shape = (work.batch, work.length, dit.patch_dim)
            self.patches, self.noise = (torch.randn(shape, generator=generator).to(self.device) for _ in range(2))
        self.net.to(self.device)

    def loss(self, attend: Attend, cut: Cut, positions: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        positions = positions.to(self.device)
        if self.work.model == "gpt":
            hidden = self.net(cut(self.tokens, 1), positions, attend)
            sums = chunked_cross_entropy(hidden, self.net.output_weight, cut(self.labels, 1), chunk=1024)
        else:
            time_ = torch.full((self.work.batch,), 0.3, device=self.device)
            label = torch.zeros(self.work.batch, dtype=torch.long, device=self.device)
            real = cut(torch.ones(self.work.length, device=self.device), 0).bool()
            parts = cut(self.patches, 1), cut(self.noise, 1)
            sums = flow_matching_loss(self.net, *parts, time_, label, positions, real, attend)  # type: ignore[arg-type]
        return global_mean(*sums, group) if group is not None else sums[0] / sums[1]


Expected = tuple[float, list[Tensor]]  # the loss, and the gradient of every parameter


def expected_results(work: Work) -> Expected:
    """What one process finds that has all of the sequence."""
    gqa = work.q_heads != work.kv_heads
    attend = partial(F.scaled_dot_product_attention, is_causal=work.causal, enable_gqa=gqa)
    model = Model(work)
    loss = model.loss(attend, lambda x, dim: x, torch.arange(work.length), None)
    return loss.item(), list(torch.autograd.grad(loss, list(model.net.parameters())))


class Step:
    """A contender training the model on this rank."""

    def __init__(self, contender: Contender, machine: Machine, work: Work, expected: Expected) -> None:
        self.model, self.work, self.machine, self.expected = Model(work), work, machine, expected
        self.ring: TextbookRing | None = None
        self.alone = contender.way == "compute"
        self.sp = engine(contender.plan or f"1x{machine.world}", machine)
        self.group = dist.group.WORLD
        if self.alone:
            self.attend: Attend = self.attend_alone
        elif contender.way == "textbook ring":
            self.ring = TextbookRing(contender, machine, work, None)
            self.attend = partial(RingAttention.apply, self.ring)
        else:
            self.attend = partial(self.sp.attention, causal=work.causal, length=work.length)

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As much arithmetic as this rank's share, on its own tokens over and over, half as often if causal."""
        copies = self.machine.world // (2 if self.work.causal else 1)
        k, v = (x.repeat(1, 1, copies, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    def loss(self) -> Tensor:
        positions = self.sp.positions(self.work.length)
        return self.model.loss(self.attend, self.cut, positions, self.group)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        return self.sp.shard(x, dim)

    def step(self) -> None:
        self.gradients_of(self.loss())
        self.model.net.zero_grad()

    def gradients_of(self, loss: Tensor) -> None:
        loss.backward()
        if not self.alone:
            sum_gradients(self.model.net.parameters(), self.group)

    def mistake(self) -> str | None:
        """What is wrong with the loss or a gradient, if anything is; compute alone is of no real loss."""
        loss, (right, gradients) = self.loss(), self.expected
        self.gradients_of(loss)
        found = [(name, parameter.grad) for name, parameter in self.model.net.named_parameters()]
        self.model.net.zero_grad()
        if self.alone:
            return None
        if not abs(loss.item() / right - 1) < TOLERANCE:
            return f"loss {loss.item()}, one process has {right}"
        for (name, ours), theirs in zip(found, gradients, strict=True):
            theirs = theirs.to(self.model.device)
            if ours is None or not (ours - theirs).abs().max() <= GRADIENTS * theirs.abs().max():
                return f"wrong gradient of {name}"
        return None

    def waiting(self) -> float | None:
        if self.ring is not None:
            return self.ring.waiting()
        seconds = self.sp.timings()["waiting"]
        self.sp.reset_counters()
        return seconds
