"""The op in a user's program: compile, checkpointing, meshes, sharding, an independent oracle, counters."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import startrail
from startrail.engine.arguments import AttentionCall
from startrail.engine.buffers import KEPT_PASSES, BufferPool
from startrail.engine.session import RECENT_BATCHES as RECENT_SEQUENCES
from startrail.geometry.mask import Mask
from startrail.launch.local import run_local
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.values import PASSES
from tests.helpers import causal_mask, dense, tensors, worst


def test_shard_positions_and_unshard_are_inverse_and_adjoint():
    def on_rank(rank):
        found = []
        for plan, layout in (("1x3", "zigzag"), ("u3", "zigzag"), ("1x3", "contiguous")):
            sp = startrail.SequenceParallel(plan, layout=layout)
            for length in (1, 5, 6, 17, 24):
                sequence = sp.sequence(length)
                x = torch.arange(2.0 * length).reshape(2, length)
                local = sequence.shard(x, dim=1)
                positions = sequence.positions()
                real = sequence.shard(torch.ones(length), dim=0).bool()
                assert torch.equal(local[:, real], x[:, positions[real]])
                assert positions.max() < length
                assert not local[:, ~real].any()
                assert torch.equal(sequence.unshard(local, dim=-1), x)
                # <unshard(s), y> summed over ranks = <s, adjoint(y)> summed over ranks
                shard = torch.randn(local.shape, dtype=torch.float64).requires_grad_()
                y = torch.randn(2, length, dtype=torch.float64)
                whole = sequence.unshard(shard, dim=1)
                (adjoint,) = torch.autograd.grad(whole, shard, y)
                sides = torch.stack([(whole * y).sum(), (shard * adjoint).sum()]).detach()
                dist.all_reduce(sides)
                found.append(abs(sides[0] - sides[1]).item())
                # and of shard: only this rank's tokens get a gradient
                whole = x.double().requires_grad_()
                (grad,) = torch.autograd.grad(
                    sequence.shard(whole, 1), whole, torch.ones_like(local, dtype=torch.float64)
                )
                dist.all_reduce(grad)
                assert torch.equal(grad, torch.ones_like(grad))
        return max(found)

    assert max(run_local(on_rank, 3)) < 1e-9


def test_torch_compile_makes_one_graph_with_exact_gradients():
    data = tensors(64)
    truth = dense(*data, is_causal=True)

    def on_rank(rank):
        errors = []
        for plan in ("2x2", "1x2/u2,keep=all", "u2/2x1"):
            sequence = startrail.SequenceParallel(plan).sequence(64)

            def model(q, k, v, sequence=sequence):
                return sequence.attention(q * 1.0, k, v, causal=True) * 1.0

            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
            out = compiled(q, k, v)
            grads = torch.autograd.grad(out, (q, k, v), sequence.shard(data[3], 2))
            errors.append(worst([out, *grads], [sequence.shard(x, 2) for x in truth]))
        return max(errors)

    assert max(run_local(on_rank, 4)) < 2e-6


def test_torch_compile_does_not_recompile_for_new_sequences_and_lengths():
    def on_rank(rank):
        sp = startrail.SequenceParallel("u2")
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(
            lambda sequence, q, k, v: sequence.attention(q, k, v, causal=True) * 1.0, fullgraph=True, backend=counter
        )
        errors = []
        documents = {64: [(0, 64), (0, 9, 64), (0, 1, 2, 3, 30, 64)], 96: [(0, 50, 96)], 128: [(0, 128), (0, 127, 128)]}
        for length, cuts in documents.items():
            data = tensors(length)
            for ends in cuts:
                sequence = sp.sequence(length, ends)
                q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
                out = compiled(sequence, q, k, v)
                grads = torch.autograd.grad(out, (q, k, v), sequence.shard(data[3], 2))
                truth = dense(*data, attn_mask=causal_mask(length, ends))
                errors.append(worst([out, *grads], [sequence.shard(x, 2) for x in truth]))
        return max(errors), counter.frame_count

    for error, compiled in run_local(on_rank, 2):
        assert error < 2e-6
        assert compiled <= 2, "once, and once more with a length that changes"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pending_backward_pass_outlives_its_sequence(compiled):
    data, documents = tensors(64), (0, 9, 40, 64)
    truth = dense(*data, attn_mask=causal_mask(64, documents))

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2")

        def attend(sequence, q, k, v):
            return sequence.attention(q, k, v, causal=True) * 1.0

        if compiled:
            attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
        sequence = sp.sequence(64, documents)
        q, k, v, dout, *expected = (sequence.shard(x, 2) for x in (*data, *truth))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = attend(sequence, *inputs)
        geometry = weakref.ref(sequence._state.batch)
        del sequence
        for length in range(4, 4 * RECENT_SEQUENCES + 4, 4):
            sp.sequence(length).attention(*(torch.randn(2, 4, length // 2, 16) for _ in range(3)))
        gc.collect()
        grads = torch.autograd.grad(out, inputs, dout)
        return geometry() is None, worst([out, *grads], expected)

    for forgotten, error in run_local(on_rank, 2):
        assert forgotten and error < 2e-6


def test_every_step_is_a_profiler_range_labelled_by_the_schedule():
    data = tensors(64)

    def on_rank(rank):
        sequence = startrail.SequenceParallel("2x2").sequence(64)
        q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
        with torch.profiler.profile() as profiled:
            sequence.attention(q, k, v).backward(sequence.shard(data[3], 2))
        return {event.key for event in profiled.key_averages() if event.key.startswith("startrail ")}

    for rank, labels in enumerate(run_local(on_rank, 4)):
        programs = [build_program(Plan.parse("2x2"), 4, rank, pass_) for pass_ in PASSES]
        assert labels == {f"startrail {p.pass_} {n}: {step}" for p in programs for n, step in enumerate(p.steps)}


def test_autocast_leaves_float64_alone():
    sequence = startrail.SequenceParallel("1x1").sequence(4)
    with torch.autocast("cpu"):
        dtypes = [
            sequence.attention(*(torch.randn(1, 2, 4, 8, dtype=dtype) for _ in range(3))).dtype
            for dtype in (torch.float64, torch.float32)
        ]
    assert dtypes == [torch.float64, torch.bfloat16]


def test_the_op_passes_torchs_own_checks():
    sp = startrail.SequenceParallel("1x1")
    q, k, v = (torch.randn(1, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2))
    for ends in (None, [0, 2, 6]):
        arguments = (q, k, v, sp.sequence(6, ends)._state.op_key, sp._name, str(AttentionCall(Mask(True, 3), 0.3)))
        torch.library.opcheck(torch.ops.startrail.attention.default, arguments)


def test_gradcheck_in_float64():
    sequence = startrail.SequenceParallel("u1").sequence(5, [0, 2, 5])
    q, k, v = (torch.randn(1, heads, 5, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    assert torch.autograd.gradcheck(lambda *x: sequence.attention(*x, causal=True, window=3), (q, k, v))


@pytest.mark.parametrize("plan", ["2x2", "1x2/u2", "u2/1x2", "star2,keep=all"])
def test_checkpointing_never_repeats_the_distributed_forward(plan):
    data = tensors(64)

    def on_rank(rank):
        sp = startrail.SequenceParallel(plan)
        sequence = sp.sequence(64)
        recomputed = []

        def layer(q, k, v):
            recomputed.append(1)
            return sequence.attention(q.sin(), k.sin(), v.sin(), causal=True).sin()

        q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
        plain = layer(q, k, v)
        expected = torch.autograd.grad(plain, (q, k, v), sequence.shard(data[3], 2))
        once = sp.traffic()
        sp.reset_counters()
        recomputed.clear()
        out = checkpoint(layer, q, k, v, use_reentrant=False, context_fn=startrail.checkpoint_context)
        grads = torch.autograd.grad(out, (q, k, v), sequence.shard(data[3], 2))
        assert len(recomputed) == 2, "the layer must have been recomputed"
        assert sp.traffic() == once, "and the distributed forward must not"
        assert torch.equal(out, plain)
        return all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))

    assert all(run_local(on_rank, 4))


def test_one_or_several_mesh_dimensions_form_the_sequence_axis():
    data = tensors(40)
    truth = dense(*data)

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "node", "gpu"))
        errors = []
        for sp in (
            startrail.SequenceParallel("1x2", mesh=mesh["node"]),
            startrail.SequenceParallel("2x1/u2", mesh=mesh["node", "gpu"]),
            startrail.SequenceParallel("2x1", group=mesh["data"].get_group()),
            startrail.SequenceParallel("u2/1x2", mesh=mesh["data", "gpu"]),
        ):
            sequence = sp.sequence(40)
            q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
            out = sequence.attention(q, k, v)
            grads = torch.autograd.grad(out, (q, k, v), sequence.shard(data[3], 2))
            errors.append(worst([out, *grads], [sequence.shard(x, 2) for x in truth]))
        return max(errors)

    assert max(run_local(on_rank, 8)) < 2e-6


def test_repeated_calls_reuse_buffers_and_keep_no_state():
    first, second = tensors(64, seed=1), tensors(64, seed=2)

    def on_rank(rank):
        sp = startrail.SequenceParallel("2x2")
        sequence = sp.sequence(64)

        def call(data):
            q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
            out = sequence.attention(q, k, v, causal=True)
            return [out, *torch.autograd.grad(out, (q, k, v), sequence.shard(data[3], 2))]

        before = call(first)
        runner = sp._session.runner_on(torch.device("cpu"))
        allocated = runner.pool.allocated
        # two calls under way at once, backward in either order: saved tensors are each call's own
        inputs = [[sequence.shard(x, 2).requires_grad_() for x in data[:3]] for data in (first, second)]
        outs = [sequence.attention(*qkv, causal=True) for qkv in inputs]
        grads = [
            torch.autograd.grad(out, qkv, sequence.shard(data[3], 2))
            for out, qkv, data in list(zip(outs, inputs, (first, second), strict=True))
        ]
        for _ in range(3):
            call(second)
        assert runner.pool.allocated == allocated, "steady state allocates no new buffers"
        after = call(first)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        return all(same) and all(torch.equal(a, b) for a, b in zip(before, [outs[0], *grads[0]], strict=True))

    assert all(run_local(on_rank, 4))


@pytest.mark.parametrize("plan", ["2x2", "star2", "2x1/u2,groups=2", "1x2/u2,keep=all", "u2/2x1"])
def test_a_call_leaves_nothing_for_the_garbage_collector(plan):
    """Tensors in a reference cycle would stay until the collector runs, which does not know about a GPU's memory."""
    data = tensors(64)

    def on_rank(rank):
        sequence = startrail.SequenceParallel(plan).sequence(64)
        gc.disable()
        alive = []
        for _ in range(3):
            q, k, v = (sequence.shard(x, 2).requires_grad_() for x in data[:3])
            out = sequence.attention(q, k, v, causal=True)
            gradients = torch.autograd.grad(out, (q, k, v), sequence.shard(data[3], 2))
            alive += [weakref.ref(x) for x in (q, k, v, out, *gradients)]
            del q, k, v, out, gradients
        return [
            ref() is not None for ref in alive[7:]
        ]  # torch's imports hold on to what the first call of all was about

    assert run_local(on_rank, 4) == [[False] * 14] * 4


def test_gradients_of_strided_inputs_and_expanded_cotangents():
    """Hugging Face hands over views of (batch, tokens, heads, dim); a sum's cotangent has stride 0."""
    data = tensors(32)
    truth = dense(*data[:3], torch.full_like(data[3], 0.5), is_causal=True)

    def on_rank(rank):
        sequence = startrail.SequenceParallel("2x1").sequence(32)
        q, k, v = (sequence.shard(x, 2).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in data[:3])
        out = sequence.attention(q, k, v, causal=True)
        grads = torch.autograd.grad(out, (q, k, v), torch.tensor(0.5).expand_as(out))
        return worst([out, *grads], [sequence.shard(x, 2) for x in truth])

    assert max(run_local(on_rank, 2)) < 2e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_pytorchs_own_ring_agrees(causal, kv_heads):
    """torch's ring attention on the CPU kernel, an independent implementation of the same thing."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

    data = tensors(64, kv_heads=kv_heads)
    aten = torch.ops.aten

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (4,))
        sequence = startrail.SequenceParallel("2x2", layout="contiguous").sequence(64)
        q, k, v, dout = (sequence.shard(x, 2) for x in data)
        torch_cp._cp_options.enable_load_balance = False
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        theirs, lse, *_ = torch_cp._templated_ring_attention(
            mesh.get_group(), 2, forward, query=q, key=k, value=v, dropout_p=0.0, is_causal=causal
        )
        grads = torch_cp._templated_ring_attention_backward(
            mesh.get_group(),
            2,
            backward,
            grad_out=dout,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=theirs,
            logsumexp=lse,
            dropout_p=0.0,
            is_causal=causal,
        )
        ours = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
        out = sequence.attention(*ours, causal=causal)
        mine = [out, *torch.autograd.grad(out, ours, dout)]
        return worst(mine, [x.double() for x in (theirs, *grads[:3])])

    assert max(run_local(on_rank, 4)) < 2e-6


def test_buffers_are_reused_for_smaller_pieces_but_not_before_they_are_sent():
    pool, sent = BufferPool().on(torch.device("cpu")), []
    first = pool.get(100)
    first.sends.append(SimpleNamespace(is_waited_for=False, wait=lambda: sent.append(True)))
    pool.put(first)
    again = pool.get(60)
    assert (again.flat.data_ptr(), again.flat.numel(), sent, pool.allocated) == (first.flat.data_ptr(), 60, [True], 100)
    pool.put(again)
    assert pool.get(100) is first
    pool.put(first)
    pool.get(49)
    assert pool.allocated == 149, "a buffer of more than twice the size stays free"
    for _ in range(KEPT_PASSES - 1):
        pool.drop_unused()
    assert pool.free, "a buffer is kept for some passes"
    pool.drop_unused()
    assert not pool.free, "but not for ever"


def test_forked_ranks_do_not_collect_what_their_parent_made():
    assert run_local(lambda rank: gc.get_freeze_count() > 10_000, 1) == [True]
