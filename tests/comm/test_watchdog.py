"""The thread that watches lives as long as there is something to watch."""

import threading
from weakref import WeakSet

from startrail.comm import watchdog as watch
from startrail.comm.timing import TIMING


class Looked:
    def __init__(self):
        self.at = threading.Event()

    def check(self):
        self.at.set()


def test_what_is_added_while_the_thread_looks_does_not_end_it(monkeypatch):
    looking, added = threading.Event(), threading.Event()

    class Slow(WeakSet):
        """A set that changes while it is gone through, if it can."""

        def __iter__(self):
            for one in super().__iter__():
                yield one
                looking.set()
                added.wait(0.2)

    monkeypatch.setattr(watch, "WeakSet", Slow)
    monkeypatch.setattr(watch, "_watchdog", None)
    monkeypatch.setattr(TIMING, "slow_wait", 0.04)
    first, second = Looked(), Looked()
    watch.watch(first)
    try:
        assert looking.wait(5)
        watch.watch(second)
        added.set()
        assert second.at.wait(2), "the thread has ended"
        first.at.clear()
        assert first.at.wait(2)
    finally:
        watch._watchdog.stop()
