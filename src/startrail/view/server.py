"""The page with live settings: a web server on this machine only, which answers questions with new recordings.

``GET /`` is the page. ``POST /record`` takes ``{"settings": {...}, "have": [plans]}`` and answers with a scene
(`page.scene`) or with ``{"problem": text}``. Other sites cannot ask: a browser sends them neither our Host header nor,
without asking first, a body in JSON. No file is read by a name that a client sends.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.units import shipped, short_repr
from startrail.view.page import html_page, scene

HOST = "127.0.0.1"
MOST_BYTES = 2**16  # of a question
MOST_DOCUMENTS = 64
SECONDS_PER_CLIENT = 30  # to send a question
DRAINED_BYTES, DRAINED_SECONDS = 2**20, 10.0  # at most, of what a client still sends after we refused it


class LocalServer(ABC, ThreadingHTTPServer):
    """Serves one ``page``, and an ``answer`` to what is posted to ``/record``."""

    daemon_threads = True
    page: bytes

    def __init__(self, port: int) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    @abstractmethod
    def answer(self, body: bytes) -> dict[str, Any]:
        """What to answer to a question."""


class PageServer(LocalServer):
    """The page opens with ``start``. ``clusters`` are offered besides those that startrail ships."""

    def __init__(self, port: int, start: Mapping[str, str], clusters: Mapping[str, ClusterSpec]) -> None:
        self.clusters, self.playing = clusters, Lock()
        known = {name: find_cluster(name) for name in shipped("clusters")} | dict(clusters)
        names = [name for name, cluster in known.items() if len(cluster.levels) <= 2]
        self.page = html_page([scene(start, clusters)], live=names).encode()
        super().__init__(port)

    def answer(self, body: bytes) -> dict[str, Any]:
        """The scene that a question asks for, or the reason why there is none."""
        try:
            settings, have = _read_question(body)
            documents = settings.get("documents", "").count(",") + 1
            if settings.get("mask") == "documents" and documents > MOST_DOCUMENTS:
                raise ValueError(f"{documents} documents take too long here, which takes up to {MOST_DOCUMENTS}")
            with self.playing:  # one at a time: each keeps a core busy
                return scene(settings, self.clusters, have=have)
        except ValueError as error:
            return {"problem": str(error)}


def _read_question(body: bytes) -> tuple[dict[str, str], list[str]]:
    try:
        question = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the question is not JSON") from None
    settings, have = (question.get(name) for name in ("settings", "have")) if isinstance(question, dict) else (0, 0)
    texts = [*settings, *settings.values()] if isinstance(settings, dict) else [None]
    texts += have if isinstance(have, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f'the question is not {{"settings": texts by name, "have": texts}}: {short_repr(question)}')
    return settings, have  # type: ignore[return-value]


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer
    timeout = SECONDS_PER_CLIENT
    server_version, sys_version = "startrail", ""

    def do_GET(self) -> None:
        if self.is_ours() and self.is_at("/"):
            self.reply(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def do_POST(self) -> None:
        if not (self.is_ours() and self.is_at("/record")):
            return
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json":
            self.refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "questions are application/json")
        elif not (length.isdecimal() and len(length) < 10):
            self.refuse(HTTPStatus.LENGTH_REQUIRED, "a question needs a Content-Length")
        elif int(length) > MOST_BYTES:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {MOST_BYTES} bytes")
        else:
            found = self.server.answer(self.rfile.read(int(length)))
            self.reply(HTTPStatus.OK, "application/json", json.dumps(found).encode())

    def is_ours(self) -> bool:
        """False for a name that only resolves to this machine: a site could otherwise read our answers."""
        if self.headers.get("Host", "") in [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]:
            return True
        self.refuse(HTTPStatus.FORBIDDEN, f"open {self.server.address}")
        return False

    def is_at(self, path: str) -> bool:
        if self.path.partition("?")[0] == path:
            return True
        self.refuse(HTTPStatus.NOT_FOUND, f"nothing here: open {self.server.address}")
        return False

    def refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer, and read on for a moment: closing with unread bytes resets the connection, and the client, which may
        still be sending, would see that instead of the answer."""
        self.close_connection = True
        self.reply(status, "text/plain; charset=utf-8", f"{text}\n".encode())
        self.connection.shutdown(socket.SHUT_WR)
        end, left = time.monotonic() + DRAINED_SECONDS, DRAINED_BYTES
        with contextlib.suppress(OSError):  # too slow, or gone
            while left > 0 and (seconds := end - time.monotonic()) > 0:
                self.connection.settimeout(seconds)
                if not (received := self.connection.recv(min(left, MOST_BYTES))):
                    return
                left -= len(received)

    def reply(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", content_type), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: the terminal keeps its one line with the address."""
