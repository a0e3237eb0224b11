"""Checkpointing, DDP, FSDP, autocast, device meshes and torch.compile: the gradients of one process with each."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

from contextlib import nullcontext

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2VLTextConfig, Qwen2VLTextModel

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.integrations.versions import is_checkpointing
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.one_process import BATCHES, Truth, compare, many_ranks, one_process, summed, truth_of
from tests.integrations.tiny import SMALL, TEXT_OF_THREE, InFloat64, gradients, tiny

FAMILIES = ("mistral", "gpt-oss", "llama4", "qwen3-moe", "deepseek-v3", "gemma3", "llama")


@pytest.fixture(scope="module")
def truths():
    torch.set_num_threads(1)
    return {(name, "uneven"): truth_of(name, BATCHES["uneven"]) for name in FAMILIES}


# Text, an image of 4 x 3 patches, text: time, height and width of every token (mRoPE).
GRID = torch.stack([torch.zeros(12), torch.arange(12) // 3, torch.arange(12) % 3]).long() + 10
AXES = torch.cat([torch.arange(10).expand(3, 10), GRID, torch.arange(14, 29).expand(3, 15)], 1)
AXES = AXES.unsqueeze(1).expand(3, 2, 37)
COTANGENT = torch.randn(2, 37, SMALL["hidden_size"], generator=torch.Generator().manual_seed(3))


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


def test_the_first_steps_detect_different_weights_averaged_or_unsummed_gradients():
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
        assert "each rank still has only its own part of the gradients" in unsummed
        assert "gradients are averaged over 2 ranks" in ddp and "gradients are averaged over 2 ranks" in fsdp
        assert right == ["no error"] * 2
