"""Recipes, the command line and checkpoints: what a user can get wrong is one line, and nothing is lost."""

import json
import os
import subprocess
import sys

import pytest
import torch

from startrail.cli import main
from startrail.training.checkpoints.contents import read_state
from startrail.training.recipes import RECIPES, find
from tests.helpers import ROOT, refusal

TINY = ["--ranks", "1", "--plan", "1x1", "--zero", "0", "--width", "16", "--layers", "1", "--heads", "2"]
TINY += [
    "--kv_heads",
    "1",
    "--hidden",
    "16",
    "--length",
    "64",
    "--steps",
    "2",
    "--sample",
    "4",
    "--evaluate_batches",
    "1",
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the ring turns, the team waits, the ring turns on\n" * 100)
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes_can_be_written_down_and_read_again(name):
    recipe = RECIPES[name]
    fields = {key: value for key, value in recipe.as_dict().items() if key != "name"}
    assert recipe.with_(fields) == recipe
    assert json.loads(json.dumps(recipe.as_dict())) == recipe.as_dict()
    recipe.check_world(recipe.ranks)


def test_recipe_files(tmp_path):
    (tmp_path / "long.json").write_text(json.dumps({"recipe": "dit-tiny", "steps": 7, "patch": 4, "learning_rate": 1}))
    recipe = find(str(tmp_path / "long.json"))
    assert (recipe.name, recipe.out, recipe.steps, recipe.config.patch) == ("long", "runs/long", 7, 4)
    assert recipe.learning_rate == 1.0
    (tmp_path / "odd.json").write_text(json.dumps({"recipe": ["gpt-tiny"]}))
    with pytest.raises(ValueError, match=r"recipe \['gpt-tiny'\] is not one of gpt-tiny"):
        find(str(tmp_path / "odd.json"))
    (tmp_path / "short.toml").write_text('plan = "1x8"\npacked = true\n')
    recipe = find(str(tmp_path / "short.toml"))
    assert (recipe.plan, recipe.packed, recipe.config) == ("1x8", True, RECIPES["gpt-tiny"].config)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["gpt-tine"], "no recipe 'gpt-tine'; did you mean 'gpt-tiny'?"),
        (["nothing"], "no recipe 'nothing'; choose gpt-tiny, gpt-hybrid-tiny"),
        (["missing.toml"], "missing.toml: No such file or directory"),
        (["--learning-rat", "1"], "did you mean --learning-rate?"),
        (["--steps", "many"], "steps 'many' is not an integer"),
        (["--steps", "0"], "steps 0 must be at least 1"),
        (["--packed", "maybe"], "packed 'maybe' is not true or false"),
        (["--learning_rate", "nan"], "learning_rate nan must be a finite number of at least 0"),
        (["--zero", "1"], "zero 1 is not one of 0, 2, 3"),
        (["--on_nan", "ignore"], "on_nan 'ignore' is not one of stop, skip"),
        (["--plan", "2y4"], "cannot read '2y4'"),
        (["--plan", "2x2", "--ranks", "8"], "world size 8 is not teams 2 x ring 2 x heads 1 = 4"),
        (["--plan", "u2/3x1"], "world size 8 is not heads 2 x teams 3 x ring 1 = 6"),
        ([*TINY, "--ranks", "3", "--plan", "u3/1x1"], "2 query heads cannot be split over u3; use u1, u2"),
        (["--data_parallel", "3"], "8 ranks are not a multiple of data_parallel 3"),
        (["--heads", "7"], "width 128 is not a multiple of 7 heads"),
        (["--offload"], "offload moves the inputs of recomputed blocks: it needs recompute"),
        (["dit-tiny", "--length", "64"], "length applies to text only"),
        (["dit-tiny", "--rows", "16"], "rows 16 = columns 8"),
        (["--layout", "spiral"], "layout 'spiral' is not one of"),
        (["--keep", "3"], "did you mean --keep-checkpoints?"),
        (["-x", "1"], "unrecognized arguments: -x"),
        (["gpt-tiny", "extra"], "unrecognized arguments: extra"),
        ([*TINY, "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        ([*TINY, "--out", "/proc/x"], "cannot write to out '/proc/x': No such file or directory; choose another --out"),
        (["--wait_minutes", "0"], "wait_minutes 0 would end the run immediately"),
        ([*TINY, "--data", "."], "out 'runs/gpt-tiny' lies inside data '.'"),
        (["--device", "cuda"], "device cuda needs 8 GPUs, one per rank, found 0: lower --ranks or pass --device cpu"),
        ([*TINY, "--vocab", "100"], "the data has 256 tokens, but the model's vocab is 100"),
        ([*TINY, "--length", "1000000000"], "a sequence needs 1,000,000,000 tokens"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    error = refusal(["train", *argv], capfd)
    assert message in error
    assert error.startswith("startrail train: ")
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_a_run_its_files_its_end_and_its_export(text, tmp_path, capfd):
    safetensors = pytest.importorskip("safetensors.torch")
    out = tmp_path / "run"
    argv = ["train", *TINY, "--data", str(text), "--out", str(out)]
    assert main(argv) == 0
    said = capfd.readouterr().out
    for part in (
        "estimated memory: ",
        "step 2/2",
        "held-out loss",
        "unigram entropy",
        "ln 256 = 5.55",
        "peak memory",
        "continued by",
    ):
        assert part in said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"loss", "gradient_norm", "learning_rate", "tokens_per_second", "waiting", "held_out"} <= lines[-1].keys()
    assert (out / "sample.txt").read_text()

    assert main(argv) == 0
    said = capfd.readouterr().out
    assert f"{out} already has all 2 steps" in said
    assert "held-out loss" not in said and "continued by" not in said, "what is finished is not evaluated again"
    assert "has checkpoints up to step 2: pass --resume true or another --out" in refusal(
        [*argv, "--resume", "false"], capfd
    )
    assert "has a model with hidden 16, not 32" in refusal([*argv, "--hidden", "32"], capfd)
    text.write_text("less\n" * 400)
    assert main([*argv, "--steps", "3", "--warmup", "2", "--seed", "1", "--accumulate", "2", "--sample", "0"]) == 0
    said = capfd.readouterr().err
    assert "seed was 0, is 1: the samples differ from here on" in said
    assert "sequences per step was 1, is 2" in said
    assert "data_size was" in said
    assert "steps was 2, is 3, warmup was 20, is 2: the learning rate of step 3 is 0.0015 instead of 0.000225" in said

    assert "cannot export" in refusal(["export", str(out), str(tmp_path / "nowhere" / "model.safetensors")], capfd)
    file = tmp_path / "model.safetensors"
    assert main(["export", str(out), str(file)]) == 0
    assert "tensors of step 3" in capfd.readouterr().out
    tensors = safetensors.load_file(file)
    assert tensors["embedding.weight"].shape == (256, 16)
    assert "already exists" in refusal(["export", str(out), str(file)], capfd)
    assert "cannot be used: SHA256SUMS is missing" in refusal(["export", str(tmp_path), str(tmp_path / "other")], capfd)
    assert main(["export", str(out), str(tmp_path / "llama")]) == 0
    assert "tensors of step 3" in capfd.readouterr().out
    assert "already exists" in refusal(["export", str(out), str(tmp_path / "llama")], capfd)


def test_what_a_killed_run_left_half_written_is_removed(text, tmp_path, capfd):
    out = tmp_path / "run"
    argv = ["train", *TINY, "--data", str(text), "--out", str(out)]
    assert main(argv) == 0
    (out / "checkpoints" / ".writing-00000003").mkdir()
    (out / "checkpoints" / ".writing-00000003" / "part").write_text("x")
    with (out / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "lo')
    assert main([*argv, "--steps", "3"]) == 0
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert read_state(out / "checkpoints" / "step-00000003").step == 3


def test_a_disk_that_is_too_small_is_found_before_the_start(text, tmp_path, monkeypatch, capfd):
    from startrail.training.checkpoints import saving

    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: Usage)
    assert "has 10.0 B left, a checkpoint needs about 66.0 KiB" in refusal(
        ["train", *TINY, "--data", str(text), "--out", str(tmp_path / "run")], capfd
    )


class Usage:
    free = 10


def test_tensorboard(text, tmp_path):
    pytest.importorskip("tensorboard")
    assert main(["train", *TINY, "--data", str(text), "--out", str(tmp_path / "run"), "--tensorboard"]) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_gpus_are_left_to_torchrun(monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(os, "execv", lambda path, argv: called.append(argv) or exit(0))
    with pytest.raises(SystemExit):
        main(["train", "--device", "cuda", "--ranks", "4", "--plan", "2x2"])
    command = " ".join(called[0])
    assert (
        "-m torch.distributed.run --standalone --nproc-per-node=4 -m startrail.cli train gpt-tiny --device=cuda"
        in command
    )


WITHOUT = """
import json, sys
for name in ("numpy", "rich", "safetensors", "PIL", "skimage", "tokenizers", "tensorboard", "pyroute2", "matplotlib"):
    sys.modules[name] = None
from startrail.cli import main
for argv in json.loads(sys.argv[1]):
    assert main(argv) == 0, argv
"""


def test_torch_alone_is_enough(text, tmp_path):
    """No numpy, and none of the extras. Training twice: to write a checkpoint and to read it."""
    train = ["train", *TINY, "--ranks", "2", "--plan", "1x2", "--zero", "2", "--data", str(text)]
    train += ["--out", str(tmp_path / "run")]
    bench = ["bench", "engine", "--plans", "1x2", "--ranks", "2", "--rounds", "1", "--length", "256"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps([train, [*train, "--steps", "3"], bench])],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout and "single-process SDPA" in done.stdout
