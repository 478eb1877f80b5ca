"""One scheduled run: the trace it was cut from, the storages it fills, and its outcome.

Note [Where a run happens]
On CUDA a run is scheduled on the device's own thread, and Python goes on recording the next step, unless it is launched
as one graph: that takes the host less time than to wake a thread, and to take turns with it at the GIL, so it happens
within the call that synced, which does not wait for the device. On the CPU there are three places, and locks, errors
and poisoning are the same in all of them:

- Beside recording, on a thread that never needs the GIL (Note [Runs beside recording]): runs of compiled code that
  leaves nothing to Python, if there are more cores than operators use threads. Whoever needs the results first hands
  them out. A loop that waits for each step at once gains nothing by that, which `Overlap` notices.
- On the device's thread: other runs that take longer than waking that thread, which needs the GIL from a thread that
  records, if operators use one thread. With more, that thread has an OpenMP team besides the main thread's; with more
  threads than cores, libgomp sleeps between parallel regions, and a GPT step took twice as long.
- Within the call that synced: all others, and those that the caller waits for.

`config.run_in_background` overrules this.
"""

from __future__ import annotations

import enum
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.cache.trie import TrieNode
from lazy_backend.diagnostics.debug_log import print_run
from lazy_backend.diagnostics.history import SyncRecord, history
from lazy_backend.errors import ExecutionError, LazyBackendError, PoisonedTensorError
from lazy_backend.lowering.artefacts.run_thread import available_cores
from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.collectives.agreement import agreements
from lazy_backend.lowering.compilation.compiler import CompiledRun
from lazy_backend.lowering.device_graphs.launcher import launches
from lazy_backend.lowering.device_graphs.run_order import with_runs
from lazy_backend.lowering.devices.registration import graph_device
from lazy_backend.lowering.ir.graph import TensorMeta, empty_of
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.lowering.ir.ranges import is_profiling, profiled
from lazy_backend.lowering.plans.cached_computation import CachedComputation
from lazy_backend.lowering.plans.profiling import ExecutionPlan
from lazy_backend.lowering.plans.trial import Trial
from lazy_backend.ports.cpython import from_signal_handler, pass_on_interruption
from lazy_backend.settings import config
from lazy_backend.tensors.locks import DeviceRun, Work
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, ViewData
from lazy_backend.tensors.tensor import backing_tensor
from lazy_backend.tensors.thread_state import run_clean

# Seconds. Shorter runs on the CPU do not happen on the device's thread.
_SHORT_RUN = 1.5e-3
# Seconds after which a waiting thread looks at what else has happened, such as Ctrl-C.
_LONGEST_WAIT = 0.05


class RunPlace(enum.Enum):
    """See Note [Where a run happens]."""

    WITHIN_CALL = enum.auto()
    DEVICE_THREAD = enum.auto()
    BESIDE = enum.auto()


@dataclass(slots=True)
class SyncTensorCollection:
    """What one sync of one device covers.

    The preparation relies on `cursor`, not on the context's trace, which a signal handler or a finalizer may replace.
    """

    context: DeviceContext
    cursor: TrieNode[Call | Cut]  # where the trace ends
    indices: tuple[int, ...]  # places of the live storages among the pending ones
    storages: list[LazyStorage]  # those storages, held strongly from here on
    cause: str
    site: str
    is_awaited: bool = False  # whether the caller waits for the values
    given_back: Sequence[LazyStorage] = ()  # what is no longer in memory after the trace
    hash: str = ""  # of the computation's key, once it is known
    is_new: bool = False  # whether neither the path nor its graph was known with this live set


@dataclass(slots=True, eq=False)
class Async(Work):
    """One scheduled run. Done by the device's thread, or by the first caller that waits. See Note [Interruption].

    `deliveries`: for each holder of a result, the function that hands it over and the new data. Done last to first.
    """

    collection: SyncTensorCollection
    parameters_data: list[TensorData]
    tensors_data: list[LazyStorage | None]  # per output; None where nothing holds it
    constants: Sequence[float]
    seeds: list[int]
    cached_computation: CachedComputation
    plan: ExecutionPlan
    record: SyncRecord | None = None
    place: RunPlace = RunPlace.WITHIN_CALL
    beside: CompiledRun | None = None  # at that place
    deliveries: list[tuple[Callable[[TensorData, Any], None], TensorData]] = field(default_factory=list)
    delivered: bool = False
    is_handed_out: bool = False  # what a run beside this thread has made
    below: DeviceRun | None = None
    error: BaseException | None = None
    interruption: BaseException | None = None
    collective_seconds: float = 0.0  # those that the plan took for communicating
    began: float = 0.0  # when the plan began
    seconds: float = 0.0  # that it took
    waited: float = 0.0  # seconds that somebody waited for it

    def __post_init__(self) -> None:
        Work.__init__(self)

    def makes(self, storage: object) -> bool:
        """Whether the value of `storage` comes from this run."""
        return any(one is storage for one in self.tensors_data)

    def start(self) -> None:
        """Do the deliveries, and put the run under way. May be interrupted, and called again."""
        while latest := self.deliveries[-1:]:
            deliver, data = latest[0]
            deliver(data, self)
            if self.deliveries and self.deliveries[-1][1] is data:  # no signal handler has done it all
                self.deliveries.pop()
        self.delivered = True
        context = self.collection.context
        if self.collection.given_back:
            self._give_back()
        context.locker.lock(self)
        if self.place is RunPlace.DEVICE_THREAD:
            context.queue.add(self.do)
            self.leave_to(context.queue)
        elif self.beside is not None:
            self._begin(self.beside)

    def _begin(self, beside: CompiledRun) -> None:
        """Begin a run beside this thread. May be interrupted, and done again."""
        if not beside.jobs and not self.done:
            try:
                inputs = None if beside.makes_inputs else self._plain_inputs()
                if inputs is None:
                    run_clean(lambda: beside.begin(self._inputs(), self.constants, self.seeds))
                else:
                    beside.begin(inputs, self.constants, self.seeds)
            except Exception as raised:
                pass_on_interruption(raised)
                if not beside.jobs:  # by a call that interrupted this one, and took what it needed
                    # the error comes again there, and is told as every other
                    self.place, self.beside = RunPlace.WITHIN_CALL, None
                    return
        self.parameters_data.clear()

    def _plain_inputs(self) -> list[torch.Tensor] | None:
        """The inputs if all are there, and none is a view: no operator makes them."""
        inputs: list[torch.Tensor] = []
        for data in self.parameters_data:
            tensor = data.tensor if type(data) is LazyStorage else None
            if tensor is None:
                return None
            inputs.append(tensor)
        return inputs

    def _inputs(self) -> list[torch.Tensor]:
        return [backing_tensor(data) for data in self.parameters_data]

    def _give_back(self) -> None:
        """See Note [Memory given back]. May be interrupted, and done again."""
        given_back = {storage: _moved(storage) for storage in self.collection.given_back}
        self.parameters_data = [
            data if (own := given_back.get(data.storage)) is None else _look(own, data) for data in self.parameters_data
        ]
        self.collection.context.given_back.forget(given_back)

    def wait(self) -> None:
        """Wait for this run. Raises what it raised, without taking it from the device's lock."""
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """See `Work`. What interrupts this wait does not interrupt a run beside this thread."""
        beside = self.beside
        if beside is not None and beside.jobs and not self.done and not self.is_beneath():
            start = perf_counter()
            while not beside.wait(_LONGEST_WAIT) and not self.done:
                pass
            self.waited = perf_counter() - start
        Work.join(self)

    def is_over(self) -> bool:
        """Whether `join` would not wait for another thread."""
        if self.done:
            return True
        beside = self.beside
        if beside is not None and beside.jobs:
            return beside.wait(0.0)
        return self.thread is None and self.queued is None

    def perform(self) -> None:
        """Compute and hand out the results.

        Raises no exception except Ctrl-C and the like, so that errors surface in the same way wherever the run happens.
        """
        start = perf_counter()
        self.interruption = None
        # finalizers on this thread would find results that are not there yet; they run after the run. On the device's
        # thread they are kept from running anything: pausing the collector there would pause it for all threads
        pauses = not self.collection.context.queue.is_here() and gc.isenabled()
        try:
            if pauses:
                gc.disable()
            if is_profiling():
                with profiled("run"), profiled(f"{self.cached_computation.computation.name}, {self.plan.kind}"):
                    run_clean(self._execute_in_order)
            elif self.plan.conforms and self.beside is not None and self.beside.only_hands_out:
                self._execute()  # no operator runs here, so no mode of the thread matters
            else:
                run_clean(self._execute_in_order)
        except Exception as raised:
            self.interruption = from_signal_handler(raised)
            if self.interruption is None:
                self.error = self._describe(raised)
        except BaseException as raised:
            self.interruption = raised
        finally:
            if pauses:
                gc.enable()
        if self.interruption is None or not self.is_repeatable():
            self._report(start)
        if self.interruption is not None:
            raise self.interruption

    def is_repeatable(self) -> bool:
        """Whether all that is left to do is to hand out what a run beside this thread has made."""
        return self.beside is not None and bool(self.beside.jobs) and not self.is_handed_out

    def finish(self) -> None:
        """Nothing waits for this run any more, and it keeps no tensor alive. What it did not compute is poisoned."""
        for storage in self.tensors_data:
            if storage is not None and storage.tensor is None and storage.error is None:
                storage.error = self.error or self._was_interrupted()
        self.parameters_data.clear()
        self.tensors_data.clear()
        self.collection.storages.clear()
        if self.beside is not None:
            self.beside.outputs.clear()
        self.collection.context.locker.unlock(self, self.error)

    def _execute_in_order(self) -> None:
        """`_execute`, whatever stream of the device this thread is on."""
        backing = self.collection.context.backing
        if backing.type == "cpu":
            self._execute()
        else:
            with_runs(backing, self._execute)

    def _execute(self) -> None:
        beside = self.beside
        if beside is not None and beside.jobs:
            outputs = self._results(beside)
            if not self.done:  # what interrupted this may have done it all
                self._deliver(outputs)
            self.is_handed_out = True
        elif isinstance(self.plan, Trial):
            self._computed(partial(self.plan.execute, deliver=self._deliver))
        else:
            self._deliver(self._computed(self.plan.execute))

    def _deliver(self, outputs: list[torch.Tensor]) -> None:
        """Give the results to the storages that wait for them. Empties the list."""
        plan = self.plan
        if plan.num_runs:
            plan.shortest_run = min(plan.shortest_run, self.seconds)
            if self.place is RunPlace.WITHIN_CALL:
                plan.overlap.note_within(self.seconds)
        plan.num_runs += 1
        # checking the layout takes 0.4 µs per result
        is_known = plan.conforms
        conforms = is_known or plan.kind.lays_out_alike
        storage = None
        try:
            for place, storage in enumerate(self.tensors_data):
                if storage is not None and storage.tensor is None:
                    storage.tensor = outputs[place] if is_known else conform(outputs[place], storage.meta)
                conforms = conforms and (is_known or (storage is not None and storage.tensor is outputs[place]))
                outputs[place] = None  # type: ignore[call-overload]
        finally:
            storage = None  # an interruption keeps this frame, and would keep the storage alive
        plan.conforms = conforms

    def _results(self, beside: CompiledRun) -> list[torch.Tensor]:
        """Those of a run beside this thread."""
        while not (beside.is_over or beside.wait(_LONGEST_WAIT)):
            pass
        outputs, ago, seconds = beside.results()
        if seconds:
            self.began, self.seconds = perf_counter() - ago, seconds
            self.plan.overlap.note(seconds, self.waited)
        return outputs

    def _computed(self, execute: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
        inputs = self._plain_inputs() or self._inputs()
        self.parameters_data.clear()
        self.began = perf_counter()
        collectives = self.cached_computation.computation.collectives
        if collectives is None:
            outputs = execute(inputs, self.constants, self.seeds)
        else:
            with agreements.announced(collectives) as announcement:
                outputs = execute(inputs, self.constants, self.seeds)
            self.collective_seconds = announcement.seconds
        self.seconds = perf_counter() - self.began
        return outputs

    def _report(self, start: float) -> None:
        """`start`: when this thread turned to the run."""
        is_beside = self.beside is not None and self.seconds > 0.0
        start, seconds = (self.began, self.seconds) if is_beside else (start, perf_counter() - start)
        failed = self.error is not None or self.interruption is not None
        counted = {"ExecuteComputation": 1}
        if failed:
            counted |= {"ExecuteFailed": 1}
        if self.beside is not None:
            counted |= {"ExecuteBeside": 1}
        metrics.observe_in_run(counted, ExecuteTime=seconds)
        if self.record is not None:
            history.ran(self.record, start, seconds, self.collective_seconds)
        if config.debug >= 2:
            device, computation = str(self.collection.context.device), self.cached_computation.computation
            print_run(device, computation, str(self.plan.kind), seconds, self.error or self.interruption)

    def _describe(self, raised: Exception) -> BaseException:
        if isinstance(raised, PoisonedTensorError):
            return raised
        hint = _hint_for_memory(raised)
        error = ExecutionError(f"{raised}\n  in {self._whereabouts()}{hint}")
        # this error's text includes that of a NodeError
        error.__cause__ = raised.__cause__ if isinstance(raised, NodeError) else raised
        return error

    def _was_interrupted(self) -> BaseException:
        error = ExecutionError(
            f"the run was interrupted by {type(self.interruption or KeyboardInterrupt()).__name__}\n"
            f"  in {self._whereabouts()}\n"
            "  results of this step are lost; what existed before it can be read, and the next step works"
        )
        error.__cause__ = self.interruption
        return error

    def _whereabouts(self) -> str:
        collection, computation = self.collection, self.cached_computation.computation
        return (
            f"{computation!r}, {self.plan.kind}, on {collection.context.device}\n"
            f"  synced at {collection.site or 'an unknown line'} ({collection.cause})"
        )


def _hint_for_memory(raised: Exception) -> str:
    """What to do if the device had no memory left. What can be given back is given back for the next run."""
    if not isinstance(raised, torch.OutOfMemoryError) and not isinstance(raised.__cause__, torch.OutOfMemoryError):
        return ""
    freed = launches.release()
    given_back = f"; {freed >> 20} MiB of launched graphs are free now" if freed else ""
    return (
        f"\n  the device has no memory left{given_back}. lazy_backend.memory_stats() says who has it; smaller batches, "
        'checkpointing, or config.device_graphs = "off" take less'
    )


def held_outputs(bound: CachedComputation, storages: Sequence[LazyStorage]) -> list[LazyStorage | None]:
    """The storage behind each output of a computation; None where nothing holds it."""
    if bound.outputs is None:
        return list(storages)
    return [storages[place] if place >= 0 else None for place in bound.outputs]


def _moved(storage: LazyStorage) -> LazyStorage:
    """Another storage with the memory of `storage`."""
    moved = LazyStorage(storage.context, None, None, storage.meta)
    moved.tensor, moved.error = storage.tensor, storage.error
    return moved


def _look(storage: LazyStorage, data: TensorData) -> TensorData:
    """What `data` is, over `storage`."""
    return storage if data.meta is storage.meta else ViewData(storage.context, None, None, data.meta, storage)


def conform(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """`tensor` with exactly the geometry that was recorded: users saw it, and views are made from it.

    Kernels and their fake versions agree on shapes; on strides they may differ, and then the tensor is copied.
    """
    if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
        raise LazyBackendError(
            f"internal error: a result was recorded as {meta} and computed as {tensor.dtype} {list(tensor.shape)}\n"
            "  a custom operator's fake kernel may be wrong; otherwise please report the program"
            " and what `python -m lazy_backend` prints"
        )
    if tensor.stride() == meta.stride and tensor.storage_offset() == meta.storage_offset and not tensor.is_conj():
        return tensor
    return empty_of(meta, tensor.device).copy_(tensor)


def place_of_run(
    context: DeviceContext, bound: CachedComputation, plan: ExecutionPlan, is_awaited: bool
) -> tuple[RunPlace, CompiledRun | None]:
    """Where a run of `plan` happens, and the run if that is beside recording. See Note [Where a run happens]."""
    setting = config.run_in_background
    is_forced = setting == "always"
    if setting == "never" or (is_awaited and not is_forced and context.backing.type == "cpu"):
        return RunPlace.WITHIN_CALL, None
    if bound.computation.collectives is None and not is_profiling():
        if not is_forced and not plan.overlap.pays():
            return RunPlace.WITHIN_CALL, None
        beside = plan.run_beside()
        if beside is not None and (is_forced or beside.num_threads < available_cores()):
            return RunPlace.BESIDE, beside
    is_long = torch.get_num_threads() == 1 and _SHORT_RUN < plan.shortest_run < math.inf
    # without streams of its own a device is in order on that of the caller's thread alone
    may_leave = is_long or (context.backing.type != "cpu" and graph_device(context.backing) is not None)
    if is_forced or (may_leave and not plan.kind.is_launched):
        return RunPlace.DEVICE_THREAD, None
    return RunPlace.WITHIN_CALL, None
