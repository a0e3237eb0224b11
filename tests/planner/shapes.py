"""Shapes for several of the planner's tests."""

from startrail.planner.cluster import find_cluster
from startrail.planner.predict import AttentionShape

CALL = AttentionShape(length=8192, batch=2, heads=8, kv_heads=8, head_dim=64, causal=True, dtype="bfloat16")
SMALL = find_cluster("a100-4x8@4x4")
PEERS = find_cluster("mi300x@4x4")
LLAMA = dict(
    model_type="llama", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=100,
)  # fmt: skip
