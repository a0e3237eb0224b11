"""Checks in the first steps of a plain training loop: averaged and unsummed gradients raise, correct loops do not."""

import gc
import warnings

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


def ddp(model, group=None):
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)


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


def summed_by_hand(model, skip=None):
    for x in model.parameters():
        if x.grad is not None and x is not skip:
            dist.all_reduce(x.grad)


def changed(model, by, parameters=None):
    for x in parameters or model.parameters():
        x.data += by
    return model


def square(out):
    return out.square().sum()


def mean(out):
    return out.square().mean()


class Loops:
    """Runs training loops, right and wrong ones, and keeps their ``errors`` by name: one text per step."""

    def __init__(self):
        self.sp, self.errors = startrail.SequenceParallel("1x2"), {}
        self.data = torch.randn(1, 14, 8, generator=torch.Generator().manual_seed(1))

    def train(
        self, name, wrap=lambda model: model, *, scale=1.0, parts=1, after=lambda model: None, rare=False, steps=3,
        loss=square, count=None,
    ):  # fmt: skip
        model = Model()
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            for part in range(parts):
                sequence = self.sp.sequence(14)
                out = wrapped(sequence.shard(self.data + part, 1), sequence, rare)
                average = startrail.global_mean(loss(out), out[..., 0].numel() if count is None else count)
                (scale * average).backward()
            after(model)
            optimizer.step()

        self.errors[name] = [error_of(step) for _ in range(steps)]


def on_rank(rank):
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    loops = Loops()
    train = loops.train
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
    train("summed, partly by ddp", lambda model: ddp(model, alone), after=summed)  # the sum over the rest is separate
    train("a parameter that one rank does not use", after=summed, rare=rank == 0)
    train("dropped after one step", after=summed, steps=1)
    train("other weights", lambda model: changed(model, rank), after=summed_by_hand)
    other_matrix = lambda model: changed(model, rank, [model.outside.weight])  # noqa: E731
    train("another matrix", other_matrix, after=summed_by_hand)
    train("experts", other_matrix, after=lambda model: summed_by_hand(model, skip=model.outside.weight))
    train("a mean", after=summed, loss=mean)
    train("a mean by mse_loss", after=summed, loss=lambda out: nn.functional.mse_loss(out, torch.zeros(())))
    train("a mean over ranks", after=summed, loss=mean, count=1)
    train("a mean times its count", after=summed, loss=lambda out: mean(out) * out[..., 0].numel())
    gc.collect()
    return loops.errors, len(_active_checks)


def test_wrong_loops_raise_at_the_first_step_and_correct_loops_do_not():
    averaged = "gradients are averaged over 2 ranks, but must be summed ({} divides by its number of ranks): call "
    averaged += "(startrail.gradient_factor(model) * loss).backward()"
    ddp, fsdp = (f"ValueError: {averaged.format(wrapper)}" for wrapper in ("DDP", "FSDP"))
    for errors, remaining in run_local(on_rank, 2):
        for name, shown in (("other weights", "1 (24, 8)"), ("another matrix", "3 (8, 8)")):
            texts = errors.pop(name)[:2]
            assert all(f"parameter {shown} of the optimizer is not the same on all ranks" in text for text in texts)
        for name in ("a mean", "a mean by mse_loss"):
            assert errors.pop(name)[0].startswith("ValueError: loss_sum is a mean over this rank's tokens"), name
        unsummed = errors.pop("unsummed")
        assert all("each rank still has only its own part of the gradients" in text for text in unsummed[:2])
        for name in ("ddp averaged", "ddp averaged, three parts"):
            assert errors.pop(name) == [ddp, ddp, "no error"], name
        assert errors.pop("fsdp averaged") == [fsdp, fsdp, "no error"]
        assert errors == {name: ["no error"] * len(texts) for name, texts in errors.items()}
        assert remaining == 0, "checks end with their models"


def test_labels_that_are_not_shifted_warn():
    """Wherever some tokens have no label; but not if the next tokens are the same, and not if they are shifted."""
    ids = torch.randint(9, (2, 14), generator=torch.Generator().manual_seed(0))

    def warnings_of(labels, ids=ids, pad_value=-100, batches=1, shard=None):
        sp = startrail.SequenceParallel("1x1")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(batches):
                sequence = sp.sequence(14)
                sequence.shard(ids, 1)
                sequence.shard(labels, 1, pad_value) if shard is None else shard(sequence, labels)
        return [str(each.message)[:39] for each in found]

    text = "labels are the ids of the same tokens, "
    masked = ids.masked_fill(torch.arange(14) < 5, -100)
    assert warnings_of(ids) == warnings_of(ids.clone()) == warnings_of(masked) == [text]
    assert warnings_of(ids, batches=5) == [text] * 2
    constant = torch.full_like(ids, 3)
    others = [ids.roll(-1, 1), masked.roll(-1, 1), constant, torch.full_like(ids, -100), ids + 1, ids[:1]]
    assert [warnings_of(labels, ids=constant if labels is constant else ids) for labels in others] == [[]] * 6
    assert warnings_of(ids, shard=startrail.Sequence.shard_labels) == []
    assert warnings_of(ids, pad_value=0) == warnings_of(ids.double(), ids=ids.double()) == []
