"""`torch.Generator(device="lazy")`: the user's own source of random numbers.

In: a device. Out: a generator that random operators on the device draw their seeds from when they are recorded, instead
of torch's default generator. So a lazy generator cuts nothing, and its numbers are the same in every plan
(`lowering.ir.rng`, Note [Random numbers are data]). `torch.Generator("lazy").manual_seed(7)` gives the same numbers as
`torch.manual_seed(7)`.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_backend.cache.weak_table import WeakTable
from lazy_backend.ports.tensor_types import address_of
from lazy_backend.tensors.contexts import contexts

# A dispatched call has a new Python object around the user's generator: this table leads back to the user's object.
_known: WeakTable[int, LazyGenerator] = WeakTable()


class LazyGenerator(torch.Generator):
    """A CPU generator that says it is on a lazy device: seeds are drawn on the host. Its state is that of the CPU one.

    Made by `torch.Generator(device="lazy")`.
    """

    def __new__(cls, device: torch.device) -> LazyGenerator:
        return super().__new__(cls)

    def __init__(self, device: torch.device) -> None:
        # raises for a device that does not exist
        self._device = contexts.get_device_context(device.index).device
        _known[address_of(self)] = self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def clone_state(self) -> LazyGenerator:
        """Another generator with the state that this one has now."""
        clone = LazyGenerator(self._device)
        clone.set_state(self.get_state())
        return clone

    def __reduce__(self) -> Any:
        _, _, state = super().__reduce__()  # type: ignore[misc]
        return torch.Generator, (self._device,), state


def lazy_generator(generator: Any) -> LazyGenerator | None:
    """The user's lazy generator behind `generator`, an argument of a call; None if it is not lazy."""
    if not isinstance(generator, torch.Generator):
        return None
    return _known.get(address_of(generator))
