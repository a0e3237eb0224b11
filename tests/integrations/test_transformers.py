"""Hugging Face models of every kind of attention on 2, 4 and 8 ranks: the loss and every gradient of one process."""

import copy
import gc
import warnings
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[hf]')")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLTextConfig,
    Qwen2VLTextModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

import startrail
from startrail.integrations import layer_masks as masks
from startrail.integrations import transformers as integration
from startrail.integrations import versions
from startrail.integrations.layer_masks import LayerKind
from startrail.integrations.transformers import attach, detach, shard_batch
from startrail.integrations.versions import is_checkpointing
from startrail.kernels import kernel_for
from startrail.launch.local import run_local
from tests.helpers import ROOT, error_of
from tests.integrations.tiny import SMALL, InFloat64, differences, families, gradients, packed, padded, tiny, tokens

# What a gradient may be off by, relative to its norm; or twice what one process errs in the same dtype. float32 adds up
# in another order on many ranks, which shows where a sum over all tokens has terms of both signs: one process itself
# errs by 2e-6 to 4e-6 in gpt-oss's router and key biases and in qwen3's norms of keys.
ALLOWED = {torch.float32: 2e-6, torch.float64: 1e-13}
PLANS = {2: ["1x2"], 4: ["u2/1x2", "2x2"], 8: ["u2/2x2"]}


def ordinary(batch: int, length: int) -> dict:
    ids = tokens(batch, length)
    return dict(input_ids=ids, labels=ids)


BATCHES = {
    "uneven": ordinary(2, 37),
    "packed": packed(20, 1, 30, 12),
    "right": padded([30, 17, 33]),
    "left": padded([17, 30, 33], "left"),
}


def batch_of(name, kind):
    """Eager attention, which gemma2 has in one process, lets padding attend to everything: learn nothing from it."""
    batch = BATCHES[kind]
    if (name, kind) != ("gemma2", "left"):
        return batch
    first = batch["attention_mask"].cumsum(1) == 1
    return dict(batch, labels=batch["labels"].masked_fill(first, -100))


def one_process(name, batch, dtype=torch.float32):
    """Loss and gradients; of packed documents one by one, since not every model of transformers keeps them apart."""
    model = tiny(name, dtype)
    with InFloat64() if dtype == torch.float64 else nullcontext():
        loss = loss_of(model, name, batch)
        loss.backward()
    return loss.item(), gradients(model)


def loss_of(model, name, batch):
    if "position_ids" in batch and name != "llama4":  # whose chunks count from the row's beginning
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        count = (batch["labels"] != -100).sum()
        loss = 0.0
        for start, stop in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True):
            part = {key: x[:, start:stop] for key, x in batch.items()}
            loss = loss + model(**part, num_items_in_batch=count, use_cache=False).loss
    else:
        loss = model(**batch, use_cache=False).loss
    return loss


def many_ranks(model, sp, batch):
    model.zero_grad()
    loss = model(**shard_batch(sp, **batch)).loss
    loss.backward()
    startrail.sum_gradients(model.parameters(), sp.group)
    return summed(loss), gradients(model)


def summed(loss) -> float:
    """The ranks' shares of a loss as one."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item()


class Truth(NamedTuple):
    """What one process gives, and the gradients that it should give."""

    loss: float
    grads: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]


def truth_of(name, batch):
    return Truth(*one_process(name, batch), one_process(name, batch, torch.float64)[1])


def compare(loss, grads, truth) -> list[str]:
    """What is wrong: every gradient by itself against float64, and loss and all gradients against one process."""
    allowed = ALLOWED[next(iter(truth.grads.values())).dtype]
    wrong = differences(grads, truth.exact, allowed, truth.grads)
    whole, true = (
        {"all gradients": torch.cat([x[name].flatten() for name in truth.grads])} for x in (grads, truth.grads)
    )
    wrong += differences(whole, true, allowed)
    if not abs(loss / truth.loss - 1) <= min(1e-6, allowed):  # written so that NaN fails
        wrong.append(f"loss {loss}, one process {truth.loss}")
    return wrong


@pytest.fixture(scope="module")
def truths():
    torch.set_num_threads(1)
    return {(name, kind): truth_of(name, batch_of(name, kind)) for name in families() for kind in BATCHES}


@pytest.mark.parametrize("world", sorted(PLANS))
def test_every_family_has_the_loss_and_gradients_of_one_process(world, truths):
    def on_rank(rank):
        wrong = []
        for plan in PLANS[world]:
            sp = startrail.SequenceParallel(plan)
            for name in families():
                model = attach(tiny(name), sp)
                for kind in BATCHES:
                    lines = compare(*many_ranks(model, sp, batch_of(name, kind)), truths[name, kind])
                    wrong += [f"{plan} {name} {kind}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world) == [[]] * world


def test_chunks_count_as_in_one_process():
    """transformers 5.22 counts the chunks of packed documents from the row's first token, 5.23 from each document's."""
    sp = startrail.SequenceParallel("1x1")
    ids = tokens(2, 40)
    for first, second in (((0, 25), (0, 15)), ((0, 20), (5, 20))):  # other documents; the same, at other positions
        rows = [[*range(start, start + count), *range(40 - count)] for start, count in (first, second)]
        batch = dict(input_ids=ids, labels=ids, position_ids=torch.tensor(rows))
        alone = tiny("llama4")(**batch, use_cache=False).loss.item()
        split = attach(tiny("llama4"), sp)(**shard_batch(sp, **batch)).loss.item()
        assert split == pytest.approx(alone, rel=1e-6)


# Text, an image of 4 x 3 patches, text: time, height and width of every token (mRoPE).
GRID = torch.stack([torch.zeros(12), torch.arange(12) // 3, torch.arange(12) % 3]).long() + 10
AXES = torch.cat([torch.arange(10).expand(3, 10), GRID, torch.arange(14, 29).expand(3, 15)], 1)
AXES = AXES.unsqueeze(1).expand(3, 2, 37)
COTANGENT = torch.randn(2, 37, SMALL["hidden_size"], generator=torch.Generator().manual_seed(3))


TEXT_OF_THREE = dict(SMALL, rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1]))


def three_axes():
    torch.manual_seed(0)
    return Qwen2VLTextModel(Qwen2VLTextConfig(**TEXT_OF_THREE))


def seen_on_axes(model):
    with InFloat64() if model.dtype == torch.float64 else nullcontext():
        out = model(input_ids=BATCHES["uneven"]["input_ids"], position_ids=AXES).last_hidden_state
        loss = (out * COTANGENT).sum()
        loss.backward()
    return loss.item(), gradients(model)


def test_checkpointing_ddp_fsdp_amp_meshes_and_two_plans(truths):
    """On one set of ranks. Each with the gradients of one process; bytes show that attention is not run again."""
    batch, truth = BATCHES["uneven"], truths["mistral", "uneven"]
    with torch.autocast("cpu", torch.bfloat16):
        half = one_process("mistral", batch)
    image = Truth(*seen_on_axes(three_axes()), seen_on_axes(three_axes().double())[1])

    def on_rank(rank):
        found = {}
        sp = startrail.SequenceParallel("u2/1x2")
        for name in ("mistral", "gpt-oss", "llama4", "qwen3-moe", "deepseek-v3"):
            sent = []
            for when in ("never", "before", "after"):
                model = tiny(name)
                if when == "before":
                    model.gradient_checkpointing_enable()
                attach(model, sp)
                if when == "after":
                    model.gradient_checkpointing_enable()
                sp.reset_counters()
                found[name, when] = compare(*many_ranks(model, sp, batch), truths[name, "uneven"])
                sent.append(sp.traffic())
                assert is_checkpointing(model) == (when != "never")
            assert sent == sent[:1] * 3, f"the distributed forward of {name} ran again"
        # two batches in flight: what is recomputed must see its own
        model = attach(tiny("mistral"), sp)
        model.gradient_checkpointing_enable()
        first = model(**shard_batch(sp, **batch)).loss
        second = model(**shard_batch(sp, **BATCHES["packed"])).loss
        first.backward()
        startrail.sum_gradients(model.parameters())
        found["in flight"] = compare(summed(first), gradients(model), truth)
        second.backward()
        # two models with two plans
        other = startrail.SequenceParallel("2x2")
        models = [attach(tiny("mistral"), sp), attach(tiny("gemma3"), other)]
        losses = [x(**shard_batch(x._startrail.sp, **batch)).loss for x in models]
        for name, loss, one in zip(("mistral", "gemma3"), losses, models, strict=True):
            loss.backward()
            startrail.sum_gradients(one.parameters())
            found["two plans", name] = compare(summed(loss), gradients(one), truths[name, "uneven"])

        model = attach(three_axes(), sp)
        made = shard_batch(sp, batch["input_ids"], position_ids=AXES)
        out = model(**made).last_hidden_state
        loss = (out * made["startrail"].sequence.shard(COTANGENT, 1)).sum()
        loss.backward()
        startrail.sum_gradients(model.parameters())
        found["three axes"] = compare(summed(loss), gradients(model), image)

        model = attach(tiny("mistral"), sp)
        wrapped = DistributedDataParallel(model)
        loss = wrapped(**shard_batch(sp, **batch)).loss
        (startrail.gradient_factor(wrapped) * loss).backward()
        found["ddp"] = compare(summed(loss), gradients(model), truth)

        model = attach(tiny("mistral"), sp)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        loss = model(**shard_batch(sp, **batch)).loss
        (startrail.gradient_factor(model) * loss).backward()
        whole = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
        found["fsdp"] = compare(summed(loss), whole, truth)

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        pair = startrail.SequenceParallel("u2", mesh=mesh["sp"])
        model = attach(tiny("mistral"), pair)
        mine = {name: x[mesh["dp"].get_local_rank()].unsqueeze(0) for name, x in batch.items()}
        count = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**shard_batch(pair, **mine, num_items_in_batch=count)).loss
        loss.backward()
        startrail.sum_gradients(model.parameters())
        found["mesh"] = compare(summed(loss), gradients(model), truth)

        model = attach(tiny("mistral"), sp)
        with torch.autocast("cpu", torch.bfloat16):
            loss, grads = many_ranks(model, sp, batch)
        off = {name: ((grads[name] - x).norm() / x.norm()).item() for name, x in half[1].items()}
        found["amp"] = [f"{name}: {x:.1e}" for name, x in off.items() if not x < 0.05]
        return {kind: lines for kind, lines in found.items() if lines}

    assert run_local(on_rank, 4) == [{}] * 4


def test_compile_of_a_whole_model(truths):
    def on_rank(rank):
        sp = startrail.SequenceParallel("u2")
        model = attach(tiny("llama"), sp)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        loss = compiled(**shard_batch(sp, **BATCHES["uneven"])).loss
        loss.backward()
        startrail.sum_gradients(model.parameters())
        return compare(summed(loss), gradients(model), truths["llama", "uneven"])

    assert run_local(on_rank, 2) == [[]] * 2


# One family of each kind of layer: full, windows, sinks, chunks, latent heads. In float32 gpt-oss goes its own way
# after some steps (losses 1e-3 apart): a router takes another expert where two are equal but for rounding.
STEPPING = [(name, torch.float64) for name in ("qwen3", "gemma3", "gpt-oss", "llama4", "deepseek-v3")]
STEPPING.append(("gemma3", torch.float32))
STEPS_ALLOWED = {torch.float32: 1e-6, torch.float64: 1e-13}


def test_in_float64_every_family_is_the_same_and_stays_so_for_twenty_steps():
    """What differs in float32 is rounding: here loss and gradients are equal, and the weights after twenty steps."""
    alone = {name: one_process(name, batch_of(name, "left"), torch.float64) for name in families()}
    truths = {name: Truth(loss, grads, grads) for name, (loss, grads) in alone.items()}

    def steps(model, run):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for number in range(20):
            optimizer.zero_grad()
            ids = tokens(2, 37 + number % 3, seed=number)
            with InFloat64() if model.dtype == torch.float64 else nullcontext():
                losses.append(run(model, dict(input_ids=ids, labels=ids)))
            optimizer.step()
        return losses, {name: x.detach() for name, x in model.named_parameters()}

    def run_alone(model, batch):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()

    expected = {(name, dtype): steps(tiny(name, dtype), run_alone) for name, dtype in STEPPING}

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2")
        found = {}
        for name, truth in truths.items():
            model = attach(tiny(name, torch.float64), sp)
            with InFloat64():
                found[name] = compare(*many_ranks(model, sp, batch_of(name, "left")), truth)
        for (name, dtype), (true_losses, true_weights) in expected.items():
            model = attach(tiny(name, dtype), sp)
            losses, weights = steps(model, lambda model, batch: many_ranks(model, sp, batch)[0])
            off = max(abs(a / b - 1) for a, b in zip(losses, true_losses, strict=True))
            lines = [] if off <= STEPS_ALLOWED[dtype] else [f"losses: {off:.1e}"]
            found[name, dtype] = lines + differences(weights, true_weights, STEPS_ALLOWED[dtype])
        return {name: lines for name, lines in found.items() if lines}

    assert run_local(on_rank, 4) == [{}] * 4


def test_what_cannot_be_run_is_refused_when_it_is_attached():
    sp = startrail.SequenceParallel("1x1")
    model = tiny("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    text = error_of(lambda: attach(model, sp))
    assert text == "ValueError: model.layers.0.self_attn: attention dropout 0.1: set it to 0 in the model's config"
    assert model.config._attn_implementation == "sdpa" and not hasattr(model, "_startrail"), "as it was"

    class OddAttention(type(model.model.layers[1].self_attn)):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options, position_bias=torch.zeros(1))

    model = tiny("llama")
    model.model.layers[1].self_attn.__class__ = OddAttention
    assert "model.layers.1.self_attn: position_bias" in error_of(lambda: attach(model, sp))
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU without flash-attn
        patch.setattr(masks, "kernel_for", lambda device, *x: kernel_for(torch.device("cuda"), *x))
        text = error_of(lambda: attach(tiny("gemma2"), sp))
    assert text.startswith("ValueError: model.layers.0.self_attn: softcap=0.5: of all GPU kernels only flash-attn")
    OddAttention.forward = lambda self, hidden_states, **options: (hidden_states, None)  # attention that does not ask
    assert "model.layers.1.self_attn does not ask for attention" in error_of(lambda: attach(model, sp))
    model = tiny("qwen3-moe")
    model.config.output_router_logits = True
    assert "auxiliary loss" in error_of(lambda: attach(model, sp))
    model = tiny("mistral")
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert "layer 1 is 'linear_attention': its state would have to pass" in error_of(lambda: attach(model, sp))
    model = tiny("llama")

    class ShiftedMLP(type(model.model.layers[1].mlp)):
        def forward(self, x):
            return super().forward(x + 0.01 * x.roll(1, 1))

    model.model.layers[1].mlp.__class__ = ShiftedMLP
    assert error_of(lambda: attach(model, sp)) == (
        "ValueError: model.layers.1.mlp.gate_proj: a token's result depends on other tokens although nothing is "
        "attended (a recurrence, a convolution or a token shift): its state would have to pass from rank to rank"
    )
    griffin = dict(lru_width=32, block_types=["recurrent", "attention"], attention_window_size=8)
    for dtype in (torch.float32, torch.bfloat16):  # whose rounding hides what new weights do
        model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SMALL, **griffin)).to(dtype)
        with pytest.MonkeyPatch.context() as patch:  # since 5.23 the config tells
            patch.setattr(integration, "_refuse_by_config", lambda model: None)
            text = error_of(lambda: attach(model, sp))  # noqa: B023
        assert "model.layers.0.temporal_block.rg_lru: a token's result depends on other tokens" in text
    model = GPT2LMHeadModel(GPT2Config(**families()["gpt2"][1].to_diff_dict() | dict(add_cross_attention=True)))
    assert "transformer.h.0.crossattention" in error_of(lambda: attach(model, sp))
    seeing = dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=TEXT_OF_THREE, vision_config=seeing))
    assert "model.visual.blocks.0.attn does not ask" in error_of(lambda: attach(model, sp)), "its text model alone runs"
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16)
    model = BartForConditionalGeneration(BartConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    assert "a decoder that attends to an encoder's states is not supported" in error_of(lambda: attach(model, sp))
    model = tiny("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    assert "its loss is not the sum over shift_labels" in error_of(lambda: attach(model, sp))
    assert "already" in error_of(lambda: attach(attach(tiny("llama"), sp), sp))
    assert "needs a transformers model" in error_of(lambda: attach(torch.nn.Linear(2, 2), sp))


def test_traps_of_batches():
    sp = startrail.SequenceParallel("1x1")
    model = attach(tiny("llama"), sp)
    ids = tokens(1, 8)
    assert "is attached to startrail: call model(**shard_batch" in error_of(lambda: model(input_ids=ids))
    both = dict(packed(4, 4), attention_mask=torch.ones_like(ids))
    assert "leave the attention_mask out" in error_of(lambda: shard_batch(sp, **both))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    assert "row 0, token 6 has attention_mask 0" in error_of(lambda: shard_batch(sp, ids, ids, mask))
    assert "pixel_values, of shape (1, 3)" in error_of(lambda: shard_batch(sp, ids, pixel_values=torch.zeros(1, 3)))
    for wrong in (ids[0], ids.float(), [[1, 2]]):
        assert "input_ids must be a tensor (batch, tokens)" in error_of(lambda: shard_batch(sp, wrong))  # noqa: B023
    three = torch.arange(8).expand(3, 2, 8)
    made = shard_batch(sp, tokens(2, 8), position_ids=three)
    assert made["position_ids"].shape == (3, 2, 8), "mRoPE's"
    made = shard_batch(sp, tokens(2, 8), attention_mask=torch.tensor([[1] * 8, [0] * 3 + [1] * 5]), position_ids=three)
    assert made["position_ids"].shape == (3, 1, 13) and made["startrail"].sequence.documents.tolist() == [0, 8, 13]
    assert made["position_ids"][0, 0].tolist() == [*range(8), *range(3, 8)], "every token keeps its position"
    again = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]).expand(3, 1, 8)
    text = error_of(lambda: shard_batch(sp, ids, position_ids=again))
    assert "position_ids of 3 axes go back in row 0 at token 4" in text and "give documents=" in text
    made = shard_batch(sp, ids, position_ids=again, documents=[0, 4, 8])
    assert made["startrail"].sequence.documents.tolist() == [0, 4, 8]
    with_text = torch.cat([again[:1], torch.zeros(3, 1, 8, dtype=torch.long)])  # four axes: the first is the text's
    made = shard_batch(sp, ids, position_ids=with_text)
    assert made["startrail"].sequence.documents.tolist() == [0, 4, 8]
    left = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    made = shard_batch(sp, ids, ids.masked_fill(left == 0, -100), left)
    assert made["startrail"].sequence.documents.tolist() == [0, 1, 7] and made["startrail"].blind.tolist()[0]
    assert made["num_items_in_batch"] == 6, "the first token is learnt from padding that sees nothing"
    hole = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    text = error_of(lambda: shard_batch(sp, ids, ids.masked_fill(hole == 0, -100), hole))
    assert "row 0, token 4 would be learnt from padding behind other tokens" in text
    eager = attach(tiny("gemma2"), sp)
    text = error_of(lambda: eager(**shard_batch(sp, ids, ids.masked_fill(left == 0, -100), left)))
    assert "model.layers.0.self_attn: a label is learnt from padding on the left" in text
    text = error_of(lambda: shard_batch(sp, ids, attention_mask=left, blocks=[(2, 4)]))
    assert "documents or blocks beside rows of different lengths" in text
    made = shard_batch(sp, ids, blocks=[(2, 4)])
    assert made["startrail"].sequence.blocks == ((2, 4),)


def test_two_models_with_two_plans_and_generation_afterwards():
    shared = families()["llama"][1]
    first, second = (LlamaForCausalLM(shared) for _ in range(2))
    one, two = startrail.SequenceParallel("1x1"), startrail.SequenceParallel("u1")
    ids = tokens(1, 8)
    before = first.generate(ids, max_new_tokens=4, do_sample=False)
    attach(first, one)
    attach(second, two)
    assert shared._attn_implementation != first.config._attn_implementation != second.config._attn_implementation
    for model, sp in ((first, one), (second, two)):
        model(**shard_batch(sp, ids, ids)).loss.backward()
    assert one.timings()["total"] > 0 and two.timings()["total"] > 0
    assert torch.equal(detach(first).generate(ids, max_new_tokens=4, do_sample=False), before)
    name = second.config._attn_implementation
    assert "_attn_implementation" not in second.config.to_json_string()
    third = copy.deepcopy(second)
    third.gradient_checkpointing_enable()
    assert is_checkpointing(third) and not is_checkpointing(second), "what a copy does, it does alone"
    del model, second
    gc.collect()
    third(**shard_batch(two, ids, ids)).loss.backward()
    detach(third).generate(ids, max_new_tokens=1)
    del third
    gc.collect()
    assert name not in AttentionInterface._global_mapping, "nothing is left in transformers' tables"


def test_a_version_that_was_not_tested_warns_once(monkeypatch):
    oldest = ".".join(map(str, versions.TESTED[0]))
    assert f'"transformers>={oldest},<6"' in (ROOT / "pyproject.toml").read_text(), "what pip installs was tested"
    monkeypatch.setattr(versions.transformers, "__version__", "5.99.0")
    with pytest.warns(UserWarning, match="tested with transformers"):
        attach(tiny("llama"), startrail.SequenceParallel("1x1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(tiny("llama"), startrail.SequenceParallel("1x1"))


def test_the_first_steps_find_other_weights_averaged_and_unsummed_gradients():
    batch = BATCHES["uneven"]

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2")
        found = []

        def step(model, backward, after=lambda: None):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            backward(model(**shard_batch(sp, **batch)).loss)
            after()
            optimizer.step()

        model = attach(tiny("llama"), sp)
        with torch.no_grad():
            model.lm_head.weight[3, 3] += rank
        found.append(error_of(lambda: step(model, torch.Tensor.backward)))
        model = attach(tiny("llama"), sp)
        found.append(error_of(lambda: step(model, torch.Tensor.backward)))
        model = attach(tiny("llama"), sp)
        found.append(error_of(lambda: step(DistributedDataParallel(model), torch.Tensor.backward)))
        model = fully_shard(attach(tiny("llama"), sp))
        found.append(error_of(lambda: step(model, torch.Tensor.backward)))
        model = attach(tiny("llama"), sp)
        found.append(error_of(lambda: step(DistributedDataParallel(model), lambda loss: (2 * loss).backward())))
        model = attach(tiny("llama"), sp)
        found.append(
            error_of(lambda: step(model, torch.Tensor.backward, lambda: startrail.sum_gradients(model.parameters())))
        )
        return found

    for weights, unsummed, ddp, fsdp, *right in run_local(on_rank, 2):
        assert "parameter lm_head.weight is not the same on all ranks" in weights
        assert "every rank still has its own share of the gradients" in unsummed
        assert "gradients are averaged over 2 ranks" in ddp and "gradients are averaged over 2 ranks" in fsdp
        assert right == ["no error"] * 2


def test_kinds_of_masks_are_read_from_what_they_are_made_of():
    from transformers import masking_utils as parts

    assert integration.kind_of(parts.sliding_window_causal_mask_function(5)) == LayerKind(True, 5)
    assert integration.kind_of(parts.sliding_window_bidirectional_mask_function(5)) == LayerKind(False, 6)
    assert integration.kind_of(parts.chunked_causal_mask_function(8, torch.zeros(1))) == LayerKind(True, None, 8)
    odd = parts.or_masks(parts.causal_mask_function, parts.causal_mask_function)
    with pytest.raises(ValueError, match=r"or_masks.*which startrail does not know"):
        integration.kind_of(odd)
