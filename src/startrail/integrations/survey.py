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

LAYERS = 4  # enough for all kinds of layers of most models; a model that refuses this number keeps its own
# What default configs lack, or what four layers need: published checkpoints set these.
SETTINGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "rope_theta": 5e5},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "d_model": 64,
        "n_heads": 4,
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        **{f"indexer_{key}": 1 for key in ("n_heads", "kv_heads", "budget", "compress_ratio")},
        "indexer_head_dim": 256,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}
MANY_WEIGHTS = 50_000_000
# Sizes of a model that is made on the CPU, because its layers read values, which the meta device does not have.
SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts", "moe_topk", "num_experts_per_tok", "zero_expert_num"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 32),
    "kv_channels": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


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


def _try_family(name: str, small: bool = False) -> ModelFamily:
    with _no_warnings():
        try:
            model = _make_model(name, small)
        except Exception as error:  # not every default config is valid
            return ModelFamily(name, (), f"not tried: its default config gives no model ({_first_line(error)})")
        try:
            attach(model, SequenceParallel("1x1"), check=False)
        except ValueError as error:
            text = _first_line(error)
            if not isinstance(error.__cause__, RuntimeError):
                return ModelFamily(name, (), text)
            if not small:  # its layers may read values
                return _try_family(name, small=True)
            return ModelFamily(name, (), f"not tried: {text}")
        attached = model._startrail
        kinds = tuple(dict.fromkeys(str(kind) for kind in attached.kinds.values()))
        kinds += tuple(f"softcap {softcap} (on GPUs: flash-attn only)" for softcap in sorted(attached.softcaps))
        kinds += latents.describe(model) + recurrent.describe(model)
        detach(model)
        return ModelFamily(name, kinds, None)


def _make_model(name: str, small: bool) -> Any:
    settings = SETTINGS.get(name, {})
    try:
        return _model_of(CONFIG_MAPPING[name](num_hidden_layers=LAYERS, **settings), small)
    except Exception:  # some derive the number of layers, or list the type of every layer
        return _model_of(CONFIG_MAPPING[name](**settings), small)


def _model_of(config: Any, small: bool) -> Any:
    text = config.get_text_config(decoder=True)
    for option in ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"):
        if hasattr(text, option):
            setattr(text, option, 0.0)  # depends on the recipe, not on the family
    for option, size in SMALL.items():
        if small and isinstance(given := getattr(text, option, None), int) and given > 0:  # XLNet has -1 for no limit
            setattr(text, option, size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # the dtype that all kernels support
    if not small:
        return model
    if (count := sum(weight.numel() for weight in model.parameters())) > MANY_WEIGHTS:
        raise ValueError(f"its layers read values, and it has {count:,} weights at the least")
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


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
