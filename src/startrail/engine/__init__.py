"""Everything behind the attention op. One ``Session`` per ``SequenceParallel`` identifies a call's batch, makes sure
that all ranks agree on the call, and has a ``PassRunner`` run its compiled form.

May import `schedule`, `geometry`, `compile`, `kernels`, `agreement` and `transport`. Start reading at `op`, then
`attention`, `session` and `runner`.

- `op`, `gather_op`: the custom ops for autograd and torch.compile; `op_key`: how they refer to a sequence
- `arguments`: what a layer asks for, and the checks of its arguments; `tensors`: those of any one tensor
- `attention`: the torch side of one kind of call: its request, its kernel for blocks, its two passes
- `halo`: the same of another kind, with its op: the tokens before each run, for convolutions
- `scan`: a third one: states that go from run to run, for recurrences; `latents`: attention that expands latents
- `session`: from a request to a pass that all ranks are about to run; `batch`: what all layers of a batch share
- `runner`: the events of compiled programs as buffers, messages and calls of a kernel
- `exchange`: the all-to-all over heads; `wire`: pieces as bytes; `buffers`: bytes that are reused, and bundles
"""
