"""The report: a self-contained HTML page, and its data as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from startrail.bench import yardstick
from startrail.bench.yardstick import Json, Workload
from startrail.view.plots import figures, page_text
from workshop.peers.contenders import DISCLOSURES
from workshop.report.claims import Claim, best_of_ours, claims, with_ours
from workshop.report.findings import Line, best, headline_machine, is_emulated, lines_of, pressure_text, title
from workshop.report.plots import pictures, throughput
from workshop.trials.cases import BOUND_BY_LINKS, OURS

EMULATED = (
    "The cluster is emulated: nodes are network namespaces of one machine, whose kernel limits their links (tbf), and "
    "ranks of one thread each talk gloo and share the machine's cores. A link has a rate but no latency of its own. "
    "Bytes carry over to a real cluster, ratios do where bandwidth and not latency decides, seconds do not."
)
JUDGED = (
    "Ratios and shares of the bound are judged by medians on the slowest links, where ring is measured at 8 times its "
    "compute or more, and one ratio on faster ones. On faster links the cores that emulate the ranks limit every "
    "contender: those ratios are often lower, and are shown unjudged. 'Our best plan' is the fastest of those "
    "with heads outermost, of nested rings, with keep and without."
)
WHO = (
    "Trials at other rates, masks and machines have only the contenders that the claims name; other peers run where "
    "Ring Attention communicates 8x as long as it computes. Ulysses and DeepSpeed need as many heads as ranks and run "
    "where there are enough."
)
STYLE = """<style>
.yes { color: var(--c2); font-weight: 600; } .no { color: var(--c1); font-weight: 600; }
tr.ours td:first-child { font-weight: 600; } .result { font-size: 1.1rem; font-weight: 600; }
</style>"""
LIBRARIES = ("ring-flash-attn", "yunchang", "deepspeed", "pyroute2", "matplotlib")
GROWING = ("ring, textbook", "USP", "star4", "nested", "nested, keep")
COLUMNS = (
    ("contender", "name, and the plan if it runs on our engine"),
    ("median s", "slowest rank of each repeat, median over repeats"),
    ("spread", "fastest and slowest repeat"),
    ("n", "repeats"),
    ("x ring", "throughput relative to the fastest flat ring in the same trial: textbook, or ours where it takes part"),
    ("link MB", "measured bytes of the busiest direction of the busiest node link, barriers subtracted"),
    ("closed MB", "the same by closed form, read off the schedule"),
    ("off", "measured against closed form, the worst of all links and directions; TCP's headers are about 1 %"),
    ("bound s", "the larger of compute alone and bytes over rate"),
    ("of bound", "bound / median"),
    ("exposed s", "median minus compute alone"),
    ("waiting", "share of its time that a rank waits for transfers, mean over ranks"),
)


def metadata(argv: Sequence[str], started: float) -> Json:
    """Machine, versions and options of the run, with the versions of the libraries that only the workshop uses."""
    return yardstick.metadata(argv, started) | {name: _version(name) for name in LIBRARIES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def write(report: Json, folder: Path) -> None:
    """report.json and report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    verdicts = claims(report)
    recorded = {**report, "claims": [vars(claim) for claim in verdicts]}
    folder.joinpath("report.json").write_text(json.dumps(recorded, indent=1))
    folder.joinpath("report.html").write_text(page(report, verdicts), "utf-8")


def page(report: Json, verdicts: Sequence[Claim]) -> str:
    """The result, its picture, a table per question, every trial; then the claims that this run could check."""
    meta, trials = report["meta"], report["trials"]
    summary = (
        f"{meta['cores']} cores of {meta['processor']}, torch {meta['torch']}, startrail {meta['startrail']} at "
        f"{meta['commit'][:10] or 'no commit'}, {meta['date']}, {meta['seconds'] / 60:.1f} minutes."
    )
    legend = "; ".join(f"<b>{escape(name)}</b>: {escape(meaning)}" for name, meaning in COLUMNS)
    headline = headline_trial(trials)
    first = throughput(headline) if headline is not None else ""
    blocks = [
        STYLE,
        "<h1>StarTrail: sequence-parallel attention, measured side by side</h1>",
        f"<p class='result'>{escape(result_sentence(trials))}</p>",
        first,
        f"<p>{escape(summary)}</p>",
        f"<p class='note'>{escape(EMULATED)}</p>" if any(map(is_emulated, trials)) else "",
        "<h2>Which plan is fastest here?</h2>",
        fastest(trials),
        "<h2>How close to the bound?</h2>",
        "<p class='note'>The bound is the larger of compute alone and bytes over rate.</p>",
        bounds(trials),
        "<h2>How do the peers compare?</h2>",
        against(trials),
        "<h2>How costs grow</h2>",
        _growth(trials),
        figures([picture for picture in pictures(report) if picture != first]),
        "<h2>Every trial</h2><p class='note'>Attention forward + backward with random cotangents, float32, unless a "
        "training step is named. Every contender's results, gradients included, were checked against one process "
        "before it was timed. Repeats are interleaved. The link rate is chosen so that textbook Ring Attention's bytes "
        "take the stated multiple of the compute time as first measured.</p>",
        f"<p class='note'>{legend}.</p>",
        *(_trial(trial) for trial in trials),
        "<h2>Left out</h2>",
        f"<p class='note'>{escape(WHO)}</p>",
        _left_out(report),
        "<h2>What each contender is</h2><ul>",
        *(f"<li><b>{escape(way)}</b>: {escape(text)}</li>" for way, text in DISCLOSURES.items()),
        "</ul>",
        "<h2>Machine and versions</h2><div class='wide'><table>",
        *(f"<tr><td>{escape(k)}</td><td class='text'>{escape(_plain(v))}</td></tr>" for k, v in meta.items()),
        "</table></div>",
        *_claims_section([claim for claim in verdicts if claim.found != Claim("").found]),
    ]
    return page_text("StarTrail benchmark", blocks)


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _claims_section(verdicts: Sequence[Claim]) -> list[str]:
    """The claims that this run measured."""
    if not verdicts:
        return []
    words = {True: "<span class='yes'>met</span>", False: "<span class='no'>not met</span>", None: "–"}
    rows = [
        f"<tr><td class='text'>{escape(claim.text)}</td><td>{words[claim.met]}</td>"
        f"<td class='text'>{escape(claim.found)}</td></tr>"
        for claim in verdicts
    ]
    head = "<tr><th>claim</th><th></th><th>found</th></tr>"
    return [
        "<h2>Claims that were checked</h2>",
        f"<p class='note'>{escape(JUDGED)}</p>",
        f"<div class='wide'><table>{head}{''.join(rows)}</table></div>",
    ]


def _trial(trial: Json) -> str:
    unset = "not limited" if is_emulated(trial) else "as they are"
    rates = ", ".join(sorted({unset if rate is None else f"{rate / 1e6:.1f} Mbit/s" for rate in trial["rates"]}))
    head = "".join(f"<th title='{escape(meaning)}'>{escape(name)}</th>" for name, meaning in COLUMNS)
    rows = "".join(_row(line) for line in sorted(lines_of(trial), key=lambda line: line.seconds))
    table = f"<div class='wide'><table><tr>{head}</tr>{rows}</table></div>"
    return f"<h3>{escape(title(trial))}</h3><p class='note'>Links: {rates}</p>{table}"


def _row(line: Line) -> str:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    mega = [None if value is None else value / 1e6 for value in (line.bytes_measured, line.bytes_closed)]
    name = line.name + (f" ({line.plan})" if line.plan and line.plan not in line.name else "")
    cells = [
        escape(name),
        f"{line.seconds:.3f}",
        f"{line.spread[0]:.3f}–{line.spread[1]:.3f}",
        str(line.repeats),
        number(line.against_ring, ".2f"),
        number(mega[0], ".2f"),
        number(mega[1], ".2f"),
        number(line.bytes_off, "+.1%"),
        f"{line.bound:.3f}",
        f"{line.share_of_bound:.0%}",
        f"{line.exposed:.3f}",
        number(line.waiting, ".0%"),
    ]
    ours = " class='ours'" if line.role in OURS else ""
    return f"<tr{ours}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _growth(trials: Sequence[Json]) -> str:
    """Bytes, time and exposed communication by ranks and tokens: full mask, MHA, communication-bound."""
    rows = []
    for trial in trials:
        work = Workload(**trial["work"])
        if work.name != "MHA" or work.causal or trial["pressure"] != BOUND_BY_LINKS or trial["slow_node"]:
            continue
        for line in lines_of(trial):
            if (line.name in GROWING or line.role == "heads") and line.bytes_measured:
                ranks, place = trial["nodes"] * trial["ranks_per_node"], (*GROWING, line.name).index(line.name)
                rows.append((place, ranks, trial["machine"], work.batch * work.length, line.bytes_measured, line))
    if not rows:
        return ""
    columns = ("contender", "machine", "ranks", "tokens", "link MB", "link kB per token", "s", "exposed s")
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(
        f"<tr><td>{escape(line.name)}</td><td>{machine}</td><td>{ranks}</td><td>{tokens}</td>"
        f"<td>{measured / 1e6:.2f}</td><td>{measured / 1e3 / tokens:.2f}</td>"
        f"<td>{line.seconds:.3f}</td><td>{line.exposed:.3f}</td></tr>"
        for _, ranks, machine, tokens, measured, line in sorted(rows, key=lambda row: row[:4])
    )
    note = f"MHA, full mask, {pressure_text(BOUND_BY_LINKS)}. One node's link."
    return f"<p class='note'>{note}</p><div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def _left_out(report: Json) -> str:
    """Contenders that could not take part, grouped by reason, because one reason often holds for many trials."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in report.get("left_out", []):
        reasons.setdefault((entry["name"], entry["why"]), []).append(entry["where"])
    for trial in report["trials"]:
        work = Workload(**trial["work"])
        for row in trial["rows"]:
            if row["refused"]:
                where = f"{trial['machine']} {work.name} {work.mask}"
                reasons.setdefault((row["name"], row["refused"]), []).append(where)
    if not reasons:
        return "<p>None.</p>"
    items = [
        f"<li><b>{escape(name)}</b> ({escape(', '.join(dict.fromkeys(where)))}): {escape(reason)}</li>"
        for (name, reason), where in reasons.items()
    ]
    return f"<ul>{''.join(items)}</ul>"


NOTHING = "None of our plans was timed in this run."


def command(trial: Json) -> str:
    """The command that measures a trial again, with the others of its machine."""
    if not is_emulated(trial):
        return f"torchrun --nproc-per-node {trial['ranks_per_node']} -m startrail.bench"
    return f"startrail bench --shapes {trial['machine']}"


def result_sentence(trials: Sequence[Json]) -> str:
    """The result in one sentence: the best plan against the ring where it has the slowest links."""
    trial = headline_trial(trials)
    if trial is None:
        return NOTHING
    lines = lines_of(trial)
    ours, ring = best_of_ours(lines), best(lines, "ring")
    assert ours is not None
    bound = f"{ours.share_of_bound:.0%} of what its bytes and arithmetic allow"
    if ring is None:
        return f"{ours.plan} takes {ours.seconds:.3f} s, {bound} ({title(trial)})."
    return (
        f"{ours.plan} computes attention {ring.seconds / ours.seconds:.2f}x as fast as {ring.name} "
        f"({ours.seconds:.3f} s against {ring.seconds:.3f} s) and reaches {bound} ({title(trial)})."
    )


def headline_trial(trials: Sequence[Json]) -> Json | None:
    """The trial with the slowest links on the machine of the claims, MHA if there is one."""
    machine = headline_machine(trials)
    timed = [t for t in trials if t["machine"] == machine and not t["slow_node"] and best_of_ours(lines_of(t))]
    timed = [t for t in timed if not t["work"]["model"]] or timed
    return max(timed, key=lambda t: (t["pressure"] or 0.0, t["work"]["causal"]), default=None)


def fastest(trials: Sequence[Json]) -> str:
    rows = []
    for trial, lines, ours in with_ours(trials):
        ring = best(lines, "ring")
        second = best((line for line in lines if line is not ours), *OURS)
        rows.append(
            [
                title(trial),
                ours.plan,
                f"{ours.seconds:.3f}",
                f"{ring.seconds / ours.seconds:.2f}x" if ring else "–",
                f"{second.plan} {second.seconds:.3f}" if second else "–",
                command(trial),
            ]
        )
    return table(("setting", "our fastest plan", "median s", "against ring", "next, s", "command"), rows)


def bounds(trials: Sequence[Json]) -> str:
    rows = [
        [
            title(trial),
            ours.plan,
            f"{ours.seconds:.3f}",
            f"{ours.bound:.3f}",
            f"{ours.share_of_bound:.0%}",
            f"{ours.exposed:.3f}",
            "–" if ours.waiting is None else f"{ours.waiting:.0%}",
            command(trial),
        ]
        for trial, _, ours in with_ours(trials)
    ]
    return table(("setting", "plan", "median s", "bound s", "of bound", "exposed s", "waiting", "command"), rows)


def against(trials: Sequence[Json]) -> str:
    rows = [
        [
            title(trial),
            line.name + (f" ({line.plan})" if line.plan and line.plan not in line.name else ""),
            f"{line.seconds:.3f}",
            f"{ours.plan} {ours.seconds:.3f}",
            f"{line.seconds / ours.seconds:.2f}x",
            command(trial),
        ]
        for trial, lines, ours in with_ours(trials)
        for line in sorted(lines, key=lambda line: line.seconds)
        if line.role not in (*OURS, "compute")
    ]
    return table(("setting", "contender", "its s", "our best, s", "ours is", "command"), rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<p class='note'>{NOTHING}</p>"
    head = "".join(f"<th{' class=text' * (name == 'command')}>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class='text'><code>{escape(cell)}</code></td>" if name == "command" else f"<td>{escape(cell)}</td>"
            for name, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"
