"""Latents against keys, as text or drawing: how many numbers a token has in either form, and what a plan sends.

>>> from startrail.planner.workload import find_model
>>> print(forms_text(Plan.parse("1x2/1x2"), 4, find_model("deepseek-v3"), 4096))
deepseek-v3, one layer of attention to 4,096 tokens by 1x2/1x2 on 4 ranks, bfloat16
                 per token  level 0, 1x2  level 1, 1x2
latents                576        3.5 MB        7.1 MB
keys, values        40,960        252 MB        503 MB
"""

from __future__ import annotations

from html import escape
from math import sqrt
from typing import NamedTuple

from startrail.compile.call import ByLevel, compile_call
from startrail.compile.problem import Split
from startrail.planner.workload import Model
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from startrail.view.svg import MARGIN, STYLE

SIDE, BAR = 200.0, 240.0  # of the larger square, and of the longest bar of a level


class Form(NamedTuple):
    """``sent``: by each rank at most, forward and backward."""

    name: str
    numbers: int  # per token
    sent: ByLevel


def _forms(plan: Plan, world: int, model: Model, length: int) -> list[Form]:
    if model.latents is None:
        raise ValueError(f"--latents {model.name}: its keys and values are not expanded from latents")
    found = []
    for name, latents in (("latents", True), ("keys, values", False)):
        problem = model.attention(length, 1, "bfloat16", latents=latents)
        width = sum(model.latents[:2]) if latents else model.heads * (model.head_dim + model.of_values)
        calls = [compile_call(problem, Split(plan, world), rank) for rank in range(world)]
        sent = [[sum(levels) for levels in zip(*map(call.traffic, PASSES), strict=True)] for call in calls]
        found.append(Form(name, width, tuple(map(max, zip(*sent, strict=True)))))
    return found


def _title(plan: Plan, world: int, model: Model, length: int) -> str:
    return f"{model.name}, one layer of attention to {length:,} tokens by {plan} on {world} ranks, bfloat16"


def _size(nbytes: float) -> str:
    """
    >>> _size(3_540_000), _size(252e6), _size(9.4e9)
    ('3.5 MB', '252 MB', '9,400 MB')
    """
    return f"{nbytes / 1e6:,.{0 if nbytes >= 1e8 else 1}f} MB"


def forms_text(plan: Plan, world: int, model: Model, length: int) -> str:
    heads = ["per token", *(f"level {at}, {level}" for at, level in enumerate(plan.levels))]
    lines = [_title(plan, world, model, length), " " * 12 + "".join(f"  {head:>12s}" for head in heads)]
    for form in _forms(plan, world, model, length):
        cells = [f"{form.numbers:,}", *map(_size, form.sent)]
        lines.append(f"{form.name:12s}" + "".join(f"  {cell:>12s}" for cell in cells))
    return "\n".join(lines)


def forms_svg(plan: Plan, world: int, model: Model, length: int) -> str:
    """Two squares, whose areas are the numbers per token, and a bar for what each form sends over each level."""
    forms, title = _forms(plan, world, model, length), _title(plan, world, model, length)
    parts, most = [], max(form.numbers for form in forms)
    for form, fill, top in zip(forms, ("form-small", "form-large"), (80.0, 110.0), strict=True):
        side = SIDE * sqrt(form.numbers / most)
        parts.append(f'<rect class="{fill}" x="{MARGIN}" y="{top:.1f}" width="{side:.1f}" height="{side:.1f}"/>')
        words = f"{form.numbers:,} numbers per token as {form.name}"
        at = (MARGIN + side + 10, top + side / 2 + 4) if form is forms[0] else (MARGIN, top + side + 20)
        parts.append(f'<text class="t" x="{at[0]:.1f}" y="{at[1]:.1f}">{words}</text>')
    left, top = MARGIN + SIDE + 140, 80.0
    for level, name in enumerate(plan.levels):
        parts.append(f'<text class="t q" x="{left}" y="{top + 4}">level {level}, {name}: {name.describe()}</text>')
        longest = max(form.sent[level] for form in forms)
        for form, fill in zip(forms, ("form-small", "form-large"), strict=True):
            top += 24
            width = BAR * form.sent[level] / longest if longest else 0.0
            parts.append(f'<rect class="{fill}" x="{left}" y="{top - 8:.1f}" width="{width:.1f}" height="14"/>')
            words = _size(form.sent[level])
            parts.append(f'<text class="t" x="{left + width + 8:.1f}" y="{top + 4:.1f}">{words}</text>')
        top += 36
    parts.append(f'<text class="t q" x="{left}" y="{top + 4}">sent by each rank, forward and backward</text>')
    width, height = left + BAR + 110, max(top + 24, 110 + SIDE + 44)
    colours = ".form-small{fill:#1f5fbf}.form-large{fill:#e3a15c}"
    dark = "@media (prefers-color-scheme:dark){.form-small{fill:#6ea8ff}.form-large{fill:#a9713a}}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"><title>{escape(title)}</title>'
        f"<style>{STYLE}{colours}{dark}</style>"
        f'<rect class="back" width="100%" height="100%"/>'
        f'<text class="t" x="{MARGIN}" y="34">{escape(title)}</text>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"
