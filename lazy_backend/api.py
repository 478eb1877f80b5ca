"""The public functions, under the names of `torch._lazy`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.computation import what_it_is
from lazy_backend.diagnostics.history import history
from lazy_backend.diagnostics.progress import line_while_compiling
from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import closures, reads
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.artefacts.environment import see_devices
from lazy_backend.lowering.device_graphs.launcher import launches
from lazy_backend.lowering.devices.interface import BackingDevice
from lazy_backend.lowering.devices.registration import backing_of, register
from lazy_backend.lowering.plans import profiling
from lazy_backend.ports.trees import tree_map_only
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import Device, context_of, contexts
from lazy_backend.tensors.sparse_tensor import LazySparseTensor
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor


@hide_internals
def mark_step(device: Device = "", wait: bool = False) -> None:
    """End a step: run everything pending, then the step closures.

    `device`: one lazy device, as in `"lazy:1"`; `""` means every device that was used. `wait`: return only when the
    step has run; otherwise the run may continue in the background (`config.run_in_background`). Raises `ExecutionError`
    if an earlier run failed and its error was not raised yet, and the error of a step closure. Named after
    `torch._lazy.mark_step`.
    """
    step_ends.mark(_devices(device), wait)


sync = mark_step


def _devices(device: Device) -> list[DeviceContext]:
    if device is None or device == "":
        return contexts.get_active_devices()
    return [context_of(device)]


@hide_internals
def wait_for_compiles(timeout: float | None = None) -> bool:
    """Wait until no graph is being compiled in the background, as for a benchmark.

    Compiles that the next steps would request, for graphs that have recurred, are requested at once. `timeout`: in
    seconds, or None to wait as long as necessary; returns False if the wait timed out. Training need not wait: graphs
    are interpreted meanwhile. Finished plans are used from the next step on. A notebook shows a line meanwhile.
    """
    begin = perf_counter()
    with line_while_compiling() as change_line:
        finished = profiling.wait_for_compiles(timeout, asks=config.compile != "off", meanwhile=change_line)
    history.waited("wait_for_compiles()", user_site(), begin, finished)
    contexts.for_all_device_contexts(DeviceContext.restart_clock)
    return finished


@hide_internals
def register_device(device: BackingDevice | str) -> BackingDevice:
    """Let an accelerator run what is recorded, as "cpu" and "cuda" do. Returns what says how.

    device: the name of its type, if the defaults of `BackingDevice` are right for it, or an instance of a subclass. Its
    package must have told PyTorch of it before, by `torch.utils.rename_privateuse1_backend` and
    `torch._register_device_module`. Unless `config.device` names another, it backs "lazy" from then on.

    Raises `TypeError` for anything else, `ValueError` for a device of PyTorch's own and for one device of several, and
    `DeviceError` if PyTorch does not know the type, or if there are lazy tensors already.
    """
    found = BackingDevice(device) if isinstance(device, str) else device
    if not isinstance(found, BackingDevice):
        raise TypeError(f"expected the name of a device type or a BackingDevice, got {type(found).__name__}")
    _check_device_name(found.name)
    try:
        torch.get_device_module(found.name)
    except RuntimeError as error:
        raise DeviceError(
            f"PyTorch has no device module for {found.name!r}\n  Fix: import the device's package first, which calls "
            "torch.utils.rename_privateuse1_backend() and torch._register_device_module()"
        ) from error
    if contexts.get_active_devices():
        raise DeviceError("there are lazy tensors already, on another device\n  Fix: register before the first of them")
    register(found)
    see_devices()
    return found


def _check_device_name(name: str) -> None:
    """Raise `ValueError` for a name that PyTorch takes, but that is not the name of a type of device."""
    kind, colon, _ = name.partition(":")
    if kind == "lazy":
        raise ValueError(
            "'lazy' is the device that records, and cannot run what it recorded\n"
            "  Fix: pass the name of the accelerator's type, as torch.device(...).type gives it"
        )
    if colon:
        raise ValueError(
            f"{name!r} names one device, and a type is registered, with all devices that it has\n"
            f"  Fix: lazy_backend.register_device({kind!r}); 'lazy:0' is then '{kind}:0', 'lazy:1' is '{kind}:1'"
        )
    if name == "privateuseone":
        own = torch.device(name).type
        renamed = "the name that its package gave it" if own == name else repr(own)
        raise ValueError(
            "'privateuseone' is PyTorch's name for a device that has none of its own\n"
            f"  Fix: after torch.utils.rename_privateuse1_backend(), pass {renamed}"
        )


@hide_internals
def memory_stats(device: Device = None) -> dict[str, int]:
    """Bytes in use on the backing device of `device`.

    `"allocated"`: held by tensors. `"reserved"`: held by the allocator, with what it keeps for reuse. `"peak"`: the
    most that was allocated so far. `"graph_pools"`: of what is reserved, the memory of runs that are launched as one
    graph (`config.device_graphs`), on all devices. A CPU does not count: there is `"allocated"` alone, the bytes of
    live lazy tensors.
    """
    context = context_of(device)
    memory = backing_of(context.backing).memory(context.backing)
    if memory is None:
        return {"allocated": context.alive().bytes}
    return {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "peak": memory.peak,
        "graph_pools": launches.pool_bytes(),
    }


@hide_internals
def wait_device_ops(devices: Sequence[Device] | Device = None) -> None:
    """Wait until everything scheduled on `devices` (default: all) has run, and asynchronous step closures too.

    Raises `ExecutionError` for a run that failed. Does not sync: recorded calls stay pending.
    """
    if devices is None or isinstance(devices, torch.device | str | int):
        devices = [devices]
    chosen = [context for device in devices for context in _devices(device)] or contexts.get_active_devices()
    executor.wait_device_ops(chosen)
    closures.runner.wait()


@hide_internals
def sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[Device] = ()) -> None:
    """Compute `tensors`, and with them everything pending on their devices and on `devices`.

    Unlike `torch._lazy.sync_multi`, which computes only what `tensors` need, and later recomputes what other tensors
    share with them. Returns once the runs are scheduled.
    """
    contexts_of_tensors = {t._data.context for t in tensors if isinstance(t, LazyTensor)}
    contexts_of_tensors |= {t._context for t in tensors if isinstance(t, LazySparseTensor)}
    chosen = contexts_of_tensors | {context_of(d) for d in devices}
    executor.sync_live_tensors_graph(sorted(chosen, key=lambda context: context.index), False, "sync_multi")


@hide_internals
def get_tensor_id(tensor: torch.Tensor) -> int:
    """An id that is the same for tensors that stand for the same data, and differs for any other live tensor.

    Raises `TypeError` for a tensor that is not lazy.
    """
    return id(_lazy(tensor)._data)


@hide_internals
def to_cpu(tree: Any) -> Any:
    """A copy of `tree` (nested lists, tuples, dicts) with every lazy tensor on the CPU, after one sync per device.

    Shapes, dtypes and `requires_grad` are kept; the copies are leaf tensors, even if the originals are not.
    """
    found: list[LazyTensor] = []
    tree_map_only(LazyTensor, found.append, tree)
    copies = iter(reads.get_tensors_fused(found, "to_cpu"))
    copied = tree_map_only(LazyTensor, lambda tensor: next(copies).requires_grad_(tensor.requires_grad), tree)
    return tree_map_only(
        LazySparseTensor, lambda tensor: tensor.detach().cpu().requires_grad_(tensor.requires_grad), copied
    )


@hide_internals
def save(tree: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` a CPU copy of `tree`: the file names no lazy device. Further arguments are those of `torch.save`."""
    torch.save(to_cpu(tree), *args, **kwargs)


@hide_internals
def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` after the next `mark_step`, when reading `args` cuts nothing.

    `run_async`: call it on a separate thread, in order; at most `config.max_async_closures` closures wait. An error
    there is raised at the next `mark_step`, `add_step_closure` or `wait_device_ops`. Modelled on
    `torch/_lazy/closure.py`, which loses such errors.
    """
    executor.rules.check_allowed("add_step_closure")
    closures.runner.add(closure, args, run_async)


def manual_seed(seed: int) -> None:
    """Seed torch's default generator, from which lazy random ops draw. `torch.manual_seed` does the same."""
    contexts.set_rng_seed(seed)


class _Block(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
    """A context manager made from a generator; its exceptions show only the user's frames."""

    def __init__(self, make: Callable[[], Iterator[None]]) -> None:
        self._make = contextlib.contextmanager(make)
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    @hide_internals
    def __enter__(self) -> None:
        block = self._make()
        block.__enter__()
        self._entered.append(block)

    @hide_internals
    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


def step(
    device: Device = "", *, strict: bool = False, max_different_graphs: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """One step as a block: `mark_step` on entry, so that its graph holds nothing else, and on exit.

    `strict`: any read or call within the block that would cut the graph raises `StrictModeError`.
    `max_different_graphs`: raise `TooManyGraphsError`, with the explanation, when the steps of this line of code record
    more different programs. If the block raises, what was recorded is synced, step closures do not run, and the error
    propagates; if that sync fails too, its error is raised at the next sync or wait.
    """
    return _Block(lambda: _limited_step(device, strict, max_different_graphs))


def _limited_step(device: Device, strict: bool, max_different_graphs: int | None) -> Iterator[None]:
    mark_step(device)
    with executor.records.limiting(user_site(), max_different_graphs):
        yield from _step(device, strict)


def _step(device: Device, strict: bool) -> Iterator[None]:
    try:
        if strict:
            executor.aside.record_again()
        with executor.rules.strict() if strict else contextlib.nullcontext():
            yield
    except BaseException:
        metrics.increment("MarkStep")
        for context in _devices(device):
            try:
                executor.sync_live_tensors_graph([context], wait=False, cause="step")
            except LazyBackendError as error:
                context.locker.restore(error)
        raise
    mark_step(device)


def strict() -> contextlib.AbstractContextManager[None]:
    """A block in which any read or call that would cut the graph raises `StrictModeError` with the line and the cause.

    Applies to this thread; `config.strict` applies to all threads. `mark_step` and other explicit syncs are allowed.
    """
    executor.aside.record_again()
    return executor.rules.strict()


class _Switch(contextlib.AbstractContextManager["_Switch"]):
    """A mode that was switched: the end of a `with` block switches it back; without a block the mode stays."""

    def __init__(self, back: Callable[[], None]) -> None:
        self._back = back

    @hide_internals
    def __exit__(self, *raised: object) -> None:
        self._back()


@hide_internals
def eager_mode(enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Run every call at once on the backing device, in all threads: for debugging, and for loops that never repeat.

    `eager_mode(True)` lasts until `eager_mode(False)`; `with eager_mode():` until the block ends. Pending calls are run
    first. Values, errors and random numbers are the same as in lazy execution.
    """

    def switch(value: bool) -> None:
        executor.sync_live_tensors_graph(contexts.get_active_devices(), wait=True, cause="eager_mode")
        config.eager = value
        for context in contexts.get_active_devices():
            with context.lock:
                context.new_trace()

    before = config.eager
    switch(enabled)
    return _Switch(lambda: switch(before))


@hide_internals
def allow_execution(allowed: bool) -> contextlib.AbstractContextManager[Any]:
    """`allow_execution(False)`: from now on, in all threads, any sync or read raises `ExecutionNotAllowedError`.

    The error names the line; `mark_step` raises too. For code that must only record, such as building a graph to
    inspect. Lasts until `allow_execution(True)`, or the end of a `with` block. `strict()` refuses only unintended cuts.
    """
    executor.aside.record_again()
    before = executor.rules.allows_execution
    if not allowed and before:  # calls seen for the first time have run, so recording cannot continue their trace
        for context in contexts.get_active_devices():
            executor.end_computed(context)
            context.trace.at_once = None
    executor.rules.allows_execution = allowed
    return _Switch(lambda: setattr(executor.rules, "allows_execution", before))


def is_lazy(tensor: Any) -> bool:
    """Whether `tensor` is on the lazy device."""
    return isinstance(tensor, LazyTensor | LazySparseTensor)


def _lazy(tensor: torch.Tensor) -> LazyTensor:
    if not isinstance(tensor, LazyTensor):
        raise TypeError(f"expected a lazy tensor, got {what_it_is(tensor)}")
    return tensor
