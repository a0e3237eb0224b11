"""The planner behind auto, for heads alone and for a whole job; startrail show auto prints the same choice."""

import re

from startrail.cli import main
from startrail.planner.auto import fit_cluster, plan_for_heads, plan_for_job
from startrail.planner.cluster import find_cluster
from startrail.planner.search import search
from startrail.planner.step import Training
from startrail.planner.topology import Machine
from startrail.planner.workload import Job, Run, find_model
from tests.helpers import refusal


def test_auto_for_heads_alone_chooses_a_plan_that_fits_and_keeps_nothing():
    cluster = find_cluster("a100-4x8")
    plan, reason = plan_for_heads(cluster, 32, 32, 128, 2**19)
    memory = Training(cluster, find_model("gpt-7b"), Run(2**19)).memory(plan)
    assert plan.keep == "none"
    assert memory.total < memory.limit, f"{plan} needs {memory.total / 1e9:.0f} GB"
    assert "assuming 32 layers whose attention uses at most half of the memory and keeps nothing" in reason


def test_auto_for_a_job_chooses_what_plan_ranks_first():
    cluster = find_cluster("a100-4x8")
    for name, length, batch in (("gpt-7b", 2**19, 1), ("dit-1b", 2**17, 1), ("gpt-3b", 2**15, 4)):
        model, run = find_model(name), Run(length, batch)
        plan, reason = plan_for_job(cluster, Job(model, run, data_parallel=batch))
        best = search(cluster, model, run, data_parallel=batch).best
        assert plan == best.plan
        assert best.step.memory.total <= best.step.memory.limit
        assert f"a step of {name} with {batch} x {length} tokens" in reason
        assert ("full mask" if name == "dit-1b" else "causal mask") in reason


def test_auto_for_a_job_that_may_not_fit_warns_and_chooses_the_smallest():
    plan, reason = plan_for_job(find_cluster("a100-4x8"), Job(find_model("gpt-7b"), Run(2**24)))
    plan.check_world(32)
    assert plan.keep == "none"
    assert re.search(r"may not fit, and this plan needs the least memory \(\S+ needs [\d.]+ GB per device", reason)
    _, reason = plan_for_heads(find_cluster("a100-4x8"), 32, 32, 128, 2**24)
    assert "may not fit" in reason


def test_show_auto_prints_the_choice_for_that_cluster(capsys, monkeypatch):
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)
    argv = ["show", "auto", "--ranks", "16", "--nodes", "2", "--heads", "32", "--kv-heads", "8", "--length", "65536"]
    assert main([*argv, "--cluster", "a100-4x8"]) == 0
    described = capsys.readouterr().out
    _, reason = plan_for_heads(fit_cluster(find_cluster("a100-4x8"), Machine(2, 8)), 32, 8, None, 65536)
    assert described.startswith(f"{reason}; cluster described by a100-4x8\n")
    assert main(argv) == 0
    assumed = capsys.readouterr().out
    _, reason = plan_for_heads(fit_cluster(find_cluster("h100-8x8"), Machine(2, 8)), 32, 8, None, 65536)
    assert assumed.startswith(f"{reason}; cluster assumed to be like h100-8x8 (pass --cluster to plan for yours)\n")
    monkeypatch.setenv("STARTRAIL_CLUSTER", "a100-4x8")
    assert main(argv) == 0
    assert capsys.readouterr().out == described
    assert "no cluster 'a100-4x9'" in refusal([*argv, "--cluster", "a100-4x9"], capsys)
