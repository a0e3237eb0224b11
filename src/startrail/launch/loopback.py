"""Ranks of one machine communicate over loopback, so no other machine can reach them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from startrail._compat import Store, TCPStore

HOST = "127.0.0.1"


def loopback_store(world: int, port: int = 0) -> TCPStore:
    """A store that only this machine can reach; ``port`` 0 picks a free one. Given a host, torch's store listens on all
    interfaces; given a socket that is bound already, it uses that."""
    listener = socket.create_server((HOST, port), backlog=world)
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, world, True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_loopback_store(world: int, port: int, limit: timedelta) -> TCPStore:
    return TCPStore(HOST, port, world, False, limit, wait_for_workers=False)


def use_loopback() -> None:
    """Have the process groups that this process makes listen on loopback only, unless the user has chosen otherwise.
    (NCCL: not run on hardware.)"""
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")


def store_of_one_node(rank: int, limit: timedelta) -> Store | None:
    """The store in which the ranks of a torchrun-like launcher meet, if all are on this machine and rank 0 must make
    it. None if there are several nodes, or if the launcher has made it."""
    world = int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != world:
        return None
    use_loopback()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "MASTER_PORT" not in os.environ:
        return None
    port = int(os.environ["MASTER_PORT"])
    return loopback_store(world, port) if rank == 0 else join_loopback_store(world, port, limit)
