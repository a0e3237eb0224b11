"""Every private or version-dependent torch API that StarTrail uses, each behind a plain name.

Supporting another version of torch means changing this file, and the versions that CONTRIBUTING lists. Everything may
import it; it imports nothing of StarTrail.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "FileStore", "PrefixStore", "Store", "TCPStore", "TorchDispatchMode", "tree_flatten", "tree_leaves",
    "tree_unflatten",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """Torch gives its own name with a prefix only.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


# --- process groups


def default_store() -> Store:
    """The store that the default process group was made with."""
    return c10d._get_default_store()


def find_group(name: str) -> dist.ProcessGroup:
    """The process group that has this ``group_name``."""
    found: dist.ProcessGroup = cast(Any, c10d)._resolve_process_group(name)
    return found


def default_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout of a group's own operations; torch's default without a group, and for a fake one."""
    options = None if group is None else group._get_backend(group._device_types[0]).options
    return c10d.default_pg_timeout if options is None else options._timeout


def nccl_options(timeout: timedelta, max_channels: int, clusters: bool) -> Any:
    """Options for NCCL: streams of high priority, and at most ``max_channels`` channels. ``clusters``: channels may
    start in clusters of four, NCCL's default from Hopper on."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = max_channels
    if not clusters:
        options.config.cga_cluster_size = 1
    return options


def make_named_group(
    members: list[int], name: str, backend: str, store: Store, options: Any, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group of global ranks under a given name, made by its members alone.

    ``dist.new_group`` derives the name from the number of groups that this process has made, so ranks that have made
    different numbers of groups would wait for each other forever.
    """
    index, group_name = members.index(dist.get_rank()), cast(Any, getattr(c10d, "GroupName", str)(name))
    with without_bound_device():
        group, _ = c10d._new_process_group_helper(
            len(members), index, members, dist.Backend(backend), store, group_name, options, timeout
        )
    c10d._world.pg_group_ranks[group] = {rank: local for local, rank in enumerate(members)}
    return group


@contextmanager
def without_bound_device() -> Iterator[None]:
    """Unbind the default group from its device: torch would split new groups from the communicator of the world."""
    default = dist.group.WORLD
    assert default is not None
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def post_batch(group: dist.ProcessGroup, device: torch.device, posts: Sequence[Callable[[], object]]) -> dist.Work:
    """Call ``posts``, which send and receive on ``group``, as one batch with one work.

    A batch that was begun is always ended: NCCL counts open batches per thread, and with one left open it silently
    launches nothing of what the thread posts from then on, on any communicator.
    """
    group._start_coalescing(device)
    try:
        for post in posts:
            post()
    except BaseException:
        with suppress(RuntimeError):  # the first error counts
            group._end_coalescing(device)
        raise
    return group._end_coalescing(device)


def all_to_all(group: dist.ProcessGroup, output: Tensor, input_: Tensor) -> dist.Work:
    """Exchange equal parts with every rank of ``group``."""
    post = getattr(group, "all_to_all_single", None) or group.alltoall_base
    return post(output, input_, [], [], dist.AllToAllOptions())


_has_warned = False
_has_python_errors = torch.__version__ >= "2.13"  # a TorchVersion, so not compared as text


def work_error(work: dist.Work) -> Exception | None:
    """The error of a completed work, if it failed.

    ``Work.exception`` is deprecated without a replacement. torch warns once per process, which this hides.
    """
    global _has_warned
    if not _has_python_errors:
        return _error_from_result(work)
    if _has_warned:
        return work.exception()
    _has_warned = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work.exception()


def _error_from_result(work: dist.Work) -> Exception | None:
    """``work_error`` before torch 2.13, where ``Work.exception`` raises ``TypeError`` (pytorch/pytorch#147312).

    If NCCL's ``is_completed`` finds an error, it also stores the kind of error as the work's result. Other works have
    no result and can be asked for success, which NCCL's cannot.
    """
    try:
        result = work.get_future_result()  # type: ignore[attr-defined]
    except RuntimeError:
        return None if work.is_success() else RuntimeError("the transfer failed")
    if not result.done() or result.value() == 0:
        return None
    kind = {1: "it timed out", 2: "communication error"}.get(result.value(), f"result {result.value()}")
    return RuntimeError(f"the transfer failed: {kind}")


def is_gloo_error(error: RuntimeError) -> bool:
    """True for an error of gloo. They have no type of their own, but their text names gloo or its source file."""
    return "gloo" in str(error)


class FSDPMesh(NamedTuple):
    """The mesh of parameters that FSDP2 shards: over one dimension of it, with copies over another if there are two.

    ``divisor``: what sums over the mesh are divided by. ``covered``: the ranks that hold different shards or copies of
    these parameters: those of the mesh and, for experts that were sharded before, those that hold other experts.
    """

    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None
    divisor: float
    covered: frozenset[int]

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that gradients are summed over."""
        return frozenset(self.mesh.mesh.flatten().tolist())


def fsdp_meshes(model: nn.Module) -> list[FSDPMesh]:
    """Of all modules of ``model`` that FSDP2 shards. (torch 2.13 has a list of groups per module, 2.12 one.)"""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if groups is None else groups
            for group in filter(None, groups):
                info, divisor = group.mesh_info, group.gradient_divide_factor
                dims = (info.shard_mesh_dim, info.replicate_mesh_dim)
                size = math.prod(info.mesh.size(dim) for dim in dims if dim is not None)
                covered = _covered_ranks(info.mesh, [each.sharded_param for each in group.fsdp_params])
                found.append(FSDPMesh(info.mesh, *dims, float(size if divisor is None else divisor), covered))
    return found


def _covered_ranks(mesh: DeviceMesh, parameters: Sequence[Any]) -> frozenset[int]:
    """The ranks that hold shards or copies of these parameters, which FSDP shards over ``mesh``."""
    inside = set(mesh.mesh.flatten().tolist())
    root, covered = mesh._get_root_mesh(), []
    names = root.mesh_dim_names or ()
    if expert_dims := {"ep", "expert"} & set(names):  # of experts that the program itself has split
        varying = {*(mesh.mesh_dim_names or ()), *expert_dims}
        own = (root.mesh == dist.get_rank()).nonzero()[0].tolist()
        place = tuple(slice(None) if name in varying else index for name, index in zip(names, own, strict=True))
        return frozenset(inside | set(root.mesh[place].flatten().tolist()))
    for parameter in parameters:
        whole, free = parameter.device_mesh.mesh, []
        own = (whole == dist.get_rank()).nonzero()[0].tolist()
        for dim, (index, placement) in enumerate(zip(own, parameter.placements, strict=True)):
            line = whole[tuple(slice(None) if each == dim else own[each] for each in range(whole.ndim))]
            is_free = placement.is_shard() or len(inside.intersection(line.tolist())) > 1
            free.append(slice(None) if is_free else index)
        covered.append(set(whole[tuple(free)].flatten().tolist()))
    return frozenset(inside | set.intersection(*covered)) if covered else frozenset(inside)


def make_fake_store() -> Store:
    """A store for a process group of backend "fake", which sends nothing."""
    return importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


def ignore_captures_of_other_threads() -> None:
    """Let this thread query events while another thread captures a CUDA graph, whose capture would fail otherwise.

    torch does the same in its own threads, but has no Python name for it. This is the driver's call, for the calling
    thread: 1 is CU_STREAM_CAPTURE_MODE_THREAD_LOCAL.
    """
    with suppress(OSError):  # AMD's driver has another name, and its captures are not guarded
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(1)))


# --- functional collectives, which torch.compile traces; torch 2.13 renamed two of them


def gather_shards(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tensors, concatenated along ``dim``."""
    return funcol.wait_tensor(_gather(x, dim, group))


def gather_shards_autograd(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """``gather_shards`` with a gradient."""
    return funcol.wait_tensor(_gather_autograd(x, dim, group))


def sum_to_shards(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along ``dim`` of the sum over all ranks."""
    return funcol.wait_tensor(_reduce_scatter(x, "sum", dim, group))


def max_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, "max", group))


if hasattr(funcol, "all_gather_single"):
    _gather, _gather_autograd = funcol.all_gather_single, funcol.all_gather_single_autograd
    _reduce_scatter = funcol.reduce_scatter_single
else:
    _gather, _gather_autograd = funcol.all_gather_tensor, funcol.all_gather_tensor_autograd
    _reduce_scatter = funcol.reduce_scatter_tensor

# --- torch.compile and the profiler


def load_dynamo() -> None:
    """Import torch.compile's front end before ranks are forked. The first custom op, optimizer or FSDP module needs it,
    and every rank would spend a second on it."""
    importlib.import_module("torch._dynamo")


def not_compiled(function: Function) -> Function:
    """A function that torch.compile calls as it is: ``torch.compiler.disable``, which imports dynamo on the first call
    and not before."""
    return cast(Function, _disable_dynamo(function))


def mark_weakly_dynamic(x: Tensor, dim: int) -> Tensor:
    """Have torch.compile treat the size of ``x`` in ``dim`` as dynamic. Does what ``torch._dynamo.maybe_mark_dynamic``
    does, without its import, which takes seconds."""
    x._dynamo_weak_dynamic_indices = {dim}  # type: ignore[attr-defined]
    return x


def is_profiling() -> bool:
    return torch._C._autograd._profiler_enabled()


# --- attention

_aten = torch.ops.aten
cpu_flash_forward = _aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_flash_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
cuda_flash_forward = _aten._scaled_dot_product_flash_attention.default
cuda_flash_backward = _aten._scaled_dot_product_flash_attention_backward.default
cuda_bands_forward = _aten._flash_attention_forward.default
cuda_bands_backward = _aten._flash_attention_backward.default
cuda_cudnn_forward = _aten._scaled_dot_product_cudnn_attention.default
cuda_cudnn_backward = _aten._scaled_dot_product_cudnn_attention_backward.default
cuda_efficient_forward = _aten._scaled_dot_product_efficient_attention.default
cuda_efficient_backward = _aten._scaled_dot_product_efficient_attention_backward.default


def chosen_flash_impl() -> str | None:
    """The FlashAttention that the program made torch use (``activate_flash_attention_impl``, new in torch 2.10)."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def fa3_ops(package: str) -> tuple[Callable[..., Any], ...]:
    """FlashAttention 3 with ATen's signatures, from torch's adapter: dense forward and backward, varlen forward and
    backward. Raises ``ImportError`` or ``AttributeError`` where torch or ``package`` lacks them.

    ``activate_flash_attention_impl`` would replace the ops of the whole process.
    """
    adapter = importlib.import_module("torch.nn.attention._fa3")
    adapter._fa3_import_module(package)
    dense, varlen = "_fa3_scaled_dot_product_flash_attention", "_fa3_flash_attention"
    names = [f"{kind}_{pass_}" for kind in (dense, varlen) for pass_ in ("forward_impl_default", "backward_impl")]
    return tuple(getattr(adapter, name) for name in names)


@contextmanager
def sm_margin(count: int) -> Iterator[None]:
    """Have torch's adapter for FlashAttention 3 leave ``count`` multiprocessors to others. The setting is the process's
    own, so it is restored at once; calls are made from the host while it holds."""
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


def can_use_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """True if torch itself would let cuDNN attend with these tensors, on this GPU and with its version of cuDNN."""
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(params)


def module_hooks(module: nn.Module) -> list[Any]:
    """All functions that are called before or after a module's forward or backward pass."""
    kinds = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for hooks in kinds for hook in hooks.values()]


def in_backward() -> bool:
    """True in a function that autograd runs, such as one that is recomputed in the backward pass."""
    return torch._C._current_graph_task_id() != -1


def shard_offsets(x: DTensor) -> list[int]:
    """Where this rank's part of a tensor begins in each dimension."""
    (chunk,) = cast(Any, x).__create_chunk_list__()
    return list(chunk.offsets)


@contextmanager
def unobserved() -> Iterator[None]:
    """Inside, activation checkpointing does not see operations and the tensors that they save.

    What is saved is detached: an operation that saved its own result as it is would never be freed.
    """
    with _disable_current_modes(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        yield


def without_torch_functions() -> Any:
    """A context in which no ``TorchFunctionMode`` sees calls."""
    return torch._C.DisableTorchFunction()
