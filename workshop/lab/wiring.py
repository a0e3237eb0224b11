"""The links of an emulated cluster, as values validated on construction. Used by the parent and the supervisor."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from startrail.planner.topology import Machine, check_counts

LINK = "eth0"  # name of a node's interface, inside the node
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
MIN_RATE = 100_000  # below this, one jumbo frame takes most of a second and TCP times out while connecting
MAX_RATE = 8 * (2**32 - 1)  # tbf stores bytes per second in 32 bits
MAX_NODES = 250
SHAPERS = ("tbf", "htb")


def parse_rate(text: str | None) -> int | None:
    """Bits per second of a rate in tc's notation; None for an unlimited link.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit"), parse_rate("unlimited"), parse_rate(None)
    (100000000, 2500000000, None, None)
    """
    if text is None or text == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.lower()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a rate: write '100mbit' (bit, kbit, mbit or gbit) or 'unlimited'")
    rate = round(float(match[1]) * UNITS[match[2]])
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"rate {text!r} is {rate} bit/s; a limited link has {MIN_RATE} to {MAX_RATE} bit/s")
    return rate


@dataclass(frozen=True)
class Wiring:
    """A machine, and the links that join its nodes.

    Every node has one link, to the switch of its rack; with several racks, each rack's switch has one link to the core.
    ``slow`` gives some nodes a different rate.

    >>> wiring = Wiring(Machine(4, 2), link="100mbit", racks=2, rack_link="50mbit", slow={3: "10mbit"})
    >>> [wiring.rack(node) for node in range(4)], wiring.address(3), wiring.rate(3)
    ([0, 0, 1, 1], '10.77.0.4', 10000000)
    """

    machine: Machine
    link: str | None = "100mbit"
    racks: int = 1
    rack_link: str | None = None
    slow: dict[int, str | None] = field(default_factory=dict)
    mtu: int = 9000
    shaper: str | None = None

    def __post_init__(self) -> None:
        check_counts(racks=self.racks)
        nodes = self.machine.nodes
        if nodes > MAX_NODES:
            raise ValueError(f"nodes={nodes} is more than {MAX_NODES}, the number of addresses in the lab")
        if nodes % self.racks:
            raise ValueError(f"{nodes} nodes do not fill {self.racks} racks evenly")
        if self.racks == 1 and self.rack_link is not None:
            raise ValueError(f"rack_link={self.rack_link!r} limits links between racks, but racks=1")
        for node in self.slow:
            self.check_node(node)
        for rate in (self.link, self.rack_link, *self.slow.values()):
            parse_rate(rate)
        if not isinstance(self.mtu, int) or not 576 <= self.mtu <= 65535:
            raise ValueError(f"mtu={self.mtu!r} is not between 576 and 65535 bytes")
        if self.shaper is not None and self.shaper not in SHAPERS:
            raise ValueError(f"shaper={self.shaper!r} is not one of {', '.join(SHAPERS)}")

    def check_node(self, node: int) -> None:
        if not isinstance(node, int) or not 0 <= node < self.machine.nodes:
            raise ValueError(f"no node {node!r}: nodes are 0 to {self.machine.nodes - 1}")

    def rack(self, node: int) -> int:
        return node // (self.machine.nodes // self.racks)

    def address(self, node: int) -> str:
        """The node's address on its link, in a private range that exists only inside the lab's namespaces."""
        return f"10.77.0.{node + 1}"

    def rate(self, node: int) -> int | None:
        """Initial rate of the node's link each way, in bits per second."""
        return parse_rate(self.slow.get(node, self.link))
