"""The benchmark: our plans, the paper's schedule and the peers on the same work, in one run, on links that are limited.

    python -m startrail.bench --quick                 # three minutes
    python -m startrail.bench --out report            # all of it: report.html, report.json and the plots

`cases` says what is measured, `sizes` what must cross each link, `peers`, `flash_peers`, `ring` and `models` how each
contender is called, `measure` runs them, `findings` are the numbers, `claims` the verdicts on them, and `report` writes
both down. `engine`, `train` and `memory` are smaller benchmarks of this machine alone: ``startrail bench engine``.
"""
