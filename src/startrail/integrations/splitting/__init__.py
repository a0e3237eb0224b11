"""Part of a model on part of the tokens: what ``modules`` and ``diffusers`` share. Start with ``regions``.

- ``regions``: splits tokens in front of blocks, and gathers them behind
- ``outside``: what a model does between its blocks, and must not do with split tokens
- ``streams``: tokens, and text next to them, as one sequence
- ``trial``: tries a block on made-up tokens, a few and as many as a call has
- ``first_steps``: compares ranks in the first calls, and looks for what results do not show
- ``refusals``: what to do about a block that cannot be split, and what that costs
- ``calls``: calls of modules and of torch's attention, and what runs in their place
"""
