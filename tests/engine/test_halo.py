"""Halos and convolutions over split sequences: exact against one process, with bytes by closed form."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

import startrail
from startrail.compile.call import compile_call
from startrail.compile.halo import HALO_BACKWARD, HALO_FORWARD, Halo
from startrail.compile.proof import prove_call
from startrail.kernels.convolution import causal_conv1d
from startrail.launch.local import run_local
from startrail.schedule.proof import ScheduleError
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.engine.splits import PLANS, SplitCase, of_each_document, random_split
from tests.helpers import error_of, worst

SENT = (HALO_FORWARD, HALO_BACKWARD)


def halo_call(case, before, features, itemsize, rank):
    problem = Halo(case.boundaries, 1, "float64", "", before, features, itemsize)
    return compile_call(problem, case.split, rank)


def whole_halos(x, case, runs, before):
    """The tokens before each run, of the whole x (batch, tokens, channels)."""
    found = []
    for start, _ in runs:
        document = max(first for first in case.documents if first <= start)
        first = max(document, start - before)
        zeros = x.new_zeros(x.shape[0], before - (start - first), x.shape[2])
        found.append(torch.cat((zeros, x[:, first:start]), 1))
    return torch.stack(found, 1) if found else x.new_zeros(x.shape[0], 0, before, x.shape[2])


def whole_conv1d(x, case, *arguments):
    parts = [causal_conv1d(x[:, :, start:stop], *arguments) for start, stop in of_each_document(case)]
    return torch.cat(parts, 2)


# --- programs


@pytest.mark.parametrize("world", PLANS)
def test_every_program_fetches_what_lies_before_its_runs(world):
    chance = random.Random(world)
    for _ in range(60):
        case = random_split(chance, world)
        prove_call(Halo(case.boundaries, 1, "float32", before=chance.choice((1, 3, 20))), case.split)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_are_those_of_each_missing_token_once_per_node(world):
    chance = random.Random(world)
    for _ in range(30):
        case, before = random_split(chance, world), chance.choice((1, 3, 20))
        calls = [halo_call(case, before, 5, 8, rank) for rank in range(world)]
        needs = []
        for rank, call in enumerate(calls):
            own = {token for start, count in call.layout.runs(rank) for token in range(start, start + count)}
            starts = [start for start, _ in call.parts[0].runs if start < case.length]
            first = {start: max(d for d in case.documents if d <= start) for start in starts}
            needed = {token for s in starts for token in range(max(first[s], s - before), s)}
            needs.append(needed - own)
            nodes_own = {
                token
                for member in range(world)
                if member // case.nodes == rank // case.nodes
                for start, count in call.layout.runs(member)
                for token in range(start, start + count)
            }
            needs[-1] = [(rank // case.nodes, token, token not in nodes_own) for token in needs[-1]]
        crossing = len({each for of_rank in needs for each in of_rank if each[2]})
        for pass_ in SENT:
            sent = [sum(call.traffic(pass_)[level] for call in calls) for level in range(len(calls[0].traffic(pass_)))]
            assert sum(sent) == 40 * sum(map(len, needs))
            assert sent[0] == 40 * (crossing if case.nodes > 1 else sum(map(len, needs)))


def test_a_halo_that_is_too_short_is_found():
    case = SplitCase("1x2", 2, "contiguous", 40, (0, 40))
    (part,) = halo_call(case, 2, 1, 4, rank=1).parts
    part.prove_tokens(1)
    with pytest.raises(ScheduleError, match=r"rank 1 fetches .* not those before its runs: \[17\]"):
        replace(part, before=3).prove_tokens(1)


# --- on ranks


def errors_on_rank(case, rank, seed, before, width):
    """The errors of halo and conv1d and of their gradients, and whether the bytes are those promised."""
    torch.manual_seed(seed)
    sequence = case.sequence()
    sp, batch, channels = sequence.sp, 2, 3
    whole = torch.randn(batch, case.length, channels, dtype=torch.float64)
    weight, bias = torch.randn(channels, width, dtype=torch.float64), torch.randn(channels, dtype=torch.float64)
    runs = sequence.document_runs
    x, x_whole = sequence.shard(whole, 1).requires_grad_(), whole.clone().requires_grad_()
    found, expected = sequence.halo(x, before), whole_halos(x_whole, case, runs, before)
    cotangent = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    (dx,) = torch.autograd.grad(found, x, cotangent)
    (own,) = torch.autograd.grad(expected, x_whole, cotangent) if runs else (torch.zeros_like(whole),)
    sent = sum(level["bytes"] for level in sp.traffic().values())
    call = halo_call(case, before, batch * channels, 8, rank)
    promised = sum(sum(call.traffic(pass_)) for pass_ in SENT)
    # each rank has the gradient of its own halos: the whole one is their sum
    total = sequence.unshard(dx, 1), own
    errors = [float((found - expected).abs().max()) if found.numel() else 0.0]

    inputs = [sequence.shard(whole, 1).mT.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    wholes = [whole.mT.clone().requires_grad_(), *(y.detach().clone().requires_grad_() for y in (weight, bias))]
    found, expected = sequence.conv1d(*inputs, "silu"), whole_conv1d(wholes[0], case, *wholes[1:], "silu")
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    grads = torch.autograd.grad(found, inputs, sequence.shard(cotangent, 2))
    exact = torch.autograd.grad(expected, wholes, cotangent)
    errors.append(worst([sequence.unshard(found, 2), sequence.unshard(grads[0], 2)], [expected, exact[0]]))
    return errors, total, [grads[1:], exact[1:]], sent == promised


@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
@pytest.mark.parametrize("world", PLANS)
def test_halos_and_convolutions_are_those_of_one_process(world, backend, monkeypatch):
    if backend == like_nccl.NAME:
        if world in (1, 6):
            pytest.skip("as on gloo")
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)
    chance = random.Random(f"{world} {backend}")
    cases = [(random_split(chance, world), chance.choice((1, 3, 20)), chance.choice((1, 2, 4, 9))) for _ in range(10)]
    cases[0] = (cases[0][0]._replace(shares=(1.0, *(0.01,) * (world - 1)), length=9, documents=(0, 9)), 2, 4)

    def on_rank(rank):
        return [errors_on_rank(case, rank, seed, *sizes) for seed, (case, *sizes) in enumerate(cases)]

    for number, of_ranks in enumerate(zip(*run_local(on_rank, world, deadline=240), strict=True)):
        case = cases[number]
        for errors, (dx, _), _, same_bytes in of_ranks:
            assert max(errors) < 1e-12 and same_bytes, case
            assert worst([dx], [sum(total[1] for _, total, _, _ in of_ranks)]) < 1e-12, case
        shares, exact = zip(*(each for _, _, each, _ in of_ranks), strict=True)
        assert worst([sum(x) for x in zip(*shares, strict=True)], exact[0]) < 1e-11, case


def test_any_dtype_and_any_dimension():
    def on_rank(rank):
        sequence, found = startrail.SequenceParallel("1x2", layout="contiguous").sequence(12), []
        for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8):
            whole = (torch.arange(24).view(2, 12) % 7 > 2).to(dtype) if dtype == torch.bool else None
            whole = torch.arange(24).view(2, 12).to(dtype) if whole is None else whole
            for x, dim in ((whole, 1), (whole.mT, 0), (whole[0], -1), (whole[:, None, :, None], 2)):
                halo = sequence.halo(sequence.shard(x, dim), before=3, dim=dim)
                expected = x.narrow(dim, 3, 3) if rank else torch.zeros_like(x.narrow(dim, 0, 3))
                found.append(halo.dtype == dtype and torch.equal(halo.squeeze(dim % x.dim()), expected))
        return found

    assert all(all(found) for found in run_local(on_rank, 2))


def test_gradients_of_any_dtype():
    """A token's gradient is the sum of those of all halos that it is in."""

    def on_rank(rank):
        sequence, found = startrail.SequenceParallel("1x3").sequence(20, [0, 11, 20]), []
        for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.complex128):
            x = torch.zeros(1, sequence.local, 2, dtype=dtype, requires_grad=True)
            halo = sequence.halo(x, before=4)
            cotangent = torch.arange(1, halo.numel() + 1).view(halo.shape).to(dtype) * (
                1 + 2j if dtype.is_complex else 1
            )
            (grad,) = torch.autograd.grad(halo, x, cotangent)
            own = torch.zeros(1, 20, 2, dtype=torch.complex128)
            for run, (start, _) in enumerate(sequence.document_runs):
                first = max(start - 4, 11 * (start >= 11))
                own[:, first:start] += cotangent[:, run, 4 - (start - first) :].to(torch.complex128)
            exact = sequence._gather(own[None], 0).sum(0).to(dtype)
            found.append(grad.dtype == dtype and torch.equal(sequence.unshard(grad, 1), exact))
        return found

    assert all(all(found) for found in run_local(on_rank, 3))


def test_what_is_not_finite_stays_in_its_document():
    """Also what the convolution computes where a rank's runs meet."""

    def on_rank(rank):
        sequence, finite = startrail.SequenceParallel("1x4", layout="zigzag").sequence(60, [0, 31, 60]), []
        for bad in (float("nan"), float("inf")):
            x = torch.randn(1, 3, 60).index_fill(2, torch.arange(31), bad)
            local = sequence.shard(x, 2).requires_grad_()
            out = sequence.conv1d(local, torch.randn(3, 4), activation="silu")
            (grad,) = torch.autograd.grad(out.sum(), local)
            finite += [bool(sequence.unshard(x, 2)[:, :, 31:].isfinite().all()) for x in (out, grad)]
        return finite

    assert run_local(on_rank, 4) == [[True] * 4] * 4


def test_low_precision_is_exact():
    """A halo is copied as it is, whatever the dtype of messages."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", wire_dtype=torch.bfloat16, layout="contiguous")
        x = torch.randn(1, 8, 1, generator=torch.Generator().manual_seed(0))
        sequence = sp.sequence(8)
        return sequence.halo(sequence.shard(x, 1), 2).flatten().tolist(), x[0, 2:4, 0].tolist()

    found, expected = run_local(on_rank, 2)[1]
    assert found == expected


def test_mistakes_raise_on_all_ranks_and_all_can_continue():
    def on_rank(rank):
        sequence = startrail.SequenceParallel("1x2", timeout=20).sequence(16, [0, 5, 16])
        x, weight = torch.randn(1, sequence.local, 2), torch.randn(2, 4)
        calls = [
            lambda: sequence.halo(x, before=2.5 if rank else 2),
            lambda: sequence.halo(x, before=0),
            lambda: sequence.halo(x, before=2 + rank),
            lambda: sequence.halo(x[:, : sequence.local - rank], before=2),
            lambda: sequence.halo(x.double() if rank else x, before=2),
            lambda: sequence.halo(x, before=2, dim=3),
            lambda: sequence.conv1d(x, weight[:1] if rank else weight, dim=1),
            lambda: sequence.conv1d(x, weight, weight, dim=1),
            lambda: sequence.conv1d(x, weight, activation="gelu", dim=1),
            lambda: sequence.conv1d(x, weight, dim=0),
            lambda: sequence.conv1d(x.long(), weight, dim=1),
            lambda: sequence.conv1d(x + 1j if rank else x, weight, dim=1),
            lambda: jvp(lambda x: sequence.conv1d(x, weight, dim=1), (x,), (x,)),
            lambda: sequence.halo(x.to(torch.float8_e4m3fn).requires_grad_(), before=2),
        ]
        texts = []
        for call in calls:
            texts.append(error_of(call))
            sequence.conv1d(x, weight, dim=1)
        return texts

    messages = [
        "rank 1: before=2.5 must be a whole number of tokens",
        "before=0 must be a whole number of tokens, at least 1",
        "ranks disagree",
        "rank 1: a tensor of shape (1, 7, 2) does not have the 8 tokens of this rank in dimension 1",
        "ranks disagree",
        "dim 3 is not a dimension",
        "rank 1: weight (1, 4) is not (channels, width) for 2 channels",
        "bias (2, 4) does not have one number for each of 2 channels",
        "activation 'gelu' is not None, silu or swish",
        "conv1d takes floating-point numbers in three dimensions, with the tokens in 1 or 2, got (1, 8, 2) float32",
        "conv1d takes floating-point numbers in three dimensions, with the tokens in 1 or 2, got (1, 8, 2) int64",
        "rank 1: conv1d takes floating-point numbers",
        "a halo has no forward-mode derivative, but an argument is a dual tensor",
        "a halo has no gradient in float8_e4m3fn: convert the tensor first",
    ]
    for texts in run_local(on_rank, 2):
        for text, message in zip(texts, messages, strict=True):
            assert text.startswith("ValueError: ") and message in text, (text, message)


def test_checkpointing_repeats_no_halo():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", layout="contiguous")
        sequence, weight = sp.sequence(16), torch.randn(2, 4, requires_grad=True)
        x = torch.randn(1, 8, 2, requires_grad=True)
        sp.reset_counters()
        out = checkpoint(
            lambda x: sequence.conv1d(x, weight, dim=1), x, use_reentrant=False,
            context_fn=startrail.checkpoint_context,
        )  # fmt: skip
        out.sum().backward()
        return sum(level["hops"] for level in sp.traffic().values())

    assert run_local(on_rank, 2) == [1, 1]
