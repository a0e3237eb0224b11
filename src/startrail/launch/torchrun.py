"""Joins the ranks that torchrun started, also after it has restarted them.

torchrun may give restarted ranks the store of the ranks that died, with addresses at which no rank answers any more
(pytorch/pytorch#135712), and its restart count can differ between nodes. So ranks first agree on a prefix that was
never used, and keep everything under it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from startrail._compat import PrefixStore, Store
from startrail.agreement.timing import TIMING
from startrail.launch.heartbeat import RankStatus, WaitLimit, rank_names
from startrail.launch.local import store_of_one_node


class JoinError(RuntimeError):
    """Not all ranks joined in time; the text is one line."""


def join(device: torch.device, limit: WaitLimit, timeout: float | None = None) -> StoreBoard:
    """Make the default process group: gloo on CPUs; NCCL between GPUs, which has not been run on hardware. Its
    collectives may take ``timeout`` seconds. Returns a board for heartbeats. Raises ``JoinError`` after ``limit``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank = int(os.environ["RANK"])
    try:
        wait = timedelta(seconds=limit.seconds)
        store, world = store_of_one_node(rank, wait), int(os.environ["WORLD_SIZE"])
        if store is None:
            store, rank, world = next(iter(rendezvous("env://", timeout=wait)))
        store = PrefixStore(agree_on_prefix(store, rank, world, limit), store)
        board = StoreBoard(store, rank, world)  # every rank has made its own once the group exists
        longest = timedelta(seconds=timeout or group_timeout(limit.seconds))
        store.set_timeout(longest)  # it still has that of joining, which may be shorter than any work of a rank
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=longest)
    except JoinError:
        raise
    except (OSError, RuntimeError) as error:  # such as a port that is taken, or a rank that does not come
        text = str(error).strip().splitlines()[0]
        raise JoinError(f"rank {rank} could not join the others within {limit}: {text}") from error
    return board


def group_timeout(limit: float) -> float:
    """Seconds that a collective may take. Heartbeats find ranks that hang, so this is the last resort, and longer than
    any work that one rank does alone before the first step, such as counting tokens."""
    return max(1800.0, 2 * limit)


def store_host() -> str:
    """The process that holds the store in which ranks meet: torchrun's own, or rank 0."""
    return "the first launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


class StoreBoard:
    """A board for ranks on any node: entries of the store in which they met, over a separate connection."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.world = world
        self._store = store.clone()  # type: ignore[attr-defined]
        self.write(rank, 0, 0, 0)

    def write(self, rank: int, heartbeats: int, progress: int, step: int) -> None:
        self._store.set(f"startrail/status/{rank}", f"{heartbeats} {progress} {step}")

    def read(self) -> list[RankStatus]:
        texts = self._store.multi_get([f"startrail/status/{rank}" for rank in range(self.world)])
        return [RankStatus(*map(int, text.split())) for text in texts]


def use_gpus(device: str, ranks: int) -> bool:
    """True if each of this node's ``ranks`` gets a GPU. ``auto``: if there are enough. ``cuda``: raises ``ValueError``
    if there are not."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < ranks:
        raise ValueError(
            f"device cuda needs {ranks} GPUs, one per rank, found {gpus}: lower --ranks or pass --device cpu"
        )
    return device != "cpu" and gpus >= ranks


def device_of_rank(device: str) -> torch.device:
    if use_gpus(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def agree_on_prefix(store: Store, rank: int, world: int, limit: WaitLimit) -> str:
    """Return a prefix that all ranks share and no earlier rank used, whatever those left in the store.

    Every rank posts a request with a fresh token and waits for the reply to that token. Rank 0 replies to every token
    that it finds, also to those of dead ranks, until all others have acknowledged its prefix. It reports missing ranks
    after some seconds. Raises ``JoinError`` after ``limit``.
    """
    token = uuid.uuid4().hex
    start = reported = time.monotonic()
    if rank > 0:
        store.set(f"startrail/request/{rank}", token)
        try:
            store.wait([f"startrail/reply/{token}"], timedelta(seconds=limit.seconds))
        except dist.DistStoreError:
            raise JoinError(f"rank 0 did not answer rank {rank} within {limit}") from None
        prefix = store.get(f"startrail/reply/{token}").decode()
        store.set(f"startrail/acknowledged/{prefix}/{rank}", "")
        return prefix
    prefix, answered = token, set[str]()
    missing = list(range(1, world))
    while missing := [other for other in missing if not store.check([f"startrail/acknowledged/{prefix}/{other}"])]:
        for other in missing:
            key = f"startrail/request/{other}"
            request = store.get(key).decode() if store.check([key]) else None
            if request is not None and request not in answered:
                store.set(f"startrail/reply/{request}", prefix)
                answered.add(request)
        now = time.monotonic()
        if now - start > limit.seconds:
            raise JoinError(f"{rank_names(missing)} did not join within {limit}")
        if now - reported > (TIMING.missing_again if reported > start else TIMING.missing):
            reported = now
            limit.log(f"still waiting for {rank_names(missing)} (not started yet)")
        time.sleep(TIMING.join_poll)
    return prefix
