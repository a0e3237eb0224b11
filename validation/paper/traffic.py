"""Byte counts of the programs that the engine runs, split into collectives, placement and ring."""

from dataclasses import dataclass

from startrail.planner.workload import find_model
from startrail.schedule.plan import Plan
from startrail.schedule.program import build_program
from startrail.schedule.values import FORWARD

MHA = {"q": 1.0, "kv": 2.0, "out": 1.0}  # in shards of the model's width


@dataclass(frozen=True)
class Count:
    what: str
    paper: float
    ours: float
    unit: str

    @property
    def equal(self) -> bool:
        """Compared to as many digits as the paper prints."""
        digits = len(f"{self.paper:g}".partition(".")[2])
        return round(self.ours, digits) == self.paper


def star_forward(world: int, team: int) -> dict[str, float]:
    """Shards that the busiest rank sends in the forward pass, by the part of the schedule."""
    program = max(
        (build_program(Plan.parse(f"star{team}"), world, rank, FORWARD) for rank in range(team**2)),
        key=lambda program: sum(size for _, size in program.sends(MHA)),
    )
    rank, parts = program.place.rank, {"collectives": 0.0, "placement": 0.0, "ring": 0.0}
    teams = world // team**2  # per team group
    for post, size in program.sends(MHA):
        same_seat, same_group = post.peer % team == rank % team, post.peer // team // teams == rank // team // teams
        if post.peer // team == rank // team:
            parts["collectives"] += size
        elif same_seat and same_group and post.piece.kind == "kv" and parts["placement"]:
            parts["ring"] += size
        else:
            parts["placement"] += size
    return parts


def ring_forward(world: int) -> float:
    return sum(size for _, size in build_program(Plan.parse(f"1x{world}"), world, 0, FORWARD).sends(MHA))


def byte_counts() -> list[Count]:
    """Figures like those of Section 3.4 and Table 1. Ring makes P-1 hops; the paper's text counts P."""
    small, ring16 = star_forward(16, 2), ring_forward(16)
    model, length, world, team = find_model("llama-30b"), 65_536, 64, 4
    gib = length / world * model.width * 2 / 2**30  # a shard in bfloat16
    large, ring64 = star_forward(world, team), ring_forward(world)
    return [
        Count("P=16: Ring Attention, P2P", 30, ring16, "shards"),
        Count("P=16, C=2: ring P2P", 12, small["ring"], "shards"),
        Count("P=16, C=2: saved", 60, 100 * (1 - small["ring"] / ring16), "%"),
        Count("P=16, C=2: collectives, 4(C-1)", 4, small["collectives"], "shards"),
        Count("P=16, C=2: placement, 2C", 4, small["placement"], "shards"),
        Count("Llama-30B, 64k, P=64: Ring Attention, P-1 hops", 1.6, ring64 * gib, "GiB"),
        Count("the same, P hops, as the paper prints", 1.625, ring64 * gib * world / (world - 1), "GiB"),
        Count("Llama-30B, 64k, P=64, C=4: collectives", 0.152, large["collectives"] * gib, "GiB"),
        Count("Llama-30B, 64k, P=64, C=4: ring P2P", 0.305, large["ring"] * gib, "GiB"),
        Count("the same with the placement", 0.406, (large["ring"] + large["placement"]) * gib, "GiB"),
    ]
