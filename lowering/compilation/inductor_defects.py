"""Have inductor compile right what it gets wrong.

In: a block in which inductor compiles. Within it, inductor runs the pass of `input_copies`, and the functions here
stand before inductor's own. Internal, checked on 2.13.

Note [Transposed sums into memory]
Where inductor's C++ vectorises in two dimensions and adds to memory atomically (`index_add`, the backward of an
embedding), it adds the offset within the tile to the place once for the tile and once more for the vector, and so
writes past the end of the memory: silently wrong, or a crash later (pytorch/pytorch#191837). `_store_once` leaves the
first one out.

Note [Reads before writes]
Inductor gets functional graphs, in which a result never shares memory with an operand, and makes some results in place
of an operand that nobody needs afterwards. Whether somebody needs it is asked of later operators only, and not of this
one: for `x.index_add_(0, i, x.clone())` inductor drops the clone, and the loop that adds to `x` reads from `x`, too.
Three parts put this right, each where it is known exactly what reads what, so that other graphs copy nothing more:

  the graph                `input_copies` copies what is read after its memory has got its last value
  the lowering             an operand whose loop would read the memory that the operator writes is computed before
                           (`_lowering_that_reads_first`)
  the fusion of loops      inductor joins a loop that writes `x` with an earlier one that reads `x` only where both
                           are at the same place of `x`, but looks only for reads of `x` as it was at the start, not
                           after an earlier write; `_reads_where_it_writes` looks for all of them
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_backend.lowering.compilation import input_copies
from lazy_backend.lowering.ir.graph import TensorMeta, intern_meta
from lazy_backend.lowering.ir.overlap import overlap

aten = torch.ops.aten

# Whether inductor compiles for us in this thread. What is put in place below does nothing otherwise.
_is_ours: ContextVar[bool] = ContextVar("without_defects", default=False)


@contextlib.contextmanager
def without_defects() -> Iterator[None]:
    """See Note [Reads before writes] and Note [Transposed sums into memory]."""
    from torch._inductor import config

    _put_in_place()
    before = config.post_grad_custom_post_pass
    passes = [] if before is None else list(before) if isinstance(before, list | tuple) else [before]
    token = _is_ours.set(True)
    try:
        # the pass is part of the keys of inductor's caches, and stands for the rest
        with config.patch(post_grad_custom_post_pass=[*passes, _copying_pass()]):
            yield
    finally:
        _is_ours.reset(token)


@functools.cache
def _copying_pass() -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class CopyingPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            input_copies.copy_what_outlives_its_memory(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, input_copies.__file__))

    return CopyingPass()


@functools.cache
def _put_in_place() -> None:
    from torch._inductor import inductor_prims, lowering, scheduler
    from torch._inductor.codegen import cpp

    # the operators that inductor's passes make of functional ones, and no others, write into memory that is still read
    in_place = (aten.index_put_.default, inductor_prims._unsafe_index_put_, aten.copy_.default)
    for op in (*in_place, *lowering.inplace_foreach_ops):
        lowering.lowerings[op] = _lowering_that_reads_first(op, lowering.lowerings[op])
    Scheduler: Any = scheduler.Scheduler
    Scheduler.fusable_weak_dep = _fusable(Scheduler.fusable_weak_dep)
    TileKernel: Any = cpp.CppTile2DKernel
    TileKernel.store = _store_once(TileKernel.store)


# ----- the lowering


def _lowering_that_reads_first(op: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of an operator that writes its first operand, a tensor or a list of tensors."""

    @functools.wraps(lower)
    def lower_reading_first(written: Any, *args: Any, **kwargs: Any) -> Any:
        is_nothing = op is aten.copy_.default and args[0] is written
        if _is_ours.get() and not is_nothing:
            targets = written if isinstance(written, list | tuple) else [written]
            args, kwargs = pytree.tree_map(functools.partial(_read_first, targets=targets), (args, kwargs))
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
    elif any(_place(operand) == _place(target) and _may_overlap(operand, target) for target in targets):
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


def _may_overlap(one: Any, other: Any) -> bool:
    """Whether two tensors of one buffer may have an element in common."""
    windows = [_window(one), _window(other)]
    known = [window for window in windows if window is not None]
    return len(known) < len(windows) or overlap(*known)


def _window(tensor: Any) -> TensorMeta | None:
    """The geometry of `tensor` in its buffer; None if it is not known."""
    from torch._inductor import ir

    if not isinstance(tensor.data, ir.ReinterpretView):
        return None  # the whole buffer, whose layout may not be decided yet, or a view that is only a formula
    layout = tensor.data.layout
    if not all(getattr(number, "is_Integer", True) for number in (*layout.size, *layout.stride, layout.offset)):
        return None  # a symbol
    size, stride = tuple(map(int, layout.size)), tuple(map(int, layout.stride))
    return intern_meta(size, stride, int(layout.offset), layout.dtype, conj=False, neg=False)


# ----- the fusion of loops


def _fusable(fusable: Callable[..., bool]) -> Callable[..., bool]:
    """Whether `writer` may be joined with an earlier `reader` although it writes what `reader` reads."""

    @functools.wraps(fusable)
    def fusable_weak_dep(scheduler: Any, weak_dep: Any, reader: Any, writer: Any) -> bool:
        if not fusable(scheduler, weak_dep, reader, writer):
            return False
        return not _is_ours.get() or _reads_where_it_writes(scheduler, weak_dep.mutating_buf, reader, writer)

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


# ----- the code of a loop


def _store_once(store: Callable[..., None]) -> Callable[..., None]:
    """See Note [Transposed sums into memory]."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppVecKernel

    @functools.wraps(store)
    def store_once(kernel: Any, name: str, index: Any, value: Any, mode: str | None = None) -> None:
        is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or kernel.num_threads != 1)
        if not (_is_ours.get() and is_atomic) or kernel.need_vec_transpose(kernel.rename_indexing(index)):
            return store(kernel, name, index, value, mode)
        return CppVecKernel.store(kernel, name, index, value, mode)  # its `ops.index_expr` adds the offset

    return store_once
