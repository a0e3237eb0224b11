"""Tiny transformers models of every kind of attention, and batches for them."""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

logging.getLogger("transformers").setLevel(logging.ERROR)

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
TEXT_OF_THREE = dict(SMALL, rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1]))  # mRoPE
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)


@cache
def families() -> dict[str, tuple[type, Any]]:
    """Model class and config: plain and grouped heads, windows, alternating windows, softcaps, learned positions (in
    OPT counted from the attention mask), sinks, chunks, experts, and values of another width than keys."""
    kinds = ["sliding_attention", "full_attention"]
    latent = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    latent |= dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
    gpt2 = hf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    opt = dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0)
    chunks = dict(attention_chunk_size=16, intermediate_size_mlp=48, num_local_experts=2, no_rope_layers=[1, 0])
    return {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)),
        "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, head_dim=8)),
        "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**SMALL, sliding_window=7)),
        "gemma3": (
            hf.Gemma3ForCausalLM,
            hf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=7, layer_types=kinds),
        ),
        "gemma2": (
            hf.Gemma2ForCausalLM,
            hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=7, layer_types=kinds, attn_logit_softcapping=0.5),
        ),
        "gpt2": (hf.GPT2LMHeadModel, gpt2),
        "opt": (hf.OPTForCausalLM, hf.OPTConfig(**SMALL, **opt, enable_bias=False)),  # biases of keys have no gradient
        "gpt-oss": (
            hf.GptOssForCausalLM,
            hf.GptOssConfig(**SMALL, head_dim=8, sliding_window=7, num_local_experts=4, num_experts_per_tok=2),
        ),
        "llama4": (
            hf.Llama4ForCausalLM,
            hf.Llama4TextConfig(**SMALL, head_dim=8, moe_layers=[1], **chunks),
        ),
        "qwen3-moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, **EXPERTS)),
        "deepseek-v3": (
            hf.DeepseekV3ForCausalLM,
            hf.DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, **latent, **EXPERTS),
        ),
    }


@cache
def hybrids() -> dict[str, tuple[type, Any]]:
    """Models with recurrences and short convolutions, some of whose layers are attention."""
    delta: dict[str, Any] = dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6
    )
    every_other = dict(layer_types=["linear_attention", "full_attention"])
    experts = dict(num_experts=4, shared_expert_intermediate_size=16, **EXPERTS)
    mamba = dict(mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_expand=1, mamba_chunk_size=8)
    latent = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_group=1, topk_group=1)
    of_kimi = dict(SMALL, num_key_value_heads=4, linear_num_heads=2, linear_head_dim=8, num_local_experts=4, **EXPERTS)
    of_kimi |= dict(latent, n_shared_experts=1, mlp_layer_types=["dense", "sparse"], **every_other)
    few = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
    shared = dict(
        SMALL, num_hidden_layers=3, num_key_value_heads=4, layers_block_type=["linear_attention", "hybrid"] * 2
    )
    of_zamba = {**shared, "num_hidden_layers": 4, "hidden_act": "silu"}
    convolutions = dict(SMALL, layer_types=["conv", "full_attention"])
    new = {}
    if hasattr(hf, "Lfm3Config"):  # since 5.23
        new["lfm3"] = hf.Lfm3ForCausalLM, hf.Lfm3Config(**convolutions, head_dim=8)
    return {
        **new,
        "qwen3-next": (
            hf.Qwen3NextForCausalLM,
            hf.Qwen3NextConfig(**SMALL, **delta, **experts, **every_other, head_dim=8),
        ),
        "qwen3.5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig(**TEXT_OF_THREE, **delta, **every_other, head_dim=8)),
        "qwen3.5-moe": (
            hf.Qwen3_5MoeForCausalLM,
            hf.Qwen3_5MoeTextConfig(**TEXT_OF_THREE, **delta, **experts, **every_other, head_dim=8),
        ),
        "olmo-hybrid": (
            hf.OlmoHybridForCausalLM,
            hf.OlmoHybridConfig(**SMALL, **{**delta, "linear_num_key_heads": 4}, **every_other),
        ),
        "kimi-linear": (hf.KimiLinearForCausalLM, hf.KimiLinearConfig(**of_kimi)),
        "bailing-hybrid": (
            hf.BailingHybridForCausalLM,
            hf.BailingHybridConfig(**of_kimi, head_dim=8, num_mtp_layers=0),
        ),
        "mamba2": (
            hf.Mamba2ForCausalLM,
            hf.Mamba2Config(**few, num_heads=4, head_dim=8, expand=1, n_groups=2, state_size=6, chunk_size=8),
        ),
        "bamba": (hf.BambaForCausalLM, hf.BambaConfig(**SMALL, **mamba, attn_layer_indices=[1])),
        "falcon-h1": (hf.FalconH1ForCausalLM, hf.FalconH1Config(**SMALL, **mamba, mamba_d_ssm=32)),
        "granite-moe-hybrid": (
            hf.GraniteMoeHybridForCausalLM,
            hf.GraniteMoeHybridConfig(
                **SMALL, **mamba, **every_other, shared_intermediate_size=16, num_local_experts=4
            ),
        ),
        "nemotron-h": (
            hf.NemotronHForCausalLM,
            hf.NemotronHConfig(
                **{key: x for key, x in SMALL.items() if key != "num_hidden_layers"}, head_dim=8, mamba_num_heads=4,
                mamba_head_dim=8, ssm_state_size=6, n_groups=2, chunk_size=8, n_routed_experts=4, expand=1,
                moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
                layers_block_type=["linear_attention", "full_attention", "mlp", "moe"],
            ),
        ),
        "zamba2": (
            hf.Zamba2ForCausalLM,
            hf.Zamba2Config(
                **of_zamba, mamba_d_state=6, mamba_expand=1, n_mamba_heads=4, chunk_size=8, mamba_ngroups=2
            ),
        ),
        "zamba": (hf.ZambaForCausalLM, hf.ZambaConfig(**of_zamba, mamba_d_state=6, mamba_dt_rank=4)),
        "mamba": (hf.MambaForCausalLM, hf.MambaConfig(**few, state_size=6, expand=1)),
        "falcon-mamba": (hf.FalconMambaForCausalLM, hf.FalconMambaConfig(**few, state_size=6, expand=1)),
        "jamba": (
            hf.JambaForCausalLM,
            hf.JambaConfig(
                **SMALL, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=6, mamba_expand=1,
                mamba_dt_rank=4,
            ),
        ),
        "lfm2": (hf.Lfm2ForCausalLM, hf.Lfm2Config(**convolutions)),
        "lfm2-moe": (
            hf.Lfm2MoeForCausalLM,
            hf.Lfm2MoeConfig(**convolutions, num_experts=4, num_dense_layers=1, **EXPERTS),
        ),
        "minimax": (
            hf.MiniMaxForCausalLM,
            hf.MiniMaxConfig(**SMALL, **every_other, num_local_experts=4, num_experts_per_tok=2, block_size=8),
        ),
        "recurrent-gemma": (
            hf.RecurrentGemmaForCausalLM,
            hf.RecurrentGemmaConfig(
                **SMALL, lru_width=32, block_types=["recurrent", "attention"], attention_window_size=8, head_dim=8
            ),
        ),
    }  # fmt: skip


def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights every time, in training mode; biases, norms and sinks are not what they start as."""
    kind, config = families()[name] if name in families() else hybrids()[name]
    config = copy.deepcopy(config)
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # the others' product of groups is for less precise numbers only
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
    generator = torch.Generator().manual_seed(5)
    for x in model.parameters():
        noise = torch.randn(x.shape, generator=generator)
        x.data = 0.15 * noise if x.dim() > 1 else x.data + 0.1 * noise
    model = model.to(dtype).train()
    for layer in model.modules():
        if hasattr(layer, "decay_factors"):  # MiniMax keeps them as rounded to float32
            layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    return model


class InFloat64(TorchFunctionMode):
    """Inside, what a model calculates in float32 whatever its dtype (norms, routers, losses) is in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        options = {name: self.wide(x) for name, x in (kwargs or {}).items()}
        return function(*map(self.wide, args), **options)

    @staticmethod
    def wide(x: Any) -> Any:
        return torch.float64 if x is torch.float32 else x


def backward(loss: Tensor) -> None:
    """``loss.backward()`` that leaves ``InFloat64`` on, for what the backward pass computes again."""
    engine: Any = torch.autograd.Variable._execution_engine
    ones = (torch.ones_like(loss),)
    engine.run_backward((loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def packed(*lengths: int) -> dict[str, Tensor]:
    """One row of documents, told apart by their positions; the first token of each is not learnt."""
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    return dict(input_ids=ids, labels=ids.masked_fill(positions == 0, -100), position_ids=positions)


def padded(lengths: list[int], side: str = "right") -> dict[str, Tensor]:
    """Rows of different lengths; every token but padding has a label, on the left the first one too."""
    longest = max(lengths)
    ids, mask = tokens(len(lengths), longest), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        if side == "left":
            mask[row] = mask[row].flip(0)
    labels = ids.masked_fill(mask == 0, -100)
    return dict(input_ids=ids.masked_fill(mask == 0, 0), labels=labels, attention_mask=mask)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (torch.zeros_like(x) if x.grad is None else x.grad).detach().clone()
        for name, x in model.named_parameters()
    }


def differences(
    ours: dict[str, Tensor], truth: dict[str, Tensor], allowed: float, alone: dict[str, Tensor] | None = None
) -> list[str]:
    """A line for each tensor that is off by more than ``allowed`` relative to its norm, and by more than twice what one
    process is, if what that gives ``alone`` is known."""
    found = {}
    for name, x in truth.items():
        off, limit = _off(ours[name], x), allowed
        if alone is not None:
            limit = max(limit, 2 * _off(alone[name], x))
        if not off <= limit:  # written so that NaN fails
            found[name] = f"{name}: {off:.1e}, allowed {limit:.1e}"
    return list(found.values())


def _off(x: Tensor, truth: Tensor) -> float:
    return ((x - truth).norm() / truth.norm()).item()
