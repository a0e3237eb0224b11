"""The few system calls the lab needs to make and enter namespaces, and to find who lives in one."""

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
    # os.unshare and os.setns came with Python 3.12; prctl never did.
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def is_privileged() -> bool:
    """Whether this process may make network namespaces without a user namespace around them."""
    status = Path("/proc/self/status").read_text()
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    return all(effective >> capability & 1 for capability in (NET_ADMIN, SYS_ADMIN))


def enter_user_namespace() -> None:
    """Become root in a new user namespace, where only this user exists; needs a process of one thread."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_USER)
    # Taking on capabilities makes a process "undumpable", and its /proc entries root's: undo that for our own parent.
    _call("prctl", SET_DUMPABLE, 1)
    # "deny" is the kernel's condition for writing gid_map without privileges.
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


def enter_held_network(holder: int, descriptor: int, in_user_namespace: bool) -> None:
    """Join the network namespace that process ``holder`` keeps at ``descriptor``; for a process just forked.

    The namespace is reached through /proc, so that its only lasting reference is the holder's.
    """
    network = os.open(f"/proc/{holder}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    if in_user_namespace:
        user = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", user, NEW_USER)
        _call("prctl", SET_DUMPABLE, 1)  # else the holder could not tell which namespace this process lives in
        os.close(user)
    enter_network(network)
    os.close(network)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of ``parent`` that forked it ends."""
    _call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def living_in(networks: Collection[int]) -> list[int]:
    """The processes whose network namespace has one of these inode numbers, except this process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):  # it ended, or it is not ours to look at
                if os.stat(f"/proc/{name}/ns/net").st_ino in networks:
                    found.append(int(name))
    return found


def signal_all(networks: Collection[int], number: int) -> None:
    for pid in living_in(networks):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(networks: Collection[int], seconds: float = 10.0) -> None:
    """Kill whoever lives in these namespaces, children that ranks left behind included, and see them gone."""
    end = time.monotonic() + seconds
    while living_in(networks) and time.monotonic() < end:
        signal_all(networks, signal.SIGKILL)  # again and again: a process may fork between our look and our signal
        time.sleep(0.005)
