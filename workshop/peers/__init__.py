"""Adapters that call each contender's attention: our engine, the textbook ring, and the peers' own code.

`contenders` has the base class, our engine, the textbook ring (the baseline of the claims), torch's ring and DeepSpeed;
`flash` has the peers written around flash-attn, which find `fake_flash_attn` in its place on CPUs; `sparse` has those
for windows and packed documents.
"""
