"""Problems that a first run on GPUs would meet, tested without one: fake tensors, stand-ins, fake process groups."""

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import startrail
import startrail.engine.op
from startrail import _compat
from startrail.agreement import watchdog as watch
from startrail.agreement.timing import TIMING
from startrail.bench.yardstick import Workload
from startrail.compile.attention import Attention
from startrail.compile.call import compile_call
from startrail.compile.problem import Boundaries, Split
from startrail.diagnostics import doctor
from startrail.diagnostics.exactness import Case, check_cases
from startrail.engine import buffers, wire
from startrail.engine.arguments import AttentionCall, Shapes, describe_tensor, read_call
from startrail.engine.attention import AttentionRequest
from startrail.engine.buffers import BufferPool
from startrail.engine.runner import PassRunner
from startrail.engine.wire import Wire
from startrail.geometry.mask import Mask
from startrail.kernels import accumulate, base, cuda, kernel_for
from startrail.kernels.flash_ops import flash_attn_ops
from startrail.kernels.rearrange import split_tokens
from startrail.planner.live import measure as live
from startrail.schedule.plan import Plan
from startrail.schedule.values import FORWARD
from startrail.schedule.walk import Message
from startrail.transport import nccl
from startrail.transport import process_groups as groups
from startrail.transport.counters import MAX_UNREAD, Counters, Stopwatch
from startrail.transport.interface import Compare, MessageSet, Transport
from startrail.transport.lanes import Lane
from startrail.transport.nccl import Nccl
from tests.engine.test_launches import fake_world
from tests.helpers import eventually
from tests.kernels import stand_ins
from workshop.peers import contenders as peers

CUDA = torch.device("cuda", 0)


def test_ranks_agree_about_tensors_on_their_own_gpus():
    with FakeTensorMode():
        first, second = (torch.empty(1, 2, 4, 8, device=f"cuda:{index}") for index in range(2))
    assert describe_tensor(first) == describe_tensor(second) == "(1, 2, 4, 8) float32 cuda"
    with pytest.raises(ValueError, match="must be on one device, got q on cuda:0, k on cuda:1, v on cuda:0"):
        read_call(first, second, first)


def test_a_buffer_is_reused_on_its_own_stream_only(monkeypatch):
    stream = 1
    monkeypatch.setattr(buffers, "current_stream_id", lambda device: stream)
    pool = BufferPool()
    buffer = pool.on(torch.device("cpu")).get(64)
    pool.on(torch.device("cpu")).put(buffer)
    stream = 2
    other = pool.on(torch.device("cpu")).get(64)
    assert other is not buffer
    assert pool.on(torch.device("cpu")).get(48).flat.data_ptr() != buffer.flat.data_ptr(), "nor the beginning of it"
    stream = 1
    assert pool.on(torch.device("cpu")).get(64) is buffer


def test_ints_on_a_gpu_are_cached_per_stream(monkeypatch):
    """Another stream is not ordered after the copy."""
    stream, cpu = 1, torch.device("cpu")
    for module in (cuda, wire):
        monkeypatch.setattr(module, "current_stream_id", lambda device: stream)
    problem, split = Attention.of(8, 1, 2, 2, 1, causal=True), Split(Plan.parse("u2"), 2)
    (part,) = compile_call(problem, split, 0).parts
    made = Wire(part, torch.float32, torch.float32)
    assert (made.chunk, made.places) == (2, ((0, 3), (1, 2)))
    whole, parts = torch.arange(8.0).view(1, 1, 8, 1), torch.empty(2, 1, 1, 4, 1)
    packs = ((2, 2), (3, 3))
    first = cuda._cu_seqlens(packs, cpu)
    split_tokens([(parts, whole)], made.chunks_on(cpu))
    assert parts.flatten().tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert cuda._cu_seqlens(packs, cpu) is first and len(made._places_on) == 1
    stream = 2
    split_tokens([(parts, whole)], made.chunks_on(cpu))
    assert cuda._cu_seqlens(packs, cpu) is not first and len(made._places_on) == 2
    cuda._cu_seqlens_on.cache_clear()


class Current:
    """A stand-in for torch.cuda.device, which keeps the current device."""

    index = 0

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.before, Current.index = Current.index, self.device.index

    def __exit__(self, *error):
        Current.index = self.before


@pytest.fixture
def current(monkeypatch):
    Current.index = 0
    monkeypatch.setattr(torch.cuda, "device", Current)
    return Current


def test_a_pass_runs_with_its_own_gpu_as_the_current_one(current, monkeypatch):
    """Triton's launches, events and the check for graph capture use the current device, not that of the tensors."""
    seen = []

    def capturing():
        seen.append(current.index)
        return True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    runner, kept = PassRunner(Transport(CUDA), Counters()), SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(ValueError, match="cannot be captured"):
        runner.run(None, None, [], kept, Compare.NEVER)
    assert (seen, current.index) == ([1], 0)


def test_row_sums_are_launched_on_their_own_gpu(current, monkeypatch):
    launched = []
    fused = SimpleNamespace(row_sums=lambda *arguments: launched.append(current.index))
    monkeypatch.setattr(base, "fused_on", lambda device: fused)
    with FakeTensorMode():
        x = torch.empty(1, 2, 4, 8, device="cuda:1")
        base.row_sums(x, x, torch.float32)
    assert launched == [1]


def test_the_watchdog_thread_makes_the_lanes_gpu_current(current):
    """Otherwise querying an event makes every rank use memory on GPU 0."""
    asked = []
    work = SimpleNamespace(is_completed=lambda: asked.append(current.index) or True, exception=lambda: None)
    work.get_future_result = torch.futures.Future  # before torch 2.13
    transport = object.__new__(Nccl)
    transport.device, transport.aborted, transport.comparisons = torch.device("cuda", 1), None, ()
    transport.pending = [nccl.Waiting(SimpleNamespace(work=work), SimpleNamespace(seconds=lambda: 0.0))]
    transport.check()
    assert (asked, current.index) == ([1], 0)


def test_cuda_graph_capture_raises(current, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runner = PassRunner(Transport(CUDA), Counters())
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        runner.run(None, None, [], SimpleNamespace(device=CUDA), Compare.NEVER)
    for op in (torch.ops.startrail.attention.default, torch.ops.startrail.attention_backward.default):
        assert torch.Tag.cudagraph_unsafe in op.tags


@pytest.fixture
def cuda_backend(monkeypatch):
    """The engine's CUDA backend on CPU tensors, with stand-ins that compute in half precision like flash attention."""
    for op in ("flash_forward", "flash_backward", "bands_forward", "bands_backward"):
        monkeypatch.setattr(_compat, f"cuda_{op}", getattr(stand_ins, op))

    def kernel_for(device, dtype, dim, softcap, value_dim):
        if softcap is None:
            return cuda.FlashKernel(dtype)
        return cuda.FlashKernel(dtype, flash_attn_ops(stand_ins.PACKAGE, softcap), "attn", softcap)

    monkeypatch.setattr("startrail.engine.attention.kernel_for", kernel_for)


def test_half_precision_gradients_on_the_cuda_backend(cuda_backend):
    """lse and delta are one number per row and stay in float32. Rounded to bfloat16 they made the errors of gradients
    four times as large, and more with large logits as here. Also windows, documents and a softcap."""
    shape = dict(world=2, length=192, q_heads=2, kv_heads=2, head_dim=16, dtype=torch.bfloat16, causal=True, scale=1.0)
    cases = [Case("1x2", **shape), Case("u2", **shape), Case("2x1", **shape, window=20)]
    cases += [
        Case("1x2", **shape, softcap=1.5),
        Case("1x2", **shape, softcap=1.5, window=9, documents=(0, 30, 31, 100, 192), sinks=True),
        Case("1x2", **shape, documents=(0, 30, 31, 100, 192), seed=1),
        Case("1x2", **shape, window=9, documents=(0, 100, 192)),
        Case("1x2", **shape, window=100),  # over whole chunks, where FlashAttention 2 reads some windows differently
    ]
    wrong = []
    for case, report in zip(cases, check_cases(cases), strict=True):
        wrong += [f"{case}: {text}" for text in report.verdict()]
    assert not wrong, "\n".join(wrong)


class FusedInTorch:
    """Merges and sums of several results, as the fused kernels make them."""

    @staticmethod
    def merge(out, lse, results, first):
        pairs = [*results] if first else [(out, lse), *results]
        total = torch.stack([each.double() for _, each in pairs]).logsumexp(0)
        out.copy_(sum(x.float() * (each - total).exp().nan_to_num().float().unsqueeze(-1) for x, each in pairs))
        lse.copy_(total)

    @staticmethod
    def add(total, grads, first):
        total.copy_(sum(grad.float() for grad in (grads if first else (total, *grads))))


@pytest.mark.parametrize("plans, world", [(("1x6", "2x3", "3x1/u2"), 6)])
def test_results_that_wait_for_each_other_are_exact(plans, world, cuda_backend, monkeypatch):
    """As on a GPU: up to four of a row, while others of its rows are added, sent or received. A narrow window brings
    gradients of some rows only, in bundles."""
    monkeypatch.setattr(accumulate, "fused_on", lambda device: FusedInTorch)
    shape = dict(world=world, length=384, q_heads=2, kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    cases = [Case(plan, **shape, causal=causal) for plan in plans for causal in (True, False)]
    cases += [Case(plan, **shape, causal=True, window=60) for plan in plans]
    wrong = [text for report in check_cases(cases) for text in report.verdict()]
    assert not wrong, "\n".join(wrong)


def test_an_abort_that_raises_or_hangs_does_not_stop_the_others(monkeypatch):
    """One raises, one hangs, and two end only together, like two communicators that hang on one GPU."""
    monkeypatch.setattr(groups.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(TIMING, "abort", 1.0)
    together, hangs = threading.Barrier(2), threading.Event()
    aborted = []

    def raises():
        raise ValueError("no such communicator")

    def with_another():
        together.wait(timeout=30)
        aborted.append("one of two")

    ways = (raises, hangs.wait, with_another, lambda: aborted.append("alone"), with_another)
    start = time.monotonic()
    groups.abort([SimpleNamespace(abort=way) for way in ways])
    assert sorted(aborted) == ["alone", "one of two", "one of two"]
    assert time.monotonic() - start < 20, "no rank waits forever for the one that hangs"
    hangs.set()


def test_the_watchdog_goes_on_after_errors_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(TIMING, "slow_wait", 0.04)
    looked = []

    class Looks:
        def __init__(self, error):
            self.error = error

        def check(self):
            looked.append(self)
            if self.error is not None:
                raise self.error

    bad, good = Looks(KeyError("gone")), Looks(None)
    watcher = watch.Watchdog()
    watcher.watched |= {bad, good}
    assert eventually(lambda: looked.count(bad) > 3 and looked.count(good) > 3)
    watcher.stop()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.endswith("failed, and is tried again: KeyError('gone')")


class Event:
    """A clock that the test sets."""

    now, made = 0.0, 0

    def __init__(self, device, enable_timing=False):
        assert enable_timing
        Event.made += 1

    def record(self):
        self.time = Event.now

    def query(self):
        return True

    def synchronize(self):
        Event.synchronized = True

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


def test_time_on_a_gpu_is_measured_by_events_and_read_on_request(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    Event.now, Event.made, Event.synchronized = 0.0, 0, False
    stopwatch = Stopwatch()
    for _ in range(1000):
        start = stopwatch.start(CUDA)
        Event.now += 0.5
        stopwatch.stop(start, CUDA)
    assert not Event.synchronized
    assert len(stopwatch._unread) < 1000, "those long over are read on the way"
    assert Event.made <= 2 * (MAX_UNREAD + 1), "and used again"
    assert stopwatch.seconds() == 500.0
    assert Event.synchronized


def test_ranks_under_torchrun_measure_gpus_in_bfloat16(monkeypatch):
    """By default torch calls the backend 'undefined'; GPUs were once taken for CPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(live.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(live.dist, "get_backend", lambda: "undefined")
    monkeypatch.setattr(live.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = peers.own_device()
    assert device == live.own_device() == torch.device("cuda", 1)
    line = next(line for line in doctor._kernels() if "bfloat16" in line)
    assert line == "bfloat16 on cuda: cuda-flash (torch's FlashAttention 2: no newer one is installed)"
    assert kernel_for(device, peers.own_dtype(device), 64).name.startswith("cuda-flash")
    data = peers.make_data(Workload(length=8, q_heads=2, kv_heads=2, head_dim=8, causal=True))
    assert torch.equal(data.inputs[0].bfloat16().float(), data.inputs[0]), "the answers are of what is measured"
    monkeypatch.setattr(live.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert peers.own_device() == live.own_device() == torch.device("cpu")
    monkeypatch.setattr(live.dist, "is_initialized", lambda: False)
    assert live.own_device().type == "cuda"
    assert peers.own_device().type == "cpu", "it forks ranks, which could not use a GPU that it has used"


class NcclOptions:
    def __init__(self, is_high_priority_stream=False):
        self.high = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None, cga_cluster_size=None)


def test_nccl_lanes_share_one_set_of_options(monkeypatch):
    """High-priority streams, few channels without clusters, and a watchdog that waits longer than our own timeout."""
    made = []
    monkeypatch.setattr(_compat.dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    monkeypatch.setattr(groups, "PrefixStore", lambda name, store: name)
    monkeypatch.setattr(_compat.c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(_compat, "without_bound_device", nullcontext)
    monkeypatch.setattr(
        _compat.c10d, "_new_process_group_helper", lambda *arguments: (made.append(arguments), None)[::-1]
    )
    monkeypatch.setattr(_compat.c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    groups.make_group([1, 3], "lane", "nccl", timedelta(seconds=5), 8)
    ((size, index, members, backend, _, name, options, timeout),) = made
    assert (size, index, members, backend, name) == (2, 1, [1, 3], "nccl", "lane")
    assert options.high and (options.config.max_ctas, options.config.cga_cluster_size) == (8, 1)
    assert timeout == options._timeout == timedelta(seconds=5) + timedelta(seconds=TIMING.nccl_grace)
    groups.make_group([1, 3], "exposed", "nccl", timedelta(seconds=5), groups.EXPOSED_CHANNELS)
    assert made[1][6].config.cga_cluster_size is None, "nothing runs beside it"


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_torch_must_not_abort_transfers_and_go_on(name, monkeypatch):
    """NCCL's work of an aborted communicator counts as complete, and torch's watchdog does not set our flag."""
    for value in ("1", "3"):
        monkeypatch.setenv(name, value)
        nccl.check_error_handling()
    monkeypatch.setenv(name, "2")
    with fake_world(2):
        transport = object.__new__(Nccl)
        transport._backend = "nccl"
        with pytest.raises(ValueError, match=f"{name}=2 lets torch abort transfers"):
            transport._open_lanes()


@pytest.mark.parametrize(
    "plan, channels, margin",
    [
        ("1x8", [8], 8),
        ("u8", [32], 0),
        ("u4/1x2", [32, 8], 8),
        ("1x2/1x4", [8, 8], 16),
        ("u4/1x2,groups=2", [8, 8], 16),
        ("1x8,channels=16", [16], 16),
        ("u4/1x2,channels=24", [32, 24], 24),
        ("1x2/1x4,channels=8/16", [8, 16], 24),
    ],
)
def test_transfers_under_compute_get_few_channels_and_others_many(plan, channels, margin, monkeypatch):
    """FlashAttention 3 leaves as many multiprocessors to them."""
    made, make_group = [], groups.make_group

    def recorded(members, name, backend, timeout, channels):
        made.append(channels)
        return make_group(members, name, backend, timeout, channels)

    monkeypatch.setattr(groups, "make_group", recorded)
    with fake_world(8):
        session = startrail.SequenceParallel(plan)._session
        session.runner_on(torch.device("cpu")).transport.open_direct(0)
        shapes = Shapes.of(*3 * [torch.empty(1, 8, 16, 8)])
        op_key = session.make_sequence(Boundaries((0, 8 * 16))).op_key
        masks = Mask(causal=True), Mask(causal=True, window=2)  # the second one fetches keys directly
        requests = [AttentionRequest(FORWARD, shapes, AttentionCall(mask)) for mask in masks]
        kernels = [session.start_pass(request, op_key).prepared.kernels[FORWARD] for request in requests]
    assert made == [*channels, *[32] * len(channels)]
    assert [kernel.sm_margin for kernel in kernels] == [margin, 0]


class Recorded:
    def __init__(self, lane, calls):
        self.lane, self.calls = lane, calls

    def _start_coalescing(self, device):
        self.calls.append(self.lane)

    def _end_coalescing(self, device):
        return f"work {self.lane}"

    def send(self, tensors, peer, tag):
        pass

    recv = send


def test_all_ranks_post_on_lanes_in_the_same_order():
    """Two communicators whose kernels do not fit on a GPU together would wait for each other. One work per lane."""
    transport, calls = object.__new__(Nccl), []
    transport.device, transport.tag = CUDA, 0
    transport.lanes = {lane: Lane(Recorded(lane, calls), {1: 0}) for lane in (0, 1)}
    messages = [Message(send, lane, 1, (), 0, 0) for lane in (1, 0) for send in (True, False)]
    made = MessageSet(messages, [1] * 4, buffers=range(4))
    assert transport._post(made, [torch.empty(1)] * 4, 0, None) == [["work 1"], ["work 0"]]
    assert calls == [0, 1]
