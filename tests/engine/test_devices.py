"""A program that never calls torch.cuda.set_device: everything runs with its tensors' GPU as the current device.

Events, Triton's launches and pinned memory use the current device. On the wrong one, events are recorded on a stream
that nothing waits for, and every rank takes memory on GPU 0. Fake tensors on ``cuda:1``, and a fake process group.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import startrail
from startrail.bench.host import _CompletedNccl
from startrail.compile.problem import Boundaries
from startrail.engine.arguments import AttentionCall, Shapes
from startrail.engine.attention import AttentionRequest
from startrail.geometry.mask import Mask
from startrail.kernels import accumulate, base, cuda, rearrange
from startrail.schedule.values import BACKWARD, FORWARD
from startrail.transport import counters, nccl, opening
from tests.engine import test_launches as launches
from tests.kernels.stand_ins import WithoutDeviceGuard

OTHER = torch.device("cuda", 1)
UNFINISHED = SimpleNamespace(query=lambda: False)


@pytest.fixture
def used(monkeypatch):
    """What used the current device, with its number then."""
    found, current = [], [0]

    class Current:
        def __init__(self, device):
            self.index = torch.device(device).index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *error):
            current.pop()

    def noting(name, function):
        def call(*arguments, **options):
            found.append((name, current[-1]))
            return function(*arguments, **options)

        return call

    class Fused(launches.Fused):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            return noting(name, value) if callable(value) else value

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", noting("capturing", lambda: False))
    monkeypatch.setattr(nccl, "record_event", noting("event", lambda device: UNFINISHED))
    monkeypatch.setattr(counters, "_event", noting("timing event", lambda device: None))
    monkeypatch.setattr(nccl.AbortFlag, "__init__", noting("pinned memory", nccl.AbortFlag.__init__))
    fused = Fused()
    for module in (accumulate, base, rearrange):
        monkeypatch.setattr(module, "fused_on", lambda device: fused)
    kernel = lambda device, dtype, *_: cuda.FlashKernel(dtype)  # noqa: E731
    monkeypatch.setattr("startrail.engine.attention.kernel_for", kernel)
    monkeypatch.setitem(opening.CLASSES, "fake", _CompletedNccl)
    return found


def run(plan, device):
    """A forward and a backward pass, a collective's comparison, and what a check does on the device."""
    with launches.fake_world(8):
        sp = startrail.SequenceParallel(plan)
        session, mode = sp._session, FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            q, k, v, dout = (torch.empty(1, 16, 512, 64, dtype=torch.bfloat16, device=device) for _ in range(4))
        op_key = session.make_sequence(Boundaries((0, 8 * 512))).op_key
        shapes, call = Shapes.of(q, k, v), AttentionCall(Mask(True))
        forward = session.start_pass(AttentionRequest(FORWARD, shapes, call), op_key)
        backward = session.start_pass(AttentionRequest(BACKWARD, shapes, call, torch.tensor((0, 1))), op_key)
        transport = session._runner.transport
        transport._wait_for_device = lambda: nccl.record_event(device)  # no device ends what it has not begun
        transport._compare_and_wait = lambda digest: transport._compare(digest, None)
        with mode, WithoutDeviceGuard():
            kept = torch.empty(forward.prepared.kept_bytes, dtype=torch.uint8, device=device)
            (result,) = launches.run_pass(forward, {"q": (q,), "kv": (k, v)}, shapes, kept)
            lse, out = result["out"]
            inputs = {"do": (lse, base.row_sums(dout, out, torch.float32), dout)}
            inputs |= {} if sp.plan.heads > 1 else {"q": (q,), "kv": (k, v)}
            launches.run_pass(backward, inputs, shapes, kept)
            transport.compare_call()
            sp.check()


@pytest.mark.parametrize("plan", ["1x8", "u8", "u4/1x2", "2x4"])
def test_everything_runs_with_the_tensors_device_as_the_current_one(plan, used):
    run(plan, OTHER)
    assert {"event", "timing event", "pinned memory", "capturing", "row_sums"} <= {name for name, _ in used}
    assert [name for name, index in used if index != OTHER.index] == []
