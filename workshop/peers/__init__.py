"""Adapters that call each contender's attention: our engine, the textbook ring, and the peers' own code.

`contenders` has the base class, our engine, torch's ring and DeepSpeed; `flash` has the peers written around
flash-attn, which find `fake_flash_attn` in its place on CPUs; `ring` is the baseline of the claims.
"""
