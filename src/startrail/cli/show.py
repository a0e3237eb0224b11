"""``startrail show``: a plan's schedule as a grid of steps and ranks."""

from __future__ import annotations

import argparse
import os
import shutil

from startrail.cli.options import Commands, add_command, world_size
from startrail.planner.auto import fit_cluster, plan_for_heads
from startrail.planner.cluster import find_cluster
from startrail.planner.topology import Machine
from startrail.planner.workload import check_heads
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.view import fitting, show

EXAMPLES = {
    "startrail show 2x2": "the schedule of 4 ranks, step by step",
    "startrail show star2 --ranks 16 --rank 5": "one rank of the paper's schedule",
    "startrail show auto --ranks 32 --nodes 4 --heads 32 --kv-heads 8 --cluster a100-4x8": "",
}
MAX_RANKS = 8  # shown by default
ASSUMED_CLUSTER = "h100-8x8"  # for auto without a cluster; resized to --nodes and --ranks


def add(commands: Commands) -> None:
    command = add_command(commands, "show", EXAMPLES, help="print a schedule as a grid")
    option = command.add_argument
    option("plan", help="for example 2x2, 1x4/u2, star2, auto")
    option("--ranks", type=int, help="number of ranks (required for star plans and auto; default: the plan's size)")
    option("--rank", type=int, action="append", help="show this rank; may be repeated (default: the first that fit)")
    option("--nodes", type=int, default=1, help="for auto: number of nodes (default %(default)s)")
    option("--heads", type=int, help="for auto: query heads of the model")
    option("--kv-heads", type=int, help="for auto: KV heads (default: same as --heads)")
    option("--head-dim", type=int, help="for auto with a cluster: head dimension (default 128)")
    option("--length", type=int, help="for auto with a cluster: tokens (default 4096 per rank)")
    option("--cluster", help="for auto: a cluster's name or .toml file (default: STARTRAIL_CLUSTER)")
    option("--direction", choices=("forward", "backward"), default="forward")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    plan = _choose_plan(arguments) if arguments.plan == "auto" else Plan.parse(arguments.plan)
    world = world_size(plan, arguments.ranks)
    ranks = arguments.rank or list(range(min(world, MAX_RANKS)))
    for rank in ranks:
        if not 0 <= rank < world:
            raise ValueError(f"--rank {rank} is not in a world of {world}")
    pass_ = next(pass_ for pass_ in PASSES if str(pass_) == arguments.direction)
    if not arguments.rank:
        ranks = ranks[: fitting(plan, world, pass_, ranks, shutil.get_terminal_size((120, 24)).columns)]
    print(show(plan, world, pass_, ranks))
    if not arguments.rank and world > len(ranks):
        print(f"... and {world - len(ranks)} more ranks; choose with --rank")
    return 0


def _choose_plan(arguments: argparse.Namespace) -> Plan:
    """Ask the planner, and print the reason for its choice."""
    if not arguments.ranks or not arguments.heads:
        raise ValueError("auto chooses a plan for a cluster and a model: pass --ranks and --heads (and --nodes)")
    if arguments.ranks < 1 or arguments.nodes < 1 or arguments.ranks % arguments.nodes:
        raise ValueError(f"--ranks {arguments.ranks} is not a multiple of --nodes {arguments.nodes}")
    machine = Machine(arguments.nodes, arguments.ranks // arguments.nodes)
    heads, kv_heads = arguments.heads, arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    check_heads(heads, kv_heads)
    name = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "")
    cluster = fit_cluster(find_cluster(name or ASSUMED_CLUSTER), machine)
    plan, reason = plan_for_heads(cluster, heads, kv_heads, arguments.head_dim, arguments.length)
    assumed = f"assumed to be like {ASSUMED_CLUSTER} (pass --cluster to plan for yours)"
    print(f"{reason}; cluster {f'described by {name}' if name else assumed}", end="\n\n")
    return plan
