"""System calls that make and enter namespaces, and a search for the processes in one."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

NEW_USER = 0x10000000
NEW_NET = 0x40000000
SET_DEATH_SIGNAL = 1
SET_DUMPABLE = 4
NET_ADMIN = 12
SYS_ADMIN = 21

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    # Python has os.unshare and os.setns since 3.12, and no prctl.
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def is_privileged() -> bool:
    """True if this process may make network namespaces without a user namespace around them."""
    status = Path("/proc/self/status").read_text()
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    return all(effective >> capability & 1 for capability in (NET_ADMIN, SYS_ADMIN))


def enter_user_namespace() -> None:
    """Become root in a new user namespace, where only this user exists; the process must have one thread."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_USER)
    # New capabilities make a process "undumpable" and root the owner of its /proc entries, which our parent must read.
    _call("prctl", SET_DUMPABLE, 1)
    # The kernel requires "deny" before an unprivileged process may write gid_map.
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        try:
            Path("/proc/self", name).write_text(text)
        except OSError as error:
            raise OSError(error.errno, f"writing {text!r} to /proc/self/{name}: {error.strerror}") from None


def new_network() -> int:
    """Move this process to a new network namespace, and return the file descriptor that keeps it alive."""
    _call("unshare", NEW_NET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(descriptor: int) -> None:
    _call("setns", descriptor, NEW_NET)


def enter_network_of(supervisor: int, descriptor: int, in_user_namespace: bool) -> None:
    """Enter the network namespace that process ``supervisor`` has open at ``descriptor``; for a process just forked.

    The namespace is opened through /proc, so that the supervisor's stays its only lasting reference.
    """
    network = os.open(f"/proc/{supervisor}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    if in_user_namespace:
        user = os.open(f"/proc/{supervisor}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", user, NEW_USER)
        _call("prctl", SET_DUMPABLE, 1)  # or the supervisor cannot see which namespace this process is in
        os.close(user)
    enter_network(network)
    os.close(network)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of ``parent`` that forked it ends."""
    _call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def processes_in(networks: Collection[int]) -> list[int]:
    """Pids of processes whose network namespace has one of these inode numbers, except this process."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):  # it has ended, or belongs to another user
                if os.stat(f"/proc/{name}/ns/net").st_ino in networks:
                    pids.append(int(name))
    return pids


def signal_all(networks: Collection[int], number: int) -> None:
    for pid in processes_in(networks):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(networks: Collection[int], seconds: float = 10.0) -> None:
    """Kill all processes in these namespaces, also those that ranks left behind, and wait until they are gone."""
    end = time.monotonic() + seconds
    while processes_in(networks) and time.monotonic() < end:
        signal_all(networks, signal.SIGKILL)  # repeated, because a process may fork between the search and the signal
        time.sleep(0.005)
