"""Tiny vision-language models, and batches of text and images for them."""

import copy
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.integrations.tiny import EXPERTS, SMALL, TEXT_OF_THREE, tokens

IMAGE, VIDEO, START, END = 60, 61, 62, 63  # ids
GRID = (1, 4, 8)  # time, height and width in patches; 2 x 2 of them become one token
QWEN_TOKENS, GEMMA_TOKENS = 8, 4


@cache
def models() -> dict[str, tuple[type, Any]]:
    """Positions of three axes; the same and features of images in several layers; the same and experts with their
    auxiliary loss; images as bidirectional blocks, next to windows."""
    ids = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
    seeing = dict(depth=2, hidden_size=16, num_heads=2, intermediate_size=24, patch_size=2, spatial_merge_size=2)
    seeing |= dict(temporal_patch_size=2, in_channels=3, out_hidden_size=32)
    windows = dict(window_size=8, fullatt_block_indexes=[1])
    deep = dict(deepstack_visual_indexes=[0, 1], num_position_embeddings=64)
    three = dict(TEXT_OF_THREE, head_dim=8)
    mixture = dict(EXPERTS, num_experts=4, output_router_logits=True, router_aux_loss_coef=2.5)
    kinds = dict(head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    siglip = dict(
        vision_use_head=False,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
    )
    return {
        "qwen2.5-vl": (
            hf.Qwen2_5_VLForConditionalGeneration,
            hf.Qwen2_5_VLConfig(text_config=TEXT_OF_THREE, vision_config=seeing | windows, **ids),
        ),
        "qwen3-vl": (
            hf.Qwen3VLForConditionalGeneration,
            hf.Qwen3VLConfig(text_config=three, vision_config=seeing | deep, **ids),
        ),
        "qwen3-vl-moe": (
            hf.Qwen3VLMoeForConditionalGeneration,
            hf.Qwen3VLMoeConfig(text_config=three | mixture, vision_config=seeing | deep, **ids),
        ),
        "gemma3": (
            hf.Gemma3ForConditionalGeneration,
            hf.Gemma3Config(
                text_config=SMALL | kinds, vision_config=siglip | dict(patch_size=2), mm_tokens_per_image=GEMMA_TOKENS,
                image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END,
            ),
        ),
    }  # fmt: skip


def tiny_seeing(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, config = copy.deepcopy(models()[name])
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # as in tiny
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
    generator = torch.Generator().manual_seed(6)
    for x in model.parameters():
        noise = torch.randn(x.shape, generator=generator)
        x.data = 0.15 * noise if x.dim() > 1 else x.data + 0.1 * noise
    return model.to(dtype).train()


def images(name: str, count: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    if name == "gemma3":
        return dict(pixel_values=torch.randn(count, 3, 8, 8, generator=generator).to(dtype))
    patches = GRID[0] * GRID[1] * GRID[2]
    pixels = torch.randn(count * patches, 3 * 2 * 2 * 2, generator=generator)
    return dict(pixel_values=pixels.to(dtype), image_grid_thw=torch.tensor([GRID] * count))


def row(name: str, *parts: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids of texts of so many tokens, with an image after each but the last, and 1 where an image is."""
    size = GEMMA_TOKENS if name == "gemma3" else QWEN_TOKENS
    text = tokens(1, sum(parts), seed)[0] % 50 + 3
    ids, kinds = [], []
    for number, part in enumerate(text.split(list(parts))):
        ids += [part, torch.tensor([START])] if number < len(parts) - 1 else [part]
        kinds += [torch.zeros(len(part) + (number < len(parts) - 1), dtype=torch.long)]
        if number < len(parts) - 1:
            ids += [torch.full((size,), IMAGE), torch.tensor([END])]
            kinds += [torch.ones(size, dtype=torch.long), torch.zeros(1, dtype=torch.long)]
    return torch.cat(ids), torch.cat(kinds)


def batch_of_images(name: str, rows: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Rows of texts and images, padded on the right."""
    made = [row(name, *parts, seed=number) for number, parts in enumerate(rows)]
    longest = max(len(ids) for ids, _ in made)
    ids, kinds, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
    for number, (own, own_kinds) in enumerate(made):
        ids[number, : len(own)], kinds[number, : len(own)], mask[number, : len(own)] = own, own_kinds, 1
    labels = ids.masked_fill((mask == 0) | (kinds == 1), -100)
    types = dict(token_type_ids=kinds) if name == "gemma3" else dict(mm_token_type_ids=kinds)
    count = sum(len(parts) - 1 for parts in rows)
    return dict(input_ids=ids, labels=labels, attention_mask=mask, **types, **images(name, count, dtype))
