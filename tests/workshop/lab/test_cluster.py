"""The emulated cluster: its links have their rates, its counters are right, and failing ranks are named."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from workshop import lab
from workshop.lab.namespaces import processes_in

pytestmark = pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))

MB = 1 << 20


@pytest.fixture(scope="module")
def pair() -> Iterator[lab.Cluster]:
    with lab.Cluster(nodes=2, ranks_per_node=2, link="40mbit") as cluster:
        yield cluster


def exchange(rank: int, peer: int, size: int) -> float:
    """Send and receive ``size`` bytes at the same time, and return the seconds it took."""
    incoming, outgoing = torch.empty(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    start = time.perf_counter()
    receive = dist.irecv(incoming, peer)  # first: gloo's go-ahead would queue behind our own data
    send = dist.isend(outgoing, peer)
    receive.wait()
    send.wait()
    assert incoming.min() == 1
    return time.perf_counter() - start


def flow(routes: dict[int, int]):
    """A rank function that sends for ever along ``routes``, sender to receiver."""

    def run(rank: int) -> None:
        buffer = torch.ones(MB, dtype=torch.uint8)
        while True:
            if rank in routes:
                dist.send(buffer, routes[rank])
            elif rank in routes.values():
                dist.recv(buffer, next(sender for sender, receiver in routes.items() if receiver == rank))
            else:
                time.sleep(1)

    return run


def rate_into(cluster: lab.Cluster, node: int, seconds: float = 1.0) -> float:
    """Bits a second that enter a node now."""
    before, start = cluster.link_bytes()[node]["received"], time.perf_counter()
    time.sleep(seconds)
    after, end = cluster.link_bytes()[node]["received"], time.perf_counter()
    return 8 * (after - before) / (end - start)


def wait_for_flow(cluster: lab.Cluster, node: int) -> None:
    end = time.monotonic() + 10
    while rate_into(cluster, node, 0.1) < 1e6:
        assert time.monotonic() < end, f"nothing enters node {node}"


@pytest.mark.alone
@pytest.mark.parametrize("shaper", ["tbf", "htb"])
def test_limited_link_limits(shaper: str) -> None:
    size = 8 * MB
    slowest = 0.0
    for _ in range(3):  # a busy machine may starve the link, but nothing makes it faster than its limit
        try:
            with lab.Cluster(nodes=2, ranks_per_node=1, link="40mbit", shaper=shaper) as cluster:
                before = cluster.link_bytes()
                seconds = cluster.call(lambda rank: exchange(rank, 1 - rank, size), deadline=30)
                after = cluster.link_bytes()
        except lab.LabError as error:
            pytest.skip(f"no {shaper}: {error}")
        assert 8 * size / min(seconds) < 40.5e6
        for node in range(2):
            for way in ("sent", "received"):
                assert size <= after[node][way] - before[node][way] <= 1.03 * size
        slowest = max(slowest, 8 * size / max(seconds))
        if slowest > 36e6:
            break
    assert slowest > 36e6


@pytest.mark.alone
def test_ranks_of_a_node_talk_over_loopback(pair: lab.Cluster) -> None:
    before = pair.link_bytes()
    seconds = pair.call(lambda rank: exchange(rank, rank ^ 1, 16 * MB), deadline=30)
    assert max(seconds) < 2.0  # 3.4 s, had it crossed the link
    assert all(counted["sent"] - before[node]["sent"] < MB / 4 for node, counted in pair.link_bytes().items())


def test_a_rank_reads_its_own_link(pair: lab.Cluster) -> None:
    def run(rank: int) -> int:
        dist.barrier()  # no rank sends before all have read
        before = lab.own_link_bytes()["sent"]
        dist.barrier()
        exchange(rank, (rank + 2) % 4, MB)
        dist.barrier()
        return lab.own_link_bytes()["sent"] - before

    assert all(2 * MB <= sent <= 2.1 * MB for sent in pair.call(run, deadline=30))  # both ranks of the node


@pytest.mark.alone
def test_links_change_while_a_job_runs(pair: lab.Cluster) -> None:
    with pair.fork(flow({0: 2}), deadline=60):
        wait_for_flow(pair, 1)
        assert rate_into(pair, 1) == pytest.approx(40e6, rel=0.1)
        pair.set_link(1, "10mbit")
        time.sleep(0.2)  # the receiver still empties what the faster link had brought
        assert rate_into(pair, 1) == pytest.approx(10e6, rel=0.1)
        pair.set_link(1, None)
        pair.set_link(0, "20mbit")
        time.sleep(1.5)  # what the removed limit had queued is lost, and TCP must find its pace again
        assert rate_into(pair, 1) == pytest.approx(20e6, rel=0.1)
        pair.cut(0)
        assert rate_into(pair, 1, 0.5) < 1e5
        pair.restore(0)
        wait_for_flow(pair, 1)
        pair.stop(0)
        time.sleep(0.5)  # what the kernel had buffered still leaves
        assert rate_into(pair, 1, 0.5) < 1e6
        pair.resume(0)
        wait_for_flow(pair, 1)
    pair.set_link(0, "40mbit")
    pair.set_link(1, "40mbit")


@pytest.mark.alone
def test_racks_and_a_slow_node() -> None:
    shape = {"nodes": 4, "ranks_per_node": 2, "racks": 2, "rack_link": "20mbit", "slow": {1: "5mbit"}}
    with lab.Cluster(link="80mbit", **shape) as cluster, cluster.fork(flow({0: 4, 1: 2, 5: 6}), deadline=60):
        for node in (1, 2, 3):
            wait_for_flow(cluster, node)
        before = cluster.rack_bytes()
        assert rate_into(cluster, 1) == pytest.approx(5e6, rel=0.1)  # the slow node
        assert rate_into(cluster, 2) == pytest.approx(20e6, rel=0.1)  # between racks
        assert rate_into(cluster, 3) == pytest.approx(80e6, rel=0.1)  # inside a rack
        after = cluster.rack_bytes()
        assert after[0]["sent"] - before[0]["sent"] == pytest.approx(3 * 20e6 / 8, rel=0.15)
        assert after[0]["sent"] == pytest.approx(after[1]["received"], rel=0.1)


def test_a_program_connects_over_the_links(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        ranks = torch.tensor([float(os.environ["RANK"])])
        dist.all_reduce(ranks)
        print(dist.get_world_size(), int(ranks), os.environ["LOCAL_RANK"], os.environ["NODE_RANK"], *sys.argv[1:])
        dist.destroy_process_group()
        """)
    )
    with lab.Cluster(nodes=2, ranks_per_node=1, link="1gbit") as cluster:
        logs = cluster.run([str(script), "hello"], deadline=60, log_dir=tmp_path / "logs")
    assert [log.read_text() for log in logs] == ["2 1 0 0 hello\n", "2 1 0 1 hello\n"]


def test_the_failing_rank_is_shown(pair: lab.Cluster) -> None:
    program = ["sh", "-c", 'test "$RANK" = 2 || exec sleep 60; echo broken on purpose >&2; exit 3']
    with pytest.raises(lab.JobError, match=r"^rank 2 exited with code 3; rank 2's last lines:\n  broken on purpose$"):
        pair.run(program, deadline=30)

    def fail(rank: int) -> None:
        if rank == 3:
            raise KeyError("broken on purpose")
        dist.barrier()

    with pytest.raises(lab.JobError, match=r"(?s)^rank 3 failed:.*KeyError: 'broken on purpose'"):
        pair.call(fail, deadline=30)


class Reader:
    """Output that is read late, or never."""

    def __init__(self, seconds: float, error: type[OSError] | None = None) -> None:
        self.seconds, self.error, self.text = seconds, error, ""

    def write(self, text: str) -> None:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.text += text

    def flush(self) -> None: ...


def test_a_slow_reader_of_the_output_delays_neither_ranks_nor_verdicts(pair: lab.Cluster) -> None:
    slow = Reader(7.0)
    pair.start(["sh", "-c", "echo rank $RANK"], deadline=6).wait(echo=slow)
    assert slow.text == "rank 0\n"
    pair.start(["sh", "-c", "echo rank $RANK"], deadline=10).wait(echo=Reader(0.0, BrokenPipeError))
    quick = Reader(0.0)
    program = 'test "$RANK" = 0 && echo last words && exec sleep 60; test "$RANK" = 3 || exec sleep 60; sleep 1; exit 3'
    job = pair.start(["sh", "-c", program], deadline=30)
    with pytest.raises(lab.JobError, match="rank 3 exited with code 3"):
        job.wait(echo=quick)
    assert quick.text == "last words\n"
    with pytest.raises(lab.JobError, match="the job is over"):
        job.wait()


def test_a_deadline_ends_a_hung_job(pair: lab.Cluster) -> None:
    start = time.monotonic()
    with pytest.raises(lab.JobError, match=r"^ranks \[0, 1, 2, 3\] did not finish within 0.5 s; .*\n  hung$"):
        pair.run(["sh", "-c", "echo hung; sleep 60"], deadline=0.5)
    with pytest.raises(lab.JobError, match="deadline"):
        pair.call(lambda rank: time.sleep(60), deadline=2)
    assert time.monotonic() - start < 10


def test_a_job_leaves_no_process_behind(pair: lab.Cluster) -> None:
    supervisor = pair._supervisor
    assert supervisor is not None
    pair.run(["sh", "-c", "setsid sleep 300 & exit 0"], deadline=30)
    assert processes_in(supervisor.networks) == []


def test_one_job_at_a_time_and_none_outside(pair: lab.Cluster) -> None:
    with pair.start(["sleep", "60"]), pytest.raises(lab.LabError, match="still running a job"):
        pair.call(lambda rank: rank)
    with pytest.raises(lab.LabError, match="inside its with block"):
        lab.Cluster().link_bytes()


def test_a_call_returns_tensors(pair: lab.Cluster) -> None:
    found = pair.call(lambda rank: {"rank": torch.full((2, 3), rank)[:, :2]}, deadline=30)
    assert [result["rank"].tolist() for result in found] == [[[rank] * 2] * 2 for rank in range(4)]


def test_an_obstacle_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyroute2.py").write_text("raise ModuleNotFoundError(name='pyroute2')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(lab.LabError, match="cannot emulate a cluster here: pyroute2 is not installed"):
        lab.Cluster(nodes=1).__enter__()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"link": "fast"}, "'fast' is not a rate"),
        ({"link": "1bit"}, "'1bit' is 1 bit/s"),
        ({"nodes": 0}, "nodes=0 is not"),
        ({"nodes": 300}, "nodes=300 is more"),
        ({"ranks_per_node": 1.5}, "ranks_per_node=1.5 is not"),
        ({"nodes": 4, "racks": 3}, "4 nodes do not fill 3 racks"),
        ({"rack_link": "1gbit"}, "but racks=1"),
        ({"nodes": 4, "slow": {4: "1mbit"}}, "no node 4: nodes are 0 to 3"),
        ({"slow": {0: "slow"}}, "'slow' is not a rate"),
        ({"mtu": 100}, "mtu=100 is not"),
        ({"shaper": "netem"}, "shaper='netem' is not one of"),
    ],
)
def test_bad_shapes(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lab.Cluster(**options)  # type: ignore[arg-type]


def test_bad_requests(pair: lab.Cluster) -> None:
    for request in (pair.cut, pair.restore, pair.stop, pair.resume, lambda node: pair.set_link(node, None)):
        with pytest.raises(ValueError, match="no node 2"):
            request(2)
    with pytest.raises(ValueError, match="is not a rate"):
        pair.set_link(0, "fast")
    with pytest.raises(ValueError, match="deadline=0"):
        pair.run(["true"], deadline=0)
    with pytest.raises(ValueError, match="no script"):
        pair.run(["missing.py"])
    with pytest.raises(ValueError, match="no program"):
        pair.run([])
