"""A graph as calls of blocks, of which equal ones are one.

In: a graph, and which of its floats are inputs of the compiled code. Out: a `BlockProgram`, or None where there is too
little to save.

Note [Blocks compiled once]
A model repeats itself: a GPT of 24 blocks asks for the same calls 24 times forward, 24 times backward and, parameter by
parameter, in its optimizer. Compiled whole, each block costs the compiler as much as the first. So stretches that look
alike are looked for (`repeats.py`); what is between them are stretches, too. Each becomes a graph of its own, whose
values, floats and seeds are numbered from zero: those whose text is equal then, with equal floats, are one block. A
block returns whatever any of its calls needs. The calls keep the order of the program, and pass values with memory of
their own only (Note [Stretches]), so that the results are those of the graph: what is lost are kernels across the
borders of blocks.

An optimizer on lists is one call, or one after the other, for all parameters. It is taken apart, so that those of one
block's parameters are a stretch, the block being where their gradients were made (`list_operators.py`).

Where a period begins is open: a stretch of 24 times 60 calls can be cut after any of the first 60. It is cut where
fewest values have to be passed to the next round, as at the border of a GPT's block, where it is one.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lazy_backend.lowering.blocks.block_sequence import BlockCall, BlockSequence
from lazy_backend.lowering.blocks.list_operators import ListCalls, list_length
from lazy_backend.lowering.blocks.repeats import Repeat, find_repeats
from lazy_backend.lowering.blocks.stretches import Stretches
from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, Value, makes_views, map_arg, print_arg
from lazy_backend.lowering.ir.optimizers import can_write_out
from lazy_backend.lowering.ir.passes import graph_pass

# What has to be saved, in calls for one tensor each (see `_work_of`). A call of a block costs a run some microseconds,
# and a compiler takes about 10 ms for a call that it has not seen.
MIN_SAVED = 1000

# Calls in the shortest block: of smaller ones, such as the cells of an LSTM, several are joined.
_SHORTEST = 16

# The arithmetic that a fused optimizer does for one parameter.
_FUSED = 15


@dataclass(frozen=True, slots=True, eq=False)
class BlockProgram:
    """Distinct blocks, and calls of them that compute what a graph computes."""

    blocks: tuple[Graph, ...]
    sequence: BlockSequence

    def graphs(self) -> Sequence[Graph]:
        return self.blocks


@graph_pass("find equal blocks")
def in_blocks(
    graph: Graph, constants: Sequence[float], promoted: frozenset[int], min_saved: int
) -> BlockProgram | None:
    """See Note [Blocks compiled once]. `promoted`: the floats whose values may differ between calls of one block.

    None if less than `min_saved` is saved, in calls for one tensor each.
    """
    if graph.held or not all(map(_can_be_cut_off, graph.nodes)):
        return None
    work = sum(map(_work_of, graph.nodes))
    if work <= min_saved:
        return None
    cut = _Cut(graph)
    program = blocks_of(replace(graph, nodes=cut.taken_apart()), cut.stretches, constants, promoted)
    distinct = sum(_work_of(node) for block in program.blocks for node in block.nodes)
    return program if work - distinct >= min_saved else None


def blocks_of(
    graph: Graph, stretches: Sequence[Sequence[Node]], constants: Sequence[float], promoted: frozenset[int]
) -> BlockProgram:
    """These stretches of `graph`, which are all of its calls that do more than make views, as blocks."""
    parts = Stretches(graph)
    for stretch in stretches:
        parts.add_region(stretch)
    regions = [part for part in parts.finish() if isinstance(part, Graph)]
    return _program(graph, [_Numbered.of(region, constants, promoted) for region in regions], promoted)


def _work_of(node: Node) -> int:
    """What a compiler has to do for a call, in calls for one tensor each."""
    if makes_views(node):
        return 0
    return (list_length(node) or 1) * (_FUSED if can_write_out(node) else 1)


def _can_be_cut_off(node: Node) -> bool:
    """Whether the results that a call makes are all views, which are made again, or all have memory of their own."""
    operands = node.inputs()
    storages = {value.storage for value in operands}
    return makes_views(node) or all(v is None or v in operands or v.storage not in storages for v in node.outputs)


# ----- where to cut


class _Cut:
    """The calls of a graph, without those that make views, in stretches that repeat and what is between them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._round_of: dict[int, int] = {}  # storage -> the round of a repeat in which it was made
        self._parts: dict[Node, list[Node]] = {}  # calls on lists that were taken apart
        self.stretches: list[list[Node]] = []
        nodes = [node for node in graph.nodes if not makes_views(node)]
        numbers: dict[str, int] = {}
        items = [numbers.setdefault(_look(node), len(numbers)) for node in nodes]
        self._nodes, self._items, self._crossing = nodes, items, _Crossing(nodes)
        place = 0
        for repeat in self._repeats(0, len(nodes)):
            self._add_between(nodes[place : repeat.start])
            self._add_rounds(repeat)
            place = repeat.end
        self._add_between(nodes[place:])

    def taken_apart(self) -> tuple[Node, ...]:
        """The calls of the graph in program order, with the parts of those that were taken apart in their places."""
        return tuple(part for node in self._graph.nodes for part in self._parts.get(node, [node]))

    def _repeats(self, start: int, end: int) -> list[Repeat]:
        found = find_repeats(self._items[start:end], _SHORTEST)
        return [self._crossing.narrowest(replace(one, start=one.start + start)) for one in found]

    def _add_rounds(self, repeat: Repeat) -> None:
        """A round is a stretch, or several if something repeats within: the blocks of each of several small batches."""
        within = self._repeats(repeat.start, repeat.start + repeat.period)
        for start in range(repeat.start, repeat.end, repeat.period):
            place = start
            for one in within:
                inner = replace(one, start=start + one.start - repeat.start)
                self._add_round(self._nodes[place : inner.start])
                self._add_rounds(inner)
                place = inner.end
            self._add_round(self._nodes[place : start + repeat.period])

    def _add_round(self, nodes: Sequence[Node]) -> None:
        if not nodes:
            return
        made = {value.storage for node in nodes for value in node.outputs if value is not None}
        self._round_of |= dict.fromkeys(made, len(self.stretches))
        self.stretches.append(list(nodes))

    def _add_between(self, nodes: Sequence[Node]) -> None:
        """Calls on lists are taken apart by the rounds that made what they use; other calls stay together."""
        plain: list[Node] = []
        for calls in _runs(nodes):
            groups = _groups(calls, self._round_of) if isinstance(calls, ListCalls) else []
            if len(groups) > 2:
                self._add(plain)
                plain = []
                self._add_groups(calls, groups)
            else:
                plain += calls.nodes
        self._add(plain)

    def _add(self, nodes: list[Node]) -> None:
        if nodes:
            self.stretches.append(nodes)

    def _add_groups(self, calls: ListCalls, groups: Sequence[Sequence[int]]) -> None:
        for group in groups:
            parts = calls.of_group(group)
            for node, part in zip(calls.nodes, parts, strict=True):
                self._parts.setdefault(node, []).append(part)
            self.stretches.append(parts)


def _look(node: Node) -> str:
    """What is alike in the same call of another block: all but which values it takes."""

    def shown(arg: Arg) -> Any:
        return str(arg.meta) if isinstance(arg, Value) else "c" if isinstance(arg, Constant) else arg

    args = print_arg(map_arg(shown, (*node.args, *(arg for _, arg in node.kwargs))))
    made = [None if value is None else str(value.meta) for value in node.outputs]
    return f"{node.op}{args}{made}{len(node.mutates)}{node.seed is None}"


class _Crossing:
    """How many values each border between calls has to let pass."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        makers: dict[int, int] = {}  # storage -> the call that makes it
        self._uses: list[list[int]] = [[] for _ in nodes]  # for each call, the calls that use what it makes
        for place, node in enumerate(nodes):
            for value in node.inputs():
                if value.storage in makers:
                    self._uses[makers[value.storage]].append(place)
            for made in node.outputs:
                if made is not None:
                    makers.setdefault(made.storage, place)

    def narrowest(self, repeat: Repeat) -> Repeat:
        """`repeat`, begun where the values that pass from its first round to its second one are fewest.

        Of what is used again only later, as in the backward pass, every border lets the same number pass.
        """
        start, period = repeat.start, repeat.period
        changes = [0] * (2 * period + 1)
        for place in range(2 * period):
            uses = self._uses[start + place]
            near = uses[: bisect.bisect_left(uses, start + place + period)]
            if near:
                changes[place + 1] += 1
                changes[min(near[-1] - start, 2 * period - 1) + 1] -= 1
        passing = list(itertools.accumulate(changes))
        shifts = range(period if repeat.count > 2 else min(repeat.spare + 1, period))
        shift = min(shifts, key=lambda shift: (passing[period + shift], shift))
        fits = (period * repeat.count + repeat.spare - shift) // period
        return Repeat(start + shift, period, fits, 0)


def _runs(nodes: Sequence[Node]) -> Iterator[ListCalls]:
    """The calls, consecutive ones on lists together if they can be taken apart; others by themselves, without lists."""
    run = ListCalls(0)
    for node in nodes:
        if run.length and run.add(node):
            continue
        if run.nodes:
            yield run
        run = ListCalls(list_length(node) or 0)
        if not run.length or not run.add(node):
            yield ListCalls(0, [node])
            run = ListCalls(0)
    if run.nodes:
        yield run


def _groups(calls: ListCalls, round_of: dict[int, int]) -> list[list[int]]:
    """The places of the lists by the latest round that made what they name; those of no round are one group."""
    rounds = [-1] * calls.length
    for storage, place in calls.place_of.items():
        rounds[place] = max(rounds[place], round_of.get(storage, -1))
    groups: dict[int, list[int]] = {}
    for place, number in enumerate(rounds):
        groups.setdefault(number, []).append(place)
    return list(groups.values())


# ----- equal stretches


@dataclass(frozen=True, slots=True, eq=False)
class _Numbered:
    """A region with its values numbered from zero. `made`: its results in the graph, by their number here."""

    key: str
    graph: Graph  # without outputs
    inputs: tuple[Value, ...]
    made: dict[Value, Value]
    wanted: tuple[Value, ...]  # in the graph
    constants: tuple[int, ...]
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, region: Graph, constants: Sequence[float], promoted: frozenset[int]) -> _Numbered:
        values: dict[Value, Value] = {}
        storages: dict[int, int] = {}
        places: dict[int, int] = {}
        seeds: list[int] = []

        def own(arg: Arg) -> Arg:
            if isinstance(arg, Value):
                if arg not in values:
                    storage = storages.setdefault(arg.storage, len(storages))
                    values[arg] = Value(len(values), arg.meta, storage)
                return values[arg]
            return Constant(places.setdefault(arg.index, len(places))) if isinstance(arg, Constant) else arg

        inputs = tuple(map(own, region.inputs))
        nodes = []
        for node in region.nodes:
            seed = None
            if node.seed is not None:
                seed = len(seeds)
                seeds.append(node.seed)
            kwargs = tuple((name, map_arg(own, arg)) for name, arg in node.kwargs)
            nodes.append(
                replace(
                    node,
                    args=map_arg(own, node.args),
                    kwargs=kwargs,
                    outputs=map_arg(own, node.outputs),
                    mutates=map_arg(own, node.mutates),
                    seed=seed,
                )
            )
        graph = Graph(inputs, tuple(nodes), (), len(places), len(seeds), region.device)
        floats = ["input" if place in promoted else constants[place].hex() for place in places]
        key = f"{graph.text()} {floats}"
        return cls(key, graph, region.inputs, values, region.outputs, tuple(places), tuple(seeds))


def _program(graph: Graph, written: Sequence[_Numbered], promoted: frozenset[int]) -> BlockProgram:
    numbers: dict[str, int] = {}
    for one in written:
        numbers.setdefault(one.key, len(numbers))
    wanted: list[set[int]] = [set() for _ in numbers]
    for one in written:
        wanted[numbers[one.key]].update(one.made[value].number for value in one.wanted)
    blocks: dict[int, Graph] = {}
    calls = []
    for one in written:
        block = numbers[one.key]
        returned = sorted(wanted[block])
        by_number = {own.number: (value, own) for value, own in one.made.items()}
        if block not in blocks:
            blocks[block] = replace(one.graph, outputs=tuple(by_number[number][1] for number in returned))
        needed = set(one.wanted)
        outputs = tuple(v.number if (v := by_number[number][0]) in needed else -1 for number in returned)
        calls.append(BlockCall(block, tuple(v.number for v in one.inputs), outputs, one.constants, one.seeds))
    sequence = BlockSequence(
        tuple(calls),
        inputs=tuple(value.number for value in graph.inputs),
        outputs=tuple(value.number for value in graph.outputs),
        promoted=tuple(sorted(promoted)),
        strides=tuple(tuple(value.meta.stride for value in block.outputs) for block in blocks.values()),
    )
    return BlockProgram(tuple(blocks.values()), sequence)
