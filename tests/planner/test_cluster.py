"""Cluster descriptions: read, written, resized, and refused with the key that is wrong."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from startrail.planner.cluster import SlowMember, cluster_text, find_cluster, read_cluster
from startrail.planner.units import parse_text, read_file, shipped


def test_every_shipped_cluster_can_be_read_and_written():
    """The clusters of the paper, current ones and the lab; a written file reads back the same."""
    paper = {"h100-8x8", "a100-2x16", "a100-4x8", "a100-8x4"}
    today = {"h200", "b200", "nvl72", "mi300x", "a100-cloud", "pcie-8", "boxes-10gbe"}
    assert set(shipped("clusters")) == paper | today | {"lab"}
    for name in shipped("clusters"):
        cluster = replace(find_cluster(name), slow=(SlowMember(0, 1, 0.5, 0.75),))
        assert cluster.world >= 8, name
        text = cluster_text(replace(cluster, device=replace(cluster.device, name='a "quoted" name')), "two\nlines")
        read = read_cluster(parse_text(text, Path("mine.toml")), name, "mine.toml")
        assert read.device.name == 'a "quoted" name'
        for level, original in zip(read.levels, cluster.levels, strict=True):
            assert (level.bandwidth, level.latency) == pytest.approx((original.bandwidth, original.latency), rel=1e-3)
            assert replace(level, bandwidth=0.0, latency=0.0) == replace(original, bandwidth=0.0, latency=0.0)
        assert (read.slow, read.cores, read.transport) == (cluster.slow, cluster.cores, cluster.transport)
        for dtype, rates in cluster.device.rates.items():
            for curve in ("forward", "backward"):
                speed = getattr(read.device.of(dtype), curve).at(128)
                assert speed == pytest.approx(getattr(rates, curve).at(128), rel=1e-3)


GOOD = read_file(shipped("clusters")["a100-4x8"])
GOOD["device"]["float32"] = dict.fromkeys(("peak", "matmul", "forward", "backward"), "19 TFLOP/s")


def changed(path: str, value: object) -> dict:
    """The A100 cluster's table with one key changed, added or (None) removed."""
    table = json.loads(json.dumps(GOOD))
    *outer, last = path.split(".")
    at = table
    for key in outer:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return table


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("levels.0.bandwith", "1 GB/s", "levels[0]: no key 'bandwith'; did you mean 'bandwidth'?"),
        ("levels.0.bandwidth", "100 Gbit", "levels[0]: bandwidth = '100 Gbit' is not a rate"),
        ("levels.0.bandwidth", "0 GB/s", "bandwidth = '0 GB/s' is not between 1 kB/s and 1000 PB/s"),
        ("levels.0.bandwidth", 100, "bandwidth = 100 is not a rate"),
        ("levels.0.size", 0, "levels[0]: size = 0 is not a whole number of at least 1"),
        ("levels.0.size", -4, "size = -4"),
        ("levels.1.name", "node", "level 'node' already exists"),
        ("levels.0.links", "gpu", "links = 'gpu' is not one of device, member, peer"),
        ("levels.0.links", "peer", "levels[0]: links = 'peer' is only for the innermost level"),
        ("levels.0.latency", "5 parsecs", "latency = '5 parsecs' is not a time"),
        ("levels", [], "levels must be a list of tables"),
        ("levels", None, "'levels' is missing"),
        ("device", None, "'device' is missing"),
        ("device.memory", "lots", "device: memory = 'lots' is not an amount of memory"),
        ("device.reserved", "50 GB", "reserved = '50 GB' leaves nothing of memory = '40 GB'"),
        ("device", {"name": "x", "memory": "1 GB", "copy": "1 GB/s"}, "device: no rates"),
        ("device.bfloat16.matmul", "fast", "device.bfloat16: matmul = 'fast' is not a speed"),
        ("device.bfloat16.kernel", "fa9", "device.bfloat16: kernel = 'fa9' is not one of cudnn, fa2, fa3, fa4"),
        ("device.chip", "H101", "chip = 'H101': kernel fa2 has no speeds for chip 'H101'; it has A100, H100"),
        ("device.chip", None, "kernel = 'fa2' needs the device's chip"),
        (
            "device.float32.forward",
            [[512, "1 TFLOP/s"], [128, "2 TFLOP/s"]],
            "128 is not a number of tokens larger than the one before",
        ),
        ("accuracy", 2.0, "accuracy = 2.0 is not a number between 0 and 0.9"),
        ("transport", "tcp", "transport = 'tcp' is not one of nccl, gloo"),
        ("slow", [{"level": "rack", "member": 0}], "slow[0]: level = 'rack' is not one of node, gpu"),
        ("slow", [{"level": "node", "member": 4}], "slow[0]: member = 4 is not one of 0 to 3"),
        ("slow", [{"level": "node", "member": 0, "bandwidth": 0}], "bandwidth = 0 is not a number between 0.001 and 1"),
        (
            "slow",
            [{"level": "node", "member": 0, "device": "h100-8x8"}],
            "slow[0]: device: H100 SXM 80GB is not slower",
        ),
        ("slow", [{"level": "node", "member": 0, "device": "x"}], "slow[0]: device = 'x' is not one of a100-2x16, "),
        ("slow", [{"level": "node", "member": 0, "device": "a100-4x8", "compute": 1}], "compute and device both say"),
    ],
)
def test_a_mistake_in_a_cluster_file_names_the_key(path, value, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read_cluster(changed(path, value), "a", "a.toml")
    assert str(refused.value).startswith("a.toml: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "slow, ranks, local",
    [
        (SlowMember(0, 3, bandwidth=0.5), 16, SlowMember(0, 1, bandwidth=0.5)),
        (SlowMember(0, 3, compute=0.5), 8, SlowMember(0, 0, compute=0.5)),
        (SlowMember(1, 29, compute=0.5), 16, SlowMember(1, 13, compute=0.5)),
        (SlowMember(1, 29, compute=0.5), 4, SlowMember(1, 1, compute=0.5)),
        (SlowMember(0, 3, bandwidth=0.5), 4, SlowMember(0, 0, bandwidth=0.5)),
    ],
)
def test_a_slow_member_is_slow_in_its_group(slow, ranks, local):
    assert replace(find_cluster("a100-4x8"), slow=(slow,)).part(ranks).slow == (local,)


def test_a_slow_member_that_other_sizes_do_not_have_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        cluster_text(replace(find_cluster("a100-4x8"), slow=(SlowMember(0, 3, 0.5), SlowMember(1, 9, 0.5))), "mine")
    )
    assert find_cluster(f"{file}@8x8").slow == (SlowMember(0, 3, 0.5), SlowMember(1, 9, 0.5))
    with pytest.raises(ValueError, match="with sizes 2x8 has no node 3, which is marked as slow"):
        find_cluster(f"{file}@2x8")
    with pytest.raises(ValueError, match="with sizes 4x16 has no GPU 9, which is marked as slow"):
        find_cluster(f"{file}@4x16")  # where number 9 is another GPU
