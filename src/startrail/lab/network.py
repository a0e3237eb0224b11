"""The links themselves: bridges, veth pairs and rate limits, made over netlink. Runs in the holder process only.

::

    node 0: eth0 ---- node0 :rack0: up0 ---- down0 :core: down1 ---- up1 :rack1: node2 ---- eth0 :node 2
    node 1: eth0 ---- node1 :                                                  : node3 ---- eth0 :node 3

What lies between colons is a bridge; bridges live in the switch's namespace, each node in its own. Each end of a pair
limits what it sends, so a link has its rate both ways. With one rack there is only ``rack0``.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from startrail.lab.namespaces import enter_network, new_network
from startrail.lab.wiring import LINK, Wiring, parse_rate

# A bucket holds this much of a link's time, so that a timer served late on a busy machine costs no throughput. It is
# also all that a run can gain by: once, after an idle spell.
BURST_SECONDS = 0.002
# Queues long enough never to drop: fabrics for training are lossless, and a TCP timeout would cost 200 ms.
QUEUE_BYTES = 1 << 30
ROOT = 0x10000  # tc writes 1:0; its one class is 1:1


class Network:
    """All namespaces and links of one cluster; the calling process ends up in the switch's namespace."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self.switch = new_network()
        _quieten()
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
        """Pull the node's cable: its own interface loses the carrier, as it would in a real machine."""
        self._at_switch.link("set", index=_index(self._at_switch, f"node{node}"), state="down")

    def restore(self, node: int) -> None:
        self._at_switch.link("set", index=_index(self._at_switch, f"node{node}"), state="up")

    def link_bytes(self) -> list[dict[str, int]]:
        return [_counters(ip, LINK) for ip in self._at_node]

    def rack_bytes(self) -> list[dict[str, int]]:
        racks = range(self._wiring.racks if self._wiring.racks > 1 else 0)
        return [_counters(self._at_switch, f"up{rack}") for rack in racks]

    def remove(self) -> None:
        """Delete every link now. The kernel would, once nobody holds the namespaces, but in its own time."""
        for link in self._at_switch.get_links():
            if link.get("ifname") != "lo":
                with suppress(NetlinkError):  # the other end of a pair went with the first
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
        _quieten()
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
        # A limited link carries real frames: one segment each, so that the bucket never meets a 64 KiB super-frame
        # and the counters count every header. An unlimited link keeps them, to cost as little CPU as it can.
        return {"mtu": self._wiring.mtu} | ({} if rate is None else {"gso_max_segs": 1})

    def _attach(self, name: str, bridge: str) -> None:
        master = _index(self._at_switch, bridge)
        self._at_switch.link("set", index=_index(self._at_switch, name), master=master, state="up")

    def _limit_node(self, node: int, rate: int | None) -> None:
        self._limit(self._at_switch, f"node{node}", rate, self._shaper)
        self._limit(self._at_node[node], LINK, rate, self._shaper)

    def _limit(self, ip: IPRoute, name: str, rate: int | None, shaper: str) -> None:
        """Limit what one end of a pair sends, or stop limiting it."""
        index = _index(ip, name)
        limited = any(queue.get_attr("TCA_KIND") == shaper for queue in ip.get_qdiscs(index))
        if rate is None:
            if limited:
                ip.tc("del", index=index, root=True)
            return
        bytes_a_second = rate // 8
        burst = max(2 * self._wiring.mtu, int(bytes_a_second * BURST_SECONDS))
        if shaper == "tbf":
            ip.tc("replace", "tbf", index, ROOT, rate=bytes_a_second, burst=burst, limit=QUEUE_BYTES)
            return
        if not limited:
            ip.tc("add", "htb", index, ROOT, default=1)
        bucket = {"rate": bytes_a_second, "burst": burst, "cburst": burst, "quantum": self._wiring.mtu}
        ip.tc("replace-class", "htb", index, ROOT + 1, parent=ROOT, **bucket)


def _quieten() -> None:
    """In a new namespace: no IPv6 chatter on the counters, no dead rank's socket that retries for minutes, and nothing
    sent twice. Links lose nothing, but to TCP a long queue or a frame that another core overtook looks like a loss."""
    settings = {
        "ipv6/conf/all/disable_ipv6": 1,
        "ipv6/conf/default/disable_ipv6": 1,
        "ipv4/tcp_orphan_retries": 1,
        "ipv4/tcp_rto_min_us": 1_000_000,  # longer than any queue: the first slow answer after fast ones is not a loss
        "ipv4/tcp_early_retrans": 0,  # no probes when acknowledgements are late
        # a few frames of each connection in front of the shaper, so that what is short overtakes what is long
        "ipv4/tcp_limit_output_bytes": 8192,
        "ipv4/tcp_sack": 0,  # no guesses from frames out of order
        "ipv4/tcp_recovery": 0,
        "ipv4/tcp_reordering": 300,
    }
    for name, value in settings.items():
        with suppress(OSError):  # a kernel without IPv6, or a container's read-only /proc: the lab works all the same
            Path("/proc/sys/net", name).write_text(str(value))


def _index(ip: IPRoute, name: str) -> int:
    index: int = ip.link_lookup(ifname=name)[0]
    return index


def _counters(ip: IPRoute, name: str) -> dict[str, int]:
    (link,) = ip.link("get", index=_index(ip, name))
    stats = link.get_attr("IFLA_STATS64")
    return {"sent": stats["tx_bytes"], "received": stats["rx_bytes"]}
