"""Inductor's functions for what it gets wrong, each in place of its own, where that has the defect.

In: a pass over graphs, and what tells whether two windows of memory overlap. Out: a block in which inductor compiles.
What is put in place does nothing outside of such a block. See Note [Reads before writes] and Note [Transposed sums into
memory], which say what the defects are, and Note [Code that does not compile].

Most of the functions only have inductor compute or copy more, or join less, which is right on every version. Two of
them repeat parts of what they replace. So these are put in place only of a source that is known to have the defect; a
source that is known to have none is left as it is, and for any other source the port is off.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from lazy_backend.ports.dispatcher import OpOverload
from lazy_backend.ports.port import Port, source_hash
from lazy_backend.ports.table import (
    CHECKS_FIRST,
    LATE_READS,
    READS_AFTER_WRITES,
    READS_OF_WHAT_IS_WRITTEN,
    STORED_TWICE,
    TRANSPOSED_SUMS,
    UNREAD_BUFFERS,
)
from lazy_backend.ports.trees import tree_map

aten = torch.ops.aten

# Size, stride, offset and dtype of a tensor in its buffer.
Window = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
MayOverlap = Callable[[Window, Window], bool]
IsCheck = Callable[[Any], bool]

PORTS = (
    READS_OF_WHAT_IS_WRITTEN,
    READS_AFTER_WRITES,
    TRANSPOSED_SUMS,
    LATE_READS,
    UNREAD_BUFFERS,
    STORED_TWICE,
    CHECKS_FIRST,
)

# Sources that have the defect: PyTorch 2.13, and for the first one 2.14.
_FUSABLE_WITH_DEFECT = ("9ce5df50", "3f8d5dc9")
_STORE_WITH_DEFECT = ("55151ced",)

# Of this thread, while inductor compiles for us.
_may_overlap: ContextVar[MayOverlap | None] = ContextVar("may_overlap", default=None)
_is_check: ContextVar[IsCheck | None] = ContextVar("is_check", default=None)


def _is_ours(port: Port) -> bool:
    return _may_overlap.get() is not None and port.obstacle() is None


@contextlib.contextmanager
def defects_mended(
    copy: Callable[[fx.Graph], None], files: tuple[str, ...], may_overlap: MayOverlap, is_check: IsCheck
) -> Iterator[None]:
    """A block in which inductor compiles right. `copy`: a pass before the lowering, whose code is in `files`.

    `is_check`: whether an operator checks values.
    """
    from torch._inductor import config

    _put_in_place()
    before = config.post_grad_custom_post_pass if LATE_READS.fits() else None
    passes = [] if before is None else list(before) if isinstance(before, list | tuple) else [before]
    # the pass is part of the keys of inductor's caches, and stands for the rest
    patch = {"post_grad_custom_post_pass": [*passes, _as_pass(copy, files)]} if LATE_READS.fits() else {}
    tokens = _may_overlap.set(may_overlap), _is_check.set(is_check)
    try:
        with config.patch(patch):
            yield
    finally:
        _may_overlap.reset(tokens[0])
        _is_check.reset(tokens[1])


def _as_pass(copy: Callable[[fx.Graph], None], files: tuple[str, ...]) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class CopyingPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            copy(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, *files)), tuple(port.obstacle() is None for port in PORTS)

    return CopyingPass()


@functools.cache
def _put_in_place() -> None:
    if READS_OF_WHAT_IS_WRITTEN.fits():
        from torch._inductor import inductor_prims, lowering

        # the operators that inductor's passes make of functional ones, and no others, write into memory that is still
        # read
        in_place = (aten.index_put_.default, inductor_prims._unsafe_index_put_, aten.copy_.default)
        for op in (*in_place, *lowering.inplace_foreach_ops):
            lowering.lowerings[op] = _lowering_that_reads_first(op, lowering.lowerings[op])
    if READS_AFTER_WRITES.fits():
        from torch._inductor.scheduler import Scheduler

        if source_hash(Scheduler.fusable_weak_dep) in _FUSABLE_WITH_DEFECT:
            READS_AFTER_WRITES.put(Scheduler, "fusable_weak_dep", _fusable(Scheduler.fusable_weak_dep))
    if CHECKS_FIRST.fits():
        from torch._inductor.scheduler import Scheduler

        CHECKS_FIRST.put(Scheduler, "compute_dependencies", _checks_first(Scheduler.compute_dependencies))
    if TRANSPOSED_SUMS.fits():
        from torch._inductor.codegen.cpp import CppTile2DKernel

        if source_hash(CppTile2DKernel.store) in _STORE_WITH_DEFECT:
            TRANSPOSED_SUMS.put(CppTile2DKernel, "store", _store_once(CppTile2DKernel.store))
    if UNREAD_BUFFERS.fits():
        from torch._inductor.loop_body import LoopBody

        for name in ("get_read_expr", "get_write_expr"):
            UNREAD_BUFFERS.put(LoopBody, name, _none_if_unused(getattr(LoopBody, name)))
    if STORED_TWICE.fits():
        from torch._inductor.codegen.cpp import CppVecKernel

        STORED_TWICE.put(CppVecKernel, "store_reduction", _store_by_another_name(CppVecKernel.store_reduction))


# ----- the lowering


def _lowering_that_reads_first(op: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of an operator that writes its first operand, a tensor or a list of tensors."""

    @functools.wraps(lower)
    def lower_reading_first(written: Any, *args: Any, **kwargs: Any) -> Any:
        is_nothing = op is aten.copy_.default and args[0] is written
        if _is_ours(READS_OF_WHAT_IS_WRITTEN) and not is_nothing:
            targets = written if isinstance(written, list | tuple) else [written]
            args, kwargs = tree_map(functools.partial(_read_first, targets=targets), (args, kwargs))
        return lower(written, *args, **kwargs)

    return lower_reading_first


def _read_first(operand: Any, targets: Sequence[Any]) -> Any:
    """`operand`, such that a loop that writes to `targets` does not read what it writes."""
    from torch._inductor import ir, lowering

    if not isinstance(operand, ir.TensorBox):
        return operand
    places = {_place(target) for target in targets}
    if _place(operand) not in places:
        if not places.isdisjoint(operand.get_read_names()):
            operand.realize()
    elif any(_place(operand) == _place(target) and _may_share(operand, target) for target in targets):
        operand = lowering.clone(operand)
        operand.realize()
    return operand


def _place(tensor: Any) -> str | int:
    """The name of the buffer that `tensor` is a view of, or while it has none, the identity of its box."""
    from torch._inductor import ir

    box = tensor.data
    while isinstance(box, ir.BaseView):
        box = box.data
    return box.data.get_name() if isinstance(box.data, ir.Buffer) else id(box)


def _may_share(one: Any, other: Any) -> bool:
    """Whether two tensors of one buffer may have an element in common."""
    windows, may_overlap = (_window(one), _window(other)), _may_overlap.get()
    return windows[0] is None or windows[1] is None or may_overlap is None or may_overlap(windows[0], windows[1])


def _window(tensor: Any) -> Window | None:
    """The geometry of `tensor` in its buffer; None if it is not known."""
    from torch._inductor import ir

    if not isinstance(tensor.data, ir.ReinterpretView):
        return None  # the whole buffer, whose layout may not be decided yet, or a view that is only a formula
    layout = tensor.data.layout
    if not all(getattr(number, "is_Integer", True) for number in (*layout.size, *layout.stride, layout.offset)):
        return None  # a symbol
    return tuple(map(int, layout.size)), tuple(map(int, layout.stride)), int(layout.offset), layout.dtype


# ----- the fusion of loops


def _fusable(fusable: Callable[..., bool]) -> Callable[..., bool]:
    """Whether `writer` may be joined with an earlier `reader` although it writes what `reader` reads."""

    @functools.wraps(fusable)
    def fusable_weak_dep(scheduler: Any, weak_dep: Any, reader: Any, writer: Any) -> bool:
        if not fusable(scheduler, weak_dep, reader, writer):
            return False
        return not _is_ours(READS_AFTER_WRITES) or _reads_where_it_writes(
            scheduler, weak_dep.mutating_buf, reader, writer
        )

    return fusable_weak_dep


def _reads_where_it_writes(scheduler: Any, written: str, reader: Any, writer: Any) -> bool:
    """Whether `reader` reads the memory of `written` only where `writer` then writes it.

    Inductor calls memory by another name after each write; `mutation_real_name` has the first one.
    """
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.scheduler import ForeachKernelSchedulerNode

    first_names = scheduler.mutation_real_name
    (write,) = (one for one in writer.read_writes.writes if one.name == written)
    nodes = reader.snodes if isinstance(reader, ForeachKernelSchedulerNode) else [reader]
    reads_by_node = [
        [one for one in node.read_writes.reads if first_names.get(one.name, one.name) == first_names[written]]
        for node in nodes
    ]
    at_its_places = all(
        isinstance(read, MemoryDep) and (read.index, read.size) == (write.index, write.size)
        for reads in reads_by_node
        for read in reads
    )
    return at_its_places and sum(map(bool, reads_by_node)) <= 1


# ----- the order of loops


def _checks_first(compute: Callable[..., None]) -> Callable[..., None]:
    """`compute`, with dependencies on checks. See Note [Values are checked before writes]."""

    @functools.wraps(compute)
    def compute_dependencies(scheduler: Any) -> None:
        if _is_ours(CHECKS_FIRST):
            _add_dependencies_on_checks(scheduler)
        compute(scheduler)

    return compute_dependencies


def _add_dependencies_on_checks(scheduler: Any) -> None:
    """Let what writes an input, goes to places that it computes, or checks, come after the checks before it.

    The nodes are in the order of the program by now, so that this makes no cycle.
    """
    from torch._inductor.virtualized import V

    is_check = _is_check.get()
    assert is_check is not None
    check = None
    for node in scheduler.nodes:
        op = getattr(node.node, "op_overload", None)
        checks = isinstance(op, OpOverload) and is_check(op)
        if check is not None and (checks or _writes_input(node, V.graph.graph_inputs) or _is_indirect(node)):
            V.graph.additional_buffer_deps[node.get_name()].add(check)
        if checks:
            check = node.get_outputs()[0].get_name()


def _writes_input(node: Any, inputs: Any) -> bool:
    return any(name in inputs for made in node.get_outputs() for name in made.get_mutations())


def _is_indirect(node: Any) -> bool:
    from torch._inductor.dependencies import MemoryDep

    places = (*node.read_writes.reads, *node.read_writes.writes)
    return any(isinstance(one, MemoryDep) and one.is_indirect() for one in places)


# ----- the code of a loop


def _store_once(store: Callable[..., None]) -> Callable[..., None]:
    """See Note [Transposed sums into memory]."""
    from torch._inductor import config
    from torch._inductor.codegen import cpp

    vectorised: Any = cpp.CppVecKernel

    @functools.wraps(store)
    def store_once(kernel: Any, name: str, index: Any, value: Any, mode: str | None = None) -> None:
        is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or kernel.num_threads != 1)
        if not (_is_ours(TRANSPOSED_SUMS) and is_atomic) or kernel.need_vec_transpose(kernel.rename_indexing(index)):
            store(kernel, name, index, value, mode)
            return
        vectorised.store(kernel, name, index, value, mode)  # its `ops.index_expr` adds the offset

    return store_once


def _none_if_unused(find: Callable[..., Any]) -> Callable[..., Any]:
    """The index by which a loop reads or writes a buffer; None, which equals no index, if it does not."""

    @functools.wraps(find)
    def find_if_used(body: Any, buffer_name: str) -> Any:
        try:
            return find(body, buffer_name)
        except KeyError:
            if not _is_ours(UNREAD_BUFFERS):
                raise
            return None

    return find_if_used


def _store_by_another_name(store: Callable[..., None]) -> Callable[..., None]:
    """Store a sum, by a name of its own where a kernel stores it again: a cast names its variable after the sum."""

    @functools.wraps(store)
    def store_reduction(kernel: Any, name: str, index: Any, value: Any) -> None:
        if _is_ours(STORED_TWICE) and kernel.tiling_idx < kernel.reduction_depth:
            stored = _stored_sums.setdefault(kernel, set())
            if str(value) in stored:
                again = f"{value}_{len(stored)}"
                kernel.reduction_suffix.writeline(f"auto {again} = {value};")
                value = again
            stored.add(str(value))
        store(kernel, name, index, value)

    return store_reduction


# The names by which a kernel has stored its sums.
_stored_sums: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
