"""The links themselves: bridges, veth pairs and rate limits, made over netlink. Runs only in the supervisor.

::

    node 0: eth0 ---- node0 :rack0: up0 ---- down0 :core: down1 ---- up1 :rack1: node2 ---- eth0 :node 2
    node 1: eth0 ---- node1 :                                                  : node3 ---- eth0 :node 3

Names between colons are bridges. Bridges are in the switch's namespace, each node has its own. Each end of a pair
limits what it sends, so a link has its rate both ways. With one rack there is only ``rack0``.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from workshop.lab.namespaces import enter_network, new_network
from workshop.lab.wiring import LINK, Wiring, parse_rate

# The bucket's size in time, so that a timer that fires late on a busy machine costs no throughput. A run can gain this
# much once, after the link was idle.
BURST_SECONDS = 0.002
# Queues are long enough never to drop: training fabrics are lossless, and a TCP timeout would cost 200 ms.
QUEUE_BYTES = 1 << 30
ROOT = 0x10000  # tc writes 1:0; its one class is 1:1


class Network:
    """All namespaces and links of one cluster. The calling process is left in the switch's namespace."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self.switch = new_network()
        _configure_tcp()
        self._at_switch = IPRoute(groups=0)
        self._shaper = wiring.shaper or self._find_shaper()
        for rack in range(wiring.racks):
            self._add_bridge(f"rack{rack}")
        if wiring.racks > 1:
            self._add_bridge("core")
        for rack in range(wiring.racks if wiring.racks > 1 else 0):
            self._add_trunk(rack)
        self.nodes: list[int] = []
        self._at_node: list[IPRoute] = []
        for node in range(wiring.machine.nodes):
            self._add_node(node)

    def set_link(self, node: int, rate: str | None) -> None:
        self._limit_node(node, parse_rate(rate))

    def cut(self, node: int) -> None:
        """Pull the node's cable: its own interface loses the carrier, as on a real machine."""
        self._at_switch.link("set", index=_index(self._at_switch, f"node{node}"), state="down")

    def restore(self, node: int) -> None:
        self._at_switch.link("set", index=_index(self._at_switch, f"node{node}"), state="up")

    def link_bytes(self) -> list[dict[str, int]]:
        return [_counters(ip, LINK) for ip in self._at_node]

    def rack_bytes(self) -> list[dict[str, int]]:
        racks = range(self._wiring.racks if self._wiring.racks > 1 else 0)
        return [_counters(self._at_switch, f"up{rack}") for rack in racks]

    def remove(self) -> None:
        """Delete every link now. The kernel does so after the last reference to a namespace is gone, but later."""
        for link in self._at_switch.get_links():
            if link.get("ifname") != "lo":
                with suppress(NetlinkError):  # deleting one end of a pair deletes the other
                    self._at_switch.link("del", index=link["index"])

    def _find_shaper(self) -> str:
        try:
            self._limit(self._at_switch, "lo", 10**9, "tbf")
        except NetlinkError as error:
            if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
                raise
            return "htb"
        self._limit(self._at_switch, "lo", None, "tbf")
        return "tbf"

    def _add_bridge(self, name: str) -> None:
        self._at_switch.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
        self._at_switch.link("set", index=_index(self._at_switch, name), state="up")

    def _add_trunk(self, rack: int) -> None:
        rate = parse_rate(self._wiring.rack_link)
        options = self._pair_options(rate)
        self._at_switch.link(
            "add", ifname=f"up{rack}", kind="veth", peer={"ifname": f"down{rack}", **options}, **options
        )
        for name, bridge in ((f"up{rack}", f"rack{rack}"), (f"down{rack}", "core")):
            self._attach(name, bridge)
            self._limit(self._at_switch, name, rate, self._shaper)

    def _add_node(self, node: int) -> None:
        wiring = self._wiring
        namespace = new_network()
        self.nodes.append(namespace)
        _configure_tcp()
        ip = IPRoute(groups=0)
        self._at_node.append(ip)
        enter_network(self.switch)
        options = self._pair_options(wiring.rate(node))
        peer = {"ifname": LINK, "net_ns_fd": namespace, **options}
        self._at_switch.link("add", ifname=f"node{node}", kind="veth", peer=peer, **options)
        self._attach(f"node{node}", f"rack{wiring.rack(node)}")
        ip.link("set", index=_index(ip, "lo"), state="up")
        ip.addr("add", index=_index(ip, LINK), address=wiring.address(node), prefixlen=24)
        ip.link("set", index=_index(ip, LINK), state="up")
        self._limit_node(node, wiring.rate(node))

    def _pair_options(self, rate: int | None) -> dict[str, int]:
        # A limited link carries real frames of one segment each, so that the bucket never gets a 64 KiB super-frame
        # and the counters include every header. An unlimited link keeps super-frames, which cost less CPU.
        return {"mtu": self._wiring.mtu} | ({} if rate is None else {"gso_max_segs": 1})

    def _attach(self, name: str, bridge: str) -> None:
        master = _index(self._at_switch, bridge)
        self._at_switch.link("set", index=_index(self._at_switch, name), master=master, state="up")

    def _limit_node(self, node: int, rate: int | None) -> None:
        self._limit(self._at_switch, f"node{node}", rate, self._shaper)
        self._limit(self._at_node[node], LINK, rate, self._shaper)

    def _limit(self, ip: IPRoute, name: str, rate: int | None, shaper: str) -> None:
        """Set or remove the rate limit of one end of a pair."""
        index = _index(ip, name)
        limited = any(queue.get_attr("TCA_KIND") == shaper for queue in ip.get_qdiscs(index))
        if rate is None:
            if limited:
                ip.tc("del", index=index, root=True)
            return
        bytes_per_second = rate // 8
        burst = max(2 * self._wiring.mtu, int(bytes_per_second * BURST_SECONDS))
        if shaper == "tbf":
            ip.tc("replace", "tbf", index, ROOT, rate=bytes_per_second, burst=burst, limit=QUEUE_BYTES)
            return
        if not limited:
            ip.tc("add", "htb", index, ROOT, default=1)
        bucket = {"rate": bytes_per_second, "burst": burst, "cburst": burst, "quantum": self._wiring.mtu}
        ip.tc("replace-class", "htb", index, ROOT + 1, parent=ROOT, **bucket)


def _configure_tcp() -> None:
    """In a new namespace: disable IPv6, whose background traffic would be counted, retries for dead ranks, and resends.

    Links lose nothing, but TCP takes a long queue or frames reordered between cores for a loss."""
    settings = {
        "ipv6/conf/all/disable_ipv6": 1,
        "ipv6/conf/default/disable_ipv6": 1,
        "ipv4/tcp_orphan_retries": 1,
        "ipv4/tcp_rto_min_us": 1_000_000,  # longer than any queue: a slow answer is no loss
        "ipv4/tcp_early_retrans": 0,  # no probes when acknowledgements are late
        # few frames of each connection in the shaper's queue, so that short messages overtake long ones
        "ipv4/tcp_limit_output_bytes": 8192,
        "ipv4/tcp_sack": 0,  # no losses inferred from reordered frames
        "ipv4/tcp_recovery": 0,
        "ipv4/tcp_reordering": 300,
    }
    for name, value in settings.items():
        with suppress(OSError):  # no IPv6 in the kernel, or a read-only /proc in a container: the lab works anyway
            Path("/proc/sys/net", name).write_text(str(value))


def _index(ip: IPRoute, name: str) -> int:
    index: int = ip.link_lookup(ifname=name)[0]
    return index


def _counters(ip: IPRoute, name: str) -> dict[str, int]:
    (link,) = ip.link("get", index=_index(ip, name))
    stats = link.get_attr("IFLA_STATS64")
    return {"sent": stats["tx_bytes"], "received": stats["rx_bytes"]}
