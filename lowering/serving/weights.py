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
    if not isinstance(given, torch.Tensor):
        raise InputError(f"{what}: expected a tensor {meta} on {device}, got {type(given).__name__}")
    if given.shape != meta.shape or given.dtype != meta.dtype or given.device != device:
        raise InputError(
            f"{what}: expected {meta.dtype} {list(meta.shape)} on {device}, "
            f"got {given.dtype} {list(given.shape)} on {given.device}"
        )
    check_plain(what, given)
    tensor = given.detach()
    if meta_of(tensor) is meta:
        return tensor
    if written:
        raise InputError(
            f"{what}: the graph writes it, so it must lie in memory as {meta}, got {meta_of(tensor)}\n"
            "  give a copy that does, as tensor.contiguous() is if that is contiguous"
        )
    with torch.no_grad():
        return empty_of(meta, device).copy_(tensor)


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


# The keys of tensors that need a closer look.
_SPECIAL = (
    DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)
).raw_repr()


def check_plain(what: str, given: torch.Tensor) -> None:
    """Raise `InputError` for a tensor that may have no memory."""
    # a tensor whose operators are Python's, such as a fake one, has no memory to compute on
    if dispatch_keys(given).has(DispatchKey.Python):
        raise InputError(f"{what}: expected a plain tensor, got {type(given).__name__}, which may have no memory")
