"""Renders the figures of README and docs from the recorded results.

python -m results.figures          # says which pages differ from their results; exit code 1 if any does
python -m results.figures --write  # renders them anew

A page holds ``<!-- figures: NAME -->``, the rendered block, and ``<!-- end of figures -->``. ``NAME, at most 50 commits
old`` says how many commits may have changed the measured code (``MEASURED``) since the measurement. Every other figure
on a page has a line in ``stated.txt``: page, words around the figure, and the test, file or publication it is from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from workshop.report.findings import Line, lines_of
from workshop.report.hybrid import HEADS, by_trial
from workshop.report.sparse import DENSE, RING, SPARSE, SparseRow
from workshop.trials.cases import OURS

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
VALIDATION = ROOT / "validation"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- figures: (\w+)(?:, at most (\d+) commits old)? -->\n(.*?)<!-- end of figures -->", re.DOTALL)
PACKAGES = ("agreement", "compile", "engine", "geometry", "kernels", "schedule", "transport")
MEASURED = [f"src/startrail/{package}" for package in PACKAGES]

VALIDATED = {
    "lab": [*MEASURED, "src/startrail/planner/simulator.py", "src/startrail/planner/pricing.py"],
    "hardware": ["src/startrail/planner", "validation/hardware"],
}
BY_HAND = ("docs/log.md",)  # it names the commits that it is about
FIGURE = re.compile(r"\d[\d.,]*\s?(?:x\b(?! \d)|%|ms\b|us\b|[KMG]i?B\b|[TGM]FLOP|s\b|seconds|minutes|times\b)")
OUTSIDE = ("the paper", "shared/HARDWARE", "arithmetic", "option")  # sources that are not files

# Of each limit of memory: a remedy, and words of the case before and of the case after it in memory.json.
REMEDIES = {
    "attention": [
        ("SDPA instead of eager attention, one process, 2 layers", "eager on", "2 layers, 8,192 tokens, SDPA"),
        ("4 ranks (`1x4`) instead of one process with SDPA, 16 layers", "16 layers, 8,192 tokens, SDPA", "`1x4`"),
        ("`2x2` instead of `2x2,keep=all`", "`2x2,keep=all`", "`2x2`"),
        ("`u4,exchange=twice` instead of `u4`", "`u4`", "`u4,exchange=twice`"),
    ],
    "logits": [("logits in chunks, 16,384 tokens per rank", "whole logits, 16,384", "in chunks")],
    "activations": [
        ("layers recomputed", "all activations kept", "layers recomputed"),
        ("and their inputs on the host", "layers recomputed", "inputs on the host"),
        ("MLPs in tiles of 1,024 tokens", "whole MLPs", "MLPs in tiles"),
    ],
    "optimizer": [
        ("ZeRO-2 on 4 ranks", "replicated", "ZeRO-2"),
        ("ZeRO-3 on 4 ranks", "replicated", "ZeRO-3"),
    ],
}

HEADLINE_AT = "4x8", 24.0  # machine, and how many times as long as it computes Ring Attention communicates

Json = dict[str, Any]


def recorded(name: str) -> Json:
    return json.loads((FOLDER / f"{name}.json").read_text())


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    >>> print(table(["plan", "s"], [["1x8", "2.0"]]))
    | plan | s |
    | --- | --- |
    | 1x8 | 2.0 |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(*names: str) -> str:
    """When, and at which commit, these results were measured; those of one commit together."""
    runs: dict[str, list[str]] = {}
    for name in names:
        meta = recorded(name)["meta"]
        runs.setdefault((meta["date"][:10], meta["commit"][:10], meta["torch"]), []).append(f"`results/{name}.json`")
    parts = (
        f"on {date} at {commit} with torch {torch} ({', '.join(of)})" for (date, commit, torch), of in runs.items()
    )
    return textwrap.fill(f"Measured {'; '.join(parts)}.", 120)


# --- blocks


def headline() -> str:
    """Slow links at 4 nodes of 8 ranks: ours over the fastest of the others, and over Ring Attention where it ran."""
    rows = [_against(*row) for row in (*_dense_rows(), *_sparse_rows(), *_hybrid_rows(), *_latent_rows())]
    heads = ["4 nodes of 8 ranks", "speed over the fastest other way", "which is", "over Ring Attention"]
    return f"{table(heads, rows)}\n\n{source('dense', 'sparse', 'hybrid', 'latents')}"


Seconds = Mapping[str, float]  # by contender


def _against(work: str, ours: float, others: Seconds, ring: float | None) -> list[str]:
    """
    >>> _against("window", 1.0, {"a": 2.0, "b": 3.0}, 9.0)
    ['window', '**2.0x**', 'a', '9.0x']
    """
    other = min(others, key=lambda name: others[name])
    return [work, f"**{others[other] / ours:.1f}x**", other, f"{ring / ours:.1f}x" if ring else ""]


def _dense_rows() -> Iterator[tuple[str, float, Seconds, float]]:
    for trial in _dense_trials():
        if trial["work"]["causal"] and (trial["machine"], trial["pressure"]) == HEADLINE_AT:
            lines = lines_of(trial)
            others = {line.name: line.seconds for line in lines if line.role == "peer"}
            yield "dense causal mask", _fastest(lines, OURS).seconds, others, _fastest(lines, ("ring",)).seconds


def _sparse_rows() -> Iterator[tuple[str, float, Seconds, float]]:
    for (machine, pressure, work), rows in _sparse_trials():
        if (machine, pressure) == HEADLINE_AT:
            seconds = {row.contender: row.seconds for row in rows if row.seconds}
            others = {name: s for name, s in seconds.items() if name not in (SPARSE, RING, DENSE)}
            yield work, seconds[SPARSE], others, seconds[RING]


def _hybrid_rows() -> Iterator[tuple[str, float, Seconds, None]]:
    names = {"8,192 tokens": "gated delta rule", "stack, 8,192 tokens": "hybrid stack, 3 such layers and 1 full"}
    for (machine, pressure, work), found in by_trial(SparseRow(**row) for row in recorded("hybrid")["rows"]).items():
        if (machine, pressure) == HEADLINE_AT and work in names:
            seconds = {name: row.seconds for name, row in found.items() if row.seconds}
            yield names[work], seconds.pop(SPARSE), seconds, None


def _latent_rows() -> Iterator[tuple[str, float, Seconds, float]]:
    rows = [row for row in recorded("latents")["rows"] if (row["machine"], row["pressure"]) == HEADLINE_AT]
    keys = {row["plan"]: row["seconds"] for row in rows if row["sends"] != "latents"}
    chosen = next(row["seconds"] for row in rows if row["chosen"])
    yield "latent attention", chosen, {"our best plan for keys and values": min(keys.values())}, keys["1x32"]


def dense() -> str:
    """Every contender of the trials with dense masks and limited links."""
    parts = []
    for trial in _dense_trials():
        mask = "causal" if trial["work"]["causal"] else "full"
        lines = sorted((line for line in lines_of(trial) if line.role != "compute"), key=lambda line: line.seconds)
        best = _fastest(lines, OURS)
        rows = [
            [
                f"**{line.name}**" if line is best else line.name,
                f"{line.seconds:.2f}",
                f"{line.against_ring:.2f}",
                f"{line.share_of_bound:.0%}",
            ]
            for line in lines
        ]
        title = f"{trial['machine']}, {mask}, {trial['work']['length']:,} tokens, ring at {trial['pressure']:g}x:"
        parts.append(f"{title}\n\n{table(['contender', 's', 'x ring', 'of its bound'], rows)}")
    return "\n\n".join([*parts, source("dense")])


def training() -> str:
    """Whole training steps of the tiny models."""
    parts = []
    for trial in recorded("dense")["trials"]:
        if (model := trial["work"]["model"]) and trial["pressure"]:
            lines = sorted((line for line in lines_of(trial) if line.role != "compute"), key=lambda line: line.seconds)
            rows = [[line.name, f"{line.seconds:.2f}", f"{line.against_ring - 1:+.0%}"] for line in lines]
            title = f"{model.upper()}, {trial['machine']}, ring at {trial['pressure']:g}x its compute:"
            parts.append(f"{title}\n\n{table(['contender', 's per step', 'speed over ring'], rows)}")
    return "\n\n".join([*parts, source("dense")])


def sparse() -> str:
    """Seconds and speed over ring of every contender, one table per machine and pressure."""
    settings: dict[tuple[str, float], dict[str, list[SparseRow]]] = {}
    for (machine, pressure, work), rows in _sparse_trials():
        settings.setdefault((machine, pressure), {})[work] = rows
    parts = []
    for (machine, pressure), works in settings.items():
        names = list(dict.fromkeys(row.contender for rows in works.values() for row in rows))
        body = [[f"**{n}**" if n == SPARSE else n, *(_cell(rows, n) for rows in works.values())] for n in names]
        title = f"{machine}, ring at {pressure:g}x its dense compute; seconds (x ring):"
        parts.append(f"{title}\n\n{table(['contender', *works], body)}")
    return "\n\n".join([*parts, source("sparse")])


def hybrid() -> str:
    """Seconds, speed over the exchange of heads, and bytes off a node, one table per link."""
    settings: dict[tuple[str, float], dict[str, dict[str, SparseRow]]] = {}
    for (machine, pressure, work), found in by_trial(SparseRow(**row) for row in recorded("hybrid")["rows"]).items():
        settings.setdefault((machine, pressure), {})[work] = found
    parts = []
    for (machine, pressure), works in settings.items():
        names = list(next(iter(works.values())))
        body = [[f"**{n}**" if n == SPARSE else n, *(_hybrid_cell(of, n) for of in works.values())] for n in names]
        title = f"{machine}, links of {pressure:g}x; seconds (x heads all-to-all), MB off a node:"
        parts.append(f"{title}\n\n{table(['contender', *works], body)}")
    return "\n\n".join([*parts, source("hybrid")])


def _hybrid_cell(found: Mapping[str, SparseRow], name: str) -> str:
    seconds, heads = found[name].seconds, found[HEADS].seconds
    megabytes = found[name].node_bytes / 1e6
    sent = f"{megabytes:.2f}" if megabytes < 1 else f"{megabytes:.1f}"
    return f"{seconds:.2f} ({heads / seconds:.1f}), {sent}" if seconds and heads else ""


def latents() -> str:
    """Latents and expanded keys, one table per pressure: the planner's choice in bold."""
    found = recorded("latents")
    parts, rows, stated = [], found["rows"], dict(text.split("=", 1) for text in found["meta"]["arguments"])
    for pressure in dict.fromkeys(row["pressure"] for row in rows):
        of = sorted((row for row in rows if row["pressure"] == pressure), key=lambda row: row["seconds"])
        best = min(row["seconds"] for row in of if row["sends"] != "latents")
        body = [
            [
                f"**{row['plan']}**" if row["chosen"] else row["plan"],
                row["sends"],
                f"{row['seconds']:.2f}",
                f"{best / row['seconds']:.2f}",
                f"{row['node_bytes'] / 1e6:.2f}",
                f"{row['closed_bytes'] / 1e6:.2f}",
            ]
            for row in of
        ]
        heads = ["plan", "sends", "s", "x best with expanded keys", "MB off a node", "closed form"]
        of_trial = f"{of[0]['machine']}, {int(stated['length']):,} tokens"
        title = f"{of_trial}, a ring of expanded keys at {pressure:g}x its compute:"
        parts.append(f"{title}\n\n{table(heads, body)}")
    return "\n\n".join([*parts, source("latents")])


def engine() -> str:
    found = recorded("engine")
    rows = [
        [
            row["case"],
            f"`{row['plan']}`",
            f"{row['seconds']:.2f}",
            f"{row['efficiency']:.2f}",
            f"{row['waiting']:.1%}",
            f"{row['cpu_seconds_without_links']:.3f}",
        ]
        for row in found["rows"]
    ]
    heads = ["case", "plan", "s", "efficiency (SDPA's time / ours)", "waiting", "CPU s per rank without links"]
    return f"{table(heads, rows)}\n\n{source('engine')}"


def memory() -> str:
    return _peaks("memory")


def groups() -> str:
    return _peaks("groups")


def _peaks(name: str) -> str:
    """Every case: peak, estimate, and how far off that is."""
    heads, rows = ["case", "peak per rank", "planner", "off"], recorded(name)["rows"]
    return f"{table(heads, [[row['case'], *_peak(row)] for row in rows])}\n\n{source(name)}"


def _wall(wall: str) -> str:
    """Each remedy of one limit: peaks, estimates, CPU time and bytes, before and after."""
    cases = {row["case"]: row for row in recorded("memory")["rows"] if row["wall"] == wall}
    heads = ["remedy", "peak per rank before", "after", "planner", "CPU s per rank", "attention sends per rank"]
    rows = []
    for remedy, *words in REMEDIES[wall]:
        pair = [cases[next(case for case in cases if part in case)] for part in words]
        estimates = _change([row.get("estimate", 0) / 2**20 for row in pair], ",.0f", " MiB")
        seconds = _change([row.get("seconds", 0) for row in pair], ".1f", "")
        sent = f"{pair[0].get('sent', 0) / 2**20:,.0f} -> {pair[1].get('sent', 0) / 2**20:,.0f} MiB"
        rows.append([remedy, *(_peak(row)[0] for row in pair), estimates, seconds, sent if wall == "attention" else ""])
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    shown = ([row[at] for at in used] for row in (heads, *rows))
    return f"{table(next(shown), list(shown))}\n\n{source('memory')}"


def _change(values: Sequence[float], form: str, unit: str) -> str:
    """Nothing if one of them is not known.

    >>> _change([2, 3], ".1f", " s"), _change([0, 3], ".1f", " s")
    ('2.0 -> 3.0 s', '')
    """
    return " -> ".join(f"{value:{form}}" for value in values) + unit if all(values) else ""


def _peak(row: Json) -> list[str]:
    peak, estimate = row.get("measured"), row.get("estimate")
    off = f"{estimate / peak - 1:+.1%}" if peak and estimate else ""
    sizes = [f"{size / 2**20:,.0f} MiB" if size else "" for size in (peak, estimate)]
    return [sizes[0] or row["reason"], sizes[1], off]


def lab() -> str:
    return _findings("lab")


def hardware() -> str:
    return _findings("hardware")


def _findings(name: str) -> str:
    """The findings of a validation, one per line, as it wrote them."""
    lines = (VALIDATION / name / "results.md").read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("- "))
    found = [line for line in itertools.takewhile(bool, lines[first:]) if not line.endswith("targets met")]
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in found)


BLOCKS: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (headline, dense, training, sparse, hybrid, latents, engine, memory, groups, lab, hardware)
}
BLOCKS |= {f"memory_{wall}": partial(_wall, wall) for wall in REMEDIES}
# Of blocks with other names than their file.
FILES = {"headline": ("dense", "sparse", "hybrid", "latents"), "training": ("dense",)}
FILES |= {f"memory_{wall}": ("memory",) for wall in REMEDIES}


def _dense_trials() -> Iterator[Json]:
    """Trials of attention with as many key heads as heads, on limited links that are alike."""
    for trial in recorded("dense")["trials"]:
        work = trial["work"]
        plain = not work["model"] and not trial["slow_node"] and work["kv_heads"] == work["q_heads"]
        if plain and trial["pressure"] and any(row["role"] == "ring" for row in trial["rows"]):
            yield trial


def _fastest(lines: Sequence[Line], roles: Collection[str]) -> Line:
    return min((line for line in lines if line.role in roles), key=lambda line: line.seconds)


def _sparse_trials() -> Iterator[tuple[tuple[str, float, str], list[SparseRow]]]:
    trials: dict[tuple[str, float, str], list[SparseRow]] = {}
    for fields in recorded("sparse")["rows"]:
        row = SparseRow(**fields)
        trials.setdefault((row.machine, row.pressure, row.work), []).append(row)
    yield from trials.items()


def _cell(rows: Sequence[SparseRow], name: str) -> str:
    seconds = {row.contender: row.seconds for row in rows if row.seconds}
    return f"{seconds[name]:.2f} ({seconds[RING] / seconds[name]:.1f})" if name in seconds else ""


# --- pages


def problems(write: bool) -> Iterator[str]:
    """What differs from the recorded results; ``write`` mends what can be mended."""
    for page in PAGES:
        text = page.read_text()
        new = text
        for found in BLOCK.finditer(text):
            name, allowed, old = found[1], found[2], found[3]
            rendered = f"\n{BLOCKS[name]()}\n\n"
            if old != rendered:
                new = new.replace(found[0], found[0].replace(old, rendered) if old else _filled(found[0], rendered))
                if not write:
                    yield f"{page.relative_to(ROOT)}: the figures '{name}' are not those of results/*.json"
            yield from _too_old(page, name, int(allowed or 0))
        if write and new != text:
            page.write_text(new)


def _filled(block: str, rendered: str) -> str:
    head, end = block.split("\n", 1)
    return f"{head}\n{rendered}{end}"


def _too_old(page: Path, name: str, allowed: int) -> Iterator[str]:
    if name in VALIDATED:
        file = f"validation/{name}/results.md"
        commits = {file: _git("log", "-1", "--format=%H", "--", file)}
    else:
        commits = {f"results/{file}.json": recorded(file)["meta"]["commit"] for file in FILES.get(name, (name,))}
    for file, commit in commits.items():
        count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *VALIDATED.get(name, MEASURED))
        if not count:
            yield f"{file}: commit {commit} is not part of this history"
        elif int(count) > allowed:
            where = page.relative_to(ROOT)
            yield f"{where}: {count} commits changed the measured code since {file}, the page admits {allowed}"


def _git(*arguments: str) -> str:
    """Its output, or nothing if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def untraced() -> Iterator[str]:
    """Figures outside the blocks that ``stated.txt`` has no source for, and its lines that no page needs."""
    stated = [tuple(line.split(" | ")) for line in (FOLDER / "stated.txt").read_text().splitlines() if " | " in line]
    used = set()
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if name in BY_HAND:
            continue
        prose = re.sub(r"```.*?```", "", BLOCK.sub("", page.read_text()), flags=re.DOTALL)
        for line in prose.splitlines():
            sources = [entry for entry in stated if entry[0] == name and entry[1] in line]
            used.update(sources)
            if FIGURE.search(line) and not sources:
                yield f"{name}: results/stated.txt has no source for: {line.strip()}"
    for entry in stated:
        if entry not in used:
            yield f"results/stated.txt: not on its page: {' | '.join(entry)}"
        elif len(entry) != 3 or not (entry[2].startswith(OUTSIDE) or (ROOT / entry[2]).exists()):
            yield f"results/stated.txt: not a file of this repository: {' | '.join(entry)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="render the figures anew")
    found = [*problems(parser.parse_args().write), *untraced()]
    print("\n".join(found) or "every figure is that of its file")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
