"""Batches with ever new documents: few graphs, and memory that does not grow."""

from dataclasses import replace
from functools import partial

from startrail.launch.local import run_local
from tests.helpers import FULL
from workshop.trials import batches

BATCHES = 300 if FULL else 60


def test_batches_with_new_documents_are_not_compiled_anew_and_take_no_memory(monkeypatch):
    monkeypatch.setattr(batches, "CONFIG", replace(batches.CONFIG, width=16, layers=1, heads=2, kv_heads=2, hidden=16))
    for found in run_local(partial(batches.train, BATCHES, 2048, "u2/1x2"), 4, deadline=300):
        assert found.packings == BATCHES
        assert found.graphs <= 2, "one for the first number of tokens, one for all others"
        assert found.memory[-1] - found.memory[3] < 8 * 2**20, found.memory
