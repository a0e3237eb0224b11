"""Everything behind the attention op: one ``Runtime`` per ``SequenceParallel`` checks a call, makes sure that all ranks
agree on it, and hands each pass to the executor, which walks this rank's program.

May import `schedule`, `geometry`, `routing`, `kernels` and `comm`. Start reading at `op`, then `runtime`, then
`executor`.

- `op`: the custom ops for autograd and torch.compile; `op_key`: how they refer to a sequence
- `call`: what a layer asks for; `validate`: checks of its arguments; `batch`: what all layers of a batch share
- `settings`: those of a ``SequenceParallel``; `data_digest`: the identity of a batch's data
- `runtime`: from a call to a pass; `parts`: a call by zones; `executor`, `part_run`: handle the events of their walks
- `exchange`: the all-to-all over heads; `wire`, `bundles`: pieces as bytes; `buffers`: bytes that are reused
"""
