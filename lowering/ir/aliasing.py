"""Outputs that own their memory.

In: the inputs and outputs of a plan's first run. Out: outputs none of which shares memory with an input or another.
A graph says that every output owns its storage. A compiler may fold two equal outputs into one buffer, and a kernel may
return its operand, although its schema promises new memory; a later in-place call would then write both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# internal, checked on 2.13: a storage that may be gone, and whether it is; storages have no public weak reference
from torch.multiprocessing.reductions import StorageWeakRef


class OutputAliases:
    """What a plan aliases. It is a property of the plan, so it is looked at once."""

    __slots__ = ("_copied",)

    def __init__(self) -> None:
        self._copied: tuple[int, ...] | None = None

    def is_known(self) -> bool:
        return self._copied is not None

    def separate(self, taken: Mapping[int, StorageWeakRef], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the outputs that share memory. `taken`: the inputs' `watched_storages`, needed at the first run only."""
        if self._copied is None:
            self._copied = _aliasing(taken, outputs)
        for place in self._copied:
            outputs[place] = outputs[place].clone()
        return outputs


def storages_of(tensors: Sequence[object]) -> frozenset[int]:
    """Addresses of the tensors' storages; empty ones have none."""
    return frozenset(watched_storages(tensors))


def watched_storages(tensors: Sequence[object]) -> dict[int, StorageWeakRef]:
    """The tensors' storages by address. Holds none of them: a run frees inputs that die in it."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {storage.data_ptr(): StorageWeakRef(storage) for storage in storages if storage.data_ptr()}


def _aliasing(taken: Mapping[int, StorageWeakRef], outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    seen: set[int] = set()
    places: list[int] = []
    for place, output in enumerate(outputs):
        address = output.untyped_storage().data_ptr()
        # an output may lie where an input was that the run has freed
        is_input = address in taken and not taken[address].expired()
        if address and (address in seen or is_input):
            places.append(place)
        seen.add(address)
    return tuple(places)
