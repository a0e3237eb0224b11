"""``startrail bench memory``: peaks are measured and recorded, and the recorded ones are of today's cases."""

import json
from functools import partial

import pytest

from results import figures
from startrail.cli import main
from workshop.trials import memory


def test_peaks_of_memory_are_measured_and_recorded(tmp_path, monkeypatch, capsys):
    recipe = memory.DEEP.with_(dict(width=32, layers=2, hidden=32, length=1024, zero=0, plan="1x1"))
    alone = [
        memory.MemoryCase("attention", str(f), None, partial(memory.measure_alone, recipe, f))
        for f in (memory.eager, memory.sdpa)
    ]
    rest = memory.MemoryCase("logits", "large", 2.0**40, None, "does not fit")
    monkeypatch.setattr(memory, "cases", lambda tokens: [*alone, rest])
    file = tmp_path / "memory.json"
    options = dict(lengths=256, ranks=1, local=256, worlds=1, json=file)
    main(["bench", "memory", *(f"--{name}={value}" for name, value in options.items())])
    trained, eager, fused, large = json.loads(file.read_text())["rows"]
    assert trained["case"] == "narrow GPT, 256 tokens on 1 rank (`1x1`)" and trained["estimate"] > 30 * 2**20
    assert eager["measured"] - fused["measured"] > 2 * 4 * 4 * 1024**2  # two float32 matrices of four heads
    assert min(row["seconds"] for row in (trained, eager, fused)) > 0
    assert large == {"wall": "logits", "case": "large", "estimate": 2.0**40, "reason": "does not fit"}
    assert "does not fit" in capsys.readouterr().out


def test_the_recorded_peaks_are_of_todays_cases_and_estimates():
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
    rows = {row["case"]: row for name in ("memory", "groups") for row in figures.recorded(name)["rows"]}
    cases = memory.cases(16_384)
    assert tuple(dict.fromkeys(case.wall for case in cases)) == tuple(figures.REMEDIES)
    for case in [*cases, *memory.grouped()]:
        row = rows[case.name]
        assert (row.get("estimate"), "measured" in row) == (case.estimate, case.measure is not None), case.name
        if case.estimate and case.measure:
            assert abs(case.estimate / row["measured"] - 1) <= case.allowed, case.name
