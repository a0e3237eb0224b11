"""Which tokens each rank holds, which keys each query sees, and how kernels compute it in a few calls. No torch.

Imports no other package. Start reading at ``mask``.

- ``layout``: the tokens of each rank, zigzag or contiguous
- ``mask``: the keys that each query sees: causal, windows, chunks and documents
- ``tiles``: a block of the mask as rectangles that kernels compute without a mask
- ``bands``: the same for kernels that take windows and several sequences in one call
"""
