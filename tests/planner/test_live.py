"""auto on live ranks: described, measured or cached clusters, and one plan for all; doctor writes a file for plan."""

import os
from functools import partial

import pytest
import torch.distributed as dist

import startrail
from startrail.cli import main
from startrail.launch.local import run_local
from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import cluster_text, find_cluster
from startrail.planner.live import choose as auto
from startrail.planner.live import measure
from startrail.planner.workload import Job, Run, find_model
from tests.helpers import fork_ranks


def test_all_ranks_agree_on_described_and_measured_clusters(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("STARTRAIL_CLUSTER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("startrail.planner.live.measure.load_share", lambda: 0.0)  # other tests are load
    mine = tmp_path / "mine.toml"
    mine.write_text(cluster_text(find_cluster("a100-4x8"), "copied"))

    def on_rank(rank):
        def chosen(**options):
            try:
                return str(startrail.SequenceParallel("auto", heads=4, kv_heads=4, head_dim=8, **options).plan)
            except ValueError as error:
                return str(error)

        plans = {"measured": chosen(), "cached": chosen(), "file": chosen(cluster=str(mine), length=512)}
        plans["wrong"] = chosen(cluster="a100-4x9")
        job = Job(find_model("gpt-tiny"), Run(512, batch=2, dtype="float32"))
        plans["job"] = chosen(job=job, cluster="lab")
        if rank == 0:  # an unreadable cache must not make ranks wait
            (cached,) = (tmp_path / "startrail").glob("cluster-*.toml")
            cached.write_bytes(b"\xff\xfe")
        plans["again"] = chosen()
        if rank == 0:  # nor must an unexpected error
            auto.fit_cluster = lambda *_: 1 / 0
        plans["broken"] = chosen(cluster="lab")
        auto.fit_cluster = fit_cluster
        os.environ["STARTRAIL_CLUSTER"] = "nvl72"
        plans["variable"] = chosen()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, plans)
        return everyone

    (first, second), _ = run_local(on_rank, 2)
    assert first == second
    for name in ("measured", "cached", "file", "job", "again", "variable"):
        startrail.Plan.parse(first[name]).check_world(2)
    assert first["cached"] == first["measured"]
    assert "no cluster 'a100-4x9'; did you mean 'a100-4x8'?" in first["wrong"]
    assert "ZeroDivisionError" in first["broken"]
    assert len(list((tmp_path / "startrail").glob("cluster-*.toml"))) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "auto chose" in line]
    assert len(lines) == 6  # from one rank
    assert "measured now" in lines[0] and "measured before" in lines[1] and "described by nvl72" in lines[5]
    assert "of 512 tokens" in lines[2] and "for 8192 tokens, assumed" in lines[0]
    assert "a step of gpt-tiny with 2 x 512 tokens" in lines[3] and "measured now" in lines[4]


def test_measured_shares_are_the_same_on_all_ranks_and_those_of_every_sequence(monkeypatch, capfd):
    def on_rank(rank):
        speed = (4.0, 2.0, 3.9)[rank]
        real = startrail.SequenceParallel("1x3", shares="measured").shares
        monkeypatch.setattr(measure, "_rates", lambda device: {"matmul": speed, **curves(speed)})
        sp = startrail.SequenceParallel("1x3", shares="measured")
        equal, given = sp.sequence(50, shares=(1, 1, 1)), startrail.SequenceParallel("1x3", shares=(1, 3, 1))
        assert f"{sp.sequence(50).local} (100 %)" in sp.explain(50, heads=2)
        return real, sp.shares, sp.sequence(50).local, equal.local, given.sequence(50).local

    real, shares, measured, equal, given = zip(*run_local(on_rank, 3), strict=True)
    assert len(set(real)) == 1 and max(real[0]) == 1
    assert set(shares) == {(1.0, 0.51, 1.0)} and measured == (20, 10, 20)
    assert equal == (18, 18, 18) and given == (10, 30, 10)
    assert "startrail: shares measured: 1, 0.51, 1" in capfd.readouterr().err


def curves(speed):
    return {"forward": {"512": speed}, "backward": {"512": speed}}


@pytest.mark.parametrize("shares", ["fast", (1, 1), (0,), ("a",)])
def test_invalid_shares_are_one_line_errors(shares):
    with pytest.raises(ValueError, match=r"share") as raised:
        startrail.SequenceParallel("1x1", shares=shares)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("heads, kv_heads, message", [(4, 3, "not a multiple of 3"), (0, 1, "must be whole numbers")])
def test_impossible_heads_are_refused(heads, kv_heads, message):
    with pytest.raises(ValueError, match=message):
        startrail.SequenceParallel("auto", heads=heads, kv_heads=kv_heads)


def test_doctor_writes_a_cluster_that_plan_reads(tmp_path, capfd):
    file = str(tmp_path / "here.toml")
    assert main(["doctor", "--ranks", "2", "--out", file]) == 0
    text = capfd.readouterr().out
    for part in (
        "packages: torch 2.",
        "kernels: float32 on cpu: cpu (ATen",
        "limits:",
        "measured, ranks:",
        "measured, speeds of ranks:",
        "outliers:",
    ):
        assert part in text
    argv = ["plan", "--cluster", file, "--model", "gpt-tiny", "--length", "4k", "--dtype", "float32"]
    assert main(argv) == 0
    assert "on here: 2 x one thread of" in " ".join(capfd.readouterr().out.split())


def test_doctor_under_torchrun_measures_all_ranks(tmp_path):
    file, log = tmp_path / "there.toml", tmp_path / "log"
    assert fork_ranks(2, partial(main, ["doctor", "--out", str(file)]), log) == [0, 0], log.read_text()
    out = log.read_text()
    assert "process group: 2 ranks, 1 node of 2 (by LOCAL_WORLD_SIZE of torchrun), cpu:gloo" in out
    assert out.count("written: ") == 1
    assert find_cluster(str(file)).world == 2


@pytest.mark.parametrize(
    "argv, message",
    [(["--ranks", "0"], "--ranks 0 must be at least 1"), (["--out", "no/such/file.toml"], "no/such does not exist")],
)
def test_a_doctor_error_is_one_line(argv, message, capsys):
    assert main(["doctor", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
