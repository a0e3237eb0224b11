"""Vision-language models: images are embedded on the whole sequence, and what enters the language model is split.

Every rank embeds the whole batch: all ids and all images. A hook on the language model then takes this rank's tokens of
the embeddings and of the positions, which may have several axes. A rank's gradient of the vision tower comes from its
own tokens, so the sum over ranks is the whole gradient, as for all other parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from startrail.integrations.batch import BatchContext
    from startrail.integrations.transformers import Attached

TESTED = ("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # values of config.model_type
LANGUAGE_MODEL = "language_model"
# What language models take: per token, for the tokens of images only, and for the whole batch.
SPLIT = ("inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks")
OF_IMAGES = "deepstack_visual_embeds"


def language_model_name(model: nn.Module) -> str | None:
    """The name of the language model inside a model of several kinds of input, or None."""
    names = (name for name, _ in model.named_modules() if name.split(".")[-1] == LANGUAGE_MODEL)
    return next(names, None)


def text_model(model: nn.Module) -> nn.Module:
    """The part of a model that attends over the sequence: its language model, or all of it."""
    name = language_model_name(model)
    return model if name is None else model.get_submodule(name)


def is_tested(model: PreTrainedModel) -> bool:
    return language_model_name(model) is None or model.config.model_type in TESTED


def split_inputs(
    attached: Attached, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the language model runs: this rank's tokens of a batch that was embedded whole."""
    context = attached.context
    if context is None or context.whole is None:
        return None
    if arguments or options.get("inputs_embeds") is None:
        raise ValueError(f"{module._startrail_name}: expected inputs_embeds= of all tokens")
    local, positions = dict(options), options.get("position_ids")
    local["inputs_embeds"] = context.split(options["inputs_embeds"], 1)
    given = context.whole.positions if positions is None else positions
    local["position_ids"] = context.split(given, -1)
    if isinstance(options.get("attention_mask"), Tensor):
        local["attention_mask"] = context.ones
    masks, embeddings = options.get(SPLIT[-1]), options.get(OF_IMAGES)
    if masks is not None and embeddings is not None:
        local[SPLIT[-1]], local[OF_IMAGES] = _split_images(context, masks, embeddings)
    tokens = tuple(options["inputs_embeds"].shape[:2])
    for name, x in options.items():
        if isinstance(x, Tensor) and name not in SPLIT and tuple(x.shape[:2]) == tokens:
            raise ValueError(f"{module._startrail_name}: its argument {name} {tuple(x.shape)} is not split over ranks")
    return (), local


def _split_images(context: BatchContext, mask: Tensor, embeddings: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """This rank's part of embeddings that only the tokens of images have: ``mask`` (batch, tokens) says which."""
    numbers = torch.where(mask, mask.flatten().cumsum(0).view(mask.shape) - 1, -1)
    own = context.split(numbers, 1, pad_value=-1)
    return own >= 0, [x[own[own >= 0]] for x in embeddings]
