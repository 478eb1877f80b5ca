"""The weights of a served graph.

In: tensors by name. Out: `Weights`: the checked tensors and all that depends only on them, ready for runs.
Source: torch/nativert/executor (`Weights`, `processWeights`, `atomicSwapWeights`).

Note [Weights are swapped whole]
The tensors of a `Weights` object never change once it is made, and a run reads the current one exactly once, when it
fills its frame. So a run sees either the old weights or the new ones, folded values included, and a swap never waits.
Executors for inputs of several shapes share one `CurrentWeights`: one store swaps the weights of all of them, so a
thread that has seen the new weights never sees the old ones again, whatever shape it asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from lazy_backend.lowering.interpreter.frame import FrameTemplate
from lazy_backend.lowering.ir.graph import TensorMeta, Value, empty_of, meta_of
from lazy_backend.lowering.serving.constant_folding import ConstantFolder
from lazy_backend.ports.dispatcher import DispatchKey, DispatchKeySet, dispatch_keys


class InputError(ValueError):
    """A tensor given to an executor does not fit its graph. Says which tensor, what was expected and what was given."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """See Note [Weights are swapped whole]."""

    tensors: Mapping[str, torch.Tensor]
    template: FrameTemplate  # with the weights and the folded values in their slots
    folded: Mapping[Value, torch.Tensor] = field(default_factory=dict)
    spare: Mapping[str, torch.Tensor] = field(default_factory=dict)  # used only for inputs of other shapes, if at all
    # of executors for inputs of other shapes: added when one of them first runs with these weights
    templates: dict[object, FrameTemplate] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CurrentWeights:
    """The weights that the next runs take."""

    weights: Weights


def process_weights(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, Value],
    written: Collection[Value],
    folder: ConstantFolder,
    template: FrameTemplate,
) -> Weights:
    """Check `tensors` against the graph's values `expected`, and fold constants. Raises `InputError`.

    A tensor itself is kept if its memory layout is the one that the graph was made for: writing to that tensor later
    changes what runs compute, but not the folded values.
    """
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unexpected:
        raise InputError(f"weights do not fit: missing {sorted(missing)}, unexpected {sorted(unexpected)}")
    held = {
        value: check_tensor(f"weight {name!r}", tensors[name], value.meta, folder.device, value in written)
        for name, value in expected.items()
    }
    folded = folder.fold(held)
    held |= folded
    return Weights(dict(tensors), template.holding({value.number: tensor for value, tensor in held.items()}), folded)


def check_tensor(what: str, given: object, meta: TensorMeta, device: torch.device, written: bool) -> torch.Tensor:
    """`given`, with the shape, dtype and memory layout of `meta`, on `device`; a copy if only its layout differs.

    A tensor that the graph writes must not be a copy. Raises `InputError`.
    """
    tensor = check_kind(what, given, meta, device).detach()
    if meta_of(tensor) is meta:
        return tensor
    if written:
        raise InputError(
            f"{what}: the graph writes it, so it must lie in memory as {meta}, got {meta_of(tensor)}\n"
            "  give a copy that does, as tensor.contiguous() is if that is contiguous"
        )
    with torch.no_grad():
        return empty_of(meta, device).copy_(tensor)


def check_kind(
    what: str, given: object, meta: TensorMeta, device: torch.device, any_sizes: bool = False
) -> torch.Tensor:
    """`given`, if it is a tensor with memory on `device`, of the shape and dtype of `meta`. Raises `InputError`.

    With `any_sizes`, of any shape with as many dimensions.
    """
    if not isinstance(given, torch.Tensor):
        raise InputError(f"{what}: expected a tensor {meta} on {device}, got {type(given).__name__}")
    if given.layout is not torch.strided or given.is_nested:  # some of which have no shape, and most no strides
        got = "a nested one" if given.is_nested else f"{given.layout}\n  give its to_dense()"
        raise InputError(f"{what}: expected a dense tensor {meta} on {device}, got {got}")
    fits = given.ndim == len(meta.shape) if any_sizes else given.shape == meta.shape
    if not fits or given.dtype != meta.dtype or given.device != device:
        sizes = f"with as many dimensions as {list(meta.shape)}" if any_sizes else f"{list(meta.shape)}"
        raise InputError(
            f"{what}: expected {meta.dtype} {sizes} on {device}, "
            f"got {given.dtype} {list(given.shape)} on {given.device}"
        )
    keys = dispatch_keys(given).raw_repr()
    if keys & _PYTHON:
        raise InputError(f"{what}: expected a plain tensor, got {type(given).__name__}, which may have no memory")
    if keys & (_ZEROS | _TRANSFORMED):
        kind = "zeros that have no memory" if keys & _ZEROS else "one within a transform such as torch.vmap"
        raise InputError(f"{what}: expected a plain tensor, got {kind}")
    return given


def lies_as(given: torch.Tensor, meta: TensorMeta, device: torch.device) -> bool:
    """Whether `check_tensor` takes a tensor as it is, and that needs no gradient."""
    return (
        given.__class__ is torch.Tensor
        and given.shape == meta.shape
        and given.stride() == meta.stride
        and given.dtype is meta.dtype
        and given.device == device
        and not given.requires_grad
        and given.storage_offset() == meta.storage_offset
        # `is_conj()` and `is_neg()` would give up the GIL, to which eight threads lose half of their requests
        and not dispatch_keys(given).raw_repr() & _SPECIAL
        and not (meta.conj or meta.neg)
    )


# The keys of tensors that have no memory of their own: those whose operators are Python's, such as fake ones, zeros
# that were never written, and what a transform such as `torch.vmap` passes on.
_PYTHON = DispatchKeySet(DispatchKey.Python).raw_repr()
_ZEROS = DispatchKeySet(DispatchKey.ZeroTensor).raw_repr()
_TRANSFORMED = (
    DispatchKeySet(DispatchKey.FuncTorchBatched)
    | DispatchKeySet(DispatchKey.FuncTorchGradWrapper)
    | DispatchKeySet(DispatchKey.Functionalize)
).raw_repr()
# And of those that need a closer look: these, those that are to be computed yet, and those that are not dense. Tensors
# of oneDNN have no strides to compare.
_SPECIAL = (
    (_PYTHON | _ZEROS | _TRANSFORMED)
    | (DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)).raw_repr()
    | (DispatchKeySet(DispatchKey.Sparse) | DispatchKeySet(DispatchKey.SparseCsr)).raw_repr()
    | DispatchKeySet(DispatchKey.NestedTensor).raw_repr()
)
