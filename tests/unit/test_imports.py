"""What plans, checks and draws must work on a laptop without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import startrail

PURE = ["plan", "layout", "mask", "schedule", "schedule.check", "cluster", "planner", "view", "lab.launch", "cli"]


@pytest.mark.parametrize("module", PURE)
def test_module_imports_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import startrail.{module}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_lab_knows_nothing_of_what_runs_on_it():
    """Nor does it need torch before a function is called on its ranks."""
    code = "import sys; import startrail.lab, startrail.lab.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "startrail.bench"} & set(done.stdout.split())
    lab = Path(startrail.__file__).parent / "lab"
    assert not [path for path in lab.glob("*.py") if "startrail.bench" in path.read_text()]


def test_show_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None; from startrail.cli import main; sys.exit(main(['show', '2x2']))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "send q0>1 kv0>2" in done.stdout
