"""Measures startrail on this machine, or under torchrun on the job's own ranks, devices and links.

May import every package. `engine` measures attention on forked ranks, with `host`, the time in Python; `job` does so
under torchrun, and `train` measures training. `yardstick` is what they share. Benchmarks against other libraries and on
emulated clusters are not installed: see ``workshop/`` in a clone.
"""
