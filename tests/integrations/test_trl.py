"""TRL's GRPO, RLOO, DPO and reward models on split sequences: weights and metrics of one process, and of plain TRL."""

from collections import Counter

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("trl", reason="trl is not installed (make venv installs it)")
pytest.importorskip("peft", reason="peft is not installed (make venv installs it)")

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

import startrail
from examples.trl_sft import tokenizer
from startrail.integrations.transformers import attach
from startrail.integrations.trl import StarTrailPolicyMixin
from startrail.launch.local import run_local
from tests.helpers import FULL, covering, error_of
from tests.integrations.test_trainer import as_torchrun
from tests.integrations.test_trainer_settings import SHARDED
from tests.integrations.tiny import differences, tiny, tokens

disable_progress_bars()
logging.disable_progress_bar()
TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
GENERATE = ("grpo", "rloo")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Of what is logged: speed, and means over tokens, which are means of the turns' means.
UNCOMPARED = ("time", "per_second", "flos", "kl", "entropy", "logits/", "mean_token_accuracy", "clip_ratio")
UNCOMPARED += ("min_reward", "max_reward")


def words(length, seed):
    return "".join(LETTERS[each % 26] for each in tokens(1, length, seed)[0].tolist())


PROMPTS = [words(5 + seed % 7, seed) for seed in range(24)]
PREFERENCES = [
    dict(prompt=prompt, chosen=words(9 + seed % 5, 100 + seed), rejected=words(4 + seed % 9, 200 + seed))
    for seed, prompt in enumerate(PROMPTS)
]


class Scripted:
    """Generates as TRL does, and then takes completions that depend only on the prompt and its repetition."""

    def _generate_single_turn(self, prompt_ids, *arguments, **options):
        result = super()._generate_single_turn(prompt_ids, *arguments, **options)
        seen, completions = Counter(), []
        for ids in map(tuple, prompt_ids):
            seed = hash((ids, seen[ids], self.state.global_step)) % 2**31
            seen[ids] += 1
            completions.append(tokens(1, 3 + seed % 8, seed)[0].clamp(max=28).tolist())
        return (completions, *result[1:]) if isinstance(result, tuple) else completions


def rewards(completion_ids, **others):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trained(folder, name, adapter, recompute, accumulation, wrapper=None, sp=None, batch=2, scripted=True, **options):
    """The weights after three steps, and what was logged."""
    kind, config = TRAINERS[name]
    kind = type("Split", (StarTrailPolicyMixin, kind), {}) if sp is not None else kind
    kind = type("Scripted", (Scripted, kind), {}) if scripted and name in GENERATE else kind
    data = Dataset.from_list([dict(prompt=prompt) for prompt in PROMPTS] if name in GENERATE else PREFERENCES)
    given = dict(train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer())
    if name == "dpo":
        options = dict(beta=0.5) | options
    elif name in GENERATE:
        options = dict(num_generations=2, max_completion_length=10, beta=0.3, shuffle_dataset=False) | options
        given["reward_funcs"] = rewards
    if wrapper == "fsdp":
        options |= dict(fsdp="full_shard auto_wrap", fsdp_config=SHARDED)
    if adapter:
        task = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"  # the former also trains the score head
        given["peft_config"] = LoraConfig(
            r=4, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian", task_type=task
        )
    arguments = config(
        output_dir=str(folder / "out"), per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        gradient_accumulation_steps=accumulation, gradient_checkpointing=recompute, max_steps=3, learning_rate=0.05,
        optim="sgd", lr_scheduler_type="constant", logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=1, bf16=False, **options,
    )  # fmt: skip
    if name == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
        model.score.weight.data = torch.linspace(-1, 1, 32).unsqueeze(0)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = kind(model, args=arguments, **given, **({} if sp is None else dict(sp=sp)))
    trainer.train()
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    weights = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in named}
    logs = {f"{step} {key}": x for step, entry in enumerate(trainer.state.log_history) for key, x in entry.items()}
    logs = {key: x for key, x in logs.items() if not any(part in key for part in UNCOMPARED)}
    return {key: x.detach().clone() for key, x in weights.items()}, logs


def save(folder):
    torch.set_num_threads(1)
    tiny("llama").save_pretrained(folder / "model")


SETTINGS = covering(tuple(TRAINERS), (False, True), (False, True), (1, 2), ("ddp", "fsdp"), (1, 2))


@pytest.mark.parametrize("world, plan", [(2, "1x2"), (4, "u2/1x2")])
def test_weights_are_those_of_one_process(world, plan, tmp_path):
    """Settings: trainer, adapters, recomputation, accumulation, what sums gradients, groups of ranks."""
    save(tmp_path)
    settings = [each for each in SETTINGS if each[-1] < world]
    if world > 2 and not FULL:  # on two ranks, each of those with one group is tried as well
        settings = [each for number, each in enumerate(settings) if each[-1] == 2 or number % 3 == 0]

    def alone(rank):
        as_torchrun(0, 1)
        return {each: trained(tmp_path, *each[:4], batch=2 * world) for each in settings}

    (truths,) = run_local(alone, 1)

    def on_rank(rank):
        as_torchrun(rank, world)
        sequences = {1: startrail.SequenceParallel(plan)}
        if world > 2:
            pairs = [dist.new_group([start, start + 1]) for start in range(0, world, 2)]
            sequences[2] = startrail.SequenceParallel("1x2", group=pairs[rank // 2])
        wrong = []
        for each in settings:
            weights, logs = trained(tmp_path, *each[:5], sequences[each[-1]])
            lines = differences(weights, truths[each][0], 1e-5)
            lines += [
                f"{key}: {logs.get(key)}, one process {x}"
                for key, x in truths[each][1].items()
                if logs.get(key) != pytest.approx(x, rel=1e-4, abs=1e-5)
            ]
            wrong += [f"{each}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world) == [[]] * world


@pytest.mark.parametrize("options", [
    dict(num_iterations=2, steps_per_generation=2, scripted=False),
    dict(loss_type="grpo", importance_sampling_level="sequence", entropy_coef=0.3, num_iterations=2),
])  # fmt: skip
def test_generation_and_losses_are_those_of_trl(options, tmp_path):
    """As plain TRL on two ranks: old log-probabilities, batches that are used twice, sampled completions; and a loss
    with a mean over tokens in it, and with entropies."""
    save(tmp_path)

    def on_rank(rank):
        as_torchrun(rank, 2)
        truth, true_logs = trained(tmp_path, "grpo", False, False, 1, "ddp", **options)
        weights, logs = trained(tmp_path, "grpo", False, False, 1, "ddp", startrail.SequenceParallel("1x2"), **options)
        assert logs == pytest.approx(true_logs, rel=1e-4, abs=1e-5, nan_ok=True)
        return differences(weights, truth, 1e-5)

    assert run_local(on_rank, 2) == [[], []]


def test_mixtures_of_experts_with_their_auxiliary_loss(tmp_path):
    """Each rank's rows have a loss of their own, as in plain TRL on two ranks."""
    torch.set_num_threads(1)
    tiny("qwen3-moe").save_pretrained(tmp_path / "model")

    def on_rank(rank):
        as_torchrun(rank, 2)
        sp, wrong = startrail.SequenceParallel("1x2"), []
        for name in ("grpo", "dpo"):
            given = (tmp_path, name, False, False, 1, "ddp")
            truth, true_logs = trained(*given, router_aux_loss_coef=1.5)
            weights, logs = trained(*given, sp, router_aux_loss_coef=1.5)
            without, _ = trained(*given, router_aux_loss_coef=0.0)
            assert "0 aux_loss" in logs and differences(without, truth, 1e-3), "the loss matters"
            assert logs == pytest.approx(true_logs, rel=1e-4, abs=1e-5)
            wrong += [f"{name} {line}" for line in differences(weights, truth, 1e-5)]
        return wrong

    assert run_local(on_rank, 2) == [[], []]


def test_mistakes(tmp_path):
    save(tmp_path)

    def on_rank(rank):
        as_torchrun(0, 1)
        sp = startrail.SequenceParallel("1x1")
        texts = [
            error_of(lambda name=name, options=options: trained(tmp_path, name, False, False, 1, sp=sp, **options))
            for name, options in (
                ("dpo", dict(precompute_ref_log_probs=True)),
                ("grpo", dict(use_adaptive_entropy=True)),
                ("grpo", dict(top_entropy_quantile=0.5)),
            )
        ]
        model = attach(tiny("llama"), sp)
        kind = type("Split", (StarTrailPolicyMixin, GRPOTrainer), {})
        arguments = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
        data = Dataset.from_list([dict(prompt=prompt) for prompt in PROMPTS])
        given = dict(args=arguments, train_dataset=data, processing_class=tokenizer(), reward_funcs=rewards)
        texts.append(error_of(lambda: kind(model, **given, sp=sp)))
        arguments.deepspeed_plugin = "of accelerate"
        texts.append(error_of(lambda: kind(tiny("llama"), **given, sp=sp)))
        texts.append(error_of(lambda: type("Split", (StarTrailPolicyMixin, KTOTrainer), {})(model, sp=sp)))
        return texts

    (texts,) = run_local(on_rank, 1)
    for text, start in zip(
        texts,
        (
            "precompute_ref_log_probs=True runs before the model is split: leave it at False",
            "use_adaptive_entropy=True would adapt once for each rank's rows",
            "top_entropy_quantile=0.5 would take the quantile of each rank's rows by itself",
            "the model is attached already: pass it as it was",
            "DeepSpeed changes the weights after each rank's turn, not after all: use DDP or FSDP2",
            "StarTrailPolicyMixin is for DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, not for KTOTrainer",
        ),
        strict=True,
    ):
        assert text.startswith(f"ValueError: {start}"), text
