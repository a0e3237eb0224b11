"""Which tokens each rank holds, which keys each query sees, and how few kernel calls compute that. No torch.

Imports no other package. Start reading at ``mask``.

- ``layout``, ``zones``: the tokens of each rank: zigzag, contiguous, or by document
- ``placing``: which ranks get which documents; ``division`` and ``line`` divide them, ``pieces`` prices the result
- ``mask``: the keys that each query sees: causal, windows, chunks and documents
- ``tiles``: cuts a block of the mask into rectangles that kernels compute without a mask
- ``bands``: the same for kernels that support windows and several sequences per call
- ``needs``: the keys of other ranks that a rank's queries see
- ``packing``: which documents become one sequence, so that data-parallel groups do not wait for each other
- ``distributions``: typical lengths of documents
"""
