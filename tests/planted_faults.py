"""Faults planted at one place of what a backend makes of a random program of floats.

In: a seed. Out: what a trial made of the fault. Programs are of reductions, products, views, writes and dropout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

import lazy_backend
from lazy_backend import config, metrics

aten = torch.ops.aten

UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.tanh,
    torch.exp,
    torch.sigmoid,
    lambda x: F.layer_norm(x, (8,)),
    lambda x: torch.softmax(x, -1),
    lambda x: x.t().contiguous(),
    lambda x: x.cumsum(0),
    lambda x: F.dropout(x, 0.3, training=True),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: F.avg_pool1d(x[None], 3, 1, 1)[0],
)
BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.sub,
    torch.mul,
    torch.matmul,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.where(x > y, x, y * 0.5),
)


def float_program(choose: random.Random, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    values = list(sources)
    for _ in range(choose.randint(4, 10)):
        kind = choose.random()
        one, other = choose.choice(values[-4:]), choose.choice(values)
        if kind < 0.45:
            values.append(choose.choice(UNARY)(one))
        elif kind < 0.8:
            values.append(choose.choice(BINARY)(one, other))
        else:
            written = one.clone()
            written[choose.randrange(8)].copy_(other[choose.randrange(8)])
            values.append(written.mul_(0.5).add_(other))
    return values[-2:]


class Planted:
    """One fault at one place of a graph, each time the same."""

    KINDS = ("element", "stale", "dropped", "swapped", "edge", "seed")

    def __init__(self, choose: random.Random) -> None:
        self.kind, self.where, self.spot = choose.choice(self.KINDS), choose.random(), choose.random()
        self.place: fx.Node | None = None

    def backend(self, module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        if self.kind == "dropped":
            nodes = [node for node in nodes if str(node.target).split(".")[1].endswith("_")]
        elif self.kind == "swapped":
            nodes = [n for n in nodes if n.target in (aten.sub.Tensor, aten.mm.default, aten.div.Tensor)]
        elif self.kind == "seed":
            nodes = [node for node in nodes if "lazy_backend" in str(node.target)]
        self.place = nodes[int(self.where * len(nodes))] if nodes else None
        own = self

        class Faulty(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                if n is not own.place:
                    return super().run_node(n)
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
                right = super().run_node(n)
                return own.planted(n, right, before, args, kwargs)

        return lambda *args: Faulty(module).run(*args)

    def planted(self, node: Any, right: Any, before: Sequence[Any], args: Sequence[Any], kwargs: Any) -> Any:
        is_tensor = isinstance(right, torch.Tensor) and right.is_floating_point() and right.numel() > 1
        if self.kind == "seed":
            (place,) = [place for place, arg in enumerate(before) if getattr(arg, "dtype", None) is torch.int64][-1:]
            return node.target(*before[:place], before[place] + 1, *before[place + 1 :], **kwargs)
        if not is_tensor:
            self.place = None
            return right
        wrong = right.clone(memory_format=torch.contiguous_format)
        if self.kind == "element":
            wrong.view(-1)[int(self.spot * wrong.numel())] += float(wrong.abs().max()) * 0.1
        elif self.kind == "stale":
            wrong.view(-1).copy_(wrong.view(-1).roll(1))
        elif self.kind == "edge":
            wrong.select(-1, -1).mul_(0.67)
        elif self.kind == "swapped" and before[0].shape == getattr(before[1], "shape", None):
            wrong = node.target(before[1], before[0], *before[2:], **kwargs)
        elif self.kind == "dropped":
            wrong = args[0].copy_(before[0])  # later operators read what was to be written
        if wrong.shape != right.shape:
            self.place = None
            return right
        return wrong


def plant(seed: int) -> tuple[str, str]:
    """The kind of one fault and what came of it: "refused", "missed", or "none" if the fault made no difference."""
    choose = random.Random(seed)
    planted = Planted(choose)
    program = choose.getrandbits(32)
    torch.manual_seed(seed)
    sources = [torch.randn(8, 8) for _ in range(3)]

    def run(backend: Any) -> list[torch.Tensor]:
        lazy_backend.compat.runtime.reset()
        config.backend = backend
        torch.manual_seed(seed)
        made: list[torch.Tensor] = []
        for _ in range(1 if config.verify_compiled == "off" else 3):
            torch.manual_seed(seed)
            made = float_program(random.Random(program), [source.to("lazy") for source in sources])
            lazy_backend.mark_step()
        return [one.cpu() for one in made]

    with config.patch(verify_compiled="off"):
        right = run("eager")
        wrong = run(planted.backend)
    differs = any(
        float((one - other).abs().max()) > 1e-3 * float(one.abs().max())
        for one, other in zip(right, wrong, strict=True)
        if one.isfinite().all()
    )
    if not differs:
        return planted.kind, "none"
    used = run(planted.backend)
    is_refused = bool(metrics.counter_value("PlanRefused"))
    assert all(map(torch.equal, used, right)) or not is_refused
    return planted.kind, "refused" if is_refused else "missed"
