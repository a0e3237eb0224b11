"""``startrail doctor``: describes and measures this machine or, under torchrun, all ranks, and names outliers."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from startrail import __version__
from startrail._compat import dtype_name
from startrail.kernels import kernel_for
from startrail.launch.heartbeat import WaitLimit
from startrail.launch.local import RankError, check_ranks, run_local
from startrail.launch.torchrun import JoinError, device_of_rank, join
from startrail.planner.cluster import cluster_text
from startrail.planner.live.measure import cpu_name, measure, no_progress
from startrail.planner.live.placement import find_machine, own_device
from startrail.planner.live.summary import Measured
from startrail.planner.topology import Machine
from startrail.planner.units import seconds_text

TIMEOUT_SECONDS = 120.0  # of any one wait
KERNELS = ("flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "triton")
PACKAGES = ("torch", *KERNELS, "transformers", "diffusers", "pyroute2", "matplotlib")
MIN_OPEN_FILES = 4096  # each pair of ranks has a connection per level


def doctor_command(out: str | None, ranks: int) -> int:
    """Run the command and return its exit code. Raises ``ValueError`` for wrong options."""
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be at least 1")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise ValueError(f"--out {out}: folder {Path(out).absolute().parent} does not exist")
    if "RANK" in os.environ:
        return _under_torchrun(out)
    check_ranks(ranks)
    torch.set_num_threads(1)
    print(facts())
    if ranks == 1:
        _report(measure(None, Machine(1, 1), _progress_bar), out)
        return 0

    def on_rank(rank: int) -> Measured:
        return measure(dist.group.WORLD, Machine(1, ranks), no_progress if rank else _progress_bar)

    try:
        found = run_local(on_rank, ranks)
    except RankError as error:
        print(f"startrail doctor: {error}", file=sys.stderr)
        return 1
    assert found[0] is not None
    _report(found[0], out)
    return 0


def _under_torchrun(out: str | None) -> int:
    try:
        join(device_of_rank("auto"), WaitLimit(TIMEOUT_SECONDS, "startrail doctor", "fixed"), TIMEOUT_SECONDS)
    except JoinError as error:
        print(f"startrail doctor: {error}", file=sys.stderr)
        return 1
    lead, world = dist.get_rank() == 0, dist.get_world_size()
    machine, nodes = find_machine(dist.group.WORLD, range(world))
    if lead:
        print(facts())
        print(f"process group: {world} ranks, {nodes}, {dist.get_backend_config()}")
    found = measure(dist.group.WORLD, machine, _progress_bar if lead else no_progress)
    if lead:
        _report(found, out)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def facts() -> str:
    """Versions, devices, kernels, limits and environment: everything that needs no measurement."""
    lines = [f"startrail {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    lines.append("packages: " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ", ".join(torch.cuda.get_device_name(index) for index in range(gpus)) or "no GPU usable by torch"
    lines.append(f"devices: {devices}; {os.cpu_count()} cores, {cpu_name()}")
    if gpus:
        nccl, cudnn = ".".join(map(str, torch.cuda.nccl.version())), torch.backends.cudnn.version()
        capability = ".".join(map(str, torch.cuda.get_device_capability(own_device())))
        lines.append(f"CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {cudnn}, compute capability {capability}")
    lines += [f"kernels: {line}" for line in _kernels()]
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    lines.append(f"backends of torch.distributed: {', '.join(backends)}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0
    hint = " (low: raise it with ulimit -n)" if files < MIN_OPEN_FILES else ""
    lines.append(
        f"limits: {files} open files{hint}, locked memory "
        f"{'unlimited' if locked < 0 else f'{locked / 2**20:.0f} MiB'}, {shared / 2**30:.1f} GiB free in /dev/shm"
    )
    names = sorted(name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "STARTRAIL_")))
    lines.append("environment: " + (", ".join(f"{name}={os.environ[name]}" for name in names) or "no variables set"))
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _kernels() -> list[str]:
    """The kernel for each dtype, and the reason for it."""
    device = own_device()
    dtypes = (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)
    lines = []
    for dtype in dtypes:
        name = dtype_name(dtype)
        try:
            kernel = kernel_for(device, dtype, 128)
            lines.append(f"{name} on {device.type}: {kernel.name} ({kernel.reason})")
        except ValueError as error:
            lines.append(f"{name} on {device.type}: none ({error})")
    return lines


def _progress_bar(text: str, share: float) -> None:
    if sys.stderr.isatty():
        filled = int(30 * share)
        end = "\n" if share >= 1 else ""
        print(f"\rmeasuring [{'#' * filled}{'.' * (30 - filled)}] {text:10s}", end=end, file=sys.stderr, flush=True)


def _report(found: Measured, out: str | None) -> None:
    cluster, device = found.cluster, found.cluster.device
    for dtype, rates in device.rates.items():
        curves = ", ".join(
            f"{name} {', '.join(f'{speed / 1e9:.1f} GFLOP/s at {tokens:.0f} tokens' for tokens, speed in curve.points)}"
            for name, curve in (("forward", rates.forward), ("backward", rates.backward))
        )
        print(f"measured, {dtype}: matrix products {rates.matmul / 1e9:.1f} GFLOP/s; attention {curves}")
    print(f"measured: copies {device.copy / 1e9:.1f} GB/s, a kernel call {seconds_text(device.call)}")
    for level in cluster.levels:
        if level.size > 1:
            sharing = f"one link shared by all ranks of a {level.name}" if level.shared else "one link per rank"
            few = f"{level.under_compute / 1e9:.3f} GB/s under compute, " if level.under_compute else ""
            print(
                f"measured, {level.name}s: {level.bandwidth / 1e9:.3f} GB/s each way ({sharing}), {few}"
                f"latency {seconds_text(level.latency)}"
            )
    for line in found.outliers or ["none"]:
        print(f"outliers: {line}")
    if len(found.shares) > 1:
        same = "all alike" if len(set(found.shares)) == 1 else ", ".join(f"{share:g}" for share in found.shares)
        print(f'measured, speeds of ranks: {same}; SequenceParallel(..., shares="measured") divides tokens so')
    for line in found.loaded:
        print(f"unreliable: {line}; all figures are too low, measure again when these have ended")
    if out is not None:
        about = f"Measured by startrail doctor on {time.strftime('%Y-%m-%d %H:%M')}, {platform.node()}"
        about += "".join(f"\nUnreliable: {line}" for line in found.loaded)
        Path(out).write_text(cluster_text(cluster, about))
        (dtype, *_) = device.rates
        print(f"written: {out}; now: startrail plan --cluster {out} --model gpt-tiny --length 8k --dtype {dtype}")
