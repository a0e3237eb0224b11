"""Checks in the first steps of a plain training loop: averaged and unsummed gradients raise, correct loops do not."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import startrail
from startrail.launch.local import run_local
from startrail.step_checks import _active_checks
from tests.helpers import error_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(8, 24), nn.Linear(8, 8)
        self.rare = nn.Parameter(torch.ones(2))  # smaller than all others

    def forward(self, x, sequence, rare=False):
        q, k, v = self.inside(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = self.outside(sequence.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
        return out * self.rare.prod() if rare else out


def on_rank(rank):
    sp = startrail.SequenceParallel("1x2")
    data = torch.randn(1, 14, 8, generator=torch.Generator().manual_seed(1))
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    errors = {}

    def train(name, wrap=lambda model: model, scale=1.0, parts=1, after=lambda model: None, rare=False, steps=3):
        model = Model()
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            for part in range(parts):
                sequence = sp.sequence(14)
                out = wrapped(sequence.shard(data + part, 1), sequence, rare)
                loss = startrail.global_mean(out.square().sum(), out[..., 0].numel())
                (scale * loss).backward()
            after(model)
            optimizer.step()

        errors[name] = [error_of(step) for _ in range(steps)]

    def sharded(model):
        fully_shard(model.inside)
        return fully_shard(model)

    def sharded_that_sums(model):
        for module in (model.inside, sharded(model)):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
        return model

    def summed(model):
        startrail.sum_gradients(model.parameters())

    def ddp_of_one_rank(model):  # the sum over the other ranks is separate
        return DistributedDataParallel(model, process_group=alone, find_unused_parameters=True)

    def ddp(model):
        return DistributedDataParallel(model, find_unused_parameters=True)

    train("ddp averaged", ddp)
    train("ddp", ddp, scale=2.0)
    train("ddp, two parts per step", ddp, scale=1.0, parts=2)  # 2 ranks / 2 parts
    train("ddp averaged, three parts", ddp, scale=1 / 3, parts=3)
    train("fsdp averaged", sharded)
    train("fsdp", sharded, scale=2.0)
    train("fsdp that sums", sharded_that_sums)
    train("unsummed")
    train("summed", after=summed)
    train("summed, clipped", after=lambda model: (summed(model), nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    train("summed, partly by ddp", ddp_of_one_rank, after=summed)
    train("a parameter that one rank does not use", after=summed, rare=rank == 0)
    train("dropped after one step", after=summed, steps=1)
    gc.collect()
    return errors, len(_active_checks)


def test_wrong_loops_raise_at_the_first_step_and_correct_loops_do_not():
    averaged = "gradients are averaged over 2 ranks, but must be summed ({} divides by its number of ranks): call "
    averaged += "(startrail.gradient_factor(model) * loss).backward()"
    ddp, fsdp = (f"ValueError: {averaged.format(wrapper)}" for wrapper in ("DDP", "FSDP"))
    for errors, remaining in run_local(on_rank, 2):
        unsummed = errors.pop("unsummed")
        assert all("each rank still has only its own part of the gradients" in text for text in unsummed[:2])
        for name in ("ddp averaged", "ddp averaged, three parts"):
            assert errors.pop(name) == [ddp, ddp, "no error"], name
        assert errors.pop("fsdp averaged") == [fsdp, fsdp, "no error"]
        assert errors == {name: ["no error"] * len(texts) for name, texts in errors.items()}
        assert remaining == 0, "checks end with their models"
