"""The Dynamo backend: `torch.compile(model, backend="lazy")` of functions of lazy tensors.

In: the FX graph that Dynamo traced from a function. Out: a callable that replays or records the graph.
PyTorch finds this module by name (entry point group `torch_dynamo_backends`) and imports it only then: Dynamo is heavy.

Note [What torch.compile adds]
A lazy step is compiled as a whole however it was recorded, so this backend compiles nothing. What it saves is Python
time: Dynamo traces a call without autograd once, and the call is then replayed like that of a captured function, as a
step of its own. A call with autograd is replayed like that of a captured module, forward and backward, within the step
that it belongs to. Guards are Dynamo's, so a branch on a Python value is checked again at every call, unlike in a
captured function. Guards cost time: a call of 36 small modules takes 0.45 ms of CPU time, against 0.20 ms captured and
0.60 ms recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazy_backend.errors import CompileWarning
from lazy_backend.errors.sites import warn_user
from lazy_backend.ports.replacements.tracing import GUARDS, changes_grad_mode, is_tracing_for, let_dynamo_trace
from lazy_backend.ports.thread_modes import without_dispatch_modes
from lazy_backend.regions.module import capture_module
from lazy_backend.replay.capture import capture_function
from lazy_backend.tensors.tensor import NOT_TRACED, LazyTensor


def lazy(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend. Calls raise the errors of a captured function: `CaptureError` for a read within a replayed graph."""
    tensors = [example for example in example_inputs if isinstance(example, torch.Tensor)]
    if tensors and not any(tensor.device.type == "lazy" for tensor in tensors):
        warn_user(
            f"torch.compile(backend='lazy') got a graph of tensors on {tensors[0].device}, which runs as written\n"
            "  move the model and its inputs, as in model.to('lazy'); lazy_backend.serve takes a model on the CPU",
            CompileWarning,
        )
        return gm.forward
    written = gm.forward
    if changes_grad_mode(gm):
        return written  # autograd records part of the graph, whatever the grad mode of the call

    def graph(*args: Any) -> Any:
        return written(*args)

    graph.__qualname__ = "a graph of torch.compile"
    replayed = capture_function(graph)
    followed = capture_module(gm)

    def call(*args: Any) -> Any:
        is_followed = torch.is_grad_enabled()
        given = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if not isinstance(arg, LazyTensor) or (is_followed and arg.requires_grad):
                    return followed(*args)
                if arg.requires_grad:
                    arg = arg.data  # a captured function does not take parameters that have a .grad
            given.append(arg)
        return replayed(*given)

    return call


def _traces_for_us() -> bool:
    return is_tracing_for(lazy)


def _to_meta(tensor: LazyTensor) -> torch.Tensor:
    """A meta tensor with the shape, strides and dtype of `tensor`."""
    meta = tensor._data.meta
    with without_dispatch_modes():
        return torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device="meta", requires_grad=tensor.requires_grad
        )


def _install() -> None:
    # Dynamo asks every class that has `__tensor_flatten__` for its inner tensors, and gets none here
    LazyTensor._may_be_traced_by = staticmethod(  # type: ignore[method-assign]
        lambda compiler: compiler in GUARDS or _traces_for_us()
    )
    let_dynamo_trace(
        LazyTensor,
        _traces_for_us,
        _to_meta,
        NOT_TRACED,
        # or Dynamo would trace the recorder after a graph break
        packages=("lazy_backend", "lazy_backend.lowering", "lazy_backend.cache"),
        # PyTorch's functions that are ours since are still constants to Dynamo, which guards autocast
        constant_functions=(torch.is_autocast_enabled, torch.get_autocast_dtype),
    )


_install()
