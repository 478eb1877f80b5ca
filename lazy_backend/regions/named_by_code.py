"""What the code of a captured module or optimizer can name, besides what it is made of.

In: modules, or an optimizer. Out: the random generators there, and a guard over the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazy_backend.replay.reachable import Reachable
from lazy_backend.replay.value_guard import ValueGuard

# Of a container that code names, more values are not searched for sources of random numbers.
_LARGEST_CONTAINER = 100


class NamedByCode:
    """What the code of modules, or of an optimizer, can name: sources of random numbers, and values.

    Does not refer to the modules. To find all takes long, as functions that the code calls are followed. So it is done
    once, and again if there are more globals.
    """

    __slots__ = ("generators", "states", "values", "_globals")

    def __init__(self, parts: Sequence[torch.nn.Module | torch.optim.Optimizer]) -> None:
        reach = Reachable(parts, largest=_LARGEST_CONTAINER)
        self.generators = reach.generators
        self.states = reach.random_states
        self.values = ValueGuard(reach)
        self._globals = [(known, len(known)) for known in reach.globals.values()]

    def hold(self) -> bool:
        """Whether these are all, if the values are what they were."""
        return all(len(known) == count for known, count in self._globals)
