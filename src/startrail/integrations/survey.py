"""Which families of the installed transformers run with startrail, and why the others do not.

Nothing is listed: every causal language model that transformers knows is made from its own default config, on the meta
device and with few layers, and attached. What its layers ask for is what the table says.
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

from startrail.integrations.transformers import attach, detach
from startrail.parallel import SequenceParallel

LAYERS = 4  # enough to meet a model's kinds of layers; a model whose pattern is longer keeps its own number


class ModelFamily(NamedTuple):
    name: str
    kinds: tuple[str, ...]  # of its layers
    problem: str | None

    def __str__(self) -> str:
        return f"{self.name:28s} {'yes' if self.problem is None else 'no ':3s} {self.problem or ', '.join(self.kinds)}"


def families(names: Sequence[str] = (), progress: bool = False) -> list[ModelFamily]:
    """One entry for each causal language model of transformers, or for those named."""
    known = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES)
    for name in names:
        if name not in known:
            close = ", ".join(other for other in known if other.startswith(name[:3])) or f"one of {len(known)}"
            raise ValueError(
                f"{name!r} is no causal language model of transformers {transformers.__version__}: {close}"
            )
    found = []
    for index, name in enumerate(names or known):
        if progress:
            print(f"\r{index + 1}/{len(names or known)} {name:30s}", end="", file=sys.stderr, flush=True)
        found.append(_family(name))
    if progress:
        print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
    return found


def table(found: Sequence[ModelFamily]) -> str:
    runs = sum(family.problem is None for family in found)
    head = f"transformers {transformers.__version__}: {runs} of {len(found)} families of causal language models run"
    return "\n".join([head, "", *map(str, found)])


def _family(name: str) -> ModelFamily:
    with _quietly():
        try:
            model = _model(name)
        except Exception as error:  # a default config need not make a model
            return ModelFamily(name, (), f"not tried: its default config makes no model ({_first_line(error)})")
        try:
            attach(model, SequenceParallel("1x1"), check=False)
        except ValueError as error:
            text = _first_line(error)
            unknown = isinstance(error.__cause__, RuntimeError)  # it reads values, and meta tensors have none
            return ModelFamily(name, (), f"not tried: {text}" if unknown else text)
        attached = model._startrail
        kinds = tuple(dict.fromkeys(str(kind) for kind in attached.kinds.values()))
        kinds += tuple(f"softcap {softcap} (on GPUs: flash-attn's)" for softcap in sorted(attached.softcaps))
        detach(model)
        return ModelFamily(name, kinds, None)


def _model(name: str) -> Any:
    kind = CONFIG_MAPPING[name]
    try:
        config = kind(num_hidden_layers=LAYERS)
    except Exception:  # some derive their number of layers, or state what every layer is
        config = kind()
    text = config.get_text_config(decoder=True)
    for option in ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"):
        if hasattr(text, option):
            setattr(text, option, 0.0)  # a matter of the recipe, not of the family
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # the one dtype that all kernels take


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


@contextmanager
def _quietly() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
