"""Joining the ranks that torchrun has started, also after it has restarted them.

torchrun may give restarted ranks the store of those that died, with the addresses at which nobody answers any more
(pytorch/pytorch#135712), and its count of restarts can differ between nodes. So ranks first agree on a name that was
never used, and put everything under it.
"""

from __future__ import annotations

import os
import time
import uuid

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous


def join(device: torch.device) -> None:
    """Make the default process group: gloo on CPUs; NCCL between GPUs, which has not been run on hardware."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world = next(iter(rendezvous("env://")))
    name = agree_on_name(store, rank, world)
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=world)


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


def agree_on_name(store: Store, rank: int, world: int) -> str:
    """A name that all ranks have now and none had before, whatever earlier ranks left in the store.

    Every rank says hello with a word of its own, and waits for an answer to that very word. The first rank answers all
    words that it finds, also those of ranks that are long gone, until the others have thanked for its own name.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"startrail/hello/{rank}", name)
        answer = store.get(f"startrail/answer/{name}").decode()  # waits
        store.add(f"startrail/thanks/{answer}", 1)
        return answer
    answered: set[str] = set()
    while store.add(f"startrail/thanks/{name}", 0) < world - 1:
        for other in range(1, world):
            key = f"startrail/hello/{other}"
            word = store.get(key).decode() if store.check([key]) else None
            if word is not None and word not in answered:
                store.set(f"startrail/answer/{word}", name)
                answered.add(word)
        time.sleep(0.01)
    return name
