"""Recurrences over split sequences: exact against one process, and only states are sent, as often as promised."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.func import jvp
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import startrail
from startrail.compile.call import compile_call
from startrail.compile.proof import prove_call
from startrail.compile.scan import SCAN_BACKWARD, SCAN_FORWARD, Scan, ScanPart
from startrail.engine.scan import CarryKernel
from startrail.kernels.elementwise import LinearRecurrence
from startrail.launch.local import run_local
from startrail.schedule.plan import Plan
from startrail.schedule.proof import ScheduleError
from startrail.transport import process_groups as groups
from startrail.view.trace import EventRecorder
from tests import like_nccl
from tests.engine.splits import PLANS, SplitCase, of_each_document, random_split, scan_of
from tests.helpers import FULL, error_of, worst

PASSES = (SCAN_FORWARD, SCAN_BACKWARD)


def delta_inputs(batch, tokens, rows=False):
    q, k = torch.randn(2, batch, tokens, 2, 5).unbind()
    g = -torch.rand(batch, tokens, 4, *([5] if rows else []))
    return [q, k, torch.randn(batch, tokens, 4, 3), g, 2 * torch.rand(batch, tokens, 4)], (4, 5, 3)


def decayed_inputs(batch, tokens):
    inputs, shape = delta_inputs(batch, tokens)
    return inputs[:4], shape


def selective_inputs(batch, tokens):
    x, b, c = (torch.randn(batch, tokens, n) for n in (4, 3, 3))
    return [x, torch.rand_like(x), -torch.rand(4, 3), b, c], (4, 3)


def linear_inputs(batch, tokens):
    return [torch.rand(batch, tokens, 6), torch.randn(batch, tokens, 6)], (6,)


KINDS = {
    "gated_delta_rule": (delta_inputs, dict(normalize=True)),
    "kimi_delta_rule": (lambda *sizes: delta_inputs(*sizes, rows=True), dict(normalize=True)),
    "decayed_attention": (decayed_inputs, dict(scale=0.7)),
    "selective_scan": (selective_inputs, {}),
    "linear_recurrence": (linear_inputs, {}),
}


@pytest.fixture(autouse=True)
def no_described_cluster(monkeypatch):
    """Otherwise its prices decide how states travel."""
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)


def calls_of(case, **states):
    problem = Scan(case.boundaries, 1, "float64", itemsize=8, **states)
    return [compile_call(problem, case.split, rank) for rank in range(case.world)]


def inner_ranks(case):
    return Plan.parse(case.plan).sizes(case.world)[-1]


# --- programs


@pytest.mark.parametrize("world", PLANS)
def test_every_run_gets_the_state_of_all_runs_before_it(world):
    chance = random.Random(world)
    for _ in range(80):
        case, units = random_split(chance, world), chance.choice((1, 3, 8))
        for inner in {1, inner_ranks(case)}:
            prove_call(
                Scan(case.boundaries, 1, features=2 * units, units=units, effect=5 * units, inner=inner), case.split
            )


def changes_of_owner(case, calls):
    """Where a document goes on at another rank, as (rank, rank)."""
    owner = {t: rank for rank, call in enumerate(calls) for s, n in call.layout.runs(rank) for t in range(s, s + n)}
    pairs = [(owner[t - 1], owner[t]) for a, b in of_each_document(case) for t in range(a + 1, b)]
    return [pair for pair in pairs if pair[0] != pair[1]]


@pytest.mark.parametrize("world", PLANS)
def test_a_state_is_sent_wherever_a_document_goes_on_at_another_rank(world):
    chance = random.Random(100 + world)
    for _ in range(50):
        case = random_split(chance, world)
        calls = calls_of(case, features=7, inner=1)
        changes = changes_of_owner(case, calls)
        nodes = [(a // case.nodes, b // case.nodes) for a, b in changes]  # on one level, a rank is a node
        for pass_ in PASSES:
            sent = [call.traffic(pass_) for call in calls]
            assert sum(map(sum, sent)) == 56 * sum(a != b for a, b in changes)
            assert sum(level[0] for level in sent) == 56 * sum(
                a != b for a, b in (nodes if case.nodes > 1 else changes)
            )


@pytest.mark.parametrize("world", [4, 6, 8])
def test_ranks_that_share_units_send_as_much_between_nodes_and_only_effects_and_entries_inside(world):
    chance = random.Random(200 + world)
    for _ in range(50):
        case = random_split(chance, world)
        inner, units = inner_ranks(case), chance.choice((1, 3, 8))
        calls = calls_of(case, features=2 * units, units=units, effect=5 * units, inner=inner)
        changes = changes_of_owner(case, calls)
        crossing = sum(a // inner != b // inner for a, b in changes)
        runs = [
            sum(part.table.of_ranks[rank][n][1] > 0 for n in part.table.shared_runs(rank)) for part, rank in of(calls)
        ]
        lonely = sum(runs[rank] * (units - len(part.table.units_of(rank))) for part, rank in of(calls))
        for pass_ in PASSES:
            assert sum(sum(call.traffic(pass_)) for call in calls) == 8 * (2 * units * crossing + 7 * lonely)


def of(calls):
    return [(call.parts[0], call.rank) for call in calls]


@pytest.mark.parametrize("inner", [1, 8])
def test_one_state_each_way_crosses_a_link_between_nodes(inner):
    """Of a document over all ranks: with zigzag it leaves each node and comes back, contiguous shards pass it once."""
    for layout, crossings in (("zigzag", 2), ("contiguous", 1)):
        case = SplitCase("1x4/1x8", 32, layout, 4096, (0, 4096))
        calls = calls_of(case, features=320, units=32, effect=640, inner=inner)
        for pass_ in PASSES:
            by_node = [sum(call.traffic(pass_)[0] for call in calls[node : node + 8]) for node in range(0, 32, 8)]
            assert sum(by_node) == 3 * crossings * 2560 and max(by_node) == crossings * 2560


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("plan", ["1x4/1x4", "4x1/u4", "2x2/1x2/1x2", "1x2/2x2/u2", "u4/1x4", "u2/1x2/1x2"])
def test_a_link_between_nodes_carries_at_most_two_states_of_a_document(plan, windows):
    """Each way, if neighbouring tokens are on one node: with any rings over nodes, else with ``windows``."""
    if plan.startswith("u") and not windows:
        pytest.skip("a document leaves such nodes more often")
    world, most, nodes = Plan.parse(plan).size, 0, Plan.parse(plan).sizes(Plan.parse(plan).size)[0]
    chance = random.Random(plan)
    for _ in range(60):
        case = random_split(chance, world, plan=plan)
        split = replace(case.split, in_rank_order=windows)
        (part,) = compile_call(Scan(case.boundaries, 1, inner=1), split, 0).parts
        for chain in part.table.chains:
            hops = [(a.rank // case.nodes, b.rank // case.nodes) for a, b in pairwise(chain)]
            ends = [Counter(node) for node in zip(*((a, b) for a, b in hops if a != b), strict=True)]
            most = max(most, *(count for of_nodes in ends for count in of_nodes.values()), 0)
    assert most == min(2, nodes - 1)


def test_ranks_share_units_only_where_that_saves_hops():
    whole, short = (0, 4096), tuple(range(0, 4097, 64))
    plans = {"1x4/1x8": 8, "1x32": 1, "1x16/1x2": 2, "u4/1x8": 1}
    for plan, inner in plans.items():
        assert calls_of(SplitCase(plan, 32, "zigzag", 4096, whole))[0].parts[0].table.inner == inner
    assert calls_of(SplitCase("1x4/1x8", 32, "contiguous", 4096, short))[0].parts[0].table.inner == 1


def test_documents_inside_ranks_send_nothing_and_open_no_lanes():
    calls = calls_of(SplitCase("1x2/1x2", 4, "zones", 64, tuple(range(0, 65, 4))))
    for call in calls:
        (part,) = call.parts
        assert part.demand_level is None and not any(sum(call.traffic(pass_)) for pass_ in PASSES)


def in_another_run(part, pass_, program):
    """Messages carry the state of the rank's other run."""
    bundles = {}
    for number, bundle in program.bundles.items():
        sources = tuple(
            each._replace(start=(each.start + part.sizes.local // 2) % part.sizes.local) for each in bundle.sources
        )
        bundles[number] = bundle._replace(sources=sources)
    return replace(program, bundles=bundles)


def too_early(part, pass_, program):
    """The state is sent before the one that it needs has arrived."""
    first, *others = program.steps
    return replace(program, steps=(first, *reversed(others)))


def left_out(part, pass_, program):
    """A message arrives, but no run takes it."""
    return replace(program, steps=tuple(step._replace(blocks=step.blocks[:0]) for step in program.steps))


@pytest.mark.parametrize("plan", ["1x3", "1x2/1x2"])
@pytest.mark.parametrize("wrong", [in_another_run, too_early, left_out])
def test_wrong_chains_are_found(wrong, plan, monkeypatch):
    right, case = ScanPart._program, SplitCase(plan, 4 if "/" in plan else 3, "zigzag", 48, (0, 48))
    monkeypatch.setattr(ScanPart, "_program", lambda part, pass_: wrong(part, pass_, right(part, pass_)))
    with pytest.raises(ScheduleError, match="gets the states of"):
        prove_call(Scan(case.boundaries, 1, features=2, units=2, effect=4), case.split)


# --- on ranks


def one_process(case, kernel, inputs, options, states):
    """Outputs, and the state after each document."""
    outs, after = [], []
    for number, (start, stop) in enumerate(of_each_document(case)):
        of_document = [x if x.dim() == 2 else x[:, start:stop] for x in inputs]
        out, state = kernel(*of_document, **options).run(states[:, number : number + 1])
        outs.append(out)
        after.append(state)
    return torch.cat(outs, 1), torch.cat(after, 1)


def results_on_rank(case, kind, seed, dtype=torch.float64):
    """Outputs, final states and gradients, each whole: those of this rank's sequence and those of one process."""
    torch.manual_seed(seed)
    sequence = case.sequence()
    make, options = KINDS[kind]
    kernel, batch, documents = getattr(startrail, kind), 2, len(case.documents) - 1
    inputs, shape = make(batch, case.length)
    states = torch.randn(batch, documents, *shape)
    whole = [x.double().requires_grad_() for x in (*inputs, states)]
    expected = one_process(case, kernel, whole[:-1], options, whole[-1])
    cotangents = [torch.randn(x.shape, dtype=torch.float64) for x in expected]
    exact = torch.autograd.grad(expected, whole, cotangents)
    given = [x.to(dtype) for x in (*inputs, states)]
    local = [(x if x.dim() == 2 or x is given[-1] else sequence.shard(x, 1)).requires_grad_() for x in given]
    sp = sequence.sp
    sp.reset_counters()
    out = sequence.scan(kernel, *local[:-1], initial_state=local[-1], **options)
    torch.autograd.grad(out, local, sequence.shard(cotangents[0].to(out.dtype), 1))
    sent = sum(level["bytes"] for level in sp.traffic().values())
    itemsize = torch.promote_types(dtype, torch.float32).itemsize
    call = compile_call(scan_of(case.boundaries, kind, batch, shape, itemsize), case.split, sp.rank)
    same_bytes = sent == sum(sum(call.traffic(pass_)) for pass_ in PASSES)
    out_again, final = sequence.scan(kernel, *local[:-1], initial_state=local[-1], output_final_state=True, **options)
    shares = [sequence.shard(cotangents[0].to(out.dtype), 1), cotangents[1].to(final.dtype) / sequence.sp.world]
    grads = torch.autograd.grad((out_again, final), local, shares)
    found = [sequence.unshard(out, 1), final]
    wholes = []
    for x, grad in zip(given, grads, strict=True):
        is_share = x.dim() == 2 or x is given[-1]
        wholes.append((True, grad) if is_share else (False, sequence.unshard(grad, 1)))
    return found, wholes, [x.detach() for x in expected], exact, same_bytes


def check(case, of_ranks, allowed):
    """``allowed``: the largest error, as a part of each result's largest number."""
    for found, wholes, expected, exact, same_bytes in of_ranks:
        assert same_bytes, case
        pairs = list(zip(found, expected, strict=True))
        pairs += [(grad, truth) for (is_share, grad), truth in zip(wholes, exact, strict=True) if not is_share]
        for ours, truth in pairs:
            assert worst([ours], [truth]) <= allowed * max(1.0, truth.abs().max().item()), case
    for number, truth in enumerate(of_ranks[0][3]):
        if of_ranks[0][1][number][0]:
            total = sum(wholes[number][1] for _, wholes, *_ in of_ranks)
            assert worst([total], [truth]) <= allowed * max(1.0, truth.abs().max().item()), case


@pytest.mark.parametrize("backend", ["gloo", like_nccl.NAME])
@pytest.mark.parametrize("world", PLANS)
def test_recurrences_are_those_of_one_process(world, backend, monkeypatch):
    monkeypatch.setenv("STARTRAIL_CLUSTER", "")  # hops decide, so that both ways of sending states run
    if backend == like_nccl.NAME:
        if world in (1, 6):
            pytest.skip("as on gloo")
        like_nccl.register()
        monkeypatch.setattr(groups, "backend_for", lambda device: backend)
    chance = random.Random(f"{world} {backend}")
    cases = [(random_split(chance, world), kind) for kind in KINDS for _ in range(2 if world < 4 else 3)]

    def on_rank(rank):
        return [results_on_rank(case, kind, seed) for seed, (case, kind) in enumerate(cases)]

    for (case, kind), *of_ranks in zip(cases, *run_local(on_rank, world, deadline=240), strict=True):
        check((case, kind), of_ranks, 1e-11)


# --- mistakes, compiled and repeated calls


class Squared(LinearRecurrence):
    """Forgets that states add up."""

    def run(self, state=None):
        return super().run(None if state is None else state**2)


def squared(a, b, *, lengths):
    return Squared(a, b, lengths)


def without_state(q, *others, lengths):
    return q


def stateless(q, k, v, **options):
    return v, None


def test_mistakes_raise_on_all_ranks_and_all_can_continue():
    def on_rank(rank):
        sequence = startrail.SequenceParallel("1x2", timeout=20).sequence(16, [0, 5, 16])
        inputs, shape = delta_inputs(1, sequence.local)
        q, k, v, g, beta = inputs

        def scan(*tensors, kernel=startrail.gated_delta_rule, **options):
            return lambda: sequence.scan(kernel, *tensors, **options)

        calls = {
            "without_state returned Tensor, without states: a kernel must return": scan(q, kernel=without_state),
            "scaled_dot_product_attention rejects its arguments": scan(q, k, v, kernel=sdpa),
            "gated_delta_rule rejects its arguments: gated_delta_rule() missing 1 required": scan(q, k, v, g),
            "unexpected keyword argument 'colour'": scan(*inputs, colour=3),
            "squared is not a linear recurrence: the state after a run": scan(v[..., 0].abs(), g, kernel=squared),
            "rank 1: g is a decay's logarithm, at most 0, but has": scan(q, k, v, -g if rank else g, beta),
            "rank 1: g has shape (1, 8, 3), expected (1, 8, 4)": scan(q, k, v, g[:, :, : 4 - rank], beta),
            "q (2, 8, 2, 5), k (1, 8, 2, 5)": scan(q.expand(2, -1, -1, -1), k, v, g, beta),
            "states of 120 numbers": scan(*(x.expand(1 + rank, *x.shape[1:]) for x in inputs)),
            "ranks disagree about one attention call": scan(*(x.double() if rank else x for x in inputs)),
            "gated_delta_rule normalize=True,": scan(*inputs, normalize=bool(rank)),
            "gated_delta_rule final state,": scan(*inputs, output_final_state=bool(rank)),
            "initial_state (1, 1, 4, 5, 3) must hold a state for each of 2 documents": scan(
                *inputs, initial_state=torch.zeros(1, 1, *shape)
            ),
            "initial_state int must hold a state": scan(*inputs, initial_state=3),
            "does not have the 8 tokens of this rank": scan(*(x[:, 1:] for x in inputs)),
            "gated_delta_rule needs tensors, got none": scan(),
            "recurrences take floating-point numbers, got int64": scan(*(x.long() for x in inputs)),
            "rank 1: recurrences take floating-point numbers, got complex64": scan(
                *(x + 0j if rank else x for x in inputs)
            ),
            "initial_state must have floating-point numbers, got (1, 2, 4, 5, 3) int64": scan(
                *inputs, initial_state=torch.zeros(1, 2, *shape, dtype=torch.int64)
            ),
            "gated_delta_rule scale=0.5,": scan(*inputs, kernel=partial(startrail.gated_delta_rule, scale=0.5 + rank)),
            "rank 1: stateless does not return (outputs, states": scan(*inputs, function=stateless if rank else None),
            "only some need gradients": scan(q.clone().requires_grad_(bool(rank)), *inputs[1:]),
        }
        found = {}
        for message, call in calls.items():
            found[message] = error_of(call)
            sequence.scan(startrail.gated_delta_rule, *inputs)
        forward_mode = error_of(lambda: jvp(lambda v: scan(q, k, v, g, beta)(), (v,), (v,)))
        found["gated_delta_rule has no forward-mode derivative"] = forward_mode
        return found

    for texts in run_local(on_rank, 2):
        for message, text in texts.items():
            assert text.startswith("ValueError: ") and message in text and "\n" not in text, (message, text)


def test_checkpointing_and_compiling_repeat_nothing_and_change_nothing():
    """Hops of both passes, and all gradients. With ``final``, states of all documents are gathered as well."""
    kernel = startrail.gated_delta_rule

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", layout="contiguous")
        torch.manual_seed(rank)
        found = []
        for documents in ([0, 16], [0, 8, 16], [0, 5, 16]):
            sequence = sp.sequence(16, documents)
            inputs, _ = delta_inputs(1, 8)
            weight = torch.randn(4, 2, requires_grad=True)
            local = [x.requires_grad_() for x in inputs]

            def layer(q, k, v, g, beta, sequence=sequence, weight=weight):
                g = -sequence.conv1d(g, weight, activation="silu", dim=1).abs()
                return sequence.scan(kernel, q, k, v, g, beta, normalize=True).square()

            kept = partial(checkpoint, layer, use_reentrant=False, context_fn=startrail.checkpoint_context)
            results = []
            compiled = [torch.compile(layer, backend="aot_eager")] if FULL or documents[1] == 5 else []
            for run in (layer, kept, *compiled):
                sp.reset_counters()
                out = run(*local)
                grads = torch.autograd.grad(out.sum(), [*local, weight])
                hops = sum(level["hops"] for level in sp.traffic().values())
                results.append((hops, [out.detach(), *grads]))
            for hops, tensors in results[1:]:
                found.append((hops == results[0][0], worst(tensors, [x.double() for x in results[0][1]])))
        return found

    for of_rank in run_local(on_rank, 2, deadline=240):
        assert all(same and error < 1e-6 for same, error in of_rank), of_rank


@pytest.mark.parametrize("place", ["before", "kernel", "carry", "backward"])
def test_all_ranks_recover_from_an_error_in_the_middle_of_a_scan(place):
    """Rank 1 fails while the others wait for its states: all raise, and the next steps are right on all."""
    right = CarryKernel.block

    def on_rank(rank):
        sp, texts = startrail.SequenceParallel("1x3", timeout=3), []
        torch.manual_seed(0)
        inputs, _ = delta_inputs(1, 24)
        whole = [x.double().requires_grad_() for x in inputs]
        expected = startrail.gated_delta_rule(*whole, normalize=True).run()[0]
        exact = torch.autograd.grad(expected.square().sum(), whole)
        broken = False

        def block(self, *arguments):
            is_backward = not arguments[0].program.pass_.is_forward
            if broken and (place == "carry" or (place == "backward" and is_backward)):
                raise BrokenError("planted")
            return right(self, *arguments)

        CarryKernel.block = block
        for step in range(5):
            dist.barrier()
            broken = rank == 1 and step == 1
            try:
                if broken and place == "before":
                    raise BrokenError("planted")
                sequence = sp.sequence(24)
                local = [sequence.shard(x.detach(), 1).requires_grad_() for x in whole]
                kernel = failing if broken and place == "kernel" else startrail.gated_delta_rule
                out = sequence.scan(kernel, *local, normalize=True)
                grads = torch.autograd.grad(out.square().sum(), local)
                error = worst([out, *grads], [sequence.shard(x, 1) for x in (expected, *exact)])
                texts.append("right" if error < 1e-10 else f"wrong {error}")
            except (BrokenError, ValueError, startrail.PeerError) as error:
                texts.append(type(error).__name__)
        return texts

    for rank, texts in enumerate(run_local(on_rank, 3, deadline=120)):
        assert texts[0] == "right" and texts[2:] == ["right"] * 3, (rank, texts)
        assert texts[1] in (["BrokenError"] if rank == 1 else ["PeerError", "ValueError", "right"]), (rank, texts)


class BrokenError(Exception):
    pass


def failing(*tensors, **options):
    raise BrokenError("planted")


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_choose_their_precision_under_autocast(kind):
    torch.manual_seed(0)
    sequence = startrail.SequenceParallel("1x1").sequence(100, [0, 30, 100])
    make, options = KINDS[kind]
    inputs = [x.requires_grad_() for x in make(1, 100)[0]]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = sequence.scan(getattr(startrail, kind), *inputs, **options)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_traces_have_both_ends_of_every_message():
    def on_rank(rank):
        sp, recorder = startrail.SequenceParallel("1x2/1x2"), EventRecorder(rank)
        sequence = sp.sequence(64, [0, 20, 64])
        sp.on_event(recorder)
        inputs = [x.requires_grad_() for x in delta_inputs(1, sequence.local)[0]]
        values = sequence.conv1d(inputs[2].flatten(2), torch.randn(12, 4), dim=1).view_as(inputs[2])
        sequence.scan(startrail.gated_delta_rule, *inputs[:2], values, *inputs[3:]).sum().backward()
        return recorder.records

    records = [record for of_rank in run_local(on_rank, 4) for record in of_rank]
    assert {record.pass_ for record in records} == {
        f"{kind} {way}" for kind in ("halo", "scan") for way in ("forward", "backward")
    }
    sent = sorted(name for record in records for name in record.posts)
    arrived = sorted(name for record in records for name in record.arrivals)
    assert sent == arrived and len(set(sent)) == len(sent) > 20
