"""Launchers without torchrun: each rank finds its own GPU, and all ranks find the same nodes."""

import warnings

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail import parallel
from startrail.launch.local import run_local
from startrail.planner.auto import Choice
from startrail.planner.live import placement
from startrail.planner.live.placement import LOCAL_RANKS, find_machine, own_device
from startrail.schedule.plan import Plan
from tests.helpers import error_of

WORLD = 8


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", *LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.parametrize("variable", LOCAL_RANKS)
def test_each_launchers_variable_gives_the_gpu(variable, eight_gpus, monkeypatch):
    monkeypatch.setenv(variable, "5")
    assert own_device() == torch.device("cuda", 5)


def test_torchrun_inside_of_slurm_counts_and_so_does_set_device(eight_gpus, monkeypatch):
    monkeypatch.setenv("SLURM_LOCALID", "0")  # of the task that runs torchrun
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert own_device() == torch.device("cuda", 6)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert own_device() == torch.device("cuda", 3)


def test_with_one_visible_gpu_per_task_it_is_that_one(eight_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    monkeypatch.setenv("SLURM_LOCALID", "5")
    assert own_device() == torch.device("cuda", 0)


def machine_on(host_of, device=lambda rank: torch.device("cpu")):
    """What each of 8 ranks finds, with its warnings."""

    def on_rank(rank):
        placement.platform.node = lambda: host_of(rank)
        placement._found_device = lambda: (device(rank), "SLURM_LOCALID of Slurm")
        found = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            text = error_of(lambda: found.extend(find_machine(dist.group.WORLD, range(WORLD))))
        return [str(each) for each in found], text, [str(each.message) for each in warned]

    results = run_local(on_rank, WORLD, deadline=60)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("per_node, machine", [(8, "1x8"), (4, "2x4"), (2, "4x2"), (1, "8x1")])
def test_ranks_that_share_a_host_name_share_a_node(per_node, machine):
    found, text, warned = machine_on(lambda rank: f"node{rank // per_node}")
    assert found[0] == machine and found[1].endswith("(by host names)")
    assert text == "no error" and not warned


def test_cyclic_placement_is_noticed():
    """As srun --distribution=cyclic places ranks: consecutive ones on different nodes."""
    found, _, (warning,) = machine_on(lambda rank: f"node{rank % 2}")
    assert found[0] == "1x8"
    assert "run on node0, node1, node0, node1..." in warning and "srun --distribution=block" in warning


def test_uneven_nodes_are_noticed():
    found, _, (warning,) = machine_on(lambda rank: f"node{rank // 3}")
    assert found[0] == "1x8" and "not filled evenly" in warning


def test_ranks_that_would_share_a_gpu_raise():
    gpus = {"node0": 0, "node1": 1}
    found, text, _ = machine_on(
        lambda rank: f"node{rank // 4}", lambda rank: torch.device("cuda", max(rank % 4, gpus[f"node{rank // 4}"]))
    )
    assert not found
    assert text.startswith("ValueError: ranks [4, 5] would all use cuda:1 of node1 (by SLURM_LOCALID of Slurm): call ")


def test_auto_plans_for_the_nodes_and_says_which(monkeypatch, capfd):
    def on_rank(rank):
        placement.platform.node = lambda: f"node{rank // 2}"
        asked = []
        parallel.choose = lambda group, machine, ask, cluster: (
            asked.append(str(machine)) or Choice(Plan.parse("1x4"), "a reason")
        )
        startrail.SequenceParallel("auto", heads=4)
        return asked

    assert run_local(on_rank, 4, deadline=60) == [["2x2"]] * 4
    assert capfd.readouterr().err.count("startrail: 2 nodes of 2 (by host names): a reason") == 1
