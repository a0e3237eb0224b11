"""What a first run on GPUs would hit, found without one: with fake tensors, stand-ins and fake process groups."""

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import startrail.op  # noqa: F401, registers the ops
from startrail import buffers, groups
from startrail.agree import Agreement
from startrail.arguments import describe, wrong_kind
from startrail.bench import peers
from startrail.bench.cases import Work
from startrail.buffers import BufferPool
from startrail.check import Case, check_cases
from startrail.counters import Counters, Stopwatch
from startrail.executor import Executor, Job
from startrail.kernels import cuda, kernel_for
from startrail.lanes import Lanes, Message
from tests.unit import test_kernels_cuda as stand_ins

CUDA = torch.device("cuda", 0)


def test_ranks_agree_about_tensors_on_their_own_gpus():
    with FakeTensorMode():
        first, second = (torch.empty(1, 2, 4, 8, device=f"cuda:{index}") for index in range(2))
    assert describe(first) == describe(second) == "(1, 2, 4, 8) float32 cuda"
    assert wrong_kind(first, second, first, False, None, None) == (
        "q, k, v must be on one device, got q on cuda:0, k on cuda:1, v on cuda:0"
    )


def test_a_buffer_is_used_again_on_its_own_stream_only(monkeypatch):
    stream = 1
    monkeypatch.setattr(buffers, "stream_of", lambda device: stream)
    pool = BufferPool()
    buffer = pool.get(64, torch.device("cpu"))
    pool.put(buffer)
    stream = 2
    other = pool.get(64, torch.device("cpu"))
    assert other is not buffer
    assert pool.get(48, torch.device("cpu")).flat.data_ptr() != buffer.flat.data_ptr(), "nor the beginning of it"
    stream = 1
    assert pool.get(64, torch.device("cpu")) is buffer


def test_cuda_graphs_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    executor = Executor(None, Agreement(None, None, False), Counters())
    job = Job(None, {}, None, None, 1.0, 0, CUDA)
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        executor.run(job, None, {}, None)
    for op in (torch.ops.startrail.attention.default, torch.ops.startrail.attention_backward.default):
        assert torch.Tag.cudagraph_unsafe in op.tags


@pytest.fixture
def cuda_backend(monkeypatch):
    """The engine's CUDA backend on CPU tensors: stand-ins that compute as flash attention does, in half precision."""
    for op in ("flash_forward", "flash_backward", "bands_forward", "bands_backward"):
        monkeypatch.setattr(cuda, f"_{op}", getattr(stand_ins, op))
    monkeypatch.setattr("startrail.runtime.kernel_for", lambda device, dtype, dim: cuda.AtenFlashKernel(dtype))


def test_half_precision_gradients_on_the_cuda_backend(cuda_backend):
    """lse and delta are one number a row, and stay in float32; rounded to bfloat16 they made gradients four times as
    wrong. Also windows and documents as flash attention's own."""
    shape = dict(world=2, length=192, q_heads=2, kv_heads=2, head_dim=16, dtype=torch.bfloat16, causal=True)
    cases = [Case("1x2", **shape), Case("u2", **shape), Case("2x1", **shape, window=20)]
    cases += [
        Case("1x2", **shape, documents=(0, 30, 31, 100, 192)),
        Case("1x2", **shape, window=9, documents=(0, 100, 192)),
    ]
    wrong = []
    for case, report in zip(cases, check_cases(cases), strict=True):
        wrong += [f"{case}: {text}" for text in report.verdict()]
    assert not wrong, "\n".join(wrong)


class Group:
    def __init__(self, calls):
        self.calls = calls

    def abort(self):
        self.calls.append("abort")


def test_after_an_error_groups_are_aborted_before_they_are_destroyed(monkeypatch):
    """NCCL's shutdown waits for transfers under way, which after an error never end."""
    calls = []
    monkeypatch.setattr(groups.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(groups.dist, "destroy_process_group", lambda group: calls.append("destroy"))
    groups.destroy([Group(calls)], ended=["a peer died"])
    assert calls == ["abort", "destroy"]
    calls.clear()
    groups.destroy([Group(calls)], ended=[])
    assert calls == ["destroy"], "what is still on its way must arrive"


class Event:
    """A clock that the test sets."""

    now = 0.0

    def __init__(self, device, enable_timing=False):
        assert enable_timing

    def record(self):
        self.time = Event.now

    def query(self):
        return True

    def synchronize(self):
        Event.synchronized = True

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


def test_time_on_a_gpu_is_taken_by_events_and_read_when_asked(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    Event.now, Event.synchronized = 0.0, False
    watch = Stopwatch()
    for _ in range(1000):
        start = watch.start(CUDA)
        Event.now += 0.5
        watch.stop(start, CUDA)
    assert not Event.synchronized
    assert len(watch._unread) < 1000, "those long over are read on the way"
    assert watch.seconds() == 500.0
    assert Event.synchronized


def test_the_benchmark_under_torchrun_measures_gpus_in_bfloat16(monkeypatch):
    """Without a choice torch's backend is called 'undefined', and GPUs were taken for CPUs."""
    monkeypatch.setattr(peers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(peers.dist, "get_backend", lambda: "undefined")
    monkeypatch.setattr(peers.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = peers.own_device()
    assert device == torch.device("cuda", 1)
    assert kernel_for(device, peers.own_dtype(device), 64).name.startswith("cuda-flash")
    data = peers.make_data(Work(length=8, q_heads=2, kv_heads=2, head_dim=8, causal=True))
    assert torch.equal(data.inputs[0].bfloat16().float(), data.inputs[0]), "the answers are of what is measured"
    monkeypatch.setattr(peers.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert peers.own_device() == torch.device("cpu")


class NcclOptions:
    def __init__(self, is_high_priority_stream=False):
        self.high = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


def test_lanes_on_nccl_have_their_settings_in_one_place(monkeypatch):
    """Streams of high priority, few channels, and a watchdog that comes after our own deadline."""
    made = []
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    monkeypatch.setattr(groups, "PrefixStore", lambda name, store: name)
    monkeypatch.setattr(groups.c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(groups, "_unbound", nullcontext)
    monkeypatch.setattr(
        groups.c10d, "_new_process_group_helper", lambda *arguments: (made.append(arguments), None)[::-1]
    )
    monkeypatch.setattr(groups.c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    groups.make_group([1, 3], "lane", "nccl", timedelta(seconds=5))
    ((size, index, members, backend, _, name, options, timeout),) = made
    assert (size, index, members, backend, name) == (2, 1, [1, 3], "nccl", "lane")
    assert options.high and options.config.max_ctas == groups.CHANNELS
    assert timeout == options._timeout == timedelta(seconds=5) + groups.GRACE


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


def test_a_step_posts_on_its_lanes_in_one_order_on_all_ranks():
    """Two communicators whose kernels do not fit on a GPU together would wait for each other; a work a lane."""
    lanes, calls = object.__new__(Lanes), []
    lanes.tagged, lanes.device, lanes.places = False, CUDA, [{1: 0}, {1: 0}]
    lanes.groups = [Recorded(lane, calls) for lane in (0, 1)]
    messages = [Message(send, lane, 1, (), False, 0) for lane in (1, 0) for send in (True, False)]
    assert lanes.post(messages, [torch.empty(1)] * 4, 0) == ["work 1", "work 1", "work 0", "work 0"]
    assert calls == [0, 1]
