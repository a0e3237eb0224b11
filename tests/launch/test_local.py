"""Ranks of one machine: no other machine can reach them, however they were started."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail.cli import main
from startrail.launch import local
from startrail.launch.local import run_local
from startrail.training import loop  # noqa: F401, once here rather than in every command
from tests.helpers import free_port, write_words

LOOPBACK = "0100007F"  # 127.0.0.1 as /proc writes it
TRAIN = "train gpt-tiny --plan 1x2 --ranks 2 --width 16 --layers 1 --heads 2 --kv_heads 2 --hidden 16 --length 64 "
TRAIN += "--steps 2 --sample 0 --evaluate_batches 0 --data texts --out out"
COMMANDS = {
    "train": TRAIN,
    "verify": "verify step.py:make --ranks 2",
    "check": "check 1x2 --length 64 --heads 2 --head-dim 8",
    "bench": "bench engine --ranks 2 --plans 1x2 --length 64 --heads 2 --head-dim 8 --rounds 1",
    "doctor": "doctor --ranks 2",
}
STEP = """
import torch, startrail

def make():
    def step(model, batch, sp):
        sequence = sp.sequence(16)
        x = model(sequence.shard(batch, 2))
        loss = startrail.global_mean(sequence.attention(x, x, x).square().sum(), x.shape[2], sp.group)
        loss.backward()
        startrail.sum_gradients(model.parameters(), sp.group)
        return loss
    return torch.nn.Linear(8, 8), torch.randn(1, 2, 16, 8), step
"""


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


def tree(process: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(found for child in children for found in tree(int(child)))]


def noting_addresses(make_group):
    """``make_group``, after which each rank notes where it and its launcher listen: a look from outside may come too
    late."""

    def make_and_note(*args, **options):
        make_group(*args, **options)
        with open("listening", "a") as file:
            file.write(f"{' '.join(listening_addresses(os.getpid()) | listening_addresses(os.getppid()))}\n")

    return make_and_note


def run_and_watch(command: str, environments: list[dict[str, str]]) -> tuple[list[int], set[str]]:
    """Run a command in a forked process for each environment. Returns their exit codes, and all addresses at which they
    or their descendants were seen listening."""
    started = []
    for environment in environments:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.environ.update(environment)
                sys.stdout = sys.stderr = open("log", "a")  # noqa: SIM115
                code = main(command.split())
                sys.stdout.flush()
            finally:
                os._exit(code)
        started.append(child)
    codes, addresses = {}, set()
    while len(codes) < len(started):
        for child in started:
            if child not in codes:
                found, status = os.waitpid(child, os.WNOHANG)
                codes |= {child: os.waitstatus_to_exitcode(status)} if found else {}
            try:
                addresses.update(*map(listening_addresses, tree(child)))
            except OSError:
                continue  # it has ended
        time.sleep(0.005)
    return list(codes.values()), addresses


@pytest.mark.parametrize("command", [*COMMANDS, "launched train", "launched check", "launched doctor"])
def test_no_command_listens_beyond_loopback(command, tmp_path, monkeypatch):
    """``launched``: as one of two ranks on one node of a launcher that makes no store, so that rank 0 has to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dist, "init_process_group", noting_addresses(dist.init_process_group))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    write_words(tmp_path / "texts")
    (tmp_path / "step.py").write_text(STEP)
    environments = [{}]
    if command.startswith("launched"):
        common = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
        environments = [dict(common, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    codes, addresses = run_and_watch(COMMANDS[command.split()[-1]], environments)
    assert not any(codes), (tmp_path / "log").read_text()
    noted = (tmp_path / "listening").read_text().splitlines()
    assert len(noted) >= 2 and addresses.union(*map(str.split, noted)) == {LOOPBACK}, (addresses, noted)


def test_groups_of_one_node_use_loopback_and_those_of_several_do_not(monkeypatch):
    names = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local.store_of_one_node(0, None) is None and not any(name in os.environ for name in names)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # the user's choice
    assert local.store_of_one_node(0, None) is None
    assert [os.environ.pop(name) for name in names] == ["lo", "eth7"]


def test_nothing_listens_beyond_loopback():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2")
        q = torch.randn(1, 2, 4, 8)
        sp.sequence(8).attention(q, q, q)
        dist.barrier(dist.new_group(backend="gloo"))
        return listening_addresses(os.getpid()), listening_addresses(os.getppid())

    for own, launcher in run_local(on_rank, 2):
        assert own == launcher == {LOOPBACK}
