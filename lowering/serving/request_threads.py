"""The threads of operators, shared among the requests under way.

In: a run of a region. Out: how many threads compute it.

Note [Threads follow requests]
One request alone is answered soonest by all threads, and several by one each: threads of more requests than there are
cores wait for one another in every operator. So a run takes the threads that operators of its thread use
(`torch.set_num_threads`), divided by the runs that are under way in the process as it begins. Inductor's code has the
number compiled in elsewhere; that of served functions asks for it (`CompileRequest.shares_threads`). Sums are split by
the number, so the last bits of an answer may depend on what else is asked: where deterministic algorithms are wanted,
nothing is shared. Nor is it with one thread, or in a region that one thread computes anyway (Note [Small graphs on one
thread]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lazy_backend.ports.native_code import set_own_threads

R = TypeVar("R")


class RequestThreads:
    """The runs that are under way in this process."""

    def __init__(self) -> None:
        self._runs: set[object] = set()  # each change is one call of C

    def run(self, function: Callable[..., R], *arguments: Any) -> R:
        """The result of a run, with its share of the threads. See Note [Threads follow requests]."""
        own, usual = object(), torch.get_num_threads()  # of this thread
        try:
            self._runs.add(own)
            set_own_threads(max(1, usual // len(self._runs)))
            return function(*arguments)
        finally:
            self._runs.discard(own)
            set_own_threads(usual)

    def reset_after_fork(self) -> None:
        """In a forked child: other runs stayed with the parent."""
        self._runs.clear()


request_threads = RequestThreads()
