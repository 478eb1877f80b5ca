"""Raise eager's errors at the line that causes them.

In: a call seen for the first time. Out: eager's own exception, with eager's text, or nothing.
Fake kernels check shapes but not everything else, and word their errors differently. So a call that fails there is
tried on ones (zeros would break divisions), and operators whose checks do not depend on values are tried on tiny
operands of the same dtypes and layout. Costs 10 µs per unseen call and nothing afterwards.
Random operators are tried on ones as well: a call that is refused when it runs has used up a seed.
Of permuted operands, and of operands of several dtypes, fake kernels also give other strides and dtypes than eager's
kernels: there a call's results are those of ones or zeros of the operands' own geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta, empty_of, extent, is_contiguous
from lazy_backend.ports.cpython import pass_on_interruption
from lazy_backend.ports.dispatcher import OpOverload, function_schema
from lazy_backend.recording.arguments import flat, with_leaves
from lazy_backend.recording.operators import INDEX_OPS, NotRecordable
from lazy_backend.tensors.state import TensorData
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean

# A failed call is tried on ones of full size if its operands have at most this many elements in all.
_MAX_NUMEL = 1 << 22

# Besides the pointwise operators, these check dtypes or emptiness in their kernels, never values.
_CHECKING = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr",
        "rsub", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "linear",
        "std", "var", "std_mean", "var_mean",
    )
)  # fmt: skip


def checks_more_than_its_fake(op: OpOverload) -> bool:
    name = function_schema(op).name
    return torch.Tag.pointwise in op.tags or name in _CHECKING or name.startswith("aten::_foreach_")


def try_tiny(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader) -> Any:
    """Call `op` on operands with sizes above 2 reduced to 2. Returns what eager returns, raises what eager raises."""
    try:
        return _call_on(_tiny, op, args, kwargs, read)
    except Exception as error:
        pass_on_interruption(error)
        try_ones(op, args, kwargs, read)  # for an error that names the real sizes
        raise


def try_ones(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader) -> bool:
    """Call `op` on ones of the operands' geometry; False and no call if they are large. Raises what eager raises."""
    small = _are_small(_metas(args, kwargs, read))
    if small:
        _call_on(_ones, op, args, kwargs, read)
    return small


# Operators that check sizes, dtypes and dimensions in their kernels. An index of zeros passes any check of values.
_CHECKED_ON_ZEROS = frozenset(
    f"aten::{name}"
    for name in (
        "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "index_select", "index_add",
        "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce", "index_reduce_",
        "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "take",
        "put", "put_", "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "embedding",
        "_softmax", "_log_softmax", "sort", "topk", "kthvalue", "mode", "median", "nanmedian", "cumsum", "cumprod",
        "cummax", "cummin", "logcumsumexp", "native_group_norm", "native_layer_norm", "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d", "adaptive_max_pool2d", "linalg_vector_norm", "norm", "histc", "linalg_cross", "renorm",
        "multi_margin_loss", "multilabel_margin_loss_forward",
    )
)  # fmt: skip


# These are tried on operands of full size up to so many elements: each costs as much as a few passes over them.
_MAX_NUMEL_LAID_OUT = 1 << 26

# Operators whose fake kernels give other strides or dtypes than eager's kernels, and which no value can break.
_LAID_OUT_BY_KERNELS = frozenset(
    f"aten::{name}"
    for name in (
        "_batch_norm_with_update", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
        "batch_norm_backward", "native_batch_norm_backward", "native_group_norm_backward",
        "native_layer_norm_backward", "_softmax_backward_data",
        "_log_softmax_backward_data", "_prelu_kernel_backward", "glu_backward", "hardswish_backward",
        "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_forward", "huber_loss", "huber_loss_backward",
        "mse_loss_backward", "smooth_l1_loss_backward", "soft_margin_loss", "soft_margin_loss_backward",
        "nll_loss2d_forward", "channel_shuffle", "native_channel_shuffle", "complex", "polar", "floor_divide",
        "max_unpool2d", "reflection_pad2d_backward", "reflection_pad3d", "reflection_pad3d_backward",
        "replication_pad2d_backward", "replication_pad3d", "replication_pad3d_backward", "native_group_norm",
        "native_layer_norm", "addr", "index", "_unsafe_index",
    )
)  # fmt: skip


def try_drawing(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, read: Reader) -> Any:
    """What a random `op` gives for ones, which none refuses; None if these or its results, `made`, are large.

    Raises what eager raises.
    """
    results = sum(result.numel() for result in flat([made]) if isinstance(result, torch.Tensor))
    if results > _MAX_NUMEL or not _are_small(_metas(args, kwargs, read)):
        return None
    return _call_on(_ones, op, args, kwargs, read)


def try_zeros(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader) -> Any:
    """Call `op` on zeros if it is in `_CHECKED_ON_ZEROS` and the operands are not large. Raises what eager raises."""
    if function_schema(op).name not in _CHECKED_ON_ZEROS:
        return None
    metas = _metas(args, kwargs, read)
    if function_schema(op).name in INDEX_OPS and any(meta.dtype in (torch.bool, torch.uint8) for meta in metas[1:]):
        return None  # how much a mask selects depends on its values
    return _call_on(_zeros, op, args, kwargs, read) if _are_small(metas) else None


# Operators that take any dtypes together.
_CONVERTING = frozenset(("aten::copy_", "aten::_foreach_copy_"))


def try_layout(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader) -> Any:
    """What eager gives for zeros or ones of the operands' geometry, where a fake kernel may give something else.

    None elsewhere and for huge operands. Raises what eager raises for both; `NotRecordable` if that may be because of
    their values, or if huge ones have several dtypes.
    """
    name = function_schema(op).name
    if op.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in op.tags or name in _CONVERTING:
        return None
    is_listed = name in _LAID_OUT_BY_KERNELS
    is_known = is_listed or torch.Tag.pointwise in op.tags
    metas = _metas(args, kwargs, read)
    dtypes = {dtype for dtype in (*(meta.dtype for meta in metas), *args) if _is_float(dtype)}
    if len(dtypes) < 2 and (not is_known or all(is_contiguous(meta) for meta in metas)):
        return None
    if not _are_small(metas, _MAX_NUMEL_LAID_OUT):
        if len(dtypes) > 1 and is_listed:
            raise NotRecordable("the dtypes of its results are not known")
        return None
    try:
        return _call_on(_zeros, op, args, kwargs, read)
    except Exception as error:
        pass_on_interruption(error)
    try:
        return _call_on(_ones, op, args, kwargs, read)  # zeros break divisions, ones may be out of range as indices
    except Exception as error:
        pass_on_interruption(error)
        if is_known:
            raise
        raise NotRecordable("its operands have several dtypes") from None


def _metas(args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader) -> list[TensorMeta]:
    return [item[0] for leaf in flat((*args, *kwargs.values())) if isinstance(item := read(leaf), tuple)]


def _is_float(item: Any) -> bool:
    return isinstance(item, torch.dtype) and item.is_floating_point


def _are_small(metas: Sequence[TensorMeta], limit: int = _MAX_NUMEL) -> bool:
    return sum(meta.numel for meta in metas) <= limit


def try_shared(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    operands: Sequence[TensorData],
    read: Reader,
) -> None:
    """Call `op` on operands that share memory as the lazy ones do. Raises eager's error about overlaps, and no other.

    Raises `NotRecordable` if that would take too much memory: the call then runs at once.
    """
    lengths: dict[int, int] = {}
    for data in operands:
        length = max(extent(data.meta), extent(data.storage.meta)) * data.meta.dtype.itemsize
        lengths[id(data.storage)] = max(length, lengths.get(id(data.storage), 0))
    if sum(lengths.values()) > 4 * _MAX_NUMEL:
        raise NotRecordable("it may read what it writes")
    device = operands[0].context.backing
    memory = {place: torch.ones(length + 16, dtype=torch.uint8, device=device) for place, length in lengths.items()}

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, LazyTensor):
            return _operand(read(leaf), _ones)
        meta = leaf._data.meta
        whole = memory[id(leaf._data.storage)]
        flat = whole[: len(whole) // 16 * 16].view(meta.dtype)
        return flat.as_strided(meta.shape, meta.stride, meta.storage_offset)

    try:
        _call(op, args, kwargs, convert)
    except RuntimeError as error:
        pass_on_interruption(error)
        if "single memory location" in str(error):
            raise
    except Exception as error:
        pass_on_interruption(error)
        return  # another error: about values, or one that is found elsewhere


def _ones(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    return _fill_with_ones(empty_of(meta, device))


def _zeros(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    return empty_of(meta, device).zero_()


def _fill_with_ones(made: torch.Tensor) -> torch.Tensor:
    try:
        return made.fill_(1)
    except NotImplementedError:  # bcomplex32, new in 2.14, can be copied to but not filled
        return made.copy_(torch.ones(()))


# Returns (meta, backing device) for a tensor, and any other argument as it is.
Reader = Callable[[Any], Any]


def _operand(item: Any, make: Callable[[TensorMeta, torch.device], torch.Tensor]) -> Any:
    return make(*item) if isinstance(item, tuple) else item


def _tiny(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    shape = [min(size, 2) for size in meta.shape]
    apart = [1 if step == 0 else n for n, step in zip(shape, meta.stride, strict=True)]
    tiny = _fill_with_ones(torch.empty(apart, dtype=meta.dtype))
    # dimensions of stride 0 keep that stride: writing to an expanded tensor is an error
    return tiny.to(device).expand(shape)


def _call_on(
    make: Callable[[TensorMeta, torch.device], torch.Tensor],
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Reader,
) -> Any:
    """Call `op` on operands that `make` makes."""
    return _call(op, args, kwargs, lambda leaf: _operand(read(leaf), make))


def _call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], convert: Callable[[Any], Any]) -> Any:
    def call() -> Any:
        own_args = [with_leaves(convert, arg) for arg in args]
        own_kwargs = {name: with_leaves(convert, arg) for name, arg in kwargs.items()}
        if rng.draws_random_numbers(op, args) and rng.can_seed(op):
            return rng.run_seeded(op, [0], 0, convert(torch.device("lazy")), own_args, own_kwargs)
        return op(*own_args, **own_kwargs)

    return run_clean(call)
