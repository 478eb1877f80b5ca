"""The functions of PyTorch that are replaced while some thread runs the body of a captured function as written.

In: which recorder the calling thread has, if any. Out: a recorder that sees the calls of hooks in backward, and changes
no choice that PyTorch makes. Internals, checked on 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import lr_scheduler
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")


class FloatSeer(TorchFunctionMode):
    """What sees the floats and CPU tensors of a body: a `FloatRecorder`."""

    hidden_by = 0  # the frame of the compiled function that is running, by id: Dynamo must not see a recorder

    def show(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function`, whose calls of PyTorch this mode sees. Not within such a call.

        Not `with self:`, whose Python code can be interrupted before it takes the mode off: then a recorder that is
        done would see all that this thread calls from there on. See Note [Interruption].
        """
        try:
            try:
                torch._C._push_on_torch_function_stack(self)
                return function(*args, **kwargs)
            finally:
                self._leave()
        finally:
            self._leave()  # the first one may be interrupted

    def _leave(self) -> None:
        count = torch._C._len_torch_function_stack()
        if count and torch._C._get_function_stack_at(count - 1) is self:
            torch._C._pop_torch_function_stack()

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
        self._has_torch_function: Any = torch.overrides.has_torch_function
        self._run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        self._from_numpy = torch.from_numpy
        # every scheduler of PyTorch sets hyperparameters by this function
        self._set_hyperparameter: Any = lr_scheduler._update_param_group_val

        self._dynamo: Any = None  # Dynamo's module, once something has imported it
        self._set_eval_frame: Any = None

    def install(self) -> None:
        if self._dynamo is None and "torch._dynamo.eval_frame" in sys.modules:
            dynamo = sys.modules["torch._dynamo.eval_frame"]
            self._set_eval_frame = dynamo._maybe_set_eval_frame  # type: ignore[attr-defined]
            self._dynamo = dynamo
        if self._dynamo is not None:
            self._dynamo._maybe_set_eval_frame = self._set_eval_frame_unseen
        torch.from_numpy = self._from_numpy_seen  # type: ignore[assignment]
        lr_scheduler._update_param_group_val = self._set_hyperparameter_seen
        torch.overrides.has_torch_function = self._ask_without_recorder
        torch.autograd._engine_run_backward = self._run_backward_recorded  # type: ignore[attr-defined]

    def remove(self) -> None:
        if self._dynamo is not None:
            self._dynamo._maybe_set_eval_frame = self._set_eval_frame
        torch.from_numpy = self._from_numpy
        lr_scheduler._update_param_group_val = self._set_hyperparameter
        torch.overrides.has_torch_function = self._has_torch_function
        torch.autograd._engine_run_backward = self._run_backward  # type: ignore[attr-defined]

    def _ask_without_recorder(self, args: Any) -> bool:
        """`has_torch_function` as attention asks it before it takes its fast path: a recorder is no override."""
        recorder = self._recorder()
        # a mode of the user's counts, as it does without us
        if recorder is None or torch._C._len_torch_function_stack() != 1:
            return bool(self._has_torch_function(args))
        if torch._C._get_function_stack_at(0) is not recorder:
            return bool(self._has_torch_function(args))
        torch._C._pop_torch_function_stack()
        try:
            return bool(self._has_torch_function(args))
        finally:
            torch._C._push_on_torch_function_stack(recorder)

    def _run_backward_recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Backward runs with no function mode, as it is itself a call that a mode sees; its hooks are to be seen."""
        recorder = self._recorder()
        if recorder is None or torch._C._len_torch_function_stack():
            return self._run_backward(*args, **kwargs)
        return recorder.show(self._run_backward, *args, **kwargs)

    def _from_numpy_seen(self, array: Any) -> torch.Tensor:
        made = self._from_numpy(array)
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
        recorder = self._recorder()
        if recorder is None:
            return self._set_eval_frame(callback)
        caller = id(sys._getframe(1))
        if recorder.hidden_by == caller:
            before = self._set_eval_frame(callback)
            recorder.hidden_by = 0
            torch._C._push_on_torch_function_stack(recorder)
            return before
        count = torch._C._len_torch_function_stack()
        if callable(callback) and count and torch._C._get_function_stack_at(count - 1) is recorder:
            torch._C._pop_torch_function_stack()
            recorder.hidden_by = caller
        return self._set_eval_frame(callback)
