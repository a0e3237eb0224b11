"""The engine on a backend that behaves like NCCL (``tests/like_nccl.py``), and what NCCL would make of mistakes."""

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import startrail
from startrail import groups
from startrail.check import check_cases
from startrail.lanes import Link
from startrail.local import run_local
from startrail.truth import Case
from tests import like_nccl
from tests.helpers import ROOT, error_of, qkv, torchrun

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def lanes_like_nccl(monkeypatch):
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)


SHAPES = [
    dict(length=257, causal=True, kv_heads=2, batch=2),
    dict(length=200, causal=False, window=64, documents=(0, 3, 90, 91, 200), batch=2),
    dict(length=300, causal=True, window=37, dtype=torch.bfloat16, documents=(0, 130, 131, 300)),
]
PLANS = {
    4: ["1x4", "2x2,keep=all", "star2", "u4", "u2/2x1,groups=2", "1x2/u2,keep=all,groups=2", "u2/u2", "2x1/1x2"],
    8: [
        "2x4,backward=queries",
        "u2/2x2,keep=queries",
        "u2/1x2/u2,keep=all,groups=2",
        "u4/1x2",
        "u2/star2",
    ],
}


@pytest.mark.parametrize("world", sorted(PLANS))
def test_every_plan_is_exact_on_it(world):
    """Reads before a wait give NaN, writes before a send has been waited for raise, and tags help nobody."""
    cases = [
        Case(plan, world, head_dim=16, seed=seed, **{"q_heads": 16, "kv_heads": 16, **shape})
        for plan in PLANS[world]
        for seed, shape in enumerate(SHAPES if world == 4 else SHAPES[1:])
    ]
    wrong = []
    for case, report in zip(cases, check_cases(cases), strict=True):
        wrong += [f"{case}: {text}" for text in report.verdict()]
    assert not wrong, "\n".join(wrong)


def test_ranks_with_other_documents_of_the_same_sizes_are_told():
    """Both sequences are known, so nobody asks beforehand; every message fits, and every number would be wrong."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=30)
        known = [sp.sequence(48, [0, cut, 48]) for cut in (8, 9)]
        for sequence in known:
            sequence.attention(*qkv())
        start = time.monotonic()
        text = error_of(lambda: known[rank == 2].attention(*qkv()))
        return text, time.monotonic() - start

    for text, seconds in run_local(on_rank, 3, deadline=60):
        assert text.startswith("ValueError: ranks disagree about one attention call"), text
        assert "(0, 8, 48)" in text
        assert "(0, 9, 48)" in text
        assert seconds < 15, "well before the timeout"


@pytest.mark.parametrize("plan, how", [("1x3", "killed"), ("u3", "stalled")])
def test_a_peer_that_dies_or_stalls_ends_every_other_rank_within_the_timeout(plan, how):
    def on_rank(rank):
        sp = startrail.SequenceParallel(plan, timeout=3)
        inputs = qkv(heads=3, kv_heads=3)
        sequence = sp.sequence(48)
        sequence.attention(*inputs)
        if rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        start = time.monotonic()
        text = error_of(lambda: sequence.attention(*inputs))
        return text, time.monotonic() - start

    results = run_local(on_rank, 3, deadline=60, expendable=frozenset({1}))
    for rank in (0, 2):
        text, seconds = results[rank]
        assert text.startswith(f"PeerError: rank {rank}, forward step ") and f" of plan {plan}: " in text, text
        assert "did not end within 0:00:03" in text
        assert seconds < 8
    assert any("rank 1 (global rank 1) over level 0" in results[rank][0] for rank in (0, 2)), results


def test_lanes_connect_every_pair_when_they_are_made_and_never_split_the_world():
    def on_rank(rank):
        def split(group):
            raise AssertionError("a lane was split off the world's communicator")

        c10d._get_split_source = split
        dist.group.WORLD.bound_device_id = torch.device("cuda", rank)  # as init_process_group(device_id=...) does
        sp = startrail.SequenceParallel("1x2/2x1", timeout=20)
        lanes = sp._runtime.executor_on(CPU).lanes
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", rank)
        dist.group.WORLD.bound_device_id = None
        used = {
            Link(send, lane, peer)
            for lane, group in enumerate(lanes.groups)
            for peer, place in lanes.places[lane].items()
            for send in (True, False)
            if group.counts[send, place]
        }
        before = [{pair for pair, count in group.counts.items() if count} for group in lanes.groups]
        dist.barrier()
        sp.sequence(64).attention(*qkv())
        after = [{pair for pair, count in group.counts.items() if count} for group in lanes.groups]
        return used, before == after

    for rank, (used, same) in enumerate(run_local(on_rank, 4, deadline=60)):
        assert used == {Link(send, lane, rank ^ (2 - lane)) for lane in (0, 1) for send in (True, False)}
        assert same, "the first pass connected nobody anew"


def test_a_peer_that_never_makes_its_lanes_is_named():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=2)
        if rank:
            time.sleep(8)
            return "late"
        return error_of(lambda: sp._runtime.executor_on(CPU))

    text, _ = run_local(on_rank, 2, deadline=60, expendable=frozenset({1}))
    assert text.startswith("PeerError: global rank 0: no connection "), text


def test_check_under_torchrun_uses_the_ranks_that_are_there():
    """A first look at a cluster: several plans and dtypes in one table, by rank 0, and an exit code."""
    command = [*torchrun(2), "-m", "startrail.cli", "check", "all", "--length", "64", "--heads", "4", "--head-dim", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"torch {torch.__version__}, 2 x ") and "gloo" in lines[0]
    assert "float32: cpu (ATen's flash attention for CPUs, in float32)" in lines
    table = [line for line in lines if line.endswith(" ok")]
    plans = ["1x2", "1x2", "u2", "u2", "2x1", "2x1", "u2/1x1", "u2/1x1"]
    assert [line.split()[0] for line in table] == [*plans, *["1x1/u2,keep=all,groups=2"] * 2, "1x2"]
