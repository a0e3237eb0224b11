"""Shapes for several of the planner's tests."""

from dataclasses import replace

from startrail.compile.attention import Attention
from startrail.compile.problem import Boundaries
from startrail.planner.cluster import find_cluster

CALL = Attention.of(length=8192, batch=2, heads=8, kv_heads=8, head_dim=64, causal=True, dtype="bfloat16")


def altered(call, **changes):
    """The call with another ``length`` (of one document), other ``documents``, ``window`` or ``causal``, or sizes."""
    if "length" in changes:
        changes["boundaries"] = Boundaries((0, changes.pop("length")))
    if "documents" in changes:
        changes["boundaries"] = Boundaries(changes.pop("documents"))
    masks = {name: changes.pop(name) for name in ("window", "causal") if name in changes}
    return replace(call, mask=replace(call.mask, **masks), **changes)


SMALL = find_cluster("a100-4x8@4x4")
PEERS = find_cluster("mi300x@4x4")
LLAMA = dict(
    model_type="llama", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=100,
)  # fmt: skip
