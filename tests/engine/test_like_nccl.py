"""The engine on a backend that behaves like NCCL (``tests/like_nccl.py``): exactness, failing peers and cleanup."""

import gc
import json
import os
import signal
import subprocess
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import startrail
from startrail import _compat
from startrail.agreement.timing import TIMING
from startrail.cli import main
from startrail.diagnostics import cluster_check, exactness
from startrail.diagnostics.reference import Case
from startrail.kernels import CpuKernel
from startrail.launch import torchrun as joining
from startrail.launch.local import run_local
from startrail.transport import nccl
from startrail.transport import process_groups as groups
from startrail.transport.nccl import Link
from tests import like_nccl
from tests.engine import plans
from tests.engine.test_exact import case_for
from tests.helpers import FULL, ROOT, error_of, eventually, qkv, torchrun
from tests.lazy_stream import LazyEvent, LazyStream

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def lanes_like_nccl(monkeypatch):
    like_nccl.register()
    monkeypatch.setattr(groups, "backend_for", lambda device: like_nccl.NAME)
    monkeypatch.setattr(TIMING, "slow_wait", 0.4)


# Windows and documents give blocks of many shapes; the other case has an uneven length, shared KV heads and bfloat16.
SHAPES = [
    dict(length=200, causal=False, window=64, documents=(0, 3, 90, 91, 200), batch=2),
    dict(length=301, causal=True, kv=2, dtype=torch.bfloat16),
]


def selected(world):
    """(plan, index of a shape): every plan with one shape, those of ``PLANS`` on up to 8 ranks with the other one too;
    except in ``make test-all``, with one of the two, and on 8 ranks the third of the variants that gloo leaves out."""
    cases = []
    for number, plan in enumerate(plans.every_plan(world)):
        both = world <= 8 and plan in plans.PLANS[world]
        if FULL:
            cases += [(plan, shape) for shape in range(1 + both)]
        elif world != 8 or plan not in plans.variants(8) or plans.on_nccl_only(plan, world):
            cases.append((plan, number // 2 % 2 if both else 0))
    return cases


@pytest.mark.parametrize("world", [world for world in sorted(plans.PLANS) if 1 < world <= (16 if FULL else 9)])
def test_every_plan_is_exact_on_a_backend_like_nccl(world, monkeypatch):
    """Reads before a wait give NaN, writes before a send has completed raise, and tags are ignored. On up to 3 ranks,
    or all in ``make test-all``, the host runs ahead of a stream, and no wait blocks it."""
    plain = exactness.check_on_rank

    def check_on_rank(*arguments):
        with LazyStream() if FULL or world <= 3 else nullcontext():
            return plain(*arguments)

    monkeypatch.setattr(exactness, "check_on_rank", check_on_rank)
    monkeypatch.setattr(nccl, "record_event", lambda device: LazyEvent())
    plans.run([case_for(plan, world, SHAPES[shape], 1 + shape) for plan, shape in selected(world)])


def are_closed(made):
    """True if all groups are aborted and then shut down; the watchdog's thread may keep them for a moment."""
    return eventually(lambda: all(group.history == ["abort", "shutdown"] for group in made))


def test_different_documents_of_one_shape_raise():
    """Both sequences are known, so calls are not compared beforehand. All messages match; results would be wrong."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=30)
        known = [sp.sequence(48, [0, cut, 48]) for cut in (8, 40)]
        for sequence in known:
            sequence.attention(*qkv())
        start = time.monotonic()
        text = error_of(lambda: known[rank == 2].attention(*qkv()))
        return text, time.monotonic() - start

    for text, seconds in run_local(on_rank, 3, deadline=60):
        assert text.startswith("ValueError: ranks disagree about one attention call"), text
        assert "(0, 8, 48)" in text
        assert "(0, 40, 48)" in text
        assert seconds < 15, "well before the timeout"


@pytest.mark.parametrize(
    "plan, how, pass_",
    [
        ("1x3", "killed", "forward"),
        ("u3", "stalled", "forward"),
        ("1x3", "stalled", "backward"),
        ("u3", "killed", "backward"),
    ],
)
def test_a_dead_or_stalled_peer_raises_on_every_other_rank_within_the_timeout(plan, how, pass_):
    """Two communicators of a rank hang, the lane's and the one that compares calls. Aborting one after the other would
    hang, too (``LikeNccl.abort``)."""

    def on_rank(rank):
        sp = startrail.SequenceParallel(plan, timeout=3)
        inputs = [x.requires_grad_() for x in qkv(heads=3, kv_heads=3)]
        sequence = sp.sequence(48)
        sequence.attention(*inputs).sum().backward()  # later calls are not compared beforehand
        out = sequence.attention(*inputs)
        if rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        start = time.monotonic()
        text = error_of(lambda: sequence.attention(*inputs) if pass_ == "forward" else out.sum().backward())
        return text, time.monotonic() - start, are_closed(like_nccl.GROUPS)

    results = run_local(on_rank, 3, deadline=60, expendable=frozenset({1}))
    for rank in (0, 2):
        text, seconds, ended = results[rank]
        assert text.startswith(f"PeerError: rank {rank}, {pass_} step ") and f" of plan {plan}: " in text, text
        assert "did not end within 0:00:03" in text
        assert "comparing calls failed" not in text, "the wait raises, not the end of the pass"
        assert seconds < 20, "rank 1 would have come after 30"
        assert ended, "groups must be aborted before they are shut down"
    assert any("rank 1 (global rank 1) over level 0" in results[rank][0] for rank in (0, 2)), results


@pytest.mark.parametrize(
    "has_python_errors, reason",
    [(True, "NCCL error: remote process exited"), (False, "the transfer failed: communication error")],
)
def test_a_failed_transfer_raises(monkeypatch, has_python_errors, reason):
    """NCCL counts a work with an error as completed, and its wait does not raise, although no data arrived. Before
    torch 2.13 only the kind of error can be read."""
    monkeypatch.setattr(_compat, "_has_python_errors", has_python_errors)

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=30)
        sequence = sp.sequence(48)
        sequence.attention(*qkv())
        if rank == 1:
            for lane in sp._session._runner.transport.lanes.values():
                lane.group.break_with("NCCL error: remote process exited\nand so on")
        start = time.monotonic()
        text = error_of(lambda: [sequence.attention(*qkv()) for _ in range(2)])
        return text, time.monotonic() - start

    results = run_local(on_rank, 3, deadline=60)
    assert results[1][0].startswith("PeerError: rank 1, forward step ") and "kv0 from rank 0" in results[1][0], results
    for text, seconds in results:
        assert text.startswith("PeerError: ") and text.endswith(f"failed: {reason}"), text
        assert seconds < 15, "well before the timeout"


def test_a_local_error_aborts_and_frees_the_lanes_immediately():
    """A kernel raises in the middle of a pass. Shutting down the lanes would wait forever for pending transfers. If
    these referred to the runner, the lanes would stay open until garbage collection."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x3", timeout=30)
        sequence, inputs = sp.sequence(48), qkv()
        before = sequence.attention(*inputs, causal=True)
        gc.disable()
        runner, made = weakref.ref(sp._session._runner), list(like_nccl.GROUPS)

        def forward(kernel, *arguments):
            if rank == 1:  # so it does not pass on what it has received
                raise MemoryError("out of memory")
            return plain(kernel, *arguments)

        plain, CpuKernel.forward = CpuKernel.forward, forward
        try:
            sequence.attention(*inputs, causal=True)
            text = "no error"
        except (MemoryError, startrail.PeerError) as error:
            text = f"{type(error).__name__}: {error}"
        CpuKernel.forward = plain
        found = text, runner() is None, are_closed(made)
        gc.enable()
        return *found, torch.equal(sequence.attention(*inputs, causal=True), before)

    for rank, (text, freed, ended, same) in enumerate(run_local(on_rank, 3, deadline=60)):
        assert "out of memory" in text and text.startswith("MemoryError" if rank == 1 else "PeerError: "), text
        assert freed and ended, "without garbage collection"
        assert same, "the next call works"


def test_lanes_connect_all_pairs_when_made_and_do_not_split_the_world():
    def on_rank(rank):
        def split(group):
            raise AssertionError("a lane was split off the world's communicator")

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
        c10d._get_split_source = split
        dist.group.WORLD.bound_device_id = torch.device("cuda", rank)  # as init_process_group(device_id=...) does
        startrail.SequenceParallel("1x2/2x1", mesh=mesh)  # makes a group of all ranks of the mesh
        sp = startrail.SequenceParallel("1x2/2x1", timeout=20)
        lanes = sp._session.runner_on(CPU).transport.lanes
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", rank)
        dist.group.WORLD.bound_device_id = None
        used = {
            Link(send, lane, peer)
            for lane, (group, places) in lanes.items()
            for peer, place in places.items()
            for send in (True, False)
            if group.counts[send, place]
        }
        before = [{pair for pair, count in lane.group.counts.items() if count} for lane in lanes.values()]
        dist.barrier()
        sp.sequence(64).attention(*qkv())
        after = [{pair for pair, count in lane.group.counts.items() if count} for lane in lanes.values()]
        return used, before == after

    for rank, (used, same) in enumerate(run_local(on_rank, 4, deadline=60)):
        assert used == {Link(send, lane, rank ^ (2 - lane)) for lane in (0, 1) for send in (True, False)}
        assert same, "the first pass made no new connections"


def test_new_batches_make_no_communicators():
    """Zones use the groups of the plan's levels, and ``direct`` the same ones from the second batch on."""

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2", timeout=20)
        programs, made = [], []
        for documents in ((0, 64), (0, 40, 64), (0, 9, 20, 64), (0, 3, 60, 64), (0, 64)):
            sequence = sp.sequence(64, documents)
            inputs = [x.requires_grad_() for x in torch.randn(3, 1, 4, sequence.local, 8)]
            for window in (None, 4):
                out = sequence.attention(*inputs, causal=True, window=window)
                torch.autograd.grad(out, inputs, torch.randn_like(out))
                parts = sequence.compiled(*inputs, causal=True, window=window).parts
                programs += [str(part.chosen) for part in parts]
            made.append(len(sp._session.runner_on(CPU).transport.opened.groups))
        return programs, made

    for programs, made in run_local(on_rank, 4, deadline=60):
        assert {"u2/1x2", "direct"} <= set(programs)
        assert set(made) == {2 + 2 + 1}, "of two levels, of direct on both, and of all ranks"


def test_a_peer_that_does_not_connect_raises():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=2)
        if rank:
            time.sleep(8)
            return "late"
        return error_of(lambda: sp._session.runner_on(CPU))

    text, _ = run_local(on_rank, 2, deadline=60, expendable=frozenset({1}))
    assert text.startswith("PeerError: global rank 0: no connection "), text


def test_check_under_torchrun_uses_its_ranks(tmp_path):
    """Rank 0 prints several plans and dtypes in one table, and writes all of it to a file; the exit code is 0."""
    command = [*torchrun(2), "-m", "startrail.cli", "check", "all", "--length", "64", "--heads", "4", "--head-dim", "8"]
    command += ["--tokens-per-rank", "300", "--out", str(tmp_path / "check.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"torch {torch.__version__}, 2 x ") and "gloo" in lines[0]
    assert "float32: cpu (ATen's flash attention for CPUs, in float32)" in lines
    table = [line for line in lines if line.endswith(" ok")]
    plans = ["1x2", "1x2", "u2", "u2", "2x1", "2x1", "u2/1x1", "u2/1x1", *["1x1/u2,keep=all,groups=2"] * 2]
    assert [line.split()[0] for line in table] == [*plans, *["1x2"] * 4, *["u2"] * 4, *plans[::2], "1x2"]
    for text in ("float16 ", "3 documents", "window 22", " 4:1 "):
        assert sum(text in line for line in table) >= 2, "for 1x2 and for u2"
    covered = "5 plans, bfloat16, float16, float32, 32 and 300 tokens per rank, head dim 8"
    assert f"all 24 cases are exact: {covered}" in lines
    found = json.loads((tmp_path / "check.json").read_text())
    assert [each["verdict"] for each in found["cases"]] == ["ok"] * 24
    assert found["cases"][-1]["case"]["length"] == 600 and found["cases"][-1]["report"]["errors"]["dk"]
    assert found["coverage"] in lines and found["environment"][0] == lines[0] and found["machine"]
    assert found["unfinished"] == []


def test_a_case_that_raises_is_a_row_of_the_table(monkeypatch):
    """For example a kernel that this GPU lacks, or one rank without memory for the reference. Other rows are kept."""
    plain, forward = cluster_check.make_data, CpuKernel.forward

    def on_rank(rank):
        dtypes = []

        def make_data(case, device):
            dtypes.append(case.dtype)
            if case.window is not None and rank == 1:
                raise MemoryError("out of memory\nand so on")
            return plain(case, device)

        def refuse_half(kernel, *arguments):
            if dtypes[-1] == torch.float16 and rank == 1:
                raise RuntimeError("no kernel image is available")
            return forward(kernel, *arguments)

        cluster_check.make_data, CpuKernel.forward = make_data, refuse_half
        cases = cluster_check.typical_cases(Case("auto", 2, length=64, q_heads=4, kv_heads=4, head_dim=8))[-5:]
        files = []
        before_case = lambda reports: files.append(cluster_check.record(cases, reports, CPU))  # noqa: E731
        reports = cluster_check.check_on_group(cases, CPU, before_case)
        return cases, reports, cluster_check.table(cases, reports), files

    for cases, reports, text, files in run_local(on_rank, 2, deadline=60):
        assert files[0]["coverage"] == "no case has ended"
        for done, found in enumerate(files):  # if the next case ended the program, this would be left of it
            assert (len(found["cases"]), len(found["unfinished"])) == (done, len(cases) - done)
            assert found["unfinished"][0]["plan"] == cases[done].plan and json.dumps(found)
        for case, report in zip(cases, reports, strict=True):
            raises = case.dtype == torch.float16 or case.window is not None
            assert bool(report.verdict()) == raises, report.verdict()
        assert "rank 1: RuntimeError: no kernel image is available" in text
        assert "rank 1: MemoryError: out of memory" in text


def test_a_rank_that_does_not_join_gives_one_line(monkeypatch, capsys):
    def join(device, limit):
        raise joining.JoinError("rank 1 did not join within 0.1 minutes")

    monkeypatch.setattr(joining, "join", join)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["check", "1x2"]) == 1
    assert capsys.readouterr() == ("", "startrail check: rank 1 did not join within 0.1 minutes\n")
