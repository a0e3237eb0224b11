"""Activations in host memory: on which stream they are copied, and who waits for whom. Streams are stand-ins."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from startrail import offload
from startrail.offload import HostOffload

COPY, FORWARD, BACKWARD = 2, 2, 4  # time that each block takes


class Stream:
    """Notes every copy that runs on it, and every wait for another. It has a clock."""

    def __init__(self, name, log):
        self.name, self.log, self.time = name, log, 0

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")
        self.time = max(self.time, other.time)


class Copies(TorchDispatchMode):
    def __init__(self, streams, log):
        super().__init__()
        self.streams, self.log = streams, log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            self.log.append(f"{self.streams[-1].name} copies {source.flatten()[0]:.0f}")
            self.streams[-1].time += COPY
        elif func is torch.ops.aten.pow.Tensor_Scalar:
            is_forward = args[1] == 2
            self.streams[0].time += FORWARD if is_forward else BACKWARD
            self.log += [] if is_forward else ["compute works"]
        return func(*args, **(kwargs or {}))


class Log(list):
    """What two streams do, in order; ``compute`` is the first of them."""


@pytest.fixture
def log(monkeypatch):
    """What two streams do, with CPU tensors in the place of a GPU's."""
    log = Log()
    log.compute = compute = Stream("compute", log)
    current = [compute]

    @contextmanager
    def use(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(offload, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(offload, "_used_on", lambda x, stream: log.append(f"{stream.name} uses {x.flatten()[0]:.0f}"))
    with Copies(current, log):
        yield log


def test_copies_run_on_their_own_stream_one_block_ahead(log):
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    context, y = HostOffload(), x
    for _ in range(3):
        with context:
            y = y.pow(2)
    kept = [(f"side copies {n}", f"side uses {n}") for n in (2, 4, 16)]
    assert log == [line for lines in kept for line in ("side waits for compute", *lines)]
    log.clear()
    (grad,) = torch.autograd.grad(y, x, torch.tensor([1.0, -1.0]))
    assert log == [
        *("side copies 16", "compute waits for side", "compute uses 16"),
        *("side copies 4", "compute works"),  # at the same time
        *("compute waits for side", "compute uses 4"),
        *("side copies 2", "compute works"),
        *("compute waits for side", "compute uses 2", "compute works"),
    ]
    torch.testing.assert_close(grad, torch.tensor([8.0 * 2**7, -8.0 * 3**7]))


@pytest.mark.parametrize("own_stream, expected", [(False, 80), (True, 50)])
def test_a_step_waits_for_one_copy_instead_of_all(log, own_stream, expected, monkeypatch):
    """8 blocks compute for 48. On the stream that computes, as torch's ``save_on_cpu`` copies, 16 copies take 32 more.
    On a stream of their own they take 2: the last block's input comes back while nothing else is there to compute."""
    if not own_stream:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: log.compute)
    x = torch.tensor([1.0], requires_grad=True)
    context, y = HostOffload(), x
    for _ in range(8):
        with context:
            y = y.pow(2)
    torch.autograd.grad(y, x)
    assert log.compute.time == expected


def test_tensors_of_a_cpu_are_not_copied():
    x = torch.tensor([2.0], requires_grad=True)
    with HostOffload():
        y = x.pow(2)
    assert y.grad_fn._saved_self.data_ptr() == x.data_ptr()
    (grad,) = torch.autograd.grad(y, x)
    assert grad == 4
