"""The supervisor: a small process that owns a cluster's namespaces and removes them when its parent ends.

Namespaces have no names and no files. They exist as long as the supervisor's file descriptors, or a process inside. The
supervisor watches the process that started it. When that process asks or dies, the supervisor kills every process in
the namespaces and exits, and the kernel removes the rest. It is a process and not a thread, because only a process with
one thread can enter a user namespace.

A fork of the supervisor, the reaper, waits until the supervisor is gone. If the parent and the supervisor are killed
together, the reaper kills the processes in the namespaces and removes the folder. If the reaper is killed as well, the
next cluster of this user on this machine does so: see `cleanup`.
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

import startrail
import workshop
from startrail.planner.topology import Machine
from workshop.lab.cleanup import write_owners
from workshop.lab.namespaces import enter_user_namespace, is_privileged, kill_all
from workshop.lab.wiring import Wiring

ANSWER_SECONDS = 30.0
MESSAGE_BYTES = 1 << 16
PROGRAM = "from workshop.lab.supervisor import main; main()"


class LabError(RuntimeError):
    """The machine cannot emulate a cluster, or the cluster is gone; the message gives the reason."""


class Supervisor:
    """Handle of the supervisor process in its parent."""

    def __init__(self, wiring: Wiring, folder: str) -> None:
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_SECONDS)
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, json.dumps(asdict(wiring)), folder],
                stdin=child_socket.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": _module_path()},
                start_new_session=True,  # Ctrl-C must not reach the supervisor, which cleans up
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
        """Call a method of the supervisor's ``Network`` and return its result."""
        try:
            self._socket.send(json.dumps([method, *arguments]).encode())
        except OSError as error:
            raise LabError(f"the lab's supervisor process {self.pid} is gone: {error}") from None
        return self._answer()

    def close(self) -> None:
        """Remove everything, and wait until it is gone."""
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
            late = f"did not answer in {ANSWER_SECONDS:.0f} s"
            raise LabError(f"the lab's supervisor process {self.pid} {late}") from None
        if not message:
            raise LabError(f"the lab's supervisor process {self.pid} ended with code {self._process.wait()}")
        answer = json.loads(message)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer["value"]


def _module_path() -> str:
    """Where the supervisor finds modules: beside our own, and never in the working directory, where others may write.
    ``-P`` keeps that out of sys.path, but not entries of PYTHONPATH that are relative or empty."""
    own = [str(Path(package).resolve().parent) for module in (workshop, startrail) for package in module.__path__]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*own, *filter(os.path.isabs, given)])


def main() -> None:
    """Entry point of the supervisor process: build the network, serve the parent's requests, then remove everything."""
    parent = os.pidfd_open(os.getppid())  # not the socket's end, which forks of the parent may keep open
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
            reaper.close()
        return
    networks = [os.fstat(descriptor).st_ino for descriptor in network.nodes]
    reaper.watch(networks)
    write_owners(folder, [os.getpid(), os.getppid(), reaper.pid], networks)
    try:
        with suppress(OSError):  # the parent is gone
            ready = dict(in_user_namespace=in_user_namespace, descriptors=network.nodes, networks=networks)
            control.send(_reply(value=ready))
            _serve(network, control, parent)
    finally:
        kill_all(networks)
        network.remove()
        shutil.rmtree(folder, ignore_errors=True)
        reaper.close()


class Reaper:
    """A fork of the supervisor that cleans up if the supervisor is killed.

    It is forked before the links are made: it is in no node, and holds no descriptor that keeps a namespace alive."""

    def __init__(self, folder: str) -> None:
        read_end, self._write_end = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(read_end)
            return
        os.close(self._write_end)
        os.setsid()  # so that killing the supervisor's session spares the reaper
        with suppress(BaseException):
            _reap(read_end, folder)
        os._exit(0)

    def watch(self, networks: list[int]) -> None:
        os.write(self._write_end, json.dumps(networks).encode())

    def close(self) -> None:
        """Everything is removed: let the reaper exit, and wait for it."""
        os.close(self._write_end)
        os.waitpid(self.pid, 0)


def _reap(pipe: int, folder: str) -> None:
    message = b""
    os.closerange(0, pipe)
    while part := os.read(pipe, MESSAGE_BYTES):  # until the supervisor is gone
        message += part
    if message:
        kill_all(json.loads(message))
    shutil.rmtree(folder, ignore_errors=True)


def _build(wiring: Wiring) -> Any:
    from workshop.lab.network import Network  # here, so that a missing pyroute2 is reported to the parent

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
