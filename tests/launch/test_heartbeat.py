"""Ranks that do not start, hang or lose their store are named, and the others exit."""

import threading
import time

import pytest
from torch.distributed import HashStore

from startrail.agreement.timing import TIMING
from startrail.launch import heartbeat
from startrail.launch.heartbeat import Heartbeat, HeartbeatMonitor, WaitLimit
from startrail.launch.torchrun import JoinError, StoreBoard, agree_on_prefix

LIMIT = WaitLimit(0.6, "startrail check", "--deadline")


def test_restarted_ranks_agree_on_a_new_prefix_whatever_is_left_in_the_store():
    store = HashStore()
    store.set("startrail/request/2", "a token of a rank that died")
    prefixes = []
    for _ in range(2):
        agreed = [None] * 3

        def on_rank(rank, agreed=agreed):
            agreed[rank] = agree_on_prefix(store, rank, 3, WaitLimit(600, "startrail check", "--deadline"))

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in (2, 0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert agreed[0] is not None and len(set(agreed)) == 1
        prefixes.append(agreed[0])
    assert prefixes[0] != prefixes[1]


def test_ranks_that_do_not_start_are_named_with_the_command_and_its_option(monkeypatch, capfd):
    monkeypatch.setattr(TIMING, "missing", 0.1)
    store = HashStore()
    store.set("startrail/request/2", "a token of a rank that died")
    with pytest.raises(JoinError, match=r"^ranks 1, 2 did not join within 0.01 minutes \(--deadline\)$"):
        agree_on_prefix(store, 0, 3, LIMIT)
    assert capfd.readouterr().err == "startrail check: still waiting for ranks 1, 2 (not started yet)\n"
    with pytest.raises(JoinError, match=r"^rank 0 did not answer rank 1 within 0.01 minutes \(--deadline\)$"):
        agree_on_prefix(HashStore(), 1, 3, LIMIT)


def test_ranks_without_a_report_exit_after_the_one_that_reports(monkeypatch, capfd):
    """A launcher kills all ranks when the first one exits: the report would be lost."""
    done = []
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: done.append(f"exit {code}"))
    monkeypatch.setattr(heartbeat.time, "sleep", lambda seconds: done.append(seconds))
    heartbeat.exit_rank(LIMIT, "rank 1 hangs")
    assert done == ["exit 1"] and capfd.readouterr().err == "startrail check: rank 1 hangs\n"
    heartbeat.exit_rank(LIMIT)
    assert done[1:] == [TIMING.report, "exit 1"] and TIMING.report > 2 * TIMING.heartbeat


def test_ranks_without_a_parent_name_the_silent_rank_and_exit(monkeypatch, capfd):
    """As under torchrun: rank 1 sends no more heartbeats, which rank 0 sees in the store."""
    exited = threading.Event()
    for name, seconds in (("heartbeat", 0.02), ("missing", 0.2)):
        monkeypatch.setattr(TIMING, name, seconds)
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: exited.set())
    store = HashStore()
    boards = [StoreBoard(store, rank, 2) for rank in range(2)]
    boards[1].write(1, heartbeats=7, progress=20, step=5)
    monitor = HeartbeatMonitor(boards[0], LIMIT)
    sender = Heartbeat(boards[0], 0, lambda: heartbeat.report_or_exit(monitor, 0))
    sender.advance(5)
    assert exited.wait(20)
    sender.stop()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "startrail check: still waiting for rank 1 (silent for 0 s, in step 5)"
    assert (
        "startrail check: rank 1 made no progress within 0.01 minutes (--deadline): silent for 1 s, in step 5" in lines
    )


class BlockingBoard:
    """A board in a store whose host can be stopped."""

    world = 2

    def __init__(self):
        self.answers, self.heartbeats = threading.Event(), []
        self.answers.set()

    def write(self, rank, heartbeats, progress, step):
        if heartbeats > 0:
            self.answers.wait()
        self.heartbeats.append(heartbeats)


def test_a_silent_store_is_named_and_the_rank_exits(monkeypatch, capfd):
    exited = threading.Event()
    for name, seconds in (("heartbeat", 0.02), ("missing", 1.0), ("thread_join", 0.1)):
        monkeypatch.setattr(TIMING, name, seconds)
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: exited.set())
    board = BlockingBoard()
    sender = Heartbeat(board, 1, None, "rank 0", WaitLimit(3.0, "startrail check", "--deadline"))
    for step in range(100):  # no report while the rank makes progress
        sender.advance(step)
        if step == 10:
            board.answers.clear()
        time.sleep(0.02)
    assert capfd.readouterr().err == "" and not exited.is_set()
    assert exited.wait(20)
    sender.stop()
    assert -1 not in board.heartbeats
    board.answers.set()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("startrail check: still waiting for rank 0, which holds the store (silent for ")
    assert lines[1].startswith(
        "startrail check: rank 0, which holds the store, made no progress within 0.05 minutes (--deadline): silent for "
    )


def test_the_last_status_of_a_rank_is_that_it_has_ended():
    """A pending heartbeat is written first, or a rank that has finished would look silent."""
    board = BlockingBoard()
    board.answers.clear()
    threading.Timer(0.1, board.answers.set).start()
    Heartbeat(board, 0).stop()
    time.sleep(0.2)
    assert board.heartbeats[-1] == -1, board.heartbeats
