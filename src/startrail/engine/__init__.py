"""Everything behind the attention op: one ``Runtime`` per ``SequenceParallel`` checks a call, makes sure that all ranks
agree on it, and hands each pass to the executor, which walks this rank's program.

May import `schedule`, `geometry`, `kernels` and `comm`. Start reading at `op`, then `runtime`, then `executor`.

- `op`: the custom ops for autograd and torch.compile; `op_key`: how they refer to a sequence
- `call`: what a layer asks for; `validate`: checks of its arguments; `batch`: what all layers of a batch share
- `runtime`: from a call to a pass; `executor`: handles the events of its walk
- `exchange`: the all-to-all over heads; `wire`: pieces as bytes; `buffers`: bytes that are reused
"""
