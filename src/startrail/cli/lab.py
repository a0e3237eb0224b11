"""``startrail lab run``: torchrun for an emulated cluster. It is part of the workshop."""

from __future__ import annotations

from startrail.cli.clone import HOW, workshop
from startrail.cli.options import Commands

EXAMPLES = {
    "startrail lab run --nodes 4 --ranks 8 --link 100mbit -- script.py": "32 ranks on emulated links",
    "startrail lab run --nodes 4 --ranks 8 --slow 3=50mbit -- train.py --steps 10": "node 3 has half the rate",
}
TEXT = "run a program on an emulated cluster"


def add(commands: Commands) -> None:
    if (clone := workshop("commands")) is None:
        commands.add_parser("lab", help=f"{TEXT} (from a clone)", refusal=f"{HOW}startrail lab")
    else:
        clone.add_lab(commands, EXAMPLES, TEXT)
