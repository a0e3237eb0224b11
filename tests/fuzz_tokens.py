"""Random sequences, layouts and dtypes for everything that moves tokens or sums over them, against one process:
``python -m tests.fuzz_tokens --cases 1000 --seed 0``.

Each case runs shard, unshard, roll, shard_labels, positions, global_mean, sum_gradients and next_tokens on all ranks,
with gradients. Everything about a case follows from its seed: repeat a failure with ``--seed N --cases 1``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import startrail
from startrail.launch.local import run_local
from tests.helpers import document_numbers

PLANS = {1: ("1x1",), 2: ("1x2", "u2", "2x1"), 3: ("1x3",), 4: ("1x4", "u2/1x2", "2x2", "1x2/u2")}
LAYOUTS = ("zones", "zigzag", "contiguous")
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int16, torch.bool)
GRADIENTS = ("everywhere", "nowhere")  # the ranks whose tokens need gradients
BATCH = 100  # cases on one set of ranks


@dataclass(frozen=True)
class TokenCase:
    seed: int
    world: int
    plan: str
    layout: str
    length: int
    documents: tuple[int, ...] | None
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the other dimensions
    dim: int  # of the tokens
    shift: int
    gradients: str
    shares: tuple[float, ...] | None


def random_case(seed: int) -> TokenCase:
    rng, shared = random.Random(seed), random.Random(seed // 5)  # connecting ranks takes longer than a case
    world = shared.choice(list(PLANS))
    length = rng.choice([1, 2, 3, rng.randint(4, 20), rng.randint(21, 70)])
    cuts = sorted(rng.choices(range(length + 1), k=rng.choice([0, 1, 5])))
    shape = tuple(rng.randint(1, 3) for _ in range(rng.choice([0, 1, 2])))
    return TokenCase(
        seed=seed,
        world=world,
        plan=shared.choice(PLANS[world]),
        layout=shared.choice(LAYOUTS),
        length=length,
        documents=rng.choice([None, (0, *cuts, length)]),
        dtype=rng.choice(DTYPES),
        shape=shape,
        dim=rng.randint(0, len(shape)),
        shift=rng.choice([-1, -1, 1, -2, 3, 0]),
        gradients=rng.choice(GRADIENTS),
        shares=rng.choice([None, None, tuple(rng.choice([1.0, 0.5, 0.01]) for _ in range(world))]),
    )


class _Mistakes(list[str]):
    def expect(self, what: str, ours: Tensor, truth: Tensor, exact: bool = True) -> None:
        if ours.shape != truth.shape or ours.dtype != truth.dtype:
            self.append(f"{what}: {tuple(ours.shape)} {ours.dtype}, not {tuple(truth.shape)} {truth.dtype}")
        elif exact and not torch.equal(ours, truth):
            self.append(f"{what}: {ours.tolist()}, not {truth.tolist()}")
        elif not exact:
            off, allowed = (ours - truth).abs().max(), 16 * torch.finfo(ours.dtype).eps * (1 + truth.abs().max())
            if not off <= allowed:  # written so that NaN fails
                self.append(f"{what}: {off:.1e} off, allowed {allowed:.1e}")


def check(case: TokenCase, rank: int, parallels: dict[tuple[str, str], startrail.SequenceParallel]) -> list[str]:
    """What is wrong on this rank."""
    if (key := (case.plan, case.layout)) not in parallels:
        parallels[key] = startrail.SequenceParallel(case.plan, layout=case.layout, timeout=60)
    sp = parallels[key]
    sequence, wrong = sp.sequence(case.length, case.documents, shares=case.shares), _Mistakes()
    make = partial(_numbers, case)
    _check_moves(case, rank, sequence, wrong, make)
    _check_losses(case, rank, sequence, wrong)
    return [f"seed {case.seed}, rank {rank}: {text}\n    {case}" for text in wrong]


def _numbers(case: TokenCase, name: str, rank: int = 0) -> Tensor:
    """A tensor of whole numbers, which every dtype holds and adds exactly, with the tokens in ``case.dim``."""
    generator = torch.Generator().manual_seed(hash((case.seed, len(name), rank)) % 2**31)
    shape = (*case.shape[: case.dim], case.length, *case.shape[case.dim :])
    return torch.randint(0, 16, shape, generator=generator).to(case.dtype)


def _check_moves(case: TokenCase, rank: int, sequence: startrail.Sequence, wrong: _Mistakes, make) -> None:
    dim, whole, world = case.dim, make("whole"), case.world
    needs_grad = case.dtype.is_floating_point and case.gradients == "everywhere"
    given = whole.clone().requires_grad_(needs_grad)
    local = sequence.shard(given, dim, pad_value=3)
    places = sequence.positions()
    wrong.expect("positions", sequence.unshard(places, 0), torch.arange(case.length))
    real = _is_real(sequence).nonzero()[:, 0]
    mine = places[real]  # positions, in the order in which this rank holds them
    wrong.expect("shard", local.detach().index_select(dim, real), whole.index_select(dim, mine))
    padding = torch.isin(torch.arange(sequence.local), real, invert=True).nonzero()[:, 0]
    wrong.expect(
        "padding",
        local.detach().index_select(dim, padding).sum(),
        torch.full_like(local, 3).index_select(dim, padding).sum(),
    )
    if needs_grad:  # this rank's share
        cotangent = torch.randint(16, local.shape).to(case.dtype)
        (grad,) = torch.autograd.grad(local, given, cotangent)
        share = torch.zeros_like(whole).index_copy(dim, mine, cotangent.index_select(dim, real))
        wrong.expect("gradient of shard", grad, share)
    # unshard, and its gradient: the sum of all ranks' cotangents
    x = local.detach().requires_grad_(needs_grad)
    back = sequence.unshard(x, dim)
    wrong.expect("unshard", back.detach(), whole)
    if back.requires_grad:
        grads = torch.autograd.grad(back, x, make("other", rank), allow_unused=True) if needs_grad else ()
        if not needs_grad:
            back.backward(make("other", rank))
        total = sum((make("other", each) for each in range(1, world)), make("other", 0))
        for grad in grads:
            mine = sequence.shard(total, dim)
            wrong.expect(
                "gradient of unshard", _without_padding(sequence, grad, dim), _without_padding(sequence, mine, dim)
            )
    _check_roll(case, sequence, wrong, make, whole, needs_grad)


def _check_roll(case: TokenCase, sequence: startrail.Sequence, wrong: _Mistakes, make, whole: Tensor, needs_grad: bool):
    dim, shift = case.dim, case.shift
    source = torch.arange(case.length) - shift
    inside = (source >= 0) & (source < case.length)
    number = document_numbers(case.length, case.documents)
    inside &= number == number[source.clamp(0, case.length - 1)]
    column = inside.view([-1 if at == dim else 1 for at in range(whole.dim())])
    x = sequence.shard(whole, dim).requires_grad_(needs_grad)
    rolled = sequence.roll(x, shift, dim, 5)
    truth = torch.where(column, whole.index_select(dim, source.clamp(0, case.length - 1)), torch.tensor(5).to(whole))
    wrong.expect(
        "roll",
        _without_padding(sequence, rolled.detach(), dim),
        _without_padding(sequence, sequence.shard(truth, dim), dim),
    )
    if not rolled.requires_grad:
        return
    cotangent = make("third")
    share = sequence.shard(cotangent, dim)
    if not needs_grad:
        rolled.backward(share)
        return
    (grad,) = torch.autograd.grad(rolled, x, share)
    expected = torch.zeros_like(cotangent).index_add(
        dim, source[inside], cotangent.index_select(dim, inside.nonzero()[:, 0])
    )
    mine = sequence.shard(expected, dim)
    wrong.expect("gradient of roll", _without_padding(sequence, grad, dim), _without_padding(sequence, mine, dim))


def _is_real(sequence: startrail.Sequence) -> Tensor:
    """(local,) False for padding."""
    return sequence.shard(torch.ones(sequence.length, dtype=torch.bool), 0)


def _without_padding(sequence: startrail.Sequence, x: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, _is_real(sequence).nonzero()[:, 0])


def _check_losses(case: TokenCase, rank: int, sequence: startrail.Sequence, wrong: _Mistakes) -> None:
    """A mean loss over labels, from hidden states that only some ranks compute with gradients."""
    dtype = case.dtype if case.dtype in (torch.float32, torch.float64) else torch.float64
    generator = torch.Generator().manual_seed(case.seed)
    hidden, vocabulary = torch.randn(1, case.length, 4, generator=generator, dtype=dtype), 7
    ids = torch.randint(vocabulary, (1, case.length), generator=generator)
    weights = [torch.randn(vocabulary, 4, generator=generator, dtype=dtype), torch.ones(3, dtype=dtype)]
    labels = ids.roll(-1, 1)
    labels[:, sequence.documents[1:] - 1] = -100
    mine = sequence.shard_labels(ids)
    wrong.expect("shard_labels", mine, sequence.shard(labels, 1, -100))

    def loss_of(hidden: Tensor, labels: Tensor, weights: list[Tensor], count: Tensor | int, summed) -> Tensor:
        result = startrail.next_tokens(hidden, weights[0], labels, chunk=5)
        return summed(-result.log_probs.sum() + 0.1 * result.entropy.sum(), count)

    group = sequence.sp.group
    ours = [nn_parameter(weight) for weight in weights]
    loss = loss_of(
        sequence.shard(hidden, 1), mine, ours, (mine != -100).sum(), partial(startrail.global_mean, group=group)
    )
    loss.backward()
    if rank % 2:
        ours[1].grad = torch.full_like(ours[1], 2.0)  # a parameter without a gradient on some ranks
    startrail.sum_gradients(ours, group, check=False)
    alone = [nn_parameter(weight) for weight in weights]
    count = int((labels != -100).sum())
    truth = loss_of(hidden, labels, alone, count, lambda total, count: total / max(count, 1))
    truth.backward()
    wrong.expect("global_mean", loss.detach(), truth.detach(), exact=False)
    assert ours[0].grad is not None and ours[1].grad is not None and alone[0].grad is not None
    wrong.expect("sum_gradients", ours[0].grad, alone[0].grad, exact=False)
    wrong.expect("sum_gradients", ours[1].grad, torch.full_like(ours[1], 2.0 * (case.world // 2)))


def nn_parameter(x: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(x.clone())


def run(first_seed: int, count: int, progress: bool = False) -> list[str]:
    cases, wrong, done = [random_case(seed) for seed in range(first_seed, first_seed + count)], [], 0
    for world in PLANS:
        mine = [case for case in cases if case.world == world]
        for start in range(0, len(mine), BATCH):
            part = mine[start : start + BATCH]

            def on_rank(rank: int, part: list[TokenCase] = part) -> list[str]:
                parallels: dict[tuple[str, str], startrail.SequenceParallel] = {}
                return [text for case in part for text in check(case, rank, parallels)]

            wrong += [text for texts in run_local(on_rank, world, deadline=600) for text in texts or ()]
            done += len(part)
            if progress:
                print(f"\r{done}/{count} cases, {len(wrong)} mistakes", end="", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    wrong = run(options.seed, options.cases, progress=True)
    print(f"\n{options.cases} cases of token helpers in {time.monotonic() - start:.0f} s: {len(wrong)} mistakes")
    print("\n".join(wrong[:10]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
