"""Random training loops, run on the CPU, on the lazy device, and there with captured modules and optimizers.

In: a seed. Out: a `RandomLoop`: statements of a loop, each in a phase of a step and under a condition, that
`RandomLoop.run` executes on any device with any `capture`; `failure`, which says what a captured loop does otherwise
than the same loop as written; `minimize`, which drops statements while a loop still fails.

`KNOWN`: classes of statements with names, for defects that are known. They are left out unless they are asked for.
"""

from __future__ import annotations

import copy
import random
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from harness import as_bytes, geometry, reset_state, settle
from random_nets import BLOCKS, KNOWN_BLOCKS, RANDOM_BLOCKS, Doubled, Options, Reading, ReadingSGD, build
from random_reads import names as names_of_reads
from random_reads import random_read
from torch import nn
from torch.utils import _pytree as pytree

import lazy_backend
from lazy_backend import config

# Names for statements that are generated only if they are asked for.
KNOWN = {
    "aliased gradients": "two parameters have the same gradient tensor",
    "batched gradients": "gradients are vectorized, as by is_grads_batched",
    "grouped sums": "a parameter gets more than two gradients in one backward: the sum is grouped by region",
    "hidden attributes": "forward reads attributes of objects that the structure guard does not look into",
    "hidden randomness": "forward draws from a generator of its own, on the CPU",
    "accumulation hooks": "hooks are on the nodes that add to .grad",
    "cached parametrizations": "calls are within parametrize.cached()",
    "nested modules": "a captured module is part of another one: sums of gradients are rounded otherwise",
}

# How the result for a loop begins that fails as written: minimising took something it needs, for example.
NOT_COMPARED = "does not run as written"
# What captured functions refuse at once: their body reads the value of a tensor.
_READ = "inside the captured function"

PHASES = ("setup", "start", "input", "zero", "forward", "between", "backward", "after", "update", "end")


class Statement(NamedTuple):
    """Code in one phase of each step in which `when` holds. Empty: every step."""

    phase: str
    code: str
    when: str = ""


@dataclass(frozen=True)
class RandomLoop:
    """A loop as text. Needs `names()`; collects what is compared in `values`."""

    seed: int
    statements: tuple[Statement, ...]
    num_steps: int
    rounds: bool = False  # whether rounding, or random numbers of the device, make the CPU's values others

    def source(self) -> str:
        lines = [one.code for one in self.statements if one.phase == "setup"]
        lines.append(f"for step in range({self.num_steps}):")
        for phase in PHASES[1:]:
            for one in self.statements:
                if one.phase == phase:
                    code = f"if {one.when}:\n{textwrap.indent(one.code, '    ')}" if one.when else one.code
                    lines.append(textwrap.indent(code, "    "))
        lines += ["    mark(step)", "finish(model, optimizer, values)"]
        return "\n".join(lines)

    def script(self) -> str:
        """A program that prints what the captured loop does otherwise. To be run with tests/ on PYTHONPATH."""
        source = textwrap.indent(self.source(), "    ")
        return (
            f"from random_loops import *\n\ndef program(device, capture, mark, values):\n{source}\n\n"
            f"print(failure_of(program, {self.settings()!r}, {self.rounds}))"
        )

    def program(self) -> Callable[..., None]:
        names = self.names()
        exec(f"def program(device, capture, mark, values):\n{textwrap.indent(self.source(), '    ')}", names)
        made: Callable[..., None] = names["program"]
        return made

    def names(self) -> dict[str, Any]:
        """What statements may name."""
        return {**globals(), **_NAMES}

    def settings(self) -> dict[str, Any]:
        choose = random.Random(self.seed + 1)
        return {
            "first_sight": choose.choice(("run", "record")),
            "run_in_background": choose.choice(("always", "never")),
            "forgets": choose.random() < 0.2,  # what was recorded as written
        }


# ----- what statements use

# Modules and functions of others that only statements name.
_NAMES = {
    **names_of_reads(),
    "copy": copy,
    "Reading": Reading,
    "ReadingSGD": ReadingSGD,
    "build": build,
    "Doubled": Doubled,
    "Options": Options,
}


def loss_of(out: Any) -> torch.Tensor:
    """A number that every differentiable result takes part in."""
    found = [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    terms = [(one * (place + 1)).square().mean() for place, one in enumerate(found) if one.numel()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def pick(model: nn.Module, number: int) -> nn.Parameter:
    parameters = list(model.parameters())
    return parameters[number % len(parameters)]


def linear(model: nn.Module, number: int) -> tuple[nn.Module, str]:
    """The place of a linear layer without parametrizations: its owner, and its name there."""
    found = [
        (owner, name)
        for owner in model.modules()
        for name, child in owner._modules.items()
        if type(child) is nn.Linear and not isinstance(owner, nn.MultiheadAttention)
    ]
    return found[number % len(found)]


def exchange(model: nn.Module, number: int, **options: Any) -> None:
    """Put a new layer in the place of a linear one."""
    owner, name = linear(model, number)
    old: Any = owner._modules[name]
    new = nn.Linear(old.in_features, old.out_features, **options)
    setattr(owner, name, new.to(old.weight.device, old.weight.dtype))


def linear_weight(model: nn.Module, number: int) -> tuple[nn.Module, str]:
    owner, name = linear(model, number)
    return owner._modules[name], "weight"  # type: ignore[return-value]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def backward(loss: torch.Tensor, **options: Any) -> None:
    if loss.requires_grad:
        loss.backward(**options)


def remember(values: list[Any], *more: Any) -> None:
    for one in pytree.tree_leaves(more):
        values.append(one.detach().clone() if isinstance(one, torch.Tensor) else one)


def finish(model: nn.Module, optimizer: torch.optim.Optimizer, values: list[Any]) -> None:
    """All that a loop leaves: parameters, buffers, gradients, state; the next random numbers."""
    remember(values, dict(model.state_dict()), gradients(model))
    remember(values, list(optimizer.state.values()))
    remember(values, torch.rand(2), random.random(), [p.requires_grad for p in model.parameters()])


# ----- running


def failure_of(program: Callable[..., None], settings: dict[str, Any], rounds: bool = False) -> str | None:
    """What differs between the loop captured, as written on the lazy device and, unless it `rounds`, on the CPU."""
    expected = _run(program, "cpu", as_it_is)
    if isinstance(expected, Exception):
        return f"{NOT_COMPARED}: {expected}"
    _start_afresh(settings)
    try:
        written = _run(program, "lazy", as_it_is)
        if settings["forgets"]:
            _start_afresh(settings)
        return _compare(program, expected, written, rounds)
    finally:
        settle()


def _start_afresh(settings: dict[str, Any]) -> None:
    settle()
    reset_state()
    config.compile, config.check_graphs = "off", False
    config.first_sight, config.run_in_background = settings["first_sight"], settings["run_in_background"]


def _compare(
    program: Callable[..., None], expected: list[Any], written: list[Any] | Exception, rounds: bool
) -> str | None:
    if isinstance(written, Exception):
        return f"{NOT_COMPARED} on the device: {written}"
    found = _run(program, "lazy", lazy_backend.capture)
    if isinstance(found, lazy_backend.CaptureError) and _READ in str(found):
        return f"{NOT_COMPARED} when it is captured: {found}"
    if isinstance(found, Exception):
        return f"captured: {type(found).__name__}: {str(found)[:300]}"
    difference = _difference(found, written)
    if difference:
        return f"captured differs: {difference}"
    difference = None if rounds else _difference(written, expected, _is_close)
    return f"as written differs from the CPU: {difference}" if difference else None


def failure(loop: RandomLoop) -> str | None:
    try:
        program = loop.program()
    except SyntaxError as error:  # minimising took something it needs
        return f"{NOT_COMPARED}: {error}"
    return failure_of(program, loop.settings(), loop.rounds)


def as_it_is(module: Any, **options: Any) -> Any:
    return module


def _run(program: Callable[..., None], device: str, capture: Callable[..., Any]) -> list[Any] | Exception:
    """The values that a program collects, on the CPU; or what it raises."""
    torch.manual_seed(0)
    random.seed(0)
    values: list[Any] = []
    dtype = torch.get_default_dtype()
    # oneDNN computes an LSTM in one kernel, and rounds otherwise than the operators that a lazy device records
    uses_onednn, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program(device, capture, lambda step: device == "lazy" and lazy_backend.mark_step(), values)
            return [one.cpu() if isinstance(one, torch.Tensor) else one for one in values]
    except Exception as error:
        return error.with_traceback(None)
    finally:
        torch.backends.mkldnn.enabled = uses_onednn
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)


def _difference(
    found: Sequence[Any], expected: Sequence[Any], same: Callable[[Any, Any], bool] | None = None
) -> str | None:
    same = same or _same
    if len(found) != len(expected):
        return f"{len(found)} values, and {len(expected)} expected"
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not same(one, other):
            return f"value {place} of {len(found)} is {one}, and {other} is expected"
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_nan = one.is_floating_point() and bool(one.isnan().any())  # the bits of a nan say nothing
        if is_nan and one.dtype is other.dtype:
            return torch.equal(one.nan_to_num(), other.nan_to_num())
        return geometry(one)[:2] == geometry(other)[:2] and as_bytes(one) == as_bytes(other)
    return type(one) is type(other) and (one == other or repr(one) == repr(other) == "nan")


def _is_close(one: Any, other: Any) -> bool:
    """The same but for rounding, which optimizers that divide by small numbers make large."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), 0.05, 0.05, equal_nan=True)
    return isinstance(one, float) or _same(one, other)


def minimize(loop: RandomLoop, fails: Callable[[RandomLoop], bool]) -> RandomLoop:
    """`loop` with as few statements and steps as it still fails with."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(loop):
            if fails(smaller):
                loop, changed = smaller, True
                break
    return loop


def _smaller(loop: RandomLoop) -> Iterator[RandomLoop]:
    for steps in (loop.num_steps // 2, loop.num_steps - 2, loop.num_steps - 1):
        if 0 < steps < loop.num_steps:
            yield replace(loop, num_steps=steps)
    for place in reversed(range(len(loop.statements))):
        rest = loop.statements[:place] + loop.statements[place + 1 :]
        yield replace(loop, statements=rest)
        one = loop.statements[place]
        if one.code.startswith("model = capture(build(["):
            yield from _fewer_blocks(loop, place)


def _fewer_blocks(loop: RandomLoop, place: int) -> Iterator[RandomLoop]:
    one = loop.statements[place]
    start, end = one.code.index("[") + 1, one.code.index("]")
    blocks = one.code[start:end].split(", ")
    for number in range(len(blocks) if len(blocks) > 1 else 0):
        code = one.code[:start] + ", ".join(blocks[:number] + blocks[number + 1 :]) + one.code[end:]
        statements = list(loop.statements)
        statements[place] = one._replace(code=code)
        yield replace(loop, statements=tuple(statements))


# ----- generating

_OPTIMIZERS = (
    "torch.optim.SGD(PARAMS, lr=0.02)", "torch.optim.SGD(PARAMS, lr=0.02, momentum=0.9, nesterov=True, foreach=False)",
    "torch.optim.SGD(PARAMS, lr=0.02, weight_decay=0.1, maximize=True, foreach=True)", "torch.optim.Adam(PARAMS)",
    "torch.optim.AdamW(PARAMS, lr=0.01)", "torch.optim.AdamW(PARAMS, lr=0.01, amsgrad=True, foreach=True)",
    "torch.optim.Adam(PARAMS, lr=0.01, fused=True)", "torch.optim.RMSprop(PARAMS, lr=0.01, momentum=0.5, centered=True)",  # noqa: E501
    "torch.optim.Adagrad(PARAMS, lr=0.01, lr_decay=0.1)", "torch.optim.Adadelta(PARAMS)", "torch.optim.Adamax(PARAMS)",
    "torch.optim.NAdam(PARAMS)", "torch.optim.RAdam(PARAMS)", "torch.optim.ASGD(PARAMS)", "torch.optim.Rprop(PARAMS)",
    "torch.optim.Adafactor(PARAMS)",
)  # fmt: skip
_SCHEDULES = (
    "torch.optim.lr_scheduler.StepLR(optimizer, 3)", "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)",
    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))",
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100, cycle_momentum=False)",
)  # fmt: skip
_ARGUMENTS = (
    "", "", "", ", scale=0.5", ", scale=0.5 if step % 3 else 1.5", ", mode='tanh'", ", mode='tanh' if step % 2 else 'plain'",  # noqa: E501
    ", times=2", ", times=1 + step % 2", ", other=torch.ones(8, device=device, dtype=x.dtype)", ", flag=step % 4 == 3",
    ", other=x.detach()", ", other=x.detach()[:1]", ", sequence=[x, (x * 2, 3)]", ", sequence={'a': x, 'b': None}",
)  # fmt: skip
_CALLS = (
    "with torch.no_grad(): remember(values, model(x))\nout = model(x)",
    "with torch.inference_mode(): remember(values, loss_of(model(x)).item())\nout = model(x)",
    "out = torch.func.functional_call(model, {name: p * 1.5 for name, p in model.named_parameters()}, (x,))",
    "out = copy.deepcopy(model)(x)",
    "out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)",
    "x = x.clone().requires_grad_()\nout = model(x)", "x = (x * 2).requires_grad_()\nout = model(x)",
    "out = model(x.t().contiguous().t())", "out = model(x[:, :].expand(x.shape))", "out = model(torch.cat([x, x])[::2])",  # noqa: E501
    "model(x)\nout = model(x)", "with torch.autograd.graph.save_on_cpu(): out = model(x)", "out = model.forward(x)",
    "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(9)\n    out = model(x)",
    "model.eval()\nout = model(x)\nmodel.train()", "remember(values, model.eval()(x))\nout = model.train()(x)",
    "kept = model(x)\nout = model(x * 2)\nremember(values, kept)",
    "out = model(x * 1)\nremember(values, float(loss_of(out)))",
    "with torch.autograd.set_detect_anomaly(True, check_nan=False): out = model(x)",
    "out = model(*[x], **{})", "h = model.register_forward_hook(lambda m, a, o: None)\nout = model(x)\nh.remove()",
    "try: model(x, mode='raises')\nexcept ValueError: pass\nout = model(x)",
)  # fmt: skip
_BACKWARDS = (
    "backward(loss, retain_graph=True)\nbackward(loss)", "backward(loss * 2)", "backward(loss, inputs=[pick(model, 0)])",  # noqa: E501
    "for p, g in zip([p for p in model.parameters() if p.requires_grad], torch.autograd.grad(loss, [p for p in "
    "model.parameters() if p.requires_grad], allow_unused=True)): p.grad = g",
    "mark(step)\nbackward(loss)", "remember(values, loss.item())\nbackward(loss)", "pass", "torch.autograd.backward([loss, loss * 3])",  # noqa: E501
    "loss = loss + sum(p.square().sum() for p in model.parameters()) * 0.01\nbackward(loss)",
    "with torch.no_grad(): loss_of(out)\nbackward(loss)", "h = loss.register_hook(lambda g: g * 2)\nbackward(loss)",
    "remember(values, torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True, "
    "allow_unused=True))\nbackward(loss)",
)  # fmt: skip
_CHANGES = (
    "model.eval()", "model.train()", "pick(model, K).requires_grad_(False)", "model.requires_grad_(True)",
    "model.requires_grad_(step % 2 == 0)", "exchange(model, K)", "exchange(model, K, bias=False)",
    "model.blocks.append(nn.Tanh())", "model.blocks.append(nn.Linear(8, 8).to(pick(model, 0)))", "del model.blocks[-1]",
    "model.blocks.insert(0, nn.GELU())", "model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})",
    "model.load_state_dict({k: v * 1 for k, v in model.state_dict().items()}, assign=True)",
    "pick(model, K).data = pick(model, K).data * 0.9", "pick(model, K).data.mul_(0.9)",
    "with torch.no_grad(): pick(model, K).mul_(0.9)", "with torch.no_grad(): pick(model, K).copy_(pick(model, K) + 0.1)",  # noqa: E501
    "model.config['gain'] = 0.5", "model.config['gain'] = step * 0.25", "model.options.gain = 2.0", "model.options = Options(3.0)",  # noqa: E501
    "model.offsets[0] = 0.25", "model.offsets.append(0.125)", "model.gain = 0.5", "model.note = 'changed'", "model.note = step",  # noqa: E501
    "model.seen = torch.ones_like(model.seen)", "model.register_buffer('seen', model.seen * 2)", "model.seen.add_(1)",
    "model.seen.data = model.seen.data + 1", "model.head = 'tuple'", "model.head = 'dict'", "model.head = 'plain'",
    "model.forward = functools.partial(type(model).forward, model, scale=2.0)", "model.__dict__.pop('forward', None)",
    "hook = model.register_forward_hook(lambda m, a, o: None)", "if 'hook' in locals(): hook.remove()",
    "hook = model.blocks[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))",
    "hook = model.blocks[0].register_full_backward_hook(lambda m, gi, go: None)",
    "hook = pick(model, K).register_hook(lambda g: g * 2) if pick(model, K).requires_grad else None",
    "hook = pick(model, K).register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])",
    "hook = optimizer.register_step_pre_hook(lambda *a: None)", "torch.manual_seed(step)", "random.seed(step)",
    "model.double().float()",
    "copy.deepcopy(model)",
    "capture(model)", "model.zero_grad()", "model.zero_grad(set_to_none=False)", "remember(values, pick(model, K))",
    "print(end=str(float(pick(model, K).sum()))[:0])", "model.apply(lambda m: None)", "model.half().float()",
    "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())",
    "nn.utils.parametrize.register_parametrization(*linear_weight(model, K), Doubled())", "model.to(torch.float32)",
)  # fmt: skip
_UPDATES = (
    "nn.utils.clip_grad_norm_(model.parameters(), 0.1)", "nn.utils.clip_grad_value_(model.parameters(), 0.01)",
    "for g in gradients(model): g.mul_(0.5)", "torch._foreach_mul_(gradients(model), 2.0)", "pick(model, K).grad = None",  # noqa: E501
    "pick(model, K).grad = torch.ones_like(pick(model, K))", "remember(values, gradients(model))",
    "pick(model, K).grad = pick(model, K).grad.clone() if pick(model, K).grad is not None else None",
    "for p in model.parameters(): p.grad = None if p.grad is None else p.grad * 2", "mark(step)",
    "nn.utils.get_total_norm(gradients(model))",
)  # fmt: skip
_OF_OPTIMIZERS = (
    "for g in optimizer.param_groups: g['lr'] *= 0.5", "optimizer.param_groups[0]['lr'] = 0.02",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))", "optimizer.state.clear()",
    "optimizer.param_groups[0]['weight_decay'] = 0.1", "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(2, device=device))]})",  # noqa: E501
    "optimizer = capture(torch.optim.SGD(model.parameters(), lr=0.1))", "optimizer.step(lambda: loss.detach())",
    "for state in optimizer.state.values():\n    for v in state.values():\n        if isinstance(v, torch.Tensor): v.mul_(1)",  # noqa: E501
    "optimizer.state.pop(pick(model, K), None)", "optimizer.param_groups[0]['params'].reverse()", "optimizer.step()",
)  # fmt: skip


# Statements that are generated only if a class of known defects is asked for, by a part of their text.
_KNOWN_CODES = {"sum(p.square()": "grouped sums"}


# Statements that few loops have.
_SPECIAL_STATEMENTS = (
    ("backward", "y = next(y for y in pytree.tree_leaves(out) if isinstance(y, torch.Tensor))\ny.backward(y.detach())"),
    ("forward", "out = model(x, store=(kept := []))\nremember(values, len(kept))"),
    ("setup", "model.again.data = model.seen.data"),
    ("start", "model.again.data = model.again.data * 2"),
)

_KNOWN_STATEMENTS = {
    "batched gradients": (
        ("backward", "torch.autograd.grad(loss, pick(model, 0), torch.ones(2, device=device), is_grads_batched=True)"),
    ),
    "hidden attributes": (("start", "model.hidden.gain = step * 0.5"),),
    "accumulation hooks": (
        ("setup", "node = pick(model, K).view_as(pick(model, K)).grad_fn.next_functions[0][0]\n"
         "node.register_prehook(lambda grads: (grads[0] * 2,))"),
    ),
    "cached parametrizations": (("forward", "with nn.utils.parametrize.cached(): out = model(x)"),),
    "nested modules": (("setup", "capture(model.blocks[0])"),),
}  # fmt: skip


def _class_of(code: str) -> str | None:
    """The class of known defects that a statement belongs to."""
    return next((name for part, name in _KNOWN_CODES.items() if part in code), None)


class _Generator:
    def __init__(self, seed: int, known: Collection[str]) -> None:
        self.choose = random.Random(seed)
        self.seed, self.known = seed, known
        self.statements: list[Statement] = []
        self.num_steps = self.choose.choice((9, 12, 14))

    def generate(self) -> RandomLoop:
        blocks = self._setup()
        is_plain = "torch.optim.SGD" in self.statements[-1].code + self.statements[-2].code
        self._loop()
        for _ in range(self.choose.choice((0, 1, 1, 2, 3, 4))):
            self._event()
        self._special_statements()
        rounds = bool(RANDOM_BLOCKS & set(blocks)) or not is_plain
        return RandomLoop(self.seed, tuple(self.statements), self.num_steps, rounds)

    def _add(self, phase: str, code: str, when: str = "") -> None:
        name = _class_of(code)
        if name is not None and name not in self.known:
            code = "pass" if phase != "backward" else "backward(loss)"
        self.statements.append(Statement(phase, code.replace("K", str(self.choose.randrange(9))), when))

    def _setup(self) -> list[str]:
        choose = self.choose
        allowed = [name for name in BLOCKS if KNOWN_BLOCKS.get(name) in (None, *self.known)]
        blocks = choose.choices(allowed, k=choose.choice((1, 1, 2, 2, 3)))
        head = choose.choice(("plain", "plain", "tuple", "dict", "none", "two"))
        self._add("setup", f"model = capture(build({blocks!r}, head={head!r}).to(device))")
        parameters = choose.choice(
            ("model.parameters()",) * 4
            + ("[{'params': [p], 'lr': 0.002 * (n + 1)} for n, p in enumerate(model.parameters())]",)
        )
        optimizer = choose.choice(_OPTIMIZERS).replace("PARAMS", parameters)
        self._add("setup", f"optimizer = {choose.choice(('capture', 'capture', 'as_it_is'))}({optimizer})")
        self._reads()
        if choose.random() < 0.3:
            self._add("setup", f"schedule = {choose.choice(_SCHEDULES)}")
            self._add("end", "schedule.step()")
        return blocks

    def _reads(self) -> None:
        """Let the model, or the optimizer, read a value that it is not given, and changes of that."""
        if self.choose.random() < 0.5:
            return
        read = random_read(self.choose)
        self.statements.insert(0, Statement("setup", f"{read.setup}\ndef reads(): return {read.value}"))
        if self.choose.random() < 0.3:
            capture = self.choose.choice(("capture", "capture", "as_it_is"))
            self._add("setup", f"optimizer = {capture}(ReadingSGD(model.parameters(), reads))")
        else:
            self._add("setup", f"model.blocks.insert({self.choose.randrange(2)}, Reading(reads))")
        for _ in range(self.choose.choice((1, 1, 2, 3))):
            change = self.choose.choice(read.changes).replace("NOW", "step")
            self.statements.append(Statement(self.choice_of_phase(), change, self._when()))

    def _loop(self) -> None:
        choose = self.choose
        size = choose.choice(("4", "4", "4", "4 + step % 2", "3 if step % 5 == 4 else 4"))
        needs = choose.choice(("", "", "", ".requires_grad_()"))
        self._add("input", f"x = torch.randn({size}, 8).to(device){needs}")
        every = choose.choice((0, 0, 0, 2, 3))
        self._add(
            "zero",
            f"optimizer.zero_grad({choose.choice(('', '', 'set_to_none=False'))})",
            f"step % {every} == 0" if every else "",
        )
        self._add("forward", f"out = model(x{choose.choice(_ARGUMENTS)})")
        self._add("between", "loss = loss_of(out)")
        self._add("backward", "backward(loss)")
        if choose.random() < 0.3:
            self._add("after", choose.choice(_UPDATES))
        self._add("update", "optimizer.step()", f"step % {every} == {every - 1}" if every else "")
        self._add(
            "end",
            choose.choice(("remember(values, loss)", "values.append(loss.item())", "values.append(loss.detach())")),
        )

    def _special_statements(self) -> None:
        """Special statements, and those of the classes of known defects that were asked for."""
        chosen = [one for one in _SPECIAL_STATEMENTS if self.choose.random() < 0.1]
        for name in self.known:
            if name in _KNOWN_STATEMENTS and self.choose.random() < 0.5:
                chosen.append(self.choose.choice(_KNOWN_STATEMENTS[name]))
        for phase, code in chosen:
            if phase in ("forward", "backward"):
                self._instead(phase, code, self._when())
            else:
                self._add(phase, code, "" if phase == "setup" else self._when())

    def _when(self) -> str:
        place = self.choose.randrange(self.num_steps)
        return self.choose.choice(
            (f"step == {place}", f"step == {place}", f"step >= {place}", "step % 3 == 2", f"step in (4, {place})")
        )

    def _event(self) -> None:
        kind = self.choose.choice(("call", "backward", "change", "change", "change", "update", "optimizer", "skip"))
        when = self._when()
        if kind == "call":
            self._instead("forward", self.choose.choice(_CALLS), when)
        elif kind == "backward":
            self._instead("backward", self.choose.choice(_BACKWARDS), when)
        elif kind == "change":
            self._add(self.choice_of_phase(), self.choose.choice(_CHANGES), when)
        elif kind == "update":
            self._add("after", self.choose.choice(_UPDATES), when)
        elif kind == "optimizer":
            self._add(self.choose.choice(("after", "end", "start")), self.choose.choice(_OF_OPTIMIZERS), when)
        else:
            self._add(
                self.choose.choice(("between", "after", "start")),
                self.choose.choice(("mark(step)", "remember(values, x.sum().item())")),
                when,
            )

    def choice_of_phase(self) -> str:
        return self.choose.choice(("start", "start", "start", "end", "zero", "between", "after"))

    def _instead(self, phase: str, code: str, when: str) -> None:
        """Another statement at some steps."""
        for place, one in enumerate(self.statements):
            if one.phase == phase and not one.when:
                self.statements[place] = one._replace(when=f"not ({when})")
                self._add(phase, code, when)
                return


def random_loop(seed: int, known: Collection[str] = (), short: bool = False) -> RandomLoop:
    """The loop of `seed`. `known`: names in `KNOWN` whose statements may be in it. `short`: as tests run it."""
    loop = _Generator(seed, known).generate()
    return replace(loop, num_steps=min(loop.num_steps, 8)) if short else loop
