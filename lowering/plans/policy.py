"""When and with which backend graphs are compiled, as the layers above decide."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Protocol

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCounts, Place
from lazy_backend.lowering.compilation.request import Backend


class ArtefactStore(Protocol):
    """Storage in which compiled graphs outlive the process."""

    def get(self, key: Key) -> bytes | None: ...

    def reject(self, reason: str) -> None: ...

    def put(self, key: Key, payload: bytes) -> bool: ...

    def place(self) -> Place | None: ...

    def count_elsewhere(self, counts: DiskCounts, last_error: str | None) -> None: ...


@dataclass(frozen=True, slots=True)
class FusionStrategy:
    """How many plans the shapes of one program get.

    `static`: plans for one shape each, before a symbolic plan is tried; `dynamic`: symbolic plans, wrong guesses
    included; `symbols`: sizes that may vary independently.
    Source: torch/csrc/jit/runtime/profiling_graph_executor_impl.h, `FusionStrategy`.
    """

    static: int = 1
    dynamic: int = 3
    symbols: int = 4


@dataclass(frozen=True, slots=True)
class CompilePolicy:
    """When and with which backend a graph is compiled. Passed as an argument, so that nothing here reads settings."""

    backend: Backend
    enabled: bool
    num_profiled_runs: int
    max_specializations: int
    max_compiled_nodes: int
    background: bool = False
    compile_after_operators: int = 0  # see Note [Small graphs wait]; not asked if no run is profiled
    store: ArtefactStore | None = None
    expects_hits: bool = False  # whether graphs are likely to be in `store`, and so looked for at once
    strategy: FusionStrategy = FusionStrategy()
    release_delay: float = math.inf  # seconds that a graph runs optimized before it is set aside
    compiler_idle: float = math.inf  # idle seconds after which the worker process is ended
    shares_blocks: bool = True  # see Note [Blocks compiled once]
    shares_threads: bool = False  # see Note [Threads follow requests]
    whole_after: float = math.inf  # seconds of runs in blocks; see Note [The whole graph after its blocks]
    verify: str = "off"  # or "once" or "always"; see Note [A plan is tried before it is used]


def at_once(backend: Backend) -> CompilePolicy:
    """Compile with `backend` before the first run, in this process, whatever the size; keep nothing."""
    return CompilePolicy(backend, True, num_profiled_runs=0, max_specializations=1, max_compiled_nodes=sys.maxsize)


class GraphTooLarge(RuntimeError):
    """A graph above the bound: compilers take far more than linear time, so a forgotten mark_step would hang."""
