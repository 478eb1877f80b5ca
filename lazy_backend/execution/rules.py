"""What a thread may do: read and sync, or neither; and what strict mode forbids."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from lazy_backend.diagnostics.history import SyncRecord
from lazy_backend.diagnostics.limits import GraphLimit
from lazy_backend.errors import ExecutionNotAllowedError, LazyBackendError, StrictModeError
from lazy_backend.errors.sites import user_site
from lazy_backend.settings import config

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class PerThread(threading.local):
    """State of one thread: every thread sees the defaults until it sets its own."""

    refusal: Callable[[str], LazyBackendError] | None = None  # what a read or sync raises now
    strict: bool = False
    defers: bool = False  # whether calls are deferred at first sight, too, whatever `config.first_sight` says
    limits: tuple[tuple[GraphLimit, int], ...] = ()  # of the regions that the thread is in
    marks_by_hand: bool = False  # whether it has called mark_step
    record: SyncRecord | None = None  # of the sync whose plan is being chosen


per_thread = PerThread()


class Rules:
    """Whether reads and syncs are allowed."""

    def __init__(self) -> None:
        self.allows_execution = True

    def call_refusing(
        self, refusal: Callable[[str], LazyBackendError], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `function`. A read or sync of this thread in it raises what `refusal` returns for the cause."""
        # two `finally` blocks of plain stores: see Note [Interruption]
        try:
            try:
                per_thread.refusal = refusal
                return function(*args, **kwargs)
            finally:
                per_thread.refusal = None
        finally:
            per_thread.refusal = None

    @contextlib.contextmanager
    def reading_once(self) -> Iterator[None]:
        """Allow reads within `call_refusing`: of something that is not part of a step, as it happens once."""
        # as above
        refusal = per_thread.refusal
        try:
            try:
                per_thread.refusal = None
                yield
            finally:
                per_thread.refusal = refusal
        finally:
            per_thread.refusal = refusal

    def call_deferring(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function`. This thread's lazy operators in it are recorded and none runs, seen before or not."""
        # as above
        try:
            try:
                per_thread.defers = True
                return function(*args, **kwargs)
            finally:
                per_thread.defers = False
        finally:
            per_thread.defers = False

    def runs_unseen_calls(self) -> bool:
        """Whether a call seen for the first time runs at once. See Note [First sight runs]."""
        return bool(config.first_sight == "run") and self.may_run()

    def may_run(self) -> bool:
        """Whether what is pending may run by itself: not while calls are only to be recorded."""
        return self.allows_execution and not per_thread.defers

    def is_refusing(self) -> bool:
        """Whether this thread is in `call_refusing`."""
        return per_thread.refusal is not None

    def check_allowed(self, cause: str) -> None:
        """Raise if `cause`, a read or a sync, comes within `call_refusing` or while nothing may run."""
        refusal = per_thread.refusal
        if refusal is not None:
            raise refusal(cause)
        if not self.allows_execution:
            raise ExecutionNotAllowedError(
                f"{cause} would run what is pending, which allow_execution(False) does not allow\n  at {user_site()}\n"
                "  lazy_backend.allow_execution(True) allows it again"
            )

    def is_strict(self) -> bool:
        """Whether a cut raises: in this thread, or everywhere."""
        return per_thread.strict or bool(config.strict)

    def check_not_strict(self, what: str, advice: str) -> None:
        """Raise `StrictModeError` in strict mode. `what` says what would cut the graph, `advice` what to do."""
        if self.is_strict():
            raise StrictModeError(f"{what}\n  at {user_site()}\n  {advice}")

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        """Within the block this thread's cuts raise."""
        before = per_thread.strict
        per_thread.strict = True
        try:
            yield
        finally:
            per_thread.strict = before
