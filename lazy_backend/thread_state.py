"""What a thread carries that changes how operators run, and how to run without it.

Note [Runs are clean]
A run computes what was recorded. Modes of the thread that happens to run it (inference mode, autocast, the user's
dispatch and function modes, functorch levels) were seen by the operators when they were recorded, above this package;
they must not act a second time. The device's own thread carries none of them; a run within `mark_step`, a read and an
upload happen on the user's thread, so they step out of its modes. Within `__torch_dispatch__` the thread moreover skips
the dispatch keys above it, those that resolve conjugated and negated tensors among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# internal, checked on 2.13: the public `torch.inference_mode(False)` is all there is, the rest has no public form
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

# The dispatch keys of a thread that is not within a dispatch.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


def _has_modes() -> bool:
    """0.3 µs."""
    return bool(
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
        or peek_interpreter_stack() is not None
    )


@contextlib.contextmanager
def clean_thread_state() -> Iterator[None]:
    """No gradients, no skipped dispatch keys, none of the thread's modes, for a block. See Note [Runs are clean].

    6 µs: for runs and reads, not for recorded calls.
    """
    outside = torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
    with outside, _without_modes() if _has_modes() else torch.no_grad():
        yield


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())  # after inference_mode, which switches gradients on
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        yield
