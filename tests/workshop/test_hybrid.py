"""``startrail bench hybrid``: every contender is right, and claims are judged by what was measured."""

import json

import pytest

from startrail.cli import main
from workshop import lab
from workshop.report.hybrid import HEADS, OURS, by_trial, hybrid_claims, hybrid_table
from workshop.report.sparse import SparseRow


def rows(work, **seconds):
    names = {"heads": HEADS, "ours": OURS, "gather": "all-gather of states"}
    return [SparseRow("4x8", 24.0, work, names[name], s, 10**6, 10**8, 0.0) for name, s in seconds.items()]


def test_claims_follow_the_measurements():
    met = hybrid_claims(rows("8,192 tokens", heads=5.0, gather=1.5, ours=1.0))
    assert "\nmet      4x8, 24x, 8,192 tokens: 5.0x the exchange of heads (asked 5)" in met
    assert met.endswith("met      never slower than a peer: none was")
    assert "\nNOT MET  4x8, 24x, 8,192 tokens: 4.9x" in hybrid_claims(rows("8,192 tokens", heads=4.9, ours=1.0))
    assert hybrid_claims(rows("2,048 tokens", heads=5.0, gather=0.9, ours=1.0)) == (
        "\nNOT MET  never slower than a peer: 4x8, 24x, 2,048 tokens: all-gather of states"
    )


def test_the_table_has_bytes_and_speed():
    table = hybrid_table(rows("8,192 tokens", heads=5.0, ours=1.0))
    assert table.splitlines()[-1].split() == ["startrail", "1.000", "1.000", "5.0"]


@pytest.mark.skipif(lab.available() is not None, reason=f"no lab: {lab.available()}")
def test_every_contender_is_right(tmp_path):
    options = ["--shape", "2x2", "--pressures", "2", "--lengths", "256", "--repeats", "1", "--out", str(tmp_path)]
    assert main(["bench", "hybrid", *options]) == 0
    found = json.loads((tmp_path / "hybrid.json").read_text())
    assert not any(row["problem"] for row in found["rows"])
    works = by_trial(SparseRow(**row) for row in found["rows"])
    assert [work for *_, work in works] == ["256 tokens", "stack, 256 tokens"]
    for of in works.values():
        assert of[OURS].node_bytes < of["all-gather of states"].node_bytes < of[HEADS].node_bytes


@pytest.mark.parametrize("options", [["--repeats", "0"], ["--shape", "3x1"], ["--lengths", "100"]])
def test_bad_options_are_one_line(options, capsys):
    assert main(["bench", "hybrid", *options]) == 2
    assert options[1] in capsys.readouterr().err
