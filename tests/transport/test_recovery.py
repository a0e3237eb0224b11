"""After any error, on any ranks, in any number, all ranks go on: each way of failing, then three right steps."""

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail.launch.local import run_local
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.helpers import FULL, dense, tensors, worst

WORLD, LENGTH = 3, 24
FIRST = 1  # the first step with a fault
PLACES = ("before", "between", "forward", "backward")


class BrokenError(Exception):
    pass


def faults(*given):
    """(rank, place, number of steps in a row), as {(rank, step): place}."""
    return {(rank, FIRST + step): place for rank, place, count in given for step in range(count)}


SCENARIOS = {
    "one rank, before": faults((2, "before", 1)),
    "one rank, between, twice": faults((1, "between", 2)),
    "one rank, inside forward": faults((0, "forward", 1)),
    "one rank, inside backward, twice": faults((2, "backward", 2)),
    "two ranks, before, once and three times": faults((1, "before", 1), (2, "before", 3)),
    "one rank before, another inside forward": faults((1, "before", 1), (2, "forward", 1)),
    "one rank between, another inside backward, twice": faults((0, "between", 1), (2, "backward", 2)),
}
if FULL:
    SCENARIOS |= {f"rank 0, {place}, {count}": faults((0, place, count)) for place in PLACES for count in (1, 2, 3)}
    SCENARIOS |= {
        f"rank 0 {a}, rank 1 {b}, {count}": faults((0, a, 1), (1, b, count))
        for a in PLACES
        for b in PLACES
        for count in (1, 2)
    }


def take_steps(rank, planted):
    """What each step gave: "right", "wrong", or the name of an error."""
    sp = startrail.SequenceParallel("1x3", timeout=1.6)
    kernel = type(startrail.kernels.kernel_for(torch.device("cpu"), torch.float32, 16))
    results = []
    for step in range(max(step for _, step in planted) + 6):
        dist.barrier()  # a rank that is ahead would shard another batch
        place = planted.get((rank, step))
        methods = {name: getattr(kernel, name) for name in ("forward", "backward")}

        def fail(*arguments, **options):
            raise BrokenError("planted")

        if place in methods:
            setattr(kernel, place, fail)
        try:
            if place == "before":
                raise BrokenError("planted")
            *inputs, dout = tensors(LENGTH, seed=step)
            truth = dense(*inputs, dout, is_causal=True)
            sequence = sp.sequence(LENGTH)
            inputs = [sequence.shard(x, 2).requires_grad_() for x in inputs]
            out = sequence.attention(*inputs, causal=True)
            if place == "between":
                raise BrokenError("planted")
            grads = torch.autograd.grad(out, inputs, sequence.shard(dout, 2))
            right = worst([out, *grads], [sequence.shard(x, 2) for x in truth]) < 2e-6
            results.append("right" if right else "wrong")
        except (BrokenError, ValueError, startrail.PeerError) as error:
            results.append(f"{type(error).__name__}: {error}")
        for name, method in methods.items():
            setattr(kernel, name, method)
    return results


@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
def test_all_ranks_recover_from_every_way_of_failing(backend, monkeypatch):
    if backend == like_nccl.NAME:
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)
    chosen = list(SCENARIOS.items())[:: 1 if FULL or backend == "gloo" else 4]
    ranks = run_local(lambda rank: [take_steps(rank, planted) for _, planted in chosen], WORLD, deadline=900)
    for number, (name, _) in enumerate(chosen):
        results = [of_rank[number] for of_rank in ranks]
        for rank, steps in enumerate(results):
            assert "wrong" not in steps, (name, rank, steps)
            assert steps[:FIRST] == ["right"] * FIRST and steps[-3:] == ["right"] * 3, (name, rank, steps)


def test_ranks_that_skip_a_step_join_the_next_one_at_once():
    """The others have waited for them in vain and raised: the step after that is right on all ranks."""
    for steps in run_local(lambda rank: take_steps(rank, SCENARIOS["one rank, before"]), WORLD, deadline=60):
        assert steps[FIRST] != "right" and steps[FIRST + 1 :] == ["right"] * 5, steps
