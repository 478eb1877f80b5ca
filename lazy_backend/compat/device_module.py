"""The device module: what `torch.get_device_module("lazy")` returns, and the installation into PyTorch."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from lazy_backend.cache import process_locks
from lazy_backend.compat import pytorch
from lazy_backend.compat.serialization import install_serialization
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import closures
from lazy_backend.execution.forgotten_steps import forgotten_steps
from lazy_backend.execution.sync import executor
from lazy_backend.recording import handlers as kernels
from lazy_backend.recording import record
from lazy_backend.recording.attention import install_attention
from lazy_backend.recording.recurrent import install_recurrent
from lazy_backend.recording.sparse_operators import install_sparse
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import Device, context_of, contexts
from lazy_backend.tensors.generators import LazyGenerator
from lazy_backend.tensors.tensor import LazyTensor

# Seconds that interpreter exit waits for a run under way before it abandons it.
_EXIT_TIMEOUT = 30.0


class _CurrentDevice:
    """`torch.lazy.device(i)`: what `"lazy"` without an index means, for a block."""

    @hide_internals
    def __init__(self, device: Device) -> None:
        self._index = context_of(device).index
        self._before = 0

    def __enter__(self) -> None:
        self._before, contexts.current = contexts.current, self._index

    def __exit__(self, *error: object) -> None:
        contexts.current = self._before


class DeviceModule:
    """`torch.lazy`: the functions torch expects of a device module."""

    __name__ = "torch.lazy"

    @staticmethod
    def is_available() -> bool:
        """Always True: without CUDA the CPU is behind the lazy device."""
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        """Lazy devices: one per CUDA device, or `config.num_devices` on the CPU."""
        return contexts.device_count()

    @staticmethod
    def current_device() -> int:
        """Index of the device that `"lazy"` without an index means."""
        return contexts.current

    device = _CurrentDevice

    @staticmethod
    @hide_internals
    def set_device(device: Device) -> None:
        """What `"lazy"` without an index means from now on. Raises `DeviceError` if there is no such device."""
        contexts.current = context_of(device).index

    @staticmethod
    @hide_internals
    def synchronize(device: Device = None) -> None:
        """Run what is pending on `device` and wait until its work is done. Raises `ExecutionError` if a run failed."""
        context = context_of(device)
        executor.sync_live_tensors_graph([context], wait=True, cause="synchronize")
        if context.backing.type == "cuda":
            torch.cuda.synchronize(context.backing)

    @staticmethod
    def manual_seed(seed: int) -> None:
        """As `torch.manual_seed`: lazy random ops draw their seeds from torch's default generator."""
        contexts.set_rng_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def seed() -> int:
        """Seed that generator with a random number, which is returned."""
        return torch.default_generator.seed()

    @staticmethod
    def initial_seed() -> int:
        """The number that it was last seeded with."""
        return contexts.get_running_seed()

    @staticmethod
    @hide_internals
    def get_rng_state(device: Device = None) -> torch.Tensor:
        """The state of the generator that lazy random ops draw their seeds from: torch's default one."""
        context_of(device)
        return torch.get_rng_state()

    @staticmethod
    @hide_internals
    def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
        """Set what `get_rng_state` gives."""
        context_of(device)
        torch.set_rng_state(state)

    @staticmethod
    def is_in_bad_fork() -> bool:
        return False


_library: list[torch.library.Library] = []


def install() -> None:
    """Make `device="lazy"` work. Called once, by `import lazy_backend`."""
    if _library:
        return
    pytorch.refuse_second_backend()
    _library.append(torch.library.Library("aten", "IMPL"))
    LazyTensor.__torch_dispatch__ = staticmethod(record.dispatch)  # type: ignore[method-assign, assignment]
    kernels.install_handlers()
    kernels.install_factories(_library[0])
    install_attention(_library[0])
    install_recurrent(_library[0])
    install_sparse(_library[0])
    install_serialization()
    pytorch.support_foreach()
    pytorch.support_generators(LazyGenerator)
    pytorch.support_fused_optimizers()
    pytorch.support_capturable_optimizers()
    pytorch.export_to_dlpack()
    pytorch.norm_as_on_the_cpu()
    pytorch.pad_encoded_as_on_the_cpu()
    pytorch.collate_by_stacking()
    pytorch.keep_parameters_when_moved()
    pytorch.make_uninitialized_on_device()
    pytorch.finish_before_default_dtype_changes(_finish_everything)
    pytorch.explain_autocast()
    contexts.prepare = _prepare
    config.watch("force_fallback", _forget_all_paths)
    torch._register_device_module("lazy", DeviceModule)  # type: ignore[no-untyped-call]
    atexit.register(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
        )


def _finish_everything() -> None:
    executor.sync_live_tensors_graph(contexts.get_active_devices(), wait=True, cause="torch.set_default_dtype")


def _prepare() -> None:
    """Before the first lazy device is made: whoever imports this package and uses none is not to pay for it."""
    record.prepare()
    forgotten_steps.watch()


def _forget_all_paths() -> None:
    """Finish what was recorded and start afresh: the paths of a trie rest on which operators are recorded."""
    devices = contexts.get_active_devices()
    executor.sync_live_tensors_graph(devices, wait=False, cause="config.force_fallback")
    for context in devices:
        with context.lock:
            context.new_trace()


def _at_exit() -> None:
    """Finish what was scheduled, report what nobody was told of, never hang."""
    _refuse_while_shutting_down()
    closures.runner.close(_EXIT_TIMEOUT)
    for context in contexts.get_active_devices():
        if not context.queue.close(_EXIT_TIMEOUT):
            print(
                f"lazy_backend: a run on {context.device} did not finish within {_EXIT_TIMEOUT:.0f} s and was "
                "abandoned",
                file=sys.stderr,
            )
        error = context.locker.take_exception()
        if error is not None:
            print(f"lazy_backend: the last run on {context.device} failed:", file=sys.stderr)
            traceback.print_exception(error)


def _refuse_while_shutting_down() -> None:
    """From when the interpreter takes its modules apart, a lazy operator, as of a finalizer, raises.

    What it needs is no longer there, and PyTorch aborts the process where Python code fails in its midst then.
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
    """Let runs finish, and hold what locks there are: the child would wait forever for a thread that stayed behind."""
    for context in contexts.get_active_devices():
        context.hold_idle()
    process_locks.hold_all()


def _after_fork_in_parent() -> None:
    process_locks.release_all()
    for context in contexts.get_active_devices():
        context.lock.release()


def _after_fork_in_child() -> None:
    process_locks.release_all()
    contexts.reset_after_fork()
    closures.runner.reset_after_fork()
