"""Imports point one way, and what plans, proves and draws works on a laptop without torch."""

import ast
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

SOURCE = ROOT / "src" / "startrail"

# Every module imports only from those before it: the order in which CONTRIBUTING lists them.
LISTED = """
    schedule schedule.values schedule.places schedule.timeline schedule.family schedule.nested schedule.star
    schedule.families plan layout mask bands schedule.around schedule.build schedule.player sizes cluster planner
    planning planning.describe planning.hardware planning.workload planning.tasks planning.simulate
    planning.attention planning.bounds planning.candidates planning.step planning.search planning.explain
    planning.chosen planning.command
    view.text view
    kernels.triton_kernels kernels.streams kernels.fused kernels.accumulate kernels.base kernels.reference
    kernels.cpu kernels.fa4 kernels.flash_ops kernels.cuda kernels.largest kernels peers first_steps texts
    ring wire arguments tokens watch agree counters buffers groups lanes compiled under_way exchange executor runtime
    op sequence live auto parallel checkpoint
    local rounding truth check first_look doctor
    training training.model_configs training.recipes training.seeds training.sources training.streams
    training.tokenizing training.transformer training.gpt training.dit training.loss training.text training.images
    training.tasks
    training.offload training.recompute training.estimate training.process_memory training.watching training.joining
    training.all_ranks training.sharding training.manifest training.pieces training.saving training.export
    training.stopping training.records training.display training.loop training.command
    logprobs integrations integrations.batches integrations.masks integrations.neighbours integrations.transformers
    integrations.trainer integrations.families faults verify testing
    lab bench cli __main__
"""
ORDER = LISTED.split()
WITHOUT_TORCH = [*ORDER[: ORDER.index("kernels.triton_kernels")], "cli"]


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        yield name, path


def rank_of(name: str) -> int | None:
    """A module's place in the order; those of a package that is listed as one share its place."""
    while name and name not in ORDER:
        name = name.rpartition(".")[0]
    return ORDER.index(name) if name else None


def imports_of(path) -> set[str]:
    """Modules of ours that are imported, also inside functions, but not those that only types need."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name.removeprefix("startrail.") for name in names if name.startswith("startrail.")}
    existing = {name for name, _ in modules()}
    return {name for name in found if name in existing}


def test_every_module_has_its_place():
    assert {name for name, _ in modules() if name and rank_of(name) is None} == set()
    assert [name for name in ORDER if name not in {name for name, _ in modules()}] == []


def test_contributing_lists_files_in_that_order():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## One attention call")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)\.py`", row)]
    assert len(named) > 30
    assert named == sorted(named, key=ORDER.index)


@pytest.mark.parametrize("name, path", [pair for pair in modules() if pair[0]], ids=lambda value: str(value))
def test_imports_point_one_way(name, path):
    upwards = [other for other in imports_of(path) if rank_of(other) > rank_of(name)]
    assert not upwards, f"{name} imports {upwards}, which come after it"


def test_what_plans_proves_and_draws_imports_without_torch():
    names = ", ".join(f"startrail.{name}" for name in WITHOUT_TORCH)
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules['torch'] = None; import {names}"], check=True)


def test_show_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None; from startrail.cli import main; sys.exit(main(['show', '2x2']))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "send q0>1 kv0>2" in done.stdout


def test_nothing_that_a_peer_or_a_file_sends_is_unpickled():
    """But by ``local``, from ranks that it forked itself. Object collectives pickle, and need numpy."""
    unsafe = r"_object\(|_object_list\(|^ *(import|from) \w*pickle|torch\.load\(|state_dict_loader|FileSystemReader"
    found = {name for name, path in modules() if re.search(unsafe, path.read_text(), re.MULTILINE)}
    assert found == {"local"}


def test_no_file_is_long():
    assert {name for name, path in modules() if len(path.read_text().splitlines()) > 400} == set()
