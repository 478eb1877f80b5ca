"""Programs written by hand: recorded calls without a device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.ir.canonical import PostOrderData, run_post_order
from lazy_backend.lowering.ir.graph import Constant, Graph, TensorMeta, check_graph, intern_meta, map_arg, meta_of
from lazy_backend.lowering.ir.program import INPUTS, SLOTS, Call, Entered, Fresh, Same, Token, View
from lazy_backend.lowering.ir.schema import schema_of

aten = torch.ops.aten
CPU = torch.device("cpu")


class Program:
    """Runs each call on real tensors to learn its results, and writes down the `Call` a recorder would."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.reals: dict[Token, torch.Tensor] = {}
        self.originals: dict[Token, torch.Tensor] = {}  # inputs as they were given
        self.constants: list[float] = []
        self._inputs = 0
        self._slots = 0
        self._groups: dict[int, tuple[int, TensorMeta]] = {}
        self._entering: dict[Token, Entered] = {}

    def input(self, tensor: torch.Tensor, base: torch.Tensor | None = None) -> Token:
        """A tensor from outside; `base` is the tensor whose storage it looks into, itself by default."""
        place = tensor.untyped_storage()._cdata
        group, base_meta = self._groups.setdefault(
            place, (len(self._groups), meta_of(tensor if base is None else base))
        )
        token = INPUTS[self._inputs]
        self._inputs += 1
        self.reals[token] = tensor
        self.originals[token] = tensor.clone()
        self._entering[token] = Entered(token, meta_of(tensor), group, base_meta)
        return token

    def call(self, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Record one call. Floats become constants, lists tuples. Returns one token, or a list of them."""
        entered = tuple(self._entering.pop(t) for t in _tokens((args, tuple(kwargs.values()))) if t in self._entering)
        real = op(*_real(args, self.reals), **{name: _real((arg,), self.reals)[0] for name, arg in kwargs.items()})
        numbered = _Numbered(self.constants)
        outputs = list(real) if isinstance(real, list | tuple) else [] if real is None else [real]
        schema = schema_of(op)
        operands = _tokens((args, tuple(kwargs.values())))
        results = [self._result(output, operands) for output in outputs]
        self.calls.append(
            Call(
                op=op,
                args=tuple(map_arg(numbered, _tuples(arg)) for arg in args),
                kwargs=tuple((name, map_arg(numbered, _tuples(arg))) for name, arg in kwargs.items()),
                results=tuple(result for result, _ in results),
                returns_list=schema.returns_list,
                mutates=tuple(
                    token
                    for operand in schema.mutates
                    for token in _tokens(args[operand.place] if operand.place < len(args) else kwargs[operand.name])
                ),
                entered=entered,
                num_constants=numbered.count,
                seeded=torch.Tag.nondeterministic_seeded in op.tags,
                num_slots=self._slots,
                site=f"step.py:{len(self.calls) + 1}",
            )
        )
        tokens = [token for _, token in results]
        return tokens[0] if len(tokens) == 1 and not schema.returns_list else tokens

    def _result(self, output: torch.Tensor, operands: list[Token]) -> tuple[Fresh | View | Same, Token]:
        for operand in operands:
            if output is self.reals[operand]:
                return Same(operand, (0,)), operand
        token = SLOTS[self._slots]
        self._slots += 1
        self.reals[token] = output
        for operand in operands:
            if output.untyped_storage()._cdata == self.reals[operand].untyped_storage()._cdata:
                return View(token, meta_of(output), operand, (0,)), token
        meta = meta_of(output)
        return Fresh(token, intern_meta(meta.shape, meta.stride, 0, meta.dtype)), token

    def canonical(self, *wanted: Token) -> PostOrderData:
        """The canonical graph with the storages of `wanted` as outputs."""
        fresh = [r.token for call in self.calls for r in call.results if isinstance(r, Fresh)]
        data = run_post_order(self.calls, sorted(wanted, key=fresh.index), CPU)
        check_graph(data.graph)
        return data

    def graph(self, *wanted: Token) -> Graph:
        return self.canonical(*wanted).graph


class _Numbered:
    """Replaces floats by constants in order."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.count = 0

    def __call__(self, arg: Any) -> Any:
        if not isinstance(arg, float):
            return arg
        self.values.append(arg)
        self.count += 1
        return Constant(self.count - 1)


def _tuples(arg: Any) -> Any:
    return tuple(map(_tuples, arg)) if isinstance(arg, list | tuple) else arg


def _tokens(arg: Any) -> list[Token]:
    if isinstance(arg, list | tuple):
        return [token for item in arg for token in _tokens(item)]
    return [arg] if isinstance(arg, Token) else []


def _real(args: Any, reals: dict[Token, torch.Tensor]) -> list[Any]:
    return [
        _real(arg, reals) if isinstance(arg, list | tuple) else reals[arg] if isinstance(arg, Token) else arg
        for arg in args
    ]


# ----- graphs of a known form


@dataclass
class Built:
    """A graph, the tensors and constants it runs on, and what eager made of them."""

    graph: Graph
    inputs: list[torch.Tensor]  # as they were before eager wrote them
    constants: list[float]
    outputs: list[torch.Tensor]
    inputs_after: list[torch.Tensor]

    def fresh(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.inputs]

    def seeds(self) -> list[int]:
        return list(range(7, 7 + self.graph.num_seeds))


def built(program: Program, *wanted: Token) -> Built:
    """`program` with the storages of `wanted` as outputs; its inputs must be whole tensors."""
    data = program.canonical(*wanted)
    taken = [INPUTS[parameter.index] for parameter in data.parameters]
    fresh = [result.token for call in program.calls for result in call.results if isinstance(result, Fresh)]
    return Built(
        graph=data.graph,
        inputs=[program.originals[token] for token in taken],
        constants=[program.constants[place] for place in data.constants],
        outputs=[program.reals[token] for token in sorted(wanted, key=fresh.index)],
        inputs_after=[program.reals[token] for token in taken],
    )


def chain(length: int, size: int = 4) -> Built:
    """One node after the other."""
    program = Program()
    token = program.input(torch.ones(size))
    for place in range(length):
        token = program.call(aten.add.Tensor, token, place)
    return built(program, token)


def wide(width: int) -> Built:
    """Many nodes that depend on the input alone, and a sum of all."""
    program = Program()
    x = program.input(torch.ones(4))
    return built(program, program.call(aten.cat.default, [program.call(aten.mul.Tensor, x, i) for i in range(width)]))


def branches(count: int, length: int, size: int) -> Built:
    """Independent chains of matrix products."""
    program = Program()
    x = program.input(torch.randn(size, size) / size**0.5)
    ends = []
    for _ in range(count):
        token = x
        for _ in range(length):
            token = program.call(aten.mm.default, token, x)
        ends.append(token)
    return built(program, *ends)


def random_graph(seed: int, length: int = 40) -> Built:
    """Results, views, writes through both, lists, floats and random numbers, over tensors of 4 by 4."""
    choose, program = random.Random(seed), Program()
    generator = torch.Generator().manual_seed(seed)
    inputs = [program.input(torch.randn(4, 4, generator=generator)) for _ in range(3)]
    pool = [*inputs, *program.call(aten._foreach_tanh.default, inputs)]
    for _ in range(length):
        x, y = choose.choice(pool), choose.choice(pool)
        pool += choose.choice(_RANDOM_CALLS)(program, x, y)
    fresh = [result.token for call in program.calls for result in call.results if isinstance(result, Fresh)]
    return built(program, *choose.sample(fresh, min(4, len(fresh))))


def _halves(program: Program, x: Token, y: Token) -> list[Token]:
    top, bottom = program.call(aten.split.Tensor, x, 2)
    program.call(aten.mul_.Tensor, top, 0.5)
    return [program.call(aten.cat.default, [bottom, top])]


def _lists(program: Program, x: Token, y: Token) -> list[Token]:
    return list(program.call(aten._foreach_mul.Scalar, [x, y], 1.25))


def _write(op: torch._ops.OpOverload, *args: Any) -> Callable[[Program, Token, Token], list[Token]]:
    def write(program: Program, x: Token, y: Token) -> list[Token]:
        program.call(op, x, *(args or (program.call(aten.tanh.default, y),)))
        return []

    return write


_RANDOM_CALLS: list[Callable[[Program, Token, Token], list[Token]]] = [
    lambda program, x, y: [program.call(aten.add.Tensor, x, y)],
    lambda program, x, y: [program.call(aten.sub.Tensor, x, y, alpha=0.5)],
    lambda program, x, y: [program.call(aten.mm.default, x, y)],
    lambda program, x, y: [program.call(aten.tanh.default, x)],
    lambda program, x, y: [program.call(aten.t.default, x)],
    lambda program, x, y: [program.call(aten.mul.Tensor, x, 0.75)],
    lambda program, x, y: [program.call(aten.rand_like.default, x)],
    lambda program, x, y: [program.call(aten._softmax.default, x, 1, False)],
    _halves,
    _lists,
    _write(aten.add_.Tensor),
    _write(aten.copy_.default),
    _write(aten.mul_.Tensor, 0.5),
    _write(aten.clamp_.default, -2, 2),
]


# ----- kernels that do what a test says

visitors: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}


@torch.library.custom_op("lazy_test::visit", mutates_args=())
def visit(x: torch.Tensor, who: int) -> torch.Tensor:
    """What `visitors[who]` does; a copy if there is none."""
    return visitors.get(who, torch.clone)(x)


@visit.register_fake
def _(x: torch.Tensor, who: int) -> torch.Tensor:
    return torch.empty_like(x)


VISIT = torch.ops.lazy_test.visit.default


@contextmanager
def visiting(functions: dict[int, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
    """Let the calls of `VISIT` do this within the block."""
    visitors.update(functions)
    try:
        yield
    finally:
        visitors.clear()


def visits(count: int, chained: bool = False) -> Built:
    """Calls of `VISIT` with numbers from 0, independent or one after the other, and then the sum of their results."""
    program = Program()
    x = program.input(torch.ones(2))
    made: list[Token] = []
    for who in range(count):
        made.append(program.call(VISIT, made[-1] if chained and made else x, who))
    return built(program, program.call(aten.sum.default, program.call(aten.cat.default, made)))
