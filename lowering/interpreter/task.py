"""The bookkeeping of one run.

In: what a run must compute (`ExecInfo`) and the run's frame. Out: `GraphTask`, which executors drive.
Source: torch/csrc/autograd/graph_task.h (autograd's `GraphTask`), whose names are kept.

Note [Exec info]
A caller may request only some outputs, and copies of intermediate values. Then only the kernels run that these need, in
the sense of `run_post_order`: those that make them or write a storage they read. Requesting fewer outputs must not
change the inputs: a kernel that writes an input's storage always runs, and so does a kernel that only has an effect. So
whichever outputs are requested, the inputs end up as after a full run.

Note [Thread-local state]
A kernel's result may depend on its thread: grad mode, inference mode, threads per operator, the current CUDA stream. A
task stores the caller's settings, and every thread that works for the task adopts them. Autocast is off on all these
threads: a graph was recorded below autocast and contains its casts. Dispatch modes, context variables and
`torch.set_flush_denormal` stay with the caller: the first two belong to one thread, and PyTorch has no getter for the
last.

Note [Reentrant runs]
A kernel may itself run a graph, even on the same thread pool. The thread that starts a run works on it until it is
done, and works on no other run meanwhile. So each run in flight has a thread that makes progress on it, and there is no
circular wait, however deeply runs are nested and however few threads there are.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.devices.registration import graph_device
from lazy_backend.lowering.interpreter.frame import ExecutionFrame
from lazy_backend.lowering.interpreter.kernels import KernelGraph
from lazy_backend.lowering.interpreter.streams import LeafStreams
from lazy_backend.lowering.ir.graph import Node, Value
from lazy_backend.ports.thread_modes import WithoutAutocast, set_grad_enabled

Hook = Callable[[torch.Tensor], torch.Tensor]

# ----- what is asked of a run


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A copy of an intermediate value, as its kernel leaves it.

    `hooks` are called in order, the first with the copy, each later one with the result of the previous hook; the last
    result is the captured value. The run itself continues with the original.
    """

    value: Value
    hooks: tuple[Hook, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ExecInfo:
    """What a run computes. See Note [Exec info]."""

    needed: tuple[int, ...]  # indices of the kernels that run, in program order
    outputs: tuple[Value, ...]
    captures: tuple[Capture, ...]
    captured_at: Mapping[int, tuple[int, ...]]  # index of a kernel -> indices of the captures taken after it


def everything(kernels: KernelGraph) -> ExecInfo:
    """A run of all kernels, for all outputs."""
    return ExecInfo(tuple(range(len(kernels.kernels))), kernels.graph.outputs, (), {})


def exec_info(kernels: KernelGraph, outputs: Sequence[Value], captures: Sequence[Capture] = ()) -> ExecInfo:
    """A run for `outputs` (outputs of the graph, in any order) and `captures`. See Note [Exec info].

    Raises `ValueError` for a value that is no output of the graph, and for a captured value that no kernel returns.
    """
    for value in outputs:
        if value not in kernels.graph.outputs:
            raise ValueError(f"{value!r} is no output of the graph; its outputs are {list(kernels.graph.outputs)}")
    wanted = [*outputs, *(capture.value for capture in captures)]
    needed = _needed(kernels, wanted)
    makers: dict[Value, int] = {}
    for place in needed:
        kernel = kernels.kernels[place]
        # without the operands that a kernel returns, as an in-place operator does
        makers.update((value, place) for value in kernel.outputs if value is not None and value not in kernel.inputs())
    captured_at: dict[int, tuple[int, ...]] = {}
    for index, capture in enumerate(captures):
        if capture.value not in makers:
            raise ValueError(f"{capture.value!r} cannot be captured: it is an input, or within a compiled region")
        place = makers[capture.value]
        captured_at[place] = (*captured_at.get(place, ()), index)
    return ExecInfo(needed, tuple(outputs), tuple(captures), captured_at)


def _needed(kernels: KernelGraph, wanted: Sequence[Value]) -> tuple[int, ...]:
    values = set(wanted)
    storages = {value.storage for value in (*wanted, *kernels.graph.inputs)}
    needed: list[int] = []
    for place in reversed(range(len(kernels.kernels))):
        kernel = kernels.kernels[place]
        effect_only = not kernel.outputs and not kernel.mutates
        if (
            effect_only
            or not values.isdisjoint(kernel.outputs)
            or any(value.storage in storages for value in kernel.mutates)
        ):
            values.update(kernel.inputs())
            storages.update(value.storage for value in kernel.inputs())
            needed.append(place)
    return tuple(reversed(needed))


# ----- threads


@dataclass(frozen=True, slots=True)
class ThreadLocalState:
    """See Note [Thread-local state]."""

    grad_mode: bool
    inference_mode: bool
    num_threads: int

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Apply these settings to another thread, except those that `GraphTaskGuard` applies on every thread."""
        # the query also makes a new thread obey torch.set_num_threads; without it, MKL would use all cores
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        with torch.inference_mode(self.inference_mode):
            yield


class _Current(threading.local):
    task: GraphTask | None = None


_current = _Current()
_ids = itertools.count(1)


def current_graph_task_id() -> int:
    """The id of the run that this thread works for, or -1. For tools, and for kernels that inspect their run."""
    task = _current.task
    return -1 if task is None else task.id


def forget_current_task() -> None:
    """Let no run be this thread's current one: an interruption may have come before a run took that back."""
    _current.task = None


def current_graph_task_execution_order() -> list[Node]:
    """The nodes of the run that this thread works for, in the order in which one thread alone would run them.

    Raises `RuntimeError` outside a run.
    """
    return _require_current().execution_order()


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the run that this thread works for, on the thread that started it.

    Callbacks may add callbacks. If one raises, the run fails. Raises `RuntimeError` outside a run.
    """
    _require_current().final_callbacks.append(callback)


def _require_current() -> GraphTask:
    if _current.task is None:
        raise RuntimeError("no graph is run on this thread; call this from a kernel or a hook")
    return _current.task


class GraphTaskGuard:
    """Makes `task` this thread's current task, sets the task's grad mode and turns autocast off."""

    __slots__ = ("_task", "_last", "_grad_mode", "_autocast")

    def __init__(self, task: GraphTask) -> None:
        self._task = task

    # a class: a generator with three `with` blocks takes 2 µs more, of the 8 µs that a run of one node takes
    def __enter__(self) -> None:
        self._last = _current.task
        _current.task = self._task
        self._grad_mode = torch.is_grad_enabled()
        set_grad_enabled(self._task.thread_locals.grad_mode)
        # the public torch.autocast(enabled=False) covers one device type at a time
        self._autocast = WithoutAutocast()
        self._autocast.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._autocast.__exit__(*exception)
        set_grad_enabled(self._grad_mode)
        _current.task = self._last


# ----- one run


class GraphTask:
    """One run of a graph. Created on the thread that runs it, its `owner`.

    `exit_on_error`: raise a kernel's error at once instead of waiting for the kernels still running on other threads;
    those kernels may then use the inputs for a while longer.
    """

    __slots__ = (
        "id", "kernels", "exec_info", "frame", "owner", "reentrant_depth", "exit_on_error", "thread_locals",
        "has_error", "captured_vars", "final_callbacks", "leaf_streams", "_error", "_future",
        "lock", "changed", "outstanding_tasks", "ready", "not_ready", "uses", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        kernels: KernelGraph,
        exec_info: ExecInfo,
        frame: ExecutionFrame,
        grad_mode: bool = False,
        exit_on_error: bool = False,
    ) -> None:
        self.id = next(_ids)
        self.kernels = kernels
        self.exec_info = exec_info
        self.frame = frame
        self.owner = threading.get_ident()
        self.reentrant_depth: int = 0 if _current.task is None else _current.task.reentrant_depth + 1
        self.exit_on_error = exit_on_error
        # as there: taken from this thread, except for the grad mode, which the caller chooses
        self.thread_locals = ThreadLocalState(grad_mode, torch.is_inference_mode_enabled(), torch.get_num_threads())
        self.has_error = False
        self.captured_vars: list[torch.Tensor | None] = [None] * len(exec_info.captures)
        self.final_callbacks: list[Callable[[], None]] = []
        device = kernels.graph.device
        graphs = graph_device(device)
        self.leaf_streams = None if graphs is None else LeafStreams(graphs)
        self._error: BaseException | None = None
        self._future: Future[list[torch.Tensor]] | None = None

    @property
    def future(self) -> Future[list[torch.Tensor]]:
        """Completes with the outputs, or the error, of the run. Request it before the run starts."""
        if self._future is None:
            self._future = Future()
        return self._future

    def execution_order(self) -> list[Node]:
        """See `current_graph_task_execution_order`."""
        return [node for place in self.exec_info.needed for node in self.kernels.kernels[place].nodes]

    def capture(self, places: Sequence[int]) -> None:
        """Take the captures at these indices. See `Capture`."""
        for index in places:
            capture = self.exec_info.captures[index]
            # a copy: the run may still write the memory, or reuse it for another value
            captured = self.frame.values[capture.value.number].clone()
            for hook in capture.hooks:
                captured = hook(captured)
            self.captured_vars[index] = captured

    # ----- errors and the end

    def set_exception_without_signal(self, error: BaseException) -> None:
        """Store the first error, for the owner to raise. No further kernel starts from then on."""
        if not self.has_error:
            self.has_error = True
            self._error = error

    def set_exception(self, error: BaseException) -> None:
        """Complete the future with `error`. Called by the owner, which is about to raise the error.

        The task does not store the error: the task and the error's traceback would keep each other alive.
        """
        self.has_error = True
        if self._future is not None:
            self._future.set_exception(error)

    def raise_noted(self) -> None:
        """Raise the stored error, if there is one, and drop it from the task."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def mark_as_completed_and_run_post_processing(self, outputs: list[torch.Tensor]) -> None:
        """Join the streams, run the final callbacks, complete the future. Called by the owner."""
        if self.leaf_streams is not None:
            self.leaf_streams.join()
        for callback in self.final_callbacks:  # callbacks may add callbacks
            callback()
        if self._future is not None:
            self._future.set_result(outputs)

    # ----- for several threads

    def init_to_execute(self, uses: Sequence[int]) -> None:
        """Initialise the counts. `uses`: for each slot, the number of units that touch it."""
        self.lock = threading.Lock()  # guards the fields below, and `has_error`
        self.changed = threading.Condition(self.lock)  # only the owner waits on it
        self.outstanding_tasks = 0  # number of units that are ready or running
        self.ready: deque[Any] = deque()  # units that may run and that no thread has taken
        # units with some dependencies done -> the number of dependencies left; results so far wait in the frame
        self.not_ready: dict[int, int] = {}
        self.uses = list(uses)

    def completed(self) -> bool:
        return self.outstanding_tasks == 0 or (self.has_error and self.exit_on_error)

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Make the calling thread work for the task, with the owner's thread-local state."""
        with self.thread_locals.taken_over(), GraphTaskGuard(self):
            if self.leaf_streams is None:
                yield
            else:
                with self.leaf_streams.caller_current():
                    yield
