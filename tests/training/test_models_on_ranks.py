"""GPT and DiT on four ranks under every kind of plan: the loss and every gradient of one process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import startrail
from startrail import losses as loss_module
from startrail.launch.local import run_local
from startrail.losses import chunked_cross_entropy, global_mean, sum_gradients
from startrail.training.models.configs import DIT_CONFIGS, GPT_CONFIGS
from startrail.training.models.dit import DiT, flow_matching_loss, sample
from startrail.training.models.gpt import GPT
from tests.helpers import causal_mask, document_numbers, gradient_mistakes
from tests.training.runs import TokenByToken

WORLD = 4
PLANS = ["1x4", "star2", "2x2", "u2/2x1", "u4"]
IGNORE = -100
# loss, relative; worst gradient element, relative to the root-mean-square of its parameter's gradient
TOLERANCES = {torch.float32: (1e-6, 5e-5), torch.float64: (1e-12, 1e-12)}
GPT_CONFIG = replace(GPT_CONFIGS["gpt-tiny"], vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
HYBRID_CONFIG = replace(GPT_CONFIG, attention_every=2)
DIT_CONFIG = replace(DIT_CONFIGS["dit-tiny"], rows=7, columns=9, width=32, layers=2, heads=4)
# length, batch, documents, tokens with a label, tied: 101 pads ranks unevenly; labels for 5 leave three ranks with none
GPT_CASES = {
    "even": (64, 2, None, 64, True),
    "uneven": (101, 2, None, 101, False),
    "packed": (101, 1, (0, 30, 31, 70, 101), 101, True),
    "few labels": (101, 1, None, 5, True),
}


def fresh(model, dtype):
    """The same weights on every rank, none of them zero: adaLN-zero would hide all gradients."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def results(model, loss):
    loss.backward()
    sum_gradients(model.parameters())
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def differences(ours, truth, dtype):
    """What is wrong, one line each."""
    (loss, grads), (true_loss, true_grads) = ours, truth
    allowed_loss, allowed_grad = TOLERANCES[dtype]
    wrong = []
    if not abs(loss / true_loss - 1) <= allowed_loss:  # written so that NaN fails
        wrong.append(f"loss {loss}, one process {true_loss}")
    return wrong + gradient_mistakes(grads, true_grads, allowed_grad)


def gpt_inputs(case, config=GPT_CONFIG):
    """Tokens, labels shifted before anything is cut, and the mask that one process needs."""
    length, batch, documents, labelled, tied = GPT_CASES[case]
    tokens = torch.randint(GPT_CONFIG.vocab, (batch, length), generator=torch.Generator().manual_seed(1))
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    labels[:, labelled:] = IGNORE
    ends = torch.tensor(documents or (0, length))
    labels[:, ends[1:] - 1] = IGNORE  # the last token of a document predicts nothing
    restarted = torch.arange(length) - ends[document_numbers(length, documents)]
    return replace(config, tied=tied), tokens, labels, documents, causal_mask(length, documents), restarted


def gpt_loss(model, tokens, labels, *arguments):
    return global_mean(*chunked_cross_entropy(model(tokens, *arguments), model.output_weight, labels, 7))


def dit_inputs(dtype):
    generator = torch.Generator().manual_seed(2)
    shape = (2, DIT_CONFIG.tokens, DIT_CONFIG.patch_dim)
    patches, noise = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    return patches, noise, torch.tensor([0.2, 0.9], dtype=dtype), torch.tensor([3, 8])


@pytest.mark.parametrize(
    "dtype, config",
    [(torch.float32, GPT_CONFIG), (torch.float64, GPT_CONFIG), (torch.float64, HYBRID_CONFIG)],
    ids=["float32", "float64", "hybrid"],
)
def test_gpt_has_the_loss_and_gradients_of_one_process(dtype, config):
    truth = {}
    for case in GPT_CASES:
        shape, tokens, labels, documents, mask, _ = gpt_inputs(case, config)
        model, length = fresh(GPT(shape), dtype), tokens.shape[1]
        attention = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        mixing = TokenByToken(documents or (0, length))
        truth[case] = results(model, gpt_loss(model, tokens, labels, torch.arange(length), attention, mixing))

    def on_rank(rank):
        wrong = []
        for plan in PLANS:
            sp = startrail.SequenceParallel(plan)
            for case in GPT_CASES:
                shape, tokens, labels, documents, _, restarted = gpt_inputs(case, config)
                sequence = sp.sequence(tokens.shape[1], documents)
                attention = partial(sequence.attention, causal=True)
                local = sequence.shard(tokens, 1), sequence.shard(labels, 1, pad_value=IGNORE)
                if case == "few labels":
                    assert (local[1] != IGNORE).any() == (rank == 0)
                for positions in (sequence.positions(), sequence.shard(restarted, 0)):
                    model = fresh(GPT(shape), dtype)
                    ours = results(model, gpt_loss(model, *local, positions, attention, sequence))
                    wrong += [f"{plan} {case}: {line}" for line in differences(ours, truth[case], dtype)]
                    if documents is None:
                        break  # nothing restarts
        return wrong

    assert run_local(on_rank, WORLD) == [[]] * WORLD


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_dit_has_the_loss_gradients_and_samples_of_one_process(dtype):
    patches, noise, time, label = dit_inputs(dtype)
    length = DIT_CONFIG.tokens
    everywhere, dense = torch.arange(length), F.scaled_dot_product_attention
    model = fresh(DiT(DIT_CONFIG), dtype)
    real = torch.ones(length, dtype=torch.bool)
    loss = global_mean(*flow_matching_loss(model, patches, noise, time, label, everywhere, real, dense))
    truth = results(model, loss)
    true_sample = sample(model, noise, label, everywhere, dense, steps=2)

    def on_rank(rank):
        wrong = []
        for plan in PLANS:
            for layout in ("zigzag", "contiguous"):
                sequence = startrail.SequenceParallel(plan, layout=layout).sequence(length)
                attention, positions = sequence.attention, sequence.positions()
                local = sequence.shard(patches, 1), sequence.shard(noise, 1)
                model = fresh(DiT(DIT_CONFIG), dtype)
                sums = flow_matching_loss(model, *local, time, label, positions, sequence.shard(real, 0), attention)
                lines = differences(results(model, global_mean(*sums)), truth, dtype)
                ours = sequence.unshard(sample(model, local[1], label, positions, attention, steps=2), 1)
                if not (ours - true_sample).abs().max() < TOLERANCES[dtype][1]:
                    lines.append("sample differs")
                wrong += [f"{plan} {layout}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, WORLD) == [[]] * WORLD


def test_the_example_of_the_loss_module(monkeypatch):
    """Losses 1, 2, 3 on one rank, 6 on another, none on the third: 12 / 4, and gradients as on one process."""
    monkeypatch.setattr(loss_module, "BUCKET_BYTES", 8)  # several buckets, and of two dtypes

    def on_rank(rank):
        weight = torch.nn.Parameter(torch.ones(2))
        other = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        unused_here = torch.nn.Parameter(torch.ones(3))
        frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        losses = [[1.0, 2.0, 3.0], [6.0], []][rank]
        loss_sum = (weight[0] * torch.tensor(losses)).sum() + 0 * other.sum().float()
        if rank == 1:
            loss_sum = loss_sum + 0 * unused_here.sum()
        loss = global_mean(loss_sum, len(losses))
        loss.backward()
        sum_gradients([weight, other, unused_here, frozen])
        assert frozen.grad is None
        return loss.item(), weight.grad.tolist(), other.grad.tolist(), unused_here.grad.tolist()

    assert run_local(on_rank, 3) == [(3.0, [3.0, 0.0], [0.0, 0.0], [0.0, 0.0, 0.0])] * 3


@pytest.mark.parametrize("form", ["fsdp", "ddp"])
def test_with_fsdp_and_ddp_the_loss_is_multiplied_by_their_ranks(form):
    shape, tokens, labels, _, mask, _ = gpt_inputs("uneven")
    model = fresh(GPT(shape), torch.float64)
    dense = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    truth = results(model, gpt_loss(model, tokens, labels, torch.arange(101), dense))

    def on_rank(rank):
        sequence = startrail.SequenceParallel("2x2").sequence(101)
        local = sequence.shard(tokens, 1), sequence.shard(labels, 1, pad_value=IGNORE)
        attention, positions = partial(sequence.attention, causal=True), sequence.positions()
        mesh = init_device_mesh("cpu", (WORLD,))
        model = fresh(GPT(shape), torch.float64)
        if form == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        hidden = wrapped(local[0], positions, attention)
        loss = global_mean(*chunked_cross_entropy(hidden, model.output_weight, local[1], 7))
        (WORLD * loss).backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        if form == "fsdp":
            grads = {name: grad.full_tensor() for name, grad in grads.items()}
        return differences((loss.detach(), grads), truth, torch.float64)

    assert run_local(on_rank, WORLD) == [[]] * WORLD
