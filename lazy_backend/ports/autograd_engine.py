"""Autograd: its engine, what a thread tells it, the profiler, which is part of it, and traces.

In: `torch._C`, `torch.autograd`. Out: the same under public names. A name that is missing is None: its port says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.autograd.profiler as _profiler
from torch.autograd import forward_ad as _forward_ad

from lazy_backend.ports.port import optional

# ----- the backward that is running

keeps_graph: Callable[[], bool] = optional("torch._C._autograd._get_current_graph_task_keep_graph")
will_execute: Callable[[Any], bool] = optional("torch._C._will_engine_execute_node")
current_node: Callable[[], Any] = optional("torch._C._current_autograd_node")
call_at_the_end: Callable[[Callable[[], None]], None] = optional(
    "torch.autograd.Variable._execution_engine.queue_callback"
)

# ----- what is asked before a forward

# (False): the hooks that `saved_tensors_hooks` installs, which act on what is saved for backward
hooks_of_saved: Callable[[bool], Any] = optional("torch._C._autograd._top_saved_tensors_default_hooks")
# A block in which writes to the given tensors do not count.
keep_versions: Any = optional("torch.autograd.grad_mode._unsafe_preserve_version_counter")
backward_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
accumulate_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Nodes are numbered on each thread as they are made, but for those of leaves: the largest number.
next_node_number: Callable[[], int] = optional("torch._C._autograd._get_sequence_nr")
node_number: Callable[[Any], int] = methodcaller("_sequence_nr")


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the graph of `tensors`, each once."""
    return nodes_before(*[tensor.grad_fn for tensor in tensors])


def nodes_before(*ends: Any) -> Iterator[Any]:
    """The nodes of the graph that ends at these, each once."""
    seen = set()
    pending = [*ends]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


def saves_tensors(node: Any) -> bool:
    """Whether a backward uses the node up: it has tensors for it, which it gives back then."""
    return any(name.startswith("_raw_saved_") for name in dir(node))


def tells_saved_tensors() -> bool:
    """Whether nodes tell so: that of a product saves its factors, and that of a sum nothing."""
    with torch.enable_grad():
        one = torch.ones(1, requires_grad=True)
        return saves_tensors((one * one).grad_fn) and not saves_tensors((one + one).grad_fn)


# The innermost level of `torch.autograd.forward_ad` that is entered, or -1.
forward_level: Callable[[], int] = partial(attrgetter("_current_level"), _forward_ad)


def plain_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` for where no transform of torch.func is active.

    `apply` asks every input whether it belongs to a transform that is over, 0.25 µs each, and then calls this.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


# ----- the profiler

# A range, at a tenth of the 10 µs of `torch.profiler.record_function`.
ProfilerRange: Any = optional("torch._C._profiler._RecordFunctionFast")

# Whether `torch.profiler` or `torch.autograd.profiler` is active: 40 ns.
is_profiling: Callable[[], bool] = (
    partial(attrgetter("_is_profiler_enabled"), _profiler)
    if hasattr(_profiler, "_is_profiler_enabled")
    else lambda: False
)

# ----- structured traces, which `TORCH_TRACE` asks for

trace_structured: Any = optional("torch._logging.trace_structured")

# Whether PyTorch writes them, which it decides by this when it is imported. Others who listen, as pytest does to all
# loggers, are not told: that would take time in each step.
writes_traces = bool(os.environ.get("TORCH_TRACE"))
