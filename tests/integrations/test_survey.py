"""``startrail models``: what runs, and why the rest does not, is found by trying, not listed."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from startrail.cli import main
from startrail.integrations import probe, recurrent
from startrail.integrations.survey import families
from tests.helpers import refusal


def test_families_of_every_kind_run_or_give_a_reason(capsys, monkeypatch):
    names = ["llama", "mistral", "gpt_oss", "llama4_text", "deepseek_v3", "gemma2", "mamba", "bloom", "xlstm", "lfm2"]
    assert main(["models", *names]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert " yes causal" in shown["llama"] and " yes causal window 4096" in shown["mistral"]
    assert "causal window 128" in shown["gpt_oss"] and "causal chunk 8192" in shown["llama4_text"]
    assert " yes causal" in shown["deepseek_v3"]
    assert " yes causal, causal window 4096, softcap 50.0 (on GPUs: flash-attn only)" in shown["gemma2"]
    assert " yes convolution + Mamba-1" in shown["mamba"] and " yes causal, convolution" in shown["lfm2"]
    assert "a layer computes with its mask" in shown["bloom"]
    assert " no  " in shown["xlstm"]
    (family,) = families(["qwen3"])
    assert family.problem is None
    monkeypatch.setattr(probe, "check_config", lambda model: None)  # since 5.23 the config tells
    monkeypatch.setattr(recurrent, "layers", lambda model: [])
    (family,) = families(["recurrent_gemma"])
    assert "model.layers.0.temporal_block.conv_1d: a token's result depends on other" in family.problem
    assert "'lama' is not a causal language model" in refusal(["models", "lama"], capsys)


HYBRIDS = {
    "gated delta rule": ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"],
    "Kimi delta rule": ["kimi_linear", "bailing_hybrid"],
    "Mamba-2": ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"],
    "Mamba-1": ["mamba", "falcon_mamba", "jamba", "zamba"],
    "RG-LRU": ["recurrent_gemma"],
    "": ["lfm2", "lfm2_moe"],
}


def test_hybrids_run_and_those_that_do_not_name_the_layer():
    """`test_hybrids.py` trains tiny models of all that run."""
    labels = {name: ("convolution + " + kind).removesuffix(" + ") for kind, names in HYBRIDS.items() for name in names}
    labels["minimax"] = "lightning attention"
    missing = {
        "inkling_text": "model.layers.0.self_attn: position_bias: no kernel adds a bias to the logits",
        "qwen4_exp_text": "layers 3 (1 of 4) are 'indexed_attention': each query picks the keys that it sees",
    }
    known = {name for name in CONFIG_MAPPING_NAMES if name in missing or name in labels}  # some are new in 5.23
    found = {family.name: family for family in families(sorted(known))}
    assert {name: x.kinds[-1] for name, x in found.items() if name in labels} == labels
    assert not [name for name in known - labels.keys() if missing[name] not in str(found[name].problem)]
