"""What a run hears from other ranks, and further runs of its graph that hear the same without communicating.

In: the calls of operators that communicate, on one thread. Out: what each of them sends; and what it heard, again.

Note [Trials do not communicate]
A trial computes a graph twice or more (Note [A plan is tried before it is used]), but ranks communicate once: in the
run of the interpreter. What that run hears is copied, and given to the plan and to runs with moved roundings in place
of communication. So each rank tries its plan in whichever step it has one, whatever the others do in that step. What a
plan would send is compared like its results: otherwise what the interpreter sent would hide that it is wrong.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Heard:
    """One call: what it was, whether it sends something, and what it returned or wrote into its first argument."""

    call: str
    sends: bool
    result: torch.Tensor | None


class _Joined(threading.local):
    """The conversation of this thread, as a function that does a call."""

    now: Callable[..., Any] | None = None


joined = _Joined()


class Conversation:
    """The calls of one run, in their order. `heard`: those of a run that is over."""

    def __init__(self, heard: Sequence[Heard] | None = None) -> None:
        self._is_over = heard is not None
        self.heard = list(heard or ())
        self._is_too_large = False  # for the memory that there is: it cannot be heard again

    @contextmanager
    def joined(self) -> Iterator[dict[int, torch.Tensor]]:
        """Within the first block this thread communicates, within the others it hears the same again.

        Gives what is sent, by place among the calls. Raises MemoryError if there was none for the copies.
        """
        if self._is_too_large:
            raise MemoryError("no memory for what other ranks sent")
        sent: dict[int, torch.Tensor] = {}
        places = itertools.count()
        answer = self._repeat if self._is_over else self._record
        before = joined.now
        try:
            joined.now = lambda *call: answer(next(places), sent, *call)
            yield sent
        finally:
            joined.now = before
        for left_out in self.heard[next(places) :]:
            raise RuntimeError(f"{left_out.call} is left out")
        self._is_over = True

    def _record(
        self,
        place: int,
        sent: dict[int, torch.Tensor],
        name: str,
        is_sender: Callable[[], bool],
        kernel: Callable[..., Any],
        args: Sequence[Any],
    ) -> Any:
        sends = is_sender()
        before = self._copied(operand(args, torch.Tensor)) if sends else None
        if before is not None:
            sent[place] = before
        made = kernel(*args)
        result = args[0] if name.endswith("_") else made
        self.heard.append(Heard(_described(name, args), sends, None if result is None else self._copied(result)))
        return made

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        try:
            return None if self._is_too_large else tensor.clone()
        except (MemoryError, torch.OutOfMemoryError):  # which is no error of the program
            self._is_too_large = True
            return None

    def _repeat(self, place: int, sent: dict[int, torch.Tensor], name: str, _: Any, kernel: Any, args: Any) -> Any:
        call = _described(name, args)
        heard = self.heard[place] if place < len(self.heard) else Heard("nothing", False, None)
        if heard.call != call:
            raise RuntimeError(f"{call} is called in place of {heard.call}")
        if heard.sends:
            sent[place] = operand(args, torch.Tensor).clone()
        if heard.result is None:
            return None
        if not name.endswith("_"):
            return heard.result.clone()
        args[0].copy_(heard.result)
        return None


def operand(args: Sequence[Any], kind: type) -> Any:
    """The operand of a call of which others hear. `kind`: of tensors among the arguments."""
    tensors = [arg for arg in args if isinstance(arg, kind)]
    return tensors[1] if len(tensors) > 2 else tensors[0]


def _described(name: str, args: Sequence[Any]) -> str:
    numbers = (list(arg) if isinstance(arg, list | tuple) else arg for arg in args if not isinstance(arg, torch.Tensor))
    return f"{name}({', '.join(map(str, numbers))})"
