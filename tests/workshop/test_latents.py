"""``startrail bench latents``: every contender is right and sends what the closed form says; claims are judged."""

import json
from dataclasses import replace

import pytest

from startrail.cli import main
from workshop import lab
from workshop.trials.latents import ASKED, EXPANDED, LATENTS, LatentRow, claims


def row(sends, seconds, chosen=False, pressure=24.0, same=True):
    return LatentRow("4x8", pressure, sends, "1x32", 1.0, 10**6, 1e6, seconds, 1_010_000, same, chosen)


def test_claims_follow_the_measurements():
    met = list(claims([row(LATENTS, 1.0, chosen=True), row(EXPANDED, ASKED), row(EXPANDED, 9.0)]))
    assert [line.split()[0] for line in met] == ["met", "met", "met"]
    assert "up to 1.0% more" in met[-1] and "their bytes allow 1.00x" in met[0]
    slow = list(claims([row(LATENTS, 1.0, chosen=True), row(EXPANDED, 0.9, same=False)]))
    assert [line[:7] for line in slow] == ["NOT MET"] * 3
    assert not any(line.startswith("bound") for line in slow), "not of rows that were recorded without it"
    bounded = [replace(each, least_bytes=2.5e5) for each in (row(LATENTS, 3.0, chosen=True), row(EXPANDED, 9.0))]
    assert "a link needs 2.00 s" in list(claims(bounded))[1] and "at most 4.50x" in list(claims(bounded))[1]
    fallen_back = [row(LATENTS, 1.0, pressure=1.0), row(EXPANDED, 0.9, chosen=True, pressure=1.0)]
    assert "expanded keys by 1x32: 1.00x as fast" in next(claims(fallen_back))


@pytest.mark.skipif(lab.available() is not None, reason=f"no lab: {lab.available()}")
def test_every_contender_is_right(tmp_path):
    options = ["--shape", "2x2", "--length", "256", "--pressures", "24", "--repeats", "1", "--out", str(tmp_path)]
    assert main(["bench", "latents", *options]) == 0
    found = json.loads((tmp_path / "latents.json").read_text())["rows"]
    assert {each["sends"] for each in found} == {LATENTS, EXPANDED}
    assert all(each["engine_bytes"] and not each["problem"] for each in found)
    assert sum(each["chosen"] for each in found) == 1
    assert all(each["closed_bytes"] >= each["least_bytes"] > 0 for each in found)
