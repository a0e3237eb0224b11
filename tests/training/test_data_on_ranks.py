"""Data on real ranks: their parts make up the sequence, and one of them makes the tokenizer's cache for all."""

import pytest
import torch

import startrail
from startrail.launch.local import run_local
from startrail.training.data import texts
from startrail.training.data.images import ImageData
from startrail.training.data.texts import TextData
from tests.helpers import write_tokenizer

WORLD = 4


def batches(sp):
    """A text of 1,001 tokens, the same packed, and images of 81 patches: none of them divides evenly."""
    text = sp.sequence(1001)
    images = ImageData("photos", sp.sequence(81), size=18, patch=2, batch=2)
    return (
        TextData("stdlib", text, batch=2, seed=3).batch(7),
        TextData("stdlib", text, packed=True, seed=3).batch(7),
        images.batch(7),
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("plan", ["2x2", "u2/1x2"])
def test_the_parts_of_all_ranks_are_the_sequence_and_its_images(plan, layout):
    *true_texts, true_images = batches(startrail.SequenceParallel("1x1"))

    def on_rank(rank):
        *texts, images = batches(startrail.SequenceParallel(plan, layout=layout))
        for mine, true in zip(texts, true_texts, strict=True):
            sequence = mine.sequence
            assert torch.equal(sequence.documents, true.sequence.documents)
            assert torch.equal(sequence.unshard(mine.tokens, 1), true.tokens)
            assert torch.equal(sequence.unshard(mine.labels, 1), true.labels), "shifted before they are cut"
            assert torch.equal(sequence.unshard(sequence.positions(), 0), torch.arange(1001))
        assert torch.equal(images.sequence.unshard(images.patches, 1), true_images.patches)

    run_local(on_rank, WORLD)


def test_one_rank_tokenises_while_the_others_wait(tmp_path, monkeypatch):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "ring": 1, "team": 2, " ": 3})
    (tmp_path / "text").write_text("ring team star " * 20_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls, original = [], texts._encode
    monkeypatch.setattr(texts, "_encode", lambda *arguments: (calls.append(1), original(*arguments)))

    def on_rank(rank):
        sequence = startrail.SequenceParallel("1x4").sequence(999)
        data = TextData(str(tmp_path / "text"), sequence, tokenizer=tokenizer)
        tokens = sequence.unshard(data.batch(0).tokens, 1)
        assert sorted(tokens[0, :6].tolist()) == [0, 1, 2, 3, 3, 3] and torch.equal(tokens[:, 6:], tokens[:, :-6])
        return len(calls)

    assert sum(run_local(on_rank, WORLD)) == 1
