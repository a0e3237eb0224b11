"""What plans, checks and draws must work on a laptop without torch."""

import subprocess
import sys

import pytest

PURE = ["plan", "layout", "mask", "schedule", "schedule.check", "cluster", "planner", "view", "cli"]


@pytest.mark.parametrize("module", PURE)
def test_module_imports_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import startrail.{module}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_show_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None; from startrail.cli import main; sys.exit(main(['show', '2x2']))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "send q0>1 kv0>2" in done.stdout
