"""The tensors that requests write, kept apart for each of many sequences of requests.

In: an executor whose graph writes weights. Out: `RequestState`, with which a sequence of requests runs, one by one.

Note [States of requests]
A graph that writes weights has one set of them, and its requests take turns: so does a batch norm in training. A
decoder that writes keys and values to its cache has one cache for each text instead. A `RequestState` holds tensors in
the place of all weights that the example's graph writes. The weights that it only reads stay shared, and a swap changes
no state. A request with a state takes no turn. A state runs one request at a time: a second one would read what the
first is about to write, so it is refused. After a request that failed on the way, nobody knows what it had written: the
state is refused from then on. A request that is refused for its arguments writes nothing, and leaves the state as it
was.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from lazy_backend.lowering.serving.weights import CurrentWeights, InputError


class RequestState:
    """Tensors that requests write, for a sequence of requests. See Note [States of requests].

    `tensors`: by the names of the weights whose place they take. Entered for each request; raises `InputError` while
    another one runs, and after one that failed.
    """

    __slots__ = ("tensors", "current", "_turn", "_failure")

    def __init__(self, tensors: Mapping[str, torch.Tensor], current: CurrentWeights) -> None:
        self.tensors = tensors
        self.current = current  # weights of the executor that it belongs to
        self._turn = threading.Lock()
        self._failure: str | None = None

    def __enter__(self) -> None:
        if not self._turn.acquire(blocking=False):
            raise InputError(
                "another request with this state is under way, or was interrupted as it began\n"
                "  wait for its answer, or take a state for each thread"
            )
        if self._failure is not None:
            self._turn.release()
            raise InputError(
                f"a request with this state raised {self._failure}, and may have written a part of it\n"
                "  begin with a new state()"
            )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._failure = kind.__name__
        self._turn.release()
