"""Measuring a GPU, with the clocks of a device that is known: its description must come out again."""

import json

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from startrail.kernels import accumulate, cuda
from startrail.planner.auto import plan_for_heads
from startrail.planner.cluster import find_cluster
from startrail.planner.live import measure as live
from startrail.planner.topology import Machine
from startrail.schedule.plan import CHANNELS
from tests.engine.test_launches import VIEWS, fake_world
from tests.kernels.stand_ins import WithoutDeviceGuard


class Clocks(TorchDispatchMode):
    """The host queues operations, ``call`` seconds each; the device runs them one after the other."""

    def __init__(self, cluster):
        super().__init__()
        self.cluster, self.device = cluster, cluster.device
        self.rates = self.device.of("bfloat16")
        self.host = self.gpu = 0.0
        self.channels = 0  # of the lanes that are measured

    def launch(self, host, gpu):
        self.host += host
        self.gpu = max(self.gpu, self.host) + gpu

    def synchronize(self, *device):
        self.host = max(self.host, self.gpu)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not name.startswith(VIEWS):
            self.launch(self.device.call, self.seconds(name, args))
        return func(*args, **(kwargs or {}))

    def seconds(self, name, args):
        if "attention" in name:
            q = args[1] if "backward" in name else args[0]
            curve, flops = (self.rates.backward, 10) if "backward" in name else (self.rates.forward, 4)
            batch, heads, tokens, dim = q.shape
            return flops * batch * heads * tokens * tokens * dim / curve.at(tokens)
        if name == "mm":
            return 2 * args[0].shape[0] ** 3 / self.rates.matmul
        return 2 * args[0].nbytes / self.device.copy if name == "clone" else 0.0

    def make_group(self, ranks, name, backend, timeout, channels):
        self.channels = channels
        return dist.group.WORLD

    def event(self, enable_timing):
        clocks = self

        class Event:
            def record(self):
                self.at = max(clocks.gpu, clocks.host)

            def synchronize(self):
                clocks.synchronize()

            def elapsed_time(self, end):
                return 1000 * (end.at - self.at)

        return Event()

    def transfer(self, operations):
        """One level's latency, and the bytes over the rank's link or its share of the node's; with few channels, over
        as much of the link as these fill."""
        send = operations[0]
        node = send.peer // self.cluster.levels[1].size != 0
        level = self.cluster.levels[0 if node else 1]
        sharing = self.cluster.levels[1].size if level.shared and self.crowded else 1
        rate = level.under_compute if level.under_compute and self.channels == CHANNELS else level.bandwidth
        self.launch(2 * self.device.post, level.latency + send.tensor.nbytes * sharing / rate)
        return []


class Operation:
    def __init__(self, op, tensor, peer, group):
        self.tensor, self.peer = tensor, peer


def measured(cluster, monkeypatch):
    """What rank 0 of this cluster measures, as if all ranks did."""
    machine, clocks = Machine(*(level.size for level in cluster.levels)), Clocks(cluster)
    gpu = torch.device("cuda", 0)
    for name, number in (("REPEATS", 2), ("LOOP", 5), ("LAUNCHES", 20)):  # these clocks are exact
        monkeypatch.setattr(live, name, number)
    monkeypatch.setattr(live, "own_device", lambda: gpu)
    monkeypatch.setattr(live, "device_name", lambda device: cluster.device.name)
    monkeypatch.setattr(live, "memory_of", lambda device, ranks: cluster.device.memory)
    monkeypatch.setattr(live, "kernel_for", lambda device, dtype, dim: cuda.FlashKernel(dtype))
    monkeypatch.setattr(accumulate, "fused_on", lambda device: None)  # Triton's interpreter cannot take fake tensors
    monkeypatch.setattr(live, "make_group", clocks.make_group)
    monkeypatch.setattr(live.OpenGroups, "close", lambda opened: None)
    monkeypatch.setattr(live, "backend_for", lambda device: "nccl")
    monkeypatch.setattr(live, "gather_texts", lambda text, group, device: [text] * machine.world)
    monkeypatch.setattr(live.time, "perf_counter", lambda: clocks.host)
    monkeypatch.setattr(torch.cuda, "Event", clocks.event)
    monkeypatch.setattr(torch.cuda, "synchronize", clocks.synchronize)
    monkeypatch.setattr(dist, "P2POp", Operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", clocks.transfer)
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    bandwidth = live._bandwidth

    def crowd(link, group, device, takes_part=True):
        clocks.crowded = crowd.calls > 0  # first alone, then all ranks of a node
        crowd.calls += 1
        return bandwidth(link, group, device, takes_part)

    crowd.calls, clocks.crowded = 0, False
    monkeypatch.setattr(live, "_bandwidth", crowd)
    with fake_world(machine.world), FakeTensorMode(allow_non_fake_inputs=True), WithoutDeviceGuard(), clocks:
        return live.measure(dist.group.WORLD, machine).cluster


@pytest.mark.parametrize("name, length", [("h100-8x8@2x8", 2**15), ("a100-4x8@2x8", 2**16)])
def test_a_measured_gpu_is_within_15_percent_of_the_device_and_auto_picks_the_same_plan(name, length, monkeypatch):
    """Of these lengths it would not be the same plan if lanes under compute were taken to be as fast as others."""
    cluster = find_cluster(name)
    found = measured(cluster, monkeypatch)
    true, ours = cluster.device, found.device
    pairs = {key: (getattr(ours, key), getattr(true, key)) for key in ("copy", "call", "post", "start")}
    rates, true_rates = ours.of("bfloat16"), true.of("bfloat16")
    pairs["matmul"] = rates.matmul, true_rates.matmul
    for tokens in (512, 2048, 8192):
        for pass_ in ("forward", "backward"):
            pairs[f"{pass_} {tokens}"] = tuple(getattr(x, pass_).at(tokens) for x in (rates, true_rates))
    for number, level in enumerate(cluster.levels):
        pairs[f"bandwidth {number}"] = found.levels[number].bandwidth, level.bandwidth
        assert found.levels[number].shared == level.shared
        few = found.levels[number].under_compute, level.under_compute
        if any(few):
            pairs[f"under compute {number}"] = few
    wrong = {key: pair for key, pair in pairs.items() if not 0.85 * pair[1] < pair[0] < 1.15 * pair[1]}
    assert not wrong, json.dumps(wrong)
    for tokens in (length, 2**18):
        plans = [str(plan_for_heads(x, 32, 8, 128, tokens).plan) for x in (found, cluster)]
        assert plans[0] == plans[1], tokens
