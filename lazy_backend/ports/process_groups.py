"""Process groups: by name, their timeouts, and collectives on flat tensors.

In: `torch.distributed`. Out: the same under public names. A name that is missing is None: its port says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from lazy_backend.ports.port import optional

group_named: Callable[[str], dist.ProcessGroup] = optional("torch.distributed.distributed_c10d._resolve_process_group")
# Of a group: (gathered, tensor), and (scattered, tensor, options). The public functions, which call these, check more.
all_gather_of: Callable[[Any], Callable[..., dist.Work]] = attrgetter("_allgather_base")
reduce_scatter_of: Callable[[Any], Callable[..., dist.Work]] = attrgetter("_reduce_scatter_base")

# Work that is done, with its results: one written in Python ends with its Python object, which C++ does not hold.
work_of_future: Callable[[torch.futures.Future[Any]], dist.Work] = optional(
    "torch._C._distributed_c10d._create_work_from_future"
)
check_messages: Callable[[list[Any]], None] = optional("torch.distributed.distributed_c10d._check_p2p_op_list")
# Indices of tensors that share a bucket, and the sizes of the buckets, from tensors and limits in bytes.
buckets_by_size: Callable[[Any, list[int]], tuple[list[list[int]], list[int]]] = optional(
    "torch.distributed._compute_bucket_assignment_by_size"
)
wait_tensor: Callable[[torch.Tensor], torch.Tensor] = optional("torch.ops._c10d_functional.wait_tensor")

# Names of the arguments of `DistributedDataParallel`'s reducer, in its order, and methods by which more is asked of it.
REDUCER_ARGUMENTS = (
    "params", "bucket_indices", "per_bucket_size_limits", "process_group", "expect_sparse_gradients",
    "bucket_bytes_cap", "find_unused_parameters", "gradient_as_bucket_view", "param_to_name_mapping",
    "first_bucket_bytes_cap", "skip_all_reduce_unused_params", "use_python_reducer",
)  # fmt: skip
REDUCER_EXTRAS = (
    "_set_static_graph", "_set_optimizer_in_backward", "_set_mixed_precision_param_dtype", "_set_sparse_metadata",
    "_install_post_backward_futures", "_remove_autograd_hooks", "_delay_all_reduce", "_autograd_hook",
)  # fmt: skip


def has_known_reducer() -> bool:
    """Whether the reducer has the methods, and takes the arguments, as its docstring shows, that are named here."""
    reducer: Any = dist.Reducer  # type: ignore[attr-defined]
    taken = re.findall(r"(\w+): ", (reducer.__init__.__doc__ or "").split("->")[0])
    methods = ("_rebuild_buckets", "_get_zeros_like_grad_buckets", "_check_reducer_finalized", "_reset_state")
    has_methods = all(hasattr(reducer, name) for name in methods)
    return has_methods and tuple(taken[1 : len(REDUCER_ARGUMENTS) + 1]) == REDUCER_ARGUMENTS


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long a collective of the group may take, in seconds."""
    backend: Any = group._get_backend(group._device_types[0])
    return float(backend.options._timeout.total_seconds())
