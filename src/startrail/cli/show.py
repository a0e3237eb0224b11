"""``startrail show``: a plan's schedule as a grid of steps and ranks, a drawing or a page."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from startrail.cli.options import Commands, add_command, make_machine, read_tokens, world_size, write_text
from startrail.geometry.layout import weights_of
from startrail.geometry.mask import Mask
from startrail.planner.auto import ASSUMED_TOKENS_PER_RANK, fit_cluster, plan_for_heads
from startrail.planner.cluster import ClusterSpec, find_cluster
from startrail.planner.sparse.rule import rule_for
from startrail.planner.workload import check_heads, find_model
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.view import chain_svg, chain_text, fitting, forms_svg, forms_text, show, show_batch
from startrail.view.page import html_page, scene
from startrail.view.svg import svg

if TYPE_CHECKING:
    from startrail.planner.topology import Machine

EXAMPLES = {
    "startrail show 2x2": "the schedule of 4 ranks, step by step",
    "startrail show star2 --ranks 16 --rank 5": "one rank of the paper's schedule",
    "startrail show u2/1x4 --window 64": "what a layer with a window runs instead, and why",
    "startrail show direct --ranks 8 --window 64": "each rank fetches only the keys it sees",
    "startrail show 1x2/1x4 --scan": "the chain of states of a recurrence, over ranks and nodes",
    "startrail show 1x4/1x8 --latents deepseek-v3": "what latents save, in numbers per token and bytes by level",
    "startrail show 1x4 --shares 1,1,0.5,1 --svg 1x4.svg": "what each rank computes if one is half as fast",
    "startrail show u4/1x8 --nodes 4 --html page.html": "a page that plays it, next to other plans",
    "startrail show 2x4 --nodes 2 --window 512 --svg 2x4.svg": "a drawing for documents and slides",
    "startrail show auto --ranks 32 --nodes 4 --heads 32 --kv-heads 8 --cluster a100-4x8": "",
}
MAX_RANKS = 8  # shown by default
ASSUMED_HEADS, ASSUMED_KV_HEADS = 32, 8  # of a page
ASSUMED_CLUSTER = "h100-8x8"  # for auto without a cluster; resized to --nodes and --ranks


def add(commands: Commands) -> None:
    command = add_command(commands, "show", EXAMPLES, help="show a schedule: a grid, a drawing or a page")
    option = command.add_argument
    option("plan", help="for example 2x2, 1x4/u2, star2, auto")
    option("--ranks", type=int, help="number of ranks (required for star plans and auto; default: the plan's size)")
    option("--rank", type=int, action="append", help="rank to show; repeatable (default: as many as fit)")
    option("--nodes", type=int, default=1, help="number of nodes, for auto, --html and --svg (default %(default)s)")
    option("--heads", type=int, help="query heads, for auto and --html")
    option("--kv-heads", type=int, help="KV heads (default: same as --heads)")
    option("--head-dim", type=int, help="head dimension (default 128)")
    option("--length", type=read_tokens, help="tokens, such as 65536 or 64k (default 4096 per rank)")
    option(
        "--cluster", help="a cluster's name or .toml file, for auto, --html and --window (default: STARTRAIL_CLUSTER)"
    )
    option("--direction", choices=("forward", "backward"), default="forward", help="pass to show (default %(default)s)")
    option("--full", action="store_true", help="every token sees every other (default: causal)")
    option("--window", type=int, help="a token sees this many tokens: itself and those before it")
    option("--documents", metavar="LENGTHS", help="lengths of packed documents, such as 3000,1000,96")
    option("--shares", metavar="NUMBERS", help="of --scan and --svg: ranks' shares of the tokens, such as 1,1,0.5,1")
    option("--scan", action="store_true", help="what layers with a recurrence run, instead of attention")
    option("--latents", metavar="MODEL", help="what a layer of this model sends as latents, and as keys and values")
    option("--html", metavar="FILE", type=Path, help="write a page that plays the schedule")
    option("--svg", metavar="FILE", type=Path, help="write a drawing of the plan's rings, teams and heads")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    plan = _choose_plan(arguments) if arguments.plan == "auto" else Plan.parse(arguments.plan)
    world = world_size(plan, arguments.ranks)
    mask, length = _read_mask(arguments, world)
    shares = _read_shares(arguments, world)
    if arguments.scan:
        return _show_scan(arguments, plan, world, mask, length, shares)
    if arguments.latents:
        return _show_latents(arguments, plan, world, length)
    if arguments.html or arguments.svg:
        return _write_files(arguments, plan, make_machine(world, arguments.nodes), mask, length, shares)
    ranks = arguments.rank or list(range(min(world, MAX_RANKS)))
    for rank in ranks:
        _check_rank(rank, world)
    pass_ = next(pass_ for pass_ in PASSES if str(pass_) == arguments.direction)
    columns = shutil.get_terminal_size((120, 24)).columns
    if arguments.window is not None or arguments.documents is not None or plan.family.by_demand:
        described = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "")
        rule = rule_for(described, world)
        print(show_batch(plan, world, mask, length, pass_, ranks, 10**6 if arguments.rank else columns, rule))
        print(f"\nmask: {mask}, {length} tokens; blocks without visible pairs are left out")
        return 0
    if not arguments.rank:
        ranks = ranks[: fitting(plan, world, pass_, ranks, columns)]
    print(show(plan, world, pass_, ranks))
    if not arguments.rank and world > len(ranks):
        print(f"... and {world - len(ranks)} more ranks; choose with --rank")
    return 0


def _read_shares(arguments: argparse.Namespace, world: int) -> tuple[int, ...]:
    """As whole numbers; none if they are equal."""
    if arguments.shares is None:
        return ()
    if not (arguments.scan or arguments.svg) or arguments.html:
        raise ValueError("--shares is for --scan and --svg: the schedule of a plan does not depend on them")
    weights = weights_of(arguments.shares.split(","), world)
    return weights if len(set(weights)) > 1 else ()


def _show_scan(
    arguments: argparse.Namespace, plan: Plan, world: int, mask: Mask, length: int, shares: tuple[int, ...]
) -> int:
    _refuse_beside("--scan", "it shows all ranks of a chain", arguments, "full", "window", "html", "rank", "latents")
    if arguments.svg:
        write_text(arguments.svg, chain_svg(plan, world, mask, length, shares))
    else:
        print(chain_text(plan, world, mask, length, shares))
    return 0


def _show_latents(arguments: argparse.Namespace, plan: Plan, world: int, length: int) -> int:
    others = "full", "window", "documents", "html", "rank", "shares"
    _refuse_beside("--latents", "it shows a causal layer on all ranks", arguments, *others)
    model = find_model(arguments.latents)
    if arguments.svg:
        write_text(arguments.svg, forms_svg(plan, world, model, length))
    else:
        print(forms_text(plan, world, model, length))
    return 0


def _refuse_beside(option: str, because: str, arguments: argparse.Namespace, *others: str) -> None:
    for other in others:
        if getattr(arguments, other):
            raise ValueError(f"pass either {option} or --{other}, not both: {because}")


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"--rank {rank} does not exist: ranks are 0 to {world - 1}")


def _read_mask(arguments: argparse.Namespace, world: int) -> tuple[Mask, int]:
    lengths = None
    if arguments.documents is not None:
        texts = arguments.documents.split(",")
        if not all(text.strip().isdecimal() and int(text) for text in texts):
            raise ValueError(f"--documents {arguments.documents!r} is not a list of lengths, such as 3000,1000,96")
        lengths = [int(text) for text in texts]
    length = arguments.length or (sum(lengths) if lengths else ASSUMED_TOKENS_PER_RANK * world)
    if lengths and sum(lengths) != length:
        raise ValueError(f"--documents sum to {sum(lengths)} tokens, but --length is {length}")
    if arguments.full and (lengths or arguments.window is not None):
        raise ValueError("--full cannot be combined with --window or --documents, which are causal here")
    if lengths and arguments.window is not None:
        raise ValueError("pass either --window or --documents, not both")
    ends = tuple(sum((lengths or [])[:at]) for at in range(len(lengths or []) + 1)) if lengths else None
    return Mask(not arguments.full, arguments.window, ends), length


def _write_files(
    arguments: argparse.Namespace, plan: Plan, machine: Machine, mask: Mask, length: int, shares: tuple[int, ...]
) -> int:
    if plan.family.by_demand:
        raise ValueError(
            f"plan {plan} depends on the mask and has no rings to draw: pass a plan such as 1x{machine.world}; "
            "with --window or --documents, --html shows where direct fetches replace it"
        )
    if arguments.svg:
        write_text(arguments.svg, svg(plan, machine, mask, length, shares))
    if arguments.html:
        write_text(arguments.html, _page(arguments, plan, machine, mask, length))
    return 0


def _page(arguments: argparse.Namespace, plan: Plan, machine: Machine, mask: Mask, length: int) -> str:
    """The page, opened with the settings of the command line."""
    rank = (arguments.rank or [0])[0]
    _check_rank(rank, machine.world)
    name, cluster = _find_cluster(arguments)
    shares = plan.heads * plan.groups
    heads = arguments.heads or (ASSUMED_HEADS if ASSUMED_HEADS % shares == 0 else shares)
    grouped = not arguments.heads and heads == ASSUMED_HEADS and plan.groups == 1
    kv_heads = arguments.kv_heads or (ASSUMED_KV_HEADS if grouped else heads)
    start = {
        "nodes": machine.nodes,
        "ranks": machine.ranks_per_node,
        "cluster": Path(name).stem,
        "heads": heads,
        "kv": kv_heads,
        "dim": arguments.head_dim or 128,
        "length": length,
        "mask": "documents" if mask.documents else "window" if mask.window else "causal" if mask.causal else "full",
        "window": mask.window or max(length // 16, 1),
        "documents": arguments.documents or "",
        "pass": arguments.direction,
        "plan": plan,
        "versus": f"1x{machine.world}" if str(plan) != f"1x{machine.world}" else "",
        "rank": rank,
    }
    made = scene({key: str(value) for key, value in start.items()}, {Path(name).stem: cluster}, all_roles=True)
    return html_page([made])


def _find_cluster(arguments: argparse.Namespace) -> tuple[str, ClusterSpec]:
    name = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "") or ASSUMED_CLUSTER
    return name, find_cluster(name)


def _choose_plan(arguments: argparse.Namespace) -> Plan:
    """Ask the planner, and print the reason for its choice."""
    if not arguments.ranks or not arguments.heads:
        raise ValueError("auto chooses a plan for a cluster and a model: pass --ranks and --heads (and --nodes)")
    machine = make_machine(arguments.ranks, arguments.nodes)
    heads, kv_heads = arguments.heads, arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    check_heads(heads, kv_heads)
    name, described = _find_cluster(arguments)
    given = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER")
    plan, reason = plan_for_heads(
        fit_cluster(described, machine), heads, kv_heads, arguments.head_dim, arguments.length
    )
    assumed = f"assumed to be like {ASSUMED_CLUSTER} (pass --cluster to plan for yours)"
    print(f"{reason}; cluster {f'described by {name}' if given else assumed}", end="\n\n")
    return plan
