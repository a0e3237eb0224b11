"""Waits for the comparison of a call between ranks."""

import pytest

from startrail.agreement.comparison import DigestComparison


class Work:
    """Ends, in ``error`` if there is one, just after the first wait was given up."""

    def __init__(self, error):
        self.error, self.waits = error, []

    def wait(self, *timeout):
        self.waits.append(timeout)
        if timeout:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise self.error

    def is_completed(self):
        return True


class Group:
    def __init__(self, error=None):
        self.work = Work(error)

    def allreduce(self, tensors, options):
        return self.work


def test_a_comparison_that_ends_while_its_wait_is_given_up():
    groups = [Group(), Group()]
    comparison = DigestComparison(groups, 7)
    assert comparison.finish(lambda: False) and [len(group.work.waits) for group in groups] == [2, 2]
    comparison = DigestComparison([Group(RuntimeError("Connection closed by peer"))], 7)
    with pytest.raises(RuntimeError, match="Connection closed"):
        comparison.finish(lambda: False)
    comparison = DigestComparison([Group()], 7)
    with pytest.raises(RuntimeError, match="timed out"):
        comparison.finish(lambda: True)
