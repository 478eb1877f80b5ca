"""What the recorder has to know about operators, beyond their schemas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lazy_backend.lowering.ir.optimizers import is_fused_optimizer
from lazy_backend.lowering.ir.schema import OpSchema, schema_of
from lazy_backend.ports.dispatcher import OpOverload, function_schema, has_kernel
from lazy_backend.ports.fake_tensors import give_fake_kernel, has_fake_kernel

aten = torch.ops.aten

# Tables of operators are keyed by id: OpOverload.__hash__ is a Python function, 74 ns against 36. A program may
# unregister an operator, and a new object could then get the same id, so operators in a table are kept alive here.
_kept: dict[int, OpOverload] = {}


def id_of(op: OpOverload) -> int:
    """`id(op)`. Keeps `op` alive, so that no other object can get that id."""
    _kept[id(op)] = op
    return id(op)


# Ops with a list of numbers, which may mix ints and floats. Other lists that start with an int hold only ints.
scalar_list_ops: set[int] = set()

# Ops whose result shape may depend on a float, as in `arange(0, 1, 0.1)`: their floats are structure, not data. So are
# the floats of custom operators, which may do anything with them.
float_shaped_ops: set[int] = set()
_FLOAT_SHAPED = frozenset(("aten::arange", "aten::range"))


class NotRecordable(Exception):
    """This call must run at once; the text says why."""


def learn(op: OpOverload) -> None:
    """Note what the tokens of `op`'s arguments depend on. Call before the first `record` of `op`."""
    arguments = function_schema(op).arguments
    if any(str(argument.type) == "List[number]" for argument in arguments):
        scalar_list_ops.add(id_of(op))
    scaled = any(argument.name == "scale_factors" for argument in arguments)
    if scaled or op.namespace not in ("aten", "prims") or function_schema(op).name in _FLOAT_SHAPED:
        float_shaped_ops.add(id_of(op))


# Ops that take index tensors on the CPU, as they do together with a CUDA tensor.
INDEX_OPS = frozenset(
    ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_")
)


# Ops whose lengths must be on the CPU, whatever the device of their other tensors.
HOST_OPERAND_OPS = frozenset(("aten::_pack_padded_sequence",))


@dataclass(frozen=True, slots=True)
class Traits:
    """What an operator is like, whatever its arguments. Looking takes 50 µs, so it is done once."""

    schema: OpSchema
    is_aten: bool  # of PyTorch's own kernels
    draws: bool  # may draw random numbers
    runs_at_once: str | None  # why its calls cannot be recorded
    is_checked: bool  # whether a call can be recorded depends on its arguments
    resizes: bool  # may change the geometry of an operand: of `out`, of what its name says, or of whatever it writes
    asks_fake: bool  # its fake kernel may know better than a run whether a call can be recorded


def traits_of(op: OpOverload) -> Traits:
    return _traits.get(id(op)) or _traits.setdefault(id_of(op), _inspect(op))


_traits: dict[int, Traits] = {}
# `addbmm_` broadcasts the operand that it writes
_RESIZING = ("aten::resize_", "aten::resize_as_", "aten::addbmm_")
_POWERS = ("aten::pow", "aten::pow_", "aten::_foreach_pow", "aten::_foreach_pow_")


def _inspect(op: OpOverload) -> Traits:
    schema = schema_of(op)
    tags = op.tags
    is_ours = op.namespace in ("aten", "prims")
    draws = torch.Tag.nondeterministic_seeded in tags
    give_fake_kernel(op.name())
    name = function_schema(op).name
    reason = None
    if torch.Tag.dynamic_output_shape in tags:
        reason = "its output depends on values"
    # the first is enough for most, and a tenth of the other's cost
    elif not (is_ours and _computes_metadata(op)) and not has_fake_kernel(op) and not is_fused_optimizer(op):
        reason = "it has no fake kernel"
    return Traits(
        schema=schema,
        is_aten=op.namespace == "aten",
        draws=draws,
        runs_at_once=reason,
        is_checked=bool(schema.mutates or draws or reason or name in INDEX_OPS or name == "aten::as_strided_scatter"),
        resizes=(
            name in _RESIZING
            or torch.Tag.inplace_view in tags
            or bool(schema.mutates and op.namespace != "aten")
            or any(arg.kwarg_only and arg.is_write for arg in function_schema(op).arguments)
        ),
        # For custom operators, only the fake kernel says that shapes depend on values; for powers of booleans, only
        # the fake kernel says what a compiler would make of them.
        asks_fake=not is_ours or name in _POWERS or op is aten._padded_dense_to_jagged_forward.default,
    )


# Operators without a rule of autocast's, whose kernels call others that have one: under autocast, a recorded call would
# not be cast.
CAST_INSIDE = frozenset(("aten::_trilinear", "aten::linalg_pinv"))


def _computes_metadata(op: OpOverload) -> bool:
    """Whether a kernel of PyTorch's computes the metadata of results: one for it, or one that calls other operators."""
    return any(has_kernel(op.name(), key) for key in ("Meta", "CompositeExplicitAutogradNonFunctional"))


# Ops of most training steps. Looking up an op takes 0.1 ms, torch's own part included, and a first step has tens.
_COMMON = """
_foreach_add_.List _foreach_add_.Scalar _foreach_add.List _foreach_addcdiv_.ScalarList _foreach_addcmul_.Scalar
_foreach_div_.ScalarList _foreach_lerp_.Scalar _foreach_mul_.Scalar _foreach_mul.Scalar _foreach_sqrt.default
_log_softmax.default _log_softmax_backward_data.default _softmax.default _softmax_backward_data.default
_to_copy.default _unsafe_view.default add.Tensor add_.Tensor addcdiv_.default addcmul_.default addmm.default
avg_pool2d.default avg_pool2d_backward.default bmm.default cat.default clone.default convolution.default
convolution_backward.default copy_.default detach.default div.Scalar div.Tensor embedding.default
embedding_dense_backward.default eq.Tensor exp.default expand.default gelu.default gelu_backward.default
lerp_.Scalar log.default masked_fill.Scalar max_pool2d_with_indices.default max_pool2d_with_indices_backward.default
mean.default mean.dim mm.default mse_loss.default mse_loss_backward.default mul.Scalar mul.Tensor mul_.Tensor
native_batch_norm.default _native_batch_norm_legit.default native_batch_norm_backward.default native_dropout.default
native_layer_norm.default native_layer_norm_backward.default neg.default nll_loss_backward.default
nll_loss_forward.default ones_like.default permute.default pow.Tensor_Scalar relu.default relu_.default rsqrt.default
select.int select_backward.default sigmoid.default sigmoid_backward.default silu.default silu_backward.default
slice.Tensor slice_backward.default split.Tensor sqrt.default squeeze.dim stack.default sub.Tensor sum.default
sum.dim_IntList t.default tanh.default tanh_backward.default threshold_backward.default transpose.int unbind.int
unsqueeze.default view.default zero_.default zeros_like.default
"""


def common_ops() -> list[OpOverload]:
    """The operators that most programs use, except those that this version of PyTorch lacks."""
    names = [name.split(".") for name in _COMMON.split()]
    found = [getattr(getattr(aten, name, None), overload, None) for name, overload in names]
    return [op for op in found if op is not None]
