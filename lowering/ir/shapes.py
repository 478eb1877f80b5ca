"""One symbolic program for many shapes.

In: the numbers of graphs that are otherwise the same. Out: `Sizes`, which expresses each number in a few symbols, and
`SymbolicGraph`, which a compiler turns into one plan for all these graphs.

Note [Shapes are checked, not assumed]
Graphs with the same `skeleton` differ only in numbers: sizes and strides of inputs, ints among arguments. From samples
of these numbers `generalise` guesses how they are related: a size that varies is a symbol, other numbers are
polynomials in the symbols, and a number that fits no polynomial becomes a symbol itself. A guess may be wrong (batch
and length may have doubled together). So before a symbolic plan runs a graph, each of the graph's numbers is compared
with the guess, and the compiler's own guards are evaluated. A wrong guess costs a compile, with one more sample to
guess from, never a wrong result. Geometries of intermediate values are not among the numbers: each graph has its own,
and the plan's results are compared with them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, Value, map_arg
from lazy_backend.lowering.ir.passes import graph_pass

Samples = Sequence[tuple[int, ...]]

# The most symbols in a product: strides of a [batch, heads, length, length] tensor have three.
_MAX_DEGREE = 3

# `s + 1` is likely, as in shifted targets; `s + 17` is a coincidence.
_MAX_OFFSET_OF_INPUTS = 2


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial: terms of (symbols multiplied, coefficient). `4*s0*s1 + 1` is (((0, 1), 4), ((), 1))."""

    terms: tuple[tuple[tuple[int, ...], int], ...]

    def at(self, symbols: Sequence[Any]) -> Any:
        """The polynomial's value; symbols may be ints, SymInts or FX proxies."""
        total: Any = None
        for monomial, coefficient in self.terms:
            term: Any = None
            for symbol in monomial:
                term = symbols[symbol] if term is None else term * symbols[symbol]
            if term is None:
                term = coefficient
            elif coefficient != 1:
                term = term * coefficient
            total = term if total is None else total + term
        return 0 if total is None else total

    def to_json(self) -> list[Any]:
        return [[list(monomial), coefficient] for monomial, coefficient in self.terms]

    @classmethod
    def from_json(cls, data: list[Any]) -> Size:
        return cls(tuple((tuple(monomial), coefficient) for monomial, coefficient in data))

    def is_constant(self) -> bool:
        return all(not monomial for monomial, _ in self.terms)

    def __repr__(self) -> str:
        names = [[f"s{symbol}" for symbol in monomial] for monomial, _ in self.terms]
        factors = [[*([str(c)] if c != 1 or not n else []), *n] for n, (_, c) in zip(names, self.terms, strict=True)]
        return " + ".join("*".join(parts) for parts in factors) or "0"


# ----- what two graphs must have in common, and their numbers


def _add_numbers(args: Sequence[Arg], found: list[int]) -> None:
    for arg in args:
        kind = arg.__class__
        if kind is int:  # and not bool
            found.append(arg)
        elif isinstance(arg, tuple):
            _add_numbers(arg, found)


def _arguments(node: Node) -> tuple[Arg, ...]:
    return (*node.args, *(arg for _, arg in node.kwargs))


def numbers_of(graph: Graph) -> tuple[int, ...]:
    """The ints that may vary with the shape: geometry of inputs, then arguments, in program order."""
    found = [n for v in graph.inputs for n in (*v.meta.shape, *v.meta.stride, v.meta.storage_offset)]
    for node in graph.nodes:
        _add_numbers(_arguments(node), found)
    return tuple(found)


def input_sizes(graph: Graph) -> list[int]:
    """Indices, among the numbers, of the sizes of inputs: the preferred symbols."""
    places: list[int] = []
    place = 0
    for value in graph.inputs:
        rank = len(value.meta.shape)
        places.extend(range(place, place + rank))
        place += 2 * rank + 1
    return places


def skeleton(graph: Graph) -> bytes:
    """A graph without its numbers, as exact compressed text: 78 kB for the step of a 24-block GPT, not 1.6 MB."""

    def blank(arg: Arg) -> Hashable:
        kind = arg.__class__
        if kind is Value:
            return ("value", arg.number)
        if kind is int:
            return int
        if isinstance(arg, tuple):
            return tuple([blank(item) for item in arg])
        return ("constant", arg.index) if kind is Constant else repr(arg)

    def kind(value: Value | None) -> Hashable:
        if value is None:
            return None
        meta = value.meta
        return value.number, value.storage, meta.dtype, len(meta.shape), meta.conj, meta.neg

    nodes = tuple(
        (
            node.name,
            tuple([blank(arg) for arg in node.args]),
            tuple([(name, blank(arg)) for name, arg in node.kwargs]),
            tuple([kind(value) for value in node.outputs]),
            tuple([value.number for value in node.mutates]),
            node.seed,
        )
        for node in graph.nodes
    )
    outputs = tuple(value.number for value in graph.outputs)
    whole = (tuple(map(kind, graph.inputs)), nodes, outputs, str(graph.device))
    return zlib.compress(repr(whole).encode(), 1)


# ----- guessing


@dataclass(frozen=True, slots=True)
class Sizes:
    """A program's numbers as polynomials: `symbols` are indices of numbers, `sizes` has one polynomial per number."""

    symbols: tuple[int, ...]
    sizes: tuple[Size, ...]

    def to_json(self) -> dict[str, Any]:
        return {"symbols": list(self.symbols), "sizes": [size.to_json() for size in self.sizes]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sizes:
        return cls(tuple(data["symbols"]), tuple(map(Size.from_json, data["sizes"])))

    def bind(self, numbers: Sequence[int]) -> tuple[int, ...] | None:
        """The symbols' values for these numbers; None if any number differs from its polynomial."""
        values = tuple(numbers[place] for place in self.symbols)
        if len(numbers) != len(self.sizes):
            return None
        return values if all(s.at(values) == n for s, n in zip(self.sizes, numbers, strict=True)) else None


def generalise(samples: Samples, sizes_of_inputs: Sequence[int], max_symbols: int) -> Sizes | None:
    """Polynomials that fit all `samples`; None if they need more than `max_symbols` symbols.

    `samples`: at least two, all different. `sizes_of_inputs`: indices that are considered first for symbols.
    """
    vectors = list(zip(*samples, strict=True))
    symbols: list[int] = []
    found: dict[int, Size] = {}
    first = set(sizes_of_inputs)
    for place in (*sizes_of_inputs, *(p for p in range(len(vectors)) if p not in first)):
        vector = vectors[place]
        known = [vectors[symbol] for symbol in symbols]
        size = _as_input_size(vector, known) if place in first else _as_polynomial(vector, known)
        if size is None:
            if len(symbols) == max_symbols:
                return None
            size = Size((((len(symbols),), 1),))
            symbols.append(place)
        found[place] = size
    return Sizes(tuple(symbols), tuple(found[place] for place in range(len(vectors))))


def _constant(vector: Sequence[int]) -> Size | None:
    return Size((((), vector[0]),)) if len(set(vector)) == 1 else None


def _plus(monomial: tuple[int, ...], coefficient: int, offset: int) -> Size:
    return Size(((monomial, coefficient), *((((), offset),) if offset else ())))


def _as_input_size(vector: Sequence[int], known: Sequence[Sequence[int]]) -> Size | None:
    """A constant, a known symbol, or a known symbol plus or minus a little."""
    constant = _constant(vector)
    if constant is not None:
        return constant
    for symbol, values in enumerate(known):
        offsets = {n - s for n, s in zip(vector, values, strict=True)}
        if len(offsets) == 1 and abs(offset := offsets.pop()) <= _MAX_OFFSET_OF_INPUTS:
            return _plus((symbol,), 1, offset)
    return None


def _as_polynomial(vector: Sequence[int], known: Sequence[Sequence[int]]) -> Size | None:
    """A constant, or `c * product + d`; multiples of a product come before sums, short products before long ones."""
    constant = _constant(vector)
    if constant is not None:
        return constant
    candidates = [
        (monomial, *line)
        for degree in range(1, _MAX_DEGREE + 1)
        for monomial in itertools.combinations_with_replacement(range(len(known)), degree)
        if (line := _line(vector, _product(known, monomial, len(vector)))) is not None
    ]
    # stable: among equals the shortest product wins
    candidates.sort(key=lambda candidate: (candidate[2] != 0, candidate[1] != 1, abs(candidate[2])))
    return _plus(*candidates[0]) if candidates else None


def _product(known: Sequence[Sequence[int]], monomial: Sequence[int], length: int) -> list[int]:
    product = [1] * length
    for symbol in monomial:
        product = [a * b for a, b in zip(product, known[symbol], strict=True)]
    return product


def _line(vector: Sequence[int], base: Sequence[int]) -> tuple[int, int] | None:
    """Integers (c, d) with vector = c * base + d and c not 0, or None."""
    pairs = list(zip(base, vector, strict=True))
    (b0, v0) = pairs[0]
    other = next(((b, v) for b, v in pairs if b != b0), None)
    if other is None or (other[1] - v0) % (other[0] - b0):
        return None
    c = (other[1] - v0) // (other[0] - b0)
    d = v0 - c * b0
    return (c, d) if c and all(c * b + d == v for b, v in pairs) else None


# ----- the symbolic program


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """An input's shape, strides and storage offset."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    storage_offset: Size


@dataclass(frozen=True, slots=True, eq=False)
class SymbolicGraph:
    """A graph whose arguments hold a `Size` for every number that depends on a symbol.

    `graph`: the metas of its values are those of one sample. `hints`: the symbols' values in that sample. `inputs`: one
    per graph input.
    """

    graph: Graph
    sizes: Sizes
    hints: tuple[int, ...]
    inputs: tuple[Geometry, ...]

    def graphs(self) -> tuple[Graph, ...]:
        return (self.graph,)


@graph_pass("write sizes as symbols")
def symbolic_graph(graph: Graph, sizes: Sizes) -> SymbolicGraph:
    """`graph`, one of the samples behind `sizes`, with a `Size` for each argument that depends on symbols."""
    hints = sizes.bind(numbers_of(graph))
    assert hints is not None
    rest = iter(sizes.sizes)
    inputs = []
    for value in graph.inputs:
        rank = len(value.meta.shape)
        shape, stride = tuple(itertools.islice(rest, rank)), tuple(itertools.islice(rest, rank))
        inputs.append(Geometry(shape, stride, next(rest)))

    def leaf(arg: Arg) -> Arg:
        if not isinstance(arg, int) or isinstance(arg, bool):
            return arg
        size = next(rest)
        return arg if size.is_constant() else size

    nodes = []
    for node in graph.nodes:
        args = tuple(map_arg(leaf, arg) for arg in node.args)
        kwargs = tuple((name, map_arg(leaf, arg)) for name, arg in node.kwargs)
        nodes.append(replace(node, args=args, kwargs=kwargs))
    return SymbolicGraph(replace(graph, nodes=tuple(nodes)), sizes, hints, tuple(inputs))
