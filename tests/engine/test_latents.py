"""Latent attention: keys and values that travel as latents, against one process that expands them, in float64."""

import itertools
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import startrail
from startrail.compile.latents import LatentSizes
from startrail.engine import latents
from startrail.engine.arguments import read_latent_call
from startrail.kernels import base
from startrail.launch.local import run_local
from startrail.planner.expanding import Expanding
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.transport import nccl
from startrail.transport import process_groups as groups
from tests import like_nccl
from tests.engine import plans
from tests.helpers import FULL, LiveBytes, document_numbers, error_of, gradient_mistakes
from tests.lazy_stream import LazyEvent, LazyStream

KEY, ROPE, VALUE, RANK = 8, 4, 6, 16
NAMES = ("q", "latent", "k_rope", "w_k", "w_v")
DIMS = (2, 1, 1, None, None)  # of their tokens

# Masks, documents and dtypes. A window in float64 on contiguous tokens fetches keys on demand.
SHAPES = [
    dict(length=101, causal=True),
    dict(length=64, causal=False, batch=1, scale=0.7),
    dict(length=120, causal=True, window=9, layout="contiguous"),
    dict(length=130, causal=True, documents=(0, 3, 40, 41, 100, 130)),
    dict(length=77, causal=True, chunk=16, dtype=torch.float32),
    dict(length=96, causal=False, window=20, documents=(0, 50, 96), dtype=torch.float32, batch=1),
]
ALLOWED = {torch.float64: 1e-11, torch.float32: 1e-4}  # of the root mean square


def make_inputs(length, heads=8, batch=2, dtype=torch.float64, seed=0, rope=ROPE):
    """The whole q, latent, k_rope, w_k, w_v, and a cotangent of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, KEY + rope), (batch, length, RANK), (batch, length, rope)]
    shapes += [(heads, KEY, RANK), (heads, VALUE, RANK), (batch, heads, length, VALUE)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def one_process(inputs, dout, mask, scale=None, **_):
    """out and the gradients of all inputs, in float64."""
    inputs = [x.double().requires_grad_() for x in inputs]
    q, latent, k_rope, w_k, w_v = inputs
    k = torch.cat((torch.einsum("btr,hdr->bhtd", latent, w_k), k_rope.unsqueeze(1).expand(-1, q.shape[1], -1, -1)), -1)
    v = torch.einsum("btr,hdr->bhtd", latent, w_v)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.double())]


def visible(length, causal, window=None, chunk=None, documents=None, **_):
    """(length, length) True where a query (row) sees a key (column)."""
    at = torch.arange(length)
    apart = at.unsqueeze(1) - at
    seen = document_numbers(length, documents).unsqueeze(1) == document_numbers(length, documents)
    seen &= apart >= 0 if causal else True
    seen &= apart.abs() < (window or length + 1)
    return seen & (at.unsqueeze(1) // (chunk or length) == at // (chunk or length))


def sharded(sequence, tensors, dims=DIMS):
    return [x.clone() if dim is None else sequence.shard(x, dim) for x, dim in zip(tensors, dims, strict=True)]


def mistakes(sequence, inputs, dout, truth, call=None, **options):
    """What is wrong with one call on this rank; its inputs, for more calls."""
    own = [x.requires_grad_() for x in sharded(sequence, inputs)]
    (share,) = sharded(sequence, [dout], [2])
    out = (call or sequence.latent_attention)(*own, **options)
    grads = list(torch.autograd.grad(out, own, share))
    for weight in grads[3:]:  # this rank's share
        dist.all_reduce(weight)
    expected = sharded(sequence, truth, (2, *DIMS))
    real = sequence.shard(torch.ones(sequence.length), 0)  # not padding
    found = []
    for name, mine, true, dim in zip(("out", *NAMES), (out.detach(), *grads), expected, (2, *DIMS), strict=True):
        if dim is not None:
            mine, true = (x.movedim(dim, -1) * real for x in (mine, true))
        if true.numel():  # k_rope may have no width
            found += gradient_mistakes({name: mine}, {name: true}, ALLOWED[out.dtype], least=1e-3)
    return found, own


def check_plan(plan, shape, seed):
    """A line for everything that is wrong on this rank."""
    shape = dict(batch=2, dtype=torch.float64, window=None, chunk=None) | shape
    options = {name: shape[name] for name in ("causal", "window", "chunk")} | {"scale": shape.get("scale")}
    heads = 12 if plan != "auto" and 12 % Plan.parse(plan).heads == 0 else 8
    if plan != "auto" and shape["batch"] % (parsed := Plan.parse(plan)).groups:
        heads = 4 * parsed.heads * parsed.groups  # groups split the heads of a batch of one
    *inputs, dout = make_inputs(shape["length"], heads, shape["batch"], shape["dtype"], seed)
    truth = one_process(inputs, dout, visible(**shape), shape.get("scale"))
    named = dict(heads=heads) if plan == "auto" else {}
    sp = startrail.SequenceParallel(plan, layout=shape.get("layout", "zones"), timeout=60, **named)
    sequence = sp.sequence(shape["length"], shape.get("documents"))
    found, own = mistakes(sequence, inputs, dout, truth, **options)
    del options["scale"]
    passes = sequence.promised_traffic(*own, **options).values()
    promised = {name: sum(levels.get(name, 0) for levels in passes) for name in {n for p in passes for n in p}}
    sent = {name: lane["bytes"] for name, lane in sp.traffic().items() if lane["bytes"]}
    if sent != promised:
        found.append(f"sent {sent}, promised {promised}")
    return [f"{plan} {shape}: {line}" for line in found]


def run(world, cases):
    def on_rank(rank):
        return [line for seed, (plan, shape) in enumerate(cases) for line in check_plan(plan, SHAPES[shape], seed)]

    assert run_local(on_rank, world, deadline=600) == [[]] * world


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_plan_is_exact(world):
    """Plans with heads at any level, stars, kept pieces, groups, queries that travel back, heads exchanged twice."""
    run(world, cases(world))


def cases(world):
    """(plan, index of a shape): every plan with one or two shapes, all of them in ``make test-all``."""
    every, shapes = plans.every_plan(world), range(len(SHAPES))
    if FULL:
        return list(itertools.product(every, shapes))
    found = [(plan, (number + step) % len(SHAPES)) for number, plan in enumerate(every) for step in (0, 3)]
    return found if world <= 4 else found[::2]


@pytest.mark.parametrize("world", [2, 4, 8] if FULL else [2, 4])
def test_every_plan_is_exact_on_a_backend_like_nccl(world, monkeypatch):
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)
    monkeypatch.setattr(nccl, "record_event", lambda device: LazyEvent())

    def on_rank(rank):
        with LazyStream() if world == 2 else nullcontext():
            chosen = [case for case in cases(world)[1::2] if case[0] != "auto"]
            return [line for seed, (plan, n) in enumerate(chosen) for line in check_plan(plan, SHAPES[n], seed)]

    assert run_local(on_rank, world, deadline=600) == [[]] * world


def test_windows_run_direct_and_documents_in_zones():
    """Otherwise the shapes above would not cover these."""

    def on_rank(rank):
        chosen = []
        for shape in (SHAPES[2], SHAPES[3]):
            sp = startrail.SequenceParallel("1x2/1x2", layout=shape.get("layout", "zones"))
            sequence = sp.sequence(shape["length"], shape.get("documents"))
            own = sharded(sequence, make_inputs(shape["length"])[:5])
            chosen.append([str(part.chosen) for part in sequence.compiled(*own, causal=True, window=9).parts])
        return chosen

    found = run_local(on_rank, 4)
    assert all(window == ["direct"] for window, _ in found)
    assert any(len(zones) > 1 for _, zones in found)


def test_masks_of_slices_and_unequal_shares():
    mask = startrail.Mask.from_slices([(0, 60, 0, 30), (10, 60, 30, 60, 1), (60, 90, 0, 10), (60, 90, 50, 90, 1)])
    seen = torch.zeros(90, 90, dtype=torch.bool)
    for q0, q1, k0, k1, causal in ((0, 60, 0, 30, 0), (10, 60, 30, 60, 1), (60, 90, 0, 10, 0), (60, 90, 50, 90, 1)):
        rows, keys = torch.arange(q0, q1).unsqueeze(1), torch.arange(k0, k1)
        seen[q0:q1, k0:k1] |= keys - k1 <= rows - q1 if causal else True
    *inputs, dout = make_inputs(90)
    truths = {causal: one_process(inputs, dout, visible(90, True) if causal else seen) for causal in (True, False)}

    def on_rank(rank):
        found = []
        for plan in ("1x4", "u2/1x2", "1x2/u2"):
            sp = startrail.SequenceParallel(plan)
            found += mistakes(sp.sequence(90), inputs, dout, truths[False], mask=mask)[0]
            shares = (1, 1, 0.5, 0.25)
            found += mistakes(sp.sequence(90, shares=shares), inputs, dout, truths[True], causal=True)[0]
        return found

    assert run_local(on_rank, 4) == [[]] * 4


@pytest.mark.parametrize("cluster", [None, "lab@1x4"])
def test_a_rank_of_a_small_share_may_hold_no_token(cluster, monkeypatch):
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)
    monkeypatch.setattr(Expanding, "first", lambda self, plan, call: True)
    *inputs, dout = make_inputs(9)
    truth = one_process(inputs, dout, visible(9, True))

    def on_rank(rank):
        found, local = [], []
        for plan in ("1x4", "2x2,keep=all", "4x1"):
            sequence = startrail.SequenceParallel(plan, cluster=cluster).sequence(9, shares=(1, 0.01, 1, 1))
            found += mistakes(sequence, inputs, dout, truth, causal=True)[0]
            local.append(sequence.local)
        return found, local

    results = run_local(on_rank, 4)
    assert [found for found, _ in results] == [[]] * 4
    assert 0 in results[1][1], "otherwise this tests nothing"


def test_hidden_states_travel_as_latents_without_a_rotary_part():
    """A plain model without rotary embeddings sends its hidden states, half as wide as its keys and values."""
    *inputs, dout = make_inputs(96, rope=0)
    truth = one_process(inputs, dout, visible(96, True))

    def on_rank(rank):
        found = []
        for plan in ("1x4", "2x2,keep=all", "u2/1x2"):
            sp = startrail.SequenceParallel(plan)
            found += mistakes(sp.sequence(96), inputs, dout, truth, causal=True)[0]
            assert sp.sizes(*inputs).nbytes("kv") == 2 * 96 * (2 if "u2" in plan else 1) * RANK * 8
        return found

    assert run_local(on_rank, 4) == [[]] * 4


@pytest.mark.parametrize("plan, share", [("1x4", 2 / 3), ("1x2/1x2", 1 / 2)])
def test_a_narrow_wire_rounds_what_travels_and_nothing_else(plan, share):
    """Float32 inputs, messages in bfloat16. Outputs, dq and the weights' gradients, which do not travel, are those of
    the rounded inputs. Gradients of latents are sums of rounded numbers, but in a plain ring the sums travel in
    float32."""
    inputs = make_inputs(96, dtype=torch.float32)
    q, latent, k_rope, dout = (inputs[at].bfloat16().float() for at in (0, 1, 2, 5))
    truth = one_process([q, latent, k_rope, *inputs[3:5]], dout, visible(96, True))

    def on_rank(rank):
        wrong, sent = [], []
        for wire in (None, torch.bfloat16):
            sp = startrail.SequenceParallel(plan, wire_dtype=wire)
            sequence = sp.sequence(96)
            own = [x.requires_grad_() for x in sharded(sequence, inputs[:5])]
            out = sequence.latent_attention(*own, causal=True)
            grads = list(torch.autograd.grad(out, own, sequence.shard(inputs[5], 2)))
            for weight in grads[3:]:
                dist.all_reduce(weight)
            promised = sum(sum(levels.values()) for levels in sequence.promised_traffic(*own, causal=True).values())
            sent.append((sum(lane["bytes"] for lane in sp.traffic().values()), promised))
            found = zip((out.detach(), *grads), sharded(sequence, truth, (2, *DIMS)), strict=True)
            wrong = [((mine - true).norm() / true.norm()).item() for mine, true in found]
        return wrong, sent

    for wrong, ((wide, _), (narrow, promised)) in run_local(on_rank, 4):
        out, dq, d_latent, d_rope, dw_k, dw_v = wrong
        assert max(out, dq, dw_k, dw_v) < 1e-5
        low, high = (0, 1e-5) if plan == "1x4" else (1e-4, 5e-3)
        assert low < min(d_latent, d_rope) <= max(d_latent, d_rope) < high
        assert narrow == promised == pytest.approx(share * wide)


@pytest.mark.parametrize("plan", ["u2/1x2", "2x2"])
def test_narrow_inputs_are_as_exact_as_their_rounding(plan):
    """In bfloat16 the output is as close to the truth as one process that computes in bfloat16, within a factor."""
    *inputs, dout = make_inputs(128, dtype=torch.bfloat16)
    truth = one_process(inputs, dout, visible(128, True))
    q, latent, k_rope, w_k, w_v = own = [x.clone().requires_grad_() for x in inputs]
    k = torch.cat((torch.einsum("btr,hdr->bhtd", latent, w_k), k_rope.unsqueeze(1).expand(-1, 8, -1, -1)), -1)
    out = F.scaled_dot_product_attention(q, k, torch.einsum("btr,hdr->bhtd", latent, w_v), is_causal=True)
    alone = [out.detach(), *torch.autograd.grad(out, own, dout)]

    def error(mine, true):
        return ((mine.double() - true).norm() / true.norm()).item()

    def on_rank(rank):
        sequence = startrail.SequenceParallel(plan).sequence(128)
        own = [x.requires_grad_() for x in sharded(sequence, inputs)]
        out = sequence.latent_attention(*own, causal=True)
        grads = list(torch.autograd.grad(out, own, sequence.shard(dout, 2)))
        for weight in grads[3:]:
            dist.all_reduce(weight)
        expected = sharded(sequence, truth, (2, *DIMS))
        return [error(mine, true) for mine, true in zip((out.detach(), *grads), expected, strict=True)]

    for errors in run_local(on_rank, 4):
        for name, mine, theirs in zip(("out", *NAMES), errors, map(error, alone, truth), strict=True):
            assert mine < 2 * theirs, name


def test_lse_sinks_softcap_and_largest_logits_are_those_of_expanded_keys():
    """``latent_attention`` is ``attention`` of the expanded keys, with all its options."""
    *inputs, dout = make_inputs(60)
    sinks = torch.randn(8, dtype=torch.float64)

    def on_rank(rank):
        sequence = startrail.SequenceParallel("u2/1x2").sequence(60)
        own = [x.requires_grad_() for x in (*sharded(sequence, inputs), sinks.clone())]
        q, latent, k_rope, w_k, w_v, sink = own
        options = dict(sinks=sink, softcap=3.0, causal=True, return_lse=True, return_largest=True)
        rope = k_rope.unsqueeze(1).expand(-1, 8, -1, -1)
        k = torch.cat((torch.einsum("btr,hdr->bhtd", latent, w_k), rope), -1)
        results = [
            sequence.attention(q, k, torch.einsum("btr,hdr->bhtd", latent, w_v), **options),
            sequence.latent_attention(q, latent, k_rope, w_k, w_v, **options),
        ]
        found = []
        for out, lse, largest in results:
            loss = (out * sequence.shard(dout, 2)).sum() + lse.square().sum()
            grads = list(torch.autograd.grad(loss, own))
            for weight in grads[3:]:
                dist.all_reduce(weight)
            found.append([out.detach(), lse.detach(), largest, *grads])
        return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))

    assert max(run_local(on_rank, 4)) < 1e-11


def test_compiled_checkpointed_and_checked_by_torch():
    *inputs, dout = make_inputs(64)
    truth = one_process(inputs, dout, visible(64, True))

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2")
        sequence = sp.sequence(64)

        def layer(*own, **options):
            return sequence.latent_attention(*(x * 1.0 for x in own), **options) * 1.0

        def checkpointed(*own, **options):
            context = startrail.checkpoint_context
            return checkpoint(layer, *own, use_reentrant=False, context_fn=context, **options)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        found, traffic = [], []
        for call in (layer, checkpointed, compiled):
            sp.reset_counters()
            found += mistakes(sequence, inputs, dout, truth, call, causal=True)[0]
            traffic.append(sp.traffic())
        assert traffic[0] == traffic[1] == traffic[2], "the distributed forward pass was repeated"
        return found

    assert run_local(on_rank, 4) == [[]] * 4
    sp = startrail.SequenceParallel("1x1")
    own = [x.requires_grad_() for x in make_inputs(6, heads=2, batch=1)[:5]]
    arguments = (*own, sp.sequence(6, [0, 2, 6])._state.op_key, sp._name, str(read_latent_call(*own, causal=True)))
    torch.library.opcheck(torch.ops.startrail.latent_attention.default, arguments)
    with torch.autocast("cpu"):
        assert sp.sequence(6).latent_attention(*(x.detach().float() for x in own)).dtype == torch.bfloat16


WRONG = {
    "q": lambda x: x[..., 1:],
    "latent": lambda x: x[..., 1:],
    "k_rope": lambda x: x[:, :-1],
    "w_k": lambda x: x[1:],
    "w_v": lambda x: x.double(),
}


@pytest.mark.parametrize("cluster", [None, "lab@1x2"])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_do_not_fit_raise_on_all_ranks(name, cluster, monkeypatch):
    """Also where a described cluster makes the other rank send expanded keys."""
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)
    monkeypatch.setattr(Expanding, "first", lambda self, plan, call: True)

    def on_rank(rank):
        sequence = startrail.SequenceParallel("u2", timeout=30, cluster=cluster).sequence(16)
        tensors = dict(zip(NAMES, sharded(sequence, make_inputs(16, dtype=torch.float32)[:5]), strict=True))
        texts = []
        for change in (WRONG[name], lambda x: x[0, 0], lambda x: x.int(), lambda x: x.numpy()):
            wrong = {**tensors, name: change(tensors[name])} if rank else tensors
            texts.append(error_of(lambda wrong=wrong: sequence.latent_attention(**wrong)))
        return texts, error_of(lambda: sequence.latent_attention(**tensors))

    for texts, later in run_local(on_rank, 2, deadline=60):
        assert all(text.startswith("ValueError: ") and name in text for text in texts), texts
        assert later == "no error"


def test_heads_that_do_not_fit_the_plan_raise_on_all_ranks_of_a_described_cluster():
    """There, each rank simulates the plan before ranks have compared their shapes."""
    inputs = make_inputs(1024, batch=1, dtype=torch.float32)[:5]

    def on_rank(rank):
        sequence = startrail.SequenceParallel("u2", timeout=30, cluster="lab@1x2").sequence(1024)
        q, latent, k_rope, w_k, w_v = sharded(sequence, inputs)

        def call(heads):
            return sequence.latent_attention(q[:, :heads], latent, k_rope, w_k[:heads], w_v[:heads])

        return error_of(lambda: call(7 if rank else 8)), error_of(lambda: call(8))

    for text, later in run_local(on_rank, 2, deadline=60):
        assert text.startswith("ValueError: ") and "7 query heads cannot be split over u2" in text, text
        assert later == "no error"


def test_ranks_with_other_widths_disagree():
    """Each rank's shapes fit each other, and its messages those of the other rank."""

    def on_rank(rank):
        sequence = startrail.SequenceParallel("1x2", timeout=30).sequence(16)
        q, latent, k_rope, w_k, w_v = sharded(sequence, make_inputs(16)[:5])
        return error_of(lambda: sequence.latent_attention(q, latent, k_rope, w_k, w_v[:, rank:]))

    for text in run_local(on_rank, 2, deadline=60):
        assert text.startswith("ValueError: ranks disagree about one attention call"), text
        assert "w_v (8, 6, 16)" in text and "w_v (8, 5, 16)" in text


@pytest.mark.parametrize("plan", ["1x4", "1x4,keep=all", "2x2", "u2/1x2", "4x1", "star2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_within_the_formula_and_kept_pieces_are_narrow(plan, dtype):
    """``LatentSizes.peak_bytes`` with 8 heads, whose keys and values are 7 times as wide as their latent."""
    *inputs, dout = make_inputs(4096, batch=1, dtype=dtype)

    def on_rank(rank):
        sp = startrail.SequenceParallel(plan)
        sequence = sp.sequence(4096)
        own = [x.requires_grad_() for x in sharded(sequence, inputs)]
        share, sizes = sequence.shard(dout, 2), sp.sizes(*own)
        assert isinstance(sizes, LatentSizes)
        session, key, call = sp._session, sequence._state.op_key, read_latent_call(*own, causal=True)
        q, latent, k_rope, *weights = own
        with torch.no_grad(), LiveBytes(own) as forward:
            out, lse, kept, number, _ = latents.forward(session, *own, key, call)
        given = [] if kept.numel() and sp.plan.keeps_exchanged else [q, latent, k_rope]
        with torch.no_grad(), LiveBytes([*own, share, out, lse, kept]) as backward:
            latents.backward(session, share, given, weights, out, lse, kept, number, ROPE, key, call)
        limits = [sizes.peak_bytes(pass_, 4) for pass_ in PASSES]
        return (forward.peak - kept.numel(), backward.peak), limits, kept.numel(), sizes

    for peaks, limits, kept, sizes in run_local(on_rank, 4):
        for peak, limit in zip(peaks, limits, strict=True):
            assert sizes.expanded_bytes < peak < limit, (peak, limit)
        assert kept == 0 or kept < 1.1 * (sizes.nbytes("q") + sizes.nbytes("kv"))


def test_at_most_two_pieces_are_expanded_at_a_time(monkeypatch):
    """Of four columns, in both passes; also where all latents are kept."""
    made, alive, expand = [], [], latents.LatentKernel._expand

    def counted(*args):
        found = expand(*args)
        made.append(weakref.ref(found.v.untyped_storage()))
        alive.append(len({storage.data_ptr() for ref in made if (storage := ref()) is not None}))
        return found

    monkeypatch.setattr(latents.LatentKernel, "_expand", counted)
    *inputs, dout = make_inputs(64)
    truth = one_process(inputs, dout, visible(64, True))

    def on_rank(rank):
        found, most = [], []
        for plan in ("1x4", "1x4,keep=all", "1x4,backward=queries"):
            found += mistakes(startrail.SequenceParallel(plan).sequence(64), inputs, dout, truth, causal=True)[0]
            most.append(max(alive))
        return found, most, len(alive)

    for found, most, calls in run_local(on_rank, 4):
        assert found == [] and most == [2, 2, 2] and calls >= 3 * 2 * 4


@pytest.mark.parametrize("plan, columns", [("2x2,keep=all", 2), ("2x2", 2), ("1x4,keep=all", 4), ("4x1", 1), ("u4", 1)])
def test_gradients_of_a_column_become_the_latents_once(plan, columns, monkeypatch):
    made, contract = [], latents.LatentKernel._contract
    monkeypatch.setattr(latents.LatentKernel, "_contract", lambda *args: (made.append(args), contract(*args))[1])
    *inputs, dout = make_inputs(64)
    truth = one_process(inputs, dout, visible(64, True))

    def on_rank(rank):
        found, _ = mistakes(startrail.SequenceParallel(plan).sequence(64), inputs, dout, truth, causal=True)
        return found, len(made)

    assert run_local(on_rank, 4) == [([], columns)] * 4


def test_more_columns_than_are_held_expanded():
    """Where rows travel and many columns stay, a column is expanded again for the next row."""
    *inputs, dout = make_inputs(64)
    truth = one_process(inputs, dout, visible(64, False))

    def on_rank(rank):
        sequence = startrail.SequenceParallel("1x4,backward=queries").sequence(64)
        return mistakes(sequence, inputs, dout, truth)[0]

    assert run_local(on_rank, 4) == [[]] * 4


def test_values_are_padded_once_per_piece(monkeypatch):
    """The kernel for CPUs takes values as wide as keys: here four rows meet one column on each rank."""
    padded = []
    monkeypatch.setattr(base, "F", SimpleNamespace(pad=lambda x, sides: (padded.append(x.shape), F.pad(x, sides))[1]))
    *inputs, dout = make_inputs(64)
    truth = one_process(inputs, dout, visible(64, False))

    def on_rank(rank):
        found, _ = mistakes(startrail.SequenceParallel("4x1").sequence(64), inputs, dout, truth)
        return found, len(padded)

    assert run_local(on_rank, 4) == [([], 2 + 4)] * 4, "values in both passes, and dout"


@pytest.mark.parametrize("faster", [True, False])
def test_expanded_keys_travel_where_the_described_cluster_makes_them_faster(faster, monkeypatch):
    """The same results and the bytes of expanded keys; without a description, latents."""
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)
    monkeypatch.setattr(Expanding, "first", lambda self, plan, call: faster)
    inputs, dout = make_inputs(64)[:5], make_inputs(64)[5]
    truth = one_process(inputs, dout, visible(64, True))

    def on_rank(rank):
        sent = []
        for cluster in ("lab@2x2", None):
            sp = startrail.SequenceParallel("1x2/1x2", cluster=cluster)
            sequence = sp.sequence(64)
            found, own = mistakes(sequence, inputs, dout, truth, causal=True)
            promised = sum(sum(levels.values()) for levels in sequence.promised_traffic(*own, causal=True).values())
            assert promised == sum(lane["bytes"] for lane in sp.traffic().values())
            assert found == []
            sent.append(promised)
        return sent[0] / sent[1]

    ratio = 8 * (KEY + ROPE + VALUE) / (RANK + ROPE) if faster else 1.0
    assert run_local(on_rank, 4) == [pytest.approx(ratio)] * 4
