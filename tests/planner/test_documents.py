"""``startrail plan`` for packed documents and sliding layers."""

import json
from dataclasses import replace

import pytest

from startrail.cli import main
from startrail.planner.answer import plan
from startrail.planner.cluster import SlowMember, read_cluster
from startrail.planner.sparse.documents import MAX_DOCUMENTS, document_ends
from startrail.planner.sparse.predict import predict_call
from startrail.planner.sparse.rule import links_of
from startrail.planner.workload import Run, find_model

SMALL = "a100-4x8@2x4"
GPT = find_model("gpt-3b")
SLIDING = replace(GPT, windows=(1024,) * 30 + (None,) * 2)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("12\nabc\n", ":2: 'abc' is not a document's length, a whole number from 1 to"),
        ("12 0", ":1: '0' is not a document's length"),
        ("-5", ":1: '-5' is not a document's length"),
        ("1.5", ":1: '1.5' is not a document's length"),
        ("9" * 5000, ":1: '9999"),
        ("\n \n", ": no document lengths found"),
        (b"\xff\xfe", ": cannot be read as text"),
        ("1", "131072 tokens hold more than 10000 of these documents, too many to plan for"),
        (None, "no such file, and not one of pretraining, agents"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, capsys, text, problem):
    path = tmp_path / "lengths.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    options = ["--cluster", SMALL, "--model", "gpt-3b", "--length", "128k", "--documents", str(path)]
    assert main(["plan", *options]) == 2
    written = capsys.readouterr()
    assert problem in written.err
    assert len(written.err.splitlines()) == 1
    assert len(written.err) < 400
    assert not written.out


def test_a_run_refuses_bad_documents():
    for documents, problem in (
        ("tales", "is not one of pretraining, agents"),
        ((3, 0), "0 is not a length"),
        (3, "3"),
    ):
        with pytest.raises(ValueError, match=problem):
            Run(1024, documents=documents)
    with pytest.raises(ValueError, match="documents = 3 is not a distribution, a file or a list of lengths"):
        plan(SMALL, GPT, 4096, documents=3)


def test_lengths_are_repeated_and_cut():
    assert document_ends((3, 4), 12) == (0, 3, 7, 10, 12)
    assert document_ends((30,), 12) == (0, 12)
    assert document_ends((), 12) == ()
    assert document_ends("agents", 300_000)[-1] == 300_000
    assert len(document_ends((1,), MAX_DOCUMENTS)) == MAX_DOCUMENTS + 1


def test_the_links_that_documents_are_placed_by():
    """Per width of a head, a query-key pair takes 2 ps, and a token has 24 bytes in float32. A node gets 12 GB/s, a GPU
    48: 2 and 0.5 ns. Slow nodes bind all; GPUs that share two cores take four times as long for a pair."""
    device = dict(name="d", memory="1 GB", reserved="0 GB", copy="1 GB/s", call="1 us", post="1 us", start="1 us")
    rates = dict(peak="20 TFLOP/s", matmul="10 TFLOP/s", forward=[[1, "4 TFLOP/s"]], backward=[[1, "10 TFLOP/s"]])
    levels = [
        dict(name="node", size=2, bandwidth="12 GB/s", links="member", latency="1 us"),
        dict(name="gpu", size=4, bandwidth="48 GB/s", links="device", latency="1 us"),
    ]
    cluster = read_cluster(dict(device={**device, "float32": rates}, levels=levels), "mine", "mine.toml")
    assert links_of(cluster) == ((4, 1000.0), (1, 250.0))
    assert links_of(replace(cluster, slow=(SlowMember(0, 1, bandwidth=0.5),)))[0] == (4, 2000.0)
    assert links_of(replace(cluster, cores=2)) == ((4, 250.0), (1, 62.5))
    assert links_of(None) == ()


def test_documents_change_times_bytes_and_the_answer_says_what_runs(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("3000 200\n9000 50 700\n")
    options = ["--cluster", SMALL, "--model", "gpt-3b", "--length", "64k", "--top", "2"]
    assert main(["plan", *options, "--documents", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Runs Each sequence has 26 documents of 50 to 9,000 tokens (the given lengths, repeated). 32 x full " in text
    assert "% alone." in text
    rows = {}
    for documents in ((), ("--documents", str(path))):
        assert main(["plan", *options, *documents, "--json"]) == 0
        rows[documents] = {row["plan"]: row for row in json.loads(capsys.readouterr().out) if row["why_not"] is None}
    dense, packed = rows.values()
    ring, rings = (found["1x2/1x4"] for found in (dense, packed))
    assert rings["seconds"] < 0.7 * ring["seconds"]
    assert rings["bytes"]["node"] < 0.7 * ring["bytes"]["node"]
    assert all(packed[name]["seconds"] < dense[name]["seconds"] for name in packed.keys() & dense.keys())


def test_sliding_layers_run_directly_and_the_full_ones_by_the_plan():
    answer = plan(SMALL, SLIDING, "64k", top=1)
    full, window = sorted(answer.result.runs)
    assert full.startswith("2 x full attention: 100% over 8 ranks by ")
    assert window == "30 x window 1,024: 100% over 8 ranks direct"
    best = answer.result.best
    calls = best.training.calls
    sent = sum(layers * predict_call(best.training.group, best.plan, call).sent[0] for call, layers in calls.items())
    fsdp = sum(by_level[0] for _, by_level in best.training.fsdp_traffic)
    assert best.step.sent[0] == pytest.approx(sent + SLIDING.layers * fsdp)
    assert "None of those had packed documents or windows" in answer.why


def test_without_documents_and_windows_nothing_changes():
    answer = plan(SMALL, GPT, "64k", top=1)
    assert answer.result.runs == ()
    assert "\nRuns" not in str(answer)
    wide = plan(SMALL, replace(GPT, windows=(10**6,) * 32), "64k", top=1)  # wider than the sequence
    assert [row["seconds"] for row in wide.rows] == [row["seconds"] for row in answer.rows]
    assert wide.result.runs == ()
