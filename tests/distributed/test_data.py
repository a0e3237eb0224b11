"""Data on real ranks: their parts make up the sequence, and one of them makes the tokenizer's cache for all."""

import pytest
import torch

import startrail
from startrail.local import run_local
from startrail.training import tokenizing
from startrail.training.images import ImageData
from startrail.training.text import TextData
from tests.helpers import write_tokenizer

WORLD = 4


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_parts_of_all_ranks_are_the_sequence_and_its_images(layout):
    one = startrail.SequenceParallel("1x1")
    text, images = dict(length=1001, batch=2, seed=3), dict(size=18, patch=2, batch=2)
    true_text, true_images = TextData("stdlib", one, **text).batch(7), ImageData("photos", one, **images).batch(7)

    def on_rank(rank):
        sp = startrail.SequenceParallel("2x2", layout=layout)
        mine, pictures = TextData("stdlib", sp, **text).batch(7), ImageData("photos", sp, **images).batch(7)
        assert torch.equal(sp.unshard(mine.tokens, 1, 1001), true_text.tokens)
        assert torch.equal(sp.unshard(mine.labels, 1, 1001), true_text.labels)
        assert torch.equal(sp.unshard(mine.positions, 0, 1001), true_text.positions)
        assert torch.equal(sp.unshard(pictures.patches, 1, 81), true_images.patches)

    run_local(on_rank, WORLD)


def test_one_rank_tokenises_while_the_others_wait(tmp_path, monkeypatch):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "ring": 1, "team": 2, " ": 3})
    (tmp_path / "text").write_text("ring team star " * 20_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls, original = [], tokenizing._encode
    monkeypatch.setattr(tokenizing, "_encode", lambda *arguments: (calls.append(1), original(*arguments)))

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x4")
        data = TextData(str(tmp_path / "text"), sp, length=999, tokenizer=tokenizer)
        tokens = sp.unshard(data.batch(0).tokens, 1, 999)
        assert sorted(tokens[0, :6].tolist()) == [0, 1, 2, 3, 3, 3] and torch.equal(tokens[:, 6:], tokens[:, :-6])
        return len(calls)

    assert sum(run_local(on_rank, WORLD)) == 1
