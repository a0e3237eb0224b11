"""A trace of a run in the lab and of its prediction: the same labels in the same order on every rank."""

import json
from itertools import pairwise

import pytest
import torch

import startrail
from startrail.cli import main
from startrail.compile.attention import Attention
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import predict, trace_prediction
from startrail.schedule.plan import Plan
from startrail.view.trace import EventRecorder, Record, chrome_trace, compare, read_trace
from tests.view.perfetto import perfetto
from workshop import lab

PLANS = ["1x4", "2x2,keep=all", "star2", "2x1/u2", "u2/1x2,groups=2"]
LENGTH, HEADS, DIM = 256, 4, 16
CALL = Attention.of(LENGTH, 1, HEADS, HEADS, DIM, causal=True, dtype="float32")


def predicted(plan, world=4):
    recorders = [EventRecorder(rank) for rank in range(world)]
    cluster = find_cluster("lab").resized([2, world // 2])
    prediction = trace_prediction(cluster, Plan.parse(plan), CALL, recorders.__getitem__)
    assert prediction == predict(cluster, Plan.parse(plan), CALL, all_ranks=True)  # watching changes nothing
    assert max(record.end for r in recorders for record in r.records) == pytest.approx(prediction.seconds)
    return [recorder.records for recorder in recorders]


def on_rank(rank):
    found = []
    for plan in PLANS:
        sp = startrail.SequenceParallel(plan)
        sequence = sp.sequence(LENGTH)
        q, k, v = (torch.randn(1, HEADS, sequence.local, DIM, requires_grad=True) for _ in range(3))
        recorder = EventRecorder(rank)
        sp.on_event(recorder)
        for _ in range(2):
            out = sequence.attention(q, k, v, causal=True)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        sp.on_event(None)
        count = len(recorder.records)
        sequence.attention(q, k, v, causal=True)
        assert len(recorder.records) == count
        found.append([tuple(record) for record in recorder.records])
    return found


@pytest.fixture(scope="module")
def measured():
    if (reason := lab.available()) is not None:
        pytest.skip(f"no lab: {reason}")
    with lab.Cluster(nodes=2, ranks_per_node=2, link="200mbit") as cluster:
        by_rank = cluster.call(on_rank, deadline=120)
    return {plan: [[Record(*entry) for entry in own[at]] for own in by_rank] for at, plan in enumerate(PLANS)}


@pytest.mark.parametrize("plan", PLANS)
def test_prediction_and_run_have_the_same_labels_in_the_same_order(measured, plan):
    for rank, (expected, found) in enumerate(zip(predicted(plan), measured[plan], strict=True)):
        for call in range(4):  # forward and backward, twice
            wanted = [record.label for record in expected if record.call == call % 2]
            assert [record.label for record in found if record.call == call] == wanted, (rank, call)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(found))


@pytest.mark.parametrize("plan", PLANS)
def test_every_message_is_one_arrow_from_its_sender_to_its_receiver(measured, plan):
    for records in (predicted(plan), measured[plan]):
        posts = [name for own in records for record in own for name in record.posts]
        arrivals = {name: record.end for own in records for record in own for name in record.arrivals}
        assert len(posts) == len(set(posts)) and set(posts) == set(arrivals)
        assert len(posts) == sum(len(record.arrivals) for own in records for record in own)
        begun = {name: record.start for own in records for record in own for name in record.posts}
        assert all(begun[name] <= arrivals[name] for name in posts)
        trace = chrome_trace(records, plan)["traceEvents"]
        starts = [e for e in trace if e["ph"] == "s"]
        ends = {e["id"]: e for e in trace if e["ph"] == "f"}
        assert len(starts) == len(posts) and all(ends[e["id"]]["ts"] >= e["ts"] for e in starts)


def test_perfetto_opens_both_without_errors(measured):
    with perfetto() as imported:
        for records in (predicted("2x1/u2"), measured["2x1/u2"]):
            posts = sum(len(record.posts) for own in records for record in own)
            errors, slices, flows, processes = imported(chrome_trace(records, "2x1/u2"))
            assert (errors, flows, processes) == (0, posts, 4) and slices >= sum(map(len, records))


def test_compare_shows_where_traces_differ_and_rejects_other_programs(measured, tmp_path, capsys):
    files = {}
    for name, records in (
        ("predicted", predicted("2x1/u2")),
        ("measured", measured["2x1/u2"]),
        ("ring", measured["1x4"]),
    ):
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps(chrome_trace(records, name)))
    text = compare(read_trace(files["predicted"]), read_trace(files["measured"]))
    for part in ("forward", "backward", "whole pass", "level 0: waiting", "level 1: waiting", "steps that differ most"):
        assert part in text
    assert main(["trace", "compare", str(files["predicted"]), str(files["predicted"])]) == 0
    assert "1.00x" in capsys.readouterr().out
    assert main(["trace", "compare", str(files["predicted"]), str(files["ring"])]) == 2
    assert "different programs: rank 0, forward, event 0: predicted 'forward 0: post" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("[]")
    assert main(["trace", "compare", str(files["predicted"]), str(tmp_path / "other.json")]) == 2
    assert "is not a trace that startrail wrote" in capsys.readouterr().err
    assert main(["trace", "compare", str(files["predicted"]), "nowhere.json"]) == 2
    assert "cannot read nowhere.json: No such file" in capsys.readouterr().err


def test_simulate_prints_the_planners_prediction_and_writes_a_trace(tmp_path, capsys):
    path = tmp_path / "trace.json"
    options = ["--nodes", "2", "--cluster", "lab", "--length", "1k", "--heads", "4", "--head-dim", "16"]
    assert main(["simulate", "u2/1x2", *options, "--trace", str(path)]) == 0
    said = capsys.readouterr().out
    assert "u2/1x2 on 4 ranks of lab: 1024 tokens, float32, predicted" in said and "between nodes" in said
    trace = read_trace(path)
    assert trace.slices.keys() == {0, 1, 2, 3} and all(trace.slices.values())
    for wrong, said in (
        (["3x3", "--nodes", "2"], "--ranks 9 is not a multiple of --nodes 2"),
        (["1x4", "--cluster", "a100-4x8", "--dtype", "float32"], "has no rates in float32"),
        (["1x4", "--length", "ten"], "not a whole number"),
        (["1x4", "--heads", "6", "--kv-heads", "4"], "6 query heads"),
        (["1x4", "--batch", "0"], "--batch 0 must be at least 1"),
        (["1x4", "--trace", "/proc/nowhere/x"], "cannot write /proc/nowhere/x"),
    ):
        assert main(["simulate", *(["--cluster", "lab"] if "--cluster" not in wrong else []), *wrong]) == 2
        assert said in capsys.readouterr().err
