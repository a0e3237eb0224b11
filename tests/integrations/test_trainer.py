"""Hugging Face's Trainer on split sequences: losses, evaluation, gradient norms and weights of one process."""

import os
import random

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'startrail[transformers]')")

from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import startrail
from startrail.integrations import trainer as trainer_module
from startrail.integrations.trainer import StarTrailTrainer
from startrail.integrations.transformers import detach
from startrail.launch.local import run_local
from tests.helpers import FULL, error_of
from tests.integrations.tiny import tiny, tokens

DATA = [dict(input_ids=tokens(1, length, seed=length)[0]) for length in (30, 37, 25, 33, 40, 28, 31, 36)]


def collate(rows):
    """Padded on the right, as Hugging Face's collators do. Without labels, if they are None."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    mask, unlearnt = torch.zeros_like(ids), rows[0].get("labels", ()) is None
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[number, :length], mask[number, :length] = row["input_ids"], 1
        labels[number, :length] = row["input_ids"] if unlearnt else row.get("labels", row["input_ids"])
    return dict(input_ids=ids, attention_mask=mask, **({} if unlearnt else dict(labels=labels)))


def arguments(folder, **options):
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=2) | options
    return TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=2, learning_rate=1e-3, lr_scheduler_type="constant",
        max_steps=4, logging_steps=1, report_to=[], use_cpu=True, seed=1, disable_tqdm=True,
        include_num_input_tokens_seen="non_padding", **options,
    )  # fmt: skip


def history(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    found = [entry[name] for name in ("loss", "grad_norm") for entry in logs if name in entry]
    speed = logs[-1]
    samples = speed["train_samples_per_second"] / speed["train_steps_per_second"]
    counts = [trainer.state.num_input_tokens_seen, trainer.state.total_flos, round(samples)]
    return [*counts, *found, trainer.evaluate()["eval_loss"]]


def as_torchrun(rank, world):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")


def test_training_evaluation_saving_resuming_and_generation(tmp_path):
    data = dict(train_dataset=DATA, eval_dataset=DATA, data_collator=collate)

    def alone(rank):
        as_torchrun(0, 1)
        return history(Trainer(tiny("mistral"), arguments(tmp_path / "alone"), **data))

    (expected,) = run_local(alone, 1)

    def on_rank(rank):
        as_torchrun(rank, 4)
        sp = startrail.SequenceParallel("u2/1x2")
        trainer = StarTrailTrainer(tiny("mistral"), arguments(tmp_path / "split"), **data, sp=sp)
        whole = history(trainer)
        weights = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        again = StarTrailTrainer(tiny("mistral"), arguments(tmp_path / "split"), **data, sp=sp)
        resumed = history(again, str(tmp_path / "split" / "checkpoint-2"))
        same = all(torch.allclose(x, weights[name], atol=1e-6) for name, x in again.model.named_parameters())
        # two groups of two ranks, each with batches of its own
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair = startrail.SequenceParallel("1x2", group=pairs[rank // 2])
        options = dict(per_device_train_batch_size=1, save_strategy="no")
        both = history(StarTrailTrainer(tiny("mistral"), arguments(tmp_path / "both", **options), **data, sp=pair))
        sharded = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["MistralDecoderLayer"]}
        options = dict(fsdp="full_shard auto_wrap", fsdp_config=sharded, save_strategy="no")
        fsdp = history(StarTrailTrainer(tiny("mistral"), arguments(tmp_path / "fsdp", **options), **data, sp=sp))
        refused = error_of(
            lambda: StarTrailTrainer(tiny("llama"), arguments(tmp_path, average_tokens_across_devices=False), sp=sp)
        )
        text = detach(trainer.model).generate(tokens(1, 8), max_new_tokens=4, do_sample=False).tolist()
        return whole, resumed, same, both, fsdp, refused, text

    found = run_local(on_rank, 4)
    from transformers import MistralForCausalLM

    loaded = MistralForCausalLM.from_pretrained(tmp_path / "split" / "checkpoint-4")
    expected_text = loaded.generate(tokens(1, 8), max_new_tokens=4, do_sample=False).tolist()
    for whole, resumed, same, both, fsdp, refused, text in found:
        assert fsdp == pytest.approx(expected, rel=1e-5)
        assert whole == pytest.approx(expected, rel=1e-5)
        assert resumed == pytest.approx(expected, rel=1e-5) and same
        assert both[0] == expected[0], "tokens"
        assert both[2:-1] == pytest.approx(expected[2:-1], rel=1e-5)  # padding and evaluation differ in smaller batches
        assert "average_tokens_across_devices=False would average" in refused
        assert text == expected_text
    assert loaded.config._attn_implementation == "sdpa" and not isinstance(loaded, LlamaForCausalLM)


def test_groups_of_ranks(tmp_path, monkeypatch):
    """Of different sizes they are refused. They are compared in tensors on the trainer's device, as NCCL needs."""

    def gathered(x, group, operation):
        assert x.device.type == "meta"
        return [torch.tensor([first, 1]) for first in (0, 2, 1)]

    def on_rank(rank):
        as_torchrun(rank, 3)
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        sp = startrail.SequenceParallel("1x2" if rank < 2 else "1x1", group=groups[rank // 2])
        text = error_of(lambda: StarTrailTrainer(tiny("llama"), arguments(tmp_path), train_dataset=DATA, sp=sp))
        monkeypatch.setattr(trainer_module, "gather_tensors", gathered)
        return text, trainer_module._groups(sp, torch.device("meta"))

    expected = "ValueError: every sequence needs the same number of ranks, got 2 from rank 0, 1 from rank 2"
    assert run_local(on_rank, 3) == [(expected, (3, index)) for index in (0, 0, 2)]


def random_rows(chance):
    """A few rows, of whose tokens all, some or none have labels."""
    rows = []
    for _ in range(chance.randint(1, 11)):
        ids = tokens(1, chance.randint(2, 20), seed=chance.randrange(1000))[0]
        share = chance.choice((0, 0, 0.3, 1))
        learnt = torch.tensor([chance.random() < share for _ in ids])
        rows.append(dict(input_ids=ids, labels=ids.masked_fill(~learnt, -100)))
    return rows


@pytest.mark.parametrize("world, ranks", [(2, 2), (4, 2), (5, 5), (4, 1)] if FULL else [(3, 3), (4, 2)])
def test_evaluation_is_that_of_one_process(world, ranks, tmp_path):
    """Also with several groups of ranks: one process then has the batches of all of them."""
    chance = random.Random(world)
    cases = [(random_rows(chance), chance.randint(1, 4)) for _ in range(40 if FULL else 12)]
    cases.append(([dict(row, labels=None) for row in random_rows(chance)], 2))

    def evaluated(kind, rows, batch, **options):
        given = TrainingArguments(str(tmp_path), per_device_eval_batch_size=batch, report_to=[], use_cpu=True)
        trainer = kind(tiny("llama"), given, eval_dataset=rows, data_collator=collate, **options)
        return trainer.evaluate().get("eval_loss")

    def alone(rank):
        as_torchrun(0, 1)
        return [evaluated(Trainer, rows, batch * world // ranks) for rows, batch in cases]

    (expected,) = run_local(alone, 1)

    def on_rank(rank):
        as_torchrun(rank, world)
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        sp = startrail.SequenceParallel(f"1x{ranks}", group=groups[rank // ranks])
        return [evaluated(StarTrailTrainer, rows, batch, sp=sp) for rows, batch in cases]

    assert expected[-1] is None
    for losses in run_local(on_rank, world):
        assert losses[-1] is None
        assert losses[:-1] == pytest.approx(expected[:-1], rel=1e-5, nan_ok=True)


def test_a_loss_function_of_the_program_is_refused(tmp_path):
    """It would shift labels that are shifted already."""

    def on_rank(rank):
        as_torchrun(0, 1)
        given = dict(train_dataset=DATA, sp=startrail.SequenceParallel("1x1"))
        function = lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()  # noqa: E731
        return error_of(
            lambda: StarTrailTrainer(tiny("llama"), arguments(tmp_path), compute_loss_func=function, **given)
        )

    (text,) = run_local(on_rank, 1)
    assert text.startswith("ValueError: compute_loss_func would get the logits of this rank's tokens, with labels that")


def test_a_lost_peer_raises_before_the_weights_change(tmp_path, monkeypatch):
    def lost(sp):
        raise startrail.PeerError("rank 3 is gone")

    monkeypatch.setattr(startrail.SequenceParallel, "check", lost)

    def on_rank(rank):
        as_torchrun(0, 1)
        sp = startrail.SequenceParallel("1x1")
        trainer = StarTrailTrainer(
            tiny("mistral"), arguments(tmp_path), train_dataset=DATA, data_collator=collate, sp=sp
        )
        before = [x.detach().clone() for x in trainer.model.parameters()]
        text = error_of(trainer.train)
        return text, all(map(torch.equal, before, trainer.model.parameters()))

    assert run_local(on_rank, 1) == [("PeerError: rank 3 is gone", True)]
