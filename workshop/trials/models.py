"""Training steps of the tiny GPT and DiT as workloads: forward, loss, backward and the sum of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail.bench.yardstick import Attention, Workload, own_device, whole_attention
from startrail.losses import chunked_cross_entropy, global_mean, sum_gradients
from startrail.planner.topology import Machine
from startrail.training.models.configs import DIT_CONFIGS, GPT_CONFIGS
from startrail.training.models.dit import DiT, flow_matching_loss
from startrail.training.models.gpt import GPT
from workshop.peers.contenders import TextbookRing, engine
from workshop.trials.cases import Contender

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}  # of the loss: float32, or bfloat16 on GPUs
GRADIENTS = {"cpu": 1e-3, "cuda": 5e-2}  # of the largest gradient of each parameter
COLUMNS = 32  # of an image's patches
Shard = Callable[[Tensor, int], Tensor]  # this rank's part of a tensor along a dimension


class BenchModel(ABC):
    """One of the two models with its batch."""

    net: torch.nn.Module

    def __init__(self, work: Workload) -> None:
        self.work, self.device = work, own_device()
        self.width = work.q_heads * work.head_dim
        torch.manual_seed(0)
        self.build(torch.Generator().manual_seed(0))
        self.net.to(self.device)

    @abstractmethod
    def build(self, generator: torch.Generator) -> None: ...

    @abstractmethod
    def sums(self, attend: Attention, shard: Shard, positions: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's sum of losses and their number. ``shard`` cuts a tensor along the sequence."""

    def loss(self, attend: Attention, shard: Shard, positions: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            total, count = self.sums(attend, shard, positions.to(self.device))
        return total / count if group is None else global_mean(total, count, group)


class Gpt(BenchModel):
    def build(self, generator: torch.Generator) -> None:
        work, tiny = self.work, GPT_CONFIGS["gpt-tiny"]
        heads, kv_heads = work.q_heads, work.kv_heads
        config = replace(tiny, width=self.width, layers=work.layers, heads=heads, kv_heads=kv_heads)
        self.net = self.gpt = GPT(config)
        self.tokens = torch.randint(config.vocab, (work.batch, work.length), generator=generator).to(self.device)
        self.labels = F.pad(self.tokens[:, 1:], (0, 1), value=-100)  # shifted before sharding

    def sums(self, attend: Attention, shard: Shard, positions: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.gpt(shard(self.tokens, 1), positions, attend)
        return chunked_cross_entropy(hidden, self.gpt.output_weight, shard(self.labels, 1), chunk=1024)


class Dit(BenchModel):
    def build(self, generator: torch.Generator) -> None:
        work, tiny = self.work, DIT_CONFIGS["dit-tiny"]
        rows = work.length // COLUMNS
        config = replace(tiny, width=self.width, layers=work.layers, heads=work.q_heads, rows=rows, columns=COLUMNS)
        self.net = self.dit = DiT(config)
        size = (work.batch, work.length, config.patch_dim)
        self.patches, self.noise = (torch.randn(size, generator=generator).to(self.device) for _ in range(2))

    def sums(self, attend: Attention, shard: Shard, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, device = self.work.batch, self.device
        times, labels = torch.full((batch,), 0.3, device=device), torch.zeros(batch, dtype=torch.long, device=device)
        real = shard(torch.ones(self.work.length, device=device), 0).bool()
        patches, noise = shard(self.patches, 1), shard(self.noise, 1)
        return flow_matching_loss(self.dit, patches, noise, times, labels, positions, real, attend)


MODELS = {"gpt": Gpt, "dit": Dit}
Expected = tuple[float, list[Tensor]]  # the loss, and the gradient of every parameter


def expected_results(work: Workload) -> Expected:
    """Loss and gradients of one process with the whole sequence."""
    model = MODELS[work.model](work)
    loss = model.loss(partial(whole_attention, causal=work.causal), lambda x, dim: x, torch.arange(work.length), None)
    return loss.item(), list(torch.autograd.grad(loss, list(model.net.parameters())))


class StepRunner:
    """A contender that trains the model on this rank."""

    def __init__(self, contender: Contender, machine: Machine, work: Workload, expected: Expected) -> None:
        self.model, self.work, self.machine, self.expected = MODELS[work.model](work), work, machine, expected
        self.ring: TextbookRing | None = None
        self.compute_only = contender.way == "compute"
        self.sp = engine(contender.plan or f"1x{machine.world}", machine)
        self.sequence = self.sp.sequence(work.length)
        self.group = dist.group.WORLD
        if self.compute_only:
            self.attend: Attention = self.attend_compute_only
        elif contender.way == "textbook ring":
            self.ring = TextbookRing(contender, machine, work, None)
            self.attend = self.ring.attention
        else:
            self.attend = partial(self.sequence.attention, causal=work.causal)

    def attend_compute_only(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """This rank's share of the arithmetic, on copies of its own keys; half as many if causal."""
        copies = self.machine.world // (2 if self.work.causal else 1)
        k, v = (x.repeat(1, 1, copies, 1) for x in (k, v))
        return whole_attention(q, k, v, causal=False)

    def loss(self) -> Tensor:
        return self.model.loss(self.attend, self.sequence.shard, self.sequence.positions(), self.group)

    def step(self) -> None:
        self.gradients_of(self.loss())
        self.model.net.zero_grad()

    def gradients_of(self, loss: Tensor) -> None:
        loss.backward()
        if not self.compute_only:
            sum_gradients(self.model.net.parameters(), self.group)

    def mistake(self) -> str | None:
        """What is wrong with the loss or a gradient, or None. Compute only has no meaningful loss."""
        loss, (right, gradients) = self.loss(), self.expected
        self.gradients_of(loss)
        found = [(name, parameter.grad) for name, parameter in self.model.net.named_parameters()]
        self.model.net.zero_grad()
        if self.compute_only:
            return None
        kind = self.model.device.type
        if not abs(loss.item() / right - 1) < TOLERANCE[kind]:
            return f"loss {loss.item()}, expected {right}"
        for (name, gradient), exact in zip(found, gradients, strict=True):
            exact = exact.to(self.model.device)
            if gradient is None or not (gradient - exact).abs().max() <= GRADIENTS[kind] * exact.abs().max():
                return f"wrong gradient of {name}"
        return None

    def waiting(self) -> float | None:
        if self.ring is not None:
            return self.ring.waiting()
        seconds = self.sp.timings()["waiting"]
        self.sp.reset_counters()
        return seconds
