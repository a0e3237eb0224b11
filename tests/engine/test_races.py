"""No plan has a race between streams, and no order of posts that block deadlocks (``tests/races.py``).

Covered: all plans of ``plans.py`` on 2 to 16 ranks, every rank, both passes twice, each plan with one of the masks of
``CASES`` (``make test-all``: all of them); on 4 ranks, the other kinds of calls, two streams, and kernels that are not
fused; offload. ``MUTATIONS`` are mistakes of as many kinds, which must be found.
"""

import re
from itertools import pairwise
from unittest import mock

import pytest
import torch

import startrail
from startrail.engine.buffers import BufferPool, InputPiece, StreamBuffers
from startrail.engine.exchange import Exchange
from startrail.engine.halo import prepared_halo
from startrail.engine.runner import PartRun
from startrail.engine.scan import StateType, prepared_scan
from startrail.engine.wire import Wire
from startrail.kernels.device import ints_on
from startrail.kernels.rearrange import Chunks
from startrail.offload import HostOffload
from startrail.schedule.walk import Await, Post, Walker, walk_of
from startrail.transport import nccl
from startrail.transport.interface import Together
from startrail.transport.nccl import DeviceComparison
from tests import races
from tests.engine import plans
from tests.helpers import FULL
from tests.races import Case, check_posts, trace_rank

SLICES = startrail.Mask.from_slices([(0, 96, 0, 4), (4, 20, 4, 20, True), (20, 96, 4, 96, True, True)])
CASES = [
    Case(dict(causal=True)),
    Case(dict()),
    Case(dict(causal=True, window=9)),  # fetches keys directly
    Case(dict(causal=True), (0, 5, 40, 41, 96)),  # zones
    Case(dict(mask=SLICES)),
]
UNFUSED = [
    Case(dict(window=30), (0, 50, 96), fused=False),
    Case(dict(causal=True), dtype=torch.float32, fused=False),
]


def races_of(plan, world, case, program=races.attend, ranks=None):
    """All races of these ranks, and whether their posts fit together."""
    traces = [trace_rank(plan, world, rank, case, program) for rank in ranks or range(world)]
    found = [f"rank {rank}: {text}" for rank, trace in enumerate(traces) for text in trace.races]
    return found, check_posts([trace.posts for trace in traces]) if ranks is None else None


def check(plan, world, case, program=races.attend):
    found, problem = races_of(plan, world, case, program)
    assert not found and problem is None, f"{plan} on {world} ranks, {case}: {problem}\n" + "\n".join(found[:5])


@pytest.mark.parametrize("world, half", [(2, 0), (3, 0), (4, 0), (6, 0), (8, 0), (8, 1), (9, 0), (12, 0), (16, 0)])
def test_no_plan_has_a_race_or_a_deadlock(world, half):
    for number, plan in enumerate(plan for plan in plans.every_plan(world) if plan != "auto"):
        if world != 8 or number % 2 == half:
            for case in [*CASES, *UNFUSED] if FULL else [CASES[number % len(CASES)]]:
                check(plan, world, case)


@pytest.mark.parametrize("plan", ["2x2", "u2/1x2", "star2"])
def test_without_fused_kernels(plan):
    for case in UNFUSED:
        check(plan, 4, case)


def test_fake_tensors_on_a_gpu_are_used_in_the_same_way():
    """Tensors on "meta" stand in for those of a GPU: same posts, same accesses."""
    for plan, world, case in (("2x2", 4, CASES[0]), ("u2/1x2", 4, CASES[3]), ("1x3", 3, CASES[2])):
        real, fake = (trace_rank(plan, world, 1, case._replace(fake=each)) for each in (False, True))
        assert (fake.races, fake.posts, fake.num_accesses) == ([], real.posts, real.num_accesses)


@pytest.mark.parametrize("plan, world", [("2x2", 4), ("u2/1x2", 4), ("1x4", 4)])
def test_two_streams_share_nothing_that_races(plan, world):
    for case in (CASES[0], CASES[2], CASES[3]):
        check(plan, world, case._replace(streams=2))


def backward(trace, out, *inputs):
    """Gradients by autograd, after which the program may overwrite everything."""
    dout = torch.empty_like(out)
    trace.launch("the model", [], [dout])
    grads = torch.autograd.grad(out, inputs, dout)
    trace.launch("the model", [out, *grads], [dout, *inputs])


def new(trace, *shapes, dtype=torch.bfloat16):
    made = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    trace.launch("the model", [], made)
    return [x.requires_grad_() for x in made]


def of_latents(trace, sp, case):
    sequence = sp.sequence(races.LENGTH, case.documents)
    heads, n = 4 * sp.plan.heads * sp.plan.groups, sequence.local
    own = new(trace, (2, heads, n, 12), (2, n, 16), (2, n, 4), (heads, 8, 16), (heads, 8, 16))
    backward(trace, sequence.latent_attention(*own, **case.options), *own)


def of_halos(trace, sp, case):
    """Halos as their ops know them: rows that a rank holds for others, and those that it fetches."""
    sequence = sp.sequence(races.LENGTH, case.documents)
    session, own = sp._session, (sequence._state.op_key, sp._name)
    prepared = prepared_halo(session, sequence._state.batch, torch.empty(0, 16, device="meta"), 3)
    held, grad = new(trace, (len(prepared.held), 16), (prepared.num_fetched, 16), dtype=torch.float32)
    fetched, number = torch.ops.startrail.gather_halo(held.detach(), len(grad), 3, *own, True)
    trace.launch("the model", [fetched], [held])
    returned = torch.ops.startrail.return_halo(grad.detach(), len(held), 3, number, *own)
    trace.launch("the model", [returned], [grad])


def of_scans(trace, sp, case, matrix=False):
    """Scans as their ops know them: what each run does to a state."""
    sequence = sp.sequence(races.LENGTH, case.documents)
    own = sequence._state.op_key, sp._name, "kernel"
    shape, move = ((2, 4, 8, 16), (8, 8)) if matrix else ((2, 16), ())
    kind = StateType(shape, torch.float32, torch.device("meta"), move)
    runs = len(prepared_scan(sp._session, sequence._state.batch, kind, "kernel").part.runs)
    shapes = [(runs, *shape[:2], *move), *3 * [(runs, *shape)]]
    moves, adds, before, after = (x.detach() for x in new(trace, *shapes, dtype=torch.float32))
    *states, number = torch.ops.startrail.carry_states(moves, adds, None, matrix, *own, True)
    trace.launch("the model", states, [adds])
    grads = torch.ops.startrail.carry_states_back(moves, before, after, matrix, number, *own)
    trace.launch("the model", grads, [moves, before, after])


def of_matrix_scans(trace, sp, case):
    of_scans(trace, sp, case, matrix=True)


@pytest.mark.parametrize("program", [of_latents, of_halos, of_scans, of_matrix_scans])
def test_other_kinds_of_calls(program):
    for plan, world in (("1x4", 4), ("u2/1x2", 4), ("2x2", 4)):
        for case in (CASES[0], CASES[3]):
            check(plan, world, case, program)


def offloaded(trace, sp, case):
    """Three blocks whose inputs leave the device, on a stream of their own."""
    (x,) = new(trace, (2, 16), dtype=torch.float32)
    context, y = HostOffload(), x
    for _ in range(3):
        with context:
            y = y.pow(2)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    trace.launch("the model", [grad], [x])


@pytest.fixture
def on_meta(monkeypatch):
    monkeypatch.setattr("startrail.offload._is_on_gpu", lambda x: x.device.type == "meta")


def test_offload(on_meta):
    check("1x1", 1, CASES[0], offloaded)


@pytest.mark.parametrize("plan", ["1x4", "u4", "2x2"])
def test_no_stream_that_computes_waits_until_all_ranks_have_begun_a_pass(plan):
    """The comparison of a call is an all-reduce over all ranks, which may be late. Only its reader waits for it."""

    def program(trace, sp, case):
        with mock.patch.object(races.Event, "query", return_value=False):  # nor does the host learn of its end
            races.attend(trace, sp, case)
        compared = races.of_all_ranks(trace)
        assert trace.clocks[compared][compared] > 1 and trace.clocks[races.READING][compared] > 1
        connected.append(trace.clocks[races.MAIN].get(compared))

    connected: list[int | None] = []
    check(plan, 4, CASES[0], program)
    assert set(connected) == {1}, "that of the lanes' connection, before the first pass"


# --- planted mistakes


def before(owner, name, change):
    """``change(self, ...)`` runs before a method."""

    def plant(monkeypatch):
        plain = getattr(owner, name)

        def changed(self, *arguments):
            change(self, *arguments)
            return plain(self, *arguments)

        monkeypatch.setattr(owner, name, changed)

    return plant


def instead(owner, name, function):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, function)


def forget_arrivals(exchange, *others):
    exchange.coming_bytes.arrivals = []


def forget_sends(pool, nbytes):
    for free in pool.free.values():
        for buffer in free:
            buffer.sends = []


def one_pool(pool, device):
    return pool._streams.setdefault((device, 0), StreamBuffers(device, 0))


def only_receives(messages, keys, buffers, plain=Together.of):
    made = plain(messages, keys, buffers)
    return made._replace(of_buffer=tuple((sent, () if sent else groups) for sent, groups in made.of_buffer))


def chunks_of_one_stream(wire, device):
    if not wire._places_on:
        wire._places_on[device, 0] = Chunks(ints_on(device, wire.places, torch.int64), wire.chunk)
    return wire._places_on[device, 0]


def steps_that_pass_on_at_once(walker, plain=Walker.steps):
    for step in plain(walker):
        last = max((at for at, event in enumerate(step.events) if isinstance(event, Post)), default=0)
        kept = [event for at, event in enumerate(step.events) if not isinstance(event, Await) or at > last]
        yield step._replace(events=kept)


def read_early(comparison):
    comparison.extremes = comparison.extremes.to("cpu", non_blocking=True)
    comparison._event, comparison._is_read = nccl.record_event(comparison.device), True


def only_if(condition, plain=races.Stream.wait_stream):
    return lambda stream, other: plain(stream, other) if condition(stream) else None


RING, GRID, HEADS = ("1x4", 4, CASES[0]), ("2x2", 4, CASES[0]), ("u4", 4, CASES[0])
ON_TWO_STREAMS = CASES[0]._replace(streams=2)
MUTATIONS = {  # how to plant it, where, and a part of what is found
    "a piece is used before it has arrived": (
        before(InputPiece, "arrive", lambda piece: piece.buffer and piece.buffer.arrivals.clear()),
        *RING, "flash_attention on the main stream and a receive",
    ),
    "a piece is passed on before it has arrived": (
        instead(Walker, "steps", steps_that_pass_on_at_once),
        "1x2/1x3", 6, CASES[0], "a send on NCCL's stream of 1-0 and a receive",
    ),
    "a result is merged before it has arrived": (
        before(PartRun, "combine", lambda run, event: run.partials[event[0]].arrivals.clear()),
        *GRID, "merge on the main stream and a receive",
    ),
    "tokens over heads are joined before they have arrived": (
        before(Exchange, "take_inputs", forget_arrivals), *HEADS, "rearrange on the main stream and an all-to-all",
    ),
    "results over heads are taken before they have arrived": (
        before(Exchange, "take_results", forget_arrivals), *HEADS, "rearrange on the main stream and an all-to-all",
    ),
    "a buffer is used again while it is sent": (
        before(StreamBuffers, "get", forget_sends), "4x1", 4, CASES[0], "copy_ on the main stream and a send",
    ),
    "a pass ends before its sends": (
        before(PartRun, "finish", lambda run: run.open_transfers.clear()), "1x2/2x2", 8, CASES[4], "and a send",
    ),
    "sends are not noted with their buffers": (
        instead(Together, "of", only_receives), "1x2/1x3", 6, CASES[0], "a receive on",
    ),
    "streams share buffers": (instead(BufferPool, "on", one_pool), "1x4", 4, ON_TWO_STREAMS, "stream 2"),
    "streams share indices": (
        instead(Wire, "chunks_on", chunks_of_one_stream), "u4", 4, ON_TWO_STREAMS, "is freed during rearrange",
    ),
    "a digest is copied before it is known": (
        instead(DeviceComparison, "start_read", read_early), *GRID, "_to_copy on the main stream and an all-reduce",
    ),
    "the host reads a digest before its copy has ended": (
        instead(DeviceComparison, "is_mismatch", lambda comparison: not comparison.is_same() or None),
        *GRID, "reading a digest on the host and",
    ),
}  # fmt: skip
OFFLOAD_MUTATIONS = {
    "a copy starts before its tensor is there": (
        instead(races.Stream, "wait_stream", only_if(lambda stream: stream.name == races.MAIN)), "copy_ on stream 1"
    ),
    "a tensor is used before it is back": (
        instead(races.Stream, "wait_stream", only_if(lambda stream: stream.name != races.MAIN)), "pow"
    ),
    "a tensor is freed during its copy": (
        instead(races.Trace, "record_stream", lambda *arguments: None), "is freed during"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_mistakes_are_found(name, monkeypatch):
    plant, plan, world, case, expected = MUTATIONS[name]
    assert races_of(plan, world, case, ranks=[0, 1])[0] == []
    plant(monkeypatch)
    walk_of.cache_clear()
    try:
        found, _ = races_of(plan, world, case, ranks=[0, 1])
    finally:
        walk_of.cache_clear()
    assert any(expected in each for each in found), found[:5]


@pytest.mark.parametrize("name", OFFLOAD_MUTATIONS)
def test_planted_mistakes_of_offload_are_found(name, on_meta, monkeypatch):
    plant, expected = OFFLOAD_MUTATIONS[name]
    plant(monkeypatch)
    found, _ = races_of("1x1", 1, CASES[0], offloaded)
    assert any(expected in each for each in found), found[:5]


def swapped(posts):
    """The first two neighbours on different communicators, in the other order."""
    at = next(i for i, (a, b) in enumerate(pairwise(posts)) if a.messages and b.messages and a.group != b.group)
    posts[at], posts[at + 1] = posts[at + 1], posts[at]


def shortened(posts):
    at = next(i for i, post in enumerate(posts) if post.messages)
    (send, peer, nbytes), *others = posts[at].messages
    posts[at] = posts[at]._replace(messages=((send, peer, nbytes - 1), *others))


def posted_apart(posts):
    """Each message on its own, receives first: every rank waits for one that has not sent yet."""
    at = next(i for i, post in enumerate(posts) if {send for send, *_ in post.messages} == {True, False})
    posts[at : at + 1] = [posts[at]._replace(messages=(each,)) for each in sorted(posts[at].messages)]


def without_one(posts):
    posts.remove(next(post for post in posts if not post.messages))


@pytest.mark.parametrize("change, ranks, problem", [
    (swapped, [0, 3], "wait forever"), (posted_apart, range(4), "wait forever"),
    (without_one, [1], "meets|wait forever"), (shortened, [1], "meets"),
])  # fmt: skip
def test_planted_mistakes_in_posts_are_found(change, ranks, problem):
    posts = [trace_rank("1x2/1x2", 4, rank, CASES[0]).posts for rank in range(4)]
    assert check_posts(posts) is None
    for rank in ranks:
        change(posts[rank])
    assert re.search(problem, check_posts(posts))
