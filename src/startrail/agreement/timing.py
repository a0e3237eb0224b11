"""Every waiting time of ``agreement``, ``transport`` and ``launch``, in seconds.

Code reads ``TIMING.name`` when it waits. A test therefore changes one attribute of ``TIMING``, and the ranks that it
forks inherit the change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timing:
    # transfers and calls
    slow_wait: float = 2.0  # before a rank that waits compares its call with the other ranks
    longest_look: float = 5.0  # between two such looks
    compiling: float = 600.0  # for kernels that compile on some ranks before their first pass; the others wait
    reminder: float = 5.0  # before a rank that waits logs what it waits for
    store_answer: float = 2.0  # for a store whose host may hang
    explanation: float = 8.0  # for the ranks of a failed call to store what they called
    settle: float = 0.3  # for the ranks of a call that has failed on all of them to store their records
    poll: float = 0.001  # between two looks at a store or a work; grows up to longest_poll
    longest_poll: float = 0.05
    # ends
    thread_join: float = 5.0  # for a thread when the program ends, before that is logged
    last_join: float = 60.0  # for such a thread in all
    abort: float = 30.0  # for aborting the process groups of an instance
    # added to NCCL's own timeout, which counts from when the host posts, far ahead of the device, and whose end kills
    # the process without naming the peer
    nccl_grace: float = 600.0
    # the launchers' heartbeats
    heartbeat: float = 1.0  # between two heartbeats
    missing: float = 5.0  # before a rank without heartbeat or progress is reported
    missing_at_start: float = 20.0  # the same before its first heartbeat: many ranks may share few cores
    missing_again: float = 60.0  # between two reports about the same ranks
    join_poll: float = 0.01  # between two looks for ranks that have not joined yet
    # forked ranks
    first_message: float = 120.0  # for the address of the store
    last_message: float = 1.0  # for the death of the rank that made another one fail
    supervise: float = 0.5  # between two calls of run_local's callback

    @property
    def watch_interval(self) -> float:
        """Between two rounds of the watchdog's thread."""
        return self.slow_wait / 4

    @property
    def report(self) -> float:
        """For the rank that reports before the others exit, on a busy machine too."""
        return 3 * self.heartbeat


TIMING = Timing()
