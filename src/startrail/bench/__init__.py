"""The benchmark: our plans, the paper's schedule and the peers on the same work, in one run, on links that are limited.

    python -m startrail.bench --quick                 # three minutes
    python -m startrail.bench --out report            # all of it: report.html, report.json and the plots

`cases` says what is measured, `closed` what must cross each link, `peers` how each contender is called, `measure` runs
them, `report` writes down what was found and which claims it bears out.
"""
