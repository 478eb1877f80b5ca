"""The state of one device: data that tensors stand for, the trace that makes it, the context around both.

In one module because they refer to each other: data to its device, a device to its trace, a trace to its data.
Source: torch/csrc/lazy/core/lazy_graph_executor.h, `DeviceContextArena`.

Note [Traced ranges]
Under a profiler, each trace is shown as a range, from its first call to its sync. The recorder must not check at every
call whether this is the first one under a profiler, but it does compare the default dtype with the trace's at every
call. So a trace made under a profiler has no default dtype: its first call finds a difference, and the code that
handles the difference opens the range.

Note [Who holds a pending storage]
A sync computes the live set: the pending storages that are still held. Weak references could not tell which those are:
before the garbage collector calls the finalizers of a dead cycle, it clears the weak references into the cycle. A
finalizer that reads would then find that a sync in between, its own or a signal handler's, had skipped its tensors. So
a deferred trace refers strongly to every storage it made, none of which has memory yet, and reads their reference
counts: a count drops when the last holder is really gone, as objects here are not part of cycles. Once the calls of a
trace get their values as they are recorded, the trace refers to its storages weakly, since memory must be freed as in
eager; a storage that the collector hides then has its value already.

Note [Memory given back]
`tensor.untyped_storage().resize_(0)` gives memory back while tensors go on referring to it, and `resize_(nbytes)` takes
memory again, with any content: so `fully_shard` keeps one tensor for each gathered parameter. Within a trace neither is
recorded: what the calls between them would have used is not there in eager either, and a graph keeps values only as
long as they are used. A storage that is given back when its trace ends is not in the live set, so it becomes no output;
from then on it is `UNWRITTEN`, as memory that was never used. A run that takes its old value has it to itself. When the
storage is written again, views of it that are older than the trace are made again from the base, by `record.enter`.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from sys import getrefcount
from time import perf_counter
from typing import Any
from weakref import WeakSet, ref

import torch

from lazy_backend import metrics
from lazy_backend.cache.trie import Trie, TrieNode
from lazy_backend.diagnostics.history import history
from lazy_backend.diagnostics.memory import Alive
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.ir.canonical import storage_of_tokens
from lazy_backend.lowering.ir.graph import TensorMeta
from lazy_backend.lowering.ir.program import Call, Cut, Fresh, Token, View
from lazy_backend.lowering.ir.ranges import is_profiling, profiled
from lazy_backend.metrics.recording_costs import Aside
from lazy_backend.ports import cpython
from lazy_backend.ports.cpython import is_owned
from lazy_backend.settings import config
from lazy_backend.tensors.bodies import Body
from lazy_backend.tensors.locks import DeviceLocker, DeviceQueue, Work
from lazy_backend.tensors.path_counts import PathCounts, calls_of
from lazy_backend.tensors.registry import Registry

# ----- data


class TensorData:
    """What a lazy tensor stands for: a geometry over a storage, and its token in the trace that last used it.

    `epoch` identifies the trace the token belongs to. A tensor of an earlier trace enters the current one as an input.
    """

    __slots__ = ("context", "epoch", "token", "meta", "__weakref__")

    context: DeviceContext
    epoch: object | None
    token: Token | None
    meta: TensorMeta

    @property
    def storage(self) -> LazyStorage:
        raise NotImplementedError


class LazyStorage(TensorData):
    """The memory shared by a base and all its views; also the base's own `TensorData`.

    Pending (`tensor` and `error` None), computed (`tensor`: the base on the backing device, with exactly the geometry
    of `meta`) or poisoned (`error`). The token `UNWRITTEN` marks memory that is not recorded yet.
    """

    __slots__ = ("tensor", "error")

    def __init__(self, context: DeviceContext, epoch: object | None, token: Token | None, meta: TensorMeta) -> None:
        self.context = context
        self.epoch = epoch
        self.token = token
        self.meta = meta
        self.tensor: torch.Tensor | None = None
        self.error: BaseException | None = None

    @property
    def storage(self) -> LazyStorage:
        return self

    def forget(self) -> None:
        """Be memory that was never used. Whoever needs the value has it by now."""
        self.tensor = self.error = self.epoch = None
        self.token = UNWRITTEN


class ViewData(TensorData):
    """A view: its own geometry, and the storage that it looks into and keeps alive."""

    __slots__ = ("_storage",)

    def __init__(
        self, context: DeviceContext, epoch: object | None, token: Token | None, meta: TensorMeta, storage: LazyStorage
    ) -> None:
        self.context = context
        self.epoch = epoch
        self.token = token
        self.meta = meta
        self._storage = storage

    @property
    def storage(self) -> LazyStorage:
        return self._storage


UNWRITTEN = Token("unwritten", 0)


class GivenBack:
    """The storages of a device whose memory was given back. See its Note. The callers hold the context's lock."""

    def __init__(self, registry: Registry[LazyStorage]) -> None:
        self._registry = registry
        self._storages: WeakSet[LazyStorage] = WeakSet()
        self.is_used = False  # whether anything ever was: every sync asks

    def __contains__(self, storage: LazyStorage) -> bool:
        return self.is_used and storage in self._storages

    def add(self, storage: LazyStorage) -> None:
        """Let the memory of `storage` go when the trace ends."""
        self.is_used = True
        if storage.error is not None:  # nothing uses it any more
            self.forget([storage])
        self._storages.add(storage)

    def discard(self, storage: LazyStorage) -> None:
        """Let tensors over `storage` have memory again. Its content is undefined."""
        self._storages.discard(storage)

    def pending(self) -> list[LazyStorage]:
        """What the end of the trace does not leave in memory."""
        return [one for one in self._storages if one.token is not UNWRITTEN] if self.is_used else []

    def forget(self, storages: Iterable[LazyStorage]) -> None:
        """Let `storages` be memory that was never used. May be interrupted, and done again."""
        for storage in storages:
            self._registry.register_all((storage,))
            storage.forget()


# ----- the trace


def _gone() -> None:
    """A weak reference to nothing."""


class Epoch:
    """Identifies the trace that gave out a token. `cursor`: where the trace ended, once it has ended.

    A storage that is alive later leads back through its epoch to the line that made it, while it keeps that token.
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


class Bundle:
    """Storages that a jump would have made for one holder, made only if the holder is alive at a sync."""

    __slots__ = ()

    def unfold(self, trace: Trace) -> None:
        """Make the storages, put them into `trace.pending`, and keep them."""
        raise NotImplementedError


def _count_of_a_listed_one() -> int:
    for listed in [Bundle()]:
        return getrefcount(listed)
    raise AssertionError


# The reference count of a bundle that only a list and the variable of a loop over it hold.
_LISTED = _count_of_a_listed_one()


class Trace:
    """A cursor into the trie, and the data that goes with this walk through it.

    The cursor identifies the program; `inputs`, `constants` and `seeds` are what differs between two walks along a
    path. `pending` refers to every storage made in this trace, in program order, weakly if the trace is computed (Note
    [Who holds a pending storage]). `start` is a time; `default_dtype` holds for the whole trace. `computed`: whether
    all recorded calls have their values, or the run that gives them their values; later calls are then computed as they
    are recorded (Note [First sight runs]).
    `longest` and `room`: the calls, and the bytes from the host, after which somebody looks whether the trace is to be
    cut.
    `at_once`: the list that notes storages, where calls run at once and none is recorded, nothing is pending and no run
    is under way; otherwise None. The recorder in C++ then runs calls by itself.
    `unfinished`: the key of the call that is being recorded, or the run that is being scheduled; while it is a key, the
    lists may hold more than the path mentions. `changes` counts what happened in between (Note [Interruption]).
    """

    __slots__ = (
        "epoch",
        "cursor",
        "inputs",
        "groups",
        "constants",
        "seeds",
        "pending",
        "bundles",
        "start",
        "default_dtype",
        "computed",
        "unfinished",
        "changes",
        "entering",
        "run_seconds",
        "range",
        "given_back",
        "longest",
        "at_once",
        "room",
    )

    def __init__(
        self,
        root: TrieNode[Call | Cut],
        start: float,
        given_back: GivenBack,
        default_dtype: torch.dtype | None,
        longest: int,
    ) -> None:
        """`given_back`: the context's. `default_dtype`: that of the root, or None if the first call opens a range."""
        self.epoch = Epoch()
        self.given_back = given_back
        self.cursor = root
        self.inputs: list[TensorData] = []
        self.groups: dict[LazyStorage, int] = {}
        self.constants: list[float] = []
        self.seeds: list[int] = []
        # LazyStorage | ref[LazyStorage], appended by the recorder; None for one that a jump skipped
        self.pending: list[Any] = []
        self.bundles: list[Bundle] = []  # of storages whose places in `pending` are still None
        self.start = start
        self.default_dtype = default_dtype
        self.longest = longest
        self.at_once: list[weakref.ref[LazyStorage]] | None = None
        self.room = int(config.max_pending_bytes)
        self.computed: Work | bool = False
        self.unfinished: list[Any] | Work | None = None
        self.changes = 0
        self.entering: TensorData | None = None  # what became an input last; it may not be in `inputs` yet
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
            if cursor is self.cursor:  # from here on neither a call nor a backward jump: nothing can come in between
                self.groups = groups
                self.entering = None
                del self.inputs[num_inputs:], self.constants[num_constants:]
                del self.seeds[num_seeds:], self.pending[num_pending:]
                return  # `bundles` stay: a bundle is added once its jump is on the path

    def end_range(self) -> None:
        opened, self.range = self.range, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def add_pending(self, storage: LazyStorage) -> None:
        """Note a storage that a call made."""
        self.pending.append(ref(storage) if self.computed else storage)

    def become_computed(self, run: Work, cursor: TrieNode[Call | Cut], changes: int) -> bool:
        """From here on, `run` gives every recorded call its value. False if something came in between."""
        # an interruption may have made them weak already
        weak = [_gone if one is None else ref(one) if isinstance(one, LazyStorage) else one for one in self.pending]
        if self.cursor is not cursor or self.changes != changes:
            return False
        self.pending, self.computed = weak, run  # no call since the check
        return True

    def live(self, goes_on: bool = False) -> tuple[tuple[int, ...], list[LazyStorage]]:
        """The live set: the places of the pending storages that are still held, and the storages themselves.

        If the trace `goes_on`, also those that were given back.
        """
        if self.bundles:
            self._unfold_held()
        computed, pending = self.computed, self.pending.copy()  # an interruption may shorten it
        while computed is not self.computed:  # and make it weak
            computed, pending = self.computed, self.pending.copy()
        if not computed:
            indices, storages = cpython.held_among(pending, 1)
        else:
            held = {place: storage for place, one in enumerate(pending) if (storage := one()) is not None}
            indices, storages = tuple(held), list(held.values())
        if not goes_on and self.given_back.is_used:
            kept = [
                (i, storage) for i, storage in zip(indices, storages, strict=True) if storage not in self.given_back
            ]
            indices, storages = tuple(i for i, _ in kept), [storage for _, storage in kept]
        return indices, storages

    def _unfold_held(self) -> None:
        """Make the storages of the bundles that something besides this trace refers to."""
        count = len(self.bundles)
        for bundle in self.bundles:
            if getrefcount(bundle) > _LISTED:
                bundle.unfold(self)
        del self.bundles[:count]

    def written_groups(self) -> set[int]:
        """The alias groups of inputs that some call of this trace writes. Walks the path."""
        calls = [call for call in self.cursor.path() if isinstance(call, Call)]
        storages = storage_of_tokens(calls)
        written = {storages[token] for call in calls for token in call.mutates}
        return {e.group for call in calls for e in call.entered if storages[e.token] in written}


# ----- the context


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A loop, as seen at some call."""

    round: tuple[Hashable, ...]  # its calls without their operands
    length: int  # the calls of a step, which is some rounds
    left: int  # the calls until the end of a step


class Pace:
    """How far apart steps of one device end, where they end by themselves. See Note [Steps that end by themselves]."""

    __slots__ = (
        "loop",
        "deepest",
        "calls",
        "batches",
        "latest",
        "places",
        "over",
        "came",
        "fresh",
        "_chain",
        "_follows",
    )

    def __init__(self) -> None:
        self.loop: Loop | None = None  # that the program was in when it was looked for
        self.deepest = 0  # the calls of the longest step that ended otherwise than as rounds of a loop
        self.calls = 0  # of this step that are in traces before this one
        # that came from the host since a step ended, where gradients are recorded, but those before the first call
        self.batches = 0
        self.places: set[Hashable] = set()  # of the program, from which batches came since a step ended
        self.latest: TrieNode[Call | Cut] | None = None  # where the latest batch came
        self.fresh: Callable[[], Epoch | None] = _gone  # the epoch that began when a step last ended by itself
        # a trace that is over when a batch comes for which gradients are recorded, as an evaluation was before it
        self.over: Epoch | None = None
        self.came = False  # whether a batch came since the latest step of an optimizer
        # the optimizers that stepped since a batch came, or since one stepped again
        self._chain: dict[ref[Any], None] = {}
        # how often in a row another optimizer's step followed, with no batch in between
        self._follows: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def longest(self) -> int:
        """The calls after which a trace is looked at."""
        bound = int(config.max_trace_length)
        if config.mark_steps != "auto":
            return bound
        return min(bound, max(LOOKED_AT, 2 * self.deepest) if self.loop is None else self.loop.length)

    def end(self, depth: int, is_step: bool) -> None:
        """A trace of so many calls ended; `is_step`: not as rounds of a loop."""
        self.latest = None
        self.calls += depth
        if is_step:
            self.deepest = max(self.deepest, self.calls)
            self.calls = self.batches = 0
            self.loop = None
            self.places.clear()

    def goes_on(self, optimizer: Any) -> bool:
        """Note a step of an optimizer. Returns whether one of another is to follow before a batch comes."""
        latest = next(reversed(self._chain))() if self._chain else None
        is_next = latest is not None and not self.came and ref(optimizer) not in self._chain
        if latest is not None:
            self._follows[latest] = self._follows.get(latest, 0) + 1 if is_next else 0
        if not is_next:
            self._chain.clear()
        self._chain[ref(optimizer)] = None
        self.came = False
        return self._follows.get(optimizer, 0) >= _FOLLOWED


# Times in a row that an optimizer's step must have been followed by another's, for the step to end with that.
_FOLLOWED = 2
# Calls of a trace after which a loop is looked for in it, and then whenever there are twice as many.
LOOKED_AT = 256


def new_queue(index: int) -> DeviceQueue:
    # asking for the number of threads makes a new thread obey torch.set_num_threads; else MKL would take all cores
    return DeviceQueue(f"lazy:{index}", on_start=torch.get_num_threads)


class DeviceContext:
    """The state of one lazy device. `lock` guards the trace; a run never takes it."""

    # slots for what every recorded call needs: the recorder in C++ reads them without a lookup
    __slots__ = ("trace", "lock", "backing", "pace", "device", "__dict__", "__weakref__")

    def __init__(self, index: int, backing: torch.device) -> None:
        self.index = index
        self.device = torch.device("lazy", index)
        self.name = str(self.device)  # str() takes 0.4 µs, and every sync's record needs it
        self.backing = backing
        self.lock = threading.RLock()
        self.locker = DeviceLocker(index)
        self.trie: Trie[Call | Cut] = Trie()
        self.eager_root: TrieNode[Call | Cut] = TrieNode(None, None)  # without children, see Note [Eager mode]
        # storages of a trace are in its `pending`; those that outlive it, or never were in a trace, are registered here
        self.registry: Registry[LazyStorage] = Registry()
        self.given_back = GivenBack(self.registry)
        self._default_dtype = torch.get_default_dtype()  # that the root of the current trace is of
        self.pace = Pace()
        self.aside = Aside()
        self.trace = self._fresh_trace()
        self.queue = new_queue(index)
        self.fake_mode: Any = None  # for metadata inference, made at the first unseen call
        self.fakes: dict[TensorMeta, Any] = {}  # operands for metadata inference, by geometry
        self.outside: dict[torch.Tensor, LazyStorage] = {}  # operands of the current call that are not lazy
        self.paths = PathCounts()
        self.body: Body | None = None  # of a captured function that runs as written, see Note [Threads and bodies]
        self.latest_read = object()  # a new one for each read of values and each cut, also with nothing to sync
        self.order: TensorData | None = None  # of the tensor that all collectives write to, once there is one
        self._baseline: Counter[str] = Counter()  # cumulative counters at the last `reset_counters`

    def holds_lock(self) -> bool:
        """Whether the calling thread holds `lock`."""
        return is_owned(self.lock)

    def wait_for_body(self) -> None:
        """Wait until no other thread runs the body of a captured function here. See Note [Threads and bodies]."""
        while (body := self.body) is not None and not body.ended and body.thread != threading.get_ident():
            body.wait()  # and perhaps for the next one

    def hold_idle(self) -> None:
        """Take `lock` while no run is under way, and keep it."""
        while True:
            self.locker.wait_idle()
            self.lock.acquire()
            if self.locker.is_idle():
                return
            self.lock.release()

    def has_pending(self) -> bool:
        """Whether something is recorded, or was being scheduled when it was interrupted."""
        return not self.trace.is_empty() or isinstance(self.trace.unfinished, Work)

    def new_trace(self) -> None:
        """Start a new trace. The caller holds `lock`."""
        fresh = self.fresh_trace()
        self.trace.epoch.cursor = self.trace.cursor
        self.trace.changes += 1
        self.trace = fresh
        self.given_back.forget(self.given_back.pending())

    def replace_trace(self, trace: Trace, cursor: TrieNode[Call | Cut], fresh: Trace, has_run: bool) -> bool:
        """`new_trace`, unless something was recorded or run since `cursor`. The caller holds `lock`.

        `has_run`: whether the caller takes the trace for one whose calls have their values, or for one that is to run.
        If the caller, such as a signal handler, interrupted a call, that call starts again.
        """
        trace.epoch.cursor = cursor
        trace.changes += 1
        # nothing can come between this check and the store: neither calls a function. See Note [Interruption]
        if self.trace is trace and trace.cursor is cursor and (trace.computed is not False) is has_run:
            self.trace = fresh
            return True
        return False

    def begin_replay(self, trace: Trace, count: int, run: Work) -> bool:
        """Commit a replay, unless something was recorded or run since. The caller holds `lock`."""
        locker = self.locker
        trace.changes += 1
        trace.at_once = None
        # as in `replace_trace`
        if self.trace is trace and trace.cursor.depth == 0 and locker.count == count:
            trace.unfinished = run
            return True
        return False

    def fresh_trace(self) -> Trace:
        """A trace to continue with. Forgets the paths if there are too many."""
        if self.trie.size > config.trie_limit:
            self.forget_paths()
        return self._fresh_trace()

    def _fresh_trace(self) -> Trace:
        self._default_dtype = default_dtype = torch.get_default_dtype()
        # which operators are recorded, and the metadata of their results, depend on these
        is_eager = config.eager or self.aside.is_on
        root = self.eager_root if is_eager else self.trie.root_of((config.force_fallback, default_dtype))
        dtype = None if is_profiling() else default_dtype
        return Trace(root, perf_counter(), self.given_back, dtype, self.pace.longest())

    def follow_aside(self) -> None:
        """Begin a trace that records, or one that does not, as `aside` and the settings say, if nothing is recorded."""
        with self.lock:
            trace, cursor = self.trace, self.trace.cursor
            is_eager = config.eager or self.aside.is_on
            if cursor.depth == 0 and (cursor is self.eager_root) is not is_eager:
                self.replace_trace(trace, cursor, self.fresh_trace(), trace.computed is not False)

    def run_at_once(self) -> None:
        """Let C++ run the calls of a trace that records none, if no run is under way. See Note [Eager mode]."""
        with self.lock:
            if self.trace.cursor is self.eager_root and self.trace.unfinished is None and self.locker.is_idle():
                self.trace.at_once = self.registry.references
                self.trace.longest = 0  # so that the recorder in Python looks at each call

    def restart_clock(self) -> None:
        """Restart the trace's clock if it is empty: time spent waiting before a recording is not part of it."""
        with self.lock:
            if self.trace.is_empty():
                self.trace.start = perf_counter()

    def begin_traced_range(self) -> None:
        """Open the profiler's range from the first call of a trace to its sync. See Note [Traced ranges]."""
        self.trace.default_dtype = self._default_dtype
        self.trace.range = profiled("trace")
        self.trace.range.__enter__()

    def forget_paths(self) -> None:
        """Clear the trie. The caller holds `lock` and starts a new trace."""
        for name, count in self.paths.forget().items():
            metrics.increment(name, count)
        history.forget_paths(self.name)
        self.trie.reset()

    def get_live_tensors(self) -> list[LazyStorage]:
        """Every storage that is held on this device: computed ones, scheduled ones, then pending ones."""
        with self.lock:
            # an interrupted sync may register a storage twice
            return list(dict.fromkeys([*self.registry.alive(), *self.trace.live()[1]]))

    def alive(self) -> Alive:
        """How much is alive on this device."""
        sizes = [storage.meta.nbytes for storage in self._each_live()]
        memory = backing_of(self.backing).memory(self.backing)
        return Alive(len(sizes), sum(sizes), None if memory is None else memory.allocated)

    def _each_live(self) -> Iterator[LazyStorage]:
        """Every live storage that has memory or will have it.

        Held one at a time, so that counting does not keep alive what a run under way drops.
        """
        with self.lock:
            references = [*self.registry.references, *map(weakref.ref, self.trace.live()[1])]
        for reference in {id(reference): reference for reference in references}.values():
            storage = reference()
            if storage is not None and storage not in self.given_back:
                yield storage

    def live_by_line(self) -> list[dict[str, Any]]:
        """The live tensors, by the line that made them, or the line that last used them if that was in a later step."""
        groups: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        origins: dict[Epoch, dict[Token, tuple[str, str]]] = {}
        for storage in self._each_live():
            origin = _origin(storage, origins)
            groups[origin] += 1
            sizes[origin] += storage.meta.nbytes
        return [
            {"device": str(self.device), "how": how, "site": site, "tensors": count, "bytes": sizes[how, site]}
            for (how, site), count in groups.most_common()
        ]

    # Counters. See the module docstring of `metrics`: paths are counted per sync, calls when they are asked for.

    def _cumulative(self) -> Counter[str]:
        created = self.paths.created() + len(self.trace.pending)
        live = len(self.get_live_tensors())
        return Counter(CreateLtcTensor=created, DestroyLtcTensor=created - live)

    def read_counters(self) -> Counter[str]:
        with self.lock:
            total = self.paths.calls()
            total.update(calls_of(self.trace.cursor.path()))
            cumulative = self._cumulative()
            cumulative.subtract(self._baseline)
            return total + cumulative

    def reset_counters(self) -> None:
        with self.lock:
            self._baseline = self._cumulative()
            self.paths.forget()


def _origin(storage: LazyStorage, origins: dict[Epoch, dict[Token, tuple[str, str]]]) -> tuple[str, str]:
    """How a trace last met a live tensor ("made at", "used at" or "from outside"), and the line."""
    epoch, token = storage.epoch, storage.token
    if not isinstance(epoch, Epoch) or token is None:
        return "from outside", ""
    if epoch not in origins:
        origins[epoch] = epoch.origins()
    return origins[epoch].get(token, ("from outside", ""))
