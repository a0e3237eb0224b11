"""Text: what each rank gets, against the files themselves; and what is refused."""

import fcntl
import math
import random
import resource
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import startrail
from startrail.schedule.plan import Plan
from startrail.training.data import texts
from startrail.training.data.sources import find_files
from startrail.training.data.texts import TextData
from tests.helpers import as_rank, write_bytes, write_tokenizer

ONE = startrail.SequenceParallel("1x1")


def text_data(source, *, sp=ONE, length, **options):
    """The data of sequences of ``length`` tokens on the ranks of ``sp``."""
    return TextData(source, sp.sequence(length), **options)


def contents(folder):
    return [file.read_bytes() for file in find_files(str(folder))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes(tmp_path_factory.mktemp("text"), [70, 0, 1, 300, 25, 64])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "startrail" / "tokens"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Every word of the text below and every kind of space is a token; the file asks to cut every text to 2 tokens."""
    words = ["?", "the", "ring", "turns", "round", " ", "\n"]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return write_tokenizer(path, {word: 3 * i for i, word in enumerate(words)}, longest=2)


# --- what is in a batch


def test_an_epoch_has_every_window_once_and_labels_are_the_next_tokens(folder):
    data = text_data(folder, length=23)
    text = b"".join(body[: len(body) - len(body) // 20] for body in contents(folder))  # too few files: ends held out
    assert (data.num_tokens, data.num_samples, data.vocab) == (len(text), len(text) // 23, 256)
    epochs = []
    for epoch in range(2):
        starts = []
        for index in range(epoch * data.num_samples, (epoch + 1) * data.num_samples):
            batch = data.batch(index)
            start = text.index(bytes(batch.tokens[0].tolist()))
            follows = text[start + 1 : start + 24]
            assert batch.labels[0].tolist() == [*follows, *[-100] * (23 - len(follows))]
            assert batch.sequence.documents.tolist() == [0, 23]
            starts.append(start)
        assert sorted(starts) == [23 * i for i in range(data.num_samples)]
        epochs.append(starts)
    assert epochs[0] != epochs[1] != sorted(epochs[1])


def test_other_tokens_have_another_digest(tmp_path):
    file, made = tmp_path / "text", []
    for content in (bytes(1000), bytes(1000), bytes(700) + b"x" + bytes(299)):
        file.write_bytes(content)
        made.append(text_data(str(file), length=10).digest())
    assert made[0] == made[1] != made[2]


def test_the_last_token_of_all_has_no_label(tmp_path):
    file = tmp_path / "ten"
    file.write_bytes(bytes(range(10)))
    batch = text_data(str(file), length=10).batch(0)
    assert batch.labels.tolist() == [[*range(1, 10), -100]]


def test_packed_documents_are_whole_but_where_a_window_ends(tmp_path):
    """No byte twice in all the files, so that a byte tells its document and what follows it."""
    borders = [0, 70, 71, 200, 225, 256]
    for number, (start, stop) in enumerate(pairwise(borders)):
        (tmp_path / str(number)).write_bytes(bytes(range(start, stop)))
    last = [stop - 1 - (stop - start) // 20 for start, stop in pairwise(borders)]
    data = text_data(str(tmp_path), length=30, packed=True)
    assert data.num_samples == 8
    packings = []
    for epoch in range(3):
        seen = []
        for index in range(8 * epoch, 8 * epoch + 8):
            batch = data.batch(index)
            (tokens,), (labels,) = batch.tokens.tolist(), batch.labels.tolist()
            jumps = [i + 1 for i in range(29) if tokens[i] in last]
            assert batch.sequence.documents.tolist() == [0, *jumps, 30]
            assert labels == [-100 if token in last else token + 1 for token in tokens], "also beyond the window's end"
            seen += tokens
        assert len(set(seen)) == 240, "every token once, but for the 5 after the last whole window"
        packings.append({str(data.batch(index).sequence) for index in range(8 * epoch, 8 * epoch + 8)})
    assert packings[0] != packings[1] != packings[2]


def test_a_document_that_ends_with_the_window_leaves_no_empty_document(tmp_path):
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(range(10 * number, 10 * number + 10)))
    data = text_data(str(tmp_path), length=10, packed=True)
    for index in range(3):
        batch = data.batch(index)
        first = batch.tokens[0, 0].item()
        assert batch.sequence.documents.tolist() == [0, 10]
        assert batch.labels.tolist() == [[*range(first + 1, first + 10), -100]]


@settings(max_examples=150, deadline=None)
@given(
    plan=st.sampled_from([*(f"1x{world}" for world in range(1, 10)), "u2/1x2", "u2/1x3", "u2/2x1/u2", "u4/star2"]),
    length=st.integers(1, 120),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    packed=st.booleans(),
    index=st.integers(0, 12),
)
def test_ranks_have_the_shards_of_one_process(folder, plan, length, layout, packed, index):
    settings = dict(length=length, batch=1 if packed else 2, packed=packed, seed=5)
    whole = text_data(folder, **settings).batch(index)
    world = 16 if "star" in plan else Plan.parse(plan).size
    for rank in range(world):
        batch = text_data(folder, sp=as_rank(rank, world, layout, plan), **settings).batch(index)
        assert torch.equal(batch.tokens, batch.sequence.shard(whole.tokens, 1))
        assert torch.equal(batch.labels, batch.sequence.shard(whole.labels, 1, pad_value=-100))
        assert torch.equal(batch.sequence.documents, whole.sequence.documents)


def test_a_rank_reads_its_own_tokens_and_the_next_one_of_each_run(folder, monkeypatch):
    read, original = [], texts._read
    monkeypatch.setattr(texts, "_read", lambda *request: (read.append(request[2]), original(*request))[1])
    data = text_data(folder, sp=as_rank(1, 4), length=160)
    assert not read
    data.batch(0)
    assert sum(read) == 160 // 4 + 2


def test_a_batch_depends_on_its_index_alone(folder):
    arguments = dict(length=23, batch=3, seed=1)
    data = text_data(folder, **arguments)
    forward = [data.batch(index) for index in range(20)]
    for index in random.Random(0).sample(range(20), 20):
        fresh = text_data(folder, **arguments).batch(index)
        assert torch.equal(fresh.tokens, forward[index].tokens) and torch.equal(fresh.labels, forward[index].labels)
        assert torch.equal(data.batch(index).tokens, fresh.tokens)
    single = text_data(folder, length=23, seed=1)
    assert torch.equal(
        torch.cat([single.batch(index).tokens for index in range(60)]), torch.cat([b.tokens for b in forward])
    )
    assert not torch.equal(text_data(folder, length=23, batch=3, seed=2).batch(0).tokens, forward[0].tokens)


@pytest.mark.parametrize("sizes", [[100] * 60, [2000], [2000, 1], [3, 5000, 40, 40, 90, 1200]])
def test_held_out_and_train_are_disjoint_and_together_everything(tmp_path, sizes):
    source = write_bytes(tmp_path, sizes)
    splits = {split: text_data(source, length=1, split=split) for split in ("train", "held-out")}
    found = Counter()
    for data in splits.values():
        found.update((d.path, d.start + i) for d in data._stream.documents for i in range(d.count))
    assert set(found.values()) == {1} and found.total() == sum(sizes)
    share = splits["held-out"].num_tokens / sum(sizes)
    assert 1 / 41 <= share <= 1 / 20


def test_held_out_files_do_not_depend_on_where_the_folder_is(tmp_path):
    chosen = []
    for place in ("here", "elsewhere/deep"):
        source = write_bytes(tmp_path / place, [100] * 60)
        for text in (source, f"{source}/**/*.txt"):
            documents = text_data(text, length=1, split="held-out")._stream.documents
            chosen.append({document.path.name for document in documents})
    assert len(chosen[0]) == 3 and all(names == chosen[0] for names in chosen)


# --- sources


def test_the_standard_library_is_there_without_its_tests():
    files = find_files("stdlib")
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names and files == sorted(files)
    assert not any(part in ("test", "tests", "site-packages") for file in files for part in file.parts[-3:-1])
    data = text_data("stdlib", length=4096)
    assert data.num_tokens > 5e6
    line = data.describe()
    entropy = float(line.split("unigram entropy ")[1].split()[0])
    assert line.startswith("stdlib, train: ") and f"{data.num_tokens:,} bytes" in line
    assert 2.7 < entropy < math.log(256)
    assert "def " in data.decode(data.batch(0).tokens[0])


def test_folders_files_and_globs(tmp_path, monkeypatch):
    write_bytes(tmp_path, [40] * 6)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden").write_text("no")
    (tmp_path / "0" / "folder.txt").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    names = [f"{i % 3}/{i:02}.txt" for i in (0, 3, 1, 4, 2, 5)]
    monkeypatch.chdir(tmp_path)
    assert [file.as_posix() for file in find_files(".")] == names
    assert [str(file.relative_to(tmp_path)) for file in find_files(f"{tmp_path}/*/*.txt")] == names
    assert [file.as_posix() for file in find_files("0/*.txt")] == names[:2]
    assert [file.as_posix() for file in find_files("**/**/*.txt")] == names, "each once"
    assert [file.as_posix() for file in find_files("0/03.txt")] == [names[1]]
    (tmp_path / "a[1]").write_text("a name that looks like a glob")
    assert find_files("a[1]") == [Path("a[1]")]


def test_entropy_of_even_chances_is_their_logarithm(tmp_path):
    (tmp_path / "abcd").write_text("abcd" * 20)
    assert text_data(str(tmp_path), length=2).describe() == (
        f"{tmp_path}, train: 1 files, 76 bytes, unigram entropy 1.386 nats/byte"
    )


def test_bytes_that_are_no_text_decode_to_something(folder):
    data = text_data(folder, length=4)
    assert data.decode([0x61, 0xFF, 0xC3]) == "a��"
    with pytest.raises(ValueError, match="token 256 is not one of 0 to 255"):
        data.decode([1, 256])


# --- mistakes


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(source="/no/such/folder"), "source '/no/such/folder' is not an existing folder, file or glob"),
        (dict(source="/no/such/*.txt"), r"source '/no/such/\*.txt' has no files"),
        (dict(source="x" * 300), "source 'xxx.*' cannot be searched: File name too long"),
        (dict(source=""), "source '' is not the name of"),
        (dict(batch=-1), "batch -1 must be an integer of at least 1"),
        (dict(packed=True, batch=2), "batch 2 must be 1"),
        (dict(split="test"), "split 'test' is not one of train, held-out"),
        (dict(length=1000), "a sequence needs 1,000 tokens, but there are too few: .*, train: 5 files, 438 bytes"),
        (dict(tokenizer="/no/such.json"), "tokenizer '/no/such.json' cannot be loaded: .*No such file"),
    ],
)
def test_mistakes_are_refused_with_their_values(folder, change, message):
    with pytest.raises(ValueError, match=message):
        text_data(**{"source": folder, "length": 10, **change})


@pytest.mark.parametrize("index", [-1, 1.0, None, True])
def test_a_bad_index_is_refused(folder, index):
    with pytest.raises(ValueError, match=f"index {index} must be an integer of at least 0"):
        text_data(folder, length=10).batch(index)


def test_empty_folders_and_empty_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no files"):
        text_data(str(tmp_path), length=1)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"a sequence needs 1 tokens, but there are too few: .* 0 files, 0 bytes"):
        text_data(str(tmp_path), length=1)


def test_too_little_to_hold_anything_out_is_refused(tmp_path):
    source = write_bytes(tmp_path, [7] * 5)
    with pytest.raises(
        ValueError, match=r"a sequence needs 1 tokens, but there are too few: .*held-out: 0 files, 0 bytes"
    ):
        text_data(source, length=1, split="held-out")


def test_a_file_that_shrinks_or_goes_is_noticed(tmp_path):
    file = tmp_path / "text"
    file.write_text("a" * 100)
    data = text_data(str(file), length=90)
    file.write_text("a" * 40)
    with pytest.raises(ValueError, match="text has changed: it has 40 bytes, expected at least 91"):
        data.batch(0)
    file.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*text: No such file"):
        data.batch(0)


# --- tokenizers


TEXT = "the ring turns\nthe ring turns round\n" * 40


def test_a_tokenizer_gives_all_its_tokens_from_a_cache_that_is_made_once(tmp_path, cache, tokenizer, monkeypatch):
    source = tmp_path / "text"
    source.mkdir()
    (source / "a").write_text(TEXT)
    (source / "b").write_text("")
    (source / "c").write_text(TEXT[: len(TEXT) // 2])
    data = text_data(str(source), length=14, tokenizer=tokenizer)
    assert data.vocab == 19, "the largest id counts, not how many there are"
    assert data.num_tokens == 14 * 40 + 14 * 20 - (14 * 40) // 20 - (14 * 20) // 20
    assert sorted(data.batch(0).tokens[0].tolist()) == sorted([3, 15, 6, 15, 9, 18, 3, 15, 6, 15, 9, 15, 12, 18])
    assert data.decode([3, 15, 6]).split() == ["the", "ring"]
    assert "tokens, unigram entropy" in data.describe() and "nats/token" in data.describe()

    monkeypatch.setattr(texts, "_encode", None)  # must not be called again
    again = text_data(str(source), sp=as_rank(1, 2), length=14, tokenizer=tokenizer).batch(3)
    assert torch.equal(again.tokens, again.sequence.shard(data.batch(3).tokens, 1))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    (source / "b").write_text("the ring")
    assert text_data(str(source), length=14, tokenizer=tokenizer).num_tokens == data.num_tokens + 3
    assert len([path for path in cache.iterdir() if not path.suffix]) == 2


def test_long_files_are_tokenised_in_pieces_cut_after_lines(tmp_path, cache, tokenizer, monkeypatch):
    (tmp_path / "text").write_text(TEXT)
    monkeypatch.setattr(texts, "PIECE_CHARACTERS", 30)
    monkeypatch.setattr(texts, "BATCH_PIECES", 3)
    data = text_data(str(tmp_path / "text"), length=14 * 38, tokenizer=tokenizer)
    assert data.batch(0).tokens[0].tolist() == [3, 15, 6, 15, 9, 18, 3, 15, 6, 15, 9, 15, 12, 18] * 38


def test_no_cache_is_left_by_a_full_disk_and_the_next_try_works(tmp_path, cache, tokenizer):
    (tmp_path / "text").write_text(TEXT)
    arguments = dict(source=str(tmp_path / "text"), length=8, tokenizer=tokenizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            ValueError, match=r"cannot write the tokens of 1 files to .*: File too large; free some space"
        ):
            text_data(**arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    next(cache.iterdir()).with_suffix(".part").write_text("what a killed process leaves")
    assert text_data(**arguments).num_tokens == 14 * 38


def test_an_unusable_cache_a_held_lock_and_a_damaged_file_are_reported(tmp_path, cache, tokenizer, monkeypatch):
    (tmp_path / "text").write_text(TEXT)
    arguments = dict(source=str(tmp_path / "text"), length=8, tokenizer=tokenizer)
    text_data(**arguments)
    (path,) = (path for path in cache.iterdir() if not path.suffix)
    body = path.read_bytes()
    for damaged in (body[:-4], body[:3], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"the tokens in {path} are damaged: delete the file"):
            text_data(**arguments)
    path.unlink()
    monkeypatch.setattr(texts, "CACHE_DEADLINE_SECONDS", 0.2)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another process has held .*lock for 0 s"):
            text_data(**arguments)
    assert text_data(**arguments).num_samples > 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "text"))
    with pytest.raises(
        ValueError, match=r"cannot write the tokens of 1 files to .*: Not a directory; .* XDG_CACHE_HOME"
    ):
        text_data(**arguments)


def test_bad_tokenizer_files_and_a_missing_package(tmp_path, folder, monkeypatch):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json' cannot be loaded"):
        text_data(folder, length=10, tokenizer=str(bad))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install 'startrail\[text\]'"):
        text_data(folder, length=10, tokenizer=str(bad))
