"""The watchdog's thread runs as long as there is something to watch."""

import subprocess
import sys
import threading
from weakref import WeakSet

import pytest

from startrail.comm import watchdog
from startrail.comm.timing import TIMING


class Watched:
    def __init__(self):
        self.checked = threading.Event()

    def check(self):
        self.checked.set()


def test_adding_an_object_during_a_round_does_not_end_the_thread(monkeypatch):
    iterating, added = threading.Event(), threading.Event()

    class Slow(WeakSet):
        """A set that gives another thread time to change it during iteration."""

        def __iter__(self):
            for watched in super().__iter__():
                yield watched
                iterating.set()
                added.wait(0.2)

    monkeypatch.setattr(watchdog, "WeakSet", Slow)
    monkeypatch.setattr(watchdog, "_watchdog", None)
    monkeypatch.setattr(TIMING, "slow_wait", 0.04)
    first, second = Watched(), Watched()
    watchdog.watch(first)
    try:
        assert iterating.wait(5)
        watchdog.watch(second)
        added.set()
        assert second.checked.wait(2), "the thread has ended"
        first.checked.clear()
        assert first.checked.wait(2)
    finally:
        watchdog._watchdog.stop()


ENDS = """
import os, sys, threading, time, weakref
import torch.distributed as dist
from datetime import timedelta
from startrail.comm import watchdog
from startrail.comm.timing import TIMING

TIMING.thread_join, TIMING.slow_wait = 0.1, 0.04
store, waits = dist.HashStore(), threading.Event()

class Slow:
    def __del__(self, sleep=time.sleep):  # Python is finalizing
        sleep(2.0)

def wait_in_cpp():
    waits.set()
    try:
        store.wait(["never"], timedelta(seconds=1))
    except dist.DistStoreError:
        pass

class Watched:
    def check(self):
        {check}

threading.slow = Slow()
watched = Watched()
{main}
waits.wait()
sys.exit(7)
"""


@pytest.mark.parametrize(
    "check, main",
    [
        ("wait_in_cpp()", "watchdog.watch(watched)"),
        ("pass", "watchdog.run_within(0.1, wait_in_cpp)"),
        ("watchdog.run_within(0.1, wait_in_cpp)", "watchdog.watch(watched)"),
    ],
    ids=["watchdog", "abandoned call", "a call that the watchdog abandons"],
)
def test_a_thread_inside_cpp_does_not_abort_the_exit(check, main):
    """It returns while Python finalizes, unless the exit waits for it."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(check=check, main=main)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 7, done.stderr
