"""What one device has recorded since its last sync.

Note [Traced ranges]
Under a profiler each trace is shown as a range, from its first call to its sync. The recorder must not ask at every
call whether this is the first one under a profiler; but it compares the default dtype with the trace's at every call.
So a trace made under a profiler has none: its first call finds a difference, and whoever looks into it opens the range.

Note [Who holds a pending storage]
A sync computes what somebody still holds. Weak references would not tell: before the garbage collector calls the
finalizers of a dead cycle, it clears the weak references into it, and a finalizer that reads would find that a sync
since then, its own or a signal handler's, passed its tensors over. So a deferred trace refers strongly to every storage
it made, which has no memory of its own yet, and asks for the number of references: that drops when the last holder is
really gone, as objects here are part of no cycle. Once the calls of a trace have their values when they are recorded,
it refers to the storages weakly, as memory must be freed as in eager; whom the collector hides then has its value.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from sys import getrefcount
from typing import Any
from weakref import ref

import torch

from lazy_backend.cache.trie import TrieNode
from lazy_backend.locks import Work
from lazy_backend.lowering.canonical import storage_of_tokens
from lazy_backend.lowering.program import Call, Cut, Fresh, Token, View
from lazy_backend.tensor import LazyStorage, TensorData


def _reference_counts(objects: list[Any]) -> list[int]:
    """The numbers of references to each of `objects`, with those of the list and of this call."""
    return list(map(getrefcount, objects))


# What `_reference_counts` gives for what only the list holds; it differs between versions of Python.
_UNHELD = _reference_counts([object()])[0]


class Epoch:
    """Identifies a trace in the tokens that it gives out. `cursor`: where the trace ended, once it has.

    What is alive later leads back through it to the line that made it, as long as its token is that trace's.
    """

    __slots__ = ("cursor", "__weakref__")

    cursor: TrieNode[Call | Cut]

    def origins(self) -> dict[Token, tuple[str, str]]:
        """By token: ("made at", line) for what the trace made, ("used at", line) for what entered it from outside."""
        found: dict[Token, tuple[str, str]] = {}
        for call in self.cursor.path() if hasattr(self, "cursor") else []:
            if isinstance(call, Call):
                found |= {entered.token: ("used at", call.site) for entered in call.entered}
                made = [result.token for result in call.results if isinstance(result, Fresh | View)]
                found |= dict.fromkeys(made, ("made at", call.site))
        return found


class Trace:
    """A cursor into the trie, and the data that goes with this walk through it.

    The cursor names the program; `inputs`, `constants` and `seeds` are what differs between two walks along the same
    path. `pending` refers to every storage made in this trace, in program order, weakly if the trace is computed (Note
    [Who holds a pending storage]). `start` is a time; `default_dtype` holds for the whole trace. `computed`: whether
    everything recorded has its value already, or gets it from the run that stands here, and what comes is computed when
    it is recorded (Note [First sight runs]).
    `unfinished`: the key of the call that is being recorded, or the run that is being scheduled; while it is a key, the
    lists may hold more than the path mentions. `changes` counts what came in the midst of that (Note [Interruption]).
    """

    __slots__ = (
        "epoch",
        "cursor",
        "inputs",
        "groups",
        "constants",
        "seeds",
        "pending",
        "start",
        "default_dtype",
        "computed",
        "unfinished",
        "changes",
        "entering",
        "run_seconds",
        "range",
    )

    def __init__(self, root: TrieNode[Call | Cut], start: float) -> None:
        self.epoch = Epoch()
        self.cursor = root
        self.inputs: list[TensorData] = []
        self.groups: dict[LazyStorage, int] = {}
        self.constants: list[float] = []
        self.seeds: list[int] = []
        self.pending: list[Any] = []  # LazyStorage | ref[LazyStorage]; the recorder adds to it without a call
        self.start = start
        self.default_dtype: torch.dtype | None = torch.get_default_dtype()
        self.computed: Work | bool = False
        self.unfinished: list[Any] | Work | None = None
        self.changes = 0
        self.entering: TensorData | None = None  # what became an input last; it may not be among them yet
        self.run_seconds = 0.0  # of the calls that ran when they were recorded
        self.range: AbstractContextManager[Any] | None = None  # of the profiler; see Note [Traced ranges]

    def is_empty(self) -> bool:
        return self.cursor.depth == 0

    def roll_back(self) -> None:
        """Forget the data of a call that was not recorded after all: keep only what the path mentions.

        Walks the path, so that a recorded call need not count what it adds. May be interrupted, and done again.
        """
        self.changes += 1
        while True:  # again if a finalizer records something meanwhile
            cursor = self.cursor
            path = [call for call in cursor.path() if isinstance(call, Call)]
            entered = [entered for call in path for entered in call.entered]
            num_groups = len({e.group for e in entered})
            groups = {storage: group for storage, group in self.groups.items() if group < num_groups}
            num_constants, num_seeds = sum(call.num_constants for call in path), sum(call.seeded for call in path)
            num_pending = sum(isinstance(result, Fresh) for call in path for result in call.results)
            num_inputs = len(entered)
            kept = set(self.inputs[:num_inputs])
            for data in (*self.inputs[num_inputs:], self.entering):
                if data is not None and data.epoch is self.epoch and data not in kept:
                    data.epoch = None
            if cursor is self.cursor:  # from here on neither a call nor a jump back: nothing can come in between
                self.groups = groups
                self.entering = None
                del self.inputs[num_inputs:], self.constants[num_constants:]
                del self.seeds[num_seeds:], self.pending[num_pending:]
                return

    def end_range(self) -> None:
        opened, self.range = self.range, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def add_pending(self, storage: LazyStorage) -> None:
        """Note a storage that a call made."""
        self.pending.append(ref(storage) if self.computed else storage)

    def become_computed(self, run: Work) -> None:
        """From here on `run` gives everything recorded its value."""
        weak = list(map(ref, self.pending))
        self.pending, self.computed = weak, run  # no call between the two stores

    def live(self) -> tuple[tuple[int, ...], list[LazyStorage]]:
        """The pending storages somebody still holds: their places, and themselves."""
        pending = self.pending.copy()  # what comes in between may shorten it
        if self.computed:
            held = {place: storage for place, one in enumerate(pending) if (storage := one()) is not None}
        else:
            counts = _reference_counts(pending)
            held = {place: pending[place] for place, count in enumerate(counts) if count > _UNHELD + 1}
        return tuple(held), list(held.values())

    def written_groups(self) -> set[int]:
        """The alias groups of inputs that some call of this trace writes. Walks the path."""
        calls = [call for call in self.cursor.path() if isinstance(call, Call)]
        storages = storage_of_tokens(calls)
        written = {storages[token] for call in calls for token in call.mutates}
        return {e.group for call in calls for e in call.entered if storages[e.token] in written}
