"""Checkpoints and folders of runs that someone has crafted: one clear line, no endless reading, nothing followed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest
import torch

from startrail.cli import main
from startrail.launch.local import run_local
from startrail.launch.signals import Stop
from startrail.training.checkpoints.saving import Checkpoints
from startrail.training.recipes import RECIPES
from startrail.training.tasks import make_model
from tests.cli.test_checkpoints import copy_of, sign, trained  # noqa: F401, a fixture
from tests.helpers import FULL, eventually, refusal, start

CASES = 1000 if FULL else 300


@contextlib.contextmanager
def ends_within(seconds: int):
    """Raise in the test, rather than let it read for ever."""

    def fail(number, frame):
        raise AssertionError(f"not done after {seconds} s")  # an error that nothing handles

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# --- files that are not what they seem


def link(path, aside):
    path.symlink_to(aside)


def link_to_zeros(path, aside):
    path.symlink_to("/dev/zero")


def dangling_link(path, aside):
    path.symlink_to(path.parent / "nothing")


def fifo(path, aside):
    os.mkfifo(path)


def zeros(path, aside):
    try:
        os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def unix_socket(path, aside):
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):  # its path may have 107 bytes
        listener.bind(path.name)


def folder_with_it(path, aside):
    path.mkdir()
    (path / path.name).write_bytes(b"" if aside.is_dir() else aside.read_bytes())


def other_size(change):
    def make(path, aside):
        shutil.copy(aside, path)
        os.truncate(path, max(0, path.stat().st_size + change))

    make.__name__ = f"size{change:+}"
    return make


FILES = ("part-00000.bin", "state.json", "SHA256SUMS")
KINDS = (
    *(link, link_to_zeros, dangling_link, fifo, zeros, unix_socket, folder_with_it),
    *(other_size(change) for change in (-(10**9), -1, 1, 2**42)),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", FILES)
def test_only_regular_files_of_the_right_size_are_read(name, kind, trained, tmp_path, capfd):  # noqa: F811
    folder, argv = copy_of(trained, tmp_path)
    path = folder / "step-00000002"
    aside = tmp_path / "aside"
    (path / name).rename(aside)
    kind(path / name, aside)
    capfd.readouterr()
    with ends_within(60):
        error = refusal(["export", str(path), str(tmp_path / "model.safetensors")], capfd)
        assert f"checkpoint {path} cannot be used: " in error and name in error, error
        assert main(argv) == 0
    assert "renamed it to unusable-00000002; the run continues from step 1" in capfd.readouterr().err


def test_hard_links_are_regular_files(trained, tmp_path):  # noqa: F811
    folder, argv = copy_of(trained, tmp_path)
    for number, path in enumerate((folder / "step-00000002").iterdir()):
        os.link(path, tmp_path / str(number))
    assert main(["export", str(folder.parent), str(tmp_path / "model.safetensors")]) == 0
    assert main(argv) == 0


def test_folders_of_a_run_are_not_links(trained, tmp_path, capfd):  # noqa: F811
    """A link to the run itself is the user's, and followed."""
    folder, argv = copy_of(trained, tmp_path)
    step, aside, file = folder / "step-00000002", tmp_path / "aside", str(tmp_path / "model.safetensors")
    step.rename(aside)
    step.symlink_to(aside)
    (tmp_path / "mine").symlink_to(folder.parent)
    capfd.readouterr()
    assert main(["export", str(tmp_path / "mine"), file]) == 0
    assert "step-00000002 is a symbolic link, or not a folder; used the one before it" in capfd.readouterr().out
    step.unlink()
    aside.rename(step)
    folder.rename(aside)
    folder.symlink_to(aside)
    for command in (["export", str(folder.parent), file + "2"], argv):
        assert "checkpoints is a symbolic link, or not a folder" in refusal(command, capfd)
    assert sorted(path.name for path in aside.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_signal_ends_any_read(trained, tmp_path):  # noqa: F811
    """A tensor of 4 TiB, in a file that has this size and takes no space."""
    folder, argv = copy_of(trained, tmp_path)
    path = folder / "step-00000002"
    state = json.loads((path / "state.json").read_text())
    rows = 2**40
    state["tensors"]["more"] = {"dtype": "float32", "shape": [rows], "pieces": [["more.bin", 0, [0], [rows]]]}
    sign(path, json.dumps(state))
    with (path / "SHA256SUMS").open("a") as sums:
        sums.write("0" * 64 + "  more.bin\n")
    with (path / "more.bin").open("wb") as file:
        file.truncate(4 * rows)
    export = ["export", str(path), str(tmp_path / "model.safetensors")]
    for command, code, said in (
        ([*argv, "--ranks", "2", "--plan", "1x2", "--zero", "2"], 143, "stopped while it was reading checkpoints"),
        (export, -signal.SIGTERM, ""),
    ):
        process = start([sys.executable, "-m", "startrail.cli", *command])
        assert eventually(lambda: is_open(path / "more.bin")), process.communicate(timeout=1)
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
        assert process.returncode == code, out + error
        assert said in error and error.count("\n") == bool(said)
        assert eventually(lambda: not is_open(path / "more.bin"))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


def is_open(path: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if any(os.readlink(descriptor) == str(path) for descriptor in (process / "fd").iterdir()):
                return True
    return False


# --- what state.json says

ODD = [
    *(None, True, False, -1, 0, 1, 2, 1.5, float("nan"), float("inf"), 2**31, 2**63, 10**40, -(10**40)),
    *("", "2", "x", "gpt-tiny", "../../metrics.jsonl", "\x1b[2J", "one\ntwo", "\ud800", "%s{0}", "y" * 10_000),
    *([], [[]], [0], [-1], [None], {}, {"a": 1}, {"dtype": 1}, [["part-00000.bin", 0, [0], [1]]]),
]


def places(value, path=()):
    """The path of every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield (*path, key)
        yield from places(inside, (*path, key))


def crafted(state, chance):
    """Change one to three values of a state: others, missing, doubled, unknown."""
    state = json.loads(json.dumps(state))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        of_head = [path for path in places(state) if path[0] != "tensors"]
        path = chance.choice(of_head if chance.random() < 0.5 else list(places(state)))
        owner = state
        for key in path[:-1]:
            owner = owner[key]
        change = chance.choice(("other", "other", "other", "missing", "double", "unknown", "swap"))
        if change == "missing":
            del owner[path[-1]]
        elif change == "double" and isinstance(owner, list):
            owner.append(owner[path[-1]])
        elif change == "unknown" and isinstance(owner, dict):
            owner[chance.choice(("extra", "\x1b[2J", "one\ntwo", "\ud800"))] = chance.choice(ODD)
        elif change == "swap":
            other = chance.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
            owner[path[-1]], owner[other] = owner[other], owner[path[-1]]
        else:
            owner[path[-1]] = chance.choice(ODD)
        if not list(places(state)):
            break
    return state


def test_what_a_state_says_is_used_or_refused_in_one_clear_line(trained, tmp_path, capfd):  # noqa: F811
    """By ``export``, and by a run that resumes."""
    pytest.importorskip("safetensors")
    folder, _ = copy_of(trained, tmp_path)
    shutil.rmtree(folder / "step-00000001")
    path = folder / "step-00000002"
    whole = json.loads((path / "state.json").read_text())
    fields = {key: value for key, value in whole["recipe"].items() if key not in ("name", "steps", "out")}
    recipe = RECIPES["gpt-tiny"].with_({**fields, "out": str(folder.parent)})

    def unclear(text: str) -> bool:
        """An error of Python itself does not name the checkpoint."""
        return not (str(path) in text and len(text) < 600 and text.isprintable())

    def on_rank(rank):
        chance, wrong, refused = random.Random(0), [], 0
        model = make_model(recipe.config)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(CASES):
            state = crafted(whole, chance)
            sign(path, json.dumps(state))
            checkpoints = Checkpoints(recipe, whole["data_size"], Stop())
            try:
                checkpoints.prepare(0)
                checkpoints.load(model, optimizer)
            except ValueError as error:
                refused += 1
                if unclear(str(error)):
                    wrong.append((number, str(error)))
            finally:
                checkpoints.release()
            file = tmp_path / "model.safetensors"
            code = main(["export", str(path), str(file)])
            said = capfd.readouterr().err
            wrong += [(number, said)] if (code, unclear(said[:-1])) not in ((0, True), (2, False)) else []
            file.unlink(missing_ok=True)
        return wrong, refused

    ((wrong, refused),) = run_local(on_rank, 1, deadline=600)
    assert wrong == []
    assert 0.4 * CASES < refused < 0.98 * CASES, "the changes say little"


# --- files that a run writes


@pytest.mark.parametrize("kind", [link, dangling_link, fifo, zeros, folder_with_it], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock"])
def test_what_is_appended_to_is_a_regular_file(name, kind, trained, tmp_path, capfd):  # noqa: F811
    folder, argv = copy_of(trained, tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (folder.parent / name).unlink()
    kind(folder.parent / name, precious)
    capfd.readouterr()
    with ends_within(60):
        error = refusal(argv, capfd)
    assert f"{folder.parent / name} is a" in error and "not a regular file" in error
    assert precious.read_text() == "precious"


def test_what_is_written_anew_replaces_a_link(trained, tmp_path):  # noqa: F811
    folder, argv = copy_of(trained, tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    names = ["run.html", ".run.html.partial", "trace.json", "sample.txt", ".sample.txt.partial"]
    for name in names:
        (folder.parent / name).unlink(missing_ok=True)
        (folder.parent / name).symlink_to(precious)
    with ends_within(60):
        assert main([*argv, "--sample", "1", "--trace", "3"]) == 0
    assert precious.read_text() == "precious"
    assert [path.name for path in folder.parent.iterdir() if path.is_symlink()] == []
    assert all((folder.parent / name).is_file() for name in names if not name.endswith("partial"))
