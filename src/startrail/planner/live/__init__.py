"""The planner in a running job: the part that needs torch and the job's process group.

``measure`` times kernels and links and describes the cluster; ``choose`` asks the planner on one rank and shares the
plan with all. It may import ``planner`` and what that may, ``agreement``, ``transport`` and ``kernels``. Start
with ``choose``.
"""
