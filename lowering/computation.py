"""A cached computation, and how a recorded path uses it.

In: a canonical graph and its key. Out: `Computation` (one per key) and `CachedComputation` (one per path and live set).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.cache.computation import Key
from lazy_backend.lowering.canonical import Parameter
from lazy_backend.lowering.compiler import Backend, backend_name
from lazy_backend.lowering.families import Family
from lazy_backend.lowering.ir import Graph
from lazy_backend.lowering.profiling import ProfilingGraphExecutor
from lazy_backend.lowering.specialise import CompileReport

_numbers = itertools.count(1)


class Computation:
    """One canonical graph with all its plans. Identity is equality."""

    __slots__ = ("key", "hash", "executor", "number")

    def __init__(
        self,
        key: Key,
        graph: Graph,
        report: Callable[[CompileReport], None],
        find_family: Callable[[Graph], Family] | None = None,
    ) -> None:
        self.key = key
        self.hash = key.hash_hex()
        self.executor = ProfilingGraphExecutor(graph, report, key, find_family)
        self.number = next(_numbers)

    @property
    def graph(self) -> Graph:
        """The canonical graph; made again from its text if it was set aside."""
        return self.executor.stored.get()

    @property
    def name(self) -> str:
        return f"graph #{self.number} {self.hash[:8]} ({self.executor.stored.num_nodes} nodes)"

    def __repr__(self) -> str:
        return f"Computation(#{self.number}, {self.hash[:8]}, {self.executor.stored.num_nodes} nodes)"


@dataclass(frozen=True, slots=True, eq=False)
class CachedComputation:
    """A computation bound to a path: which of a trace's inputs, constants and seeds it takes, in its order.

    `outputs`: for each output, its place among the storages that are alive, or -1 if nobody holds it; None if all are
    held, in order.
    """

    computation: Computation
    parameters: tuple[Parameter, ...]
    constants: tuple[int, ...]
    seeds: tuple[int, ...]
    outputs: tuple[int, ...] | None = None


# What compiled code depends on beyond the graph: a flag of the process that is switched in mid-run must not reach a
# computation compiled before.
Environment = tuple[Any, ...]
ENVIRONMENT_NAMES = ("backend", "deterministic algorithms", "float32 matmul precision", "default dtype", "threads")


def environment(backend: Backend | None) -> Environment:
    """The process's settings that a key depends on, as they are; without a backend graphs are interpreted.

    Every sync asks for it: 0.5 µs.
    """
    return (
        backend,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.get_num_threads(),  # compiled kernels have arrays with one place for each
    )


def make_key(graph: Graph, settings: Environment) -> Key:
    """The exact key of `graph` under these settings."""
    backend, deterministic, precision, dtype, _ = settings
    parts = (
        ("torch", torch.__version__),
        ("backend", "interpreted" if backend is None else backend_name(backend)),
        ("device", str(graph.device)),
        ("deterministic", str(deterministic)),
        ("matmul_precision", precision),
        ("default_dtype", str(dtype)),
    )
    return Key((*parts, *_capability(graph.device), ("graph", graph.text())))


def _capability(device: torch.device) -> tuple[tuple[str, str], ...]:
    """What the device can do; asked for only when a graph is new."""
    if device.type != "cuda":
        return (("capability", torch.backends.cpu.get_cpu_capability()), ("threads", str(torch.get_num_threads())))
    properties = torch.cuda.get_device_properties(device)
    return (
        ("capability", f"{properties.name} {properties.major}.{properties.minor}"),
        ("tf32", f"{torch.backends.cuda.matmul.allow_tf32} {torch.backends.cudnn.allow_tf32}"),
    )
