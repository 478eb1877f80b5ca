"""A stretch of a trace: what one callable recorded.

In: the state of a trace before and after a callable ran. Out: the calls in between, what they used and what they made.
A stretch becomes a `Jump` once it is known where the tensors that it uses come from.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from lazy_backend.cache.trie import TrieNode
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta
from lazy_backend.lowering.ir.program import Call, Cut, Fresh, Token, View
from lazy_backend.ports.cpython import UNHELD, counts_of
from lazy_backend.replay.accounts import NotReplayable
from lazy_backend.replay.recorded_call import RandomState
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, Trace

Node = TrieNode[Call | Cut]


class StretchStart:
    """Where a trace stands before a callable runs."""

    __slots__ = ("trace", "cursor", "num_constants", "num_seeds", "num_pending", "latest_read", "random", "_others")

    def __init__(self, context: DeviceContext, random: RandomState | None = None) -> None:
        trace = context.trace
        self.trace = trace
        self.cursor = trace.cursor
        self.num_constants = len(trace.constants)
        self.num_seeds = len(trace.seeds)
        self.num_pending = len(trace.pending)
        self.latest_read = context.latest_read
        self.random = random or RandomState()
        devices = contexts.get_active_devices()
        self._others = [(other, other.trace, other.trace.cursor) for other in devices if other is not context]

    def check_others(self) -> None:
        """Raise `NotReplayable` if something was recorded on another device since."""
        for other, trace, cursor in self._others:
            if other.trace is not trace or trace.cursor is not cursor:
                raise NotReplayable(f"it computes on {other.device} too\n  capture the parts on each device")


class Stretch:
    """The calls that a trace recorded since `start`. Raises `NotReplayable` if the trace was cut in between.

    `operands`: the tokens of the tensors that the calls use and did not make, in the order of first use. `made`: the
    results of the calls that are tensors of their own, by token; `places`: where the storages among them are in the
    trace's list.
    """

    def __init__(self, context: DeviceContext, start: StretchStart, may_be_empty: bool = False) -> None:
        trace = start.trace
        # a read of a value that is already there, or a call that runs at once where nothing is pending, cuts nothing
        if context.trace is not trace or context.latest_read is not start.latest_read:
            raise NotReplayable("it reads a value, or syncs, which cuts the graph")
        self.epoch = trace.epoch
        self.start, self.end = start.cursor, trace.cursor
        self.calls = _calls_between(self.start, self.end)
        self.constants = tuple(trace.constants[start.num_constants :])
        self.generators = rng.generators_of(trace.seeds[start.num_seeds :])
        self.num_pending = len(trace.pending) - start.num_pending
        self.made: dict[Token, Fresh | View] = {}
        self.places: dict[Token, int] = {}
        for call in self.calls:
            for result in call.results:
                if isinstance(result, Fresh):
                    self.places[result.token] = len(self.places)
                if isinstance(result, Fresh | View):
                    self.made[result.token] = result
        self.operands = tuple(dict.fromkeys(t for call in self.calls for t in tokens_of(call) if t not in self.made))
        self.entered = tuple(entered.token for call in self.calls for entered in call.entered)
        self.mutates = frozenset(self.root(token) for call in self.calls for token in call.mutates)
        self.storages = [_weakly(storage) for storage in trace.pending[start.num_pending :]]
        start.check_others()
        if drew := start.random.change(self.generators):
            raise NotReplayable(drew)
        if not self.calls and not may_be_empty:
            raise NotReplayable("it records no operator")
        if tuple(token for token in self.operands if token in set(self.entered)) != self.entered:
            raise NotReplayable("its inputs are not used in the order in which they were recorded")

    def root(self, token: Token) -> Token:
        """The token of the storage, or of the operand, that `token` looks into."""
        made = self.made.get(token)
        while isinstance(made, View):
            token = made.of
            made = self.made.get(token)
        return token

    def needed_for(self, tokens: Iterable[Token]) -> list[Token]:
        """What the calls made that made `tokens`, or what these needed."""
        needed = set(map(self.root, tokens))
        for call in reversed(self.calls):
            made = {self.root(one.token) for one in call.results if isinstance(one, Fresh | View)}
            made |= set(map(self.root, call.mutates))
            if not made.isdisjoint(needed):
                needed |= made | set(map(self.root, tokens_of(call)))
        return [token for token in self.made if self.root(token) in needed]

    def check_nothing_kept(self, trace: Trace, tokens: Sequence[Token]) -> None:
        """Raise `NotReplayable` if something holds what the stretch made, besides the tensors `tokens` and `trace`."""
        wanted = set(map(self.root, tokens))
        held = set(trace.live()[1])
        waiting = set() if trace.computed else set(map(id, trace.pending))
        for token, place in self.places.items():
            storage = self.storages[place]()
            if storage is not None and token not in wanted and (storage in held or id(storage) not in waiting):
                raise NotReplayable(f"something keeps a tensor that it makes at {self.site_of_made(token)}")

    def check_nothing_kept_after(self, trace: Trace, tokens: Sequence[Token]) -> None:
        """As `check_nothing_kept`, once the graph was cut: `trace` has begun since, and holds what entered it."""
        wanted = set(map(self.root, tokens))
        alive = [(token, self.storages[place]()) for token, place in self.places.items() if token not in wanted]
        made = [token for token, storage in alive if storage is not None]
        storages = [storage for _, storage in alive if storage is not None]
        del alive
        # each is an input, or what a view among the inputs looks into, and has an alias group
        entered = Counter(id(data) for data in (*trace.inputs, trace.entering))
        entered.update(map(id, trace.groups))
        views = [data for data in trace.inputs if data is not data.storage]
        entered.update(id(view.storage) for view in views)
        for token, storage_count in zip(made, _num_unknown(storages, entered), strict=True):
            if storage_count:
                raise NotReplayable(f"something keeps a tensor that it makes at {self.site_of_made(token)}")
        mine = dict(zip(map(id, storages), made, strict=True))
        for view, view_count in zip(views, _num_unknown(views, entered), strict=True):
            if view_count and (root := mine.get(id(view.storage))) is not None:
                raise NotReplayable(f"something keeps a view of what it makes at {self.site_of_made(root)}")

    def looks(self, operands: Sequence[TensorData | None]) -> dict[tuple[LazyStorage, TensorMeta], Token]:
        """The tokens of what the calls used and made, as far as it is alive, by memory and geometry.

        `operands`: the data of `self.operands`, in this order.
        """
        storages = {token: storage for token, place in self.places.items() if (storage := self.storages[place]())}
        storages |= {token: data.storage for token, data in zip(self.operands, operands, strict=True) if data}
        found = {(data.storage, data.meta): token for token, data in zip(self.operands, operands, strict=True) if data}
        for token, made in self.made.items():
            storage = storages.get(self.root(token))
            if storage is not None:
                found.setdefault((storage, made.meta), token)
        return found

    def site_of(self, token: Token) -> str:
        """The line that first uses `token`."""
        return next((call.site for call in self.calls if token in tokens_of(call)), "an unknown line")

    def site_of_made(self, token: Token) -> str:
        """The line that makes `token`."""
        return next(call.site for call in self.calls for result in call.results if result is self.made[token])

    def site_of_write(self, token: Token) -> str:
        """The line that first writes to the operand `token`."""
        return next(call.site for call in self.calls if token in map(self.root, call.mutates))

    def shape(self) -> tuple[Hashable, ...]:
        """The calls, whatever their tensors and floats are: equal for stretches that do the same elsewhere."""
        numbers: dict[Token, int] = {}
        for token in (*self.operands, *self.made):
            numbers[token] = len(numbers)

        def anywhere(arg: Any) -> Any:
            if isinstance(arg, tuple):
                return tuple(map(anywhere, arg))
            if isinstance(arg, Token):
                return Token, numbers[arg]
            # 1, 1.0 and True are equal and name other calls, as do both zeros; a NaN does not equal itself
            return type(arg), repr(arg) if isinstance(arg, float | complex) else arg

        return tuple(
            (call.op, anywhere(call.args), anywhere(call.kwargs), len(call.results), call.num_constants)
            for call in self.calls
        )

    def first_difference(self, end: Node, constants: tuple[float, ...]) -> str:
        """The first call that differs from those that led to `end` before, with its line."""
        before, now = _calls_between(self.start, end), self.calls
        for old, new in zip(before, now, strict=False):
            if old is not new:
                return f"{new.op} at {new.site} where it recorded {old.op} at {old.site} before"
        if len(before) != len(now):
            longer = max(before, now, key=len)
            extra = longer[min(len(before), len(now))]
            return f"{len(now)} calls, and {len(before)} before: {extra.op} at {extra.site} is in only one of them"
        for place, (old_float, float_now) in enumerate(zip(constants, self.constants, strict=True)):
            if repr(old_float) != repr(float_now):
                return f"{float_now!r} in {self.call_of_constant(place)}, and {old_float!r} before"
        return "random numbers from another generator"

    def call_of_constant(self, place: int) -> str:
        """The call that a constant belongs to, with its line."""
        for call in self.calls:
            if place < call.num_constants:
                return f"{call.op} at {call.site}"
            place -= call.num_constants
        raise IndexError(place)


def _num_unknown(objects: Sequence[object], known: Counter[int]) -> list[int]:
    """How many references there are to each object, besides that of the list and those that are `known`."""
    counts = counts_of(objects)
    return [count - UNHELD - known[id(one)] for one, count in zip(objects, counts, strict=True)]


def _calls_between(start: Node, end: Node) -> list[Call]:
    calls: list[Call] = []
    node: Node | None = end
    while node is not start:
        if node is None:
            raise NotReplayable("something else was recorded while it ran")
        if not isinstance(node.call, Call):
            raise NotReplayable("it makes a call that is not recorded")
        calls.append(node.call)
        node = node.parent
    calls.reverse()
    return calls


def tokens_of(call: Call) -> Iterator[Token]:
    """The tokens among the arguments of a call, in the order in which the recorder looks at them."""
    for arg in call.args:
        yield from _tokens_in(arg)
    for _, arg in call.kwargs:
        yield from _tokens_in(arg)


def _tokens_in(arg: Any) -> Iterator[Token]:
    if isinstance(arg, Token):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _tokens_in(item)


def _weakly(storage: Any) -> Callable[[], LazyStorage | None]:
    """A weak reference to an item of a trace's list: a storage, a reference already, or nothing after a jump."""
    if storage is None:
        return _nothing
    return weakref.ref(storage) if isinstance(storage, LazyStorage) else storage  # type: ignore[no-any-return]


def _nothing() -> None:
    return None
