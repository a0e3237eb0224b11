"""The workshop: emulated clusters, other people's libraries, and the benchmarks and reports made with them.

It is not installed. It runs from a clone, by ``make bench``, ``startrail bench`` or ``startrail lab``, and may import
all of startrail. `lab` is an emulated cluster, `peers` call other libraries' attention, `trials` measure, and `report`
turns measurements into numbers, verdicts and a page. `commands` adds to the command line. Start at `trials.suite`.
"""
