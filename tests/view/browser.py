"""Chromium through its driver, for tests of pages."""

import shutil
import tempfile
import time

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1400,1000",
)  # fmt: skip

TEXT = "return document.getElementById(arguments[0]).textContent"


def start_browser():
    """A driver, or a skip with the reason."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("no browser: install chromium and chromium-driver")
    options = selenium.ChromeOptions()
    profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    for flag in (*FLAGS, f"--user-data-dir={profile.name}"):
        options.add_argument(flag)
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    started.profile = profile
    started.set_script_timeout(120)
    return started


def wait_for(browser, condition, seconds=30.0):
    """Wait until a JavaScript expression holds."""
    limit = time.monotonic() + seconds
    while not browser.execute_script(f"return Boolean({condition})"):
        assert time.monotonic() < limit, f"{condition} never held: {browser.get_log('browser')}"
        time.sleep(0.02)


def open_page(browser, page, fragment=""):
    """Open a file, or what a server has at its address."""
    browser.get("about:blank")  # else a new fragment alone does not load the page
    browser.get(f"{getattr(page, 'address', None) or page.as_uri()}#{fragment}")
    settled(browser)


def settled(browser):
    """Wait until the page shows what its settings ask for, or why it cannot."""
    wait_for(browser, "window.startrail && !startrail.busy && startrail.opened && startrail.shown === startrail.asked")


def errors(browser):
    return [entry["message"] for entry in browser.get_log("browser")]


def state(**parts):
    return "&".join(f"{name}={value}" for name, value in parts.items())


def click(browser, name):
    browser.find_element("id", name).click()


def choose(browser, name, value):
    script = (
        "const field = document.querySelector(`[name=${arguments[0]}]`); field.value = arguments[1];"
        "field.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    browser.execute_script(script, name, str(value))
    settled(browser)
