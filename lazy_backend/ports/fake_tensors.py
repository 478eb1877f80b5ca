"""Fake tensors: what an operator returns, without its values.

In: `torch._subclasses`. Out: the same under public names, and fake kernels for operators that PyTorch has none for. A
name that is missing is None: its port says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lazy_backend.ports.cpython import leave_interrupted_blocks
from lazy_backend.ports.dispatcher import has_kernel
from lazy_backend.ports.port import optional


class _NeverRaised(Exception):
    """Stands for an exception that this PyTorch does not have."""


FakeTensorMode: Any = optional("torch._subclasses.fake_tensor.FakeTensorMode")
DependsOnValues: Any = (
    optional("torch._subclasses.fake_tensor.DataDependentOutputException", _NeverRaised),
    optional("torch._subclasses.fake_tensor.DynamicOutputShapeException", _NeverRaised),
)
HasNoFake: Any = optional("torch._subclasses.fake_tensor.UnsupportedOperatorException", _NeverRaised)
_log = logging.getLogger("torch._subclasses.fake_tensor")

# `unset_mode(FAKE_KEY)` takes the thread out of a fake mode, if it is in one. A function of C.
unset_mode: Callable[[Any], Any] = optional("torch._C._unset_dispatch_mode")
FAKE_KEY: Any = optional("torch._C._TorchDispatchModeKey.FAKE")


class InterruptibleFakeMode(FakeTensorMode or object):  # type: ignore[misc]
    """A fake mode whose calls leave no mode set where a signal handler raises in them.

    PyTorch takes the mode off for a call, and its code may put it on again within. If that is left on, the guard that
    puts the mode back after the call finds one there, and ends the process.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except BaseException as error:
            leave_interrupted_blocks(error)
            unset_mode(FAKE_KEY)
            raise


# Whether an operator has a fake kernel of any kind.
has_fake_kernel: Callable[[Any], bool] = optional("torch._library.utils.has_fake_kernel", lambda op: False)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Suppress the thirty lines that PyTorch logs about an error in a fake kernel before it raises that error."""
    _log.disabled = True
    try:
        yield
    finally:
        _log.disabled = False


def cache_results(mode: Any, may: bool) -> None:
    """Let a fake mode answer calls from PyTorch's cache of results, or not."""
    mode.cache_enabled = may


# ----- operators of PyTorch that have no fake kernel, though what they return depends on no value


def _contiguous_like(place: int) -> Callable[..., torch.Tensor]:
    """A fake kernel that returns a contiguous tensor of the shape and dtype of the operand at `place`."""
    return lambda *operands, **options: torch.empty_like(operands[place], memory_format=torch.contiguous_format)


def _geqrf(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT
    return columns, a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


def _fake_quantized(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _histogram(x: torch.Tensor, bins: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(bins), x.new_empty(bins + 1)


# As the kernels for the CPU allocate: `aten/src/ATen/native`.
_FAKES: dict[str, Callable[..., Any]] = {
    "aten::multi_margin_loss_backward": _contiguous_like(1),
    "aten::multilabel_margin_loss_backward": _contiguous_like(1),
    "aten::fractional_max_pool3d_backward": _contiguous_like(1),
    "aten::_ctc_loss_backward": _contiguous_like(1),
    "aten::_ctc_loss_backward.Tensor": _contiguous_like(1),
    "aten::_standard_gamma_grad": _contiguous_like(0),
    "aten::_dirichlet_grad": _contiguous_like(0),
    "aten::_sample_dirichlet": _contiguous_like(0),
    "aten::binomial": _contiguous_like(0),
    "aten::fake_quantize_per_tensor_affine_cachemask": _fake_quantized,
    "aten::fake_quantize_per_channel_affine_cachemask": _fake_quantized,
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _fake_quantized,
    "aten::geqrf": _geqrf,
    "aten::histogram.bin_ct": _histogram,
}
_library = torch.library.Library("aten", "FRAGMENT")  # kept: its kernels end with it


def give_fake_kernel(name: str) -> None:
    """Register a fake kernel for an operator if it is one of `_FAKES` and has none yet. May be done twice."""
    if name in _FAKES and not has_kernel(name, "Meta"):
        torch.library.register_fake(name, _FAKES[name], lib=_library)
