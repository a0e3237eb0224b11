"""Cases of ``make fuzz`` that failed once, by what was wrong. ``tests/fuzz.py`` runs them again."""

import torch

from startrail.diagnostics.reference import Case

# fmt: off
FAILED_CASES = [
    # largest logits with as many roundings as products
    Case("2x1/u3/u2", 12, length=34, batch=2, q_heads=6, kv_heads=1, head_dim=64, causal=True, window=33, scale=0.7,
         slices=((0, 3, 0, 3), (3, 13, 0, 3), (13, 34, 0, 34, 1)), value_dim=1, sinks=True, seed=300320),
    Case("1x3/2x2,keep=queries", 12, length=384, q_heads=12, head_dim=64, causal=True, documents=(0, 78, 384),
         wire_dtype=torch.float32, scale=1.0, seed=405208, call_style="q only"),
    # gradients of small sinks
    Case("1x2/u2/u3,keep=all", 12, length=192, batch=2, q_heads=24, kv_heads=12, head_dim=64, causal=True,
         scale=0.7, slices=((0, 48, 0, 48), (48, 113, 0, 48), (113, 192, 0, 192, 1)), value_dim=24, sinks=True,
         seed=402388, call_style="strided"),
    Case("1x3/u2/2x1,keep=all", 12, length=327, batch=2, kv_heads=2, head_dim=64, causal=True, window=23,
         documents=(0, 106, 327), layout="contiguous", scale=0.7, value_dim=1, sinks=True, seed=406092,
         call_style="in turn"),
    Case("1x3/4x1,keep=queries,groups=3", 12, length=1, batch=6, kv_heads=2, head_dim=1, causal=True, window=41,
         wire_dtype=torch.float64, value_dim=24, sinks=True, softcap=0.5, seed=407239),
    # bounds from a yardstick that is exact by luck: 2 tokens, float64, cotangents of lse, few numbers
    Case("u2/u6,keep=all", 12, length=2, batch=2, q_heads=12, kv_heads=3, head_dim=1, wire_dtype=torch.float64,
         scale=1.0, blocks=((0, 2),), softcap=0.5, seed=301978, call_style="nested"),
    Case("u2/u6,groups=3", 12, length=92, batch=6, q_heads=48, kv_heads=1, head_dim=1, dtype=torch.float64,
         causal=True, layout="contiguous", scale=0.05, blocks=((24, 33), (36, 55), (72, 90)), seed=401697,
         call_style="nested"),
    Case("1x2/u2/u3,keep=all", 12, length=30, batch=2, q_heads=12, kv_heads=2, head_dim=33, causal=True,
         documents=(0, 0, 4, 5, 18, 30), scale=0.7, value_dim=1, softcap=0.5, lse=True, seed=402385,
         call_style="strided"),
    Case("u3/2x2,keep=queries,groups=2", 12, length=350, batch=2, q_heads=12, kv_heads=2, head_dim=64, causal=True,
         window=427, documents=(0, 299, 350), scale=0.7, value_dim=1, sinks=True, softcap=0.5, lse=True, seed=400505,
         call_style="expanded"),
    Case("2x2/2x1,backward=queries", 8, length=11, batch=2, q_heads=6, kv_heads=6, head_dim=8, dtype=torch.float16,
         window=30, documents=(0, 11), scale=0.7, seed=405033, call_style="strided"),
    # own blocks with more digits than the wire has: float16, bfloat16
    Case("u1,keep=all,groups=3", 1, length=2, batch=3, q_heads=8, head_dim=33, dtype=torch.float16,
         layout="contiguous", wire_dtype=torch.bfloat16, value_dim=1, seed=700032, call_style="in turn"),
    Case("1x3,backward=queries", 3, length=192, q_heads=2, kv_heads=1, head_dim=1, dtype=torch.float16,
         wire_dtype=torch.bfloat16, scale=0.7, seed=700432, call_style="strided"),
    # a reference computed from a rounded lse
    Case("3x1,keep=all,groups=2", 3, length=195, batch=4, q_heads=8, head_dim=33, dtype=torch.float64, causal=True,
         layout="contiguous", scale=1.0, chunk=1, sinks=True, seed=700060, call_style="strided"),
    # one rank that rounded although nothing was sent
    Case("u1,keep=queries", 1, length=2, q_heads=3, kv_heads=1, head_dim=64, causal=True, window=7,
         wire_dtype=torch.bfloat16, scale=0.7, chunk=322, value_dim=1, seed=407444, call_style="expanded"),
    # the weight of a heavy part, rounded near 1: float64, 2 tokens
    Case("2x1,keep=all,groups=2", 2, length=2, batch=4, head_dim=64, dtype=torch.float64, causal=True, window=322,
         documents=(0, 2), layout="zigzag", scale=0.7, seed=332, call_style="nested"),
    # gradients in half precision whose parts and sum are both rounded
    Case("2x1/4x1", 8, length=2, batch=2, head_dim=1, dtype=torch.float16, causal=True, window=411, sinks=True,
         seed=660, call_style="nested"),
    Case("star3,keep=all,groups=2", 9, length=34, batch=4, head_dim=1, dtype=torch.bfloat16, causal=True,
         documents=(0, 22, 34), scale=0.7, seed=946, call_style="nested"),
    Case("1x2/2x2,backward=queries", 8, length=80, q_heads=12, kv_heads=6, head_dim=8, dtype=torch.bfloat16,
         documents=(0, *range(60, 81)), scale=0.7, value_dim=24, seed=3416),
    # logits of inputs that the wire rounds
    Case("1x2/1x2,keep=queries,groups=2", 4, length=1, batch=2, q_heads=1, kv_heads=1, head_dim=1, window=45,
         documents=(0, 0, 1), layout="contiguous", wire_dtype=torch.float16, lse=True, seed=1494, call_style="nested"),
    # direct on one rank
    Case("direct", 1, length=150, q_heads=8, kv_heads=8, head_dim=33, causal=True, window=184, chunk=3, seed=1032,
         call_style="k and v only"),
    # out rounded to half precision before the backward pass reads it: 2 tokens
    Case("u1,keep=queries", 1, length=2, q_heads=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16, causal=True,
         slices=((0, 1, 0, 1), (1, 2, 0, 2, 1)), seed=20107, call_style="checkpointed"),
    # ranks that hold no token
    Case("1x3/3x1,backward=queries", 9, length=1, q_heads=6, kv_heads=1, causal=True, window=1, documents=(0, 1),
         scale=1.0, value_dim=24, seed=10000, call_style="strided", shares=(0.5, 0.01, 0.5, 1, 1, 0.01, 1, 0.5, 0.5)),
    Case("3x1/u2,keep=queries,groups=3", 6, length=2, batch=6, q_heads=8, kv_heads=1, head_dim=1, dtype=torch.float64,
         causal=True, wire_dtype=torch.float32, scale=0.7, value_dim=24, seed=950007, call_style="checkpointed",
         shares=(0.5, 0.5, 1.0, 0.5, 0.01, 0.9)),
    Case("2x2/u3,keep=all", 12, length=8, batch=2, q_heads=3, kv_heads=1, dtype=torch.bfloat16, window=120,
         documents=(0, 6, 7, 8), wire_dtype=torch.float64, chunk=276, softcap=0.5, seed=100457,
         packed_from=(0, 6, 7, 8)),
    # queries without keys next to a causal slice
    Case("1x2", 2, length=12, layout="contiguous", slices=((0, 4, 0, 8, 1),)),
    Case("1x2", 2, length=12, layout="zigzag", slices=((3, 6, 0, 10, 1),)),
]
