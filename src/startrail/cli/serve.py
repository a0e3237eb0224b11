"""``startrail serve``: the page that plays schedules, with settings that Python answers."""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path

from startrail.cli.options import Commands, add_command
from startrail.planner.cluster import find_cluster
from startrail.view.page import DEFAULTS
from startrail.view.recording import MAX_RANKS
from startrail.view.server import PageServer

EXAMPLES = {
    "startrail serve --open": "what if? The page of `show --html` with live settings",
    "startrail serve --cluster my.toml --port 8080": "with your cluster, on a port of your choice",
}
PORT = 8417


def add(commands: Commands) -> None:
    command = add_command(
        commands, "serve", EXAMPLES, "Only this machine can open the page. Ctrl-C ends it.",
        help="open a page that answers what-if questions",
    )  # fmt: skip
    option = command.add_argument
    option("--cluster", help="a cluster's name or .toml file to begin with (default: STARTRAIL_CLUSTER or a100-4x8)")
    option("--port", type=int, default=PORT, help="port on 127.0.0.1; 0 takes a free one (default %(default)s)")
    option("--open", action="store_true", help="open it in a browser")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    name = arguments.cluster or os.environ.get("STARTRAIL_CLUSTER", "") or DEFAULTS["cluster"]
    cluster, stem = find_cluster(name), Path(name).stem.partition("@")[0]
    *nodes, ranks = [level.size for level in cluster.levels]
    if len(nodes) > 1 or not 2 <= cluster.world <= MAX_RANKS:
        nodes, ranks = [8], 8
    world = ranks * (nodes[0] if nodes else 1)
    start = {
        "cluster": stem, "nodes": str(nodes[0] if nodes else 1), "ranks": str(ranks), "plan": "auto",
        "versus": f"1x{world}", "length": str(4096 * world),
    }  # fmt: skip
    server = PageServer(arguments.port, start, {stem: cluster})
    print(f"{server.address} shows schedules on {stem}; Ctrl-C ends it", flush=True)
    if arguments.open:
        webbrowser.open(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0
