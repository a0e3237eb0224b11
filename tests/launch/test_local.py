"""Local ranks: only this machine can reach them."""

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

import startrail
from startrail.launch.local import run_local


def listening_addresses(process: int) -> set[str]:
    """Addresses at which a process accepts connections, as /proc writes them."""
    sockets = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        try:
            sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
        except OSError:
            continue  # it closed meanwhile
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


def test_nothing_listens_beyond_loopback():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2")
        q = torch.randn(1, 2, 4, 8)
        sp.sequence(8).attention(q, q, q)
        dist.barrier(dist.new_group(backend="gloo"))
        return listening_addresses(os.getpid()), listening_addresses(os.getppid())

    for own, launcher in run_local(on_rank, 2):
        assert own == launcher == {"0100007F"}, "127.0.0.1"
