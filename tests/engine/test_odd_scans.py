"""Scans with odd inputs: only some need gradients, some are not finite, by name, of other shapes, final states only."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import startrail
from startrail.launch.local import run_local
from tests.engine.splits import SplitCase
from tests.engine.test_scan import KINDS, delta_inputs, one_process
from tests.helpers import worst


def with_gradients(outs, cotangents):
    """Those outputs that need gradients, and their cotangents."""
    return zip(*(pair for pair in zip(outs, cotangents, strict=True) if pair[0].requires_grad), strict=True)


def gradients_of(sequence, call, given, wanted, cotangents):
    """The gradients of the ``wanted`` inputs over all tokens, with zeros for an input that has none."""
    shares = [sequence.shard(cotangents[0], 1), cotangents[1] / sequence.sp.world]
    outs, cotangents = with_gradients(call(*given), shares)
    found = torch.autograd.grad(outs, [given[n] for n in wanted], cotangents, allow_unused=True)
    wholes = []
    for number, grad in zip(wanted, found, strict=True):
        x = given[number]
        grad = torch.zeros_like(x) if grad is None else grad
        is_share = x.dim() == 2 or number == len(given) - 1
        wholes.append(sequence._gather(grad[None], 0).sum(0) if is_share else sequence.unshard(grad, 1))
    return wholes


@pytest.mark.parametrize("shares, documents", [((1, 1, 0.01), (0, 9)), ((1, 1, 1), (0, 3, 9))])
def test_only_some_inputs_may_need_gradients(shares, documents):
    """Also on ranks without tokens, and those without others' documents: none waits for a backward pass in vain."""
    case = SplitCase("1x3", 3, "contiguous", 9, documents, shares)

    def on_rank(rank):
        sequence, wrong = case.sequence(), []
        for kind, (make, options) in KINDS.items():
            torch.manual_seed(0)
            inputs, shape = make(1, 9)
            whole = [x.double() for x in (*inputs, torch.randn(1, len(documents) - 1, *shape))]
            for wanted in [*([number] for number in range(len(whole))), [0, len(inputs)]]:
                for number, x in enumerate(whole):
                    x.requires_grad_(number in wanted)
                kernel = getattr(startrail, kind)
                expected = one_process(case, kernel, whole[:-1], options, whole[-1])
                cotangents = [torch.randn(x.shape, dtype=torch.float64) for x in expected]
                outs, given = with_gradients(expected, cotangents)
                exact = torch.autograd.grad(outs, [whole[n] for n in wanted], given)
                local = [x.detach() if x.dim() == 2 or x is whole[-1] else sequence.shard(x, 1) for x in whole]
                local = [x.detach().requires_grad_(number in wanted) for number, x in enumerate(local)]

                def call(*given, kernel=kernel, options=options):
                    return sequence.scan(
                        kernel, *given[:-1], initial_state=given[-1], output_final_state=True, **options
                    )

                error = worst(gradients_of(sequence, call, local, wanted, cotangents), exact)
                wrong += [] if error < 1e-11 else [f"{kind} {wanted}: {error}"]
        return wrong

    assert run_local(on_rank, 3, deadline=240) == [[]] * 3


def test_tensors_may_be_given_by_name_and_kernels_may_be_partial():
    def on_rank(rank):
        sequence, errors = startrail.SequenceParallel("1x2", timeout=20).sequence(16, [0, 5, 16]), []
        torch.manual_seed(rank)
        inputs, _ = delta_inputs(1, 8)
        for needing in (inputs, inputs[3:]):
            tensors = [x.clone().requires_grad_(any(x is each for each in needing)) for x in inputs]
            q, k, v, g, beta = tensors
            calls = (
                lambda: sequence.scan(startrail.gated_delta_rule, q, k, v, g, beta, normalize=True),  # noqa: B023
                lambda: sequence.scan(startrail.gated_delta_rule, q, k, v, g=g, beta=beta, normalize=True),  # noqa: B023
                lambda: sequence.scan(partial(startrail.gated_delta_rule, q, k, v, normalize=True), g, beta),  # noqa: B023
            )
            wanted = [x for x in tensors if x.requires_grad]
            right, *others = ([out := call(), *torch.autograd.grad(out.square().sum(), wanted)] for call in calls)
            errors += [worst(found, [x.double() for x in right]) for found in others]
        return max(errors)

    assert max(run_local(on_rank, 2)) < 1e-6


def test_what_is_not_finite_stays_in_its_document():
    """NaN or infinities in the first document: results and gradients of the others are finite."""
    first = 31

    def on_rank(rank):
        spoilt = []
        for plan, layout, bad in (("1x2/1x2", "zigzag", float("nan")), ("u2/1x2", "zones", float("inf"))):
            sequence = startrail.SequenceParallel(plan, layout=layout, timeout=60).sequence(60, [0, first, 60])
            for kind, (make, options) in KINDS.items():
                inputs, shape = make(1, 60)
                for x in inputs:
                    if x.dim() > 2 and x.max() > 0:  # no decay may be positive
                        x[:, :first] = bad
                states = torch.randn(1, 2, *shape).index_fill(1, torch.tensor(0), bad).requires_grad_()
                local = [(sequence.shard(x, 1) if x.dim() > 2 else x).requires_grad_() for x in inputs]
                results = sequence.scan(
                    getattr(startrail, kind), *local, initial_state=states, output_final_state=True, **options
                )
                *grads, of_states = torch.autograd.grad([x.sum() for x in results], [*local, states])
                per_token = [x for x in (results[0], *grads) if x.dim() > 2]
                others = [sequence.unshard(x, 1)[:, first:] for x in per_token] + [results[1][:, 1], of_states[:, 1]]
                spoilt += [(plan, kind)] * (not all(bool(x.isfinite().all()) for x in others))
        return spoilt

    assert run_local(on_rank, 4) == [[]] * 4


def test_a_linear_recurrence_has_any_number_of_dimensions():
    def on_rank(rank):
        wrong = []
        for plan, layout in (("1x2/1x2", "zigzag"), ("1x4", "contiguous")):
            sequence = startrail.SequenceParallel(plan, layout=layout, timeout=20).sequence(33)
            for dims in ((), (2, 5), (2, 3, 4)):
                torch.manual_seed(0)
                whole = [torch.rand(2, 33, *dims).double().requires_grad_() for _ in range(2)]
                expected = startrail.linear_recurrence(*whole).run()[0]
                local = [sequence.shard(x.detach(), 1).requires_grad_() for x in whole]
                out = sequence.scan(startrail.linear_recurrence, *local)
                found = [out, *torch.autograd.grad(out.square().sum(), local)]
                exact = [expected, *torch.autograd.grad(expected.square().sum(), whole)]
                error = worst(found, [sequence.shard(x, 1) for x in exact])
                wrong += [] if error < 1e-11 else [f"{plan} {dims}: {error}"]
        return wrong

    assert run_local(on_rank, 4) == [[]] * 4


class CountingSums(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.startrail.add_up.default
        return func(*args, **(kwargs or {}))


def test_checkpointing_adds_up_final_states_once_in_each_pass():
    def on_rank(rank):
        sequence = startrail.SequenceParallel("1x2", timeout=20).sequence(16)
        local = [x.requires_grad_() for x in delta_inputs(1, 8)[0]]
        layer = partial(sequence.scan, startrail.gated_delta_rule, output_final_state=True)
        with CountingSums() as sums:
            results = checkpoint(layer, *local, use_reentrant=False, context_fn=startrail.checkpoint_context)
            torch.autograd.grad([x.sum() for x in results], local)
        return sums.count

    assert run_local(on_rank, 2) == [2, 2]
