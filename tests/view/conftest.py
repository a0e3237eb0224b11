import pytest

from startrail.view.page import html_page
from tests.view.browser import start_browser


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html_page({}), "utf-8")
    return path


@pytest.fixture(scope="session")
def browser():
    started = start_browser()
    yield started
    started.quit()
    started.profile.cleanup()
