"""The routers' auxiliary loss of mixtures of experts: the loss and gradients of one process, for every family."""

import inspect
import warnings
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import torch
import transformers as hf
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import startrail
from startrail.integrations import experts, routers
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import FULL, error_of
from tests.integrations.one_process import many_ranks
from tests.integrations.tiny import SMALL, differences, gradients, packed, padded, tiny

HYBRIDS = ("granite-moe-hybrid", "jamba", "qwen3-next", "qwen3.5-moe")
# All families with the loss that can be attached.
FAMILIES = (
    "dbrx", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "jetmoe", "laguna", "mellum", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe", *HYBRIDS,
)  # fmt: skip
ONCE = ("jetmoe",)  # transformers does not recompute its layers
FEW = ("gpt_oss", "granitemoe", "minimax_m2", "qwen3_moe", "qwen3-next")
# Other families with the loss: the first is in test_vision.py, the rest cannot be attached, for their attention, their
# images, or an encoder.
OTHERS = {
    "qwen3_vl_moe", "deepseek_v4", "doge", "glm5_next", "qwen4_exp", "ernie4_5_vl_moe", "glm4v_moe", "qwen3_omni_moe",
    "nllb_moe", "switch_transformers",
}  # fmt: skip
SIZES = dict(
    SMALL, head_dim=8, num_experts=4, num_local_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, shared_intermediate_size=16, attention_dropout=0.0,
    sliding_window=7, layer_types=["full_attention"] * 2, mlp_only_layers=[], router_jitter_noise=0.0,
    input_jitter_noise=0.0,
)  # fmt: skip


def config_of(kind):
    default = kind()
    return kind(**{key: size for key, size in SIZES.items() if hasattr(default, key)})


def dbrx(coefficient):
    attention = dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0)
    experts = dict(
        hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2, moe_loss_weight=coefficient
    )  # fmt: skip
    sizes = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=256)
    return hf.DbrxConfig(**sizes, attn_config=attention, ffn_config=experts)


def model_of(name, coefficient=2.5):
    if name in HYBRIDS:
        model = tiny(name)
        model.config.output_router_logits, model.router_aux_loss_coef = True, coefficient
        return model
    config = dbrx(coefficient) if name == "dbrx" else config_of(CONFIG_MAPPING[name])
    config.output_router_logits = True
    config.router_aux_loss_coef = config.aux_loss_coef = coefficient
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for x in model.parameters():
            x.data = 0.15 * torch.randn_like(x) if x.dim() > 1 else x.data + 0.1 * torch.randn_like(x)
    return model.train()


def rows_of(lengths, side):
    """Padded rows; the first token of each has no label, since eager attention lets padding see everything."""
    batch = padded(lengths, side)
    first = batch["attention_mask"].cumsum(1) == 1
    return dict(batch, labels=batch["labels"].masked_fill(first, -100))


def unpacked(lengths):
    """A packed row, and the same documents as padded rows, which one process keeps apart in every family."""
    row, rows = packed(*lengths), rows_of(lengths, "right")
    documents = row["input_ids"][0].split(lengths)
    for place, ids in enumerate(documents):
        rows["input_ids"][place, : len(ids)] = ids
    rows["labels"] = rows["input_ids"].masked_fill(rows["labels"] == -100, -100)
    return row, rows


PACKED, UNPACKED = unpacked([20, 1, 30, 12])
BATCHES = {  # on ranks, and in one process
    "right": (rows_of([30, 17, 33], "right"),) * 2,
    "left": (rows_of([17, 30, 33], "left"),) * 2,
    "packed": (PACKED, UNPACKED),
}


def alone(name, batch, coefficient=2.5):
    model = model_of(name, coefficient)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("plan", ["1x3", "u2/1x2"])
def test_loss_and_gradients_are_those_of_one_process(plan):
    torch.set_num_threads(1)
    names = FAMILIES if FULL else FEW
    options = [{}, dict(logits=True), dict(offload=True)]
    truths = {(name, kind): alone(name, whole) for name in names for kind, (_, whole) in BATCHES.items()}
    for name in names:
        assert truths[name, "packed"][0] - alone(name, UNPACKED, 0.0)[0] > 1, f"the loss matters: {name}"

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel(plan), []
        for number, ((name, kind), (loss, grads)) in enumerate(truths.items()):
            model = attach(model_of(name), sp, **options[number % (2 if name in ONCE else 3)])
            ours, found = many_ranks(model, sp, BATCHES[kind][0])
            unused = [each for each, x in grads.items() if not x.any()]  # biases that only choose experts
            lines = differences(found, {each: x for each, x in grads.items() if each not in unused}, 1e-5)
            lines += [f"{each} has a gradient" for each in unused if found[each].any()]
            if not abs(ours / loss - 1) <= 1e-6:
                lines.append(f"loss {ours}, one process {loss}")
            wrong += [f"{name} {kind}: {line}" for line in lines]
        return wrong

    world = startrail.Plan.parse(plan).size
    assert run_local(on_rank, world) == [[]] * world


def test_every_family_of_transformers_is_known():
    models = Path(hf.__file__).parent / "models"
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if routers.NAME in path.read_text()}
    ours = {path.parent.name for path in map(Path, map(inspect.getfile, map(type, map(model_of, FAMILIES))))}
    assert found - ours <= OTHERS


def test_every_family_has_the_loss_that_ranks_compute():
    """Each with the function that its forward pass calls, which is put back after a call."""
    sp = startrail.SequenceParallel("1x1")
    for name in FAMILIES:
        model = model_of(name)
        (module,) = routers._modules(model)
        function = getattr(module, routers.NAME)
        attach(model, sp)(**shard_batch(sp, **PACKED)).loss.backward()
        assert getattr(module, routers.NAME) is function, name


def with_biases(name):
    """Whose routers choose by more than their logits, if they have a bias for it."""
    model = tiny(name) if name == "deepseek-v3" else model_of(name)
    torch.manual_seed(5)
    for key, x in (*model.named_parameters(), *model.named_buffers()):
        if "correction_bias" in key:
            x.data = torch.randn_like(x)
    return model


def choices(model, batch):
    """How often each expert is chosen in one process, by layer."""
    found, real = {}, batch["attention_mask"].flatten().bool()

    def count(name, module, arguments):
        chosen = torch.nn.functional.one_hot(arguments[1], module.num_experts).sum(1)
        found[name] = chosen[real].sum(0).tolist()

    for name, module in model.named_modules():
        if name.endswith("experts") and not name.endswith("shared_experts"):
            module.register_forward_pre_hook(partial(count, name))
    model(**batch, use_cache=False)
    return found


COUNTED = ("dbrx", "deepseek-v3", "ernie4_5_moe", "gpt_oss", "granitemoe", "laguna", "minimax_m2", "qwen3_moe")


def test_experts_get_as_many_tokens_as_in_one_process():
    """Also by routers with a bias, with layers that are recomputed, and MLPs in tiles."""
    torch.set_num_threads(1)
    truths = {
        (name, kind): choices(with_biases(name), whole) for name in COUNTED for kind, (_, whole) in BATCHES.items()
    }
    biased = truths["minimax_m2", "packed"]["model.layers.0.mlp.experts"]
    logits = with_biases("minimax_m2")(**UNPACKED).router_logits[0][UNPACKED["attention_mask"].flatten().bool()]
    assert biased != logits.topk(2).indices.flatten().bincount(minlength=4).tolist(), "the bias matters"

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel("1x3"), []
        for number, ((name, kind), truth) in enumerate(truths.items()):
            model = with_biases(name)
            model.config.output_router_logits = False  # which tiles hide
            options = [{}, dict(offload=True), {} if name == "dbrx" else dict(tile_mlp=5)]  # whose MLPs are elsewhere
            attach(model, sp, **options[(number + number // 3) % 3])
            counts = experts.ExpertCounts(model)
            many_ranks(model, sp, BATCHES[kind][0])
            model(**shard_batch(sp, **BATCHES[kind][0]))
            found = {layer: x.tolist() for layer, x in counts.total().items()}
            expected = {layer: [2 * x for x in row] for layer, row in truth.items()}
            wrong += [] if found == expected else [f"{name} {kind}: {found}, one process {expected}"]
        counts.remove()
        model(**shard_batch(sp, **BATCHES[kind][0]))
        assert not any(x.any() for x in counts.total().values())
        return wrong

    assert run_local(on_rank, 3) == [[]] * 3


def test_models_whose_experts_cannot_be_counted():
    sp = startrail.SequenceParallel("1x1")
    for model in (attach(tiny("llama"), sp), attach(model_of("jetmoe"), sp)):
        assert "calls no experts with their choices" in error_of(lambda model=model: experts.ExpertCounts(model))
    assert "attach(model, sp) first" in error_of(lambda: experts.ExpertCounts(model_of("qwen3_moe")))


def test_what_cannot_be_computed_is_refused():
    sp = startrail.SequenceParallel("1x1")
    text = error_of(lambda: attach(model_of("qwen3_moe"), sp, tile_mlp=5))
    assert text.startswith("ValueError: tile_mlp hides the routers from their auxiliary loss")
    model = attach(tiny("llama"), sp)
    text = error_of(lambda: model(**shard_batch(sp, **PACKED), output_router_logits=True))
    assert text.startswith("ValueError: LlamaForCausalLM has no routers' auxiliary loss that is known")
    doge = hf.DogeForCausalLM(hf.DogeConfig(**SMALL, is_moe=True, output_router_logits=True, num_experts=16))
    assert "its routers' auxiliary loss is unlike that of other models" in error_of(lambda: attach(doge, sp))

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        model = attach(model_of("qwen3_moe"), sp)

        def step(**options):
            model(**shard_batch(sp, **PACKED), **options).loss.backward()
            startrail.sum_gradients(model.parameters(), sp.group)

        return error_of(lambda: step(output_router_logits=rank == 0)), error_of(step)

    for text, after in run_local(on_rank, 2):
        assert text.startswith("ValueError: ranks disagree about calling the model: rank 0: ")
        assert "output_router_logits=True; rank 1: 1 of 1 is output_router_logits=False" in text
        assert after == "no error"
