import os
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once, rather than in every forked rank
from _pytest.doctest import DoctestModule

os.environ.setdefault(
    "STARTRAIL_CLUSTER", "lab"
)  # a busy machine would measure another cluster, and auto choose another plan

torch.set_num_threads(1)  # ranks are forked from this process, which must not have used OpenMP threads

ROOT = Path(__file__).parent
LAB = ("workshop/",)  # network namespaces: one test after the other
SHARED = (
    "view/",
    "integrations/test_families.py",
    "integrations/test_wrappers.py",
)  # a fixture that takes long: one worker each
LONG = (
    "workshop/",
    "bench/",
    "view/",
    "test_docs.py",
    "training/",
    "chaos.py",
    "integrations/",
    "engine/",
    "fuzz.py",
    "transport/",
    "agreement/",
    "schedule/",
)  # first, to end together


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: measures the machine, so that nothing else may run; see tests/README.md")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Modules of tests have no doctests. Looking for them would import a broken module first and skip it, after which
    its tests would be missing without an error."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule)] or found


@pytest.hookimpl(tryfirst=True)  # before xdist's, which looks for groups
def pytest_collection_modifyitems(items):
    for item in items:
        path = _path(item)
        if path.startswith(LAB + SHARED):
            item.add_marker(pytest.mark.xdist_group("lab" if path.startswith(LAB) else group_of(path)))
    items.sort(key=lambda item: next((n for n, start in enumerate(LONG) if _path(item).startswith(start)), len(LONG)))


def pytest_collection_finish(session):
    """xdist puts the group after a test's name. With a pytest that it does not know, there would be no groups."""
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        raise pytest.UsageError("this pytest-xdist has no groups with this pytest: see the versions in pyproject.toml")


def group_of(path):
    """Tests that share a fixture; the browser is one for all tests of pages."""
    return "view" if path.startswith("view/") else path


def _path(item):
    return os.path.relpath(item.path, ROOT)
