"""Checkpoints that are damaged, foreign or crafted: refused by name, set aside, and never trusted."""

import hashlib
import json
import pickle
import random
import shutil

import pytest

from startrail.cli import main
from startrail.training.checkpoints.contents import read_state
from startrail.training.recipes import RECIPES
from tests.cli.test_train import TINY
from tests.helpers import refusal


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps with a checkpoint of each, and the command that continues it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the ring turns, the team waits, the ring turns on\n" * 100)
    argv = ["train", *TINY, "--data", str(folder / "text.txt"), "--save_every", "1", "--sample", "0"]
    assert main([*argv, "--out", str(folder / "run")]) == 0
    return folder / "run", argv


def copy_of(trained, tmp_path):
    run, argv = trained
    shutil.copytree(run, tmp_path / "run")
    out = tmp_path / "run"
    return out / "checkpoints", [*argv, "--out", str(out), "--steps", "4"]


def sign(path, state):
    """Write the text of a checkpoint's state, with the right checksum."""
    (path / "state.json").write_text(state)
    sums = [line for line in (path / "SHA256SUMS").read_text().splitlines() if "state.json" not in line]
    sums.append(f"{hashlib.sha256(state.encode()).hexdigest()}  state.json")
    (path / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def flip(path, chance):
    """Change one bit of a file."""
    contents = bytearray(path.read_bytes())
    contents[chance.randrange(len(contents))] ^= 1 << chance.randrange(8)
    path.write_bytes(contents)


def test_every_flipped_bit_is_found(trained, tmp_path):
    folder, _ = copy_of(trained, tmp_path)
    path = folder / "step-00000002"
    assert read_state(path).step == 2
    chance = random.Random(0)
    for file in [*path.iterdir()] * 25:
        whole = file.read_bytes()
        flip(file, chance)
        with pytest.raises(ValueError, match="step-00000002"):
            read_state(path)
        file.write_bytes(whole)
    assert read_state(path).step == 2


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(trained, tmp_path, capfd):
    safetensors = pytest.importorskip("safetensors.torch")
    folder, argv = copy_of(trained, tmp_path)
    chance = random.Random(1)
    flip(folder / "step-00000002" / "part-00000.bin", chance)
    problem = f"checkpoint {folder / 'step-00000002'} cannot be used: part-00000.bin has changed since it was written"
    capfd.readouterr()
    file = tmp_path / "model.safetensors"
    assert problem in refusal(["export", str(folder / "step-00000002"), str(file)], capfd)
    assert main(["export", str(folder.parent), str(file)]) == 0
    said = capfd.readouterr().out
    assert f"{problem}; used the one before it" in said and "tensors of step 1" in said
    assert safetensors.load_file(file)["embedding.weight"].shape == (256, 16)
    assert main(argv) == 0
    out, error = capfd.readouterr()
    assert f"{problem}; renamed it to unusable-00000002; the run continues from step 1" in error
    assert "after step 1" in out
    lines = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4]
    assert lines[1]["loss"] == lines[2]["loss"], "the step that is repeated is the same"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004", "unusable-00000002"]


def test_damaged_and_foreign_checkpoints_are_refused_and_left_alone(trained, tmp_path, capfd):
    folder, argv = copy_of(trained, tmp_path)
    shutil.rmtree(folder / "step-00000001")
    folder = folder / "step-00000002"
    capfd.readouterr()
    whole = {path: path.read_bytes() for path in folder.iterdir()}

    def refused(message):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        assert message in refusal(argv, capfd)
        assert before == {path: path.read_bytes() for path in folder.iterdir()}
        for path, contents in whole.items():
            path.write_bytes(contents)

    part = folder / "part-00000.bin"
    part.write_bytes(whole[part][:-10])
    refused(f"cannot be used: part-00000.bin has {len(whole[part]) - 10:,} bytes, not {len(whole[part]):,}")
    part.unlink()
    refused("cannot be used: part-00000.bin is missing")
    (folder / "state.json").write_text('{"format": "other"}')
    refused("cannot be used: state.json has changed")
    (folder / "SHA256SUMS").unlink()
    refused("cannot be used: SHA256SUMS is missing")
    state = '{"format": "startrail checkpoint 3"}'
    sign(folder, state)
    refused("its format is 'startrail checkpoint 3', this version reads 'startrail checkpoint 2'")
    state = json.loads(whole[folder / "state.json"])
    state["tensors"]["model.embedding.weight"]["pieces"][0][0] = "../../metrics.jsonl"
    sign(folder, json.dumps(state))
    refused("'../../metrics.jsonl', which is not a file of this checkpoint")


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "part-00000.bin", "state.json", "SHA256SUMS"])
def test_a_foreign_checkpoint_runs_no_code(name, trained, tmp_path, capfd):
    """Also where it claims to be ours."""
    folder, argv = copy_of(trained, tmp_path)
    shutil.rmtree(folder / "step-00000001")
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for path in (folder / "step-00000002").iterdir():
        if name in (".metadata", "__0_0.distcp"):
            path.unlink()
    (folder / "step-00000002" / name).write_bytes(bomb)
    if name.endswith(("data", "distcp")):
        files = {path.name: path.stat().st_size for path in (folder / "step-00000002").iterdir()}
        recipe = RECIPES["gpt-tiny"].as_dict()
        state = {"format": "startrail checkpoint 1", "step": 2, "recipe": recipe, "files": files}
        (folder / "step-00000002" / "state.json").write_text(json.dumps(state))
    capfd.readouterr()
    refusal(argv, capfd)
    refusal(["export", str(folder.parent), str(tmp_path / "model.safetensors")], capfd)
    assert not (tmp_path / "exploded").exists()


def halves(state):
    """The index with one tensor's first half twice and its second half never."""
    entry = state["tensors"]["model.embedding.weight"]
    ((file, start, (row, column), (rows, columns)),) = entry["pieces"]
    entry["pieces"] = [[file, start, [row, column], [rows // 2, columns]]] * 2


def outside(state):
    state["tensors"]["model.embedding.weight"]["pieces"][0][2] = [-1, 0]


def no_dtype(state):
    state["tensors"]["model.embedding.weight"]["dtype"] = "Tensor"


NOT_AN_ENTRY = "state.json: the entry of model.embedding.weight is not a dtype, a shape and pieces of whole rows"


@pytest.mark.parametrize(
    "craft, message",
    [
        (halves, "pieces of model.embedding.weight overlap or leave a gap at row 128"),
        (outside, NOT_AN_ENTRY),
        (no_dtype, NOT_AN_ENTRY),
        (None, "state.json is not a JSON table"),
    ],
)
def test_crafted_checkpoints_are_set_aside(craft, message, trained, tmp_path, capfd):
    """Their checksums are right."""
    folder, argv = copy_of(trained, tmp_path)
    path = folder / "step-00000002"
    if craft is None:
        sign(path, "[" * 100_000)
    else:
        state = json.loads((path / "state.json").read_text())
        craft(state)
        sign(path, json.dumps(state))
    capfd.readouterr()
    assert message in refusal(["export", str(path), str(tmp_path / "model.safetensors")], capfd)
    assert main(argv) == 0
    error = capfd.readouterr().err
    assert message in error and "renamed it to unusable-00000002; the run continues from step 1" in error


def test_symbolic_links_are_not_followed(trained, tmp_path, capfd):
    folder, argv = copy_of(trained, tmp_path)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    lock = folder.parent / ".lock"
    lock.unlink()
    lock.symlink_to(precious / "file")
    capfd.readouterr()
    assert f"{lock} is a symbolic link, not a regular file" in refusal(argv, capfd)
    lock.unlink()
    for name in (".writing-00000003", ".removing-00000001", "unusable-00000002"):
        (folder / name).symlink_to(precious)
    flip(folder / "step-00000002" / "part-00000.bin", random.Random(0))
    assert main(argv) == 0
    assert (precious / "file").read_text() == "precious" and [path.name for path in precious.iterdir()] == ["file"]
    assert not any(path.is_symlink() for path in folder.iterdir())
