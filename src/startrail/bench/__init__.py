"""Benchmarks: our plans, the paper's schedule and the peers' own code on the same work, in one run, over limited links.

May import every package. `suite` runs the benchmark; start reading there. `cases` defines workloads, contenders and
trials, `sizes` their bytes per link, `peers` and `models` call each contender, `measure` runs trials on ranks, and
`report` turns the measurements into numbers, verdicts and a page. `sparse` measures windows and packed documents.
`engine` (with `host` and, under torchrun, `job`), `train` and `memory` (with `walls`) are smaller benchmarks:
``startrail bench engine``. The options are in ``startrail.cli.bench``, with their `defaults` here.
"""
