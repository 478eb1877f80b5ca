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
from torch._dynamo import symbolic_convert, trace_rules
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import torch as torch_variables
from torch._guards import Source

from lazy_backend.compat.pytorch import let_dynamo_trace
from lazy_backend.errors import CompileWarning
from lazy_backend.errors.sites import warn_user
from lazy_backend.regions.module import capture_module
from lazy_backend.replay.capture import capture_function
from lazy_backend.tensors.tensor import LazyTensor


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
    if any(node.target is torch._C._set_grad_enabled for node in gm.graph.nodes):
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


def _is_ours(compiler: Any) -> bool:
    innermost: Any = innermost_backend(compiler)
    return getattr(innermost, "compiler_fn", innermost) is lazy  # torch.compile wraps the backend function


def _traces_for_us() -> bool:
    """Whether Dynamo is tracing for this backend on this thread."""
    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    return tracer is not None and _is_ours(tracer.output.compiler_fn)


_guards = (GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH, Source.get_value)
let_dynamo_trace(_traces_for_us, frozenset(function.__module__ for function in _guards))
for _name in ("lazy_backend", "lazy_backend.lowering", "lazy_backend.cache"):
    trace_rules.add(_name)  # or Dynamo would trace the recorder after a graph break
# PyTorch's functions that are ours since are still constants to Dynamo, which guards autocast
for _asked in (torch.is_autocast_enabled, torch.get_autocast_dtype):
    trace_rules.get_torch_obj_rule_map()[_asked] = torch_variables.TorchInGraphFunctionVariable
    torch_variables.constant_fold_functions[_asked] = None  # type: ignore[call-overload]
