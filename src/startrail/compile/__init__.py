"""What a call runs on each rank: compiled once, then executed, priced, proven, drawn and compared. No torch.

May import `schedule` and `geometry`. Start reading at ``problem``, then ``call``.

- ``problem``: one call without its tensors, and how a ``SequenceParallel`` splits its sequence
- ``call``: ``compile_call`` and the value that it returns: the parts of a call, their programs, and their order
- ``attention``: the kind of call that every plan serves, with the tiles of its blocks; each kind is one such file
- ``halo``: the tokens before each run, for convolutions
- ``scan``: states that go from run to run, for recurrences
- ``proof``: proves that the compiled calls of all ranks compute every visible pair once
- ``explain``: the parts of a rank's call as a table
"""
