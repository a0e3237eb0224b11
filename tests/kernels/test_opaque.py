"""Recurrences around kernels of fla and mamba-ssm, by stand-ins with their arguments: what ours compute, in float64."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from startrail.kernels import opaque, recurrences
from startrail.kernels.opaque import around_mamba2
from startrail.kernels.recurrences import decayed_attention, gated_delta_rule, kimi_delta_rule

BATCH, LENGTHS, HEADS, KEYS, VALUES = 2, [7, 1, 12], 2, 4, 3


def numbers(*shape):
    return torch.randn(BATCH, sum(LENGTHS), *shape, dtype=torch.float64)


def fla(rule):
    def kernel(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    ):  # fmt: skip
        assert len(q) == 1 and output_final_state and initial_state.is_contiguous() and cu_seqlens.dtype == torch.int64
        assert len(initial_state) == len(cu_seqlens) - 1 and cu_seqlens[-1] == q.shape[1]
        lengths = cu_seqlens.diff().tolist()
        run = rule(q, k, v, g, beta, scale=scale, normalize=use_qk_l2norm_in_kernel, lengths=lengths)
        out, after = run.run(initial_state.unsqueeze(0))
        return out, after.squeeze(0)

    return kernel


def mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size, initial_states=None, return_final_states=False):
    assert return_final_states and chunk_size == 8
    out, after = decayed_attention(c, b, x * dt.unsqueeze(-1), dt * a).run(initial_states.mT.unsqueeze(1))
    return out, after.squeeze(1).mT


def delta_rule(rule, decays):
    tensors = [numbers(HEADS, KEYS), numbers(HEADS, KEYS), numbers(HEADS, VALUES)]
    tensors += [-numbers(HEADS, *decays).abs(), numbers(HEADS).sigmoid()]
    ours = partial(rule, normalize=True, scale=0.3, lengths=LENGTHS)
    return tensors, partial(ours, function=fla(rule)), ours


def mamba2():
    a = -torch.rand(HEADS, dtype=torch.float64)
    tensors = [numbers(HEADS, VALUES), numbers(HEADS).abs(), a, numbers(1, KEYS), numbers(1, KEYS)]

    def ours(x, dt, a, b, c):
        return decayed_attention(c, b, x * dt.unsqueeze(-1), dt * a, lengths=LENGTHS)

    options = dict(function=mamba_chunk_scan_combined, chunk_size=8, lengths=LENGTHS)
    return tensors, lambda *tensors: around_mamba2(*tensors, **options), ours


CASES = {
    "gated delta rule": lambda: delta_rule(gated_delta_rule, ()),
    "Kimi delta rule": lambda: delta_rule(kimi_delta_rule, (KEYS,)),
    "Mamba-2": mamba2,
}


@pytest.mark.parametrize("name", CASES)
def test_states_outputs_and_gradients(name):
    torch.manual_seed(0)
    tensors, around, ours = CASES[name]()
    state = torch.randn(BATCH, len(LENGTHS), HEADS, KEYS, VALUES, dtype=torch.float64)
    found = []
    for make in (around, ours):
        inputs = [x.clone().requires_grad_() for x in (*tensors, state)]
        run = make(*inputs[:-1])
        assert run.shape == state.shape and run.dtype == torch.float64
        transition = run.transition
        transition = transition if run.matrix else transition.expand(*run.shape[:3], 1, 1)
        results = [transition, run.contribution, run.outputs(inputs[-1]), *run.run(inputs[-1]), *run.run()]
        torch.manual_seed(1)
        cotangents = [torch.randn(x.shape, dtype=torch.float64) for x in results]
        found.append([*results, *torch.autograd.grad(results, inputs, cotangents)])
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule, name", [(gated_delta_rule, "chunk_gated_delta_rule"), (kimi_delta_rule, "chunk_kda")])
def test_kernels_of_fla_are_used_where_it_is_installed(rule, name, monkeypatch):
    tensors, _, ours = delta_rule(rule, (KEYS,) if rule is kimi_delta_rule else ())
    state = torch.randn(BATCH, len(LENGTHS), HEADS, KEYS, VALUES, dtype=torch.float64)
    expected, called = ours(*tensors).run(state), []
    package = ModuleType(opaque.FLA[name])
    kernel = fla(partial(rule, function=None))
    setattr(package, name, lambda *arguments, **options: called.append(name) or kernel(*arguments, **options))
    with monkeypatch.context() as patch:
        patch.setattr(recurrences, "suit_kernels", lambda *tensors: len(called) == 0)  # not those of the stand-in
        opaque.fla_kernel.cache_clear()
        ours(*tensors).run(state)
        assert not called, "not installed"
        patch.setitem(sys.modules, opaque.FLA[name], package)
        opaque.fla_kernel.cache_clear()
        found = ours(*tensors).run(state)
    opaque.fla_kernel.cache_clear()
    assert called == [name]
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


def test_kernels_compute_in_half_precision_on_cuda_only():
    half, single, cpu = (
        SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
        for is_cuda, dtype in ((True, torch.bfloat16), (True, torch.float32), (False, torch.bfloat16))
    )
    found = [opaque.suit_kernels(*xs) for xs in ((half, half), (half, single), (single,), (half, cpu))]
    assert found == [True, False, False, False]


def test_kernels_without_states_are_one_line():
    tensors, _, ours = delta_rule(gated_delta_rule, ())

    def stateless(q, k, v, **options):
        return v, None

    with pytest.raises(
        ValueError, match=r"^stateless does not return \(outputs, states after each run\), as fla's do$"
    ):
        ours(*tensors, function=stateless).run()
