"""What runs only from a clone: found beside the sources, wherever the caller is, and refused in one line without it."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.helpers import ROOT

PROGRAM = "import sys; from startrail.cli import main; sys.exit(main(sys.argv[1:]))"


def run(folder, packages, *arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(packages), **variables}
    environment = {name: value for name, value in environment.items() if value}
    command = [sys.executable, "-P", "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as pip installs it, with nothing beside it."""
    folder = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(ROOT / "src" / "startrail", folder / "startrail", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [["lab"], ["lab", "run", "--nodes", "2", "--", "x.py"], ["lab", "--help"], ["bench"], ["bench", "--quick"],
     ["bench", "memory", "--ranks", "2"], ["bench", "sparse"]],
)  # fmt: skip
def test_what_pip_does_not_install_is_refused_in_one_line(installed, tmp_path, arguments):
    """Also where the working directory has a workshop, which may be anybody's."""
    for folder in (ROOT, tmp_path):
        done = run(folder, installed, *arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(f"startrail {arguments[0]}") and done.stderr.count("\n") == 1
        assert "runs only from a clone of the repository" in done.stderr and "make setup-bench" in done.stderr


def test_an_installed_startrail_lists_all_commands_and_measures_itself(installed, tmp_path):
    done = run(tmp_path, installed, "--help")
    assert done.returncode == 0 and " lab " in done.stdout and " bench " in done.stdout
    small = ["--length", "64", "--heads", "2", "--head-dim", "8", "--ranks", "2", "--plans", "1x2", "--rounds", "1"]
    done = run(tmp_path, installed, "bench", "engine", *small)
    assert done.returncode == 0 and "efficiency" in done.stdout, done.stderr


def test_under_torchrun_an_installed_startrail_measures_its_own_plans(installed, tmp_path):
    script = tmp_path / "short.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from startrail.bench import job
        from startrail.cli import main
        job.CALLS, job.LOCAL = 1, 64
        sys.exit(main(["bench", "--out", "found"]))
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(text) for text in ("causal", "full", "\n1x2 ", "\nu2 ")] == [1, 1, 2, 2], done.stdout
    assert (tmp_path / "found" / "job.json").exists()


def test_the_workshop_is_found_beside_the_sources_and_not_in_the_working_directory(tmp_path):
    (tmp_path / "workshop").mkdir()
    (tmp_path / "workshop" / "__init__.py").write_text("raise SystemExit('another workshop')")
    done = run(tmp_path, ROOT / "src", "lab", "run", "--help")
    assert done.returncode == 0 and "--rack-link" in done.stdout, done.stderr
    done = run(tmp_path, ROOT / "src", "bench", "memory", "--ranks", "3")
    assert done.returncode == 2 and "3 ranks have no plan here" in done.stderr
