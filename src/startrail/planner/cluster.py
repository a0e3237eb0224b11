"""A cluster as data: levels of links, devices and their rates. The package ships ``clusters/*.toml``.

>>> cluster = find_cluster("a100-4x8")
>>> str(cluster), cluster.world, [level.name for level in cluster.levels]
('a100-4x8', 32, ['node', 'gpu'])
>>> cluster.crossed(3, 9), cluster.crossed(3, 5)           # the levels whose links a message between two ranks uses
((0,), (1,))
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from startrail.planner.kernels import Curve, KernelCurves, find_kernel, read_curve
from startrail.planner.units import (
    Table,
    check_keys,
    find_file,
    parse_quantity,
    read_all,
    read_file,
    shipped,
    short_repr,
)

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
IN_ORDER = {"nccl": True, "gloo": False}  # whether a lane runs its messages in the order in which they are posted
# A device's seconds per kernel call, message and pass if its file does not say: those of GPUs launched from Python, and
# of CPU processes (lab.toml).
OVERHEADS = {
    "nccl": {"call": "10 us", "post": "15 us", "start": "60 us"},
    "gloo": {"call": "150 us", "post": "80 us", "start": "1 ms"},
}
MAX_RANKS = 2**16
MIN_SHARE = 0.001  # a slow member has at least this share of the others' speed


@dataclass(frozen=True)
class Rates:
    """FLOP/s of a device in one dtype. ``peak`` is the data sheet's, for MFU; ``fp8`` that of matrix products in FP8 (0
    if unknown). ``forward`` and ``backward`` are those of attention, as a function of the tokens along one side of a
    block; a ``kernel`` has them by mask and head dim as well, and takes precedence."""

    peak: float
    matmul: float
    forward: Curve
    backward: Curve
    kernel: KernelCurves | None = None
    fp8: float = 0.0

    def speed(self, pass_name: str, causal: bool, head_dim: int, size: float) -> float:
        """FLOP/s of attention on a block with ``size`` tokens per side."""
        if self.kernel is not None:
            return self.kernel.speed(pass_name, causal, head_dim, size)
        return (self.forward if pass_name == "forward" else self.backward).at(size)

    @classmethod
    def of_kernel(cls, peak: float, matmul: float, kernel: KernelCurves, fp8: float = 0.0) -> Rates:
        """With ``forward`` and ``backward`` at full masks and the largest head dim up to 128."""
        dim = max(dim for name, mask, dim in kernel.curves if (name, mask) == ("backward", "full") and dim <= 128)
        forward, backward = (kernel.curves[name, "full", dim] for name in ("forward", "backward"))
        return cls(peak, matmul, forward, backward, kernel, fp8)


@dataclass(frozen=True)
class Device:
    """``copy``: bytes/s of memory when tensors are copied or added. ``call``: seconds per kernel call, whatever its
    size. ``post``: seconds that a rank's thread needs per message. ``handle``: seconds that a message costs a core
    in the background, on both sides (0: the hardware does it); its bytes are priced by level. ``start``: seconds to
    begin and end an attention pass. ``chip``: its name in the tables of kernels. ``host``: bytes/s to and from the
    host's memory, if all devices use it at once."""

    name: str
    memory: float
    reserved: float
    copy: float
    call: float
    post: float
    handle: float
    start: float
    rates: dict[str, Rates]
    chip: str = ""
    host: float = 25e9

    def of(self, dtype: str) -> Rates:
        if dtype not in self.rates:
            raise ValueError(f"device {self.name} has no rates in {dtype}; it has {', '.join(self.rates)}")
        return self.rates[dtype]


@dataclass(frozen=True)
class LinkLevel:
    """One level of the machine: ``size`` members, joined by links of ``bandwidth`` bytes/s each way. ``shared``: the
    devices of a member share one link; otherwise each device has one. ``peer``: each device has a separate link to
    every other device of the level. ``under_compute``: what transfers reach that leave most multiprocessors to
    attention (8 channels, not 32, unless the plan has more); 0 if that is all. ``socket``: bytes/s that a core moves
    over this level, on both sides; 0 if the hardware does it."""

    name: str
    size: int
    bandwidth: float
    latency: float
    shared: bool
    duplex: bool
    peer: bool = False
    under_compute: float = 0.0
    socket: float = 0.0

    @property
    def ways(self) -> int:
        """Links that one device can use at the same time."""
        return max(self.size - 1, 1) if self.peer else 1

    @property
    def label(self) -> str:
        return "GPU" if self.name == "gpu" else self.name


@dataclass(frozen=True)
class SlowMember:
    """A member of a level whose link or devices reach only this share of the others' speed. In a file, ``device`` may
    name the cluster whose type of device it has instead of ``compute``."""

    level: int
    member: int
    bandwidth: float = 1.0
    compute: float = 1.0


@dataclass(frozen=True)
class ClusterSpec:
    """``accuracy``: the expected relative error of predictions. ``cores``: how many cores all ranks share; 0 if each
    rank has its own device."""

    name: str
    levels: tuple[LinkLevel, ...]
    device: Device
    transport: str = "nccl"
    accuracy: float = 0.25
    cores: int = 0
    slow: tuple[SlowMember, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def in_order(self) -> bool:
        """A lane runs one message after the other, whatever call or part it is of."""
        return IN_ORDER[self.transport]

    @cached_property
    def world(self) -> int:
        return prod(level.size for level in self.levels)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Ranks per member, by level: ``(8, 1)`` for nodes of 8."""
        sizes = [level.size for level in self.levels]
        return tuple(prod(sizes[at + 1 :]) for at in range(len(sizes)))

    def crossed(self, rank: int, peer: int) -> tuple[int, ...]:
        """Levels whose links a message uses: the outermost one at which its ends differ and the ones inside it, except
        the innermost, because a message that leaves a node does not use the links between the node's devices."""
        for level, span in enumerate(self.spans):
            if rank // span != peer // span:
                return tuple(range(level, max(level + 1, len(self.levels) - 1)))
        return ()

    def part(self, ranks: int) -> ClusterSpec:
        """One of several equal groups of ``ranks`` neighbours. Groups wait for each other at every layer, so its links
        and devices are as slow as the slowest at the same place in any group.

        >>> cluster = replace(find_cluster("a100-4x8"), slow=(SlowMember(0, 3, bandwidth=0.5),))
        >>> [level.size for level in cluster.part(16).levels], cluster.part(16).slow
        ([2, 8], (SlowMember(level=0, member=1, bandwidth=0.5, compute=1.0),))
        """
        if ranks == self.world:
            return self
        sizes, left = [], ranks
        for level in reversed(self.levels):
            here = min(level.size, left)
            if level.size % here or left % here:
                raise ValueError(f"{ranks} ranks do not fill whole members of cluster {self.name}'s levels")
            sizes.append(here)
            left //= here
        if left != 1:
            raise ValueError(f"cluster {self.name} has {self.world} ranks, not {ranks}")
        group = self._with_sizes(sizes[::-1], ())
        slow: dict[tuple[int, int], SlowMember] = {}
        for one in self.slow:
            member = one.member * self.spans[one.level] % ranks // group.spans[one.level]
            other = slow.get((one.level, member), one)
            shares = min(one.bandwidth, other.bandwidth), min(one.compute, other.compute)
            slow[one.level, member] = SlowMember(one.level, member, *shares)
        return replace(group, slow=tuple(slow.values()))

    def joined(self, neighbours: int) -> ClusterSpec:
        """Each rank stands for this many neighbours of the innermost level, which send the same at the same time: they
        share the links that members share.

        >>> [level.size for level in find_cluster("a100-4x8").joined(4).levels]
        [4, 2]
        """
        if neighbours == 1:
            return self
        *outer, inner = self.levels
        levels = [replace(one, bandwidth=one.bandwidth / (neighbours if one.shared else 1)) for one in outer]
        levels.append(replace(inner, size=inner.size // neighbours))
        slow = {(s.level, s.member // (neighbours if s.level == len(outer) else 1)): s for s in self.slow}
        members = tuple(replace(s, member=member) for (_, member), s in slow.items())
        return replace(self, levels=tuple(levels), slow=members)

    def with_kernel(self, key: str) -> ClusterSpec:
        """A copy whose device computes attention with another kernel in half precision.

        >>> find_cluster("h100-8x8").with_kernel("fa2").device.of("bfloat16").kernel.name
        'FlashAttention 2'
        """
        if not self.device.chip:
            raise ValueError(
                f"cluster {self}: its device has no chip, so kernel {key!r} has no speeds for it: set chip in the file"
            )
        kernel = find_kernel(key, self.device.chip)
        rates = {
            dtype: own if dtype == "float32" else Rates.of_kernel(own.peak, own.matmul, kernel, own.fp8)
            for dtype, own in self.device.rates.items()
        }
        return replace(self, device=replace(self.device, rates=rates))

    def faster(self, level: int, factor: float) -> ClusterSpec:
        """A copy with ``factor`` times the bandwidth at one level."""
        levels = list(self.levels)
        levels[level] = replace(levels[level], bandwidth=levels[level].bandwidth * factor)
        return replace(self, levels=tuple(levels))

    def resized(self, sizes: Sequence[int]) -> ClusterSpec:
        """A copy with different level sizes. Raises ``ValueError`` if they leave no place for a slow member.

        >>> replace(find_cluster("a100-4x8"), slow=(SlowMember(0, 3),)).resized([2, 8])
        Traceback (most recent call last):
        ValueError: cluster a100-4x8 with sizes 2x8 has no node 3, which is marked as slow
        """
        shape = "x".join(map(str, sizes))
        for slow in self.slow:
            inside = [level.size for level in self.levels[1 : slow.level + 1]]
            if inside != list(sizes[1 : slow.level + 1]) or slow.member >= prod(sizes[: slow.level + 1]):
                name = f"{self.levels[slow.level].label} {slow.member}"
                raise ValueError(f"cluster {self} with sizes {shape} has no {name}, which is marked as slow")
        return self._with_sizes(sizes, self.slow)

    def speed(self, rank: int) -> float:
        """The share of the device's speed that a rank reaches."""
        return min((s.compute for s in self.slow if rank // self.spans[s.level] == s.member), default=1.0)

    def evened(self) -> ClusterSpec:
        """A copy whose ranks are all as fast as they are on average: what it is worth to give each rank work in
        proportion to its speed.

        >>> cluster = replace(find_cluster("a100-4x8"), slow=(SlowMember(0, 3, compute=0.5),))
        >>> {cluster.evened().speed(rank) for rank in range(32)}
        {0.875}
        """
        mean = sum(map(self.speed, range(self.world))) / self.world
        links = [replace(slow, compute=1.0) for slow in self.slow if slow.bandwidth < 1]
        nodes = [SlowMember(0, member, compute=mean) for member in range(self.levels[0].size)]
        return replace(self, slow=(*links, *nodes))

    def with_members(self, number: int) -> ClusterSpec:
        """A copy with another number of outermost members, of which the first are as slow as any was.

        >>> cluster = replace(find_cluster("a100-4x8"), slow=(SlowMember(1, 30, compute=0.5),))
        >>> cluster.with_members(2).world, cluster.with_members(2).slow
        (16, (SlowMember(level=1, member=0, bandwidth=1.0, compute=0.5),))
        """
        slow = tuple(replace(one, member=0) for one in self.slow)
        return self._with_sizes([number, *(level.size for level in self.levels[1:])], slow)

    def _with_sizes(self, sizes: Sequence[int], slow: tuple[SlowMember, ...]) -> ClusterSpec:
        pairs = zip(self.levels, sizes, strict=True)
        return replace(self, levels=tuple(replace(level, size=size) for level, size in pairs), slow=slow)


def find_cluster(name: str) -> ClusterSpec:
    """A shipped cluster by name, or one from a file (.toml, .json); ``h100-8x8@2048x8`` changes the sizes.

    >>> find_cluster("h100-8x8@64x8").world
    512
    """
    base, at, shape = name.partition("@")
    path = find_file(base, "clusters", "cluster")
    cluster = read_cluster(read_file(path), path.stem, path.name)
    if not at:
        return cluster
    texts = shape.split("x")
    if len(texts) != len(cluster.levels) or not all(re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) for text in texts):
        names, example = "x".join(level.name.upper() for level in cluster.levels), "x".join("4" * len(cluster.levels))
        raise ValueError(f"cluster {short_repr(name)}: {short_repr(shape)} is not {names}, such as {base}@{example}")
    sizes = [int(text) for text in texts]
    _check_ranks(sizes, f"cluster {name!r}")
    return replace(cluster.resized(sizes), name=name)


def _check_ranks(sizes: Sequence[int], where: str) -> None:
    if prod(sizes) > MAX_RANKS:
        product = f"{' x '.join(map(str, sizes))} = {prod(sizes)}"
        raise ValueError(f"{where}: size: {product} ranks are more than the {MAX_RANKS} that the planner supports")


def read_cluster(table: Table, name: str, where: str) -> ClusterSpec:
    known = ("description", "transport", "accuracy", "cores", "device", "levels", "slow")
    fields = check_keys(table, known, ("device", "levels"), where)
    tables, slow = table["levels"], table.get("slow", [])
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{where}: levels must be a list of tables, [[levels]], outermost first")
    transport = fields.choice("transport", tuple(IN_ORDER), "nccl")
    read = [partial(_level, item, f"{where}: levels[{at}]") for at, item in enumerate(tables)]
    *found, device = read_all([*read, partial(_device, table["device"], transport, f"{where}: device")], where)
    levels: tuple[LinkLevel, ...] = tuple(found)
    for at, level in enumerate(levels):
        if level.name in [other.name for other in levels[:at]]:
            raise ValueError(f"{where}: levels[{at}]: name: level {level.name!r} already exists")
        if level.peer and level is not levels[-1]:
            raise ValueError(f"{where}: levels[{at}]: links = 'peer' is only for the innermost level")
    _check_ranks([level.size for level in levels], where)
    if not isinstance(slow, list):
        raise ValueError(f"{where}: slow must be a list of tables, [[slow]]")
    accuracy = fields.number("accuracy", least=0.0, most=0.9, default=0.25)
    cores = fields.integer("cores", least=0, most=MAX_RANKS)
    members = tuple(_slow(item, levels, device, f"{where}: slow[{at}]") for at, item in enumerate(slow))
    return ClusterSpec(name, levels, device, transport, accuracy, cores, members)


def _level(table: object, where: str) -> LinkLevel:
    required = ("name", "size", "bandwidth")
    fields = check_keys(table, (*required, "under_compute", "socket", "latency", "links", "duplex"), required, where)
    links = fields.choice("links", ("device", "member", "peer"), "device")
    name, size = fields.line("name"), fields.integer("size", most=MAX_RANKS)
    bandwidth, latency = fields.quantity("bandwidth", "bytes/s"), fields.quantity("latency", "s", "0 s")
    few, socket = (
        fields.quantity(key, "bytes/s") if key in fields.table else 0.0 for key in ("under_compute", "socket")
    )
    duplex = fields.boolean("duplex", True)
    return LinkLevel(name, size, bandwidth, latency, links == "member", duplex, links == "peer", few, socket)


def _device(table: object, transport: str, where: str) -> Device:
    known = ("name", "chip", "memory", "reserved", "copy", "host", "handle", *OVERHEADS[transport], *DTYPES)
    fields = check_keys(table, known, ("name", "memory", "copy"), where)
    given = fields.table
    chip = fields.line("chip") if "chip" in given else ""
    rates = {dtype: _rates(given[dtype], chip, f"{where}.{dtype}") for dtype in DTYPES if dtype in given}
    if not rates:
        raise ValueError(f"{where}: no rates; add a table for at least one of {', '.join(DTYPES)}")
    memory, reserved = fields.quantity("memory", "bytes"), fields.quantity("reserved", "bytes", "0 B")
    if reserved >= memory:
        raise ValueError(f"{where}: reserved = {given['reserved']!r} leaves nothing of memory = {given['memory']!r}")
    name, copy = fields.line("name"), fields.quantity("copy", "bytes/s")
    host = fields.quantity("host", "bytes/s") if "host" in given else 25e9  # PCIe 4.0 x16
    overheads = OVERHEADS[transport] | {"handle": "0 s"}
    seconds = {
        key: fields.quantity(key, "s", "0 s") if key in given else parse_quantity(default, "s")
        for key, default in overheads.items()
    }
    return Device(name, memory, reserved, copy, rates=rates, chip=chip, host=host, **seconds)


def _rates(table: object, chip: str, where: str) -> Rates:
    """With the speeds of attention from a ``kernel`` for the device's ``chip``, or as curves of the file."""
    by_kernel = isinstance(table, Mapping) and "kernel" in table
    required = ("peak", "matmul", *(("kernel",) if by_kernel else ("forward", "backward")))
    fields = check_keys(table, (*required, *(() if by_kernel else ("kernel",)), "fp8"), required, where)
    peak, matmul = fields.quantity("peak", "flop/s"), fields.quantity("matmul", "flop/s")
    fp8 = fields.quantity("fp8", "flop/s") if "fp8" in fields.table else 0.0
    if by_kernel:
        key = fields.choice("kernel", tuple(shipped("kernels")))
        if not chip:
            raise ValueError(f"{where}: kernel = {key!r} needs the device's chip, such as chip = 'H100'")
        try:
            return Rates.of_kernel(peak, matmul, find_kernel(key, chip), fp8)
        except ValueError as error:
            raise ValueError(f"{where}: chip = {short_repr(chip)}: {error}") from None
    forward, backward = (read_curve(fields.table[key], f"{where}: {key}") for key in ("forward", "backward"))
    return Rates(peak, matmul, forward, backward, None, fp8)


def _slow(table: object, levels: tuple[LinkLevel, ...], device: Device, where: str) -> SlowMember:
    fields = check_keys(table, ("level", "member", "bandwidth", "compute", "device"), ("level", "member"), where)
    names = [level.name for level in levels]
    at = names.index(fields.choice("level", names))
    members, member = prod(level.size for level in levels[: at + 1]), fields.integer("member", least=0)
    if member >= members:
        raise ValueError(f"{where}: member = {member} is not one of 0 to {members - 1}")
    shares = [fields.number(key, least=MIN_SHARE, most=1.0, default=1.0) for key in ("bandwidth", "compute")]
    if "device" in fields.table:
        if "compute" in fields.table:
            raise ValueError(f"{where}: compute and device both say how fast it is: give one of them")
        shares[1] = _speed_of(find_cluster(fields.choice("device", tuple(shipped("clusters")))).device, device, where)
    return SlowMember(at, member, *shares)


def _speed_of(other: Device, device: Device, where: str) -> float:
    """How fast ``other`` computes as a share of ``device``: the least in any dtype that both have."""
    ratios = [other.rates[dtype].matmul / rates.matmul for dtype, rates in device.rates.items() if dtype in other.rates]
    if not ratios or not MIN_SHARE <= min(ratios) <= 1:
        raise ValueError(
            f"{where}: device: {other.name} is not slower than {device.name} in the dtypes of both: describe the "
            "faster one as [device]"
        )
    return min(ratios)


def cluster_text(cluster: ClusterSpec, comment: str) -> str:
    """The text of a TOML file that ``read_cluster`` reads back."""
    device, lines = cluster.device, [f"# {line}" for line in comment.splitlines()]
    lines += [f'transport = "{cluster.transport}"', f"accuracy = {cluster.accuracy:g}", f"cores = {cluster.cores}", ""]
    lines += ["[device]", f"name = {json.dumps(device.name)}", f'memory = "{device.memory / 1e9:.3f} GB"']
    lines += [f"chip = {json.dumps(device.chip)}"] if device.chip else []
    lines += [f'reserved = "{device.reserved / 1e9:.3f} GB"'] if device.reserved else []
    lines += [f'copy = "{device.copy / 1e9:.3f} GB/s"']
    lines += [f'host = "{device.host / 1e9:.3f} GB/s"']
    for key in ("call", "post", "handle", "start"):
        lines += [f'{key} = "{getattr(device, key) * 1e6:.2f} us"']
    for dtype, rates in device.rates.items():
        lines += ["", f"[device.{dtype}]", f'peak = "{rates.peak / 1e12:.4f} TFLOP/s"']
        lines += [f'matmul = "{rates.matmul / 1e12:.4f} TFLOP/s"']
        lines += [f'fp8 = "{rates.fp8 / 1e12:.4f} TFLOP/s"'] if rates.fp8 else []
        lines += [f'kernel = "{rates.kernel.key}"'] if rates.kernel is not None else []
        for key in ("forward", "backward") if rates.kernel is None else ():
            points = (f'[{x:.0f}, "{y / 1e12:.5f} TFLOP/s"]' for x, y in getattr(rates, key).points)
            lines += [f"{key} = [{', '.join(points)}]"]
    for level in cluster.levels:
        links = "peer" if level.peer else "member" if level.shared else "device"
        lines += ["", "[[levels]]", f"name = {json.dumps(level.name)}", f"size = {level.size}"]
        lines += [f'bandwidth = "{level.bandwidth / 1e9:.5f} GB/s"']
        lines += [f'under_compute = "{level.under_compute / 1e9:.5f} GB/s"'] if level.under_compute else []
        lines += [f'socket = "{level.socket / 1e9:.5f} GB/s"'] if level.socket else []
        lines += [f'latency = "{level.latency * 1e6:.2f} us"'] if level.latency else []
        lines += [f'links = "{links}"', f"duplex = {str(level.duplex).lower()}"]
    for slow in cluster.slow:
        name = json.dumps(cluster.levels[slow.level].name)
        lines += ["", "[[slow]]", f"level = {name}", f"member = {slow.member}"]
        lines += [f"bandwidth = {slow.bandwidth:g}", f"compute = {slow.compute:g}"]
    return "\n".join(lines) + "\n"
