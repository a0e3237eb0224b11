import pytest

from startrail.agreement.timing import TIMING


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Ranks compare a slow call after 0.4 s instead of 2 s, and do not wait long for threads that hang at exit."""
    for name, seconds in (("slow_wait", 0.4), ("reminder", 1.0), ("thread_join", 0.5)):
        monkeypatch.setattr(TIMING, name, seconds)
