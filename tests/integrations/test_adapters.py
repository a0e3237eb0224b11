"""Adapters of peft: gradients and merged weights of one process, and files that load without startrail."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("peft", reason="peft is not installed (make venv installs it)")

import torch
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import startrail
from startrail.diagnostics.verify import verify
from startrail.integrations import without_logits
from startrail.integrations.transformers import attach, detach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.one_process import ordinary
from tests.integrations.tiny import SMALL, differences, packed, padded, tiny, tokens

STEPS = 3
NARROW = ["q_proj", "v_proj", "up_proj"]
ADAPTERS = {
    "lora": dict(target_modules=NARROW),
    "dora": dict(target_modules=NARROW, use_dora=True),
    "with a head": dict(target_modules=["o_proj", "down_proj"], modules_to_save=["lm_head"]),
    "of the head": dict(target_modules=["k_proj", "lm_head"]),
    "of experts": dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "of a quantized model": dict(target_modules=NARROW),
}
WRAPPERS = ("plain", "ddp", "fsdp")
BATCHES = [ordinary(2, 37), padded([30, 17, 33]), packed(20, 1, 30, 12)]


class QuantizedLinear(nn.Linear):
    """Keeps its frozen weights as QLoRA's layers do: numbers of 4 bits, two per byte, in a single column."""

    def forward(self, x):
        numbers = torch.stack([self.weight >> 4, self.weight & 15], dim=1).view(self.out_features, self.in_features)
        return nn.functional.linear(x, (numbers.to(x.dtype) - 8) * self.scale, self.bias)

    @classmethod
    def quantize(cls, layer):
        layer.scale = float(layer.weight.detach().abs().max()) / 7
        high, low = ((layer.weight.data / layer.scale).round() + 8).to(torch.uint8).view(-1, 1, 2).unbind(2)
        layer.weight = nn.Parameter(high << 4 | low, requires_grad=False)
        layer.__class__ = cls


def base_of(name):
    model = tiny("qwen3-moe" if "experts" in name else "llama")
    if "quantized" in name:
        for layer in [each for each in model.model.layers.modules() if type(each) is nn.Linear]:
            QuantizedLinear.quantize(layer)
        model.is_loaded_in_4bit = True
        model = prepare_model_for_kbit_training(model)  # layers are recomputed, their inputs have gradients
    return model


def adapted(name, model=None):
    torch.manual_seed(3)
    model = get_peft_model(base_of(name) if model is None else model, LoraConfig(r=4, **ADAPTERS[name]))
    for key, x in model.named_parameters():
        if "lora_B" in key:  # zeros, with which nothing else has a gradient
            x.data = 0.1 * torch.randn_like(x)
    return model.train()


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def trained(model, loss_of, after=lambda: None):
    """The adapters' weights after some steps."""
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(BATCHES[step % len(BATCHES)]).backward()
        after()
        optimizer.step()
    return {name: whole(x) for name, x in model.named_parameters() if x.requires_grad}


def alone(name):
    model = adapted(name)
    weights = trained(model, lambda batch: model(**batch, use_cache=False).loss)
    merged = model if "quantized" in name else model.merge_and_unload()
    return weights, {key: x.detach() for key, x in merged.named_parameters() if x.is_floating_point()}


def on_ranks(name, wrapper, sp, late=False, **options):
    base = attach(base_of(name), sp, **options) if late else None  # which gets its adapters afterwards
    model = adapted(name, base) if late else attach(adapted(name), sp, **options)
    wrapped, after = model, lambda: None
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    elif wrapper == "fsdp":
        quantized = {x for x in model.parameters() if not x.is_floating_point()}  # FSDP shards one dtype
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, ignored_params=quantized)
        fully_shard(model, ignored_params=quantized)
    else:
        after = lambda: startrail.sum_gradients(model.parameters(), sp.group)  # noqa: E731
    factor = startrail.gradient_factor(wrapped)
    return model, trained(model, lambda batch: factor * wrapped(**shard_batch(sp, **batch)).loss, after)


@pytest.mark.parametrize("plan", ["1x2", "u2/1x2"])
def test_weights_merged_weights_and_files_are_those_of_one_process(plan, tmp_path, monkeypatch):
    """Logits are computed on 8 tokens at a time."""
    torch.set_num_threads(1)
    monkeypatch.setattr(without_logits, "CHUNK_BYTES", 8 * SMALL["vocab_size"] * 4)
    truths = {name: alone(name) for name in ADAPTERS}
    options = [{}, dict(tile_mlp=5), dict(offload=True)]

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel(plan), []
        for place, (name, (weights, merged)) in enumerate(truths.items()):
            for number, wrapper in enumerate(WRAPPERS):
                chosen = options[(place + number) % 3] if wrapper != "fsdp" else {}
                model, found = on_ranks(name, wrapper, sp, late=(place + number) % 2 == 1, **chosen)
                lines = differences(found, weights, 3e-6)
                if found.keys() != weights.keys():
                    lines.append(f"names {found.keys() ^ weights.keys()}")
                if wrapper == "plain":
                    if rank == 0:
                        model.save_pretrained(tmp_path / name)
                    if "quantized" not in name:
                        ours = dict(detach(model).merge_and_unload().named_parameters())
                        lines += differences({key: x.detach() for key, x in ours.items()}, merged, 3e-6)
                wrong += [f"{name} {wrapper} {chosen}: {line}" for line in lines]
        return wrong

    world = startrail.Plan.parse(plan).size
    assert run_local(on_rank, world) == [[]] * world
    for name, (weights, _) in truths.items():
        loaded = PeftModel.from_pretrained(base_of(name), tmp_path / name, is_trainable=True)
        named = {key: x for key, x in loaded.named_parameters() if x.requires_grad}
        assert named.keys() == weights.keys(), name
        assert differences({key: x.detach() for key, x in named.items()}, weights, 3e-6) == []


def test_mistakes():
    sp = startrail.SequenceParallel("1x1")
    prompts = get_peft_model(tiny("llama"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert error_of(lambda: attach(prompts, sp)).startswith(
        "ValueError: PROMPT_TUNING puts tokens of its own before those of every rank"
    )
    later = get_peft_model(attach(tiny("llama"), sp), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert error_of(lambda: later(**shard_batch(sp, **ordinary(1, 30)))).startswith(
        "ValueError: the model gets 33 tokens, but this rank's part of the batch has 30: prompt tuning"
    )
    later = get_peft_model(attach(tiny("llama"), sp), PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert "ValueError: past_key_values hold tokens before" in error_of(
        lambda: later(**shard_batch(sp, **ordinary(1, 9)))
    )
    model = attach(adapted("lora"), sp)
    assert "already attached" in error_of(lambda: attach(model, sp))
    assert detach(model) is model and "not attached" in error_of(lambda: detach(model))
    assert model.generate(input_ids=tokens(1, 8), max_new_tokens=2, do_sample=False).shape == (1, 10)


def test_verify_names_adapters_whose_gradients_are_not_summed():
    batch = ordinary(1, 32)

    def step(model, batch, sp, part=""):
        attach(model, sp)
        loss = model(**shard_batch(sp, **batch)).loss
        loss.backward()
        startrail.sum_gradients([x for name, x in model.named_parameters() if part in name], sp.group)
        return loss

    assert verify(lambda: (adapted("lora"), batch), ranks=2).same
    verdict = verify(lambda: (adapted("lora"), batch, lambda *given: step(*given, part="lora_A")), ranks=2)
    assert not verdict.same and "lora_B.default.weight is not reduced over ranks (6 of 12 parameters)" in verdict.text
