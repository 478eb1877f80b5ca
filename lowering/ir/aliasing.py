"""Outputs that own their memory.

In: the inputs and outputs of a plan's first run. Out: outputs that share no memory with inputs or with each other.
A graph promises that every output owns its storage. But a compiler may fold two equal outputs into one buffer, and a
kernel may return its operand although its schema promises new memory; a later in-place call would then write both
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# a weak reference to a storage, with a test for expiry
from torch.multiprocessing.reductions import StorageWeakRef


class OutputAliases:
    """Which outputs of a plan share memory. Aliasing is a property of the plan, so it is determined once.

    `copied`: the places of the outputs that are cloned; None until it is known.
    """

    __slots__ = ("copied",)

    def __init__(self) -> None:
        self.copied: tuple[int, ...] | None = None

    def separate(self, taken: Mapping[int, StorageWeakRef], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Clone outputs that share memory. `taken`: the inputs' `watched_storages`, needed only at the first run."""
        if self.copied is None:
            self.copied = _aliasing(taken, outputs)
        for place in self.copied:
            outputs[place] = outputs[place].clone()
        return outputs


def storages_of(tensors: Sequence[object]) -> frozenset[int]:
    """Addresses of the tensors' storages; empty storages have none."""
    return frozenset(watched_storages(tensors))


def watched_storages(tensors: Sequence[object]) -> dict[int, StorageWeakRef]:
    """The tensors' storages by address, referenced weakly: a run frees inputs that die in it."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {storage.data_ptr(): StorageWeakRef(storage) for storage in storages if storage.data_ptr()}


def _aliasing(taken: Mapping[int, StorageWeakRef], outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    seen: set[int] = set()
    places: list[int] = []
    for place, output in enumerate(outputs):
        address = output.untyped_storage().data_ptr()
        # an output may reuse the address of an input that the run has freed
        is_input = address in taken and not taken[address].expired()
        if address and (address in seen or is_input):
            places.append(place)
        seen.add(address)
    return tuple(places)
