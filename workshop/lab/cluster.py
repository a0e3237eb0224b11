"""An emulated cluster: network namespaces as nodes, rate-limited links between them, and jobs that run on it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from startrail.planner.topology import Machine
from workshop.lab.cleanup import FOLDER_VARIABLE, new_folder
from workshop.lab.job import LabJob, ProgramJob
from workshop.lab.namespaces import die_with, enter_network_of, kill_all, signal_all
from workshop.lab.supervisor import LabError, Supervisor
from workshop.lab.wiring import LINK, Wiring, parse_rate

if TYPE_CHECKING:
    from workshop.lab.forked import ForkedJob

Result = TypeVar("Result")
FIRST_PORT = 29500
PORTS = 1000  # below the kernel's ephemeral range, used one after the other, so that jobs never share sockets


class Cluster:
    """Nodes, links and ranks on this machine, as a context manager.

    ::

        with Cluster(nodes=2, ranks_per_node=2, link="100mbit") as cluster:
            cluster.run(["train.py", "--steps", "3"], deadline=60)    # like torchrun, once per rank
            sizes = cluster.call(lambda rank: dist.get_world_size(), deadline=60)   # [4, 4, 4, 4]
            print(cluster.link_bytes()[0]["sent"])

    ``link`` is each node's rate each way ("100mbit"; None: unlimited), ``slow`` gives some nodes a different rate, and
    ``rack_link`` limits the traffic between ``racks``. Ranks of one node talk over its loopback, which has no limit and
    is not counted. ``mtu`` defaults to jumbo frames, whose headers add about 1 % to the bytes. ``shaper`` is tbf or
    htb; None selects tbf if the kernel has it.

    Needs root, or a system that allows user namespaces; otherwise raises `LabError` with the reason.
    Everything is removed when the block ends, however it ends, and also when this process is killed.
    """

    def __init__(
        self, nodes: int = 4, ranks_per_node: int = 8, link: str | None = "100mbit", *,
        racks: int = 1, rack_link: str | None = None, slow: Mapping[int, str | None] | None = None,
        mtu: int = 9000, shaper: str | None = None,
    ) -> None:  # fmt: skip
        self.machine = Machine(nodes, ranks_per_node)
        self.wiring = Wiring(self.machine, link, racks, rack_link, dict(slow or {}), mtu, shaper)
        self._supervisor: Supervisor | None = None
        self._folder = ""
        self._owner = 0
        self._job: LabJob | None = None
        self._jobs = 0

    def __enter__(self) -> Cluster:
        self._folder = new_folder()  # removed by the supervisor
        self._owner = os.getpid()
        self._supervisor = Supervisor(self.wiring, self._folder)
        return self

    def __exit__(self, *error: object) -> None:
        supervisor = self._get_supervisor()
        try:
            if self._job is not None:
                self._job.kill()
        finally:
            self._supervisor = None
            supervisor.close()

    def link_bytes(self) -> dict[int, dict[str, int]]:
        """Bytes that each node's link has carried: ``{node: {"sent": ..., "received": ...}}``."""
        return dict(enumerate(self._get_supervisor().ask("link_bytes")))

    def rack_bytes(self) -> dict[int, dict[str, int]]:
        """Bytes that have left and entered each rack; empty with one rack."""
        return dict(enumerate(self._get_supervisor().ask("rack_bytes")))

    def set_link(self, node: int, rate: str | None) -> None:
        """Change the rate of a node's link, both ways, immediately."""
        self.wiring.check_node(node)
        parse_rate(rate)
        self._get_supervisor().ask("set_link", node, rate)

    def cut(self, node: int) -> None:
        """Pull a node's cable: nothing passes, and connections wait for `restore`."""
        self.wiring.check_node(node)
        self._get_supervisor().ask("cut", node)

    def restore(self, node: int) -> None:
        """Plug a node's cable back in."""
        self.wiring.check_node(node)
        self._get_supervisor().ask("restore", node)

    def stop(self, node: int) -> None:
        """Freeze every process of a node, as if the machine hung: its connections stay open, but it does not answer."""
        self.wiring.check_node(node)
        signal_all({self._get_supervisor().networks[node]}, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Resume a stopped node."""
        self.wiring.check_node(node)
        signal_all({self._get_supervisor().networks[node]}, signal.SIGCONT)

    def start(
        self, argv: Sequence[str], deadline: float = 300.0, env: Mapping[str, str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> ProgramJob:  # fmt: skip
        """Start ``script.py args``, ``-m module args`` or any command on every rank, and return without waiting.

        Links can be cut and slowed before ``wait()`` is called on the job. The environment is torchrun's; see `run`.
        Ranks are killed when the thread that started them ends.
        """
        self._begin_job()
        folder = Path(log_dir) if log_dir is not None else Path(self._folder, f"job{self._jobs}")
        environments = [{**os.environ, **variables, **(env or {})} for variables in self._environments()]
        try:
            job = ProgramJob(argv, environments, self._enter, folder, deadline, self._kill_leftovers)
        except subprocess.SubprocessError:
            raise LabError("the ranks cannot enter their nodes: the supervisor process has ended") from None
        self._job = job
        return job

    def run(
        self, argv: Sequence[str], deadline: float = 300.0, env: Mapping[str, str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> list[Path]:  # fmt: skip
        """Run a torchrun-style program on every rank, and return the log files by rank.

        RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on are set, so ``init_process_group("gloo")`` connects over
        the emulated links; ``env`` adds to them. The first rank that fails ends the job, and so does the ``deadline``
        in seconds; both raise `JobError`. Without a ``log_dir`` the logs are removed with the cluster.
        """
        return self.start(argv, deadline, env, log_dir).wait()

    def fork(
        self, function: Callable[[int], Result], deadline: float = 300.0, env: Mapping[str, str] | None = None,
        expendable: frozenset[int] = frozenset(),
    ) -> ForkedJob:  # fmt: skip
        """Start ``function(rank)`` on every rank as `call` does, and return without waiting.

        ``expendable`` ranks may die and are not waited for; they return None. Failure tests use them.
        """
        from workshop.lab.forked import ForkedJob  # here, so that running programs does not import torch

        self._begin_job()
        environments = [{**variables, **(env or {})} for variables in self._environments()]
        store = Path(self._folder, f"store{self._jobs}")
        job = ForkedJob(function, environments, self._enter, store, deadline, expendable, self._kill_leftovers)
        self._job = job
        return job

    def call(
        self, function: Callable[[int], Result], deadline: float = 300.0, env: Mapping[str, str] | None = None
    ) -> list[Result]:
        """Fork this process once per rank into the nodes, join the ranks with gloo, and return each rank's result.

        Forked ranks share what the parent has imported: 32 ranks start in one second, 32 programs in 40. As in
        ``launch.local.run_local``, the parent must not have used OpenMP threads: call ``torch.set_num_threads(1)``.
        """
        return self.fork(function, deadline, env).wait()

    def _get_supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise LabError("the cluster is not running: use it inside its with block")
        return self._supervisor

    def _begin_job(self) -> None:
        self._get_supervisor()
        if self._job is not None and not self._job.is_done:
            raise LabError("the cluster is still running a job: wait() for it, or kill() it")
        self._jobs += 1

    def _environments(self) -> list[dict[str, str]]:
        machine = self.machine
        common = {
            "WORLD_SIZE": str(machine.world),
            "LOCAL_WORLD_SIZE": str(machine.ranks_per_node),
            "GROUP_WORLD_SIZE": str(machine.nodes),
            "MASTER_ADDR": self.wiring.address(0),
            "MASTER_PORT": str(FIRST_PORT + self._jobs % PORTS),
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise every rank warns that its peers' addresses have no names
            FOLDER_VARIABLE: self._folder,
            "PYTHONUNBUFFERED": "1",  # otherwise the last lines of a killed rank are lost
        }
        environments = []
        for rank in range(machine.world):
            local, node = str(rank % machine.ranks_per_node), str(machine.node(rank))
            environments.append(
                common | {"RANK": str(rank), "LOCAL_RANK": local, "GROUP_RANK": node, "NODE_RANK": node}
            )
        return environments

    def _enter(self, rank: int) -> None:
        # In the forked child, before it becomes a rank.
        supervisor = self._get_supervisor()
        enter_network_of(supervisor.pid, supervisor.descriptors[self.machine.node(rank)], supervisor.in_user_namespace)
        die_with(self._owner)

    def _kill_leftovers(self) -> None:
        kill_all(set(self._get_supervisor().networks))


@cache
def available() -> str | None:
    """The reason no cluster can be emulated on this machine, or None. Builds a small one to find out."""
    try:
        with Cluster(nodes=1, ranks_per_node=1, link="1gbit"):
            return None
    except LabError as error:
        return str(error)


def own_link_bytes() -> dict[str, int]:
    """Bytes that the link of this rank's own node has carried."""
    with open("/proc/self/net/dev") as file:
        fields = next(line for line in file if line.strip().startswith(f"{LINK}:")).split(":")[1].split()
    return {"sent": int(fields[8]), "received": int(fields[0])}
