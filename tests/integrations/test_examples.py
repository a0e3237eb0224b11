"""The examples run, learn, and give on four ranks what they give on one."""

import os
import re
import runpy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import startrail
from startrail.cli import main
from startrail.launch.local import run_local
from tests.helpers import ROOT

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "first")  # tests/test_docs.py


def test_examples_are_short():
    recipes = [*(ROOT / "examples" / "recipes").glob("*.py")]  # test_torchtitan.py, test_axolotl.py, test_pipeline.py
    assert len(EXAMPLES) == 7 and len(recipes) == 3
    assert all(len(path.read_text().splitlines()) < 100 for path in (*EXAMPLES, *recipes))


def test_examples_check_that_no_peer_was_lost_before_weights_change():
    loops = [text for path in EXAMPLES if "optimizer.step()" in (text := path.read_text())]
    guide = (ROOT / "docs" / "integrations.md").read_text()
    for text in (*loops, guide):
        assert re.findall(r"\n *sp\.check\(\).*\n *optimizer\.step\(\)", text), text
        assert text.count("optimizer.step()\n") == text.count("sp.check()")
    assert len(loops) == 5, "the others use a trainer, or do not train"


def test_verify_knows_the_hybrid_example_and_mistakes_in_it(tmp_path, capsys):
    text, faulty = (ROOT / "examples" / "own_hybrid.py").read_text(), tmp_path / "faulty.py"
    faults = {
        "startrail.sum_gradients(model.parameters(), sp.group)  # (4)": ("pass", "gradients are not summed over ranks"),
        "startrail.global_mean(loss_sum, (labels != -100).sum(), sp.group)": (
            "loss_sum / (labels != -100).sum()",
            "losses are averaged on each rank",
        ),
    }
    for line, (mistake, named) in faults.items():
        assert line in text
        faulty.write_text(text.replace(line, mistake))
        assert main(["verify", f"{faulty}:make", "--ranks", "2"]) == 1
        assert named in capsys.readouterr().out
    assert main(["verify", f"{ROOT / 'examples' / 'own_hybrid.py'}:make", "--ranks", "3"]) == 0
    assert capsys.readouterr().out.startswith("same: ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_gives_on_four_ranks_what_it_gives_on_one(path):
    torch.set_num_threads(1)
    main = runpy.run_path(str(path), run_name="example")["main"]

    def on_rank(rank, world):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
        return main("u2/1x2" if world == 4 else "1x1")

    (alone,) = run_local(lambda rank: on_rank(rank, 1), 1)
    everyone = run_local(lambda rank: on_rank(rank, 4), 4)
    for ours in everyone:
        assert ours == pytest.approx(alone, rel=2e-4, abs=1e-6)
    if path.stem != "rl_log_probs":
        assert alone[-1] < alone[0] - 0.3


def test_a_longer_context_gives_on_four_ranks_what_it_gives_on_one(monkeypatch, tmp_path):
    """examples/long_sft with few and short steps: the same counts of right answers, a plot and an adapter."""
    pytest.importorskip("peft", reason="peft is not installed (make setup installs it)")
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(ROOT / "examples" / "long_sft")
    example = runpy.run_path(str(ROOT / "examples" / "long_sft" / "train.py"), run_name="example")

    def on_rank(plan, rank):
        return example["main"](plan, short_steps=3, long_steps=2, long=2048, out=str(tmp_path / plan[:2]))

    (alone,) = run_local(partial(on_rank, "1x1"), 1)
    everyone = run_local(partial(on_rank, "u2/1x2"), 4)
    assert all(ours == pytest.approx(alone, abs=0.02) for ours in everyone)
    assert "facts retrieved (%)" in (tmp_path / "u2" / "report.html").read_text()
    assert (tmp_path / "u2" / "adapter" / "adapter_config.json").exists()
    adapter = load_file(tmp_path / "u2" / "adapter" / "adapter_model.safetensors")
    assert sum(bool(x.any()) for name, x in adapter.items() if "lora_B" in name) == 8, "all have learnt something"


def test_three_lines_of_the_readme():
    """The block for Hugging Face models, with a small model of 32 heads."""
    _, block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    config = LlamaConfig(
        vocab_size=32, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    ids = torch.randint(32, (1, 20))
    names = {"startrail": startrail, "model": LlamaForCausalLM(config), "ids": ids}
    exec(block, names)
    assert names["loss"].requires_grad
