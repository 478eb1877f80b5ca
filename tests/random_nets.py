"""Small modules for random training loops, which fit together: each maps (N, 8) floats to (N, 8) floats.

In: names of blocks. Out: a `Net`, whose forward reads arguments, attributes, buffers and a configuration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree


class Fold(nn.Module):
    """Calls a module on rows seen as `shape`, and sees its first result as rows again."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.inner(x.view(-1, *self.shape) if x.is_contiguous() else x.reshape(-1, *self.shape))
        return (result[0] if isinstance(result, tuple) else result).reshape(x.shape[0], 8)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + self.inner(x)


class Twice(nn.Module):
    """Uses its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh())


class Words(nn.Module):
    """Looks up rows; with `tied`, the output layer has the same weights."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table, self.tied = nn.Embedding(5, 8, **options), tied
        self.out = nn.Linear(8, 5, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.detach() > 0).sum(-1).clamp(max=4)
        found = self.table(words)
        return x + (self.table(self.out(found).argmax(-1)) if self.tied else found)


class Cell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = (torch.zeros_like(x), torch.zeros_like(x)) if isinstance(self.cell, nn.LSTMCell) else x * 0
        for _ in range(2):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state


class Statistics(nn.Module):
    """Writes its buffers."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.count.add_(1)
        return x - self.mean


class Pairs(nn.Module):
    """Keyword arguments and several results between modules, in dicts and tuples; a list of modules; 0-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(8))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {str(number): layer(x) for number, layer in enumerate(self.layers)}
        return found["0"] * self.scale + found["1"].sigmoid() * self.table["a"]


class Odd(nn.Module):
    """Views, writes in place, empty tensors, other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.double().chunk(2, -1)
        y = self.layer(left)
        y[:, 1:].mul_(2)
        y.relu_()
        return torch.cat([y, right, x[:, :0].double()], -1).to(x.dtype)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x.tanh())  # type: ignore[no-any-return]


class Shifted(nn.Module):
    """A parameter whose gradient may be the very gradient of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.one + self.two)


class Reading(nn.Module):
    """Calls a function for a number."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.read())


class ReadingSGD(torch.optim.Optimizer):
    """Calls a function for a number in each step."""

    def __init__(self, params: Any, read: Callable[[], float]) -> None:
        super().__init__(params, {"lr": 0.02})
        self.read = read

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * float(self.read()))


class DroppedLayers(nn.Module):
    """Leaves layers out, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.choose = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.choose.random() < 0.8 else x
        return x


def _attention(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **options)


class _SelfAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 8, bias=False)),
    "residual": lambda: Residual(nn.Sequential(nn.Linear(8, 8), nn.GELU())),
    "convolution": lambda: Fold(nn.Conv1d(1, 1, 3, padding=1), 1, 8),
    "convolutions": lambda: Fold(
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1)), 1, 2, 4
    ),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "cumulative batch norm": lambda: nn.BatchNorm1d(8, momentum=None),
    "layer norm": lambda: nn.LayerNorm(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "dropout": lambda: nn.Dropout(0.3),
    "feature dropout": lambda: Fold(nn.Dropout1d(0.3), 2, 4),
    "words": lambda: Words(padding_idx=0),
    "renormalized words": lambda: Words(max_norm=1.0),
    "tied words": lambda: Words(tied=True),
    "attention": lambda: Fold(_SelfAttention(4, 2, batch_first=True), 2, 4),
    "encoder": lambda: Fold(_attention(dropout=0.0), 2, 4),
    "encoder with dropout": lambda: Fold(_attention(dropout=0.2, norm_first=True), 2, 4),
    "lstm": lambda: Fold(nn.LSTM(4, 4, batch_first=True), 2, 4),
    "gru": lambda: Fold(nn.GRU(4, 2, num_layers=2, bidirectional=True, batch_first=True), 2, 4),
    "rnn": lambda: Fold(nn.RNN(4, 4, batch_first=True), 2, 4),
    "lstm cell": lambda: Cell(nn.LSTMCell(8, 8)),
    "gru cell": lambda: Cell(nn.GRUCell(8, 8)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8), use_trivialization=False),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "twice": Twice,
    "statistics": Statistics,
    "pairs": Pairs,
    "odd": Odd,
    "custom": Custom,
    "shifted": Shifted,
    "dropped layers": DroppedLayers,
    "tanh": nn.Tanh,
    "prelu": nn.PReLU,
    "softmax": lambda: nn.Softmax(-1),
}
# Blocks that draw random numbers on the device, which are others than the CPU's.
RANDOM_BLOCKS = {"dropout", "feature dropout", "encoder with dropout"}
# Blocks that only appear if a class of known defects is asked for.
KNOWN_BLOCKS = {"shifted": "aliased gradients", "dropped layers": "hidden randomness"}


class Options:
    """A configuration."""

    def __init__(self, gain: float) -> None:
        self.gain = gain


class Hidden:
    """An object without a `__dict__`."""

    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


class Net(nn.Module):
    """Blocks in a row. `head`: the form of the result."""

    seen: torch.Tensor
    again: torch.Tensor

    def __init__(self, blocks: Sequence[nn.Module], head: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("again", torch.ones(3))
        self.hidden = Hidden(1.0)
        self.head, self.gain, self.note = head, 1.0, "nothing"
        self.config: dict[str, Any] = {"gain": 1.0, "names": ["a"]}
        self.options, self.offsets = Options(1.0), [0.0]

    def forward(
        self,
        x: torch.Tensor,
        other: torch.Tensor | None = None,
        sequence: Any = (),
        scale: float = 1.0,
        mode: str = "plain",
        times: int = 1,
        flag: bool = False,
        store: list[torch.Tensor] | None = None,
    ) -> Any:
        for one in pytree.tree_leaves(sequence):
            x = x if one is None or isinstance(one, int) else x + one
        if other is not None:
            x = x * other
        for _ in range(times):
            for block in self.blocks:
                x = block(x)
        if mode == "raises":
            raise ValueError(mode)
        y = self.last(x.tanh() if mode == "tanh" else x) * self.seen
        y = y * scale * self.gain * self.config["gain"] * self.options.gain + sum(self.offsets)
        y = y * self.hidden.gain + self.again
        if store is not None:
            store.append(y)
        return self._result(x, -y if flag else y)

    def _result(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.head == "tuple":
            return y, 3, None
        if self.head == "dict":
            return {"y": y, "n": x.shape[0], "more": [y.detach().sum(), "text"]}
        if self.head == "none":
            return (None, y)
        if self.head == "two":
            return y * 2, F.softplus(x)
        return y


def build(names: Sequence[str], head: str = "plain") -> Net:
    torch.manual_seed(len(names))
    return Net([BLOCKS[name]() for name in names], head)
