"""The order in which one rank runs the programs of one pass, if there are several: one for each zone of its tokens.

All transfers that can start are posted first, outermost zones first, and hide behind the compute of the zones inside.
A zone that sends nothing runs where the larger transfers are: at the beginning of the forward pass, which brings
queries, keys and values; at the end of the backward pass, which returns their gradients.

>>> from startrail.schedule.plan import Plan
>>> from startrail.schedule.program import build_program
>>> from startrail.schedule.values import FORWARD
>>> plan = Plan.parse("u2/1x2")
>>> programs = [build_program(plan.inside(level), size, 0, FORWARD) for level, size in ((0, 4), (1, 2), (2, 1))]
>>> for part, number in run_order(programs): print(part, programs[part].steps[number])
0 post q0<2@0 q0>2@0 kv0<2@0 kv0>2@0
1 post kv1<1@1 kv0>1@1 | 0x0
2 0x0
1 0x1
0 after q0 kv0
0 post kv1<1@1 kv0>1@1 | 0x0
0 0x1
0 post out0<2@0 out0>2@0
"""

from __future__ import annotations

from collections.abc import Sequence

from startrail.schedule.program import Program


def run_order(programs: Sequence[Program]) -> list[tuple[int, int]]:
    """(program, step) in the order in which they run. ``programs`` are ordered from the outermost zone inwards."""
    first: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    silent: list[tuple[int, int]] = []
    for part, program in enumerate(programs):
        steps = [(part, number) for number in range(len(program.steps))]
        if not any(step.posts for step in program.steps):
            silent += steps
            continue
        begun = num_first_steps(program)
        first += steps[:begun]
        rest = steps[begun:] + rest
    return first + silent + rest if programs[0].pass_.is_forward else first + rest + silent


def num_first_steps(program: Program) -> int:
    """How many steps begin a program: those that wait for nothing, up to and including the first that computes. It
    computes while the transfers of all of them run."""
    for number, step in enumerate(program.steps):
        if step.after:
            return number
        if step.blocks:
            return number + 1
    return len(program.steps)
