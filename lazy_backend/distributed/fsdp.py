"""Record what `torch.distributed.fsdp.fully_shard` calls, besides collectives.

In: the calls of its operator library `fsdp`. Out: calls of operators that say what they write, and what their results
look into, which those do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazy_backend.ports.dispatcher import OpOverload, base_name
from lazy_backend.recording.record import Handler, add_handlers_of, record
from lazy_backend.tensors.tensor import LazyTensor

aten = torch.ops.aten


def install() -> None:
    """Record the operators of the library from now on."""
    add_handlers_of("fsdp", lambda op: _FSDP.get(base_name(op), record))


def _all_gather_copy_in(
    all_gather_inputs: Sequence[LazyTensor],
    all_gather_output: LazyTensor,
    inp_split_sizes: Sequence[int],
    all_gather_input_numel: int,
    rank: int,
) -> tuple[LazyTensor, LazyTensor]:
    """Put this rank's shards one after another.

    Into memory of their own: PyTorch's kernel takes their place in what is gathered, but compilers refuse calls that
    read memory that they write.
    """
    return record(aten.cat.default, (list(all_gather_inputs),), {}), all_gather_output


def _split_with_sizes_copy(
    all_gather_output: LazyTensor,
    all_gather_input_split_sizes: Sequence[int],
    dim: int = 0,
    *,
    out: Sequence[LazyTensor],
) -> None:
    """Take the parameters out of what was gathered."""
    parts = record(aten.split_with_sizes.default, (all_gather_output, list(all_gather_input_split_sizes), dim), {})
    _fill(out, parts)


def _chunk_cat(tensors: Sequence[LazyTensor], dim: int, num_chunks: int, *, out: LazyTensor) -> None:
    """Lay the gradients out for the reduction."""
    made = record(aten._chunk_cat.default, (list(tensors), dim, num_chunks), {})
    record(aten.copy_.default, (out, made), {})


def _fill(targets: Sequence[LazyTensor], sources: Sequence[LazyTensor]) -> None:
    if targets:
        record(aten._foreach_copy_.default, (list(targets), list(sources)), {})


def _by_name(do: Callable[..., Any]) -> Handler:
    def handle(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return do(*args, **kwargs)

    return handle


# What `fully_shard` calls, by the names of operators.
_FSDP: dict[str, Handler] = {
    # PyTorch 2.15: for memory that is freed while another stream uses it
    "record_grad_output_stream": lambda op, args, kwargs: None,
    "all_gather_copy_in": _by_name(_all_gather_copy_in),
    "split_with_sizes_copy": _by_name(_split_with_sizes_copy),
    "chunk_cat": _by_name(_chunk_cat),
}
