"""What the recorder has to know about operators, beyond their schemas."""

from __future__ import annotations

import torch

# Ops with a list of numbers, ints among floats. Other lists that start with an int hold ints only.
scalar_list_ops: set[int] = set()

# Ops whose result may change its shape with a float, as `arange(0, 1, 0.1)`: there floats are structure, not data. What
# a custom operator does with a float nobody knows.
float_shaped_ops: set[int] = set()
_FLOAT_SHAPED = frozenset(("aten::arange", "aten::range"))


class NotRecordable(Exception):
    """This call must run at once; the text says why."""


def learn(op: torch._ops.OpOverload) -> None:
    """Note what the tokens of `op`'s arguments depend on. Before its first `record`."""
    arguments = op._schema.arguments
    if any(str(argument.type) == "List[number]" for argument in arguments):
        scalar_list_ops.add(id(op))
    scaled = any(argument.name == "scale_factors" for argument in arguments)
    if scaled or op.namespace not in ("aten", "prims") or op._schema.name in _FLOAT_SHAPED:
        float_shaped_ops.add(id(op))


# Ops that take index tensors on the CPU, as they do beside a CUDA tensor.
INDEX_OPS = frozenset(
    ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_")
)


# Ops whose lengths must be on the CPU, beside a tensor on any device.
HOST_OPERAND_OPS = frozenset(("aten::_pack_padded_sequence",))
