"""What ``attach`` checks before a model runs on ranks: its config, and forward passes of a few tokens, in which every
layer shows its mask, scale, sinks and other arguments while attention returns zeros."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from startrail.integrations import recurrent, routers, z_loss
from startrail.integrations.batch import IGNORE
from startrail.integrations.layer_masks import MaskUseError
from startrail.integrations.token_mixing import find_token_mixing
from startrail.integrations.vision import text_model
from startrail.integrations.without_logits import finding_layers

if TYPE_CHECKING:
    from startrail.integrations.transformers import Attached

PROBE_TOKENS = 4
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", None)  # layer types that run
MIXING = (
    "linear",
    "mamba",
    "conv",
    "recurrent",
    "ssm",
    "delta",
    "hybrid",
)  # words in types with a state or convolution
PER_TOKEN = ("mlp", "moe")
SHOWN = 8  # layers that an error lists


class PositionRule(Enum):
    """How a model counts positions if it is given none."""

    INDEX = "index in the row"
    MASK = "index among the tokens that the attention mask keeps"
    OWN = "otherwise"


def check_config(model: PreTrainedModel) -> None:
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name}: a decoder that attends to an encoder's states is not supported")
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    others = {index: kind for index, kind in enumerate(layer_types) if kind not in (*ATTENTION, *PER_TOKEN)}
    split = any(True for _ in recurrent.layers(model))  # what they really do is found when the model is probed
    for kind in dict.fromkeys(others.values()):
        layers = [str(index) for index, other in others.items() if other == kind]
        which = f"layers {_some(layers)} ({len(layers)} of {len(layer_types)}) are {kind!r}"
        if any(word in str(kind) for word in MIXING):
            if split:
                continue
            raise ValueError(f"{name}: {which}: their state would have to pass from rank to rank. {_whole_cost(model)}")
        picks = "each query picks the keys that it sees, which is not supported"
        raise ValueError(f"{name}: {which}: {picks if 'indexed' in str(kind) else 'unsupported layer type'}")


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= SHOWN else [*names[:SHOWN], "..."])


def _whole_cost(model: PreTrainedModel) -> str:
    """What such a layer costs if its sequence is kept whole."""
    config = model.config.get_text_config(decoder=True)
    per_token = config.hidden_size * next(model.parameters()).element_size()
    tokens = 2**17
    return (
        "Such a layer can keep its sequence whole in your own model code: x = sequence.unshard(x, 1) before it, and "
        f"sequence.shard(y, 1) after it. Every rank then holds and receives {per_token:,d} bytes per token of the "
        f"whole sequence, per layer and pass ({per_token * tokens / 2**20:,.0f} MiB for {tokens:,d} tokens), and "
        "computes the layer for all tokens; packed documents need a layer that resets its state"
    )


def probe(model: PreTrainedModel, attached: Attached) -> None:
    """Run forward passes of a few tokens, in which layers show their arguments and attention returns zeros."""
    expected = {str(module._startrail_name) for module in text_model(model).modules() if is_attention(module)}
    device = next(model.parameters()).device
    ids = torch.arange(PROBE_TOKENS, device=device).unsqueeze(0) % 2
    labels = torch.tensor([[1, 0, 1, IGNORE]], device=device)
    options = dict(labels=labels, shift_labels=labels, num_items_in_batch=7)

    def run(ids: Tensor, **options: Any) -> Any:
        options = dict(attention_mask=torch.ones_like(ids), position_ids=torch.full_like(ids, 3)) | options
        if routers.is_wanted(model, options):
            options["output_router_logits"] = False  # only the loss of the labels is compared
        return model(input_ids=ids, use_cache=False, **options)

    with _probing(model, attached), finding_layers(model, attached):
        model.train()
        attached.wants_logits = True
        output = run(ids, **options)
        probed = attached.probed or []
    for name, problem in probed:
        if problem:
            raise ValueError(f"{name}: {problem}")
    if not probed:
        raise ValueError(f"no layer of {type(model).__name__} calls attention through transformers' AttentionInterface")
    if silent := expected - {name for name, _ in probed}:
        raise ValueError(f"{min(silent)} does not call attention through transformers' AttentionInterface for text")
    with _probing(model, attached):
        model.eval()  # without dropout
        module = find_token_mixing(model, lambda ids: run(ids)[0])
    if module is not None:
        kind = type(model.get_submodule(module)) if module in dict(model.named_modules()) else type(model)
        alike = [name for name, other in model.named_modules() if type(other) is kind and name]
        raise ValueError(
            f"{module}: a token's result depends on other tokens outside attention (a recurrence, a convolution or a "
            f"token shift), in {len(alike)} {kind.__name__}: {_some(alike)}. {_whole_cost(model)}"
        )
    if device.type != "meta" and text_model(model) is model:
        with _probing(model, attached):
            model.eval()
            attached.positions = _position_rule(run, ids)
    if device.type != "meta" and getattr(output, "loss", None) is not None:
        logits = output.logits.float().reshape(-1, output.logits.shape[-1])
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum") / 7
        whole = loss + z_loss.in_one_process(model, logits)
        if not torch.allclose(output.loss.float(), whole, rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"{type(model).__name__}: its loss is not the sum over shift_labels divided by num_items_in_batch "
                f"({output.loss.item():.4f}, expected {whole.item():.4f}): compute your own loss from its logits"
            )
        with _probing(model, attached), z_loss.silenced(model):
            model.train()
            attached.wants_logits, attached.loss_chunk = False, PROBE_TOKENS - 1
            in_parts = run(ids, **options).loss.float()
            attached.loss_chunk = None
        if not torch.allclose(in_parts, loss, rtol=1e-3, atol=1e-5):
            attached.logits = True
            warnings.warn(
                f"{type(model).__name__}: its loss on chunks of tokens is {in_parts.item():.4f} instead of "
                f"{loss.item():.4f}, so logits are computed whole",
                stacklevel=4,
            )


def _position_rule(run: Callable[..., Any], ids: Tensor) -> PositionRule:
    """By the model's results with and without positions. Rotary embeddings, which act in attention only, do not show:
    models that have them count from 0."""
    index = torch.arange(PROBE_TOKENS, device=ids.device).unsqueeze(0)
    ones = torch.ones_like(ids)
    padded = ones.index_fill(1, index[0, :1], 0)

    def differ(mask: Tensor) -> bool:
        given, counted = (run(ids, attention_mask=mask, position_ids=x)[0][:, 1:] for x in (index, None))
        return not torch.allclose(given.float(), counted.float(), rtol=1e-3, atol=1e-5)

    if differ(ones):
        return PositionRule.OWN
    return PositionRule.MASK if differ(padded) else PositionRule.INDEX


@contextmanager
def _probing(model: PreTrainedModel, attached: Attached) -> Iterator[None]:
    """Inside, attention records its layers and returns zeros. Any error of the model becomes a ``ValueError``."""
    training = [(module, module.training) for module in model.modules()]
    attached.probed = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    except ValueError:
        raise
    except Exception as error:  # a model that expects another kind of mask can fail anywhere
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, MaskUseError):
            reason = "a layer computes with its mask (a position bias such as ALiBi, or its own attention)"
        raise ValueError(f"{type(model).__name__} cannot run with startrail: {reason}") from error
    finally:
        attached.probed = None
        for module, was_training in training:
            module.training = was_training


def is_attention(module: nn.Module) -> bool:
    """True if a module projects to queries, keys and values: the innermost one with attention in its name, unless it is
    a recurrence or has one inside."""
    here = "attention" in type(module).__name__.lower() and any(True for _ in module.parameters())
    here = here and not any("attention" in type(child).__name__.lower() for child in module.children())
    return here and not any(True for _ in recurrent.layers(module))
