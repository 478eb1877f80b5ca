"""How a recorded program differs from an earlier one.

In: two lists of calls, or two live sets of one program, or two sets of settings. Out: `Difference`, the first that is
found, with the user's line on both sides and advice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lazy_backend.diagnostics.run_log import source_line
from lazy_backend.lowering.ir.graph import Constant, Graph, Node, TensorMeta, constants_of
from lazy_backend.lowering.ir.program import Call, Entered, Fresh, Token, View
from lazy_backend.ports.dispatcher import function_schema

# Number of calls compared to tell an added or removed operator from a program that continues in another way.
_WINDOW = 3

_RESHAPED = (
    "a shape that recurs is generalised: after a few shapes one compiled graph serves all; padding or buckets keep the "
    "number of shapes small"
)
_ADVICE = {
    "op": "Python took another way: torch.where, or a branch taken in every step, keeps it one program",
    "op more": "do it in every step, or put it into lazy_backend.add_step_closure if it only looks at values",
    "op less": "do it in every step, or in none",
    "mode": "modules switch between model.train() and model.eval(): one program for each is expected",
    "optimizer": "optimizers make their state in their first step; the steps after it are the program that recurs",
    "shape": _RESHAPED,
    "batch": "a smaller last batch: DataLoader(drop_last=True) or padding leaves one program; otherwise one compiled "
    "graph for both shapes is made",
    "dtype": "see that data and model keep one dtype, as in batch.float() or model.to(dtype)",
    "layout": "the same values lie differently in memory: .contiguous() before the step makes them alike",
    "scalar": "an int or flag is part of the program: pass values that change as floats or as tensors on the device",
    "aliasing": "tensors that share memory in one step and not in the other are different programs: pass the same "
    "views, or copies, in every step",
    "operand": "the step combines other tensors than before: keep to the same ones, or expect one program for each",
    "list": "a list that grows or shrinks makes another program in each step: keep a running sum, or a tensor of fixed "
    "size that is written at an index",
    "longer": "call lazy_backend.mark_step() once per step, at its end",
    "shorter": "the step ended earlier: a read or a mark_step in its midst cuts it",
    "outputs more": "something still holds it, such as a list of losses or a logger: drop it, or hold it in every step",
    "outputs less": "it was still held before: hold it in every step, or in none",
    "configuration": "set it once, before the first step",
    "float": "it becomes an input of the compiled graph, so further values compile nothing",
    "forgotten": "paths are forgotten when settings that they rest on change, or at lazy_backend.config.trie_limit",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two programs.

    `kind`: "op", "shape", "dtype", "layout", "scalar", "aliasing", "operand", "length", "outputs", "configuration",
    "forgotten", "unexplained". `place`: the number of the call, from 0. Sites are `file:line`, or "" if unknown.
    """

    kind: str
    before: str
    now: str
    advice: str
    place: int | None = None
    before_site: str = ""
    now_site: str = ""

    def __str__(self) -> str:
        at = "" if self.place is None else f", at call {self.place}"
        lines = [f"{self.kind}{at}", f"  before: {self.before}{_shown(self.before_site)}"]
        return "\n".join([*lines, f"  now:    {self.now}{_shown(self.now_site)}"])


def _shown(site: str) -> str:
    return f"  # {shown_site(site)}" if site else ""


def shown_site(site: str) -> str:
    """`train.py:31: loss.backward()`: a site with its text; the path is relative if below the working directory."""
    line = source_line(site)
    below = os.getcwd() + os.sep
    return f"{site.removeprefix(below)}{': ' if line else ''}{line}"


# ----- two programs


def similarity(before: Sequence[Call], now: Sequence[Call]) -> int:
    """A score for the common start of two programs: equal calls count 2, later calls of the same operator count 1."""
    common = 0
    exact = True
    for one, other in zip(before, now, strict=False):
        if one is other:
            common += 2
        elif one.op is other.op:
            exact = exact and _parts(one) == _parts(other)
            common += 2 if exact else 1
        else:
            break
    return common


def difference(before: Sequence[Call], now: Sequence[Call]) -> Difference:
    """The first difference between two programs."""
    for place, (one, other) in enumerate(zip(before, now, strict=False)):
        if one is not other and _parts(one) != _parts(other):
            if one.op is not other.op:
                return _of_operators(before, now, place)
            return _of_calls(one, other, place)
    if len(before) == len(now):
        return Difference("forgotten", "the same program", "recorded anew", _ADVICE["forgotten"])
    return _of_lengths(before, now)


def _parts(call: Call) -> tuple[Any, ...]:
    """All parts of a call's key, and the metadata of its results."""
    entered = tuple((e.token, e.meta, e.group, e.base) for e in call.entered)
    results = tuple(getattr(result, "meta", None) for result in call.results)
    return call.op, call.args, call.kwargs, entered, results


def _name(call: Call) -> str:
    return str(call.op).removesuffix(".default").removesuffix(".Tensor")


def _of_operators(before: Sequence[Call], now: Sequence[Call], place: int) -> Difference:
    one, other = before[place], now[place]
    kind = "op"
    if _continues(now[place + 1 :], before[place:]):
        kind = "op more"
    elif _continues(before[place + 1 :], now[place:]):
        kind = "op less"
    texts = {"op more": f"{_name(other)}, an operator more", "op less": f"{_name(other)}, without {_name(one)}"}
    advice = _ADVICE[kind]
    if any(word in _name(call) for call in (one, other) for word in ("dropout", "bernoulli", "batch_norm")):
        advice = _ADVICE["mode"]
    elif ".step(" in source_line(other.site) and ".step(" in source_line(one.site):
        advice = _ADVICE["optimizer"]
    return Difference("op", _name(one), texts.get(kind, _name(other)), advice, place, one.site, other.site)


def _continues(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether both continue with the same operators."""
    here, there = [c.op for c in calls[:_WINDOW]], [c.op for c in others[:_WINDOW]]
    return bool(here) and here == there


def _of_lengths(before: Sequence[Call], now: Sequence[Call]) -> Difference:
    longer = len(now) > len(before)
    place = min(len(before), len(now))
    last = f"ended after {place} calls, with {_name((before or now)[place - 1])}" if place else "had no calls"
    extra = (now if longer else before)[place]
    goes_on = f"goes on with {_name(extra)}"
    ended_site = (before if longer else now)[place - 1].site if place else ""
    if longer:
        # the rest repeats the program: two steps without a sync between them
        kind = "longer" if _continues(now[place:], before) else "op more"
        return Difference("length", last, goes_on, _ADVICE[kind], place, ended_site, extra.site)
    return Difference("length", goes_on, last, _ADVICE["shorter"], place, extra.site, ended_site)


def _of_calls(one: Call, other: Call, place: int) -> Difference:
    """The first difference between two calls of the same operator."""
    names = [argument.name for argument in function_schema(one.op).arguments]
    left = [*zip(names, one.args, strict=False), *one.kwargs]
    right = [*zip(names, other.args, strict=False), *other.kwargs]
    entered = {e.token: e for e in one.entered}, {e.token: e for e in other.entered}
    for (name, a), (_, b) in zip(left, right, strict=False):
        for x, y in _leaves(a, b):
            found = _of_arguments(name, x, y, entered)
            if found is not None:
                kind, before, now, advice = found
                if kind == "scalar" and _shapes(one) != _shapes(other):
                    kind, advice = "shape", _ADVICE["shape"]
                text = f"{_name(one)}: "
                return Difference(kind, text + before, text + now, advice, place, one.site, other.site)
    if len(left) != len(right):
        then, now = (f"{_name(one)} with {len(given)} arguments" for given in (left, right))
        return Difference("scalar", then, now, _ADVICE["scalar"], place, one.site, other.site)
    then, now = (f"{_name(call)} gives {_printed_results(call)}" for call in (one, other))
    kind = "shape" if _shapes(one) != _shapes(other) else "dtype"
    return Difference(kind, then, now, _ADVICE[kind], place, one.site, other.site)


def _leaves(a: Any, b: Any) -> list[tuple[Any, Any]]:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        if any(isinstance(item, Token) for item in (*a, *b)):
            return [pair for x, y in zip(a, b, strict=True) for pair in _leaves(x, y)]
        return [(a, b)]  # a shape is compared as a whole
    return [(a, b)]


Found = tuple[str, str, str, str]


def _of_arguments(
    name: str, a: Any, b: Any, entered: tuple[dict[Token, Entered], dict[Token, Entered]]
) -> Found | None:
    if isinstance(a, Token) and isinstance(b, Token):
        first, second = entered[0].get(a), entered[1].get(b)
        if a is b:
            return None if first is None or second is None else _of_inputs(name, first, second)
        if first is not None and second is not None:  # the lower index entered with an earlier argument
            first, second = (None, second) if a.index < b.index else (first, None)
        kind = "aliasing" if "input" in (a.kind, b.kind) and (first or second) else "operand"
        return kind, f"{name} is {_origin(a, first)}", f"{name} is {_origin(b, second)}", _ADVICE[kind]
    if a == b and type(a) is type(b):
        return None
    if _is_list_of_tensors(a) and _is_list_of_tensors(b):  # of different lengths: others were compared by element
        return "operand", f"{name} is a list of {len(a)} tensors", f"{name} is a list of {len(b)}", _ADVICE["list"]
    return "scalar", f"{name} = {_printed(a)}", f"{name} = {_printed(b)}", _ADVICE["scalar"]


def _is_list_of_tensors(arg: Any) -> bool:
    return isinstance(arg, tuple) and any(isinstance(item, Token) for item in arg)


def _origin(token: Token, entered: Entered | None) -> str:
    if entered is not None:
        return f"a tensor of its own, {entered.meta}"
    if token.kind == "input":
        return f"input {token.index}, used before in this step"
    return f"result {token.index} of this step"


def _of_inputs(name: str, a: Entered, b: Entered) -> Found | None:
    one, other = a.meta, b.meta
    if one is other and a.base is b.base and a.group == b.group:
        return None
    texts = f"{name} is an input {one}", f"{name} is an input {other}"
    if one.dtype != other.dtype:
        return "dtype", *texts, _ADVICE["dtype"]
    if one.shape != other.shape:
        return "shape", *texts, _ADVICE["batch" if _is_last_batch(one, other) else "shape"]
    if one is not other:
        return "layout", *texts, _ADVICE["layout"]
    if a.group != b.group:
        shared = f"{name} is an input that shares memory with one used before"
        alone = f"{name} is an input with memory of its own"
        return "aliasing", *((alone, shared) if a.group > b.group else (shared, alone)), _ADVICE["aliasing"]
    return "aliasing", f"{name} is a view of {a.base}", f"{name} is a view of {b.base}", _ADVICE["aliasing"]


def _is_last_batch(one: TensorMeta, other: TensorMeta) -> bool:
    has_batches = len(one.shape) == len(other.shape) > 0
    return has_batches and one.shape[1:] == other.shape[1:] and other.shape[0] < one.shape[0]


def _printed(arg: Any) -> str:
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(_printed, arg)) + "]"
    if isinstance(arg, Token):
        return _origin(arg, None)
    return "a float" if isinstance(arg, Constant) else repr(arg)


def _shapes(call: Call) -> list[Any]:
    return [result.meta.shape for result in call.results if isinstance(result, Fresh | View)]


def _printed_results(call: Call) -> str:
    return ", ".join(str(result.meta) for result in call.results if isinstance(result, Fresh | View)) or "nothing"


# ----- one program with different outputs, settings or floats


def difference_of_outputs(calls: Sequence[Call], before: Sequence[int], now: Sequence[int]) -> Difference:
    """The first difference between two live sets of one program: places among its results that own their memory."""
    makers = [(call, result) for call in calls for result in call.results if isinstance(result, Fresh)]
    more = [place for place in now if place not in set(before)]
    place = (more or [place for place in before if place not in set(now)])[0]
    call, result = makers[place]
    value = f"the result {result.meta} of {_name(call)}"
    held, not_held = f"{value} is held at the end of the step", f"{value} is not held"
    texts = (not_held, held) if more else (held, not_held)
    advice = _ADVICE["outputs more" if more else "outputs less"]
    return Difference("outputs", *texts, advice, calls.index(call), call.site, call.site)


def difference_of_settings(before: Sequence[tuple[str, Any]], now: Sequence[tuple[str, Any]]) -> Difference:
    """The first difference between two environments of one program: (name, value) pairs, in the same order.

    Raises `ValueError` if the environments are equal.
    """
    for (name, a), (_, b) in zip(before, now, strict=True):
        if a != b:
            return Difference("configuration", f"{name} = {a!r}", f"{name} = {b!r}", _ADVICE["configuration"])
    raise ValueError("the settings are the same")


def difference_of_floats(graph: Graph, place: int, before: float, now: float) -> Difference:
    """The difference when a float that was compiled in has changed from `before` to `now`."""
    node = next(node for node in graph.nodes if place in constants_of(node))
    name = f"{node.name}: {_argument_of(node, place)}"
    site = node.site
    return Difference("scalar", f"{name} = {before!r}", f"{name} = {now!r}", _ADVICE["float"], None, site, site)


def _argument_of(node: Node, place: int) -> str:
    def holds(arg: Any) -> bool:
        if isinstance(arg, tuple):
            return any(map(holds, arg))
        return isinstance(arg, Constant) and arg.index == place

    names = [argument.name for argument in function_schema(node.op).arguments]
    given = [*zip(names, node.args, strict=False), *node.kwargs]
    return next((name for name, arg in given if holds(arg)), "a float")
