"""One compile, from when it is due until there is a plan or an error.

In: a `CompileRequest`, and where and how it may be answered. Out: a `CompiledPlan`, from disk, from the compiler's
process, or made here.
"""

from __future__ import annotations

import os
import time
from enum import Enum

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.compilation.background import Job, NotPortableThere, worker
from lazy_backend.lowering.compilation.compiler import CompiledPlan, compile_graph, load_graph, lookup_backend
from lazy_backend.lowering.compilation.environment import disk_key_parts
from lazy_backend.lowering.compilation.request import Backend, CompileRequest
from lazy_backend.lowering.ir.portable import NotPortable
from lazy_backend.lowering.ir.ranges import profiled
from lazy_backend.lowering.plans.policy import CompilePolicy, GraphTooLarge


def compiles_elsewhere(backend: Backend, device: torch.device) -> bool:
    """Whether the compiler's process compiles for this backend: the one whose results can be sent."""
    return backend == "inductor" and device.type == "cpu" and hasattr(os, "register_at_fork")


class CompileState(Enum):
    """How far a compile has come. It goes from one to the next, or at once to one of the last two."""

    DUE = "due"  # the disk is to be asked
    LOOKED_UP = "looked up"  # not there: the compiler's process is to be started
    READY = "ready"  # it is to be sent to that process
    SENT = "sent"
    DONE = "done"  # there is a plan
    FAILED = "failed"  # there is an error


class PendingCompile:
    """One compile. `advance` does the next piece of it, `poll` looks whether the compiler's process has answered.

    `stage`: in the end, what `CompileReport` calls it: "compiled", "loaded" or "failed"; and `seconds` what it took.
    """

    def __init__(self, request: CompileRequest, policy: CompilePolicy, key: Key | None) -> None:
        self.request = request
        self.policy = policy
        self.state = CompileState.DUE
        self.plan: CompiledPlan | None = None
        self.error: Exception | None = None
        self.stage = ""
        self.seconds = 0.0
        self._key = key  # of the graph; without one nothing is stored
        self._job: Job | None = None
        self._is_elsewhere = compiles_elsewhere(policy.backend, request.stored.device)
        if not self._is_elsewhere:
            lookup_backend(policy.backend)  # a misspelt name is the user's error, not the compiler's

    @property
    def is_over(self) -> bool:
        return self.state in (CompileState.DONE, CompileState.FAILED)

    @property
    def is_sent(self) -> bool:
        return self.state is CompileState.SENT

    def advance(self) -> None:
        """Do the next piece: a millisecond if the compiler's process compiles, otherwise the whole compile."""
        nodes = self.request.stored.num_nodes
        if nodes > self.policy.max_compiled_nodes:
            bound = f"it has more nodes than config.max_compiled_nodes = {self.policy.max_compiled_nodes}"
            self._fail(GraphTooLarge(bound), 0.0)
        elif not self._is_elsewhere:
            self._compile_here()
        elif self.state is CompileState.DUE:
            self._load()
        elif self.state is CompileState.LOOKED_UP:
            worker.start(self.policy.compiler_idle)
            self.state = CompileState.READY
        elif self.state is CompileState.READY:
            self._send()

    def advance_to_the_end(self) -> None:
        """Do all pieces; what is sent to the compiler's process is not waited for."""
        with worker.awaited():
            while not self.is_sent and not self.is_over:
                self.advance()

    def wait(self) -> None:
        """Wait for the answer of the compiler's process, and take it."""
        if self._job is not None and self.is_sent:
            with profiled("compile"):
                worker.wait_for(self._job)
            self.poll()

    def poll(self) -> None:
        """Take the answer of the compiler's process, if there is one."""
        worker.poll()
        job = self._job
        if job is None or not job.done or not self.is_sent:
            return
        store = self.policy.store
        if store is not None and job.kept is not None:
            store.count_elsewhere(*job.kept)
        if isinstance(job.error, NotPortableThere):
            self._compile_here()
        elif job.error is not None:
            self._fail(job.error, job.seconds)
        elif job.result is not None:
            self._take(job.result, job)
        else:  # this is a forked child, and the process was the parent's: ask again
            self._job, self.state = None, CompileState.LOOKED_UP

    def _take(self, data: bytes, job: Job) -> None:
        try:
            plan = load_graph(data, self.request)
        except Exception as error:
            self._fail(error, job.seconds)
            return
        self._succeed(plan, "compiled", job.seconds)
        store = self.policy.store
        if store is not None and self._key is not None and job.kept is None:  # a readonly one: it says so
            store.put(self._artefact_key(self._key), data)

    def _load(self) -> None:
        """Take the plan from disk, if it is there."""
        self.state = CompileState.LOOKED_UP
        if self.policy.store is None or self._key is None:
            return
        start = time.perf_counter()
        data = self.policy.store.get(self._artefact_key(self._key))
        if data is None:
            return
        try:
            plan = load_graph(data, self.request)
        except Exception:
            return  # made by a version that wrote something else: the compiler makes a new one
        self._succeed(plan, "loaded", time.perf_counter() - start)

    def _send(self) -> None:
        """Have the compiler's process compile. See Note [Compiles happen elsewhere]."""
        place = None if self.policy.store is None or self._key is None else self.policy.store.place()
        keep = None if place is None or self._key is None else (place, self._artefact_key(self._key))
        try:
            self._job = worker.submit(self.request, self.policy.compiler_idle, keep)
        except NotPortable:
            self._compile_here()
            return
        self.state = CompileState.SENT

    def _compile_here(self) -> None:
        start = time.perf_counter()
        try:
            with profiled("compile"):
                plan = compile_graph(self.request)
        except Exception as error:
            self._fail(error, time.perf_counter() - start)
        else:
            self._succeed(plan, "compiled", time.perf_counter() - start)

    def _succeed(self, plan: CompiledPlan, stage: str, seconds: float) -> None:
        self.plan, self.stage, self.seconds = plan, stage, seconds
        self.state = CompileState.DONE

    def _fail(self, error: Exception, seconds: float) -> None:
        self.error, self.stage, self.seconds = error, "failed", seconds
        self.state = CompileState.FAILED

    def _artefact_key(self, key: Key) -> Key:
        """The exact key of a compiled graph: the graph's own, what was compiled in, and what it was compiled with."""
        return Key((*key.parts, *self.request.key_parts(), *disk_key_parts()))
