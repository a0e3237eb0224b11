"""The benchmark's report: `findings` are the numbers, `claims` the verdicts on them, `plots` and `page` show both.

All of it works on the recorded JSON, so that ``startrail bench --again`` can judge and plot an old report.
"""
