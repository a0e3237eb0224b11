"""The holder: one small process that owns a cluster's namespaces and outlives nothing.

Namespaces have no names and no files: they live as long as the holder's file descriptors do, or a process inside them.
The holder watches the process that started it; when that process asks, or dies in whatever way, the holder kills
everything that lives in the namespaces and leaves, and the kernel removes the rest. It is a process of its own, not a
thread, because a user namespace can only be entered by a process of one thread.

The holder in turn is watched by a fork of itself, the reaper, which does nothing until the holder is gone: if somebody
kills the parent and the holder at once, the reaper kills what lives in the namespaces and removes the folder. If the
reaper is killed as well, the next cluster of this user on this machine does so: see `remains`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from startrail.lab.cleanup import describe_owners
from startrail.lab.namespaces import enter_user_namespace, is_privileged, kill_all
from startrail.lab.wiring import Wiring
from startrail.planner.topology import Machine

ANSWER_SECONDS = 30.0
MESSAGE_BYTES = 1 << 16


class LabError(RuntimeError):
    """The machine does not let us emulate a cluster, or took it away; the text says why."""


class Supervisor:
    """The started holder process, as its parent sees it."""

    def __init__(self, wiring: Wiring, folder: str) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from startrail.lab.supervisor import main; main()",
                    json.dumps(asdict(wiring)),
                    folder,
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the parent: the holder must be there to clean up
            )
        self.pid = self._process.pid
        try:
            ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.in_user_namespace: bool = ready["in_user_namespace"]
        self.descriptors: list[int] = ready["descriptors"]
        self.networks: list[int] = ready["networks"]

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the holder's `startrail.lab.network.Network`."""
        try:
            self._socket.send(json.dumps([method, *arguments]).encode())
        except OSError as error:
            raise LabError(f"the lab's holder process {self.pid} is gone: {error}") from None
        return self._answer()

    def close(self) -> None:
        """Have everything removed, and wait until it is."""
        self._socket.close()
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Any:
        try:
            message = self._socket.recv(MESSAGE_BYTES)
        except TimeoutError:
            raise LabError(f"the lab's holder process {self.pid} did not answer in {ANSWER_SECONDS:.0f} s") from None
        if not message:
            raise LabError(f"the lab's holder process {self.pid} ended with code {self._process.wait()}")
        answer = json.loads(message)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer["value"]


def main() -> None:
    """What the holder process runs: build the network, serve the parent's requests, then remove everything."""
    parent = os.pidfd_open(os.getppid())  # a descriptor, since forks of the parent may keep its end of the socket open
    control = socket.socket(fileno=0)
    fields = json.loads(sys.argv[1])
    slow = {int(node): rate for node, rate in fields["slow"].items()}
    wiring = Wiring(**fields | {"machine": Machine(**fields["machine"]), "slow": slow})
    folder = sys.argv[2]
    reaper: Reaper | None = None
    try:
        in_user_namespace = not is_privileged()
        if in_user_namespace:
            enter_user_namespace()
        reaper = Reaper(folder)
        network = _build(wiring)
    except Exception as error:
        control.send(_reply(error=f"cannot emulate a cluster here: {_reason(error)}"))
        shutil.rmtree(folder, ignore_errors=True)
        if reaper is not None:
            reaper.dismiss()
        return
    networks = [os.fstat(descriptor).st_ino for descriptor in network.nodes]
    reaper.watch(networks)
    describe_owners(folder, [os.getpid(), os.getppid(), reaper.pid], networks)
    try:
        with suppress(OSError):  # the parent has gone
            ready = dict(in_user_namespace=in_user_namespace, descriptors=network.nodes, networks=networks)
            control.send(_reply(value=ready))
            _serve(network, control, parent)
    finally:
        kill_all(networks)
        network.remove()
        shutil.rmtree(folder, ignore_errors=True)
        reaper.dismiss()


class Reaper:
    """A fork of the holder that outlives it by a moment. Forked before there are links: it lives in none of the nodes,
    and has nothing open that keeps a namespace alive."""

    def __init__(self, folder: str) -> None:
        ours, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(ours)
            return
        os.close(self._pipe)
        os.setsid()  # apart from the holder, for whoever kills a whole session
        with suppress(BaseException):
            _reap(ours, folder)
        os._exit(0)

    def watch(self, networks: list[int]) -> None:
        os.write(self._pipe, json.dumps(networks).encode())

    def dismiss(self) -> None:
        """Nothing is left to do: wait until it has seen that for itself."""
        os.close(self._pipe)
        os.waitpid(self.pid, 0)


def _reap(pipe: int, folder: str) -> None:
    said = b""
    os.closerange(0, pipe)
    while part := os.read(pipe, MESSAGE_BYTES):  # until the holder is gone
        said += part
    if said:
        kill_all(json.loads(said))
    shutil.rmtree(folder, ignore_errors=True)


def _build(wiring: Wiring) -> Any:
    from startrail.lab.network import Network  # here, so that a missing pyroute2 is reported like any other obstacle

    return Network(wiring)


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install pyroute2)"
    if isinstance(error, PermissionError):
        rights = "neither the capabilities NET_ADMIN and SYS_ADMIN nor the right to make user namespaces"
        return f"{error.strerror or error}; this process has {rights} (see user.max_user_namespaces and AppArmor)"
    return f"{type(error).__name__}: {error}"


def _serve(network: Any, control: socket.socket, parent: int) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while parent not in (ready for ready, _ in poll.poll()):
        message = control.recv(MESSAGE_BYTES)
        if not message:
            return
        method, *arguments = json.loads(message)
        try:
            reply = _reply(value=getattr(network, method)(*arguments))
        except Exception as error:
            reply = _reply(error=f"{method}{tuple(arguments)} failed: {type(error).__name__}: {error}")
        control.send(reply)


def _reply(**fields: object) -> bytes:
    return json.dumps(fields).encode()
