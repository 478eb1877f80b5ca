"""Fake tensors: what an operator returns, without its values.

In: `torch._subclasses`. Out: the same under public names. A name that is missing is None: its port says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from lazy_backend.ports.port import optional


class _NeverRaised(Exception):
    """Stands for an exception that this PyTorch does not have."""


FakeTensorMode: Any = optional("torch._subclasses.fake_tensor.FakeTensorMode")
DependsOnValues: Any = (
    optional("torch._subclasses.fake_tensor.DataDependentOutputException", _NeverRaised),
    optional("torch._subclasses.fake_tensor.DynamicOutputShapeException", _NeverRaised),
)
HasNoFake: Any = optional("torch._subclasses.fake_tensor.UnsupportedOperatorException", _NeverRaised)
_log = logging.getLogger("torch._subclasses.fake_tensor")

# `unset_mode(FAKE_KEY)` takes the thread out of a fake mode, if it is in one. A function of C.
unset_mode: Callable[[Any], Any] = optional("torch._C._unset_dispatch_mode")
FAKE_KEY: Any = optional("torch._C._TorchDispatchModeKey.FAKE")

# Whether an operator has a fake kernel of any kind.
has_fake_kernel: Callable[[Any], bool] = optional("torch._library.utils.has_fake_kernel", lambda op: False)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Suppress the thirty lines that PyTorch logs about an error in a fake kernel before it raises that error."""
    _log.disabled = True
    try:
        yield
    finally:
        _log.disabled = False
