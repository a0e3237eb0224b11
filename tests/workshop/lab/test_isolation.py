"""The lab's own processes, which are often root, run nothing from the working directory."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from workshop import lab

pytestmark = pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))

HOSTILE = """
import os, sys
with open({marker!r}, "a") as file:
    file.write(f"{name} ran as uid {{os.getuid()}} in {{sys.argv}}\\n")
"""
NAMES = ("json", "socket", "pyroute2", "workshop", "startrail", "sitecustomize")
CLUSTER = """
import os
from workshop import lab

os.environ["PYTHONPATH"] = {path!r}  # what a user may have; ours was read at the start
with lab.Cluster(nodes=1, ranks_per_node=2, link="1gbit") as cluster:
    cluster.set_link(0, "500mbit")
    print(cluster.call(lambda rank: rank), [log.read_text() for log in cluster.run(["sh", "-c", "echo $RANK"])])
"""


@pytest.fixture
def hostile(tmp_path):
    """A folder with modules of well-known names, and the file that they would write to."""
    folder, marker = tmp_path / "shared", tmp_path / "marker"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(HOSTILE.format(name=name, marker=str(marker)))
    return folder, marker


def run_in(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", ["", os.pathsep, f"{ROOT}{os.pathsep}", f".{os.pathsep}{ROOT}", "no/such/folder"])
def test_no_module_of_the_working_directory_is_imported(hostile, path):
    folder, marker = hostile
    assert run_in(folder, "-c", CLUSTER.format(path=path)) == "[0, 1] ['0\\n', '1\\n']\n"
    assert not marker.exists(), marker.read_text()


def test_the_command_imports_none_either(hostile):
    folder, marker = hostile
    shape = ["--nodes", "1", "--ranks", "1", "--link", "unlimited"]
    assert run_in(folder, "-m", "startrail.cli", "lab", "run", *shape, "--", "echo", "fine") == "fine\n"
    assert not marker.exists(), marker.read_text()
