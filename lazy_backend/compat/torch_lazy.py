"""Run programs written for `torch._lazy` on this backend, unchanged.

In: calls of the functions of `torch._lazy`. Out: calls of ours.
`torch._lazy` is a Python layer over C functions, which it looks up at each call. `install` replaces these C functions,
all of them and nothing else, so an earlier `from torch._lazy.metrics import counter_value` works too. Step closures,
device contexts, `extract_compiled_graph` and the list of factories are PyTorch's own code.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazy_backend import api, computation, debug, ir_cache, metrics
from lazy_backend.cache.computation_cache import BoundedTable
from lazy_backend.compat.extracted import ExtractedGraph, copies_of, extract
from lazy_backend.compat.lazy_core import check_no_second_backend
from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import is_ours
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.ports.replacements.lazy_tensor_core import CoreReplacement
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.tensor import wrap

_installation: CoreReplacement | None = None


def install() -> CoreReplacement:
    """Make `torch._lazy` and its submodules work on this backend; `torch._lazy.ts_backend.init()` then does nothing.

    A second call changes nothing. With `LAZY_BACKEND_TORCH_LAZY=1` in the environment, `import lazy_backend` installs
    by itself, so the program needs no change. Of LTC's own environment variables, `LTC_FORCE_FALLBACK`,
    `LTC_SAVE_TENSORS_FILE`, `LTC_SAVE_TENSORS_FMT` and `LTC_MAX_ASYNC_QUEUE` are honoured.
    Raises `DeviceError` if the C++ backend was initialised before.
    """
    global _installation
    check_no_second_backend()
    if _installation is None or not _installation.is_installed():
        _installation = CoreReplacement(_core_functions(), _ts_backend_functions())
        if "LTC_FORCE_FALLBACK" in os.environ:
            config.force_fallback = os.environ["LTC_FORCE_FALLBACK"]
    return _installation


def _core_functions() -> dict[str, Callable[..., Any]]:
    """The functions of `torch._lazy`'s first C module, with their replacements."""
    return _hidden(
        _mark_step=_mark_step,
        _wait_device_ops=lambda devices: api.wait_device_ops(devices),
        _sync_multi=_sync_multi,
        _get_tensor_id=api.get_tensor_id,
        _get_default_device_type=lambda: "lazy",
        _reset_metrics=metrics.reset,
        _counter_names=metrics.counter_names,
        _counter_value=metrics.counter_value,
        _metrics_report=metrics.metrics_report,
        _get_tensors_text=functools.partial(debug.dump_ir, format="text"),
        _get_tensors_backend=functools.partial(debug.dump_ir, format="backend"),
        _get_tensors_dot=debug.render_ir_graph,
        _get_graph_hash=_get_graph_hash,
        _get_force_fallback=config.get_force_fallback,
        _set_force_fallback=config.set_force_fallback,
        _clear_ir_cache=ir_cache.reset,
        _dump_ir_cache=ir_cache.dump,
        _set_reuse_ir=_set_reuse_ir,
        _get_symbolic_shape_mode=lambda: False,
        _set_symbolic_shape_mode=_set_symbolic_shape_mode,
    )


def _ts_backend_functions() -> dict[str, Callable[..., Any]]:
    """The same of its second C module."""
    return _hidden(
        _init=check_no_second_backend,
        _get_tensors_ts_device_data_node=_get_tensors_ts_device_data_node,
        _run_cached_graph=_run_cached_graph,
        _get_latest_computation_graph=_get_latest_computation_graph,
    )


def _hidden(**functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {name: hide_internals(function) for name, function in functions.items()}


# ----- syncs


def _mark_step(device: str = "", devices: Sequence[str] = (), wait: bool = True) -> None:
    path = os.environ.get("LTC_SAVE_TENSORS_FILE")
    if path:
        _save_graphs(path, os.environ.get("LTC_SAVE_TENSORS_FMT", "text"))
    api.mark_step(device, wait=wait)


def _sync_multi(
    tensors: Sequence[torch.Tensor], devices: Sequence[str], wait: bool = True, sync_ltc_data: bool = True
) -> None:
    api.sync_multi(tensors, devices)
    if wait:
        api.wait_device_ops()


def _save_graphs(path: str, form: str) -> None:
    """Append each device's pending graph to `path`, with the stack of the call, innermost frame first."""
    frames = [frame for frame in traceback.extract_stack() if not is_ours(frame.filename)]
    stack = "".join(f"  {frame.name} ({frame.filename}:{frame.lineno})\n" for frame in reversed(frames))
    with open(path, "a") as file:
        for context in contexts.get_active_devices():
            with context.lock:
                tensors = [wrap(storage) for storage in context.trace.live()[1]]
                if tensors:
                    graph = debug.render_ir_graph(tensors) if form == "dot" else debug.dump_ir(tensors, form)
                    file.write(f"Python Stacktrace:\n{stack}\n## BEGIN_GRAPH\n{graph}\n## END_GRAPH\n\n")


# ----- settings


def _set_reuse_ir(val: bool) -> None:
    """Do nothing: a call that was recorded before is always recognised and allocates no node."""


def _set_symbolic_shape_mode(val: bool) -> None:
    if val:
        raise LazyBackendError(
            "the symbolic shape mode of torch._lazy has no counterpart here: operators whose result's shape depends on "
            "values run at once\n  leave it off; sizes that vary from step to step need no mode"
        )


# ----- graphs that run without being recorded

_graphs: BoundedTable[bytes, ExtractedGraph] = BoundedTable(lambda: int(config.computation_cache_size))


def forget_graphs() -> None:
    _graphs.clear()


def _get_graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    graph, _ = extract(tensors)
    key = graph.hash()
    _graphs.get_or_add(key, lambda: graph)
    return key


def _get_tensors_ts_device_data_node(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    _, sources = extract(tensors)
    return [id(source) for source in sources], copies_of(sources)


def _run_cached_graph(hash_str: bytes, graph_inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    def missing() -> ExtractedGraph:
        raise LazyBackendError(
            f"no graph with the hash {bytes(hash_str).hex()} is cached\n"
            "  ask for it with torch._lazy.computation.get_graph_hash, in this process"
        )

    return _graphs.get_or_add(hash_str, missing).run(graph_inputs)


def _get_latest_computation_graph() -> str:
    made = computation.get_cached_computations()
    if not made:
        raise LazyBackendError("no graph was made yet\n  it is when a program is synced for the second time")
    return str(max(made, key=lambda computation: computation.number).graph)
