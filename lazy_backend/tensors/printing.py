"""Print a lazy tensor as PyTorch prints tensors of its other devices: `tensor([1., 2.], device='lazy:0')`.

In: a lazy tensor and its values on the CPU. Out: its `repr`, with the options of `torch.set_printoptions`.
PyTorch would begin the `repr` of a subclass with its class name and indent by the length of that name.
"""

from __future__ import annotations

import torch

from lazy_backend.ports.table import PRINTING
from lazy_backend.ports.tensor_types import PRINT_OPTIONS, print_with

_PREFIX = "tensor("

# Dtypes that are evident from a printed number
_EVIDENT = (torch.int64, torch.bool)


def print_tensor(tensor: torch.Tensor, values: torch.Tensor, tangent: torch.Tensor | None) -> str:
    """The `repr` of `tensor`, whose values on the CPU are `values`, and whose forward gradient is `tangent`."""
    suffixes = [f"device='{tensor.device}'", *_history(tensor)]
    if tangent is not None:
        suffixes.append(f"tangent={tangent}")
    if not PRINTING.fits():
        # with the suffixes of the values, which are PyTorch's own, and without its line breaks
        return f"{repr(values).removesuffix(')')}, {', '.join(suffixes)})"
    suffixes[1:1] = _geometry(values)
    # there is no public way to print a tensor with suffixes other than its own
    return print_with(values, _PREFIX, suffixes)


def _geometry(values: torch.Tensor) -> list[str]:
    """Shape and dtype, where the printed values do not show them."""
    default = torch.get_default_dtype()
    is_empty = values.numel() == 0
    default_complex = torch.complex128 if default == torch.float64 else torch.complex64
    evident = (default,) if is_empty else (default, default_complex, *_EVIDENT)
    hides_shape = values.dim() != 1 if is_empty else not PRINT_OPTIONS.edgeitems
    return [f"size={tuple(values.shape)}"] * hides_shape + [f"dtype={values.dtype}"] * (values.dtype not in evident)


def _history(tensor: torch.Tensor) -> list[str]:
    """The suffix for what autograd knows about a tensor."""
    try:
        made_by = tensor.grad_fn
    except RuntimeError:  # a view made without autograd whose base was written
        return ["grad_fn=<Invalid>"]
    if made_by is None:
        return ["requires_grad=True"] if tensor.requires_grad else []
    kind = type(made_by).__name__
    return [f"grad_fn=<{made_by.name().rsplit('::', 1)[-1] if kind == 'CppFunction' else kind}>"]
