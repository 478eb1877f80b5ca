"""One context per lazy device: its trace, its trie, its live tensors, its lock and its queue.

Seed: lazy_graph_executor, `DeviceContextArena`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.cache.trie import Trie, TrieNode
from lazy_backend.errors import DeviceError
from lazy_backend.history import history
from lazy_backend.locks import DeviceLocker, DeviceLockerArena, DeviceQueue, Work
from lazy_backend.lowering import rng
from lazy_backend.lowering.ir import TensorMeta
from lazy_backend.lowering.program import Call, Cut, Fresh, Token
from lazy_backend.lowering.ranges import is_profiling, profiled
from lazy_backend.memory import Alive
from lazy_backend.settings import config
from lazy_backend.tensor import LazyStorage
from lazy_backend.trace import Epoch, Trace

lockers = DeviceLockerArena()


def _new_queue(index: int) -> DeviceQueue:
    # asking for the number of threads makes a new thread obey torch.set_num_threads: MKL would take all cores
    return DeviceQueue(f"lazy:{index}", on_start=torch.get_num_threads)


class DeviceContext:
    """The state of one lazy device. `lock` guards the trace; a run never takes it."""

    def __init__(self, index: int, backing: torch.device) -> None:
        self.index = index
        self.device = torch.device("lazy", index)
        self.name = str(self.device)  # 0.4 µs, and every sync's record has it
        self.backing = backing
        self.lock = threading.RLock()
        self.trie: Trie[Call | Cut] = Trie()
        self.eager_root: TrieNode[Call | Cut] = TrieNode(None, None)  # without children, see Note [Eager mode]
        self.trace = self._fresh_trace()
        self.queue = _new_queue(index)
        self.fake_mode: Any = None  # for metadata inference, made at the first unseen call
        self.fakes: dict[TensorMeta, Any] = {}  # its operands, by geometry
        self.outside: dict[torch.Tensor, LazyStorage] = {}  # operands of the current call that are not lazy
        self._settings = config.force_fallback, torch.get_default_dtype()  # what all paths of the trie rest on
        self._registry: list[weakref.ref[LazyStorage]] = []
        self._registry_bound = 1024
        self._watched: list[LazyStorage] | None = None
        self._created = 0  # storages made outside a trace or counted already, ever
        self._baseline: Counter[str] = Counter()  # what `reset_counters` subtracts from the cumulative ones
        self._path_uses: Counter[TrieNode[Call | Cut]] = Counter()

    @property
    def locker(self) -> DeviceLocker:
        return lockers.get_locker(self.index)

    def default_device(self) -> torch.device:
        """What `"lazy"` without an index means now."""
        return torch.device("lazy", contexts.current)

    def holds_lock(self) -> bool:
        """Whether the calling thread holds `lock`."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # as threading.Condition asks

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
        """Start recording afresh. The caller holds `lock`."""
        fresh = self.fresh_trace()
        self.trace.epoch.cursor = self.trace.cursor
        self.trace.changes += 1
        self.trace = fresh

    def replace_trace(self, trace: Trace, cursor: TrieNode[Call | Cut], fresh: Trace) -> bool:
        """`new_trace`, unless something was recorded since `cursor`. The caller holds `lock`.

        A call that the caller interrupted, as a signal handler, starts anew.
        """
        trace.epoch.cursor = cursor
        trace.changes += 1
        # nothing can come between this question and the store: neither calls a function. See Note [Interruption]
        if self.trace is trace and trace.cursor is cursor:
            self.trace = fresh
            return True
        return False

    def begin_replay(self, trace: Trace, count: int, run: Work) -> bool:
        """Commit a replay, unless something was recorded or run since. The caller holds `lock`."""
        locker = self.locker
        trace.changes += 1
        # as in `replace_trace`
        if self.trace is trace and trace.cursor.depth == 0 and locker.count == count:
            trace.unfinished = run
            return True
        return False

    def fresh_trace(self) -> Trace:
        """A trace to go on with. Forgets the paths if there are too many, or settings that they rest on changed."""
        settings = config.force_fallback, torch.get_default_dtype()
        if self.trie.size > config.trie_limit or settings != self._settings:
            self.forget_paths()
        return self._fresh_trace()

    def _fresh_trace(self) -> Trace:
        trace = Trace(self.eager_root if config.eager else self.trie.root, perf_counter())
        if is_profiling():
            trace.default_dtype = None
        return trace

    def restart_clock(self) -> None:
        """What was waited for is no part of a recording that has not begun."""
        with self.lock:
            if self.trace.is_empty():
                self.trace.start = perf_counter()

    def begin_traced_range(self) -> None:
        """A range of the profiler from the first call of a trace to its sync. See Note [Traced ranges]."""
        self.trace.default_dtype = self._settings[1]
        self.trace.range = profiled("trace")
        self.trace.range.__enter__()

    def forget_paths(self) -> None:
        """Start the trie afresh. The caller holds `lock` and starts a new trace."""
        self._settings = config.force_fallback, torch.get_default_dtype()
        self._count_paths()
        history.forget_paths(self.name)
        self.trie.reset()

    # Live tensors. A trace registers what it makes in `pending`; what outlives its trace, and what never was in one,
    # is registered here.

    def register_tensor(self, storage: LazyStorage) -> None:
        self._registry.append(weakref.ref(storage))
        if self._watched is not None:
            self._watched.append(storage)
        if len(self._registry) > self._registry_bound:
            self.unregister_dead_tensors()

    @contextlib.contextmanager
    def watching_uploads(self) -> Iterator[list[LazyStorage]]:
        """A list that takes up what is made outside the trace, from the host's data, within the block."""
        watched: list[LazyStorage] = []
        self._watched = watched
        try:
            yield watched
        finally:
            if self._watched is watched:  # it may end late, after an interruption
                self._watched = None

    def register_survivors(self, storages: list[LazyStorage]) -> None:
        """What a sync found alive among the pending. Their creation was counted with the path."""
        self._registry.extend(map(weakref.ref, storages))
        if len(self._registry) > self._registry_bound:
            self.unregister_dead_tensors()

    def register_made(self, storages: list[LazyStorage]) -> None:
        """What a replay makes, outside any trace."""
        self._created += len(storages)
        self.register_survivors(storages)

    def unregister_dead_tensors(self) -> None:
        self._registry = [reference for reference in self._registry if reference() is not None]
        # doubling keeps the cost per registered tensor constant
        self._registry_bound = max(1024, 2 * len(self._registry))

    def get_live_tensors(self) -> list[LazyStorage]:
        """Every storage somebody holds on this device: computed ones, scheduled ones, then pending ones."""
        with self.lock:
            known = [storage for reference in self._registry if (storage := reference()) is not None]
            return list(dict.fromkeys([*known, *self.trace.live()[1]]))  # an interrupted sync may register one twice

    def alive(self) -> Alive:
        """How much is alive on this device."""
        sizes = [storage.meta.nbytes for storage in self._each_live()]
        allocated = torch.cuda.memory_allocated(self.backing) if self.backing.type == "cuda" else None
        return Alive(len(sizes), sum(sizes), allocated)

    def _each_live(self) -> Iterator[LazyStorage]:
        """Every live storage, held one at a time: what dies in a run under way must not wait for who counts."""
        with self.lock:
            references = [*self._registry, *map(weakref.ref, self.trace.live()[1])]
        for reference in {id(reference): reference for reference in references}.values():
            storage = reference()
            if storage is not None:
                yield storage

    def live_by_line(self) -> list[dict[str, Any]]:
        """The live tensors, by the line that made them, or that used them last if a later step did."""
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

    # Counters. See the module docstring of `metrics`: paths are counted per sync, calls when somebody asks.

    def count_path(self, cursor: TrieNode[Call | Cut]) -> None:
        self._path_uses[cursor] += 1

    def count_created(self) -> None:
        self._created += 1

    def _count_paths(self) -> None:
        """Turn path counts into call counts, before the paths are forgotten."""
        for name, count in self._calls_of_paths().items():
            metrics.increment(name, count)
        self._created += self._created_in_paths()
        self._path_uses.clear()

    def _calls_of_paths(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for cursor, uses in self._path_uses.items():
            for name, count in _calls(cursor.path()).items():
                total[name] += count * uses
        return total

    def _created_in_paths(self) -> int:
        return sum(uses * _fresh(cursor.path()) for cursor, uses in self._path_uses.items())

    def _cumulative(self) -> Counter[str]:
        created = self._created + self._created_in_paths() + len(self.trace.pending)
        live = len(self.get_live_tensors())
        return Counter(CreateLtcTensor=created, DestroyLtcTensor=created - live)

    def read_counters(self) -> Counter[str]:
        with self.lock:
            total = self._calls_of_paths()
            total.update(_calls(self.trace.cursor.path()))
            cumulative = self._cumulative()
            cumulative.subtract(self._baseline)
            return total + cumulative

    def reset_counters(self) -> None:
        with self.lock:
            self._baseline = self._cumulative()
            self._created += self._created_in_paths()
            self._path_uses.clear()


def _origin(storage: LazyStorage, origins: dict[Epoch, dict[Token, tuple[str, str]]]) -> tuple[str, str]:
    """How a live tensor was met last, "made at", "used at" or "from outside", and the line."""
    epoch, token = storage.epoch, storage.token
    if not isinstance(epoch, Epoch) or token is None:
        return "from outside", ""
    if epoch not in origins:
        origins[epoch] = epoch.origins()
    return origins[epoch].get(token, ("from outside", ""))


def _calls(path: list[Call | Cut]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for call in path:
        if isinstance(call, Call):
            counts["lazy::" + call.op._schema.name.split("::")[1]] += 1
    return counts


def _fresh(path: list[Call | Cut]) -> int:
    return sum(isinstance(result, Fresh) for call in path if isinstance(call, Call) for result in call.results)


class DeviceContextArena:
    """All device contexts, made at first use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._contexts: dict[int, DeviceContext] = {}
        self.current = 0
        self.prepare: Callable[[], None] = lambda: None  # called once, before the first context is made

    def backing_type(self) -> str:
        """`cuda` or `cpu`: the setting, or what there is."""
        chosen = config.device
        if chosen is not None:
            return str(chosen)
        return "cuda" if torch.cuda.is_available() else "cpu"

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.backing_type() == "cuda" else int(config.num_devices)

    def get_device_context(self, index: int | None) -> DeviceContext:
        """The context of `lazy:index`, or of the current device. Raises `DeviceError` for an index out of range."""
        index = self.current if index is None else index
        found = self._contexts.get(index)
        return self._make_context(index) if found is None else found

    def _make_context(self, index: int) -> DeviceContext:
        count = self.device_count()
        if not 0 <= index < count:
            advice = (
                "one lazy device stands for each CUDA device"
                if self.backing_type() == "cuda"
                else "lazy_backend.config.num_devices sets how many there are on the CPU"
            )
            raise DeviceError(f"there is no device lazy:{index}\n  devices: lazy:0 to lazy:{count - 1} ({advice})")
        backing = torch.device("cuda", index) if self.backing_type() == "cuda" else torch.device("cpu")
        prepare, self.prepare = self.prepare, lambda: None
        prepare()
        with self._lock:
            return self._contexts.setdefault(index, DeviceContext(index, backing))

    def get_active_devices(self) -> list[DeviceContext]:
        """The contexts made so far, lowest index first."""
        return [context for _, context in sorted(self._contexts.items())]

    def for_all_device_contexts(self, function: Callable[[DeviceContext], None]) -> None:
        for context in self.get_active_devices():
            function(context)

    def alive(self, device: str) -> Alive:
        """How much is alive on `device`."""
        return self.get_device_context(torch.device(device).index).alive()

    def live_by_line(self, device: str) -> list[dict[str, Any]]:
        """`DeviceContext.live_by_line` of `device`."""
        return self.get_device_context(torch.device(device).index).live_by_line()

    def all_live_by_line(self) -> list[dict[str, Any]]:
        """The same of all devices."""
        return [row for context in self.get_active_devices() for row in context.live_by_line()]

    def get_rng_seed(self, generator: torch.Generator | None = None) -> int:
        """A seed for the next random op, from `generator` or the one in use. See Note [Random numbers are data]."""
        return rng.draw_seed(generator)

    def set_rng_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_running_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def read_counters(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for context in self.get_active_devices():
            total.update(context.read_counters())
        return total

    def reset_counters(self) -> None:
        self.for_all_device_contexts(DeviceContext.reset_counters)

    def reset(self) -> None:
        """Forget every context, as for tests: traces are dropped, tensors of theirs must not be used again."""
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            context.queue.close(timeout=60)
            context.trie.reset()
        self.current = 0

    def reset_after_fork(self) -> None:
        """In a forked child: new locks, new queues; the threads stayed with the parent."""
        self._lock = threading.RLock()
        for context in self._contexts.values():
            context.lock = threading.RLock()
            context.queue = _new_queue(context.index)
        lockers.reset_after_fork()


contexts = DeviceContextArena()
history.alive = contexts.alive
history.alive_by_line = contexts.live_by_line
history.sources["live tensors"] = contexts.all_live_by_line
metrics.add_source(metrics.Source(contexts.read_counters, contexts.reset_counters))
