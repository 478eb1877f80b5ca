"""What a case consists of: small programs that run on any target.

In: samples of PyTorch's databases, on the CPU. Out: `Program`s, which get the device to run on, move their inputs there
and return everything that may be looked at afterwards: results, gradients, and the inputs, which may have been written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from conformance_suite.targets import Target


@dataclass(frozen=True, slots=True)
class Program:
    """One call with one sample."""

    label: str
    run: Callable[[Target], Any]
    on_device: bool = True  # whether every result is where the operands are


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments on the CPU. `host` are the places of leaves that stay there."""

    label: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any] = lambda output: output
    broadcasts: bool = False
    host: Sequence[int] = ()

    @property
    def on_device(self) -> bool:
        """Whether anything in it names a device: factories without one give tensors on the CPU everywhere."""
        leaves = tree_leaves((list(self.args), self.kwargs))
        return any(isinstance(leaf, torch.Tensor | torch.device) or leaf == "cpu" for leaf in leaves)

    def on(self, target: Target) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = target.move((list(self.args), self.kwargs), self.host)
        return args, kwargs


def spread(things: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of `things`, evenly spaced, the first among them."""
    if len(things) <= limit:
        return list(things)
    return [things[place * len(things) // limit] for place in range(limit)]


def gradients_between(operands: Any, result: Any, target: Target) -> Any:
    """Gradients of all differentiable results for all operands that want them."""
    inputs = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    outputs = differentiable(result)
    if not inputs or not outputs:
        return ()
    return torch.autograd.grad(outputs, inputs, cotangents(outputs, target), allow_unused=True)


def differentiable(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def cotangents(outputs: Iterable[torch.Tensor], target: Target) -> list[torch.Tensor]:
    """Something to start a backward from, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(tuple(out.shape), dtype=out.dtype, generator=generator) for out in outputs]
    return [target.move(tensor) for tensor in made]
