"""`DistributedDataParallel` with a few recorded calls for each bucket instead of several for each tensor.

In: PyTorch's reducer of a module of this device, and its broadcasts. Out: the same gradients and buffers, bit for bit.

Note [Buckets in four calls]
PyTorch's reducer multiplies each gradient into its place in a bucket, takes views of what was reduced, and copies each
back into its gradient. Each of these calls would be recorded in every step: 1.3 ms for a GPT of two layers, whose whole
step takes 10. So once PyTorch has put the parameters into their final buckets, in the second step, a bucket is filled
by one call for all of its parameters when the last of them has its gradient, and copied back by one call at the end of
the backward. Buckets, their order, and what is added to what are PyTorch's.

PyTorch's reducer is then told of no backward, as under `no_sync`, so that it does nothing, and the memory of its own
buckets is given back. It does everything itself where more is asked for: unused or sparse parameters, communication
hooks, static graphs, gradients as views of buckets, `join`, mixed precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from lazy_backend.distributed.order import finish_collectives
from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.graph import contiguous_stride
from lazy_backend.ports.autograd_engine import call_at_the_end
from lazy_backend.ports.process_groups import REDUCER_ARGUMENTS, REDUCER_EXTRAS, buckets_by_size
from lazy_backend.ports.tensor_types import foreach_copy
from lazy_backend.ports.thread_modes import TorchDispatchMode
from lazy_backend.recording.record import record
from lazy_backend.tensors.bodies import note_read_once
from lazy_backend.tensors.tensor import LazyTensor

aten = torch.ops.aten


class _Who(Enum):
    """Who reduces the gradients of the backward that is expected."""

    NOBODY = 0  # none is expected: it is over, or under `no_sync`
    PYTORCH = 1
    WE = 2


def _joined(tensors: Sequence[torch.Tensor]) -> LazyTensor:
    """The values of `tensors`, one after another. Recorded as one call, which the dispatcher would take apart."""
    return record(aten.flatten_dense_tensors.default, (tensors,), {})  # type: ignore[no-any-return]


def _copy_parts(values: LazyTensor, tensors: Sequence[Any]) -> None:
    """Write what `_joined` would make of `tensors` into them."""
    pieces = record(aten.unflatten_dense_tensors.default, (values, tensors), {})
    if any(one.is_conj() or one.is_neg() for one in tensors):  # for which PyTorch has no writes to lists
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece)
    else:
        foreach_copy(tensors, pieces)


class _Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, parameters: Sequence[LazyTensor]) -> None:
        self.parameters = parameters
        self.waits_for = len(parameters)
        self._reduced: LazyTensor | None = None  # the gradients of all ranks

    def reduce(self, group: dist.ProcessGroup) -> None:
        self._reduced = _joined([self._gradient(one) for one in self.parameters])
        self._reduced.mul_(1.0 / group.size())
        group.allreduce([self._reduced])

    def hand_out(self) -> None:
        reduced, self._reduced = self._reduced, None
        for parameter in self.parameters:
            if parameter.grad is None:  # it got none here, but other ranks may have one
                parameter.grad = torch.empty_like(parameter)
        assert reduced is not None
        _copy_parts(reduced, [one.grad for one in self.parameters])

    @staticmethod
    def _gradient(parameter: LazyTensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        fits = gradient.shape == parameter.shape and gradient.dtype is parameter.dtype
        if not fits or not isinstance(gradient, LazyTensor):
            raise LazyBackendError(
                f"the gradient of a parameter of {parameter.dtype}{list(parameter.shape)} is {gradient.layout} "
                f"{gradient.dtype}{list(gradient.shape)} on {gradient.device}, which DistributedDataParallel cannot "
                f"reduce\n  at {user_site()}\n  give it the parameter's shape and dtype"
            )
        return gradient


class Reduction:
    """The backwards of one module: which gradients are there, and what is done when they are."""

    def __init__(self, parameters: Sequence[LazyTensor], names: dict[int, str], group: dist.ProcessGroup) -> None:
        self.group = group
        self.who = _Who.NOBODY
        self._parameters = parameters
        self._names = names
        self._is_there = [False] * len(parameters)
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[_Bucket] = []  # for each parameter
        self._next = 0  # the bucket that is reduced next

    def use(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take PyTorch's final buckets. They may be put together anew, for another group."""
        places = {id(one): place for place, one in enumerate(self._parameters)}
        found = [_Bucket([self._parameters[places[id(one)]] for one in bucket]) for bucket in buckets]
        of = {id(one): bucket for bucket in found for one in bucket.parameters}
        self._bucket_of = [of[id(one)] for one in self._parameters]
        self._buckets = found

    def forget_buckets(self) -> None:
        self._buckets = []

    @property
    def is_ours(self) -> bool:
        """Whether PyTorch's reducer has no part in it: the final buckets are there, and it expects no backward."""
        return bool(self._buckets) and self.who is not _Who.PYTORCH

    def expect(self, who: _Who) -> None:
        """A backward comes next."""
        self.who = _Who.NOBODY  # should this be interrupted
        self._is_there = [False] * len(self._parameters)
        self._next = 0
        for bucket in self._buckets:
            bucket.waits_for = len(bucket.parameters)
        self.who = who

    def note(self, place: int, *gradients: Any) -> None:
        """A parameter has its gradient: called by autograd, for each parameter in each backward."""
        if self.who is _Who.NOBODY:
            return
        if self._is_there[place]:
            if self.who is _Who.PYTORCH:
                return  # it raises the error
            raise LazyBackendError(
                f"{self._name(place)} got a second gradient in one backward of DistributedDataParallel\n"
                f"  at {user_site()}\n  call forward once for each backward, checkpoint with use_reentrant=False, or "
                "reduce in the last backward only, by no_sync()"
            )
        self._is_there[place] = True
        if self.who is _Who.WE:
            bucket = self._bucket_of[place]
            bucket.waits_for -= 1
            if not bucket.waits_for:
                self._reduce_whole_buckets()
        elif all(self._is_there):
            self.who = _Who.NOBODY

    def _reduce_whole_buckets(self) -> None:
        # in their order, which is the same on all ranks
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            bucket = self._buckets[self._next]
            with torch.no_grad():
                bucket.reduce(self.group)
            self._next += 1
            if self._next == len(self._buckets):
                call_at_the_end(self._finish)

    def _finish(self) -> None:
        self.who = _Who.NOBODY
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.hand_out()

    def check_finished(self) -> None:
        """Raise an error if the backward before has left out parameters: other ranks would wait for ever."""
        if self.who is not _Who.WE or not any(self._is_there):
            return  # a forward without a backward does no harm
        missing = [self._name(place) for place, is_there in enumerate(self._is_there) if not is_there]
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        what = (
            f"the last backward gave no gradient to {shown}\n"
            "  use these parameters in each loss, or pass find_unused_parameters=True to DistributedDataParallel; "
            "if the backward was interrupted, wrap the module again, on all ranks"
            if missing
            else "the last backward was interrupted\n  wrap the module again, on all ranks"
        )
        raise LazyBackendError(
            "expected to have finished reduction in the prior iteration before starting a new one\n"
            f"  at {user_site()}\n  {what}"
        )

    def _name(self, place: int) -> str:
        return self._names.get(place) or f"parameter {place} of shape {list(self._parameters[place].shape)}"


class _MemoryOfBuckets(TorchDispatchMode):
    """Finds the memory of the buckets that PyTorch's reducer shows, and gives none to what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        self.found.append(args[0])  # PyTorch asks for `zeros_like` of each
        return torch.empty(0)


def _asking_for_more(cls: Any) -> Any:
    """Note that the original has to do everything itself once a method was called that says so."""

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.is_asked_for_more = True
            return method(self, *args, **kwargs)

        return call

    for name in REDUCER_EXTRAS:
        if hasattr(cls, name):
            setattr(cls, name, noting(getattr(cls, name)))
    return cls


_Original: Any = getattr(dist, "Reducer", object)  # absent where PyTorch was built without distributed


class OrderedReducer(_Original):  # type: ignore[misc]
    """PyTorch's reducer, for parameters that are not lazy. It communicates in C++, after what was recorded before."""

    def _rebuild_buckets(self) -> bool:
        finish_collectives()
        return bool(super()._rebuild_buckets())

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        finish_collectives()
        super().prepare_for_backward(outputs)


@_asking_for_more
class BucketReducer(_Original):  # type: ignore[misc]
    """PyTorch's reducer, for lazy parameters: see Note [Buckets in four calls]. For others it makes another one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(REDUCER_ARGUMENTS, args, strict=False)) | kwargs
        if not all(isinstance(one, LazyTensor) for one in given["params"]):
            return OrderedReducer(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = dict(zip(REDUCER_ARGUMENTS, args, strict=False)) | kwargs
        unknown = [*args[len(REDUCER_ARGUMENTS) :], *(kwargs[name] for name in kwargs.keys() - {*REDUCER_ARGUMENTS})]
        self.is_asked_for_more = _asks_for_more(given) or any(unknown)  # what newer versions offer is off by default
        self._joins = False
        self._without_memory: list[tuple[torch.Tensor, int]] = []  # buckets of PyTorch's reducer
        parameters = given["params"]
        self._reduction = Reduction(parameters, given.get("param_to_name_mapping") or {}, given["process_group"])
        # kept: a node that adds to a gradient ends, with its hooks, unless somebody holds it
        self._nodes: list[Any] = []
        if not self.is_asked_for_more:
            self._nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in parameters]
        note = self._reduction.note
        self._handles = [node.register_hook(functools.partial(note, n)) for n, node in enumerate(self._nodes)]

    def __del__(self) -> None:
        # as PyTorch's reducer does: the nodes may live on, with the reducer of a module that is wrapped again
        for handle in getattr(self, "_handles", ()):
            handle.remove()

    def _rebuild_buckets(self) -> bool:
        self._reduction.check_finished()
        if self._reduction.is_ours:
            return False  # buckets are put together once
        with executor.rules.reading_once():  # ranks agree on the buckets
            is_rebuilt: bool = super()._rebuild_buckets()
        if is_rebuilt:
            note_read_once()
        if is_rebuilt and not self.is_asked_for_more:
            with _MemoryOfBuckets() as memory:
                buckets = [bucket.parameters() for bucket in super()._get_zeros_like_grad_buckets()]
            self._reduction.use(buckets)
            self._give_back(memory.found)
        return is_rebuilt

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        reduction = self._reduction
        reduction.check_finished()
        # a backward that PyTorch's reducer was told of, and that did not come, is still expected by it
        if reduction.is_ours and not (self.is_asked_for_more or self._joins):
            reduction.expect(_Who.WE)
            return
        self._joins = False
        self._take_back()
        super().prepare_for_backward(outputs)
        reduction.expect(_Who.PYTORCH)

    def _get_zeros_like_grad_buckets(self) -> Any:  # a rank that has joined asks for them
        self._take_back()
        return super()._get_zeros_like_grad_buckets()

    def _give_back(self, buckets: list[torch.Tensor]) -> None:
        """Give back memory that nothing is written to, unless PyTorch's reducer is needed again."""
        for bucket in buckets:
            self._without_memory.append((bucket, bucket.untyped_storage().nbytes()))
            bucket.untyped_storage().resize_(0)

    def _take_back(self) -> None:
        while self._without_memory:
            bucket, size = self._without_memory.pop()
            bucket.untyped_storage().resize_(size)

    def _set_forward_pass_work_handle(self, *args: Any) -> None:
        self._joins = True  # the next backward is divided by the number of ranks that are left
        super()._set_forward_pass_work_handle(*args)

    def _check_reducer_finalized(self) -> None:
        self._reduction.check_finished()
        super()._check_reducer_finalized()

    def _reset_state(self) -> None:
        self._without_memory.clear()  # it makes others
        self._reduction.forget_buckets()
        self._reduction.expect(_Who.NOBODY)
        super()._reset_state()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._reduction.group = group
        super()._update_process_group(group)


def _asks_for_more(given: dict[str, Any]) -> bool:
    parameters = given["params"]
    return (
        given.get("find_unused_parameters", False)
        or given.get("gradient_as_bucket_view", False)
        or given.get("skip_all_reduce_unused_params", False)
        or given.get("use_python_reducer", False)
        or any(given.get("expect_sparse_gradients", ()))
        or not _are_of_one_device(parameters)
        or not all(one.is_leaf and one.stride() == contiguous_stride(one.shape) for one in parameters)
    )


def _are_of_one_device(tensors: Sequence[Any]) -> bool:
    """Whether lazy tensors are on one device, and none is empty: PyTorch cuts empty ones into another shape."""
    return len({one._data.context for one in tensors}) == 1 and all(one.numel() for one in tensors)


def broadcasting(original: Callable[..., None]) -> Callable[..., None]:
    """What `DistributedDataParallel` calls for a module's buffers in each forward: several tensors at a time.

    The broadcasts are PyTorch's. Each is one call for a tensor alone, and four for several, not up to four for each.
    """

    @functools.wraps(original)
    def _broadcast_coalesced(group: dist.ProcessGroup, tensors: Sequence[Any], buffer_size: int, src: int = 0) -> None:
        if not all(isinstance(one, LazyTensor) for one in tensors) or not _are_of_one_device(tensors):
            if not any(isinstance(one, LazyTensor) for one in tensors):
                finish_collectives()
            original(group, tensors, buffer_size, src)
            return
        together, _ = buckets_by_size(tensors, [buffer_size])
        with torch.no_grad():
            copies = []
            for places in together:
                own = [tensors[place] for place in places]
                values = own[0] if len(own) == 1 else _joined(own)
                group.broadcast(values, src)
                if len(own) > 1:
                    copies.append((values, own))
            for values, own in copies:  # only now, so that all of them are under way together
                _copy_parts(values, own)

    return _broadcast_coalesced


def registering(register: Callable[..., Any]) -> Callable[..., Any]:
    """What registers a communication hook, which PyTorch's reducer calls."""

    @functools.wraps(register)
    def call(reducer: Any, *args: Any) -> Any:
        if hasattr(reducer, "is_asked_for_more"):
            reducer.is_asked_for_more = True
        return register(reducer, *args)

    return call
