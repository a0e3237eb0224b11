"""`startrail serve`: what-if questions in a browser, mistakes, and what it refuses."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from startrail.cli import main
from startrail.compile.attention import Attention
from startrail.planner.auto import fit_cluster
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import predict
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan
from startrail.view.server import DRAINED_BYTES, MOST_BYTES
from tests.view.browser import TEXT, choose, errors, open_page, wait_for

JSON = {"Content-Type": "application/json"}
MANY_DOCUMENTS = json.dumps({"settings": {"mask": "documents", "documents": "1," * 64}, "have": []})


def send(server, method, path, body=None, headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask(server, settings, have=()):
    status, body = send(server, "POST", "/record", json.dumps({"settings": settings, "have": list(have)}), JSON)
    assert status == 200
    return json.loads(body)


def test_what_if_in_the_browser(browser, server):
    """Each change asks Python, and the page shows what the planner predicts for it."""
    open_page(browser, server)
    assert not browser.find_element("id", "offline").is_displayed()
    for name, value in (("cluster", "h100-8x8"), ("length", "64k"), ("heads", 16), ("nodes", 4), ("plan", "u4/1x2")):
        choose(browser, name, value)
        assert browser.execute_script(TEXT, "problem") == ""
    call = Attention.of(65536, 1, 16, 8, 128, True)
    expected = predict(fit_cluster(find_cluster("h100-8x8"), Machine(4, 2)), Plan.parse("u4/1x2"), call, all_ranks=True)
    assert browser.execute_script("return startrail.views[0].seconds") == pytest.approx(expected.seconds, rel=1e-9)
    assert browser.execute_script("return startrail.state.versus") == "1x8"  # the ring of the new machine
    choose(browser, "other", "2x2/u2,keep=all")
    titles = [title.text for title in browser.find_elements("css selector", "#views h2")]
    assert titles == ["2x2/u2,keep=all", "1x8"]
    choose(browser, "outer", 1)
    assert browser.execute_script("return startrail.views[0].seconds") > 2 * expected.seconds
    choose(browser, "outer", "fast")
    assert "a link of 'fast' GB/s does not work" in browser.execute_script(TEXT, "problem")
    assert browser.execute_script("return document.getElementById('views').className").endswith("stale")
    choose(browser, "outer", 40)
    assert browser.execute_script(TEXT, "problem") == ""
    assert "stale" not in browser.execute_script("return document.getElementById('views').className")
    choose(browser, "plan", "auto")
    assert "auto chose" in browser.execute_script(TEXT, "comparison")
    assert errors(browser) == []


def test_a_newer_question_wins(browser, server):
    open_page(browser, server)
    browser.execute_script(
        "for (const length of ['8192', '16384', '32768']) {"
        "  startrail.field('length').value = length; startrail.edited('length'); }"
    )
    wait_for(browser, "startrail.shown === startrail.asked && !startrail.busy")
    assert browser.execute_script("return [startrail.scene.settings.length, startrail.state.length]") == ["32768"] * 2


def test_answers_have_what_was_asked_for(server):
    found = ask(server, {"nodes": "1", "ranks": "4", "plan": "2x2", "versus": "1x4", "length": "2048"})
    assert set(found["plans"]) == {"2x2", "1x4"} and found["settings"]["length"] == "2048"
    assert ["star2", "the paper"] in found["offered"]
    again = ask(server, found["settings"], have=["2x2"])
    assert set(again["plans"]) == {"1x4"} and again["settings"] == found["settings"]


@pytest.mark.parametrize(
    "body, said",
    [
        ("{", "not JSON"),
        ("[]", "the question is not"),
        ('{"settings": {"nodes": 2}, "have": []}', "the question is not"),
        ('{"settings": {}, "have": [1]}', "the question is not"),
        ('{"settings": {"__proto__": "x"}, "have": []}', "no setting '__proto__'"),
        ('{"settings": {"cluster": "../clusters/lab.toml"}, "have": []}', "no cluster '../clusters/lab.toml'"),
        ('{"settings": {"nodes": "512", "plan": "1x4096"}, "have": []}', "has at most 1024, not 4096"),
        ('{"settings": {"nodes": "128", "plan": "auto", "versus": ""}, "have": []}', "auto is for up to 64 ranks"),
        ('{"settings": {"mask": "window", "length": "1000000000"}, "have": []}', "at most 16777216 tokens here"),
        ('{"settings": {"outer": "1e9"}, "have": []}', "does not work: give a number above 0"),
        ('{"settings": {"cluster": "pcie-8"}, "have": []}', "do not describe 4 nodes of 8 ranks"),
        (MANY_DOCUMENTS, "65 documents take too long"),
        ("[" * 60000, "not JSON"),
    ],
)  # fmt: skip
def test_bad_questions_are_answered_in_one_line(server, body, said):
    status, answer = send(server, "POST", "/record", body, JSON)
    problem = json.loads(answer)["problem"]
    assert status == 200 and said in problem and "\n" not in problem


def test_what_is_refused(server):
    port, text = server.server_port, json.dumps({"settings": {}, "have": []})
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert send(server, "GET", "/", headers={"Host": host})[0] == 403
        assert send(server, "POST", "/record", text, {**JSON, "Host": host})[0] == 403
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert send(server, "GET", "/", headers={"Host": host})[0] == 200
    for path in ("/nothing", "/../pyproject.toml", "/record", "/index.html"):
        assert send(server, "GET", path)[0] == 404
    assert send(server, "POST", "/", text, JSON)[0] == 404
    for kind in ("text/plain", "application/x-www-form-urlencoded"):  # what other sites can send without asking
        assert send(server, "POST", "/record", text, {"Content-Type": kind})[0] == 415
    assert send(server, "POST", "/record", "x", {**JSON, "Content-Length": str(MOST_BYTES + 1)})[0] == 413
    assert send(server, "POST", "/record", iter([b"x"]), JSON)[0] == 411  # chunked
    assert send(server, "DELETE", "/")[0] == 501
    assert send(server, "GET", "/")[0] == 200  # and it still answers


@pytest.mark.parametrize("size, is_read", [(1000, True), (8 * DRAINED_BYTES, False)])
def test_a_client_that_is_refused_while_it_sends_sees_the_answer(server, size, is_read):
    """A browser sends on after the answer. But nobody keeps the server reading for long."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
        host = f"Host: 127.0.0.1:{server.server_port}"
        client.sendall(f"POST /record HTTP/1.1\r\n{host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.0 415 ") and answer.endswith(b"questions are application/json\n")
        if is_read:
            for _ in range(3):
                client.sendall(b"x" * size)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
        else:
            with pytest.raises(ConnectionError):
                client.sendall(b"x" * size)


def test_the_served_page_asks_only_its_own_server(server):
    text = send(server, "GET", "/")[1].decode()
    assert "connect-src 'self'" in text and "https://" not in text


def test_serve_listens_on_loopback_and_ends_on_ctrl_c(tmp_path):
    environment = {**os.environ, "STARTRAIL_CLUSTER": ""}
    command = [sys.executable, "-m", "startrail", "serve", "--port", "0", "--cluster", "lab"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/ shows schedules on lab; Ctrl-C ends it", line)[1])
        idle = socket.create_connection(("127.0.0.1", port))  # does not keep it from ending
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/")
        assert b"StarTrail" in connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == "" and process.stdout.read().strip() == ""
        idle.close()
    finally:
        process.kill()
        process.wait()


def test_mistakes_on_the_command_line(server, capsys):
    for arguments, said in (
        (["--port", str(server.server_port)], "Address already in use"),
        (["--port", "99999"], "--port 99999: "),
        (["--cluster", "mine.toml"], "mine.toml: No such file"),
    ):
        assert main(["serve", *arguments]) == 2
        assert said in capsys.readouterr().err
