"""After any error, on any ranks, in any number, all ranks go on: each way of failing, then three right steps."""

import time

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail.launch.local import run_local
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.helpers import FULL, causal_mask, dense, tensors, worst

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


def take_steps(rank, planted, together=True, documents=(0, LENGTH), timeout=1.6):
    """What each step gave: "right", "wrong", or the name of an error. ``together``: all ranks begin a step together."""
    sp = startrail.SequenceParallel("1x3", timeout=timeout)
    kernel = type(startrail.kernels.kernel_for(torch.device("cpu"), torch.float32, 16))
    model, results = torch.nn.Linear(2, 2, bias=False), []
    for step in range(max(step for _, step in planted) + (6 if together else 9)):
        if together:
            dist.barrier()
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
            truth = dense(*inputs, dout, attn_mask=causal_mask(LENGTH, documents))
            sequence = sp.sequence(LENGTH, documents)
            inputs = [sequence.shard(x, 2).requires_grad_() for x in inputs]
            out = sequence.attention(*inputs, causal=True)
            if place == "between":
                raise BrokenError("planted")
            grads = torch.autograd.grad(out, inputs, sequence.shard(dout, 2))
            model.weight.grad = torch.full((2, 2), step + 0.0)
            startrail.sum_gradients(model.parameters(), check=False)
            right = worst([out, *grads], [sequence.shard(x, 2) for x in truth]) < 2e-6
            right &= model.weight.grad.eq(WORLD * step).all().item()
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


@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
def test_ranks_find_together_again_without_a_barrier(backend, monkeypatch):
    """A rank that raised in its own code is a batch ahead. Ranks that are behind raise and skip their batches, and it
    waits for them."""
    if backend == like_nccl.NAME:
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)
    chosen = list(SCENARIOS.items())[:: 1 if FULL or backend == "gloo" else 4]

    def on_rank(rank):
        results = []
        for _, planted in chosen:
            results.append(take_steps(rank, planted, together=False))
            dist.barrier()
        return results

    ranks = run_local(on_rank, WORLD, deadline=900)
    for number, (name, _) in enumerate(chosen):
        results = [of_rank[number] for of_rank in ranks]
        for rank, steps in enumerate(results):
            assert "wrong" not in steps, (name, rank, steps)
            assert steps[:FIRST] == ["right"] * FIRST and steps[-3:] == ["right"] * 3, (name, rank, steps)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_ranks_in_a_collective_hear_of_a_rank_that_failed_in_a_call(place, together):
    """Each rank has a document of its own and needs nothing from the others, so these have finished the pass and may
    wait in ``sum_gradients``. They raise long before the timeout, torch's own group still works, and the next step is
    right on all ranks."""
    planted, documents = faults((2, place, 1)), (0, 8, 16, 24)

    def on_rank(rank):
        start = time.monotonic()
        return take_steps(rank, planted, together, documents, timeout=60), time.monotonic() - start

    for rank, (steps, seconds) in enumerate(run_local(on_rank, WORLD, deadline=120, timeout=60)):
        assert steps[:FIRST] == ["right"] * FIRST and steps[FIRST + 1 :] == ["right"] * (len(steps) - FIRST - 1), steps
        if rank != 2:
            assert steps[FIRST].startswith("PeerError: "), steps
            assert "rank 2 raised BrokenError: planted" in steps[FIRST] or place == "forward", steps
            assert "sum_gradients: a rank is gone or late: " in steps[FIRST] or place == "forward", steps
        assert seconds < 30, "well before the timeout"
