"""Joining the ranks that torchrun has started, also after it has restarted them.

torchrun may give restarted ranks the store of those that died, with the addresses at which nobody answers any more
(pytorch/pytorch#135712), and its count of restarts can differ between nodes. So ranks first agree on a name that was
never used, and put everything under it.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from startrail.comm.timing import TIMING
from startrail.launch.heartbeat import Sign, names


class JoinError(RuntimeError):
    """Not all ranks came; the text is one line."""


def join(device: torch.device, limit: float) -> StoreBoard:
    """Make the default process group: gloo on CPUs; NCCL between GPUs, which has not been run on hardware.

    ``JoinError`` if that takes more than ``limit`` seconds. Returns a board for the ranks' signs of life.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank = int(os.environ["RANK"])
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit))))
        store = PrefixStore(agree_on_name(store, rank, world, limit), store)
        board = StoreBoard(store, rank, world)  # all ranks have made theirs when the group is there
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=group_timeout(limit))
        )
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, JoinError):
            raise
        text = str(error).strip().splitlines()[0]
        raise JoinError(f"rank {rank} could not join the others within {limit / 60:g} minutes: {text}") from error
    return board


def group_timeout(limit: float) -> float:
    """Seconds that a collective may take: ranks that hang are found by their signs of life, so this is the last resort,
    and longer than what one rank may have to do alone before the first step, such as counting tokens."""
    return max(1800.0, 2 * limit)


def holder_of_store() -> str:
    """Who keeps the store in which ranks meet: torchrun's own process, or the first rank."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "the first launcher" if shared else "rank 0"


class StoreBoard:
    """For ranks anywhere: entries of the store in which they met, over a connection of their own."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.world = world
        self._store = store.clone()  # type: ignore[attr-defined]
        self.write(rank, 0, 0, 0)

    def _key(self, rank: int) -> str:
        return f"startrail/sign/{rank}"

    def write(self, rank: int, beats: int, passed: int, step: int) -> None:
        self._store.set(self._key(rank), f"{beats} {passed} {step}")

    def read(self) -> list[Sign]:
        texts = self._store.multi_get([self._key(rank) for rank in range(self.world)])
        return [Sign(*map(int, text.split())) for text in texts]


def on_gpus(wanted: str, ranks: int) -> bool:
    """Whether ``ranks`` on this node get a GPU each: ``auto`` if there are enough; ``ValueError`` if ``cuda`` must."""
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < ranks:
        raise ValueError(f"device cuda: {ranks} ranks need as many GPUs, here are {gpus}; set ranks, or device cpu")
    return wanted != "cpu" and gpus >= ranks


def device_of_rank(wanted: str) -> torch.device:
    if on_gpus(wanted, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def agree_on_name(store: Store, rank: int, world: int, limit: float = 600.0) -> str:
    """A name that all ranks have now and none had before, whatever earlier ranks left in the store.

    Every rank says hello with a word of its own, and waits for an answer to that very word. The first rank answers all
    words that it finds, also those of ranks that are long gone, until the others have thanked for its own name. It
    says who is missing after some seconds; ``JoinError`` after ``limit`` seconds.
    """
    name = uuid.uuid4().hex
    start = said = time.monotonic()
    if rank > 0:
        store.set(f"startrail/hello/{rank}", name)
        try:
            store.wait([f"startrail/answer/{name}"], timedelta(seconds=limit))
        except dist.DistStoreError:
            raise JoinError(f"rank 0 did not answer rank {rank} within {limit / 60:g} minutes (wait_minutes)") from None
        answer = store.get(f"startrail/answer/{name}").decode()
        store.set(f"startrail/thanks/{answer}/{rank}", "")
        return answer
    answered: set[str] = set()
    missing = list(range(1, world))
    while missing := [other for other in missing if not store.check([f"startrail/thanks/{name}/{other}"])]:
        for other in missing:
            key = f"startrail/hello/{other}"
            word = store.get(key).decode() if store.check([key]) else None
            if word is not None and word not in answered:
                store.set(f"startrail/answer/{word}", name)
                answered.add(word)
        now = time.monotonic()
        if now - start > limit:
            raise JoinError(f"{names(missing)} did not come within {limit / 60:g} minutes (wait_minutes)")
        if now - said > (TIMING.missing_again if said > start else TIMING.missing):
            said = now
            print(f"startrail train: still waiting for {names(missing)} (not there yet)", file=sys.stderr, flush=True)
        time.sleep(TIMING.join_poll)
    return name
