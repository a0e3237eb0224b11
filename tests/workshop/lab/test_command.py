"""``startrail lab run``: its output, its logs and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from startrail.cli import main
from tests.helpers import refusal
from workshop import lab

pytestmark = pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))


def test_command_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = ["lab", "run", "--nodes", "2", "--ranks", "2", "--link", "unlimited", "--slow", "1=50mbit"]
    assert main([*shape, "--log-dir", str(tmp_path), "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "rank 0 of 4\n"
    assert captured.err.startswith("node 0: ")
    assert (tmp_path / "rank3.log").read_text() == "rank 3 of 4\n"
    assert main([*shape, "--", "false"]) == 1
    assert "exited with code 1" in capfd.readouterr().err


@pytest.mark.parametrize("program", ["missing.py", "/missing"])
def test_a_program_that_does_not_exist_is_one_line(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert program in refusal(["lab", "run", "--", program], capfd)
