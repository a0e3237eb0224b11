"""The watchdog's thread runs as long as there is something to watch."""

import subprocess
import sys
import threading
from weakref import WeakSet

import pytest

from startrail.agreement import watchdog
from startrail.agreement.timing import TIMING


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
from startrail.agreement import watchdog
from startrail.agreement.timing import TIMING

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


SAVES = """
import torch
from types import SimpleNamespace
from startrail.launch.signals import Stop
from startrail.training.checkpoints import saving

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
saving._write_file = lambda path, contents: wait_in_cpp() or ""
model = torch.nn.Linear(2, 2)
saving.Checkpoints(SimpleNamespace(out="{folder}"), 0, Stop()).save(1, model, torch.optim.SGD(model.parameters()))
"""


@pytest.mark.parametrize(
    "check, main",
    [
        ("wait_in_cpp()", "watchdog.watch(watched)"),
        ("pass", "watchdog.run_within(0.1, wait_in_cpp)"),
        ("watchdog.run_within(0.1, wait_in_cpp)", "watchdog.watch(watched)"),
        ("pass", SAVES),
    ],
    ids=["watchdog", "abandoned call", "a call that the watchdog abandons", "a checkpoint that is being written"],
)
def test_a_thread_inside_cpp_does_not_abort_the_exit(check, main, tmp_path):
    """It returns while Python finalizes, unless the exit waits for it."""
    program = ENDS.format(check=check, main=main.format(folder=tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr


def test_threads_that_start_others_at_the_same_time_forget_none(monkeypatch):
    """The exit would not wait for a forgotten one."""
    monkeypatch.setattr(watchdog, "_started", {})
    sys.setswitchinterval(1e-6)
    release, started, starters = threading.Event(), [], 8

    def start_some():
        for _ in range(25):
            watchdog.start_thread(lambda: None, "ends")
            started.append(watchdog.start_thread(release.wait, "waits", release.set))

    try:
        threads = [threading.Thread(target=start_some) for _ in range(starters)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(started) == 25 * starters and not set(started) - watchdog._started.keys()
    finally:
        sys.setswitchinterval(0.005)
        release.set()
