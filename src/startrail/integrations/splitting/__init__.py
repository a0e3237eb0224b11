"""Part of a model on part of the tokens: what ``modules`` and ``diffusers`` share. Start with ``regions``.

- ``regions``: splits tokens in front of blocks, gathers them behind, and checks the first calls
- ``streams``: tokens, and text next to them, as one sequence
- ``trial``: tries a block on a few tokens
- ``refusals``: what to do about a block that cannot be split, and what that costs
- ``sdpa``, ``wrapping``: calls of torch's attention, and replaced ``forward`` methods
"""
