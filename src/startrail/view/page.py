"""A self-contained HTML page on which schedules can be played: one file, no network.

Programs and closed forms come from the Python builders (`encode`). The page's scripts (``assets/*.js``) draw them and
simulate them on the chosen links; tests compare both with Python.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from startrail.planner.cluster import DTYPES, ClusterSpec, Rates, find_cluster
from startrail.planner.kernels import PASS_NAMES, PROCESSORS, REFERENCE_PROGRAMS, TILE_ROWS
from startrail.planner.topology import Machine
from startrail.planner.units import shipped
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan, plans_for
from startrail.view.encode import encode, inner_plans, name_of

SCRIPTS = (
    "programs", "masks", "zones", "tiles", "direct", "pricing", "batch", "simulator", "figures", "planview", "app",
)  # fmt: skip
SIZES = (1, 2, 4, 8)  # nodes, and ranks per node
LARGE = Machine(128, 8)
LARGE_PLANS = ("1x1024", "32x32", "1x128/1x8", "1x128/u8", "2x64/u8", "4x32/u8", "8x16/u8")
MAX_TEAM = 4  # of the paper's schedule
DEFAULTS = {
    "nodes": "4", "ranks": "8", "cluster": "a100-4x8", "outer": "", "inner": "", "heads": "32", "kv": "8", "dim": "128",
    "length": "131072", "mask": "causal", "window": "8192", "documents": "", "pass": "forward", "plan": "auto",
    "versus": "1x32", "step": "0", "rank": "0", "cell": "",
}  # fmt: skip


def machines() -> list[Machine]:
    """The machines that the page offers."""
    small = [Machine(nodes, ranks) for nodes in SIZES for ranks in SIZES if nodes * ranks > 1]
    return [*small, LARGE]


def offered(machine: Machine) -> list[Plan]:
    """The plans that the page offers on a machine: one level over all ranks, or one per level of the machine.

    >>> [str(plan) for plan in offered(Machine(2, 2))][:7]
    ['1x4', '2x2', '4x1', 'star2', 'u4', '1x2/1x2', '2x1/1x2']
    """
    if machine == LARGE:
        return [Plan.parse(text) for text in LARGE_PLANS]
    world, plans = machine.world, []
    for plan in plans_for(world, max_levels=2):
        aligned = len(plan.levels) == 1 or plan.sizes(world) == (machine.nodes, machine.ranks_per_node)
        if plan.family.open_ended and (plan.heads > 1 or plan.family.team(plan) > MAX_TEAM):
            continue
        if aligned and (len(plan.levels) == 1 or not all(isinstance(level, Heads) for level in plan.levels)):
            plans.append(plan)
    return plans


def roles_of(machine: Machine) -> dict[str, str]:
    """Names by which some plans are known."""
    nodes, ranks, world = machine.nodes, machine.ranks_per_node, machine.world
    roles = {f"1x{world}": "Ring Attention", f"u{world}": "Ulysses"}
    roles |= {f"star{team}": "the paper" for team in range(2, MAX_TEAM + 1)}
    if nodes > 1 and ranks > 1:
        roles |= {f"1x{nodes}/u{ranks}": "USP", f"1x{nodes}/1x{ranks}": "double ring"}
    return roles


@cache
def _encoded(plan: Plan, world: int, keep_own: bool = False) -> dict[str, Any]:
    return encode(plan, world, keep_own)


def page_data(start: Mapping[str, str], plan: Plan | None = None, cluster: ClusterSpec | None = None) -> dict[str, Any]:
    """What the page knows. ``plan`` on the machine of ``start``, and ``cluster``, are added to what it offers."""
    offers: dict[str, list[str]] = {}
    plans: dict[int, dict[str, Any]] = {}
    chosen = Machine(int(start["nodes"]), int(start["ranks"]))
    known = machines()
    for machine in known if chosen in known else [*known, chosen]:
        here = offered(machine)
        if plan is not None and machine == chosen and plan not in here:
            here.append(plan)
        offers[str(machine)] = [str(each) for each in here]
        for each in here:
            plans.setdefault(machine.world, {}).setdefault(str(each), _encoded(each, machine.world))
            for _, inner, ranks, keeps in inner_plans(each, machine.world):
                plans.setdefault(ranks, {}).setdefault(name_of(inner, keeps), _encoded(inner, ranks, keeps))
    clusters = {name: find_cluster(name) for name in shipped("clusters")}
    clusters = {name: spec for name, spec in clusters.items() if len(spec.levels) == 2}
    if cluster is not None:
        clusters[start["cluster"]] = cluster
    return {
        "machines": [[machine.nodes, machine.ranks_per_node] for machine in map(Machine.parse, offers)],
        "offers": offers,
        "roles": {text: roles_of(Machine.parse(text)) for text in offers},
        "plans": plans,
        "clusters": {name: cluster_data(spec) for name, spec in clusters.items()},
        "start": dict(start),
    }


def cluster_data(cluster: ClusterSpec) -> dict[str, Any]:
    """A cluster's links, and its device's rates in bfloat16 if it has them."""
    device = cluster.device
    dtype = page_dtype(cluster)
    times = ("copy", "call", "post", "handle", "start")
    rates = device.of(dtype)
    programs = {"rows": TILE_ROWS, "processors": PROCESSORS, "reference": REFERENCE_PROGRAMS}
    occupancy = None if rates.kernel is None else programs
    fields = ("name", "size", "bandwidth", "latency", "shared", "duplex", "peer", "under_compute", "socket")
    return {
        "levels": [{name: getattr(level, name) for name in fields} for level in cluster.levels],
        "transport": cluster.transport,
        "cores": cluster.cores,
        "itemsize": DTYPES[dtype],
        "device": {name: getattr(device, name) for name in times} | {"speeds": _speeds(rates), "occupancy": occupancy},
    }


def _speeds(rates: Rates) -> dict[str, dict[str, dict[int, Any]]]:
    """Points of attention's speed by pass, mask and head dim. A device without a kernel has one curve per pass."""
    if rates.kernel is None:
        return {name: {"full": {1: getattr(rates, name).points}} for name in PASS_NAMES}
    speeds: dict[str, dict[str, dict[int, Any]]] = {name: {} for name in PASS_NAMES}
    for (name, mask, dim), curve in rates.kernel.curves.items():
        speeds[name].setdefault(mask, {})[dim] = curve.points
    return speeds


def page_dtype(cluster: ClusterSpec) -> str:
    return "bfloat16" if "bfloat16" in cluster.device.rates else next(iter(cluster.device.rates))


def html_page(start: Mapping[str, str], plan: Plan | None = None, cluster: ClusterSpec | None = None) -> str:
    """The page as text. ``start`` has the settings that it opens with, as in a link; see ``DEFAULTS``."""
    folder = files("startrail.view") / "assets"
    data = json.dumps(page_data({**DEFAULTS, **start}, plan, cluster), separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(data.encode(), 9)).decode()
    script = "\n".join((folder / f"{name}.js").read_text("utf-8").replace('"use strict";\n', "") for name in SCRIPTS)
    page = (folder / "page.html").read_text("utf-8")
    for name, text in (("style", (folder / "style.css").read_text("utf-8")), ("script", script), ("data", packed)):
        page = page.replace(f"{{{{{name}}}}}", text)
    return page
