"""The loss without whole logits, tiled MLPs and layer inputs on the host: the loss and gradients of one process."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import transformers as hf
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import startrail
from startrail.checkpoint import in_chunks
from startrail.integrations import without_logits
from startrail.integrations.transformers import attach, detach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import FULL, error_of
from tests.integrations import tiny as tiny_models
from tests.integrations.one_process import BATCHES, Truth, compare, many_ranks, one_process, summed, truth_of
from tests.integrations.tiny import SMALL, InFloat64, backward, gradients, tiny, tokens

# Heads: a softcap; a scale, tied weights; a divisor; a bias; a bias and dropout; the plain one, with experts.
HEADS = {
    "gemma2": None,
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig(**SMALL, logit_scale=0.25, tie_word_embeddings=True)),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig(**SMALL, logits_scaling=3.0)),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig(**SMALL, resid_pdrop=0.0, embd_pdrop=0.0)),
    "gpt-oss": None,
}
OPTIONS = {
    "chunks": {}, "tiles": dict(tile_mlp=5), "on host": dict(offload=True), "all": dict(tile_mlp=5, offload=True),
}  # fmt: skip
CHUNK = 8  # tokens


@pytest.fixture(autouse=True, scope="module")
def small_chunks_and_more_heads():
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(without_logits, "CHUNK_BYTES", CHUNK * SMALL["vocab_size"] * 4)
        known = {**tiny_models.families(), **{name: made for name, made in HEADS.items() if made}}
        patch.setattr(tiny_models, "families", lambda: known)
        yield


class Largest(TorchDispatchMode):
    """The largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        self.numel = max([self.numel, *(x.numel() for x in made if isinstance(x, torch.Tensor))])
        return result


def test_every_head_and_option_on_ranks():
    """Every option and every kind of batch with every head; `make test-all` has their product."""
    kinds = ("uneven", "packed")
    truths = {(name, kind): truth_of(name, BATCHES[kind]) for name in HEADS for kind in kinds}

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2")
        found = {}
        for at, name in enumerate(HEADS):
            for number, (option, options) in enumerate(OPTIONS.items()):
                for kind in kinds if FULL else (kinds[(at + number) % 2],):
                    model = attach(tiny(name), sp, **options)
                    found[name, kind, option] = compare(*many_ranks(model, sp, BATCHES[kind]), truths[name, kind])
        # a head that FSDP gathers whenever it is called, and a tied one that the root gathers
        for parts in (("lm_head",), ()):
            model = attach(tiny("phi" if parts else "gemma2"), sp, tile_mlp=5)
            for part in (*model.model.layers, *(model.get_submodule(part) for part in parts)):
                fully_shard(part)
            fully_shard(model)
            loss = model(**shard_batch(sp, **BATCHES["uneven"])).loss
            (startrail.gradient_factor(model) * loss).backward()
            whole = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
            found["fsdp", parts] = compare(summed(loss), whole, truths["phi" if parts else "gemma2", "uneven"])
        return {kind: lines for kind, lines in found.items() if lines}

    assert run_local(on_rank, 4) == [{}] * 4


def test_in_float64():
    alone = {name: one_process(name, BATCHES["uneven"], torch.float64) for name in HEADS}
    sp = startrail.SequenceParallel("1x1")
    for name, (loss, grads) in alone.items():
        model = attach(tiny(name, torch.float64), sp, tile_mlp=7, offload=True)
        with InFloat64():
            ours = model(**shard_batch(sp, **BATCHES["uneven"])).loss
            backward(ours)
        assert compare(ours.item(), gradients(model), Truth(loss, grads, grads)) == [], name


def test_no_tensor_has_the_size_of_the_logits_or_of_the_mlps_intermediate():
    """And the first call says what that saves."""
    sp = startrail.SequenceParallel("1x1")
    count, sizes = 200, dict(vocab_size=1024, intermediate_size=512)
    config = hf.LlamaConfig(**SMALL | sizes)
    ids = tokens(1, count)
    found = {}
    for name, options in dict(OPTIONS, whole=dict(logits=True)).items():
        torch.manual_seed(0)
        model = attach(hf.LlamaForCausalLM(config), sp, check=False, **options)
        batch = shard_batch(sp, ids, ids)
        with Largest() as largest:
            model(**batch).loss.backward()
        found[name] = largest.numel
    assert found["whole"] == count * 1024
    assert found["chunks"] == found["on host"] == count * 512
    assert found["tiles"] == found["all"] == 1024 * 32, "the head's weight"


def test_what_is_saved_is_said_once(capfd):
    sp = startrail.SequenceParallel("1x1")
    model = attach(tiny("llama"), sp)
    for _ in range(2):
        model(**shard_batch(sp, **BATCHES["uneven"]))
    said = capfd.readouterr().err
    assert said.count("startrail: the loss is computed on 8 tokens at a time") == 1 and "all 74 tokens" in said


def test_logits_when_asked_for_and_forward_passes_of_others():
    sp = startrail.SequenceParallel("1x1")
    batch = BATCHES["uneven"]
    expected = tiny("gemma2")(**batch, use_cache=False)
    for model, options in (
        (attach(tiny("gemma2"), sp), dict(logits=True)), (attach(tiny("gemma2"), sp, logits=True), {})
    ):  # fmt: skip
        made = model(**shard_batch(sp, **batch), **options)
        assert torch.allclose(made.logits, expected.logits, rtol=1e-5, atol=1e-5) and torch.allclose(
            made.loss, expected.loss
        )
    averaged = {**shard_batch(sp, **batch), "num_items_in_batch": None}
    assert torch.allclose(attach(tiny("gemma2"), sp)(**averaged).loss, expected.loss), "a mean, not a sum of means"
    as_tuple = model(**shard_batch(sp, **batch), return_dict=False)
    assert as_tuple[1].shape == expected.logits.shape
    made = shard_batch(sp, **batch)
    model = attach(tiny("gemma2"), sp)
    ids = made.pop("input_ids")
    assert torch.equal(model(ids, **made).loss, model(input_ids=ids, **made).loss), "positional arguments"
    assert "forward" in model.__dict__ and "forward" not in detach(model).__dict__
    model = tiny("gemma2")
    calls = []
    model.forward = lambda *x, inner=model.forward, **y: calls.append(1) or inner(*x, **y)  # as TRL and accelerate do
    before = model.forward
    attach(model, sp)(**shard_batch(sp, **batch)).loss.backward()
    assert calls and detach(model).forward is before
    for wrong in (0, True, 2.5):
        assert "must be the number of tokens of a tile" in error_of(lambda: attach(tiny("llama"), sp, tile_mlp=wrong))  # noqa: B023


def test_a_loss_that_chunks_change_gets_whole_logits():
    sp = startrail.SequenceParallel("1x1")
    model = tiny("llama")
    plain = model.loss_function

    def uneven(logits, labels, vocab_size, **options):
        return plain(logits, labels, vocab_size, **options) + (0.1 if logits.shape[1] < 4 else 0.0)

    model.loss_function = uneven
    with pytest.warns(UserWarning, match="so logits are computed whole"):
        attach(model, sp)
    assert model(**shard_batch(sp, **BATCHES["uneven"])).logits is not None


def test_chunks_of_a_module():
    """Gradients of parameters in bfloat16 are added up in float32; dropout repeats its draws; autocast is repeated."""
    torch.manual_seed(0)
    x, upstream = torch.randn(1, 512, 16), torch.randn(1, 512, 16)

    def gradient(dtype, chunk, autocast=False):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)).to(dtype)
        given = x.clone().to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(given) if chunk is None else in_chunks(module, module, given, chunk=chunk)
        out.backward(upstream.to(out.dtype))
        return [given.grad, *(parameter.grad for parameter in module.parameters())]

    exact = gradient(torch.float64, None)
    for dtype in (torch.bfloat16, torch.float32):
        whole, ours = gradient(dtype, None), gradient(dtype, 4)
        for a, b, true in zip(whole, ours, exact, strict=True):
            off, alone = ((y.double() - true).norm() / true.norm() for y in (b, a))
            assert off <= max(2 * alone, 1e-6)
    for a, b in zip(gradient(torch.float32, None, True), gradient(torch.float32, 512, True), strict=True):
        assert torch.equal(a, b)

    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    given = x.clone().requires_grad_()
    out = in_chunks(module, module, given, chunk=100)
    dropped = (out == 0).float()
    out.backward(torch.ones_like(out))
    expected = ((1 - dropped) * 2) @ module[0].weight
    assert torch.allclose(given.grad, expected, atol=1e-6) and 0.4 < dropped.mean() < 0.6
    with torch.no_grad():
        assert in_chunks(module, module.eval(), given, chunk=100).shape == given.shape
