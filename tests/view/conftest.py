import threading

import pytest

from startrail.view.page import html_page, scene
from startrail.view.server import PageServer
from tests.view.browser import start_browser

# What the examples of the page ask for: the form's defaults, and others that tests choose by number.
SCENES = [
    {},
    {"nodes": "2", "ranks": "4", "plan": "1x8", "versus": "2x1/1x4", "length": "8192"},
    {"nodes": "2", "ranks": "4", "plan": "1x2/1x4", "versus": "1x8", "length": "16k", "mask": "window", "window": "64"},
    {"nodes": "2", "ranks": "4", "plan": "1x2/1x4", "versus": "1x8", "length": "16384", "mask": "documents"},
    {"nodes": "2", "ranks": "2", "plan": "1x4", "versus": "", "length": "4096"},
]  # fmt: skip


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html_page([scene(texts, all_roles=True) for texts in SCENES]), "utf-8")
    return path


@pytest.fixture(scope="session")
def server():
    """The page that `startrail serve` serves."""
    started = PageServer(0, {"nodes": "2", "ranks": "2", "plan": "1x4", "versus": "", "length": "4096"}, {})
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield started
    started.shutdown()
    started.server_close()


@pytest.fixture(scope="session")
def browser():
    started = start_browser()
    yield started
    started.quit()
    started.profile.cleanup()
