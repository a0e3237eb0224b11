"""Tiny transformers of diffusers, each with arguments for one call."""

from __future__ import annotations

import logging
from typing import Any

import diffusers
import torch
from torch import nn

logging.getLogger("diffusers").setLevel(logging.ERROR)
Made = tuple[nn.Module, dict[str, Any]]


def dit() -> Made:
    """25 tokens, 3 heads; labels are dropped at random in training."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=10,
        num_embeds_ada_norm=10, norm_num_groups=2,
    )  # fmt: skip
    timestep, labels = torch.tensor([3, 5]), torch.tensor([1, 2])
    return model, dict(hidden_states=torch.randn(2, 4, 10, 10), timestep=timestep, class_labels=labels)


def sd3() -> Made:
    """Joint attention with 7 tokens of text, and image tokens alone in the first block (``attn2``)."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=12, caption_projection_dim=32, pooled_projection_dim=10, out_channels=4,
        pos_embed_max_size=16, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    others = dict(pooled_projections=torch.randn(2, 10), timestep=torch.tensor([3, 5]))
    return model, dict(hidden_states=torch.randn(2, 4, 10, 10), encoder_hidden_states=torch.randn(2, 7, 12), **others)


def flux(batch: int = 1, text: int = 7, image: int = 25, heads: int = 2) -> Made:
    """Text and image in one sequence, which the model's plan splits."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=heads, joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    ids = dict(img_ids=torch.randint(0, 5, (image, 3)).float(), txt_ids=torch.zeros(text, 3))
    tokens = dict(hidden_states=torch.randn(batch, image, 4), encoder_hidden_states=torch.randn(batch, text, 12))
    return model, dict(tokens, pooled_projections=torch.randn(batch, 10), timestep=torch.rand(batch), **ids)


def flux_of_one_head() -> Made:
    """On the first of four ranks, the table of positions has the shape (4, 16) of the embedded timesteps."""
    return flux(batch=4, text=1, image=13, heads=1)


def chroma() -> Made:
    """25 image tokens next to 7 of text in the first block, 32 of both in the second: tokens are split twice."""
    model = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1,
    )  # fmt: skip
    ids = dict(img_ids=torch.randint(0, 5, (25, 3)).float(), txt_ids=torch.zeros(7, 3))
    tokens = dict(hidden_states=torch.randn(1, 25, 4), encoder_hidden_states=torch.randn(1, 7, 32))
    return model, dict(tokens, timestep=torch.rand(1), **ids)


def wan() -> Made:
    """A video of 27 tokens; text is in cross-attention."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    others = dict(timestep=torch.tensor([3]), encoder_hidden_states=torch.randn(1, 7, 16))
    return model, dict(hidden_states=torch.randn(1, 4, 3, 6, 6), **others)


def wan_by_token() -> Made:
    """A timestep for each token, as in Wan 2.2."""
    model, batch = wan()
    return model, {**batch, "timestep": torch.randint(0, 9, (1, 27))}


def qwen() -> Made:
    """Joint attention; its plan is not followed, because it splits masks."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    others = dict(encoder_hidden_states_mask=torch.ones(1, 7).long(), timestep=torch.rand(1), img_shapes=[(1, 4, 5)])
    return model, dict(hidden_states=torch.randn(1, 20, 16), encoder_hidden_states=torch.randn(1, 7, 16), **others)
