"""Proves the compiled calls of all ranks: every visible pair of tokens is computed exactly once, no token is sent that
no query sees, nothing deadlocks, every gradient reaches its owner, and the bytes equal the closed form.

>>> from startrail.compile.attention import Attention
>>> from startrail.schedule.plan import Plan
>>> split = Split(Plan.parse("1x2/1x2"), 4)
>>> prove_call(Attention.of(100, 1, 2, 2, 8, causal=True, window=5), split)
['direct']
"""

from __future__ import annotations

from startrail.compile.call import Part, compile_call
from startrail.compile.problem import Problem, Split
from startrail.schedule.program import Program
from startrail.schedule.proof import Contents, ScheduleError, prove_parts
from startrail.schedule.values import Pass, Piece


def prove_call(problem: Problem, split: Split) -> list[str]:
    """Raise ``ScheduleError`` unless both passes of a call pass every check. Returns the plans of rank 0's parts."""
    layout = split.layout_of(problem.boundaries)
    calls = [compile_call(problem, split, rank, layout) for rank in range(split.world)]
    for call in calls:
        for part in call.parts:
            part.prove_tokens(call.rank)
    results: dict[Pass, list[list[dict[Piece, Contents]]]] = {}
    for pass_ in problem.passes:
        programs = [[part.program(pass_) for part in call.parts] for call in calls]
        results[pass_] = prove_parts(programs)
        for call, of_rank in zip(calls, programs, strict=True):
            for part, program in zip(call.parts, of_rank, strict=True):
                _check_bytes(part, program, pass_)
    for call in calls:
        for number, part in enumerate(call.parts):
            part.prove_results(call.rank, {pass_: results[pass_][call.rank][number] for pass_ in problem.passes})
    return [str(part.sizes.plan) for part in calls[0].parts]


def _check_bytes(part: Part, program: Program, pass_: Pass) -> None:
    """The closed form against what the steps add up to."""
    promised, counted = part.traffic(pass_), Part.traffic(part, pass_)
    if promised != counted:
        raise ScheduleError(f"{program}: sends {counted} by level, but the closed form is {promised}")
