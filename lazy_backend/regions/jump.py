"""Jumps: known stretches of a trace, taken in one step.

In: the data of a stretch's operands. Out: the trace, moved to where recording the calls would have moved it, and the
data of the tensors that are still wanted.

Note [A jump is a step down the trie]
A jump begins at a node of the trie and is found there by its name and by what the recorder would have put into keys for
its operands: a token, or the geometry and the alias group of a tensor that enters. So it leads to the node that
recording would have led to, with the same inputs, constants and seeds in the same order. What follows, a sync among it,
does not know of jumps: graphs, keys, artefacts and explanations are those of the calls. Storages that the stretch makes
and that nothing holds afterwards are not made; `None` takes their places in `trace.pending`.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.program import INPUTS, Fresh, Token, View
from lazy_backend.regions.stretch import Node, Stretch
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import UNWRITTEN, Bundle, DeviceContext, LazyStorage, TensorData, Trace, ViewData

_COUNTED = {"RegionJump": 1}


@dataclass(frozen=True, slots=True)
class WantedView:
    """A view that a jump makes, of its `storage`-th storage or of its `operand`-th operand."""

    view: View
    storage: int
    operand: int


@dataclass(frozen=True, slots=True)
class Jump:
    """A stretch without its calls. Refers to no tensors: the trie owns it.

    `storages`: those that are wanted, each with its place among all that the stretch makes. `wanted`: for each tensor
    that `take` returns, a place in `storages`, or a view.
    """

    end: Node
    constants: tuple[float, ...]
    generators: tuple[torch.Generator | None, ...]
    num_pending: int
    storages: tuple[tuple[int, Fresh], ...]
    wanted: tuple[int | WantedView, ...]
    tokens: tuple[Token, ...]  # of what is wanted
    wrappers: tuple[tuple[Any, ...], ...]  # of what is wanted: the arguments from which its tensors are made

    def agrees_with(self, other: Jump) -> bool:
        """Whether both move a trace in the same way, whatever they make."""
        return (
            self.end is other.end
            and repr(self.constants) == repr(other.constants)
            and all(map(operator.is_, self.generators, other.generators))
        )


def make_jump(stretch: Stretch, tokens: Sequence[Token], with_constants: bool = True) -> Jump:
    """The jump over `stretch` that makes the tensors `tokens`, each made by the stretch.

    Without constants, the caller of `take_jump` gives them.
    """
    roots = dict.fromkeys(root for token in tokens if (root := stretch.root(token)) in stretch.places)
    storages = {root: number for number, root in enumerate(roots)}
    operands = {token: number for number, token in enumerate(stretch.operands)}
    wanted: list[int | WantedView] = []
    for token in tokens:
        made, root = stretch.made[token], stretch.root(token)
        if isinstance(made, View):
            wanted.append(WantedView(made, storages.get(root, -1), operands.get(root, -1)))
        else:
            wanted.append(storages[token])
    fresh = tuple((stretch.places[root], _fresh(stretch, root)) for root in roots)
    return Jump(
        stretch.end,
        stretch.constants if with_constants else (),
        stretch.generators,
        stretch.num_pending,
        fresh,
        tuple(wanted),
        tuple(tokens),
        tuple(stretch.made[token].wrapper for token in tokens),
    )


def _fresh(stretch: Stretch, token: Token) -> Fresh:
    made = stretch.made[token]
    assert isinstance(made, Fresh)
    return made


@dataclass(slots=True, eq=False)
class Known:
    """A stretch that is known at one place of the trie. `tokens`: of the tensors that its jump makes.

    `is_confirmed`: whether two calls recorded it. `backwards`: the programs of the backwards that followed, by
    pattern and whether the graph was cut between.
    `saved`: the tokens of what these use, which a `Saved` makes when it is needed, going by `unfolding`.
    """

    jump: Jump
    tokens: tuple[Token, ...]
    saved: tuple[Token, ...] = ()
    unfolding: Jump | None = None
    is_confirmed: bool = False
    backwards: dict[Any, Any] = field(default_factory=dict)
    has_backward: bool = False  # whether one of `backwards` is confirmed
    saved_results: list[int] = field(default_factory=list)  # differentiable results that a backward uses
    saved_others: tuple[int, ...] = ()  # places in `tokens` of the other results whose memory a backward uses
    parts: tuple[frozenset[int], ...] = ()  # differentiable results whose graphs share nothing; none if all share

    def ever_given(self) -> frozenset[int]:
        """The differentiable results that got gradients in some backward."""
        return frozenset().union(*[one.given for one in self.backwards.values()])


def key_of(stretch: Stretch, name: Hashable, implied: Container[Token] = ()) -> Hashable:
    """Where the jump over `stretch` is found at its start: what `take_jump` computes before anything is recorded.

    `implied`: operands that the name says all about.
    """
    entered = {e.token: (e.meta, e.group, e.base) for call in stretch.calls for e in call.entered}
    return (name, *[entered.get(token, token) for token in stretch.operands if token not in implied])


def learn_jump(
    stretch: Stretch,
    name: Hashable,
    tokens: Sequence[Token],
    with_constants: bool = True,
    implied: Container[Token] = (),
) -> Known:
    """Let `take_jump` find the jump over `stretch`, which makes the tensors `tokens`. Confirmed if it was known."""
    node, key = stretch.start, key_of(stretch, name, implied)
    if node.jumps is None:
        node.jumps = {}
    known: Known | None = node.jumps.get(key)
    jump = make_jump(stretch, tokens, with_constants)
    if known is not None and known.jump.agrees_with(jump) and known.tokens[: len(tokens)] == tuple(tokens):
        known.is_confirmed = True
        return known
    made = node.jumps[key] = Known(jump, tuple(tokens))
    return made


def save(known: Known, stretch: Stretch, tokens: Sequence[Token], results: Sequence[Token]) -> None:
    """Let what follows the jump over `stretch` use the tensors `tokens`. `results`: the differentiable ones."""
    known.saved = tuple(dict.fromkeys((*known.saved, *tokens)))
    known.unfolding = make_jump(stretch, known.saved)
    roots = set(map(stretch.root, known.saved))
    known.saved_results = [number for number, token in enumerate(results) if stretch.root(token) in roots]
    others = [place for place, token in enumerate(known.tokens) if token not in results]
    known.saved_others = tuple(place for place in others if stretch.root(known.tokens[place]) in roots)


class Saved(Bundle):
    """What a jump leaves for its backward, made only if the backward is not a jump in the same trace.

    There, `known` says all about these tensors, so none of them is needed to find the next jump.
    """

    __slots__ = ("known", "epoch", "random", "_context", "_operands", "_first", "_unfolding", "_data")

    def __init__(self, context: DeviceContext, known: Known, operands: Sequence[TensorData], first: int) -> None:
        self.known = known
        self.epoch = context.trace.epoch
        self.random: torch.Tensor | None = None  # the state that seeds were drawn from
        self._context = context
        self._operands = operands
        self._first = first  # the place in the trace's list of the first storage that the jump makes
        self._unfolding = known.unfolding
        self._data: dict[Token, TensorData] | None = None

    def unfold(self, trace: Trace) -> None:
        """See `Bundle.unfold`. May be interrupted, and done again."""
        jump = self._unfolding
        if self._data is not None or jump is None or trace.epoch is not self.epoch:
            return
        storages = []
        for place, fresh in jump.storages:
            storage = trace.pending[self._first + place]
            if storage is None:
                storage = LazyStorage(self._context, self.epoch, fresh.token, fresh.meta)
                trace.pending[self._first + place] = storage
            storages.append(storage)
        made = _wanted(self._context, self.epoch, jump, storages, self._operands)
        self._data = dict(zip(jump.tokens, made, strict=True))

    def has(self, tokens: Sequence[Token]) -> bool:
        """Whether these tensors are among what was saved: a backward may have been learned after this call."""
        if self._unfolding is self.known.unfolding:
            return True
        return self._unfolding is not None and set(tokens) <= set(self._unfolding.tokens)

    def data(self) -> dict[Token, TensorData]:
        """The tensors, by token. The caller holds the context's lock."""
        self.unfold(self._context.trace)
        if self._data is None:
            raise LazyBackendError(
                "the tensors that a captured module saved for its backward have no values: the run of its step failed\n"
                f"  at {user_site()}\n  fix that error, which was raised before this one, and run the forward again"
            )
        return self._data


def operand_key(trace: Trace, operands: Sequence[TensorData]) -> tuple[list[Hashable], list[TensorData]] | None:
    """What the recorder would put into keys for `operands`, in this order; and those among them that would enter.

    None if they cannot enter without more being recorded. Changes nothing.
    """
    epoch, groups = trace.epoch, trace.groups
    key: list[Hashable] = []
    entering: list[TensorData] = []
    new_groups: dict[LazyStorage, int] = {}
    for data in operands:
        if data.epoch is epoch:
            key.append(data.token)
            continue
        storage = data.storage
        if storage.error is not None or (storage.token is UNWRITTEN and storage.tensor is None):
            return None
        group = groups.get(storage)
        if group is None:
            if storage.epoch is epoch:  # the trace has to make this view of it, see Note [Memory given back]
                return None
            group = new_groups.setdefault(storage, len(groups) + len(new_groups))
        key.append((data.meta, group, storage.meta))
        entering.append(data)
    return key, entering


def take_jump(
    context: DeviceContext,
    name: Hashable,
    operands: Sequence[TensorData],
    with_backward: bool = False,
    constants: Sequence[float] = (),
) -> tuple[Known, list[TensorData], Saved | None] | None:
    """Take the jump `name` from where the trace is. Returns what is known of it, what it makes, and what it saves.

    None, with nothing done, if there is no confirmed jump for these operands or, `with_backward`, none whose backward
    is known. The caller holds the context's lock.
    """
    trace = context.trace
    changes, cursor = trace.changes, trace.cursor
    jumps = cursor.jumps
    if jumps is None or trace.unfinished is not None or trace.computed:
        return None
    found = operand_key(trace, operands)
    if found is None:
        return None
    key, entering = found
    known: Known | None = jumps.get((name, *key))
    if known is None or not known.is_confirmed or (with_backward and not known.has_backward):
        return None
    jump = known.jump
    if jump.end.depth > config.max_trace_length or trace.default_dtype is not torch.get_default_dtype():
        return None
    if any(data.context is not context for data in entering) or len(set(map(id, entering))) < len(entering):
        return None
    before = torch.default_generator.get_state() if jump.generators else None
    # from here on as in `record`: wherever an interruption comes, `roll_back` finds what the path does not mention
    trace.unfinished = []
    if trace.cursor is not cursor or trace.changes != changes:  # a call before the line above is not counted
        trace.unfinished = None
        return None
    try:
        _enter(trace, entering)
        trace.constants.extend(jump.constants or constants)
        trace.seeds.extend([contexts.get_rng_seed(generator) for generator in jump.generators])
        saved = Saved(context, known, operands, len(trace.pending)) if with_backward else None
        made = _make(context, trace, jump, operands)
        if trace.changes == changes:  # the commit; no call between the check and the stores
            trace.cursor = jump.end
            trace.unfinished = None
            if saved is not None:
                trace.bundles.append(saved)
                saved.random = before
            metrics.observe_together(_COUNTED)
            context.aside.jumped += jump.end.depth - cursor.depth
            return known, made, saved
    except BaseException:
        trace.roll_back()
        executor.defer_again(context)
        trace.unfinished = None
        raise
    trace.roll_back()
    trace.unfinished = None
    if before is not None:
        torch.default_generator.set_state(before)
    return None


def _enter(trace: Trace, entering: Sequence[TensorData]) -> None:
    epoch, groups, inputs = trace.epoch, trace.groups, trace.inputs
    for data in entering:
        groups.setdefault(data.storage, len(groups))
        token = INPUTS[len(inputs)]
        trace.entering = data
        data.token = token
        data.epoch = epoch
        inputs.append(data)


def _make(context: DeviceContext, trace: Trace, jump: Jump, operands: Sequence[TensorData]) -> list[TensorData]:
    epoch = trace.epoch
    pending: list[LazyStorage | None] = [None] * jump.num_pending
    storages = [LazyStorage(context, epoch, fresh.token, fresh.meta) for _, fresh in jump.storages]
    for (place, _), storage in zip(jump.storages, storages, strict=True):
        pending[place] = storage
    trace.pending.extend(pending)
    return _wanted(context, epoch, jump, storages, operands)


def _wanted(
    context: DeviceContext,
    epoch: object,
    jump: Jump,
    storages: Sequence[LazyStorage],
    operands: Sequence[TensorData],
) -> list[TensorData]:
    made: list[TensorData] = []
    for wanted in jump.wanted:
        if wanted.__class__ is int:
            made.append(storages[wanted])
        else:
            of = storages[wanted.storage] if wanted.operand < 0 else operands[wanted.operand].storage  # type: ignore
            made.append(ViewData(context, epoch, wanted.view.token, wanted.view.meta, of))  # type: ignore[union-attr]
    return made
