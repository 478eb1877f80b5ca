"""Functions of PyTorch and `math` that are replaced while some thread runs the body of a captured function as written.

In: which recorder the calling thread has, if any. Out: a recorder that sees the calls of hooks in backward, and changes
no choice that PyTorch makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from lazy_backend.floats.formulas import of_kept, of_traced
from lazy_backend.ports import hooks
from lazy_backend.ports.cpython import frame_at, leave_interrupted_blocks
from lazy_backend.ports.thread_modes import function_depth, function_mode_at, pop_function_mode, push_function_mode

P = ParamSpec("P")
R = TypeVar("R")


_TRACED_MATH = [(function, of_traced(function.original)) for function in hooks.functions_of_math]
_TRACED_MATH += [(function, of_kept(function.original)) for function in hooks.other_functions_of_math]


class FloatSeer(TorchFunctionMode):
    """What sees the floats and CPU tensors of a body: a `FloatRecorder`."""

    # Each takes the results and the inputs of a backward that is about to run, and whether its graph is kept. Without
    # inputs it runs through all that the graph leads to.
    on_backward: Sequence[Callable[[Sequence[torch.Tensor], Sequence[Any], bool], None]] = ()
    hidden_by = 0  # the frame of the compiled function that is running, by id: Dynamo must not see a recorder

    def show(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function`, whose calls of PyTorch this mode sees. Not within such a call.

        Not `with self:`, whose Python code can be interrupted before it takes the mode off: then a recorder that is
        done would see all that this thread calls from there on. See Note [Interruption].
        """
        try:
            try:
                push_function_mode(self)
                return function(*args, **kwargs)
            except BaseException as error:
                leave_interrupted_blocks(error)  # in which PyTorch takes this mode off, and puts it back when they end
                raise
            finally:
                self._leave()
        finally:
            self._leave()  # the first one may be interrupted

    def _leave(self) -> None:
        count = function_depth()
        if count and function_mode_at(count - 1) is self:
            pop_function_mode()

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the hyperparameters of an optimizer that is about to step."""
        raise NotImplementedError

    def see_made(self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], made: torch.Tensor) -> None:
        """Note a CPU tensor that a function made which function modes do not see."""
        raise NotImplementedError

    def see_schedule(self) -> None:
        """Note that a learning-rate schedule was stepped."""
        raise NotImplementedError


class TorchHooks:
    """Replaces the functions between `install` and `remove`, each of which may be done twice."""

    def __init__(self, recorder_of_thread: Callable[[], FloatSeer | None]) -> None:
        self._recorder = recorder_of_thread
        self._has_torch_function = hooks.has_torch_function.original
        self._run_backward = hooks.run_backward.original
        self._from_numpy = hooks.from_numpy.original
        self._set_hyperparameter = hooks.set_hyperparameter.original
        self._set_eval_frame: hooks.Substitute | None = None

    def install(self) -> None:
        if self._set_eval_frame is None:
            self._set_eval_frame = hooks.eval_frame_setter()
        if self._set_eval_frame is not None:
            self._set_eval_frame.put(self._set_eval_frame_unseen)
        hooks.from_numpy.put(self._from_numpy_seen)
        for function, traced in _TRACED_MATH:
            function.put(traced)
        hooks.set_hyperparameter.put(self._set_hyperparameter_seen)
        hooks.has_torch_function.put(self._ask_without_recorder)
        hooks.run_backward.put(self._run_backward_recorded)

    def remove(self) -> None:
        if self._set_eval_frame is not None:
            self._set_eval_frame.restore()
        hooks.from_numpy.restore()
        for function, _ in _TRACED_MATH:
            function.restore()
        hooks.set_hyperparameter.restore()
        hooks.has_torch_function.restore()
        hooks.run_backward.restore()

    def _ask_without_recorder(self, args: Any) -> bool:
        """`has_torch_function` as attention asks it before it takes its fast path: a recorder is no override."""
        recorder = self._recorder()
        # a mode of the user's counts, as it does without us
        if recorder is None or function_depth() != 1:
            return bool(self._has_torch_function(args))
        if function_mode_at(0) is not recorder:
            return bool(self._has_torch_function(args))
        pop_function_mode()
        try:
            return bool(self._has_torch_function(args))
        finally:
            push_function_mode(recorder)

    def _run_backward_recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Backward runs with no function mode, as it is itself a call that a mode sees; its hooks are to be seen."""
        recorder = self._recorder()
        if recorder is not None:
            for see_backward in recorder.on_backward:  # as `torch.autograd` calls it
                see_backward(args[0], args[4] if len(args) > 4 else (), args[2])
        if recorder is None or function_depth():
            return self._run_backward(*args, **kwargs)
        return recorder.show(self._run_backward, *args, **kwargs)

    def _from_numpy_seen(self, array: Any) -> torch.Tensor:
        made: torch.Tensor = self._from_numpy(array)
        recorder = self._recorder()
        if recorder is not None:
            recorder.see_made(self._from_numpy, (array,), made)
        return made

    def _set_hyperparameter_seen(self, *args: Any, **kwargs: Any) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.see_schedule()
        self._set_hyperparameter(*args, **kwargs)

    def _set_eval_frame_unseen(self, callback: Any) -> Any:
        """Dynamo is turned on or off by a compiled function. While that function runs, Dynamo, which would trace what a
        mode does, finds no recorder.
        """
        assert self._set_eval_frame is not None
        set_eval_frame = self._set_eval_frame.original
        recorder = self._recorder()
        if recorder is None:
            return set_eval_frame(callback)
        caller = id(frame_at(1))
        if recorder.hidden_by == caller:
            before = set_eval_frame(callback)
            recorder.hidden_by = 0
            push_function_mode(recorder)
            return before
        count = function_depth()
        if callable(callback) and count and function_mode_at(count - 1) is recorder:
            pop_function_mode()
            recorder.hidden_by = caller
        return set_eval_frame(callback)
