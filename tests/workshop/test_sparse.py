"""``startrail bench sparse``: every contender is right, and claims are judged by what was measured."""

import json
from importlib.util import find_spec

import pytest

from startrail.cli import main
from workshop import lab
from workshop.report.sparse import DENSE, RING, SPARSE, SparseRow, sparse_claims, sparse_table


def rows(work, pressure=24.0, **seconds):
    names = {"ring": RING, "dense": DENSE, "ours": SPARSE, "peer": "DeepSpeed Ulysses"}
    return [SparseRow("4x8", pressure, work, names[name], s, 10**6, 10**8, 0.1) for name, s in seconds.items()]


def test_claims_follow_the_measurements():
    met = rows("window 64", ring=20.0, dense=6.0, ours=1.0, peer=1.5)
    assert "\nmet      4x8, 24x, window 64: 20.0x ring (asked 20), 6.0x our best dense plan" in sparse_claims(met)
    assert "met      never slower than a peer: none was" in sparse_claims(met)
    for wrong in (
        rows("window 64", ring=19.0, dense=6.0, ours=1.0),
        rows("window 64", ring=20.0, dense=5.0, ours=1.0),
    ):
        assert "\nNOT MET  4x8, 24x, window 64" in sparse_claims(wrong)
    slower = rows("agents' documents", pressure=8.0, ring=3.0, dense=2.0, ours=1.0, peer=0.9)
    assert sparse_claims(slower) == (
        "\nNOT MET  never slower than a peer: 4x8, 8x, agents' documents: DeepSpeed Ulysses"
    )


def test_the_table_has_the_bound_and_the_problem():
    table = sparse_table([*rows("window 64", ring=20.0, ours=1.0), SparseRow("", 0, "", "x", None, 0, 1, 0, "", "no")])
    assert table.splitlines()[-2].split() == ["startrail", "1.000", "0.100", "20.0", "0.0", "1.00"]
    assert table.splitlines()[-1].split() == ["x", "no"]


@pytest.mark.skipif(lab.available() is not None, reason=f"no lab: {lab.available()}")
def test_every_contender_is_right(tmp_path):
    for peer in ("deepspeed", "ring_flash_attn"):  # `make setup-bench` installs them
        if find_spec(peer) is None:
            pytest.skip(f"{peer} is not installed")
    options = ["--shapes", "2x2", "--pressures", "2", "--length", "256", "--repeats", "1", "--out", str(tmp_path)]
    assert main(["bench", "sparse", *options, "--only", "pretraining"]) == 0
    found = json.loads((tmp_path / "sparse.json").read_text())
    assert found["meta"]["commit"] and found["meta"]["processor"] and found["meta"]["date"]
    assert not any(row["problem"] for row in found["rows"])
    padded = [row["note"] for row in found["rows"] if row["contender"] == "ring-flash-attn varlen ring"]
    assert padded[0].startswith("documents padded to multiples of 8: ")
    assert "never slower than a peer" in (tmp_path / "sparse.txt").read_text()


@pytest.mark.parametrize("options, text", [(["--only", "nothing"], "no workload"), (["--repeats", "0"], "--repeats 0")])
def test_bad_options_are_one_line(options, text, capsys):
    assert main(["bench", "sparse", *options]) == 2
    assert text in capsys.readouterr().err
