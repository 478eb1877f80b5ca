"""The composition root: installs the backend in PyTorch and connects its parts. Called once, by `import lazy_backend`.

In: nothing. Out: a working `device="lazy"`, callbacks between packages, and handlers for exit and fork. Importing a
module of this package registers nothing (except `dynamo`): everything is registered here, in this order.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import lazy_backend_autoload as first_use
from lazy_backend import metrics
from lazy_backend.archives.transfer import take_entry, used_entries
from lazy_backend.cache import process_locks
from lazy_backend.compat import device_streams, lazy_core, mask_checks
from lazy_backend.compat.advice import advise
from lazy_backend.compat.device_module import DeviceModule
from lazy_backend.compat.runtime import listed, renew_after_fork
from lazy_backend.compat.serialization import install_serialization
from lazy_backend.diagnostics.debug_log import print_pass
from lazy_backend.diagnostics.history import history
from lazy_backend.distributed import c10d, fsdp
from lazy_backend.distributed.data_parallel import BucketReducer, broadcasting, registering
from lazy_backend.distributed.exchange import batching, exchanging
from lazy_backend.distributed.order import finish_group, in_order
from lazy_backend.errors.sites import user_site
from lazy_backend.execution import closures, disk_cache
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.collectives.agreement import agreements
from lazy_backend.lowering.compilation.background import worker
from lazy_backend.lowering.device_graphs.launcher import launches
from lazy_backend.lowering.ir.passes import watch_passes
from lazy_backend.ports.dispatcher import import_what_dispatch_imports
from lazy_backend.ports.port import check_version, ports_off, renew_imported_names
from lazy_backend.ports.replacements import bundles, collectives, functions, mixed_precision, moving, optimizing
from lazy_backend.precision import autocast
from lazy_backend.precision.casts import custom_casts
from lazy_backend.precision.grad_scaler import maybe_step
from lazy_backend.recording import handlers, record
from lazy_backend.recording.attention import install_attention
from lazy_backend.recording.native import native_recorder
from lazy_backend.recording.recurrent import install_recurrent
from lazy_backend.recording.recurrent_cells import install_cells
from lazy_backend.recording.sparse_operators import install_sparse
from lazy_backend.replay import accounts
from lazy_backend.settings import config
from lazy_backend.tensors import outside
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.generators import LazyGenerator
from lazy_backend.tensors.outside import quantized_error
from lazy_backend.tensors.sparse_tensor import LazySparseTensor
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean
from lazy_backend.tensors.uninitialized import UninitializedLazyBuffer, UninitializedLazyParameter, moved

# Seconds that interpreter exit waits for a run under way before abandoning the run.
_EXIT_TIMEOUT = 30.0

_library: list[torch.library.Library] = []


def install() -> None:
    """Make `device="lazy"` work. Called once, by `import lazy_backend`."""
    if _library:
        return
    check_version()
    lazy_core.refuse_second_backend()
    first_use.put_hooks()  # no entry point did with TORCH_DEVICE_BACKEND_AUTOLOAD=0
    _library.append(torch.library.Library("aten", "IMPL"))
    LazyTensor.__torch_dispatch__ = record.INSTALLED  # type: ignore[method-assign, assignment]
    handlers.install_handlers()
    handlers.install_factories(_library[0])
    install_attention(_library[0])
    install_recurrent(_library[0])
    install_cells(_library[0])
    install_sparse(_library[0])
    install_serialization()
    bundles.join_compiler_bundles("lazy_backend", used_entries, take_entry)
    _replace()
    advise()
    mask_checks.install()
    c10d.install()
    fsdp.install()
    contexts.prepare = _prepare
    config.watch("force_fallback", _begin_new_traces)
    config.watch("device_graphs", _switch_device_graphs)
    _switch_device_graphs()
    config.watch("overlap_collectives", _begin_new_traces)
    config.watch("mark_steps", step_ends.follow_settings)
    config.watch("max_trace_length", step_ends.follow_settings)
    config.watch("max_pending_bytes", step_ends.follow_settings)
    config.watch("strict", executor.aside.record_again)
    config.watch("step_aside", executor.aside.record_again)
    executor.aside.told = native_recorder.note_step
    _wire()
    atexit.register(worker.close)
    atexit.register(_at_exit)  # runs before `worker.close`: the last registered runs first
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=renew_after_fork)
    renew_imported_names()
    first_use.take_offers(DeviceModule)


def _replace() -> None:
    """Replace what in PyTorch does not know the device."""
    optimizing.support_foreach(LazyTensor)
    optimizing.support_fused()
    optimizing.support_capturable()
    optimizing.support_grad_scaler(maybe_step)
    functions.support_generators(LazyGenerator)
    functions.export_to_dlpack(LazyTensor)
    functions.norm_as_on_the_cpu(LazyTensor)
    functions.pad_encoded_as_on_the_cpu(LazyTensor)
    functions.collate_by_stacking(LazyTensor)
    functions.finish_before_default_dtype_changes(functools.partial(_finish_everything, "torch.set_default_dtype"))
    functions.finish_before_profiled_steps_end(functools.partial(_finish_everything, "a step of the profiler"))
    functions.support_streams(Event=device_streams.Event, Stream=device_streams.Stream)
    kinds = moving.LazyKinds(
        LazyTensor,
        LazySparseTensor,
        ("_data", "_real", "_context", "_parts"),
        UninitializedLazyParameter,
        UninitializedLazyBuffer,
        moved,
        quantized_error,
    )
    moving.keep_parameters_when_moved(kinds)
    moving.make_uninitialized_on_device(kinds)
    mixed_precision.support_autocast(autocast.FUNCTIONS, autocast.is_available, autocast.entering, autocast.leaving)
    mixed_precision.support_checkpoints(autocast.restored_by_checkpoint)
    mixed_precision.support_custom_functions(autocast.also_for_lazy, autocast.cast_as_backing)
    mixed_precision.support_custom_operators(
        custom_casts.add, autocast.registered_by_name, autocast.registered_by_method, autocast.cast_as_backing
    )
    collectives.order_collectives(in_order, finish_group)
    collectives.support_exchanges(exchanging, batching)
    collectives.name_backend_of_lazy(contexts.backing_type)
    collectives.support_data_parallel(BucketReducer, registering, broadcasting)
    collectives.support_fully_shard()
    collectives.support_random_dtensors(contexts.backing_type, run_clean)
    functions.script_operators_as_before()


def _wire() -> None:
    """Connect packages that must not import each other: counters, state shown in reports, and the watcher of passes."""
    for source in (
        metrics.Source(Counter, history.clear),
        metrics.Source(contexts.read_counters, contexts.reset_counters),
        metrics.Source(outside.read_counters, outside.reset_counters),
        metrics.Source(disk_cache.read_counters, disk_cache.reset_counters),
        metrics.Source(launches.read_counters, launches.reset_counters),
    ):
        metrics.add_source(source)
    agreements.site_of_call = user_site
    history.alive = contexts.alive
    history.alive_by_line = contexts.live_by_line
    history.sources["computations"] = executor.computations.describe
    history.sources["live tensors"] = contexts.all_live_by_line
    history.sources["disk cache"] = disk_cache.describe
    history.sources["captured"] = accounts.describe
    history.sources["runtime"] = listed
    history.sources["stepping aside"] = contexts.describe_aside
    history.sources["ports off"] = ports_off
    watch_passes(print_pass)


def _finish_everything(cause: str) -> None:
    executor.sync_live_tensors_graph(contexts.get_active_devices(), wait=True, cause=cause)


def _switch_device_graphs() -> None:
    launches.enabled = config.device_graphs == "auto"
    if not launches.enabled:
        launches.release()


def _prepare() -> None:
    """Prepare for the first lazy device, just before it is made: merely importing this package should cost nothing."""
    import_what_dispatch_imports()
    record.prepare()
    autocast.follow_backing_device()
    step_ends.watch()


def _begin_new_traces() -> None:
    """Sync what was recorded and begin new traces, at the roots of the settings that hold now."""
    for context in contexts.get_active_devices():
        executor.begin_anew(context, "config.force_fallback")


def _at_exit() -> None:
    """Run what is recorded, finish scheduled runs, print errors that were never raised, and never hang."""
    _begin_everything("the end of the program")
    _refuse_while_shutting_down()
    closures.runner.close(_EXIT_TIMEOUT)
    native_recorder.end(_EXIT_TIMEOUT)
    for context in contexts.get_active_devices():
        if not context.queue.close(_EXIT_TIMEOUT) or not _is_over_within(_EXIT_TIMEOUT, context):
            print(
                f"lazy_backend: a run on {context.device} did not finish within {_EXIT_TIMEOUT:.0f} s and was "
                "abandoned",
                file=sys.stderr,
            )
        error = context.locker.take_exception()
        if error is not None:
            print(f"lazy_backend: the last run on {context.device} failed:", file=sys.stderr)
            traceback.print_exception(error)


def _begin_everything(cause: str) -> None:
    """Run what is recorded on each device, unless this thread may not, or another one is in a captured function."""
    if not executor.rules.is_refusing() and executor.rules.may_run():
        for context in contexts.get_active_devices():
            if context.body is None or context.body.ended:
                executor.sync_tensors_graph_internal(context, cause)


def _is_over_within(seconds: float, context: DeviceContext) -> bool:
    """Whether the run under way, if any, ends within so many seconds."""
    end = time.monotonic() + seconds
    while not context.locker.finish_if_over():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _refuse_while_shutting_down() -> None:
    """Make lazy operators raise once the interpreter tears down its modules, as when a finalizer calls one.

    The modules that the operator needs are gone by then, and PyTorch would abort the process if dispatch failed.
    """

    def dispatch(
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,  # globals are gone by then
        original: Callable[..., Any] = LazyTensor.__torch_dispatch__,
    ) -> Any:
        if is_finalizing():
            raise RuntimeError(
                "the interpreter is shutting down, and lazy tensors cannot be computed any more\n"
                "  do it before, as in a function that is registered by atexit"
            )
        return original(func, types, args, kwargs)

    LazyTensor.__torch_dispatch__ = staticmethod(dispatch)  # type: ignore[method-assign, assignment]


def _before_fork() -> None:
    """Run what is recorded, which the child would do again; wait for runs and hold all locks.

    The child would wait forever for a thread that exists only in the parent.
    """
    process_locks.hold_outermost()
    _begin_everything("a fork")
    for context in contexts.get_active_devices():
        context.hold_idle()
    process_locks.hold_others()


def _after_fork_in_parent() -> None:
    process_locks.release_all()
    for context in contexts.get_active_devices():
        context.lock.release()
