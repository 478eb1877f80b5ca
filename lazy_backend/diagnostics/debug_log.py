"""The debug ladder: what `config.debug` (LAZY_DEBUG) prints, to standard error or to `config.debug_file`.

In: syncs, runs, compiles and passes as they happen. Out: lines. Level 1: one per sync, with an explanation unless the
sync was a hit, and one per compile. 2: also runs and the times of syncs. 3: also the program or graph before and after
each pass. 4: also the FX code that the compiler got.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.diagnostics.explanation import explain_record
from lazy_backend.diagnostics.history import SyncRecord
from lazy_backend.lowering.compilation.compiler import CompiledPlan
from lazy_backend.lowering.interpreter.layout import LayoutPlan
from lazy_backend.lowering.ir.canonical import PostOrderData
from lazy_backend.lowering.ir.program import Call, print_program
from lazy_backend.lowering.ir.shapes import SymbolicGraph
from lazy_backend.lowering.plans.cached_computation import Computation
from lazy_backend.lowering.plans.specialise import CompileReport
from lazy_backend.lowering.serving.constant_folding import ConstantFolder
from lazy_backend.settings import config

_lock = process_lock()


def write(text: str) -> None:
    """Print `text`, each line after `lazy_backend: `. If the file cannot be written, say so once, then use stderr."""
    marked = "".join(f"lazy_backend: {line}\n" for line in text.splitlines())
    name = config.debug_file
    with _lock:
        if name is None or name in _refused:
            sys.stderr.write(marked)
            return
        try:
            # opened at each write: several processes may write the same file, and the file may be moved meanwhile
            with open(name.replace("%p", str(os.getpid())), "a") as file:
                file.write(marked)
        except OSError as error:
            _refused.add(name)
            sys.stderr.write(f"lazy_backend: LAZY_DEBUG_FILE cannot be written: {error}\n{marked}")


_refused: set[str] = set()


def forget_refused() -> None:
    """Try again to write files that could not be written."""
    _refused.clear()


def print_sync(record: SyncRecord, computation: Computation | None) -> None:
    """Print a sync that is done, with its graph if there is one by now."""
    graph = "" if computation is None else f" {computation.name}"
    lines = [f"{record.device}{graph} {explain_record(record)}"]
    if config.debug >= 2:
        times = (("trace", record.trace_seconds), ("wait", record.wait_seconds), ("sync", record.sync_seconds))
        lines.append("    " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times))
    write("\n".join(lines))


def print_run(device: str, computation: Computation, plan: str, seconds: float, error: BaseException | None) -> None:
    """Print a run that has ended."""
    ended = "ran" if error is None else f"failed with {type(error).__name__}"
    thread = threading.current_thread().name
    write(f"{device} {computation.name} {ended}, {plan}, in {seconds * 1e3:.2f} ms on thread {thread}")


def describe_report(report: CompileReport) -> str:
    """One line for a compile report: a compile began, ended, failed or was declined, or a plan was found on disk."""
    what = {
        "started": "compiling in the background",
        "loaded": "found compiled on disk",
        "failed": "not compiled",
        "declined": "interpreted for good",
        "refused": "refused, as it computes something else than the interpreter",
        "repaired": "repaired, with a part of it left to PyTorch's kernels",
    }
    seconds = f" in {report.seconds:.1f} s" if report.seconds else ""
    many = " for many shapes" if report.symbolic else " whole" if report.after_blocks else ""
    error = "" if report.error is None else f": {type(report.error).__name__}"
    return f"a graph of {len(report.graph.nodes)} nodes: {what.get(report.stage, 'compiled')}{many}{seconds}{error}"


def print_compile(report: CompileReport) -> None:
    """Print a compile report and, at level 4, the code of the plan."""
    write(describe_report(report))
    if config.debug >= 4 and report.plan is not None:
        write(f"FX code of that graph:\n{_code_of(report.plan).strip()}")


def _code_of(plan: CompiledPlan) -> str:
    # floats that are inputs have no value in the code: 0.0 stands in for each
    return plan.code([plan.specialised.get(place, 0.0) for place in range(plan.graph.num_constants)])


def print_pass(name: str, stage: str, found: Any) -> None:
    if config.debug >= 3:
        write(f"{stage} {name}:\n{_text_of(found)}")


@functools.singledispatch
def _text_of(found: Any) -> str:
    return str(found)


@_text_of.register(list)
@_text_of.register(tuple)
def _(found: Sequence[Any]) -> str:
    if found and isinstance(found[0], Call):
        return print_program(found)
    return "\n".join(map(_text_of, found))  # regions and the nodes between them


@_text_of.register
def _(found: PostOrderData) -> str:
    return str(found.graph)


@_text_of.register
def _(found: SymbolicGraph) -> str:
    return str(found.graph)


@_text_of.register
def _(found: ConstantFolder) -> str:
    return str(found.remaining)


@_text_of.register
def _(found: LayoutPlan) -> str:
    return f"{found.graph}\n  {len(found.placed)} results in {len(found.buffer_bytes)} buffers"
