"""What doctor makes of numbers that ranks measured: the description, and who is odd. No rank runs here."""

import json
import sys
from pathlib import Path

import pytest
import torch

from startrail.cli import main
from startrail.diagnostics import doctor
from startrail.kernels import cuda
from startrail.planner.cluster import SlowMember, cluster_text, read_cluster
from startrail.planner.live import measure as live
from startrail.planner.live.summary import Measured, describe
from startrail.planner.topology import Machine
from startrail.planner.units import parse_text
from tests.kernels.stand_ins import PACKAGE
from tests.kernels.test_cuda_choice import hub_kernel, kernels_package


def ranks(machine: Machine, load: dict[str, float] | None = None, **changes: dict[int, float]) -> list[dict]:
    """What every rank would say; ``changes``: by measurement, a factor for some ranks. ``load`` is that of hosts."""
    found = []
    for rank in range(machine.world):
        mine = {"host": f"host{machine.node(rank)}", "dtype": "float32", "matmul": 80e9, "copy": 6e9, "call": 5e-6}
        mine |= {"load": 0.0 if load is None else load.get(mine["host"], 0.0)}
        mine |= {"forward": {"128": 20e9, "512": 30e9}, "backward": {"128": 15e9, "512": 25e9}}
        if machine.nodes > 1:
            mine |= {"latency 0": 50e-6, "alone 0": 1e9, "all 0": 1e9 / machine.ranks_per_node}
        if machine.ranks_per_node > 1:
            mine |= {"latency 1": 20e-6, "all 1": 4e9}
        for key, factors in changes.items():
            mine[key.replace("_", " ")] *= factors.get(rank, 1.0)
        found.append(mine)
    return found


def described(machine: Machine, **changes: dict) -> Measured:
    return describe(machine, ranks(machine, **changes), "a CPU", 8e9, on_gpu=False)


def test_nodes_that_share_a_link_and_ranks_that_do_not():
    found = described(Machine(4, 2))
    node, rank = found.cluster.levels
    assert (node.name, node.size, node.bandwidth, node.latency, node.shared) == ("node", 4, 1e9, 50e-6, True)
    assert (rank.name, rank.size, rank.bandwidth, rank.latency, rank.shared) == ("rank", 2, 4e9, 20e-6, False)
    assert found.outliers == () and found.cluster.slow == ()
    device = found.cluster.device
    assert (device.memory, device.copy, device.call, device.of("float32").matmul) == (8e9, 6e9, 5e-6, 80e9)
    assert device.of("float32").forward.points == ((128.0, 20e9), (512.0, 30e9))


def test_one_link_per_rank_is_detected_because_all_ranks_get_full_bandwidth():
    own = described(Machine(4, 2), all_0=dict.fromkeys(range(8), 2.0))
    assert not own.cluster.levels[0].shared
    assert own.cluster.levels[0].bandwidth == 1e9


def test_what_few_channels_reach_is_written_down_where_it_is_less():
    """All ranks of a node share its link, so what one of them reaches counts as often as there are ranks."""
    everyone = [found | {"few 0": 0.49e9, "few 1": 1e9, "post": 15e-6} for found in ranks(Machine(4, 2))]
    cluster = describe(Machine(4, 2), everyone, "a GPU", 8e9, on_gpu=True).cluster
    assert [level.under_compute for level in cluster.levels] == [0.0, 1e9]
    again = read_cluster(parse_text(cluster_text(cluster, "text"), Path("x.toml")), "again", "x.toml")
    assert [level.under_compute for level in again.levels] == [0.0, 1e9]
    slow = [found | {"few 0": 0.2e9} for found in everyone]
    assert describe(Machine(4, 2), slow, "a GPU", 8e9, on_gpu=True).cluster.levels[0].under_compute == 0.4e9


@pytest.mark.parametrize(
    "machine, names", [("1x4", ["rank"]), ("4x1", ["node"]), ("1x1", ["rank"]), ("2x3", ["node", "rank"])]
)
def test_levels_are_those_with_several_members(machine, names):
    found = described(Machine.parse(machine)).cluster
    assert [level.name for level in found.levels] == names
    assert found.world == Machine.parse(machine).world


@pytest.mark.parametrize(
    "changes, texts, slow",
    [
        (
            {"matmul": {5: 0.3}},
            ["rank 5 (node 2, host2): matrix products at 30% of the others'"],
            [SlowMember(1, 5, 1.0, 0.3)],
        ),
        ({"all_0": {6: 0.4, 7: 0.2}}, ["rank 6 (node 3", "rank 7 (node 3"], [SlowMember(0, 3, 0.2)]),
        ({"all_1": {1: 0.25}}, ["its link to the next rank of its node at 25%"], [SlowMember(1, 1, 0.25)]),
        ({"matmul": {2: 0.4}, "all_1": {2: 0.1}}, ["products", "its link"], [SlowMember(1, 2, 0.1, 0.4)]),
        ({"copy": {0: 0.1}}, ["memory copies at 10%"], []),
        ({"matmul": {3: 1e-9}}, ["at 0%"], [SlowMember(1, 3, 1.0, 0.001)]),
        ({"matmul": {3: 0.6}}, [], []),
    ],
)
def test_the_odd_are_named_and_written_as_slow_members(changes, texts, slow):
    found = described(Machine(4, 2), **changes)
    assert len(found.outliers) == len(texts)
    for line, text in zip(found.outliers, texts, strict=True):
        assert text in line
    assert found.cluster.slow == tuple(slow)
    read = read_cluster(parse_text(cluster_text(found.cluster, "odd"), Path("a.toml")), "a", "a.toml")
    assert read.slow == found.cluster.slow


def test_the_odd_on_a_loaded_machine_are_not_written_down():
    found = described(Machine(4, 2), load={"host2": 0.9, "host1": 0.1}, matmul={5: 0.22, 0: 0.3})
    assert found.cluster.slow == (SlowMember(1, 0, 1.0, 0.3),)
    assert found.loaded == ("host2: other programs use 90% of the cores",)
    assert [line.endswith("ignored") for line in found.outliers] == [False, True]


def test_outliers_are_measured_again_and_the_best_counts(monkeypatch):
    """One slow round of matrix products is chance."""
    usual = ranks(Machine(1, 4))[0]
    rounds = [dict(usual, matmul=1e9), usual]
    monkeypatch.setattr(live, "load_share", lambda: 0.0)
    monkeypatch.setattr(live, "_rates", lambda device: {k: x for k, x in rounds.pop(0).items() if k != "host"})
    others = [json.dumps(usual)] * 3
    monkeypatch.setattr(live, "gather_texts", lambda text, *_: [text, *others])
    found = live.measure(None, Machine(1, 4))
    assert found.outliers == () and rounds == []


def test_the_suggested_command_works(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(live, "load_share", lambda: 0.9)
    out = tmp_path / "here.toml"
    assert main(["doctor", "--out", str(out)]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert "Unreliable" in out.read_text()
    assert main(last.partition("now: startrail ")[2].split()) == 0


def test_an_odd_rank_where_every_node_has_one():
    assert described(Machine(4, 1), matmul={2: 0.2}, all_0={1: 0.3}).cluster.slow == (
        SlowMember(0, 1, 0.3),
        SlowMember(0, 2, 1.0, 0.2),
    )


@pytest.mark.parametrize(
    "backends, where", [("cpu:gloo,cuda:nccl", "cuda"), ("cuda:nccl", "cuda"), ("cpu:gloo", "cpu")]
)
def test_a_group_without_a_named_backend_computes_where_nccl_is(backends, where, monkeypatch):
    monkeypatch.setattr(live.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(live.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(live.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(live.dist, "get_backend", lambda: "undefined")
    monkeypatch.setattr(live.dist, "get_backend_config", lambda: backends)
    assert live.own_device().type == where


def on_a_gpu(monkeypatch):
    found = {"is_available": True, "device_count": 1, "get_device_name": "H100", "get_device_capability": (8, 0)}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)


def test_the_facts_name_the_versions_of_nccl_and_cudnn(monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 3))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91400)
    versions = f"CUDA {torch.version.cuda}, NCCL 2.30.3, cuDNN 91400, compute capability 8.0"
    assert versions in doctor.facts().splitlines()


def test_the_facts_say_whether_flash_attn_from_the_kernels_hub_runs(monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 3))
    ours = hub_kernel("flash_attn2_3c", flash_attn_interface=PACKAGE)
    cuda._installed_flash_attn.cache_clear()
    for loaded, version, runs, hint in (
        ([], "not installed", "cuda-flash (torch's FlashAttention 2", False),
        ([], "0.12", "cuda-flash (torch's FlashAttention 2", True),
        ([ours], "0.12", "cuda-flash-attn (flash-attn is loaded from the kernels hub: kernels-community/flash-", False),
    ):
        monkeypatch.setitem(sys.modules, "kernels", kernels_package(*loaded))
        monkeypatch.setattr(doctor, "_version", lambda name, version=version: version)
        lines = doctor.facts().splitlines()
        assert any(line.startswith(f"kernels: bfloat16 on cuda: {runs}") for line in lines), lines
        assert hint == any("kernels: a program that calls kernels.get_kernel(" in line for line in lines)
