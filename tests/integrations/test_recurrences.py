"""Our recurrences against those of transformers, in float32: as close to float64 as theirs, and nothing else."""

from __future__ import annotations

import pytest
import torch

from startrail.kernels.convolution import causal_conv1d
from startrail.kernels.elementwise import linear_recurrence, selective_scan
from startrail.kernels.recurrences import decayed_attention, gated_delta_rule, kimi_delta_rule

pytest.importorskip("transformers")

BATCH, TOKENS, HEADS, DIM, WIDTH = 2, 150, 4, 16, 24


def check(ours, theirs, inputs):
    """Outputs, states and gradients: at most twice as far from ours in float64 as theirs is."""
    results = []
    for function, dtype in ((ours, torch.float64), (ours, torch.float32), (theirs, torch.float32)):
        values = [x.to(dtype).requires_grad_() for x in inputs]
        found = function(*values)
        torch.manual_seed(1)
        cotangents = [torch.randn(x.shape).to(x.dtype) for x in found]
        results.append([*found, *torch.autograd.grad(found, values, cotangents)])
    for exact, mine, other in zip(*results, strict=True):
        assert mine.shape == other.shape
        error, allowed = ((x - exact).abs().max() for x in (mine, other))
        assert allowed <= 1e-4 * exact.abs().max()
        assert error <= 2 * allowed + 1e-6 * exact.abs().max()


def heads(*shape):
    return torch.randn(BATCH, TOKENS, *shape)


def test_gated_delta_rule():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.manual_seed(0)
    inputs = [heads(HEADS // 2, DIM), heads(HEADS // 2, DIM), heads(HEADS, WIDTH), -heads(HEADS).abs()]
    inputs += [heads(HEADS).sigmoid(), torch.randn(BATCH, HEADS, DIM, WIDTH)]

    def ours(q, k, v, g, beta, state):
        out, after = gated_delta_rule(q, k, v, g, beta, normalize=True).run(state.unsqueeze(1))
        return out, after.squeeze(1)

    def theirs(q, k, v, g, beta, state):
        options = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return torch_chunk_gated_delta_rule(q, k, v, g, beta, **options)

    check(ours, theirs, inputs)


def test_kimi_delta_attention():
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    torch.manual_seed(0)
    inputs = [heads(HEADS, DIM), heads(HEADS, DIM), heads(HEADS, WIDTH), -heads(HEADS, DIM).abs()]
    inputs += [heads(HEADS).sigmoid(), torch.randn(BATCH, HEADS, DIM, WIDTH)]

    def ours(q, k, v, g, beta, state):
        out, after = kimi_delta_rule(q, k, v, g, beta, normalize=True).run(state.unsqueeze(1))
        return out, after.squeeze(1)

    def theirs(q, k, v, g, beta, state):
        options = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return chunk_kimi_delta_attention(q, k, v, g, beta, **options)

    check(ours, theirs, inputs)


def test_mamba2():
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    torch.manual_seed(0)
    inputs = [heads(HEADS, WIDTH), heads(HEADS).abs(), -torch.rand(HEADS), heads(2, DIM), heads(2, DIM)]
    inputs += [torch.randn(BATCH, HEADS, WIDTH, DIM)]

    def ours(x, dt, a, b, c, state):
        out, after = decayed_attention(c, b, dt.unsqueeze(-1) * x, dt * a).run(state.mT.unsqueeze(1))
        return out, after.squeeze(1).mT

    def theirs(x, dt, a, b, c, state):
        return mamba2_chunk_scan(x, dt, a, b, c, chunk_size=64, initial_states=state, return_final_states=True)

    check(ours, theirs, inputs)


def test_lightning_attention():
    """A layer of MiniMax, whose last projections are taken away."""
    from transformers.models.minimax import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    torch.manual_seed(0)
    config = MiniMaxConfig(hidden_size=32, num_attention_heads=HEADS, head_dim=8, num_hidden_layers=4, block_size=16)
    layer = MiniMaxLightningAttention(config, layer_idx=1)
    layer.norm, layer.out_proj = torch.nn.Identity(), torch.nn.Identity()
    x = torch.randn(BATCH, TOKENS, 32)
    gate, weight = layer.output_gate.weight.detach(), layer.qkv_proj.weight.detach()

    def ours(x):
        qkv = layer.act_fn(x @ weight.to(x.dtype).mT).unflatten(-1, (HEADS, 24))
        g = -layer.slope_rate.to(x.dtype).view(1, 1, HEADS).expand(*x.shape[:2], HEADS)
        out, after = decayed_attention(*qkv.split(8, -1), g).run()
        return (x @ gate.to(x.dtype).mT).sigmoid() * out.flatten(2), after.squeeze(1)

    def theirs(x):
        return layer(x, None, None)

    check(ours, theirs, [x])


def test_selective_scan():
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    torch.manual_seed(0)
    inputs = [heads(WIDTH), heads(WIDTH).abs(), -torch.rand(WIDTH, 5), heads(5), heads(5)]

    def ours(*inputs):
        out, after = selective_scan(*inputs).run()
        return out, after.squeeze(1)

    def theirs(x, dt, a, b, c):
        out, after = mamba_selective_scan(x.mT, dt.mT, a, b.mT, c.mT, return_last_state=True)
        return out.mT, after

    check(ours, theirs, inputs)


def test_rg_lru():
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    torch.manual_seed(0)
    inputs = [heads(WIDTH).sigmoid(), heads(WIDTH), torch.randn(BATCH, WIDTH)]
    reset = torch.zeros(BATCH, TOKENS, 1, dtype=torch.bool)
    reset[0, 40] = reset[1, 100] = True  # documents

    def ours(a, b, state):
        out, after = linear_recurrence(a * ~reset, b).run(state.unsqueeze(1))
        return out, after.squeeze(1)

    def theirs(a, b, state):
        return RecurrentGemmaRglru._rnn_scan(None, b, a, reset, state)

    check(ours, theirs, inputs)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv1d(activation):
    from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn

    torch.manual_seed(0)
    inputs = [torch.randn(BATCH, WIDTH, TOKENS), torch.randn(WIDTH, 4), torch.randn(WIDTH)]
    check(
        lambda *inputs: [causal_conv1d(*inputs, activation)],
        lambda *inputs: [causal_conv1d_fn(*inputs, activation)],
        inputs,
    )
