"""Outputs that own their memory.

In: the inputs and outputs of a plan's first run. Out: outputs none of which shares memory with an input or another.
A graph says that every output owns its storage. A compiler may fold two equal outputs into one buffer, and a kernel may
return its operand, although its schema promises new memory; a later in-place call would then write both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class OutputAliases:
    """What a plan aliases. It is a property of the plan, so it is looked at once."""

    __slots__ = ("_copied",)

    def __init__(self) -> None:
        self._copied: tuple[int, ...] | None = None

    def is_known(self) -> bool:
        return self._copied is not None

    def separate(self, taken: frozenset[int], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the outputs that share memory. `taken`: `storages_of` the inputs, needed at the first run only."""
        if self._copied is None:
            self._copied = _aliasing(taken, outputs)
        for place in self._copied:
            outputs[place] = outputs[place].clone()
        return outputs


def storages_of(tensors: Sequence[object]) -> frozenset[int]:
    """Addresses of the tensors' storages; empty ones have none."""
    addresses = {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    return frozenset(addresses - {0})


def _aliasing(taken: frozenset[int], outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    seen = set(taken)
    places: list[int] = []
    for place, output in enumerate(outputs):
        address = output.untyped_storage().data_ptr()
        if address and address in seen:
            places.append(place)
        seen.add(address)
    return tuple(places)
