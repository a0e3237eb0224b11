"""Finds out which model families of the installed transformers run with startrail, and why the others do not.

The families are not listed anywhere. Each causal language model that transformers knows is created from its default
config, on the meta device and with few layers, and attached. The table shows what its layers ask for.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from startrail.integrations import latents, recurrent
from startrail.integrations.transformers import attach, detach
from startrail.parallel import SequenceParallel

# What default configs leave out: LFM2's convolutions, and the sizes of an indexer.
NEEDED: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "qwen4_exp_text": {f"indexer_{key}": 1 for key in ("n_heads", "kv_heads", "budget", "compress_ratio")}
    | dict(indexer_head_dim=256),
}
LAYERS = 4  # enough for all kinds of layers of most models; a model that refuses this number keeps its own


class ModelFamily(NamedTuple):
    name: str
    kinds: tuple[str, ...]  # of its layers
    problem: str | None

    def __str__(self) -> str:
        return f"{self.name:28s} {'yes' if self.problem is None else 'no ':3s} {self.problem or ', '.join(self.kinds)}"


def families(names: Sequence[str] = (), progress: bool = False) -> list[ModelFamily]:
    """One entry for each causal language model of transformers, or for each name."""
    known = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES)
    for name in names:
        if name not in known:
            close = ", ".join(other for other in known if other.startswith(name[:3])) or f"one of {len(known)}"
            raise ValueError(
                f"{name!r} is not a causal language model of transformers {transformers.__version__}: {close}"
            )
    result = []
    for index, name in enumerate(names or known):
        if progress:
            print(f"\r{index + 1}/{len(names or known)} {name:30s}", end="", file=sys.stderr, flush=True)
        result.append(_try_family(name))
    if progress:
        print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
    return result


def table(tried: Sequence[ModelFamily]) -> str:
    runs = sum(family.problem is None for family in tried)
    head = f"transformers {transformers.__version__}: {runs} of {len(tried)} families of causal language models run"
    head += ", with packed documents kept apart in every layer"
    return "\n".join([head, "", *map(str, tried)])


def _try_family(name: str) -> ModelFamily:
    with _no_warnings():
        try:
            model = _make_model(name)
        except Exception as error:  # not every default config is valid
            return ModelFamily(name, (), f"not tried: its default config gives no model ({_first_line(error)})")
        try:
            attach(model, SequenceParallel("1x1"), check=False)
        except ValueError as error:
            text = _first_line(error)
            reads_values = isinstance(error.__cause__, RuntimeError)  # meta tensors have none
            return ModelFamily(name, (), f"not tried: {text}" if reads_values else text)
        attached = model._startrail
        kinds = tuple(dict.fromkeys(str(kind) for kind in attached.kinds.values()))
        kinds += tuple(f"softcap {softcap} (on GPUs: flash-attn only)" for softcap in sorted(attached.softcaps))
        kinds += latents.describe(model) + recurrent.describe(model)
        detach(model)
        return ModelFamily(name, kinds, None)


def _make_model(name: str) -> Any:
    needed = NEEDED.get(name, {})
    try:
        return _model_of(CONFIG_MAPPING[name](num_hidden_layers=LAYERS, **needed))
    except Exception:  # some derive the number of layers, or list the type of every layer
        return _model_of(CONFIG_MAPPING[name](**needed))


def _model_of(config: Any) -> Any:
    text = config.get_text_config(decoder=True)
    for option in ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"):
        if hasattr(text, option):
            setattr(text, option, 0.0)  # depends on the recipe, not on the family
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # the dtype that all kernels support


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


@contextmanager
def _no_warnings() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
