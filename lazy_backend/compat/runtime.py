"""All state that this process has once: where it is, what it holds, how long it lives.

In: nothing. Out: `PARTS`, one table of it; `reset`, a fresh runtime; `renew_after_fork`; and `describe`, for bug
reports. A test finds every object at module level that something writes to, and fails if it is not listed here.

Note [One runtime]
State of a process is an object at module level, in the room that it belongs to: the recorder reaches it as a global
(20 ns), where an attribute of a runtime object that is handed around would cost it two lookups per call. What makes one
runtime of these objects is this table. Nothing else resets them, or makes them whole in a forked child.
"""

from __future__ import annotations

import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lazy_backend import ir_cache, metrics
from lazy_backend.cache import process_locks
from lazy_backend.cache.weak_table import WeakTable
from lazy_backend.compat import torch_lazy
from lazy_backend.diagnostics import debug_log
from lazy_backend.diagnostics.history import history
from lazy_backend.distributed import order
from lazy_backend.execution import closures, disk_cache
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.artefacts.run_thread import run_thread
from lazy_backend.lowering.compilation.background import worker
from lazy_backend.lowering.interpreter.task import forget_current_task
from lazy_backend.lowering.plans.repair import known
from lazy_backend.lowering.serving.request_threads import request_threads
from lazy_backend.tensors import outside
from lazy_backend.tensors.contexts import contexts


class Life(Enum):
    """How long the state of a part lives."""

    RUN = "what a program recorded, ran and counted: fresh after a reset"
    DEVICES = "lazy devices: fresh after a reset with devices, which leaves earlier tensors unusable"
    USERS = "about objects that the program holds: gone with them"
    THREAD = "what a thread is doing: set and set back by the same call"
    FACTS = "what was looked up, interned or numbered: right for whoever asks next, so it is kept"
    PROCESS = "done once per process, such as registrations in PyTorch: kept"


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the state. `names` are those of objects at module level, or of functions that remember results."""

    module: str  # within the package
    names: tuple[str, ...]
    life: Life
    holds: str
    reset: Callable[[], object] | None = None  # makes what has the life `RUN` or `DEVICES` fresh
    after_fork: Callable[[], object] | None = None  # what a forked child does; the others keep what the parent had


# In the order in which parts are reset, and made whole after a fork: the compiler's process before locks are released,
# as its pipes are the parent's; and what is recorded before what was computed of it.
PARTS: tuple[Part, ...] = (
    Part("lowering.compilation.background", ("worker",), Life.PROCESS, "the compiler's process and its jobs",
         after_fork=worker.reset_after_fork),
    Part("lowering.artefacts.run_thread", ("run_thread",), Life.PROCESS, "the thread of runs without Python",
         after_fork=run_thread.reset_after_fork),
    Part("lowering.serving.request_threads", ("request_threads",), Life.PROCESS, "the runs that share threads",
         after_fork=request_threads.reset_after_fork),
    Part("cache.process_locks", ("_outermost", "_others", "_held"), Life.PROCESS,
         "the locks that are held during a fork", after_fork=process_locks.release_all),
    Part("tensors.contexts", ("contexts",), Life.DEVICES, "devices with their traces, tries and live tensors",
         reset=contexts.reset, after_fork=contexts.reset_after_fork),
    Part("execution.sync", ("executor",), Life.RUN, "computations, families of shapes, what limits and warnings count",
         reset=executor.reset),
    Part("metrics", ("_events", "_counters", "_metrics"), Life.RUN, "counters and metrics", reset=metrics.reset),
    Part("lowering.plans.repair", ("known",), Life.RUN, "patterns of operators that a compiler gets wrong",
         reset=known.forget),
    Part("execution.step_ends", ("step_ends",), Life.RUN, "optimizers whose steps end steps", reset=step_ends.reset),
    Part("tensors.outside", ("data_cache", "_counted_before"), Life.RUN, "host constants that were uploaded",
         reset=outside.reset),
    Part("execution.disk_cache",
         ("_opened", "untold_failures", "loaded_entries", "asked", "_expects_hits", "_was_told_of_rejection",
          "_earlier", "_before"),
         Life.RUN, "the caches on disk that are open, what was loaded into the process, and counts",
         reset=disk_cache.reset),
    Part("execution.closures", ("runner",), Life.RUN, "step closures that wait, and their thread",
         reset=closures.runner.forget, after_fork=closures.runner.reset_after_fork),
    Part("distributed.order", ("_orders",), Life.RUN, "the tensor that all collectives of a device write to",
         reset=order.reset),
    Part("compat.torch_lazy", ("_graphs",), Life.RUN, "graphs of torch._lazy, by hash", reset=torch_lazy.forget_graphs),
    Part("diagnostics.debug_log", ("_refused",), Life.RUN, "files that could not be written",
         reset=debug_log.forget_refused),
    Part("diagnostics.history", ("history",), Life.RUN, "records of syncs, compiles and waits", reset=history.reset),
    Part("lowering.interpreter.task", ("_current",), Life.RUN, "the run that a thread works for",
         reset=forget_current_task),
    # ----- not reset
    Part("settings", ("config",), Life.PROCESS, "the settings, which are the user's"),
    Part("settings", ("_watchers",), Life.PROCESS, "what is called when a setting changes"),
    Part("compat.installation", ("_library",), Life.PROCESS, "operators registered for the lazy device"),
    Part("ports.port", ("ports", "version"), Life.FACTS, "which ports fit this PyTorch"),
    Part("ports.port", ("replaced",), Life.PROCESS, "what was replaced in PyTorch"),
    Part("ports.native_code", ("library", "has_message", "shims", "_thread_setters"), Life.FACTS,
         "what PyTorch has for C++"),
    Part("ports.replacements.inductor", ("cuda_driver",), Life.FACTS, "the version of CUDA that the driver is for"),
    Part("ports.hooks", ("from_numpy", "has_torch_function", "run_backward", "set_hyperparameter"), Life.THREAD,
         "functions of PyTorch that others stand for while a captured body runs"),
    Part("ports.replacements.inductor_patches", ("_put_in_place",), Life.PROCESS, "changes of Inductor"),
    Part("ports.replacements.inductor_patches", ("_may_overlap", "_is_check"), Life.THREAD,
         "whether a compile is ours"),
    Part("ports.replacements.inductor_patches", ("_stored_sums",), Life.USERS, "names of sums, by kernel of Inductor"),
    Part("ports.replacements.moving", ("_thread",), Life.THREAD, "whether a module is being converted"),
    Part("ports.replacements.collectives", ("_functional",), Life.PROCESS, "collectives in order"),
    Part("compat.torch_lazy", ("_installation",), Life.PROCESS, "what stands in for torch._lazy"),
    Part("ports.replacements.when_imported", ("_finder",), Life.PROCESS, "modules to change when they are imported"),
    Part("compat.device_streams", ("_entered", "_default"), Life.THREAD, "streams that a thread has entered"),
    Part("errors.tracebacks", ("_refusal_of", "_watch_the_end_of_the_program"), Life.PROCESS, "what is done once"),
    Part("errors.sites", ("_known",), Life.FACTS, "files that are ours or PyTorch's"),
    Part("errors.sites", ("_purpose",), Life.THREAD, "what a read is for"),
    Part("metrics", ("_sources",), Life.PROCESS, "counters that are computed when read"),
    Part("metrics.names", ("_pattern", "entry_of", "own_name"), Life.FACTS, "names of counters"),
    Part("execution.computations", ("_policy",), Life.FACTS, "the latest settings, as a policy"),
    Part("ports.cpython", ("names_read",), Life.FACTS, "the names that code reads"),
    Part("replay.reachable", ("is_installed",), Life.FACTS, "which modules are installed packages"),
    Part("replay.unseen_reads", ("_is_file_of_library",), Life.FACTS, "which files are of Python's library"),
    Part("replay.value_guard", ("_registered_with_pythons",), Life.FACTS, "classes that count as of Python's"),
    Part("execution.rules", ("per_thread",), Life.THREAD, "what a thread may do"),
    Part("integrations.attention_masks", ("leave_in_graph",), Life.PROCESS, "a change of transformers"),
    Part("precision.autocast_state", ("autocast_state",), Life.THREAD, "autocast, and the casts of weights"),
    Part("precision.casts", ("_library", "custom_casts"), Life.PROCESS, "kernels registered for autocast"),
    Part("recording.operators", ("_kept", "_traits", "scalar_list_ops", "float_shaped_ops"), Life.FACTS,
         "what operators are like"),
    Part("recording.record", ("_handlers", "_handlers_of", "_recorded_alike", "_run_alike", "_arriving", "INSTALLED"),
         Life.PROCESS, "who handles each operator"),
    Part("floats.formulas", ("traced_integer",), Life.FACTS, "the class of integers that are followed"),
    Part("recording.attention", ("_chosen",), Life.FACTS, "kernels of attention that PyTorch chose"),
    Part("recording.native", ("native_recorder", "_SOURCE"), Life.PROCESS, "the recorder in C++"),
    Part("recording.sparse_operators", ("_handlers",), Life.PROCESS, "who handles operators on sparse tensors"),
    Part("replay.accounts", ("_accounts",), Life.USERS, "what replays of captured functions gain"),
    Part("replay.captured_state", ("watches",), Life.THREAD, "what watches the bodies that run as written"),
    Part("tensors.bodies", ("running",), Life.THREAD, "bodies of captured functions that run as written"),
    Part("tensors.generators", ("_known",), Life.USERS, "lazy generators"),
    Part("lowering.artefacts.environment", ("processor", "lowering_code", "compiler_variables"), Life.FACTS,
         "what keys depend on and no program changes"),
    Part("lowering.artefacts.environment", ("table", "_switched", "_reads", "_asked"), Life.FACTS,
         "the table of what keys depend on, which a registered device adds to"),
    Part("lowering.artefacts.run_thread", ("available_cores",), Life.FACTS, "cores that this process may use"),
    Part("lowering.checks.refusals", ("_library", "require"), Life.PROCESS, "an operator of ours"),
    Part("lowering.collectives.agreement", ("agreements",), Life.USERS, "what ranks have told each other"),
    Part("lowering.collectives.agreement", ("_announced",), Life.THREAD, "what a thread has announced"),
    Part("lowering.collectives.groups", ("group_numbers",), Life.FACTS, "process groups by number"),
    Part("lowering.collectives.communication", ("_libraries", "collective", "_reductions"), Life.PROCESS,
         "the operators that graphs communicate by"),
    Part("lowering.collectives.communication", ("_names",), Life.FACTS, "collectives by the names of their operators"),
    Part("lowering.collectives.under_way", ("under_way",), Life.USERS, "communication that was begun, not finished"),
    Part("lowering.collectives.communication", ("communicating",), Life.THREAD, "whether a collective is ours"),
    Part("lowering.collectives.conversation", ("joined",), Life.THREAD, "what a trial hears in place of other ranks"),
    Part("lowering.compilation.cpp_units", ("_parsed",), Life.FACTS, "headers that are worth compiling"),
    Part("lowering.compilation.instructions", ("_refused", "try_instructions"), Life.FACTS, "the processor's"),
    Part("lowering.device_graphs.launcher", ("launches",), Life.USERS, "runs that are launched as one graph"),
    Part("lowering.devices.registration", ("backing_devices", "default_backing", "_installed"), Life.PROCESS,
         "what each device offers"),
    Part("lowering.devices.cuda", ("CUDA", "_graph_device"), Life.PROCESS, "what CUDA offers"),
    Part("lowering.devices.cpu", ("CPU",), Life.PROCESS, "what the CPU offers"),
    Part("lowering.interpreter.layout", ("_out_variant",), Life.FACTS, "operators that write into given memory"),
    Part("lowering.interpreter.task", ("_ids",), Life.FACTS, "the number of the next run"),
    Part("lowering.ir.graph", ("_metas",), Life.FACTS, "geometries, each once"),
    Part("lowering.ir.graph", ("_registered",), Life.FACTS, "operators of the program's own, by name"),
    Part("lowering.ir.optimizers", ("_library", "undo_if"), Life.PROCESS, "an operator of ours"),
    Part("lowering.ir.passes", ("_watchers",), Life.PROCESS, "what is told of graph passes"),
    Part("lowering.ir.program", ("SLOTS", "INPUTS"), Life.FACTS, "tokens, each once"),
    Part("ports.fake_tensors", ("_library",), Life.PROCESS, "fake kernels for operators that PyTorch has none for"),
    Part("lowering.ir.rng", ("_library", "_seeded_ops"), Life.PROCESS, "operators of ours that take a seed"),
    Part("lowering.ir.rng", ("_generators", "_source"), Life.THREAD, "where a thread draws from"),
    Part("lowering.checks.kernel_calls", ("_library", "_kernel_ops", "_originals"), Life.PROCESS,
         "operators of ours that call kernels of ATen's"),
    Part("lowering.ir.schema", ("schema_of",), Life.FACTS, "schemas"),
    Part("lowering.ir.windows", ("without_out",), Life.FACTS, "operators without `out`"),
    Part("lowering.plans.cached_computation", ("_numbers",), Life.FACTS, "the number of the next computation"),
    Part("lowering.plans.profiling", ("_compiling",), Life.USERS, "graphs whose compile is under way"),
    Part("lowering.products.product_timing", ("_onednn", "_is_faster"), Life.FACTS, "how fast libraries multiply"),
    Part("lowering.recurrent.layer_operators", ("define_recurrent", "recurrent_operator"), Life.PROCESS,
         "operators of ours: a recurrent layer and its backward"),
    Part("lowering.recurrent.layer_operators", ("workspace_size",), Life.FACTS, "bytes that oneDNN keeps of a layer"),
    Part("cache.scratch", ("_swept_by",), Life.FACTS, "the process that has swept"),
)  # fmt: skip


def reset(devices: bool = False) -> None:
    """A fresh runtime, as after the import: what was done before is not seen by what comes next.

    Pending calls are run first. Devices and their tensors stay, unless `devices`: then there is none, and tensors made
    before must not be used any more.
    """
    contexts.current = 0
    ir_cache.reset()
    for part in PARTS:
        if part.reset is not None and (devices or part.life is not Life.DEVICES):
            part.reset()


def renew_after_fork() -> None:
    """Make the runtime of a forked child whole: threads, runs under way and the compiler stayed with the parent.

    A thread of the parent may have held the lock of a table, which nobody would release here. The tables themselves are
    whole: what their locks guard is stored by one C call each.
    """
    for part in PARTS:
        if part.after_fork is not None:
            part.after_fork()
    for part in PARTS:
        if part.after_fork is None:
            for _, value in _objects(part):
                _renew_locks(value, 3)


def _renew_locks(value: Any, depth: int) -> None:
    for name, inner in _attributes(value) if _is_ours(value) else ():
        if type(inner) is type(threading.RLock()) and not process_locks.has(inner):
            setattr(value, name, threading.RLock())
        elif depth:
            _renew_locks(inner, depth - 1)


# ----- what is there


def describe() -> dict[str, dict[str, Any]]:
    """What every part holds now, by its place: plain values, and for tables the number of their entries."""
    return {name: values for name, _, values in listed()}


def listed() -> list[tuple[str, str, dict[str, Any]]]:
    """The place of each object, what it is for, and what it holds. Modules that nobody has imported are left out."""
    found = []
    for part in PARTS:
        for name, value in _objects(part):
            values: dict[str, Any] = {}
            _add(values, "", value, 3)
            found.append((f"{part.module}.{name}", part.holds, values))
    return found


def _objects(part: Part) -> Iterator[tuple[str, Any]]:
    module = sys.modules.get(f"lazy_backend.{part.module}")
    return ((name, getattr(module, name)) for name in part.names if module is not None)


def _add(found: dict[str, Any], path: str, value: Any, depth: int) -> None:
    """Add what an object holds to `found`; functions, locks, threads and times say nothing."""
    if isinstance(value, bool | int | str | Enum):
        found[path] = str(value) if isinstance(value, Enum) else value
    elif hasattr(value, "cache_info"):
        found[path] = value.cache_info().currsize
    elif isinstance(value, WeakTable):
        found[path] = len(list(value))
    elif isinstance(value, Collection | deque):
        found[path] = len(value)
    elif _is_ours(value) and depth:
        for name, inner in _attributes(value):
            _add(found, f"{path}.{name}" if path else name, inner, depth - 1)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("lazy_backend") and not isinstance(value, types.FunctionType)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    names = {*getattr(value, "__dict__", ()), *slots}
    return ((name, getattr(value, name)) for name in sorted(names) if hasattr(value, name))
