"""What a captured function uses besides its arguments, and where it leaves what it makes.

In: a watched call of the function. Out: guards over the modules and optimizers it used, and holders: the user's tensors
that hold what the call made.

Note [State has places]
State that a body replaces (`self.hidden = new`, a newly made `.grad`) is found again through the tensor object that
holds it: a replay makes that object stand for the new value. The old value lives on in whatever else refers to it,
since the object takes over new data instead of writing to the old data. An object that has gained a reference since the
body ran, as Python's reference count shows, must not change under its new holder: then the body runs again. A `.grad`
has a place of its own, the parameter: the `.grad` is made anew whenever the parameter is not the only holder of the old
object.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from sys import getrefcount
from types import MethodType
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from lazy_backend.floats.torch_hooks import FloatSeer, TorchHooks
from lazy_backend.ports.cpython import UNHELD, attributes_of, counts_of, is_a, young_objects
from lazy_backend.ports.hooks import HOOKS_OF_ALL, PARAMETERS
from lazy_backend.ports.tensor_types import base_of, is_leaf, use_count, version_of
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, ViewData
from lazy_backend.tensors.tensor import LazyTensor, wrap

# ----- what a body used


class Watch:
    """The modules and optimizers that a thread calls, and the leaves it computes with, each once. See `watches`.

    Leaves out `arguments`, which are other tensors in the next call.
    """

    def __init__(self, arguments: Sequence[LazyTensor]) -> None:
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._seen: set[int] = set()
        # By id, as comparing tensors calls an operator; weak, as a body may make leaves for itself.
        self._leaves: dict[int, weakref.ref[LazyTensor]] = {}
        self.contexts: set[DeviceContext] = set()  # of the operands
        self.recorder: FloatSeer | None = None  # while the body runs
        self._arguments = set(map(id, arguments))

    def see_module(self, module: torch.nn.Module) -> None:
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.modules.append(module)

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self.optimizers.append(optimizer)
        if self.recorder is not None:
            self.recorder.install(optimizer)

    def see_operands(self, operands: Sequence[Any]) -> None:
        for operand in operands:
            first = operand[0] if type(operand) is list and operand else operand
            if type(first) is LazyTensor:
                self.contexts.add(first._data.context)
            if type(operand) is LazyTensor and operand.requires_grad and is_leaf(operand) and not _is_inner(operand):
                self._leaves[id(operand)] = weakref.ref(operand)

    def leaves(self) -> list[LazyTensor]:
        """The leaves seen that somebody holds."""
        return [leaf for reference in self._leaves.values() if (leaf := reference()) is not None]

    def parameters(self) -> list[LazyTensor]:
        """The lazy parameters of the modules and optimizers seen, and the leaves, each once."""
        found: list[torch.Tensor] = []
        for module in self.modules:
            registered = dict.values(dict.get(attributes_of(module), PARAMETERS, {}))
            found += [parameter for parameter in registered if parameter is not None]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found += group["params"]
        found += self.leaves()
        unique = {id(tensor): tensor for tensor in found if id(tensor) not in self._arguments}
        return [tensor for tensor in unique.values() if is_a(tensor, LazyTensor)]  # type: ignore[misc]

    def host_versions(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors in the optimizers' state that are not lazy, each with its version counter."""
        return [(tensor, version_of(tensor)) for optimizer in self.optimizers for tensor in host_state(optimizer)]


def host_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors in the optimizer's state that are not lazy: step counts, in most optimizers."""
    states = [dict.values(state) for state in optimizer.state.values() if is_a(state, dict)]
    tensors = [value for values in states for value in values if is_a(value, torch.Tensor)]
    return [tensor for tensor in tensors if not is_a(tensor, LazyTensor)]


class TensorSet:
    """A weak set of tensors by identity: `WeakSet` would compare them, which calls an operator."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[LazyTensor]] = {}

    def add(self, tensor: LazyTensor) -> None:
        self._references[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: LazyTensor) -> bool:
        reference = self._references.get(id(tensor))
        return reference is not None and reference() is tensor


class GradsAtStart:
    """Which tensors the recorded calls of one program found with a `.grad`, and which without."""

    def __init__(self) -> None:
        self.present = TensorSet()
        self.absent = TensorSet()

    def add(self, found: Iterable[tuple[LazyTensor, object]]) -> None:
        """Add what one call found: tensors, each with its `.grad`, or what stands for that, or None."""
        for tensor, grad in found:
            (self.absent if grad is None else self.present).add(tensor)


def _is_inner(tensor: LazyTensor) -> bool:
    """Whether a tensor without a `grad_fn` is a view made without gradients, as backward transposes saved tensors."""
    base = base_of(tensor)
    return base is not None and base.requires_grad


class _Watches:
    """Shows what a thread calls to the watch of that thread. Costs nothing while there is no watch.

    The wrapper and the hooks are installed at most once: if an interruption leaves them in place, the next watch
    removes them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._watches: dict[int, Watch | None] = {}
        self._dispatch: Any = None
        self._replaced: Any = None  # the attribute of `LazyTensor` in whose place `_show` is
        self._hooks: list[RemovableHandle] = []
        self._torch_hooks = TorchHooks(self._recorder)

    @contextmanager
    def shown_to(self, watch: Watch | None) -> Iterator[None]:
        """Within the block `watch`, if any, sees this thread's modules, optimizers and operands, and other threads ask
        for their turn."""
        thread = threading.get_ident()
        try:
            with self._lock:
                self._watches[thread] = watch
                self._install()
            yield
        finally:
            with self._lock:
                if self._watches.get(thread, self) is watch:  # this block may end late, after an interruption
                    del self._watches[thread]
                if not self._watches:
                    self._remove()

    def _recorder(self) -> FloatSeer | None:
        watch = self._watches.get(threading.get_ident())
        return None if watch is None else watch.recorder

    def _install(self) -> None:
        self._torch_hooks.install()
        if LazyTensor.__torch_dispatch__ != self._show:
            self._dispatch = LazyTensor.__torch_dispatch__
            self._replaced = vars(LazyTensor)["__torch_dispatch__"]
            LazyTensor.__torch_dispatch__ = staticmethod(self._show)  # type: ignore[method-assign, assignment]
        if len(self._hooks) < 2 or not all(map(_is_there, self._hooks)):
            self._remove_hooks()
            self._hooks.append(modules.register_module_forward_pre_hook(self._show_module))
            self._hooks.append(optimizers.register_optimizer_step_pre_hook(self._show_optimizer))

    def _remove(self) -> None:
        if self._replaced is not None:  # the very object: by that the recorder in C++ knows that nobody watches
            LazyTensor.__torch_dispatch__ = self._replaced  # type: ignore[method-assign]
        self._remove_hooks()
        self._torch_hooks.remove()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _show(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch = self._watches.get(threading.get_ident())
        if watch is not None:
            watch.see_operands(args)
        else:
            _wait_for_body(args)
        return self._dispatch(func, types, args, kwargs)

    def _show_module(self, module: torch.nn.Module, args: Any) -> None:
        watch = self._watches.get(threading.get_ident())
        if watch is not None:
            watch.see_module(module)

    def _show_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        watch = self._watches.get(threading.get_ident())
        if watch is not None:
            watch.see_optimizer(optimizer)


def _wait_for_body(operands: Sequence[Any]) -> None:
    """Wait for the body of a captured function that another thread runs on the device of `operands`."""
    for operand in operands:
        first = operand[0] if type(operand) in (list, tuple) and operand else operand
        if type(first) is LazyTensor:
            first._data.context.wait_for_body()
            return


class GlobalHookGuard:
    """The hooks of all modules and of all optimizers."""

    def __init__(self) -> None:
        self._hooks = _global_hooks()

    def holds(self) -> bool:
        # almost always there are none: 0.2 µs
        return (not any(HOOKS_OF_ALL) and not self._hooks) or self._are_same(_global_hooks())

    def _are_same(self, now: list[Any]) -> bool:
        return len(now) == len(self._hooks) and all(map(is_, now, self._hooks))


def _global_hooks() -> list[Any]:
    """All global hooks but our own, which come and go with watches."""
    hooks = [hook for each in HOOKS_OF_ALL for hook in list(each.values())]
    return [hook for hook in hooks if not (is_a(hook, MethodType) and hook.__self__ is watches)]


def _is_there(hook: RemovableHandle) -> bool:
    hooks = hook.hooks_dict_ref()
    return hooks is not None and hook.id in hooks


watches = _Watches()


# ----- holders of what a body made


def _count_references(tensor: torch.Tensor) -> tuple[int, int]:
    """The numbers of references from Python and from C++, as counted inside this function."""
    return getrefcount(tensor), use_count(tensor)


def _count_of_a_grad() -> tuple[int, int]:
    parameter = torch.zeros((), requires_grad=True)
    parameter.grad = torch.zeros(())
    grad = parameter.grad
    return _count_references(grad)


# What `_count_references` returns for a `.grad` that only its parameter and one local variable of the caller hold.
_ALONE = _count_of_a_grad()


class GradHolder:
    """`parameter.grad`. See Note [State has places]."""

    def __init__(self, parameter: LazyTensor) -> None:
        self._parameter = parameter

    def holds(self) -> bool:
        return True

    def data(self) -> TensorData | None:
        grad = self._parameter.grad
        return grad._data if isinstance(grad, LazyTensor) else None

    def put(self, data: TensorData, run: Any) -> None:
        """Hold `data`, unless `run.delivered`: then an interrupting call delivered it and may have gone on since."""
        grad = self._parameter.grad
        if grad.__class__ is LazyTensor and grad._data.meta is data.meta and _count_references(grad) == _ALONE:  # type: ignore
            if not run.delivered:
                grad._data = data  # type: ignore[union-attr]
        else:
            made = wrap(data)
            if not run.delivered:
                self._parameter.grad = made


class ClearedGrad:
    """A `.grad` that the body sets to None."""

    def __init__(self, parameter: LazyTensor) -> None:
        self.parameter = parameter

    def put(self, cleared: ClearedGrad, run: Any) -> None:
        """As `GradHolder.put`."""
        if not run.delivered:
            self.parameter.grad = None


class TensorHolder:
    """A tensor object somewhere in the user's objects. See Note [State has places]."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._reference = weakref.ref(tensor)
        self._data = tensor._data
        self._count = (0, 0)
        self._requires_grad = tensor.requires_grad

    def settle(self) -> None:
        """Note the tensor's reference counts, after the caller has dropped its own reference."""
        tensor = self._reference()
        if tensor is not None:
            self._count = _count_references(tensor)

    def holds(self) -> bool:
        """Whether the tensor still stands for what the last call left, and has gained no reference."""
        tensor = self._reference()
        return (
            tensor is not None
            and tensor._data is self._data
            and _count_references(tensor) == self._count
            and tensor.requires_grad is self._requires_grad
        )

    def tensor(self) -> LazyTensor | None:
        return self._reference()

    def data(self) -> TensorData | None:
        return self._data

    def put(self, data: TensorData, run: Any) -> None:
        """As `GradHolder.put`."""
        tensor = self._reference()
        if tensor is not None and not run.delivered:
            tensor._data = self._data = data


Holder = GradHolder | TensorHolder


class Unaccounted(Exception):
    """A storage has a reference that no tensor found accounts for."""


@contextmanager
def young_objects_stay_young() -> Iterator[None]:
    """Within the block the garbage collector does not run, so what the block makes stays in its youngest generation."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def find_tensors(
    storages: Sequence[LazyStorage], known: Sequence[LazyTensor], old: Sequence[LazyTensor], pending: Sequence[object]
) -> list[list[LazyTensor]]:
    """For each storage, the tensors that stand for it or are views of it, except those in `known`.

    Searches the objects made since the last garbage collection, and the tensors in `old`; never all objects of the
    process. Raises `Unaccounted` if anything besides tensors, the caller's list and `pending`, the trace's list, refers
    to the storages.
    """
    objects = [*young_objects(), *old]
    places = {id(storage): place for place, storage in enumerate(storages)}
    # type(), not __class__: a foreign object may return anything for that, or warn
    tensors = {id(item): item for item in [*objects, *known] if type(item) is LazyTensor}
    views = [item for item in objects if type(item) is ViewData and id(item._storage) in places]
    objects.clear()
    tensors = {number: tensor for number, tensor in tensors.items() if id(tensor._data.storage) in places}
    _account(storages, list(tensors.values()), views, pending)
    ours = set(map(id, known))
    found: list[list[LazyTensor]] = [[] for _ in storages]
    for number, tensor in tensors.items():
        if number not in ours:
            found[places[id(tensor._data.storage)]].append(tensor)
    return found


def _account(
    storages: Sequence[LazyStorage],
    tensors: Sequence[LazyTensor],
    views: Sequence[ViewData],
    pending: Sequence[object],
) -> None:
    """Raise `Unaccounted` if anything besides the arguments refers to the storages, or to the views."""
    references = Counter(id(tensor._data) for tensor in tensors)
    references.update(map(id, pending))
    references.update(id(view._storage) for view in views)
    for of in (storages, views):
        for one, count in zip(of, counts_of(of), strict=True):
            if count - UNHELD != references[id(one)]:
                raise Unaccounted
