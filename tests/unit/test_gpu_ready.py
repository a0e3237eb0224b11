"""What a first run on GPUs would hit, found without one: with fake tensors, stand-ins and fake process groups."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import startrail.op  # noqa: F401, registers the ops
from startrail import buffers, groups
from startrail.agree import Agreement
from startrail.arguments import describe, wrong_kind
from startrail.buffers import BufferPool
from startrail.counters import Counters, Stopwatch
from startrail.executor import Executor, Job

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
