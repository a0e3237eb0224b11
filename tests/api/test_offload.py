"""Activations in host memory: on which stream they are copied, who waits for whom, and how many bytes leave the device.
Streams are stand-ins, and CPU tensors take the place of a GPU's."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import startrail
from startrail import offload
from startrail.offload import HostOffload
from startrail.planner.memory import estimate_memory
from startrail.training.models.configs import GPTConfig
from startrail.training.recipes import Recipe
from startrail.training.sharding import recompute_blocks
from startrail.training.tasks import make_model
from tests.helpers import LiveBytes

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

    class SideStream(Stream):
        def __init__(self, device):
            super().__init__("side", log)

    monkeypatch.setattr(torch.cuda, "Stream", SideStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(offload, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(offload, "used_on", lambda x, stream: log.append(f"{stream.name} uses {x.flatten()[0]:.0f}"))
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


class DeviceBytes(LiveBytes):
    """Counts all tensors but those that wait in host memory: the ones that name their device."""

    def __init__(self, model):
        super().__init__([x for parameter in model.parameters() for x in (parameter, parameter.grad)])
        self.on_host = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.empty_like.default and "device" in (kwargs or {}):
            out = func(*args, **kwargs)
            self.given.add(out.untyped_storage()._cdata)
            self.on_host.append(StorageWeakRef(out.untyped_storage()))  # so that no other storage gets its number
            return out
        return super().__torch_dispatch__(func, types, args, kwargs)


LAYERS, WIDTH, TOKENS = 8, 32, 256
INPUT = 4 * WIDTH * TOKENS  # bytes of one layer's input


def gpt(offload):
    config = GPTConfig(vocab=64, width=WIDTH, layers=LAYERS, heads=2, kv_heads=2, hidden=48, tied=True)
    model, sequence = make_model(config), startrail.SequenceParallel("1x1").sequence(TOKENS)
    recompute_blocks(model, offload)
    attention = partial(sequence.attention, causal=True)
    return model, lambda ids: model(ids, sequence.positions(), attention).square().mean()


def llama(offload):
    hf = pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install 'startrail[transformers]')"
    )
    from startrail.integrations.transformers import attach, shard_batch

    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    sp = startrail.SequenceParallel("1x1")
    model = attach(hf.LlamaForCausalLM(config), sp, offload=offload)
    model.gradient_checkpointing_enable()
    return model, lambda ids: model(**shard_batch(sp, input_ids=ids, labels=ids)).loss


@pytest.mark.parametrize("make", [gpt, llama])
def test_layer_inputs_leave_the_device_as_the_planner_estimates(make, log):
    """No layer's input is on the device between the passes, and two are at the peak of the backward pass: the one in
    use, and the one that is being copied. A reference that is kept would show in both."""

    def measure(offload):
        torch.manual_seed(0)
        model, loss_of = make(offload)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.arange(TOKENS).unsqueeze(0) % 64
        with DeviceBytes(model) as memory:
            loss = loss_of(ids)
            torch.zeros(())  # counts what is alive now
            between, memory.peak = sum(size for _, size in memory.live.values()), 0
            loss.backward()
        return between, memory.peak, [parameter.grad for parameter in model.parameters()]

    (between, peak, gradients), (with_offload, peak_with_offload, others) = measure(False), measure(True)
    run = Recipe("gpt", GPTConfig(64, WIDTH, LAYERS, 2, 2, 48), data="", out="", length=TOKENS, batch=1, recompute=True)
    plan = startrail.Plan.parse("1x1")
    estimates = [estimate_memory(replace(run, offload=x).job("float32", "cuda"), plan, 1).total for x in (False, True)]
    assert between - with_offload == pytest.approx(LAYERS * INPUT, rel=0.01)
    assert peak - peak_with_offload == pytest.approx(estimates[0] - estimates[1], rel=0.02)
    for ours, theirs in zip(others, gradients, strict=True):
        assert torch.equal(ours, theirs)
