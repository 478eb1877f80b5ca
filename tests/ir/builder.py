"""Programs written by hand: recorded calls without a device."""

from __future__ import annotations

from typing import Any

import torch

from lazy_backend.lowering.canonical import PostOrderData, run_post_order
from lazy_backend.lowering.ir import Constant, Graph, TensorMeta, check_graph, intern_meta, map_arg, meta_of
from lazy_backend.lowering.program import INPUTS, SLOTS, Call, Entered, Fresh, Same, Token, View
from lazy_backend.lowering.schema import schema_of

aten = torch.ops.aten
CPU = torch.device("cpu")


class Program:
    """Runs each call on real tensors to learn its results, and writes down the `Call` a recorder would."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.reals: dict[Token, torch.Tensor] = {}
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
