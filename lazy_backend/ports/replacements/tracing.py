"""Dynamo, which refuses the device "lazy" by name, meaning the tensors of the Lazy Tensor Core.

In: the class of lazy tensors. Out: fake tensors of them, where Dynamo traces for the backend "lazy". Imported with the
backend only: Dynamo is heavy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import symbolic_convert, trace_rules
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import torch as torch_variables
from torch._guards import Source
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode

from lazy_backend.ports.table import DYNAMO

UnsupportedFakeTensorException = fake_tensor.UnsupportedFakeTensorException

# The modules whose guards ask a class for its inner tensors outside of tracing.
GUARDS = frozenset(function.__module__ for function in (GuardBuilder.TENSOR_SUBCLASS_METADATA_MATCH, Source.get_value))


def is_tracing_for(backend: Callable[..., Any]) -> bool:
    """Whether Dynamo is tracing for `backend` on this thread."""
    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    if tracer is None:
        return False
    innermost: Any = innermost_backend(tracer.output.compiler_fn)
    # torch.compile wraps the backend function
    return getattr(innermost, "compiler_fn", innermost) is backend


def changes_grad_mode(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph turns autograd on or off in its midst."""
    return any(node.target is torch._C._set_grad_enabled for node in gm.graph.nodes)


def let_dynamo_trace(
    kind: type,
    traces_for_us: Callable[[], bool],
    to_meta: Callable[[Any], torch.Tensor],
    refusal: str,
    packages: tuple[str, ...],
    constant_functions: tuple[Callable[..., Any], ...],
) -> None:
    """Let Dynamo trace tensors of `kind` where `traces_for_us`; other compilers get the error `refusal`.

    Such tensors become fake tensors on device lazy, like real tensors on any other device: `to_meta` gives a meta
    tensor with the same metadata. Dynamo traces into none of `packages`, and takes for constant what
    `constant_functions` answer.
    """
    if not DYNAMO.fits():
        return
    original = FakeTensorConverter.from_real_tensor

    @functools.wraps(original)
    def from_real_tensor(
        self: FakeTensorConverter, fake_mode: FakeTensorMode, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        if not isinstance(t, kind):
            return original(self, fake_mode, t, *args, **kwargs)
        if not traces_for_us():
            raise UnsupportedFakeTensorException(refusal)
        fake = self._get_memo(t)
        if fake is None:
            fake = original(self, fake_mode, to_meta(t), *args, **kwargs)
            fake.fake_device = t.device
            self.set_tensor_memo(t, fake)
        return fake

    DYNAMO.put(FakeTensorConverter, "from_real_tensor", from_real_tensor)
    has_index = fake_tensor._is_indexed_device_type
    # or fake tensors on "lazy" and on "lazy:0" would count as on different devices
    DYNAMO.put(fake_tensor, "_is_indexed_device_type", functools.cache(lambda kind: kind == "lazy" or has_index(kind)))
    for name in packages:
        trace_rules.add(name)
    for function in constant_functions:
        trace_rules.get_torch_obj_rule_map()[function] = torch_variables.TorchInGraphFunctionVariable
        torch_variables.constant_fold_functions[function] = None  # type: ignore[call-overload]
