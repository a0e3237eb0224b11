"""The lab: a cluster on one machine. Nodes are network namespaces, links have real limits, and traffic is real TCP.

`Cluster` builds one, runs programs and functions on it, and counts what crosses each link.
"""

from startrail.lab.cluster import Cluster, available, own_link_bytes
from startrail.lab.job import JobError
from startrail.lab.supervisor import LabError

__all__ = ["Cluster", "JobError", "LabError", "available", "own_link_bytes"]
