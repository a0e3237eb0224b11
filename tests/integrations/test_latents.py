"""Models with latent attention send latents: the loss and all gradients of one process, and the bytes of latents."""

import copy
import importlib
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import transformers as hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import startrail
from startrail.diagnostics.observe import Observed, recorded_attention
from startrail.diagnostics.verify import verify
from startrail.integrations import latents, survey
from startrail.integrations.transformers import attach, detach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import FULL, ROOT
from tests.integrations.one_process import BATCHES, many_ranks
from tests.integrations.tiny import EXPERTS, SMALL, InFloat64, backward, differences, gradients, tokens

LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
ROUTED = dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, **EXPERTS)
HEADS = {**SMALL, "num_key_value_heads": 4}
FAMILIES = {
    "deepseek_v2": dict(**LATENT, **ROUTED, topk_method="greedy"),
    "deepseek_v3": dict(**LATENT, **ROUTED),
    "minicpm3": dict(**LATENT, scale_emb=1, scale_depth=1.0, dim_model_base=32),
    "glm4_moe_lite": dict(**LATENT, **ROUTED),
    "youtu": dict(**LATENT),
}


def model_of(name, dtype=torch.float64, **changes):
    """The same weights every time."""
    config = hf.AutoConfig.for_model(name, **{**HEADS, **FAMILIES[name], **changes})
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(5)
    for x in model.parameters():
        noise = torch.randn(x.shape, generator=generator)
        x.data = 0.15 * noise if x.dim() > 1 else x.data + 0.1 * noise
    return model.to(dtype).train()


def alone(name, batch):
    """Loss and gradients of one process, document by document."""
    model = model_of(name)
    ids, labels, positions = batch["input_ids"], batch["labels"], batch.get("position_ids")
    starts = [0] if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
    options = {key: x for key, x in batch.items() if key == "attention_mask"}
    count = (labels[:, 1:] != -100).sum() if positions is None else (labels != -100).sum()
    with InFloat64():
        loss = sum(
            model(input_ids=ids[:, start:stop], labels=labels[:, start:stop], num_items_in_batch=count, use_cache=False,
                  **options).loss
            for start, stop in zip(starts, [*starts[1:], ids.shape[1]], strict=True)
        )  # fmt: skip
        backward(loss)
    return loss.item(), gradients(model)


@pytest.mark.parametrize("world", [2, 4])
def test_loss_and_gradients_are_those_of_one_process(world):
    torch.set_num_threads(1)
    kinds = ("packed", "right")
    truths = {(name, kind): alone(name, BATCHES[kind]) for name in FAMILIES for kind in kinds}
    plans = {2: ["1x2"], 4: ["u2/1x2", "2x2"] if FULL else ["u2/1x2"]}[world]

    def on_rank(rank):
        wrong = []
        for plan in plans:
            sp = startrail.SequenceParallel(plan)
            for name in FAMILIES:
                model = attach(model_of(name), sp)
                assert latents.describe(model) == ("latents",)
                for kind in kinds:
                    with InFloat64():
                        loss, grads = many_ranks(model, sp, BATCHES[kind])
                    true_loss, true_grads = truths[name, kind]
                    lines = [] if abs(loss / true_loss - 1) < 1e-13 else [f"loss {loss}, expected {true_loss}"]
                    lines += differences(grads, true_grads, 1e-12)
                    wrong += [f"{plan} {name} {kind}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world) == [[]] * world


def test_latents_are_sent_unless_turned_off_or_replaced():
    """The bytes are those of latents; without, and with an adapter on the projection, those of expanded keys."""
    ids = tokens(1, 64)

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2")
        model = model_of("deepseek_v3", torch.float32, num_hidden_layers=1, first_k_dense_replace=1)
        sent, losses = {}, {}
        for case in ("latents", "expanded", "replaced", "copied"):
            model = attach(model, sp, latents=case != "expanded", check=False)
            used = copy.deepcopy(model) if case == "copied" else model
            layer = used.model.layers[0].self_attn
            if case == "replaced":
                layer.kv_b_proj = torch.nn.utils.parametrizations.weight_norm(layer.kv_b_proj)
            batch = shard_batch(sp, input_ids=ids, labels=ids)
            sp.reset_counters()
            observed = Observed(0.0, {}, {}, {})
            with warnings.catch_warnings(), recorded_attention(observed):
                warnings.simplefilter("ignore")
                losses[case] = used(**batch).loss.item()
            (record,) = observed.attention
            sent[case] = sp.traffic()["level 0"]["bytes"], record.bytes
            if case == "replaced":
                torch.nn.utils.parametrize.remove_parametrizations(layer.kv_b_proj, "weight")
            detach(model)
            assert "expand_kv" not in layer.__dict__ or case == "copied"
        return sent, losses

    for sent, losses in run_local(on_rank, 2):
        latent, expanded = 32 * (16 + 4) * 4, 32 * 4 * (8 + 4 + 6) * 4
        assert {case: forward for case, (forward, _) in sent.items()} == dict(
            latents=latent, copied=latent, expanded=expanded, replaced=expanded
        )
        assert sent["latents"][1] == 3 * latent, "verify counts both passes"
        assert max(losses.values()) - min(losses.values()) < 1e-5


def test_verify_compares_what_a_job_runs():
    """Not expanded keys, which a layer sends that is observed by hooks of its own."""

    def make():
        ids = tokens(1, 64)
        return model_of("deepseek_v3", torch.float32), dict(input_ids=ids, labels=ids)

    with warnings.catch_warnings():  # the ranks are forked, and inherit it
        warnings.filterwarnings("error", f".*{latents.INSTEAD}")
        verdict = verify(make, ranks=2)
    assert verdict.same, verdict.text


def test_compiled_and_recomputed_layers():
    ids = tokens(1, 64)
    truth = alone("deepseek_v3", dict(input_ids=ids, labels=ids))

    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2")
        wrong = []
        for change in ("recomputed", "compiled"):
            model = attach(model_of("deepseek_v3"), sp)
            if change == "recomputed":
                model.gradient_checkpointing_enable()
            else:
                for layer in model.model.layers:
                    layer.self_attn.compile(backend="aot_eager")
            with InFloat64() if change == "recomputed" else torch.no_grad():
                if change == "recomputed":
                    loss, grads = many_ranks(model, sp, dict(input_ids=ids, labels=ids))
                    wrong += differences(grads, truth[1], 1e-12)
                else:
                    loss = model(**shard_batch(sp, input_ids=ids, labels=ids)).loss
                    torch.distributed.all_reduce(loss)
            wrong += [] if abs(loss / truth[0] - 1) < 1e-6 else [f"{change}: {loss}, expected {truth[0]}"]
        return wrong

    assert run_local(on_rank, 2) == [[]] * 2


def test_fully_sharded_layers_send_latents():
    """FSDP gathers a layer's projection before it runs, and again for its backward pass."""
    batch = dict(input_ids=(ids := tokens(1, 64)), labels=ids)
    true_loss, true_grads = alone("deepseek_v3", batch)

    def on_rank(rank):
        sp, wrong, sent = startrail.SequenceParallel("1x2"), [], []
        for kind in ("plain", "sharded", "recomputed"):
            model = attach(model_of("deepseek_v3"), sp)
            if kind == "recomputed":
                model.gradient_checkpointing_enable()
            for module in (*model.model.layers, model) if kind != "plain" else ():
                fully_shard(module)
            sp.reset_counters()
            with InFloat64():
                loss = model(**shard_batch(sp, **batch)).loss
                backward(startrail.gradient_factor(model) * loss)
            sent.append(sp.traffic()["level 0"]["bytes"])
            if kind != "plain":
                whole = {name: x.full_tensor() for name, x in gradients(model).items()}
                wrong += [f"{kind}: {line}" for line in differences(whole, true_grads, 1e-12)]
            torch.distributed.all_reduce(loss := loss.detach())
            wrong += [] if abs(loss.item() / true_loss - 1) < 1e-13 else [f"{kind}: loss {loss}"]
        return wrong, sent

    for wrong, (plain, *others) in run_local(on_rank, 2):
        assert wrong == [] and others == [plain, plain]


def over_heads(layer, mesh):
    """Split a layer's heads. Each rank's gradient of k_rope, which all heads share, is that of its own heads."""
    split = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    parallelize_module(layer, mesh, split)

    def sum_rope(grad):
        grad = grad.clone()
        torch.distributed.all_reduce(rope := grad[..., LATENT["kv_lora_rank"] :].contiguous(), group=mesh.get_group())
        grad[..., LATENT["kv_lora_rank"] :] = rope
        return grad

    def hook(module, inputs, out):
        if out.requires_grad:
            out.register_hook(sum_rope)

    layer.kv_a_proj_with_mqa.register_forward_hook(hook)


def over_features(layer, mesh):
    """Split what transformers' own plan for this family splits."""
    split = dict(gate_proj=ColwiseParallel(), up_proj=ColwiseParallel(), down_proj=RowwiseParallel())
    parallelize_module(layer, mesh, split)


def test_tensor_parallelism_of_experts_sends_latents_and_that_of_heads_expanded_keys():
    """A sharded projection sums its latents' gradients over its own ranks, so it expands before keys are sent."""
    ids = tokens(1, 64)
    truth = alone("deepseek_v3", dict(input_ids=ids, labels=ids))

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
        sp, found = startrail.SequenceParallel("1x2", mesh=mesh["sp"]), []
        for split in (over_heads, over_features):
            model = model_of("deepseek_v3")
            for layer in model.model.layers:
                mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
                split(layer.self_attn if split is over_heads else mlp, mesh["tp"])
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                attach(model, sp)
            with InFloat64():
                loss = model(**shard_batch(sp, input_ids=ids, labels=ids)).loss
                backward(loss)
            startrail.sum_gradients(model.parameters(), sp.group)
            torch.distributed.all_reduce(loss := loss.detach(), group=sp.group)
            whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients(model).items()}
            wrong = differences(whole, truth[1], 1e-12)
            wrong += [] if abs(loss.item() / truth[0] - 1) < 1e-13 else [f"loss {loss}, expected {truth[0]}"]
            said = [str(x.message) for x in warned if latents.INSTEAD in str(x.message)]
            found.append((wrong, said, latents.describe(model)))
        return found

    for (wrong, said, sent), of_features in run_local(on_rank, 4):
        assert wrong == [] and sent == ("expanded keys of latents",)
        assert len(said) == 1 and "its kv_b_proj" in said[0]
        assert of_features == ([], [], ("latents",))


class Scaled(torch.nn.Module):
    """Looks like latent attention, but scales what it expands."""

    def __init__(self):
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(4, 8, bias=False)

    def expand_kv(self, kv_nope, k_rot):
        keys, values = hf.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention.expand_kv(self, kv_nope, k_rot)
        return keys * 2, values


class Plain(torch.nn.Module):
    """Expands within its forward."""

    def __init__(self):
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(4, 8, bias=False)


@pytest.mark.parametrize("kind, reason", [(Scaled, "is not keys"), (Plain, "in a method expand_kv")])
def test_another_expansion_runs_as_before_and_says_so(kind, reason):
    model = torch.nn.Sequential(kind())
    with pytest.warns(UserWarning, match=reason):
        latents.install(model, lambda: None)
    assert latents.describe(model) == ("expanded keys of latents",)


def test_a_layer_whose_expansion_was_replaced_keeps_it():
    model = model_of("deepseek_v3", num_hidden_layers=2)
    replaced, other = (layer.self_attn for layer in model.model.layers)
    replaced.expand_kv = own = partial(type(replaced).expand_kv, replaced)
    with pytest.warns(UserWarning, match="is not that of its class"):
        attach(model, startrail.SequenceParallel("1x1"))
    assert replaced.expand_kv is own and set(latents.describe(model)) == {"latents", "expanded keys of latents"}
    detach(model)
    assert replaced.expand_kv is own and "expand_kv" not in other.__dict__


def test_layers_that_compute_with_their_keys_run_as_before(monkeypatch):
    """Found when the model is probed."""
    attention = hf.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention
    plain = startrail.integrations.transformers.Attached.attend

    def attend(self, module, query, key, value, *rest, **options):
        return plain(self, module, query, key * 1.0, value, *rest, **options)

    monkeypatch.setattr(startrail.integrations.transformers.Attached, "attend", attend)
    model = model_of("deepseek_v3")
    with pytest.warns(UserWarning, match="computes with its expanded keys"):
        attach(model, startrail.SequenceParallel("1x1"))
    assert latents.describe(model) == ("expanded keys of latents",)
    assert isinstance(model.model.layers[0].self_attn, attention)


def families_with_latents():
    """Those of the installed transformers, by the name of their folder, with the module of their models."""
    for folder in sorted(Path(hf.models.__file__).parent.iterdir()):
        path = folder / f"modeling_{folder.name}.py"
        if path.exists() and "kv_lora_rank" in path.read_text():
            yield folder.name, importlib.import_module(f"transformers.models.{folder.name}.modeling_{folder.name}")


SPECIAL = {
    "longcat_flash": dict(num_layers=1, head_dim=4, expert_ffn_hidden_size=16, zero_expert_num=2, moe_topk=2),
    "glm5_next": dict(qk_rope_head_dim=0, qk_nope_head_dim=12, layer_types=["linear_attention", "indexed_attention"]),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"]),
    "bailing_hybrid": dict(layer_types=["linear_attention", "full_attention"]),
}


def what_is_sent(name, module):
    """What a tiny model of a family sends, or the error that says why it does not run."""
    config = type(hf.AutoConfig.for_model(name).get_text_config(decoder=True))
    options = {**HEADS, **LATENT, **ROUTED, "num_hidden_layers": 2, **FAMILIES.get(name, {}), **SPECIAL.get(name, {})}
    made = [kind for kind in vars(module).values() if getattr(kind, "config_class", None) is config]
    made.sort(key=lambda kind: -kind.__name__.endswith("ForCausalLM"))
    model = next(kind for kind in made if kind.__name__.endswith(("ForCausalLM", "TextModel")))(config(**options))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return ", ".join(latents.describe(attach(model, startrail.SequenceParallel("1x1"), check=False)))
    except ValueError as error:
        return str(error)


def test_the_documentation_lists_every_family_with_latents_and_whether_it_sends_them():
    page = (ROOT / "docs" / "integrations.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (latents|no: .*`\w+`) \|$", page, re.MULTILINE))
    found = {name: what_is_sent(name, module) for name, module in families_with_latents()}
    assert rows.keys() == found.keys()
    for name, text in rows.items():
        assert text.split("`")[1 if "`" in text else 0] in found[name], (name, found[name])
        assert (text == "latents") == (found[name] == "latents"), (name, found[name])


def test_every_family_that_runs_sends_latents():
    """Of those whose default configs make a model that can be tried."""
    for family in survey.families(["axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]):
        assert family.kinds == ("causal", "latents"), family
    (family,) = survey.families(["kimi_linear"])
    assert family.kinds == ("causal", "latents", "convolution + Kimi delta rule")
