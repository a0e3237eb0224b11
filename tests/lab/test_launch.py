"""``startrail lab run``: what it shows, and that a mistake is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from startrail import lab
from startrail.lab.launch import main

pytestmark = pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))


def test_command_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = ["run", "--nodes", "2", "--ranks", "2", "--link", "unlimited", "--slow", "1=50mbit"]
    assert main([*shape, "--log-dir", str(tmp_path), "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "rank 0 of 4\n"
    assert captured.err.startswith("node 0: ")
    assert (tmp_path / "rank3.log").read_text() == "rank 3 of 4\n"
    assert main([*shape, "--", "false"]) == 1
    assert "exited with code 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["run", "--link", "fast", "--", "x"], ["run", "--", "missing.py"], ["run", "--", "/missing"]],
)
def test_command_line_mistakes(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert capfd.readouterr().err.count("\n") == 1
