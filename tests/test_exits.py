"""A few processes that end the ordinary way; ``make exits`` ends 200."""

import subprocess
import sys

import pytest

from tests.helpers import FULL, ROOT


@pytest.mark.skipif(not FULL, reason="make test-all, or make exits")
def test_processes_end_without_an_abort():
    """One launch of an example and one of training, on 4 ranks each, in a program that has used no threads yet."""
    command = [sys.executable, "-m", "tests.exits", "--exits", "8", "--burners", "0", "--examples", "own_loop_fsdp2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "8 exits, no abort" in done.stdout, done.stdout + done.stderr
