"""The files in ``deploy/`` and ``uv.lock``: linted, and in agreement with the code. No image is built here."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from startrail.training.recipes import RECIPES
from tests.helpers import ROOT

DEPLOY = ROOT / "deploy"
IMAGES = [DEPLOY / "cuda.Dockerfile", DEPLOY / "cpu.Dockerfile"]
LINTERS = [
    ["hadolint", *IMAGES],
    ["shellcheck", DEPLOY / "slurm.sh"],
    ["kubernetes-validate", "--strict", DEPLOY / "kubernetes.yaml"],
]


@pytest.mark.parametrize("command", LINTERS, ids=lambda command: command[0])
def test_linters_find_nothing(command):
    tool = shutil.which(command[0], path=Path(sys.executable).parent)
    if tool is None:
        pytest.skip(f"{command[0]} is not installed (pip install 'startrail[dev]')")
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_images_copy_what_exists_and_install_extras_that_exist():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for image in IMAGES:
        text = image.read_text()
        for sources in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
            assert all((ROOT / source).exists() for source in sources.split()), sources
        for names in re.findall(r"'\.\[(.*)\]'", text):
            assert set(names.split(",")) <= set(extras), names
    assert 'CMD ["make", "test"]' in IMAGES[1].read_text()


def test_jobs_start_recipes_in_the_image():
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == spec["subdomain"] and service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    options = dict(option.split("=") for option in container["args"] if "=" in option)
    assert options["--nnodes"] == str(job["spec"]["completions"])
    assert options["--nproc-per-node"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["--rdzv-endpoint"] == f"{name}-0.{spec['subdomain']}:{service['spec']['ports'][0]['port']}"
    assert RECIPES[container["args"][container["args"].index("train") + 1]]
    slurm = (DEPLOY / "slurm.sh").read_text()
    assert f"IMAGE:-{container['image']}" in slurm and f"-t {container['image']} " in IMAGES[0].read_text()
    assert f"--nproc-per-node {options['--nproc-per-node']} " in slurm and f"--nodes={options['--nnodes']}" in slurm


def test_the_slurm_job_passes_its_arguments_on(tmp_path):
    """With stand-ins for Slurm's commands, which write down how they were called."""
    for command, prints in (
        ("scontrol", "echo node1; echo node2"),
        ("srun", f'printf "%s\\n" "$@" > {tmp_path}/called'),
    ):
        (tmp_path / command).write_text(f"#!/bin/bash\n{prints}\n")
        (tmp_path / command).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "long"}
    given = [], ["gpt-3b", "--length", "512k"]
    for arguments in given:
        command = ["bash", DEPLOY / "slurm.sh", *arguments]
        subprocess.run(command, check=True, timeout=60, env=variables | {"PATH": f"{tmp_path}:/usr/bin:/bin"})
        called = (tmp_path / "called").read_text().split("\n")
        assert called[called.index("train") + 1 : -1] == [*(arguments or ["gpt-7b"]), "--out", "/shared/runs/long"]
        assert "node1:29500" in called


def test_the_lock_file_is_that_of_pyproject_and_names_pypi_only():
    """After a change of pyproject.toml: ``uv lock --default-index https://pypi.org/simple``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    packages = {package["name"]: package for package in lock["package"]}
    own = packages.pop("startrail")
    extras = project["project"]["optional-dependencies"]
    assert set(own["metadata"]["provides-extras"]) == set(extras)
    locked = {(each["name"], each.get("specifier", "")) for each in own["metadata"]["requires-dist"]}
    wanted = [*project["project"]["dependencies"], *(each for of in extras.values() for each in of)]
    for text in wanted:
        name, specifier = re.match(r"([\w.-]+)(?:\[.*?\])?\s*([^;\s]*)", text).groups()
        assert (name, specifier) in locked, text
    assert len(wanted) == len(own["metadata"]["requires-dist"])
    assert {package["source"]["registry"] for package in packages.values()} == {"https://pypi.org/simple"}
    assert set(re.findall(r'url = "https?://([^/"]+)', (ROOT / "uv.lock").read_text())) == {"files.pythonhosted.org"}
    torch = f"torch=={packages['torch']['version']}"
    assert torch in (ROOT / "constraints.txt").read_text().split()
    assert project["tool"]["uv"]["constraint-dependencies"] == [torch]
