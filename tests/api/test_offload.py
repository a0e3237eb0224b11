"""Activations in host memory: on which stream they are copied, and who waits for whom. Streams are stand-ins."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from startrail import offload
from startrail.offload import HostOffload


class Stream:
    """Notes every copy that runs on it, and every wait for another."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Copies(TorchDispatchMode):
    def __init__(self, streams, log):
        super().__init__()
        self.streams, self.log = streams, log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            self.log.append(f"{self.streams[-1].name} copies {source.flatten()[0]:.0f}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch):
    """What two streams do, with CPU tensors in the place of a GPU's."""
    log = []
    compute = Stream("compute", log)
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
        "side copies 4",  # while the last block computes
        *("compute waits for side", "compute uses 4"),
        "side copies 2",
        *("compute waits for side", "compute uses 2"),
    ]
    torch.testing.assert_close(grad, torch.tensor([8.0 * 2**7, -8.0 * 3**7]))


def test_tensors_of_a_cpu_are_not_copied():
    x = torch.tensor([2.0], requires_grad=True)
    with HostOffload():
        y = x.pow(2)
    assert y.grad_fn._saved_self.data_ptr() == x.data_ptr()
    (grad,) = torch.autograd.grad(y, x)
    assert grad == 4
