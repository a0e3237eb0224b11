"""An emulated cluster on one machine: nodes are network namespaces, links have real limits, traffic is real TCP.

`Cluster` builds one, runs programs and functions on it, and counts the bytes on each link. May import ``launch`` and
``planner``. Start reading at `cluster`. `wiring` describes the links, `network` makes them over netlink (in
`namespaces`), `supervisor` is the process that owns them, `job` and `forked` are the jobs, and `cleanup` removes what
killed clusters leave.
"""

from workshop.lab.cluster import Cluster, available, own_link_bytes
from workshop.lab.job import JobError
from workshop.lab.supervisor import LabError

__all__ = ["Cluster", "JobError", "LabError", "available", "own_link_bytes"]
