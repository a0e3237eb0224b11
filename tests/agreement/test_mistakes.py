"""Wrong arguments raise ValueError on every rank, dead and stalled peers a PeerError that names them; no rank hangs."""

import copy
import gc
import os
import pickle
import signal
import time
from datetime import timedelta
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail._compat import default_store
from startrail.agreement.timing import TIMING
from startrail.engine.arguments import AttentionCall
from startrail.launch.local import run_local
from tests.helpers import error_of, eventually, qkv


def attend(sp, q, k, v, documents=None, length=None, **options):
    """Attention over a sequence of ``length``, by default the one that fits q."""
    sequence = sp.sequence(q.shape[2] * sp.world if length is None else length, documents)
    return sequence.attention(q, k, v, **options)


MISTAKES = [  # plan, q, k and v, other arguments, error
    ("1x2", qkv(tokens=15), {}, r"length 32 on 2 ranks gives 16 local tokens per rank .*, but this rank has 15"),
    ("1x2", qkv(), dict(length=40), "length 40 on 2 ranks gives 20 local tokens per rank"),
    ("1x2", qkv(), dict(length=0), "length=0 must be a whole number of tokens, length >= 1"),
    ("1x2", qkv(), dict(window=0), "window=0 must be at least 1"),
    ("1x2", qkv(), dict(documents=[0, 5]), "documents end at 5, but the sequence has 32 tokens"),
    ("1x2", qkv(), dict(documents=[0, 9, 5, 32]), "documents must be cu_seqlens"),
    ("1x2", qkv(), dict(documents=[0, 9.5, 32]), "documents must be whole numbers"),
    ("1x2", qkv(), dict(documents=[[0, 9, 32]]), "documents must be whole numbers in one dimension"),
    ("1x2", qkv(), dict(documents=torch.tensor(32)), "documents must be whole numbers in one dimension"),
    ("1x2", qkv(), dict(documents=[0, "a"]), "documents must be whole numbers in one dimension"),
    ("1x2", qkv(), dict(window=2.5), "window=2.5 must be a whole number"),
    ("1x2", qkv(), dict(window=2**70), "must be a whole number of tokens"),
    ("1x2", qkv(), dict(length=32.0), "length=32.0 must be a whole number"),
    ("1x2", qkv(), dict(causal=1.0), "causal=1.0 must be True or False"),
    ("1x2", [qkv()[0], qkv()[1].numpy(), qkv()[2]], {}, "k must be a tensor, got ndarray"),
    ("1x2", qkv(), dict(scale=-0.5), "scale=-0.5 must be None or a finite number greater than 0"),
    ("1x2", qkv(), dict(scale=float("nan")), "scale=nan must be None or a finite number greater than 0"),
    ("1x2", [qkv()[0], qkv()[1].to("meta"), qkv()[2]], {}, "q, k, v must be on one device"),
    ("1x2", qkv(kv_heads=3), {}, "4 query heads are not a multiple of 3 key/value heads"),
    ("u2", qkv(heads=3, kv_heads=3), {}, "3 query heads cannot be split over u2; use u1, u3"),
    ("1x2,groups=3", qkv(), {}, "groups=3 divides neither"),
    ("1x2", qkv(dim=300), {}, "head dim 300 is more than 256"),
    ("1x2", qkv(dtype=torch.int64), {}, "must share one dtype"),
    ("1x2", [*qkv()[:2], qkv(tokens=18)[2]], {}, "k, v of the same shape"),
    ("1x2", [qkv()[0], *qkv(dim=4)[1:]], {}, "must agree in batch, local tokens and head dim"),
    ("1x2", [x[0] for x in qkv()], {}, r"need q \(batch, heads, tokens, dim\)"),
    ("1x2", [x[:0] for x in qkv()], {}, "no dimension may be empty"),
    ("1x2", [qkv()[0].double(), *qkv()[1:]], {}, "must share one dtype"),
]


def test_a_mistake_on_all_ranks_raises_before_anything_is_sent():
    """The next call works. All cases share one set of ranks; each has a new instance."""

    def on_rank(rank):
        for plan, inputs, options, message in MISTAKES:
            sp = startrail.SequenceParallel(plan, timeout=20)
            with pytest.raises(ValueError, match=message):
                attend(sp, *inputs, **{"length": 32, **options})
            assert not sp.traffic(), f"bytes were sent before {message!r}"
            assert attend(sp, *qkv(heads=6, kv_heads=6)).shape == (1, 6, 16, 8), message
        return True

    assert run_local(on_rank, 2, deadline=60) == [True, True]


def test_every_rank_names_the_one_with_different_arguments(monkeypatch):
    monkeypatch.setattr(TIMING, "slow_wait", 20.0)  # no rank looks before all have come, however busy the machine is

    def on_rank(rank):
        sp = startrail.SequenceParallel("2x2", timeout=20)
        return [
            error_of(lambda: attend(sp, *qkv(tokens=16 if rank != 2 else 18))),
            error_of(lambda: attend(sp, *qkv(dim=8 if rank != 1 else 300))),
            error_of(lambda: attend(sp, *qkv(), causal=rank == 3)),
            error_of(lambda: attend(sp, *qkv(), documents=[0, 5 if rank else 6, 64])),
            error_of(lambda: attend(sp, *qkv(), window=2.5 if rank == 2 else 2)),
            error_of(lambda: attend(sp, *qkv())),
            sp.traffic()["level 0"]["hops"],
        ]

    for shapes, dim, causal, documents, window, good, hops in run_local(on_rank, 4, deadline=60):
        assert shapes.startswith(
            "ValueError: ranks disagree about one attention call: ranks 0, 1, 3: forward: q (1, 4, 16, 8)"
        )
        assert "rank 2: forward: q (1, 4, 18, 8)" in shapes
        assert dim.startswith("ValueError: rank 1: head dim 300 is more than 256")
        assert "rank 3: " in causal
        assert "causal=True" in causal
        assert "(0, 6, 64)" in documents
        assert "(0, 5, 64)" in documents
        assert window == "ValueError: rank 2: window=2.5 must be a whole number of tokens"
        assert good == "no error"
        assert hops == 3, "the failed calls sent nothing"


def test_disagreement_between_known_calls_raises_on_all_ranks():
    """All ranks know both kinds of call, so they compare only while they wait."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=30)
        for tokens in (16, 32):
            attend(sp, *qkv(tokens=tokens))
        start = time.monotonic()
        known = error_of(lambda: attend(sp, *qkv(tokens=16 + 16 * rank)))
        seconds = time.monotonic() - start
        dist.barrier()
        return known, seconds, error_of(lambda: attend(sp, *qkv(tokens=16)))

    for known, seconds, after in run_local(on_rank, 2, deadline=100):
        assert known.startswith("ValueError: ranks disagree about one attention call: rank 0: forward: q (1, 4, 16, 8)")
        assert "rank 1: forward: q (1, 4, 32, 8)" in known
        assert seconds < 15, "well before the timeout"
        assert after == "no error"


def test_no_rank_waits_for_the_timeout_if_a_peer_closed_its_connections_first():
    """Ranks compare at different times: the first to find the mismatch closes connections that the others still use."""

    def on_rank(rank):
        dist.barrier()
        time.sleep((0.1, 0.0, 0.3, 0.2)[rank])  # the watchdog's rounds start with the instance
        sp = startrail.SequenceParallel("1x4", timeout=20)
        inputs = [x.requires_grad_() for x in qkv()]
        for _ in range(2):
            attend(sp, *inputs).square().sum().backward()
        out = attend(sp, *inputs)
        dist.barrier()
        start = time.monotonic()
        text = error_of(lambda: attend(sp, *inputs) if rank == 1 else out.square().sum().backward())
        return text, time.monotonic() - start

    for text, seconds in run_local(on_rank, 4, deadline=60):
        assert text.startswith("ValueError: ranks disagree"), text
        assert seconds < 15


def test_concurrent_calls_of_one_instance_raise():
    sp = startrail.SequenceParallel("1x1")
    with sp._session.call(), pytest.raises(ValueError, match="two threads call one SequenceParallel"):
        attend(sp, *qkv())


def test_a_new_shape_on_one_rank_raises_on_all():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=30)
        attend(sp, *qkv(tokens=16))
        return error_of(lambda: attend(sp, *qkv(tokens=16 if rank else 20)))

    for text in run_local(on_rank, 3, deadline=60):
        assert text.startswith("ValueError: ranks disagree about one attention call")
        assert "rank 0: forward: q (1, 4, 20, 8)" in text


def test_different_documents_of_one_shape_raise():
    def on_rank(rank):
        sp = startrail.SequenceParallel("2x1", timeout=30)
        attend(sp, *qkv(), documents=[0, 7, 32])
        return error_of(lambda: attend(sp, *qkv(), documents=[0, 8 + rank, 32]))

    for text in run_local(on_rank, 2, deadline=60):
        assert "(0, 8, 32)" in text
        assert "(0, 9, 32)" in text


def test_check_every_call_compares_known_calls_before_sending(monkeypatch):
    monkeypatch.setenv("STARTRAIL_CHECK_EVERY_CALL", "1")

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=30)
        attend(sp, *qkv(tokens=16))
        attend(sp, *qkv(tokens=32))
        text = error_of(lambda: attend(sp, *qkv(tokens=16 + 16 * rank)))
        return text, sp.traffic()["level 0"]["hops"]

    for text, hops in run_local(on_rank, 2, deadline=60):
        assert "ranks disagree" in text
        assert hops == 2, "compared before anything was sent"


@pytest.mark.parametrize("plan, how, pieces", [("1x3", "killed", "kv1"), ("u2/u2", "stalled", "q0 kv0")])
def test_errors_name_the_dead_or_stalled_peer_and_the_step(plan, how, pieces):
    """Only that peer, also where a rank waits for the messages of several together."""
    world = 3 if plan == "1x3" else 4

    def on_rank(rank):
        sp = startrail.SequenceParallel(plan, timeout=4)
        inputs = qkv()
        attend(sp, *inputs)
        if rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        start = time.monotonic()
        text = error_of(lambda: attend(sp, *inputs))
        return text, time.monotonic() - start

    results = run_local(on_rank, world, deadline=60, expendable=frozenset({1}))
    texts = [result[0] for rank, result in enumerate(results) if rank != 1]
    assert all(text.startswith("PeerError: rank ") for text in texts), texts
    assert all(", forward step " in text and f" of plan {plan}: " in text for text in texts), texts
    named = f"receiving {pieces} from rank 1 (global rank 1) over level "
    assert any(named in text and text.count(" (global rank ") == 1 for text in texts), texts
    assert all(result[1] < 15 for rank, result in enumerate(results) if rank != 1)


def test_wrong_constructor_arguments_raise():
    for arguments, message in [
        (dict(plan="2x2"), "world size 1 is not teams 2 x ring 2 x heads 1 = 4"),
        (dict(plan="1x1", layout="spiral"), "layout 'spiral' is not one of zones, zigzag, contiguous"),
        (dict(plan="1x1", wire_dtype=torch.int8), "wire_dtype torch.int8"),
        (dict(plan="1x1", timeout=0), "timeout=0"),
        (dict(plan="1x1", timeout="3"), "timeout='3' must be a number of seconds greater than 0"),
        (dict(plan="1x1", timeout=timedelta(seconds=3)), r"timeout=datetime.timedelta\(seconds=3\) must be a number"),
        (dict(plan="1x1", timeout=float("inf")), "timeout=inf must be a number of seconds"),
        (dict(plan=4), "plan 4 must be a Plan or its text form"),
    ]:
        with pytest.raises(ValueError, match=message):
            startrail.SequenceParallel(**arguments)
    sp = startrail.SequenceParallel("1x1")
    with pytest.raises(ValueError, match='plan "auto" needs the model\'s heads'):
        startrail.SequenceParallel("auto")
    sequence = sp.sequence(2)
    with pytest.raises(ValueError, match="dim 3 is not a dimension"):
        sequence.shard(torch.zeros(2, 2), 3)
    with pytest.raises(ValueError, match="has 3 tokens in dimension 1, but the sequence has 2"):
        sequence.shard(torch.zeros(2, 3), 1)
    with pytest.raises(ValueError, match="has 3 tokens in dimension 1, but each rank holds 2"):
        sequence.unshard(torch.zeros(2, 3), 1)
    with pytest.raises(AttributeError, match="cannot assign to field 'length'"):
        sequence.length = 3


def test_a_backward_pass_never_receives_messages_of_a_forward_pass():
    """A rank that skips its backward pass raises, and so do the others."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2,keep=all", timeout=30)
        inputs = [x.requires_grad_() for x in qkv()]
        for _ in range(2):
            out = attend(sp, *inputs)
            torch.autograd.grad(out, inputs, torch.randn_like(out))
        out = attend(sp, *inputs)
        step = (lambda: attend(sp, *inputs)) if rank else (lambda: torch.autograd.grad(out, inputs, out))
        return error_of(step)

    for text in run_local(on_rank, 2, deadline=60):
        assert "rank 0: backward: q" in text
        assert "rank 1: forward: q" in text


def test_ranks_can_have_made_different_numbers_of_groups():
    def on_rank(rank):
        pair = dist.new_group([0, 1])
        if rank < 2:
            attend(startrail.SequenceParallel("1x2", group=pair, timeout=20), *qkv())
        return attend(startrail.SequenceParallel("2x2", timeout=20), *qkv()).shape == (1, 4, 16, 8)

    assert all(run_local(on_rank, 4, deadline=60))


def test_dropped_instances_leave_no_open_files():
    def on_rank(rank):
        def use():
            sp = startrail.SequenceParallel("2x1", timeout=20)
            attend(sp, *(x.requires_grad_() for x in qkv())).square().sum().backward()

        gc.disable()  # instances must be freed without it
        use()
        dist.barrier()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            use()
            dist.barrier()
        return len(os.listdir("/proc/self/fd")) - before

    assert max(run_local(on_rank, 2, deadline=60)) <= 2


def test_dropped_and_closed_instances_leave_no_keys_in_the_store():
    """50 instances are made, used, failed with and dropped, on some ranks later than on others; every second one is
    closed, after which a call raises at once, although no other rank makes it."""

    def on_rank(rank):
        store, kept, numbers, late, made = default_store(), [], [], [], WeakSet()
        for number in range(50):
            sp = startrail.SequenceParallel(["1x2", "u2"][number % 4 // 2], timeout=20)
            made.add(sp._session.consensus)
            inputs = [x.requires_grad_() for x in qkv()]
            sequence = sp.sequence(32)
            sequence.attention(*inputs).square().sum().backward()
            sequence.unshard(inputs[0], 2)
            if number % 7 == 0:
                assert "window=0" in error_of(lambda sp=sp, x=inputs: attend(sp, *x, window=0 if rank == 1 else 3))
                attend(sp, *inputs, window=3)
            if number % 2:
                sp.close()
                if rank == 0:
                    start = time.monotonic()
                    late += [error_of(lambda s=sequence, x=inputs: s.attention(*x, window=5))]
                    late += [error_of(lambda s=sequence, x=inputs: s.unshard(x[0], 2))]
                    assert time.monotonic() - start < 5, "well before the timeout"
            if rank == 1:
                kept = [*kept[-2:], sp]
            del sp, sequence
            if number % 10 == 9:
                kept.clear()
                gc.collect()
                assert eventually(lambda: not made), "the watchdog's thread may still look at one"
                dist.barrier()
                startrail.SequenceParallel("1x2").sequence(32).attention(*inputs)  # the ranks meet
                dist.barrier()
                numbers.append(store.num_keys())
                dist.barrier()
        return numbers, set(late), [key for key in store.list_keys() if key.startswith("startrail/")]

    for rank, (numbers, late, keys) in enumerate(run_local(on_rank, 2, deadline=120)):
        assert late == ({"ValueError: this SequenceParallel is closed"} if rank == 0 else set())
        assert len(set(numbers)) == 1, (numbers, keys)


def test_a_long_wait_makes_no_keys_of_an_instance_that_is_closed():
    """It looks for failures in the other instances of its process, and a closed one may still be there."""

    def on_rank(rank):
        used, closed = (startrail.SequenceParallel("1x2", timeout=20) for _ in range(2))
        for sp in (used, closed):
            sp.sequence(32).attention(*qkv())
        name = closed._session.consensus.ledger.name
        closed.close()
        dist.barrier()
        used.sequence(16).attention(*qkv(8))  # a new kind of call, before which keys are deleted
        dist.barrier()
        used._session.consensus._failure_elsewhere()
        return [key for key in default_store().list_keys() if key.startswith(f"{name}/")]

    assert run_local(on_rank, 2, deadline=60) == [[], []]


def test_under_torchrun_a_process_group_is_required(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2: call"):
        startrail.SequenceParallel("auto", heads=4)


def test_auto_on_nodes_of_different_sizes_works_or_names_the_plans():
    def on_rank(rank):
        os.environ["LOCAL_WORLD_SIZE"] = "4" if rank < 4 else "2"
        sp = startrail.SequenceParallel("auto", heads=6, timeout=20)
        return error_of(lambda: attend(sp, *qkv(heads=6, kv_heads=6)))

    for text in run_local(on_rank, 6, deadline=60):
        assert text == "no error" or "plan u6" in text, text


def test_forward_mode_derivatives_raise():
    sp, x = startrail.SequenceParallel("1x1"), torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: attend(sp, q, x, x), (x,), (torch.ones_like(x),))


def test_copies_of_a_model_share_the_instance_and_pickling_raises():
    sp = startrail.SequenceParallel("1x1")
    assert copy.deepcopy({"sp": sp})["sp"] is sp
    with pytest.raises(ValueError, match="cannot be pickled"):
        pickle.dumps(sp)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    sequence = sp.sequence(4)
    out, name = sequence.attention(q, q, q), sp._name
    del sp, sequence
    gc.collect()
    out.square().sum().backward()  # the graph keeps the instance alive
    del out
    gc.collect()
    with pytest.raises(ValueError, match="no longer exists; keep it with the model"):
        torch.ops.startrail.attention(q, q, q, torch.tensor([0, 4]), name, str(AttentionCall(startrail.Mask())))
