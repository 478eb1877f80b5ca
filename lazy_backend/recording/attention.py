"""`scaled_dot_product_attention` as the backing device would run it.

PyTorch chooses an attention kernel by device type. It has none for `lazy`, so it would decompose attention into matrix
products: slower, larger, and not bit for bit what eager computes. Here the kernel is chosen for the backing device.
Source: aten/src/ATen/native/transformers/attention.cpp, `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import empty_of
from lazy_backend.ports.table import ATTENTION
from lazy_backend.recording.record import add_handler, record, records_alike
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean

aten = torch.ops.aten


def _stand_in(tensor: Any) -> Any:
    """An unfilled tensor like `tensor` on the backing device: the choice reads geometry, dtype and requires_grad."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    data = tensor._data
    return empty_of(data.meta, data.context.backing).requires_grad_(tensor.requires_grad)


def _choice(*args: Any, **kwargs: Any) -> SDPBackend:
    if not ATTENTION.fits():
        return SDPBackend.MATH
    # about 8 µs; torch.nn.attention can only restrict the choice
    return contexts.backing().attention([*map(_stand_in, args)], kwargs)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """`mask` in the form that is added to the scores, converted if it is boolean: fused kernels take no other form."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _of_nothing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention with an empty operand: zeros, as PyTorch returns them, with gradients for all operands."""
    zeros = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    return zeros + (query.sum() + key.sum() + value.sum()) * 0


def _is_usual(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float
) -> bool:
    """Whether eager's checks of dtypes and dimensions have nothing to refuse."""
    is_alike = query.dtype == key.dtype == value.dtype and min(query.dim(), key.dim(), value.dim()) >= 2
    return is_alike and dropout_p >= 0 and (mask is None or mask.dtype in (torch.bool, torch.float32, query.dtype))


# Attention of at most so many scores is tried on unfilled operands when it is seen for the first time.
_MOST_TRIED = 1 << 22


def _refuse_as_eager(
    operands: tuple[Any, ...], dropout_p: float, is_causal: bool, options: Mapping[str, Any], is_written_out: bool
) -> None:
    """Raise what eager raises for these operands.

    `is_written_out`: whether products are what they come to. For tensors of subclasses, PyTorch adds the mask out of
    place there, which broadcasts the scores; so they are computed of unfilled tensors, unless there are many.
    """
    query, key, value, mask = operands
    call: tuple[Any, ...]
    if not _is_usual(query, key, value, mask, dropout_p):
        call = aten.scaled_dot_product_attention.default, dropout_p, is_causal
    elif 0 in (query.numel(), key.numel(), value.numel()):
        call = aten.scaled_dot_product_attention.default, 0.0, is_causal
    elif is_written_out and query.numel() // query.shape[-1] * key.shape[-2] <= _MOST_TRIED:
        call = aten._scaled_dot_product_attention_math.default, 0.0, is_causal, None
    else:
        return
    run_clean(call[0], *map(_stand_in, operands), *call[1:], **options)


# The kernels that were chosen, by all that the choice depends on
_chosen: dict[tuple[Any, ...], SDPBackend] = {}
_MOST_CHOSEN = 1024


def _circumstances(operands: Sequence[torch.Tensor | None], *options: Any) -> tuple[Any, ...] | None:
    """What the choice of a kernel depends on. None where that is not known."""
    switches = contexts.backing().attention_switches()
    if switches is None:
        return None
    found: list[Any] = [torch.is_grad_enabled(), *switches, *options]
    for operand in operands:
        if operand.__class__ is LazyTensor:
            found += (operand._data.meta, operand.requires_grad)  # type: ignore[union-attr]
        elif operand is None:
            found.append(None)
        else:
            return None
    return tuple(found)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel of `aten::scaled_dot_product_attention` on the AutogradLazy key."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    place = None
    if dropout_p >= 0:
        place = _circumstances((query, key, value, attn_mask), dropout_p > 0, is_causal, enable_gqa)
    backend = None if place is None else _chosen.get(place)
    if backend is None:
        operands = (query, key, value, attn_mask)
        is_empty = 0 in (query.numel(), key.numel(), value.numel())
        backend = SDPBackend.MATH
        # fused kernels draw their dropout from the default generator, not from a seed that we give
        if dropout_p == 0 and not is_empty and _is_usual(*operands, dropout_p):
            backend = _choice(*operands, dropout_p, is_causal, **options)
        is_written_out = place is not None and backend == SDPBackend.MATH  # else it would be tried at each call
        _refuse_as_eager(operands, dropout_p, is_causal, options, is_written_out)
        if is_empty:
            return _of_nothing(query, key, value)
        if place is not None:
            if len(_chosen) >= _MOST_CHOSEN:
                _chosen.clear()
            _chosen[place] = backend
    if backend == SDPBackend.MATH or query.dim() == 4:
        return _run(backend, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    # since 2.14 fused kernels are chosen for three dimensions, too, and PyTorch calls them with a batch of one
    batch = (query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
    mask = None if attn_mask is None else attn_mask.view((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    return _run(backend, *batch, mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)


def _run(
    backend: SDPBackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention by the kernel that was chosen, or written out if it is one that we do not call."""
    mask = _additive(attn_mask, query.dtype)
    on_cpu = isinstance(query, LazyTensor) and query._data.context.backing.type == "cpu"
    if backend == SDPBackend.FLASH_ATTENTION and on_cpu:
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]
    if backend == SDPBackend.FLASH_ATTENTION and mask is None and query.shape[-1] % 8 == 0:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend == SDPBackend.EFFICIENT_ATTENTION and mask is None:
        efficient = aten._scaled_dot_product_efficient_attention.default
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return efficient(query, key, value, None, needs_grad, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    written_out = aten._scaled_dot_product_attention_math.default
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return written_out(query, key, value, mask, dropout_p, is_causal, None, **options)[0]  # type: ignore[no-any-return]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """CUDA's kernel for flash attention, called as `_scaled_dot_product_flash_attention` calls it, which also returns
    ints: no call with such a result can be recorded.
    """
    given = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    lengths = (None, None, query.shape[2], key.shape[2])
    output = aten._flash_attention_forward.default(*given, *lengths, dropout_p, is_causal, False, scale=scale)[0]
    return output.transpose(1, 2)  # type: ignore[no-any-return]


def _handler(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle the operator in inference mode, where there is no autograd key and it arrives undecomposed."""
    return scaled_dot_product_attention(*args, **kwargs)


@records_alike()
def _fused(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record a fused kernel. Without dropout it draws no random numbers; a literal 0 puts that into the key.

    The recorder in C++ takes calls without dropout only.
    """
    place = rng.DROPOUT_PLACES[op]
    if len(args) > place and args[place] == 0:
        args = (*args[:place], 0, *args[place + 1 :])
    return record(op, args, kwargs)


def install_attention(library: torch.library.Library) -> None:
    for op in rng.DROPOUT_PLACES:
        add_handler(op, _fused, runs_alike=True)
    add_handler(aten.scaled_dot_product_attention.default, _handler)
    library.impl("scaled_dot_product_attention", hide_internals(scaled_dot_product_attention), "AutogradLazy")
