"""A self-contained HTML page on which schedules can be played: one file, no network.

A page has one or several *scenes*: a call on a cluster, with recordings (`recording`) of some plans for it. The page's
scripts (``assets/*.js``) draw them. ``startrail serve`` makes scenes on request, from the settings in the page's form.

>>> made = scene({"nodes": "1", "ranks": "4", "plan": "2x2", "versus": "", "length": "4k", "cluster": "h100-8x8"})
>>> sorted(made["plans"]), made["plans"]["2x2"]["role"], made["title"]
(['2x2'], '', '1 node of 4 ranks, h100-8x8, causal, 4,096 tokens')
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

from startrail.compile.attention import Attention
from startrail.planner.auto import fit_cluster, plan_for_heads
from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.topology import Machine
from startrail.planner.units import count_text, parse_count, shipped, short_repr, suggestion
from startrail.planner.workload import check_heads
from startrail.schedule.families import FAMILIES
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan, plans_for
from startrail.view.recording import MAX_RANKS, TICKS, record

SCRIPTS = ("recording", "figures", "planview", "app")
DEFAULTS = {
    "nodes": "4", "ranks": "8", "cluster": "a100-4x8", "outer": "", "inner": "", "heads": "32", "kv": "8", "dim": "128",
    "length": "131072", "mask": "causal", "window": "8192", "documents": "", "pass": "forward", "plan": "auto",
    "versus": "1x32", "step": "0", "rank": "0", "cell": "",
}  # fmt: skip
ONLY_SHIPPED: Mapping[str, ClusterSpec] = {}
MASKS = ("causal", "full", "window", "documents")
MAX_TEAM = 4  # of the paper's schedule
MAX_BYTES = 900_000  # of all recordings of a page
# What a page can ask for, so that an answer takes seconds
MOST_RANKS, MOST_DIM, MOST_SPARSE_TOKENS = 1024, 1024, 2**24
MOST_PROGRAMS = 256  # of all ranks and groups; above `MAX_RANKS` only a few are recorded


@dataclass(frozen=True)
class Question:
    """What the settings of a form ask for. ``texts`` are the settings with nothing left open."""

    machine: Machine
    cluster: ClusterSpec
    call: Attention
    texts: Mapping[str, str]

    @property
    def title(self) -> str:
        nodes, ranks = count_text(self.machine.nodes, "node"), count_text(self.machine.ranks_per_node, "rank")
        mask = self.texts["mask"]
        if mask == "window":
            mask = f"window of {self.call.mask.window:,}"
        elif mask == "documents":
            mask = count_text(len(self.call.boundaries.documents) - 1, "document")
        return f"{nodes} of {ranks}, {self.texts['cluster']}, {mask}, {self.call.length:,} tokens"


def read_settings(texts: Mapping[str, str], clusters: Mapping[str, ClusterSpec] = ONLY_SHIPPED) -> Question:
    """Reads a form's settings. ``clusters`` are known besides those that startrail ships; no file is read by name."""
    if unknown := [name for name in texts if name not in DEFAULTS]:
        raise ValueError(f"no setting {short_repr(unknown[0])}{suggestion(unknown[0], DEFAULTS, 'settings:')}")
    made = DEFAULTS | {name: text.strip() for name, text in texts.items()}
    machine = Machine(_whole(made, "nodes"), _whole(made, "ranks"))
    if not 2 <= machine.world <= MOST_RANKS:
        raise ValueError(f"a page needs at least 2 ranks and has at most {MOST_RANKS}, not {machine.world}")
    cluster = fit_cluster(known_cluster(made["cluster"], clusters), machine)
    if len(cluster.levels) > 2:
        raise ValueError(f"cluster {cluster} has {len(cluster.levels)} levels; the page draws one or two")
    levels = list(cluster.levels)
    for name, at in (("outer", 0), ("inner", -1)):
        own = f"{levels[at].bandwidth / 1e9:.4g}"
        if made[name] not in ("", own) and (name == "inner" or len(levels) == 2):
            levels[at] = replace(levels[at], bandwidth=_speed(made, name) * 1e9)
        else:
            made[name] = own
    cluster = replace(cluster, levels=tuple(levels))
    check_heads(heads := _whole(made, "heads"), kv_heads := _whole(made, "kv"))
    length = parse_count(made["length"])
    if made["mask"] not in MASKS:
        raise ValueError(f"mask {short_repr(made['mask'])} is not one of {', '.join(MASKS)}")
    window = _whole(made, "window") if made["mask"] == "window" else None
    documents = _documents(made["documents"], length) if made["mask"] == "documents" else ()
    if (window or documents) and length > MOST_SPARSE_TOKENS:
        raise ValueError(f"a window or documents: at most {MOST_SPARSE_TOKENS} tokens here, not {length}")
    dtype = "bfloat16" if "bfloat16" in cluster.device.rates else next(iter(cluster.device.rates))
    dim = _whole(made, "dim", MOST_DIM)
    call = Attention.of(length, 1, heads, kv_heads, dim, made["mask"] != "full", dtype, window, documents)
    made |= {name: str(Plan.parse(made[name])) for name in ("plan", "versus") if made[name] not in ("", "auto")}
    made |= {"length": str(length), "documents": ",".join(str(stop - start) for start, stop in pairwise(documents))}
    return Question(machine, cluster, call, made)


def known_cluster(name: str, clusters: Mapping[str, ClusterSpec]) -> ClusterSpec:
    if name in clusters:
        return clusters[name]
    names = [*clusters, *shipped("clusters")]
    if name not in names:
        raise ValueError(f"no cluster {short_repr(name)}{suggestion(name, names, 'choose from')}")
    return find_cluster(name)


def _whole(texts: Mapping[str, str], name: str, most: int = 2**40) -> int:
    try:
        value = parse_count(texts[name])
    except ValueError as error:
        raise ValueError(f"{name} = {error}") from None
    if value > most:
        raise ValueError(f"{name} = {value} is more than {most}")
    return value


def _speed(texts: Mapping[str, str], name: str) -> float:
    text = texts[name]
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?|\.\d{1,6}", text, re.ASCII) or not float(text):
        raise ValueError(f"a link of {short_repr(text)} GB/s does not work: give a number above 0, such as 12.5")
    return float(text)


def _documents(text: str, length: int) -> tuple[int, ...]:
    """The cu_seqlens of documents with these lengths."""
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    if not parts:  # to begin with: each half as long as what is left
        halves = [length]
        while len(halves) < 8 and halves[-1] > 1:
            halves[-1:] = [-(-halves[-1] // 2), halves[-1] // 2]
        parts = list(map(str, halves))
    if not all(re.fullmatch(r"0*[1-9]\d{0,14}", part, re.ASCII) for part in parts):
        raise ValueError("document lengths are whole numbers separated by commas, such as 3000, 1000, 96")
    lengths = list(map(int, parts))
    if (total := sum(lengths)) != length:
        remedy = f"add one of {length - total}" if total < length else f"remove {total - length}"
        raise ValueError(
            f"the document lengths sum to {total}, but the sequence has {length} tokens: {remedy}, "
            f"or set the length to {total}"
        )
    return (0, *accumulate(lengths))


def roles_of(machine: Machine) -> dict[str, str]:
    """The plans that people know by a name, in the order of their importance."""
    nodes, ranks, world = machine.nodes, machine.ranks_per_node, machine.world
    roles = {f"1x{world}": "Ring Attention"}
    if nodes > 1 and ranks > 1:
        roles |= {f"u{nodes}/1x{ranks}": "heads outermost", f"1x{nodes}/u{ranks}": "USP"}
        roles |= {f"1x{nodes}/1x{ranks}": "double ring"}
    papers = [Plan(levels) for family in FAMILIES if family.is_papers for levels in family.grids(world, 1)]
    roles |= {str(plan): "the paper" for plan in papers if plan.family.team(plan) <= MAX_TEAM}
    return roles | {f"u{world}": "Ulysses"}


def offered(machine: Machine) -> list[str]:
    """The plans to choose from on a machine: one level over all ranks, or one per level of the machine.

    >>> offered(Machine(2, 2))[:7]
    ['1x4', '2x2', '4x1', 'star2', 'u4', '1x2/1x2', '2x1/1x2']
    """
    plans, world = [], machine.world
    for plan in plans_for(world, max_levels=2) if world <= MAX_RANKS else map(Plan.parse, roles_of(machine)):
        aligned = len(plan.levels) == 1 or plan.sizes(world) == (machine.nodes, machine.ranks_per_node)
        if plan.family.open_ended and (plan.heads > 1 or plan.family.team(plan) > MAX_TEAM):
            continue
        if aligned and (len(plan.levels) == 1 or not all(isinstance(level, Heads) for level in plan.levels)):
            plans.append(str(plan))
    return plans


def _fits(text: str, asked: Question) -> bool:
    try:
        _checked(text, asked)
    except ValueError:
        return False
    return True


def _checked(text: str, asked: Question) -> Plan:
    plan = Plan.parse(text)
    if plan.family.by_demand:
        raise ValueError(
            f"plan {plan} depends on the mask and has no rings to draw: pass a plan such as 1x{asked.machine.world}; "
            "with a window or documents, the page shows where direct fetches replace it"
        )
    if plan.groups > (most := max(MOST_PROGRAMS // asked.machine.world, 1)):
        raise ValueError(f"plan {plan}: the page shows at most groups={most} on {asked.machine.world} ranks")
    plan.check_world(asked.machine.world)
    asked.call.sizes_on(plan, asked.machine.world)
    return plan


def _wanted(asked: Question, all_roles: bool) -> tuple[dict[str, bool], str, str]:
    """The plans to record, True for those that must be there; what ``auto`` finds if it is one of them, and why."""
    texts, call, world = asked.texts, asked.call, asked.machine.world
    wanted = {str(_checked(texts[name], asked)): True for name in ("plan", "versus") if texts[name] not in ("", "auto")}
    auto, reason = "", ""
    if "auto" in (texts["plan"], texts["versus"]) or (all_roles and world <= MAX_RANKS):
        if world > MAX_RANKS:
            raise ValueError(f"auto is for up to {MAX_RANKS} ranks here, not {world}: choose a plan")
        plan, reason = plan_for_heads(asked.cluster, call.heads, call.kv_heads, call.head_dim, call.length)
        auto = str(plan)
        wanted.setdefault(auto, True)
    for text in roles_of(asked.machine) if all_roles and world <= MAX_RANKS else ():
        if _fits(text, asked):
            wanted.setdefault(text, False)
    return wanted, auto, reason


def scene(
    texts: Mapping[str, str],
    clusters: Mapping[str, ClusterSpec] = ONLY_SHIPPED,
    all_roles: bool = False,
    have: Collection[str] = (),
) -> dict[str, Any]:
    """What a form's settings ask for: the plan, the one that it is compared with and, with ``all_roles``, those that
    people know by name and what ``auto`` finds, as far as they fit into a page. Plans in ``have`` are not recorded."""
    asked = read_settings(texts, clusters)
    wanted, auto, reason = _wanted(asked, all_roles)
    roles, plans, left_out, used, world = roles_of(asked.machine), {}, [], 0, asked.machine.world
    for text, needed in wanted.items():
        if text in have:
            continue
        recorded = record(asked.cluster, Plan.parse(text), asked.call)
        seconds, packed = sum(recorded[name]["seconds"] for name in ("forward", "backward")), pack(recorded)
        if not needed and used + len(packed) > MAX_BYTES:
            left_out.append(text)
            continue
        used += len(packed)
        plans[text] = {"seconds": seconds, "role": roles.get(text, ""), "data": packed}
    notes = [f"Left out, to keep this page small: {', '.join(left_out)}."] if left_out else []
    if world > MAX_RANKS:
        notes.append(f"Above {MAX_RANKS} ranks one rank is played for all; the page holds it and those around it.")
        if all_roles:
            notes.append("It holds only the plans that were asked for.")
        if asked.call.is_sparse:
            notes.append("It shows the plan's own schedule; what runs with a window or documents sends less.")
    return {
        "title": asked.title,
        "settings": dict(asked.texts),
        "per_node": asked.machine.ranks_per_node,
        "world": world,
        "levels": [[level.label, level.bandwidth, level.shared] for level in asked.cluster.levels],
        "auto": auto,
        "reason": reason,
        "notes": notes,
        "offered": [[text, roles.get(text, "")] for text in offered(asked.machine) if _fits(text, asked)],
        "plans": plans,
    }


def pack(value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), default=list)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def html_page(scenes: Iterable[Mapping[str, Any]], live: Iterable[str] = ()) -> str:
    """The page as text. ``live``: the clusters to choose from where a server answers; a page from disk has none."""
    folder, clusters = files("startrail.view") / "assets", list(live)
    data = pack({"scenes": list(scenes), "clusters": clusters, "live": bool(clusters), "ticks": TICKS})
    script = "\n".join((folder / f"{name}.js").read_text("utf-8").replace('"use strict";\n', "") for name in SCRIPTS)
    page = (folder / "page.html").read_text("utf-8")
    connect = "connect-src 'self'; " if clusters else ""
    style = (folder / "style.css").read_text("utf-8")
    for name, text in (("connect", connect), ("style", style), ("script", script), ("data", data)):
        page = page.replace(f"{{{{{name}}}}}", text)
    return page
