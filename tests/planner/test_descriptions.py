"""Silly values for every key of a cluster, a model and a run: one line that names the key, and no hang."""

import json
import re
from collections.abc import Iterator

import pytest

from startrail.planner.answer import plan as ask
from startrail.planner.cluster import find_cluster, read_cluster
from startrail.planner.kernels import find_kernel
from startrail.planner.units import read_file, shipped
from startrail.planner.workload import from_hugging_face, read_model, read_run
from tests.helpers import error_of

SILLY = [
    *("", "x", "0", "-1", "1e999 s", "1e-320 B/s", "1e-300 GB/s", "1e400 GB/s", "inf GB", "1e999 GB", "0 GB", "nan s"),
    *("0 FLOP/s", "-5 us", "9" * 320, "1.2.3 GB", "5 parsecs", "two\nlines", "\x00"),
    *(-1, 0, 10**13, 10**30, 3.0, 1e308, float("inf"), float("nan")),
    *(True, None, [], ["x"], {}, {"a": 1}, [[]], [["x", "1 TFLOP/s"]], [[128, "fast"]], [[0, "1 TFLOP/s"]]),
]
# Keys that accept some of them.
TEXTS = ("name", "description")
MAY_BE_0 = ("shared_hidden", "accuracy", "cores", "member", "max_window_layers", "zero")
YES_OR_NO = (
    "repeat_attention",
    "offload",
    "offload_states",
    "fp8",
    "gate",
    "tile_mlp",
    "duplex",
    "tied",
    "recompute",
    "use_sliding_window",
    "tie_word_embeddings",
)


def fine(key: str, value: object) -> bool:
    if key in TEXTS:
        return isinstance(value, str) and value.strip() != "" and value.isprintable()
    if key in MAY_BE_0 and type(value) is int and value == 0:
        return True
    return (key in YES_OR_NO and value is True) or (key, value) in (("slow", []), ("reserved", "0 GB"))


CLUSTER = read_file(shipped("clusters")["a100-4x8"])
CLUSTER |= {"cores": 2, "transport": "gloo"}
CLUSTER["device"] |= {"handle": "1 us"}
CLUSTER["levels"][0]["socket"] = "1 GB/s"
CLUSTER["device"]["float32"] = {"peak": "20 TFLOP/s", "matmul": "15 TFLOP/s", "fp8": "400 TFLOP/s"}
CLUSTER["device"]["float32"] |= {"forward": "10 TFLOP/s", "backward": [[128, "5 TFLOP/s"], [512, "8 TFLOP/s"]]}
CLUSTER["levels"][0]["duplex"] = True
CLUSTER["slow"] = [{"level": "node", "member": 1, "bandwidth": 0.5, "compute": 0.5}]
MODEL = dict(
    description="small", kind="gpt", vocab=9, width=8, layers=4, heads=4, kv_heads=2, hidden=8, tied=True, window=4,
    full_every=2, head_dim=4, experts=8, active_experts=2, shared_hidden=16, gate=True,
    linear=dict(full_every=2, key_heads=2, value_heads=4, key_dim=4, value_dim=4, conv=4),
)  # fmt: skip
RUN = dict(
    description="short", length="8k", batch=2, dtype="bfloat16", recompute=True, zero=3, gather="float32",
    loss_chunk=64, accumulate=2, tensor=2, repeat_attention=True, offload=True, offload_states=True, states="bfloat16",
    residual="bfloat16", fp8=True, tile_mlp=True,
)  # fmt: skip
CONFIG = dict(
    model_type="qwen2", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=100, head_dim=16, sliding_window=16, use_sliding_window=True, max_window_layers=1,
    sliding_window_pattern=2, tie_word_embeddings=True, layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
READERS = {
    "cluster": (CLUSTER, lambda table: read_cluster(table, "a", "a.toml")),
    "model": (MODEL, lambda table: read_model(table, "m", "m.toml")),
    "run": (RUN, lambda table: read_run(table, "r.toml")),
    "config": (CONFIG, lambda table: from_hugging_face(table, "h", "config.json")),
}


def places(table: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The path of every key, including nested tables."""
    pairs = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in pairs:
        if isinstance(key, str):
            yield *path, key
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("what", READERS)
def test_a_silly_value_is_one_line_that_names_its_key(what):
    good, read = READERS[what]
    read(good)
    checked = 0
    for path in places(good):
        for value in SILLY:
            if fine(path[-1], value) or (what == "config" and value is None):
                continue
            table = json.loads(json.dumps(good))
            at = table
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            text = error_of(lambda table=table: read(table))
            assert text.startswith("ValueError: "), (path, value, text)
            assert path[-1] in text and "\n" not in text and len(text) < 600, (path, value, text)
            checked += 1
    assert checked > 200


@pytest.mark.parametrize("value", ["x", "0 GB", "1e999 GB", "", 5, "-1 GB", "1 kB"])
def test_a_silly_memory_limit_names_its_key(value):
    with pytest.raises(ValueError, match="memory = "):
        ask("a100-4x8", "gpt-3b", 65536, memory=value)


def test_a_cluster_that_is_too_large_is_refused():
    with pytest.raises(
        ValueError, match=re.escape("size: 99999 x 8 = 799992 ranks are more than the 65536 that the planner supports")
    ):
        find_cluster("a100-4x8@99999x8")


def test_times_and_reserves_may_be_0_as_they_are_by_default():
    table = json.loads(json.dumps(CLUSTER))
    table["levels"][0]["latency"], table["device"]["reserved"], table["device"]["call"] = "0 us", "0 GB", "0 s"
    cluster = read_cluster(table, "a", "a.toml")
    assert (cluster.levels[0].latency, cluster.device.reserved, cluster.device.call) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "t5", "bert", "jamba", ["llama"], 7])
def test_models_other_than_plain_decoders_are_refused(kind):
    with pytest.raises(ValueError, match=r"model_type = .* is not modelled"):
        from_hugging_face(CONFIG | {"model_type": kind}, "h", "config.json")


def test_heads_must_divide_the_width_unless_head_dim_is_given():
    config = CONFIG | {"num_attention_heads": 6}
    assert from_hugging_face(config, "h", "config.json").head_dim == 16
    with pytest.raises(ValueError, match="hidden_size = 64 is not a multiple of num_attention_heads = 6"):
        from_hugging_face(config | {"head_dim": None}, "h", "config.json")


def test_options_take_precedence_over_the_run_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('length = "64k"\nbatch = 4\nzero = 2\n')
    run = ask("a100-4x8", "gpt-3b", "32k", batch=8, run=str(file), top=1).result.run
    assert (run.length, run.batch, run.zero) == (32768, 8, 2)
    file.write_text('length = "64k"\nbatch = 0\n')
    with pytest.raises(ValueError, match=r"run\.toml: batch = 0 is not a whole number"):
        ask("a100-4x8", "gpt-3b", run=str(file))


def test_every_figure_of_a_shipped_cluster_has_its_source():
    for name, path in shipped("clusters").items():
        lines = path.read_text().splitlines()
        for at, line in enumerate(lines):
            if re.match(r"(memory|reserved|copy|call|post|handle|socket|start|peak|matmul|bandwidth|latency) =", line):
                assert "#" in line or lines[at - 1].startswith("#"), f"{name}: {line}"
            if line.startswith(("forward =", "backward =")):
                assert any(above.startswith("#") for above in lines[at - 2 : at]), f"{name}: {line}"


def test_devices_with_the_same_chip_have_the_same_attention_speeds():
    for name, other in (("h100-8x8", "h200"), ("a100-4x8", "a100-cloud"), ("b200", "nvl72"), ("pcie-8", "boxes-10gbe")):
        ours, theirs = (find_cluster(one).device.of("bfloat16") for one in (name, other))
        assert (ours.kernel, ours.forward, ours.backward) == (theirs.kernel, theirs.forward, theirs.backward)


def test_every_curve_of_a_kernel_has_its_source():
    for path in shipped("kernels").values():
        for curve in read_file(path)["curves"]:
            assert len(curve["source"]) > 10
            assert find_kernel(path.stem, curve["chip"]).curves[curve["pass"], curve["mask"], curve["head_dim"]]


def test_all_missing_keys_are_named_at_once():
    with pytest.raises(ValueError, match=re.escape("a.toml: device: 'name', 'memory', 'copy' are missing")):
        read_cluster({"levels": CLUSTER["levels"], "device": {}}, "a", "a.toml")
    both = "a.toml: levels[0]: 'size', 'bandwidth' are missing; device: 'name', 'memory', 'copy' are missing"
    with pytest.raises(ValueError, match=re.escape(both)):
        read_cluster({"levels": [{"name": "node"}], "device": {}}, "a", "a.toml")


def test_a_cluster_without_overheads_gives_the_same_answer():
    table = json.loads(json.dumps(read_file(shipped("clusters")["h100-8x8"])))
    for key in ("call", "post", "start"):
        del table["device"][key]
    bare, whole = read_cluster(table, "h100-8x8", "a.toml"), find_cluster("h100-8x8")
    assert bare == whole


@pytest.mark.parametrize("name, text", [("deep.json", "[" * 100_000), ("deep.toml", "a = " + "[" * 100_000)])
def test_a_deeply_nested_file_is_one_line(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_file(tmp_path / name)
