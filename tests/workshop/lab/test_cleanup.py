"""However a cluster ends, it leaves no process, namespace or file behind. Each runs in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, eventually, holders_of
from workshop import lab
from workshop.lab.namespaces import processes_in

pytestmark = pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))

CLUSTER = """
import json, sys, time
from workshop import lab
cluster = lab.Cluster(nodes=2, ranks_per_node=2, link="40mbit")
try:
    with cluster:
        print(json.dumps([cluster._supervisor.pid, cluster._supervisor.networks, cluster._folder]), flush=True)
        {body}
except ZeroDivisionError:
    pass
"""
PROGRAM = '["sh", "-c", "sleep 300 & setsid sleep 300 & wait"]'
ENDINGS = {
    "exit": (f"cluster.start({PROGRAM}); sys.stdin.readline()", None),
    "exception": (f"cluster.start({PROGRAM}); sys.stdin.readline(); 1 / 0", None),
    "interrupt": (f"cluster.run({PROGRAM})", signal.SIGINT),
    "terminate": (f"cluster.run({PROGRAM})", signal.SIGTERM),
    "kill": (f"cluster.run({PROGRAM})", signal.SIGKILL),
    "kill-call": ("cluster.call(lambda rank: time.sleep(300))", signal.SIGKILL),
}


def start_python(code: str, **options: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    # Tests in the background ignore SIGINT, and their children would inherit that.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left(ending: str) -> None:
    body, number = ENDINGS[ending]
    interfaces, named = socket.if_nameindex(), sorted(Path("/run/netns").glob("*"))
    process = start_python(CLUSTER.format(body=body))
    assert process.stdout is not None
    supervisor, networks, folder = json.loads(process.stdout.readline())
    assert eventually(lambda: len(processes_in(networks)) >= 4), "the job did not start"
    assert holders_of(networks)
    if number is not None:
        process.send_signal(number)
    _, errors = process.communicate("go on\n", timeout=20)
    assert process.returncode == (0 if number is None else -number), errors
    assert eventually(lambda: not processes_in(networks)), processes_in(networks)
    assert eventually(lambda: is_dead(supervisor))
    assert eventually(lambda: not holders_of(networks), 20), holders_of(networks)  # a process may still be ending
    assert not Path(folder).exists()
    assert socket.if_nameindex() == interfaces
    assert sorted(Path("/run/netns").glob("*")) == named


def is_dead(pid: int) -> bool:
    """True if it is gone, or a zombie that waits for init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def reaper_of(supervisor: int) -> int:
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])


@pytest.mark.parametrize("also_the_reaper", [False, True])
def test_nothing_is_left_when_parent_and_holder_are_killed_together(also_the_reaper: bool) -> None:
    """If the reaper is killed as well, the next cluster cleans up."""
    process = start_python(CLUSTER.format(body=f"cluster.run({PROGRAM})"))
    assert process.stdout is not None
    supervisor, networks, folder = json.loads(process.stdout.readline())
    assert eventually(lambda: len(processes_in(networks)) >= 4), "the job did not start"
    reaper = reaper_of(supervisor)
    everyone = [process.pid, supervisor, *([reaper] if also_the_reaper else [])]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)  # so that none of them sees another one die
    for pid in everyone:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert eventually(lambda: all(map(is_dead, everyone)))
    if also_the_reaper:
        assert processes_in(networks), "the daemons are still running"
        assert Path(folder).exists()
        with lab.Cluster(nodes=1, ranks_per_node=1):
            pass
    assert eventually(lambda: not processes_in(networks)), processes_in(networks)
    assert eventually(lambda: not Path(folder).exists())
    assert eventually(lambda: is_dead(reaper))
    assert eventually(lambda: not holders_of(networks), 20), holders_of(networks)  # a process may still be ending


def drop_capabilities() -> None:
    import ctypes

    drop_from_bounding_set, set_file_capabilities = 24, 31  # the latter is what lets uid 0 be mapped
    libc = ctypes.CDLL(None)
    for capability in set(range(64)) - {set_file_capabilities}:
        libc.prctl(drop_from_bounding_set, capability, 0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="without root every other test runs in a user namespace already")
def test_user_namespace() -> None:
    body = (
        "print(cluster._supervisor.in_user_namespace, [p.read_text() for p in cluster.run(['sh', '-c', 'echo $RANK'])])"
    )
    process = start_python(CLUSTER.format(body=body), preexec_fn=drop_capabilities)
    output, errors = process.communicate(timeout=30)
    if "nor the right to make user namespaces" in errors:
        pytest.skip(errors.splitlines()[-1])
    assert output.splitlines()[-1] == r"True ['0\n', '1\n', '2\n', '3\n']", errors
