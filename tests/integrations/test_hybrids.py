"""Models with recurrences and convolutions: loss and all gradients of one process, and what is never run wrongly."""

import copy
import gc
import inspect
import sys
from functools import partial
from itertools import pairwise
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

import startrail
from startrail.integrations import recurrent, seams
from startrail.integrations.seams import SEAMS
from startrail.integrations.transformers import attach, detach, detached, shard_batch
from startrail.launch.local import run_local
from tests.helpers import FULL, error_of
from tests.integrations.one_process import BATCHES, Truth, compare, many_ranks, one_process, truth_of
from tests.integrations.tiny import InFloat64, backward, differences, gradients, hybrids, packed, tiny, tokens

PLANS = {2: ["1x2"], 4: ["u2/1x2", "2x2"]}
ON_ALL_PLANS = ("qwen3-next", "nemotron-h", "lfm2", "jamba")
WITHOUT_MASKS = ("recurrent-gemma",)  # padding on the left changes what one process of transformers computes


def batches_of(name):
    kinds = list(BATCHES) if FULL else ["packed", "left"] if name in ON_ALL_PLANS else ["packed"]
    return [kind for kind in kinds if not (name in WITHOUT_MASKS and kind == "left")]


def families_of(plan):
    return hybrids() if FULL or plan == "u2/1x2" else ON_ALL_PLANS


@pytest.mark.parametrize("world", sorted(PLANS))
def test_loss_and_gradients_are_those_of_one_process(world):
    torch.set_num_threads(1)
    names = {name for plan in PLANS[world] for name in families_of(plan)}
    alone = {
        (name, kind): one_process(name, BATCHES[kind], torch.float64) for name in names for kind in batches_of(name)
    }

    def on_rank(rank):
        wrong = []
        for plan in PLANS[world]:
            sp = startrail.SequenceParallel(plan)
            for name in families_of(plan):
                model = attach(tiny(name, torch.float64), sp)
                for kind in batches_of(name):
                    loss, grads = alone[name, kind]
                    with InFloat64():
                        lines = compare(*many_ranks(model, sp, BATCHES[kind]), Truth(loss, grads, grads))
                    wrong += [f"{plan} {name} {kind}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world) == [[]] * world


def test_in_float32_the_error_is_that_of_one_process():
    names = ("qwen3-next", "mamba2", "lfm2-moe")
    truths = {(name, kind): truth_of(name, BATCHES[kind]) for name in names for kind in ("packed", "right")}

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel("1x2"), []
        for (name, kind), truth in truths.items():
            lines = compare(*many_ranks(attach(tiny(name), sp), sp, BATCHES[kind]), truth)
            wrong += [f"{name} {kind}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, 2) == [[]] * 2


def test_in_half_precision_the_error_is_that_of_one_process():
    """Autocast, and weights in bfloat16: all gradients together are at most 1.5 times as far off."""
    names, batch = ("qwen3-next", "mamba2", "mamba", "recurrent-gemma"), BATCHES["uneven"]

    def gradient(name, autocast, sp=None):
        model = tiny(name, torch.float32 if autocast else torch.bfloat16)
        model = model if sp is None else attach(model, sp)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**(batch if sp is None else shard_batch(sp, **batch)), use_cache=False).loss
        loss.backward()
        if sp is not None:
            startrail.sum_gradients(model.parameters(), sp.group)
        return torch.cat([x.double().flatten() for x in gradients(model).values()])

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2")
        return {case: float((gradient(*case, sp) - exact[case[0]]).norm()) for case in alone}

    exact = {
        name: torch.cat([x.flatten() for x in one_process(name, batch, torch.float64)[1].values()]) for name in names
    }
    alone = {(name, autocast): gradient(name, autocast) for name in names for autocast in (True, False)}
    for errors in run_local(on_rank, 2):
        allowed = {case: 1.5 * float((alone[case] - exact[case[0]]).norm()) for case in alone}
        assert {case: error for case, error in errors.items() if not error <= allowed[case]} == {}


def test_recomputed_layers_send_nothing_and_keep_their_batch():
    """Two calls with other documents, then one backward pass. Tiled MLPs are the same as well."""

    def steps(name, sp, tile_mlp, recompute):
        model = attach(tiny(name, torch.float64), sp, tile_mlp=tile_mlp)
        if recompute:
            model.gradient_checkpointing_enable()
        sp.reset_counters()
        with InFloat64():
            losses = [model(**shard_batch(sp, **batch)).loss for batch in (packed(20, 1, 30), packed(9, 40, 5))]
            backward(losses[0] + 2 * losses[1])
        return gradients(model), sp.traffic()["level 0"]

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel("1x2"), []
        for name in hybrids() if FULL else ("qwen3-next", "falcon-h1", "mamba", "minimax", "recurrent-gemma"):
            tile = 8 if name in ("qwen3-next", "falcon-h1", "minimax") else None
            (kept, sent), (recomputed, sent_again) = (steps(name, sp, tile, again) for again in (False, True))
            wrong += [f"{name}: {line}" for line in differences(recomputed, kept, 1e-13)]
            wrong += [] if sent == sent_again else [f"{name}: {sent}, {sent_again}"]
        return wrong

    assert run_local(on_rank, 2) == [[]] * 2


@pytest.mark.parametrize("name", ["qwen3-next", "mamba2"] if FULL else ["qwen3-next"])
def test_sharded_weights(name):
    """FSDP2 before and after ``attach``: a layer reads the weight of its convolution, whose module does not run."""
    truth = one_process(name, BATCHES["packed"], torch.float64)[1]

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel("1x2"), []
        for shards_first in (True, False):
            model = tiny(name, torch.float64)
            for step in (partial(attach, model, sp), partial(shard, model))[:: -1 if shards_first else 1]:
                step()
            with InFloat64():
                backward(model(**shard_batch(sp, **BATCHES["packed"])).loss)
            grads = {name: sp.world * x.grad.full_tensor() for name, x in model.named_parameters()}
            wrong += differences(grads, truth, 1e-13)
        return wrong

    def shard(model):
        for layer in model.get_submodule(model.base_model_prefix).layers:
            fully_shard(layer)
        fully_shard(model)

    assert run_local(on_rank, 2) == [[]] * 2


def test_only_states_and_halos_are_sent_whatever_the_length():
    def on_rank(rank):
        sp, sent = startrail.SequenceParallel("1x4"), set()
        model = attach(tiny("mamba2"), sp, check=False)
        for length in (64, 640):
            sp.reset_counters()
            many_ranks(model, sp, packed(length))
            sent.add(sp.traffic()["level 0"]["bytes"])
        return len(sent)

    assert run_local(on_rank, 4) == [1] * 4


def test_other_models_of_the_file_run_as_before():
    """While one is attached, when it is paused, by a copy of it, and once it is detached."""
    sp, batch = startrail.SequenceParallel("1x1"), dict(input_ids=tokens(1, 20), labels=tokens(1, 20))
    modeling, plain = modeling_qwen3_next, tiny("qwen3-next")
    original = modeling.causal_conv1d_fn
    expected = plain(**batch).loss.item()
    model = attach(tiny("qwen3-next"), sp)
    copied = copy.deepcopy(model)
    assert modeling.causal_conv1d_fn is not original
    assert plain(**batch).loss.item() == expected
    with detached(model):
        assert model(**batch).loss.item() == expected
    assert model(**shard_batch(sp, **batch)).loss.item() == pytest.approx(expected, rel=1e-6)
    assert detach(model)(**batch).loss.item() == expected and modeling.causal_conv1d_fn is original
    assert copied(**shard_batch(sp, **packed(9, 11))).loss.item() == pytest.approx(
        one_process("qwen3-next", packed(9, 11))[0], rel=1e-6
    )
    assert modeling.causal_conv1d_fn is not original, "the copy needs it"
    detach(copied)
    assert modeling.causal_conv1d_fn is original
    dropped = attach(tiny("qwen3-next"), sp)
    assert modeling.causal_conv1d_fn is not original
    del dropped
    gc.collect()
    assert modeling.causal_conv1d_fn is original


def test_seams_are_tried_wherever_attach_is_called():
    """Their results are remembered, and must not depend on what is around."""
    for name in ("qwen3-next", "minimax", "recurrent-gemma"):
        seams._computes.cache_clear()
        model = tiny(name)
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            found = [
                seams.computes(sys.modules[file], each) for _, file, names in recurrent.layers(model) for each in names
            ]
        assert found and all(found)


def test_seams_that_have_moved_are_noticed(monkeypatch):
    """Another computation, another name, a function of another library, and a layer that runs by itself."""
    sp, modeling = startrail.SequenceParallel("1x1"), modeling_qwen3_next
    conv = modeling.causal_conv1d_fn
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "causal_conv1d_fn", lambda x, weight, *rest, **options: conv(x, 2 * weight, *rest))
        text = error_of(lambda: attach(tiny("qwen3-next"), sp))
    assert text.startswith(
        "ValueError: model.layers.0.linear_attn: causal_conv1d_fn of transformers.models.qwen3_next.modeling_qwen3_next"
        " does not compute what startrail would in its place"
    )
    assert modeling.causal_conv1d_fn is conv
    with monkeypatch.context() as patch:
        patch.delitem(SEAMS, "torch_chunk_gated_delta_rule")
        recurrent._seams_of.cache_clear()
        text = error_of(lambda: attach(tiny("qwen3-next"), sp))
    recurrent._seams_of.cache_clear()
    assert "model.layers.0.linear_attn" in text and "a token's result depends on other tokens outside attention" in text
    model = attach(tiny("qwen3-next"), sp)
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "causal_conv1d_fn", conv)
        text = error_of(lambda: model(**shard_batch(sp, **packed(9, 11))))
    assert "model.layers.0.linear_attn: it does not call causal_conv1d_fn of its modeling file, or another" in text
    text = error_of(lambda: model(**shard_batch(sp, **packed(9, 11)), seq_idx=torch.zeros(1, 20)))
    assert "model.layers.0.linear_attn: unsupported argument to causal_conv1d_fn: seq_idx=(1, 20)" in text
    text = error_of(lambda: model.model.layers[0].linear_attn(torch.zeros(1, 4, 32)))
    assert "model.layers.0.linear_attn: called without a batch" in text


def stand_in(seam, x, called):
    """For a kernel of fla or mamba-ssm: transformers' own function, which takes one run at a time."""
    own = inspect.unwrap(seam)

    def kernel(q, k, v, *mamba2, cu_seqlens=None, initial_state=None, **options):
        called.append(own.__name__)
        if mamba2:
            return own(q, k, v, *mamba2, **options)
        found = []
        for run, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
            tokens = {name: options[name][:, start:stop] for name in ("g", "beta")}
            state = initial_state[run : run + 1]
            found.append(own(*(x[:, start:stop] for x in (q, k, v)), initial_state=state, **{**options, **tokens}))
        return tuple(torch.cat(each, 1 - place) for place, each in enumerate(zip(*found, strict=True)))

    return kernel


def test_kernels_of_other_libraries_get_the_right_arguments(monkeypatch):
    names = {"qwen3-next": "torch_chunk_gated_delta_rule", "kimi-linear": "chunk_kimi_delta_attention"}
    names |= {"mamba2": "mamba2_chunk_scan"}
    truths = {name: one_process(name, BATCHES["packed"], torch.float64) for name in names}
    called = []
    monkeypatch.setattr(recurrent, "fused_kernel", partial(stand_in, called=called))

    def on_rank(rank):
        sp, wrong = startrail.SequenceParallel("1x2"), []
        for name, (loss, grads) in truths.items():
            called.clear()
            model = attach(tiny(name, torch.float64), sp)
            with InFloat64():
                lines = compare(*many_ranks(model, sp, BATCHES["packed"]), Truth(loss, grads, grads))
            wrong += [f"{name}: {line}" for line in lines] + [name] * (set(called) != {names[name]})
        return wrong

    assert run_local(on_rank, 2) == [[]] * 2


def test_kernels_of_other_libraries_are_found_where_transformers_has_them(monkeypatch):
    """In a package or from the hub; on CUDA only, and not for float64, which they do not support."""
    package = ModuleType("fla")
    package.chunk_gated_delta_rule = lambda q, k, v, g, beta, cu_seqlens=None: None
    monkeypatch.setitem(sys.modules, "fla", package)
    torch_only = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    seam = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(torch_only)
    cuda, double, cpu = (
        SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
        for is_cuda, dtype in ((True, torch.bfloat16), (True, torch.float64), (False, torch.bfloat16))
    )
    assert seams.fused_kernel(seam, cuda) is package.chunk_gated_delta_rule
    assert seams.fused_kernel(seam, double) is seams.fused_kernel(seam, cpu) is None
    assert seams.fused_kernel(modeling_qwen3_next.torch_chunk_gated_delta_rule, cuda) is None, "not installed"
    assert seams.fused_kernel(torch_only, cuda) is None
    module = as_module(seam)
    assert seams.fused_kernel(module, cuda) is package.chunk_gated_delta_rule
    module.forward = MethodType(type(module).forward, module)  # the hub has no kernel for this device
    assert seams.fused_kernel(module, cuda) is package.chunk_gated_delta_rule
    module.forward = MethodType(from_the_hub, module)
    assert seams.fused_kernel(module, cuda) is module and seams.fused_kernel(module, cpu) is None
    assert seams.fused_kernel(as_module(modeling_qwen3_next.torch_chunk_gated_delta_rule), cuda) is None


def as_module(func):
    """What ``use_kernel_forward_from_hub`` of the ``kernels`` library makes of a function."""

    class Func(torch.nn.Module):
        def forward(self, *arguments, **options):
            return func(*arguments, **options)

    return Func()


def from_the_hub(module, *arguments, **options):
    """Takes the place of such a module's forward pass when a model is kernelized."""
    raise RuntimeError("this kernel runs on CUDA only")


def test_models_with_kernels_of_the_hub_are_attached_and_restored(monkeypatch):
    sp, modeling, name = startrail.SequenceParallel("1x1"), modeling_qwen3_5, "torch_chunk_gated_delta_rule"
    right, module = getattr(modeling, name), as_module(getattr(modeling, name))
    module.forward = MethodType(from_the_hub, module)
    results = []
    for seam in (right, module):
        monkeypatch.setattr(modeling, name, seam)
        model = attach(tiny("qwen3.5"), sp)
        assert getattr(modeling, name) is not seam
        results.append(model(**shard_batch(sp, **packed(9, 11))).loss.item())
        detach(model)
        assert getattr(modeling, name) is seam
    assert results[0] == results[1]
