"""The watchdog's thread runs as long as there is something to watch."""

import threading
from weakref import WeakSet

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
