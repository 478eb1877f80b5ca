"""Random functions with state, called in a loop on the CPU, on the lazy device, and there captured.

In: a seed. Out: a `RandomLoop` whose statements are those of the function, in phase "body", and those around its calls,
which change what the function rests on: its state is exchanged, replaced, aliased, written, held by others; containers
are reordered; modules, optimizers and arguments change, and values that the function reads without being given them
(`random_reads`). With `carried`, code that the function comes to by a detour reads these: a module within a module, a
hook, a method in a table.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from random_loops import RandomLoop, Statement
from random_reads import Read, random_read
from torch import nn


class Box:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Slotted:
    __slots__ = ("a", "b")


@dataclass
class Pair:
    one: Any
    two: Any


class Couple(NamedTuple):
    one: Any
    two: Any


class Net(nn.Module):
    """Modules with buffers that are replaced, and a child in which one is deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.gain = 1.0
        self.memory = {"h": torch.zeros(8)}
        self.inner = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.second(torch.tanh(self.first(x)))) * self.gain + self.seen


NAMES = {"Box": Box, "Slotted": Slotted, "Pair": Pair, "Couple": Couple, "Net": Net, "deque": deque}


@dataclass(frozen=True)
class RandomFunction(RandomLoop):
    """A function with its calls, as text."""

    options: str = ""

    def source(self) -> str:
        lines = [one.code for one in self.statements if one.phase == "setup"]
        lines.append("def step(x, value=0.5, flag=False, other=None):")
        shared = [one.code for one in self.statements if one.phase == "shared"]
        if shared:
            lines.append(f"    nonlocal {', '.join(shared)}")
        lines += self._phase("body")
        result = [one.code for one in self.statements if one.phase == "result"]
        lines.append(f"    return {result[0] if result else 'x * 1'}")
        lines += [
            "body = step",
            f"step = capture(step{self.options})",
            "out, kept = None, []",
            f"for n in range({self.num_steps}):",
        ]
        lines += self._phase("before")
        lines.append("    x = torch.randn(4, 8).to(device)")
        lines += self._phase("input")
        call = [one.code for one in self.statements if one.phase == "call"]
        lines += [f"    out = step({call[0] if call else 'x'})", "    remember(values, out)"]
        lines += self._phase("after")
        lines += [one.code for one in self.statements if one.phase == "finish"]
        lines += ["remember(values, torch.rand(2), random.random())"]
        return "\n".join(lines)

    def _phase(self, phase: str) -> list[str]:
        found = []
        for one in self.statements:
            if one.phase == phase:
                code = f"if {one.when}:\n{textwrap.indent(one.code, '    ')}" if one.when else one.code
                found.append(textwrap.indent(code, "    "))
        return found

    def script(self) -> str:
        return (
            super()
            .script()
            .replace("from random_loops import *", "from random_functions import *\nfrom random_loops import *")
        )

    def names(self) -> dict[str, Any]:
        return super().names() | NAMES


# ----- generating

# Where state may be: how it is made, and the expressions that stand for it.
_PLACES = (
    ("box = Box(a=ZEROS, b=ONES)", ("box.a", "box.b")),
    ("d = {'a': ZEROS, 'b': ONES}", ("d['a']", "d['b']")),
    ("items = [ZEROS, ONES]", ("items[0]", "items[1]")),
    ("outer = Box(left=Box(a=ZEROS), right=Box(a=ONES))", ("outer.left.a", "outer.right.a")),
    ("tree = [{'a': ZEROS}, {'a': ONES}]", ("tree[0]['a']", "tree[1]['a']")),
    ("slotted = Slotted()\nslotted.a, slotted.b = ZEROS, ONES", ("slotted.a", "slotted.b")),
    ("queue = deque([ZEROS, ONES])", ("queue[0]", "queue[1]")),
    ("h, k = ZEROS, ONES", ("h", "k")),
    ("record = Pair(ZEROS, ONES)", ("record.one", "record.two")),
)  # fmt: skip
# State that the body makes anew as a whole: how it is made, what reads it, what replaces it.
_WHOLES = (
    ("whole = Box(pair=(ZEROS, ONES))", ("whole.pair[0]", "whole.pair[1]"), "whole.pair = (A, B)"),
    ("whole = Box(pair=Couple(ZEROS, ONES))", ("whole.pair.one", "whole.pair[1]"), "whole.pair = Couple(A, B)"),
    ("whole = Box(pair=Pair(ZEROS, ONES))", ("whole.pair.one", "whole.pair.two"), "whole.pair = Pair(A, B)"),
    ("whole = {'pair': {'a': ZEROS, 'b': ONES}}", ("whole['pair']['a']", "whole['pair']['b']"),
     "whole['pair'] = {'a': A, 'b': B}"),
    ("whole = {'pair': [ZEROS, ONES]}", ("whole['pair'][0]", "whole['pair'][1]"), "whole['pair'] = [A, B]"),
)  # fmt: skip
_NET = "net = Net().to(device)\nnet.memory['h'] = net.memory['h'].to(device)"
_OPTIMIZERS = (
    "torch.optim.SGD(net.parameters(), lr=0.05)", "torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.AdamW(net.parameters(), lr=0.01)", "torch.optim.Adam(net.parameters(), lr=0.01, capturable=device != 'cpu')",  # noqa: E501
    "torch.optim.RMSprop(net.parameters(), lr=0.01)", "torch.optim.Adagrad(net.parameters(), lr=0.01, foreach=False)",
)  # fmt: skip
_OF_NET = ("net.seen", "net.memory['h']", "net.inner.running_mean", "net.inner.running_var")

_BODIES = (
    "S = S * 0.5 + x.mean(0)", "S = S + T * 0.25", "S = S * 0.9 + x[0]", "S.mul_(0.5).add_(x[0])", "S.copy_(T * 0.5)",
    "S, T = T + 1, S * 0.5", "S, T = T, S", "S = T * 1", "S = S.clone()", "S = torch.zeros_like(S) + x[1]", "S[1:3] = 0.5",  # noqa: E501
    "S = torch.where(S > 0, S, T)", "if flag: S = S + 1", "if flag: S.add_(1)", "S = S + value", "S = S * value + T",
    "S = S.view(2, 4).t().reshape(8)", "S = torch.cat([S[4:], T[:4]])", "S, T = torch.stack([S, T]).add(x[0]).unbind(0)",  # noqa: E501
    "S = S + other if other is not None else S * 1", "S = S.detach() * 0.5", "S[::2].mul_(0.5)", "S = T", "S = x[2]",
    "for _ in range(2): S = S * 0.5 + x[3]", "S = S.flip(0)", "S = (S + x).mean(0)", "torch._foreach_mul_([S, T], 0.5)",
)  # fmt: skip
_TRAINING = (
    "loss = (net(x) + S).square().mean()\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()",
    "optimizer.zero_grad(set_to_none=False)\nnet(x).square().mean().backward()\noptimizer.step()",
    "net(x).square().mean().backward()\nif flag:\n    optimizer.step()\n    optimizer.zero_grad()",
    "net(x).square().mean().backward()\nnn.utils.clip_grad_norm_(net.parameters(), 0.5)\noptimizer.step()\noptimizer.zero_grad()",  # noqa: E501
    "with torch.no_grad(): S = net(x).mean(0)", "S = net(x).detach().mean(0) + S",
    "g = torch.autograd.grad(net(x).sum(), list(net.parameters()))\nwith torch.no_grad(): torch._foreach_add_(list(net.parameters()), g, alpha=-0.01)",  # noqa: E501
    "net.first.weight.grad = net.first.weight.grad * 0.5 if net.first.weight.grad is not None else net.first(x).sum() * torch.ones_like(net.first.weight)",  # noqa: E501
)  # fmt: skip
_RESULTS = (
    "S * 1", "(S + 0, T * 2)", "{'a': S.clone(), 'b': 3}", "S", "[S, T]", "x * 2", "S.sum()", "None", "(S[:4] * 1, 'text')",  # noqa: E501
    "S[2:5]", "x", "(S * 1, S * 1)",
)  # fmt: skip
# Around calls. S, T: places of state.
_EVENTS = (
    "S, T = T, S", "S = torch.zeros(8, device=device)", "S = S.clone()", "S = T", "S = T.clone()", "S.zero_()", "S.add_(1)",  # noqa: E501
    "kept.append(S)", "kept.clear()", "view = S[:4]\nview.add_(1)", "view = S[2:]", "S = S.view(2, 4).t().reshape(8)",
    "S = S.flip(0)", "saved = S", "S = saved if 'saved' in locals() else S", "saved = S.clone()", "S.mul_(T)",
    "remember(values, S)", "S.data = S.data * 0.5", "S = torch.ones(16, device=device)[::2]", "S = (S + T) / 2", "S = x[0]",  # noqa: E501
    "torch.stack([S, T])", "kept.append((S, T))", "S, T = S.clone(), S.clone()", "swapped = S\nS = T\nT = swapped", "del kept[:]",  # noqa: E501
    "S = out if isinstance(out, torch.Tensor) and out.shape == (8,) else S", "if isinstance(out, torch.Tensor): out.add_(1)",  # noqa: E501
    "if isinstance(out, torch.Tensor): kept.append(out)", "S = S.double().float()", "mark(n)", "import gc; gc.collect()",  # noqa: E501
    "kept.append(weakref.ref(S))", "S.requires_grad_(False)", "S.set_(T.clone())", "torch.utils.swap_tensors(S, T)",
    "body.__defaults__ = (0.25 * n, n % 2 == 0, None)",
)  # fmt: skip
# By the beginning of the setup that they need.
_CONTAINER_EVENTS = {
    "box": ("box.a, box.b = box.b, box.a", "vars(box)['a'] = vars(box).pop('a')", "vars(box).update(a=box.b, b=box.a)", "box.c = box.a"),  # noqa: E501
    "d =": ("d['a'] = d.pop('a')", "d.update(a=d['b'], b=d['a'])", "d['c'] = d['a']", "d.pop('c', None)", "d = dict(d)"),  # noqa: E501
    "items": ("items.reverse()", "items.append(items[0])", "items[:] = items[::-1]", "items.insert(0, items.pop())",
              "del items[2:]"),
    "outer": ("outer.left, outer.right = outer.right, outer.left", "outer.left = Box(a=outer.left.a)", "outer.third = outer.left",  # noqa: E501
              "vars(outer.left).update(a=outer.right.a)", "outer.left = outer.right"),
    "tree": ("tree.reverse()", "tree[0] = dict(tree[0])", "tree[0], tree[1] = tree[1], tree[0]", "tree[1] = tree[0]"),
    "slotted": ("slotted.a, slotted.b = slotted.b, slotted.a",),
    "queue": ("queue.rotate()", "queue.appendleft(queue.pop())", "queue.reverse()"),
    "h, k": ("h, k = k, h",),
    "record": ("record.one, record.two = record.two, record.one",),
    "whole": ("saved_whole = copy.copy(whole)", "swapped = copy.deepcopy(whole)"),
    "net": (
        "net.eval()", "net.train()", "net.gain = 0.5", "net.gain = 1.0", "net.seen = torch.ones_like(net.seen)", "net.seen.add_(1)",  # noqa: E501
        "net.first, net.second = net.second, net.first", "net.inner.running_mean, net.inner.running_var = net.inner.running_var, net.inner.running_mean",  # noqa: E501
        "net.first.weight, net.second.weight = net.second.weight, net.first.weight", "net.zero_grad()",
        "net.first.weight.grad, net.second.weight.grad = net.second.weight.grad, net.first.weight.grad",
        "net.first.bias.grad = None", "net.first.bias.grad = torch.ones_like(net.first.bias)", "net.first.bias.requires_grad_(False)",  # noqa: E501
        "net.first.bias.requires_grad_(True)", "net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()})",  # noqa: E501
        "net.load_state_dict({k: v * 1 for k, v in net.state_dict().items()}, assign=True)", "net.memory = {'h': net.seen.clone()}",  # noqa: E501
        "net.memory['h'], net.seen = net.seen, net.memory['h']", "with torch.no_grad(): net.first.weight.mul_(0.9)",
        "net.first.weight.data = net.first.weight.data * 0.9", "net.first = nn.Linear(8, 8).to(device)", "net.memory['h'].add_(1)",  # noqa: E501
        "hook = net.first.register_forward_hook(lambda m, a, o: o * 0.5)", "if 'hook' in locals(): hook.remove()",
        "hook = net.first.weight.register_hook(lambda g: g * 2) if net.first.weight.requires_grad else None",
        "net.register_buffer('seen', net.seen * 2)", "net.double().float()", "kept.append(net.first.weight.grad)",
        "kept.append(net.seen)", "net.first.forward = net.second.forward", "net.first.__dict__.pop('forward', None)",
    ),
    "optimizer": (
        "for g in optimizer.param_groups: g['lr'] *= 0.5", "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",  # noqa: E501
        "optimizer.state.clear()", "optimizer.param_groups[0]['weight_decay'] = 0.1", "optimizer.state.pop(net.first.weight, None)",  # noqa: E501
        "a, b = net.first.weight, net.second.weight\nif a in optimizer.state and b in optimizer.state: optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]",  # noqa: E501
        "optimizer.param_groups[0]['params'].reverse()", "optimizer.step()", "optimizer.zero_grad()",
        "for s in optimizer.state.values():\n    for key, v in s.items():\n        if isinstance(v, torch.Tensor) and v.ndim: s[key] = v * 0.5",  # noqa: E501
    ),
}  # fmt: skip
_CALLS = (
    "x, flag=n % 3 == 1", "x, flag=n % 2 == 0", "x, 0.25 * n", "x, value=0.5 if n < 6 else 1.5", "x, other=x[0]", "x, other=S", "S.expand(4, 8)",  # noqa: E501
    "x.t().contiguous().t()", "torch.cat([x, x]) if n % 4 == 3 else x", "x, other=out if isinstance(out, torch.Tensor) and out.shape == (8,) else x[0]",  # noqa: E501
    "x.requires_grad_(n % 4 == 2)", "x, other=T.clone()",
)  # fmt: skip


# How code uses a number that it reads.
_USES = ("{}", "(1 + {})", "float({})", "(0.5 if {} > 0.5 else 2.0)", "torch.full((), float({}), device=x.device)")


# Code that multiplies X by VALUE, and how it is called; NAME is its own.
_CARRIERS = (
    ("class NAME_(nn.Module):\n    def forward(self, x): return x * VALUE\nNAME = nn.Sequential(nn.Sequential(NAME_()))", "NAME(X)"),  # noqa: E501
    ("class NAME_(nn.Module):\n    def scaled(self, x): return x * VALUE\nNAME = nn.ModuleDict({'a': NAME_()})", "NAME['a'].scaled(X)"),  # noqa: E501
    ("NAME = nn.Sequential(nn.Identity())\nNAME[0].register_forward_hook(lambda module, args, result: result * VALUE)", "NAME(X)"),  # noqa: E501
    ("NAME = nn.Identity()\nNAME.register_forward_pre_hook(lambda module, args: (args[0] * VALUE,))", "NAME(X)"),
    ("class NAME_:\n    def scaled(self, x): return x * VALUE\nNAME = {'scaled': NAME_().scaled}", "NAME['scaled'](X)"),
    ("class NAME_:\n    def __rmul__(self, x): return x * VALUE\nNAME = [NAME_()]", "NAME[0].__rmul__(X)"),
    ("class NAME_(enum.Enum):\n    one = 1\n    def scaled(self, x): return x * VALUE\nNAME = NAME_.one", "NAME.scaled(X)"),  # noqa: E501
    ("@dataclasses.dataclass\nclass NAME_:\n    number: int = 1\n    def scaled(self, x): return x * VALUE\nNAME = (NAME_(),)", "NAME[0].scaled(X)"),  # noqa: E501
    ("class NAME_(typing.NamedTuple):\n    number: int = 1\n    def scaled(self, x): return x * VALUE\nNAME = NAME_()", "NAME.scaled(X)"),  # noqa: E501
    ("def NAME(x):\n    leaf = torch.ones(8, device=device, requires_grad=True)\n    leaf.register_hook(lambda grad: grad * VALUE)\n"  # noqa: E501
     "    (leaf * x.detach()).sum().backward()\n    return leaf.grad", "NAME(X)"),
    ("class NAME(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x * VALUE\n    @staticmethod\n"  # noqa: E501
     "    def backward(ctx, grad): return grad * VALUE", "NAME.apply(X)"),
    ("def NAME_(function):\n    @functools.wraps(function)\n    def inner(*args): return function(*args)\n    return inner\n"  # noqa: E501
     "@NAME_\ndef NAME(x): return x * VALUE", "NAME(X)"),
    ("def NAME(x): yield x * VALUE", "next(NAME(X))"),
    ("NAME = functools.partial(lambda by, x: x * by * VALUE, 1.0)", "NAME(X)"),
    ("class NAME_:\n    @classmethod\n    def scaled(cls, x): return x * VALUE\nNAME = {NAME_: NAME_.scaled}", "next(iter(NAME)).scaled(X)"),  # noqa: E501
    ("class NAME_(type):\n    def __call__(cls, x): return x * VALUE\nclass NAME(metaclass=NAME_): pass", "NAME(X)"),
    ("def NAME(x, function=lambda x: x * VALUE): return function(x)", "NAME(X)"),
    ("class NAME_:\n    def __init__(self, x): self.scaled = x * VALUE\nNAME = NAME_", "NAME(X).scaled"),
)  # fmt: skip


class _Generator:
    def __init__(self, seed: int, carried: bool) -> None:
        self.choose = random.Random(seed)
        self.seed = seed
        # chosen by another generator, so that a seed makes the same function but for its carriers
        self.carriers = random.Random(f"carriers {seed}") if carried else None
        self.statements: list[Statement] = []
        self.places: list[str] = []
        self.containers: list[str] = []
        self.reads: list[Read] = []

    def generate(self) -> RandomFunction:
        choose = self.choose
        num_steps = choose.choice((9, 12, 14))
        self._setup()
        for _ in range(choose.choice((1, 2, 2, 3, 4))):
            self._add("body", choose.choice(_BODIES))
        if "net" in self.containers:
            for _ in range(choose.choice((1, 1, 2))):
                place = choose.randrange(len(self.statements) + 1)
                self._add("body", choose.choice(_TRAINING))
                self.statements.insert(place, self.statements.pop())
        for number, read in enumerate(self.reads):
            place = choose.choice(self.places)
            code = f"{place} * {(value := choose.choice(_USES).format(read.value))}"
            if self.carriers is not None:
                setup, call = self.carriers.choice(_CARRIERS)
                setup, call = (one.replace("NAME", f"carrier{number}") for one in (setup, call))
                self.statements.append(Statement("setup", setup.replace("VALUE", value)))
                code = _fill(call, {"X": place})
            self.statements.append(Statement("body", f"{place} = {code}"))
        self._add("result", choose.choice(_RESULTS))
        if choose.random() < 0.4:
            self._add("call", choose.choice(_CALLS))
        for _ in range(choose.choice((0, 1, 1, 2, 3, 4))):
            self._event(num_steps)
        self._add("finish", f"remember(values, {', '.join(self.places)})")
        if "net" in self.containers:
            self._add("finish", "finish(net, optimizer, values)")
        options = choose.choice((", verify_every=0", ", verify_every=0", ""))
        rounds = any("optim." in one.code and "SGD" not in one.code for one in self.statements)
        return RandomFunction(self.seed, tuple(self.statements), num_steps, rounds, options)

    def _add(self, phase: str, code: str, when: str = "") -> None:
        one, other = self.choose.choices(self.places, k=2) if self.places else ("", "")
        code = _fill(
            code,
            {"S": one, "T": other, "ZEROS": "torch.zeros(8, device=device)", "ONES": "torch.ones(8, device=device)"},
        )
        self.statements.append(Statement(phase, code, when))

    def _setup(self) -> None:
        choose = self.choose
        for setup, places in choose.sample(_PLACES, choose.choice((1, 1, 2))):
            self._add("setup", setup)
            self.places += places
            self.containers.append(setup)
        if choose.random() < 0.3:
            setup, places, replace = choose.choice(_WHOLES)
            self._add("setup", setup)
            self.containers.append(setup)
            one, two = choose.sample(
                (f"{places[0]} * 0.5 + x[0]", f"{places[1]} + {places[0]}", f"{places[0]} - 1", f"{places[1]} * 1"), 2
            )
            self.statements.append(Statement("body", _fill(replace, {"A": one, "B": two})))
            self.statements.append(Statement("finish", f"remember(values, {', '.join(places)})"))
        if choose.random() < 0.5:
            self._add("setup", _NET)
            self._add("setup", f"optimizer = {choose.choice(_OPTIMIZERS)}")
            self.containers += ["net", "optimizer"]
            self.places += choose.sample(_OF_NET, choose.choice((0, 1, 2)))
        if "h" in self.places:
            self._add("shared", "h, k")
        if choose.random() < 0.6:
            # first, as some begin with `global`
            self.reads = [random_read(choose) for _ in range(choose.choice((1, 1, 2)))]
            self.statements[:0] = [
                Statement("setup", setup) for setup in dict.fromkeys(one.setup for one in self.reads)
            ]

    def _event(self, num_steps: int) -> None:
        choose = self.choose
        code = choose.choice(_EVENTS)
        if choose.random() < 0.5:
            container = choose.choice(self.containers)
            code = choose.choice(next(codes for name, codes in _CONTAINER_EVENTS.items() if container.startswith(name)))
        if self.reads and choose.random() < 0.7:
            code = choose.choice(choose.choice(self.reads).changes).replace("NOW", "n")
        place = choose.randrange(num_steps)
        when = choose.choice(
            (f"n == {place}", f"n == {place}", f"n == {place}", f"n >= {place}", "n % 3 == 2", "n % 5 == 4")
        )
        self._add(choose.choice(("before", "input", "after")), code, when)


def _fill(code: str, names: dict[str, str]) -> str:
    """`code` with the capital letters that stand for places replaced."""
    return re.sub(r"\b[A-Z]+\b", lambda found: names.get(found[0], found[0]), code)


def random_function(seed: int, carried: bool = False) -> RandomFunction:
    """The function of `seed`, and its calls."""
    return _Generator(seed, carried).generate()
