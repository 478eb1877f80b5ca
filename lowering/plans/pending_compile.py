"""One compile, from when it is due until there is a plan or an error.

In: a `CompileRequest`, and a policy that says how it may be answered. Out: a `CompiledPlan`: from disk, from the worker
process, or compiled in this process. If a trial refuses that plan, or the compiler fails in the worker process, another
one of the repaired graph.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache, Place
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.lowering.artefacts.artefact import NO_PLAN, BadArtefact, marked, marks_of, without_plan
from lazy_backend.lowering.artefacts.environment import disk_key_parts
from lazy_backend.lowering.checks.proof import PlanRefused, Proof
from lazy_backend.lowering.checks.reproducer import NotReproducible, reproducer
from lazy_backend.lowering.collectives.groups import is_one_of_several_ranks
from lazy_backend.lowering.collectives.verdicts import Found, SharedVerdict, shared_verdict
from lazy_backend.lowering.compilation.background import Job, NotPortableThere, WorkerDied, worker
from lazy_backend.lowering.compilation.compiler import CompiledPlan, compile_graph, load_graph, lookup_backend
from lazy_backend.lowering.compilation.request import Backend, CompileRequest, runs_module_as_is
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.ir.portable import NotPortable
from lazy_backend.lowering.ir.ranges import profiled
from lazy_backend.lowering.plans.evidence import Evidence, Judgement, disagreement
from lazy_backend.lowering.plans.policy import CompilePolicy, GraphTooLarge
from lazy_backend.lowering.plans.repair import Repair, known
from lazy_backend.lowering.plans.trial import Compared, TriedRun
from lazy_backend.ports.cpython import pass_on_interruption

# What the artefact of a refused plan says of the search for the fault.
_FOUND = ("left", "because", "patterns")


def compiles_elsewhere(backend: Backend, device: torch.device) -> bool:
    """Whether the worker process compiles for this backend: only inductor's results can be sent."""
    return backend == "inductor" and backing_of(device).compiles_elsewhere and hasattr(os, "register_at_fork")


class CompileState(Enum):
    """How far a compile has come: from each state to the next, or straight to one of the last two.

    In a forked child, SENT goes back to LOOKED_UP. SEARCHING follows on DONE if the plan was refused, on SENT if the
    compiler failed; from there it goes to DUE, with another request.
    """

    DUE = "due"  # next: look on disk
    LOOKED_UP = "looked up"  # not on disk; next: start the worker process
    READY = "ready"  # next: send the request to that process
    SENT = "sent"
    DONE = "done"  # there is a plan
    FAILED = "failed"  # there is an error
    SEARCHING = "searching"  # for what has to be left to kernels, see Note [A refused plan is repaired]


class PendingCompile:
    """One compile. `advance` does the next part of the work, `poll` checks whether the worker process has answered.

    `repairs`: whether a compiler that fails is asked for other forms. Once the compile is over, `stage` is that of a
    `CompileReport` ("compiled", "loaded" or "failed") and `seconds` the time it took.
    """

    def __init__(self, request: CompileRequest, policy: CompilePolicy, key: Key | None, repairs: bool = True) -> None:
        self.request = request
        self.policy = policy
        self.state = CompileState.DUE
        self.plan: CompiledPlan | None = None
        self.error: Exception | None = None
        self.stage = ""
        self.seconds = 0.0
        self._key = key  # of the graph; without one nothing is stored
        self._job: Job | None = None
        self._evidence: Evidence | None = None
        self._repair: Repair | None = None
        self._verdict: SharedVerdict | None = None  # of all ranks
        self._num_ranks = 1  # that are known to have a verdict soon
        self._left_because = ""  # what was found by a search, here or in an earlier process
        self._repairs = repairs
        self._has_failed = False  # whether the worker process has failed to compile this request
        self._is_elsewhere = compiles_elsewhere(policy.backend, request.stored.device)
        if not self._is_elsewhere:
            lookup_backend(policy.backend)  # raises for a misspelt name, which is the user's error, not the compiler's

    @property
    def is_over(self) -> bool:
        return self.state in (CompileState.DONE, CompileState.FAILED)

    @property
    def is_begun(self) -> bool:
        return self.state is not CompileState.DUE

    @property
    def artefact_key(self) -> Key | None:
        """The exact key of the compiled graph: the parts of the graph's key, of the request and of the environment."""
        return None if self._key is None else Key((*self._key.parts, *self.request.key_parts(), *disk_key_parts()))

    @property
    def is_sent(self) -> bool:
        """Whether `poll` goes on with it."""
        return self.state in (CompileState.SENT, CompileState.SEARCHING)

    def advance(self) -> None:
        """Do the next part: a millisecond of work if the worker process compiles, otherwise the whole compile."""
        nodes = self.request.stored.num_nodes
        if nodes > self.policy.max_compiled_nodes:
            bound = f"it has more nodes than config.max_compiled_nodes = {self.policy.max_compiled_nodes}"
            self._fail(GraphTooLarge(bound), 0.0)
        elif not self._is_elsewhere:
            self._ask_ranks()
            self._compile_here()
        elif self.state is CompileState.DUE:
            self._load()
            if self.state is CompileState.DUE:  # an earlier process has repaired it
                self._load()
        elif self.state is CompileState.LOOKED_UP:
            worker.start(self.policy.compiler_idle)
            self.state = CompileState.READY
        elif self.state is CompileState.READY:
            self._send()

    def _ask_ranks(self) -> None:
        """Have other ranks tell of the plan, if it is to communicate."""
        if self._verdict is None and is_one_of_several_ranks() and (key := self.artefact_key) is not None:
            ops = (node.op for node in self.request.stored.get().nodes)
            self._verdict = shared_verdict(ops, key, self._num_ranks)

    def advance_to_the_end(self) -> None:
        """Do all remaining parts, but do not wait for the worker process's answer."""
        with worker.awaited():
            while not self.is_sent and not self.is_over:
                self.advance()

    def wait(self) -> None:
        """Wait for the worker process's answer, and take it."""
        while self._job is not None and self.is_sent:
            with profiled("compile"):
                worker.wait_for(self._job)
            self.poll()

    def poll(self) -> None:
        """Take the worker process's answer, if there is one."""
        worker.poll()
        if self.state is CompileState.SEARCHING:
            self._search_on()
            return
        job = self._job
        if job is None or not job.done or not self.is_sent:
            return
        store = self.policy.store
        if store is not None and job.kept is not None:
            store.count_elsewhere(*job.kept)
        if isinstance(job.error, NotPortableThere):
            self._compile_here()
        elif job.error is not None:
            self._go_on_after(job.error, job.seconds)
        elif job.result is not None:
            self._take(job.result, job)
        else:  # this is a forked child, and the worker process was the parent's: ask again
            self._job, self.state = None, CompileState.LOOKED_UP

    def _take(self, data: bytes, job: Job) -> None:
        try:
            self._succeed_with(data, "loaded" if job.found else "compiled", job.seconds)
        except Exception as error:
            pass_on_interruption(error)
            self._fail(error, job.seconds)
            return
        store = self.policy.store
        key = self.artefact_key
        if store is not None and key is not None and job.kept is None:  # readonly: `put` reports that
            store.put(key, data)

    def _load(self) -> None:
        """Take the plan from disk, if it is there."""
        self._ask_ranks()
        self.state = CompileState.LOOKED_UP
        key = self.artefact_key
        if self.policy.store is None or key is None:
            return
        start = time.perf_counter()
        data = self.policy.store.get(key)
        if data is None:
            return
        try:
            self._succeed_with(data, "loaded", time.perf_counter() - start)
        except Exception as error:  # as where the C library is older than where it was compiled: compile again
            pass_on_interruption(error)
            self.policy.store.reject(f"{type(error).__name__}: {error}")

    def _send(self) -> None:
        """Send the request to the worker process. See Note [Compiles happen elsewhere]."""
        key = self.artefact_key
        place = None if self.policy.store is None or key is None else self.policy.store.place()
        keep = None if place is None or key is None else (place, key)
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
            pass_on_interruption(error)
            self._fail(error, time.perf_counter() - start)
        else:
            self._succeed(plan, "compiled", time.perf_counter() - start)

    def _succeed_with(self, data: bytes, stage: str, seconds: float) -> None:
        """Take an artefact's plan, or the refusal that a trial left in it. Raises what loading raises."""
        marks = marks_of(data)
        if "refused" not in marks or (self._verify() == "off" and marks["kind"] != NO_PLAN):
            self._succeed(load_graph(data, self.request), stage, seconds, marks.get("agreed", ()))
        else:
            found = {name: marks[name] for name in _FOUND if name in marks}
            self._tell_ranks(marks["refused"], found)
            if found:
                known.add(self.policy.backend, found["patterns"])
                self._leave(tuple(found["left"]), found["because"])
            else:
                self._fail(PlanRefused(marks["refused"]), seconds)

    def _verify(self) -> str:
        """Operators of the program's own may communicate inside, which a trial would do twice: none among ranks."""
        is_exempt = runs_module_as_is(self.policy.backend)
        if not is_exempt and is_one_of_several_ranks():
            known_namespaces = ("aten", "prims", "lazy_backend")
            is_exempt = any(node.op.namespace not in known_namespaces for node in self.request.stored.get().nodes)
        return "off" if is_exempt else self.policy.verify

    def _keep_marks(self, marks: dict[str, Any]) -> None:
        """Put marks on the artefact on disk, on a thread of their own: no run waits for a disk or a lock."""
        store = self.policy.store
        place = None if store is None or not self._is_elsewhere else store.place()
        if place is not None and (key := self.artefact_key) is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter is exiting, or there are too many threads
                threading.Thread(target=_mark, args=(place, key, marks), name="lazy_backend marks").start()

    def _keep_refusal(
        self, refusal: Exception | None, found: dict[str, Any] | None = None, alone: int | None = None
    ) -> None:
        """Keep it with what a search has found, and a program that shows it: of one node, if that is wrong `alone`."""
        marks, request = {"refused": str(refusal), **(found or {})}, self.request
        with contextlib.suppress(Exception):  # the refusal is kept whatever a program cannot be written of
            try:
                marks["script"] = reproducer(request.stored.get(), request.constants, str(refusal), alone)
            except NotReproducible as reason:
                marks["no_script"] = str(reason)
        self._keep_marks(marks)

    def _succeed(self, plan: CompiledPlan, stage: str, seconds: float, seen: Sequence[str] = ()) -> None:
        keep, note = self._keep_marks, self._note_refusal
        plan.proof = Proof(self._verify(), seen, keep, note, self._left_because, self._verdict)
        if self._is_elsewhere:
            plan.proof.ask = self._judge
        self.plan, self.stage, self.seconds = plan, stage, seconds
        self.state = CompileState.DONE

    def _judge(self, run: TriedRun, compared: Compared, sent: Sequence[int]) -> Judgement:
        """Called by a trial."""
        return Judgement(run, compared, sent, not self.policy.background, self.policy.compiler_idle)

    # ----- after a refusal, see Note [A refused plan is repaired]

    def _note_refusal(self, refusal: PlanRefused, run: TriedRun | Evidence | None) -> None:
        """Called by a trial. One search is enough: a repaired plan is not repaired again, nor by several ranks."""
        if self._verdict is not None:
            self._verdict.refuse(str(refusal))
            if self._verdict.is_led_elsewhere:
                return
        is_too_slow = self.policy.backend == "inductor" and not self._is_elsewhere  # to be asked by this process
        if run is not None and not self._left_because and not is_too_slow:
            with contextlib.suppress(Exception):  # no memory, no disk, or objects that cannot be kept
                self._evidence = Evidence(run) if isinstance(run, TriedRun) else run

    def begins_search(self, may_search: bool) -> bool:
        """Begin the search for what made the plan wrong, if that is possible. Otherwise keep the refusal."""
        refusal = None if self.plan is None else self.plan.proof.refusal
        if self._verdict is not None and self._verdict.is_led_elsewhere and may_search:
            self._job, self.state = None, CompileState.SEARCHING
            return True
        if self._evidence is None or refusal is None or not may_search:
            self._keep_refusal(refusal)
            self._tell_ranks(str(refusal), {})
            return False
        self._repair, self._job, self.state = Repair(self.request, refusal), None, CompileState.SEARCHING
        return True

    def _go_on_after(self, error: Exception, seconds: float) -> None:
        """Ask once more, then begin the search for what the compiler fails on. Ranks that agree on a plan do not."""
        if isinstance(error, WorkerDied):
            self._fail(error, seconds)
        elif not self._has_failed:  # something may have killed its C++ compiler
            self._has_failed = True
            self._send()
        elif not self._repairs or self._left_because or self._verdict is not None:
            self._fail(error, seconds)
        else:  # the failed job answers the first question
            self._repair = Repair(self.request, error)
            self.state = CompileState.SEARCHING
            self._search_on()

    def _search_on(self) -> None:
        """Take an answer, if there is one, and ask for the next form of the graph."""
        repair, evidence, job = self._repair, self._evidence, self._job
        if repair is None:
            self._follow()
            return
        if job is not None and not job.done:
            return
        self._job = None
        if job is not None and job.result is not None:
            repair.answer("" if evidence is None else job.result.decode())
        elif job is not None and job.error is not None:
            repair.answer(str(job.error))
        if repair.asked is not None:
            request = replace(self.request, left=repair.asked)
            if self._is_elsewhere:
                path = None if evidence is None else evidence.path
                self._job = worker.submit(request, self.policy.compiler_idle, tried_in=path)
            elif evidence is not None:
                repair.answer(_tried_here(request, evidence.path))
            return
        self._end_search(repair)
        if evidence is not None:
            evidence.remove()
        self._evidence = self._repair = None

    def _end_search(self, repair: Repair) -> None:
        refusal, found = repair.refusal, Found()
        if repair.left:
            wrong = refusal if isinstance(refusal, PlanRefused) else f"it could not be compiled: {refusal}"
            because = f"{wrong}\n  the fault is in " + "\n  and in ".join(repair.found)
            patterns = sorted(repair.patterns)
            found = {"left": repair.left, "because": because, "patterns": patterns, "alone": repair.alone}
        self._tell_ranks(str(refusal), found)
        self._conclude(refusal, found)

    def _follow(self) -> None:
        """Conclude what another rank concludes from its search, once it has."""
        assert self._verdict is not None
        found, refusal = self._verdict.found_elsewhere(), None if self.plan is None else self.plan.proof.refusal
        if found is not None and refusal is not None:
            self._conclude(refusal, found)

    def _tell_ranks(self, refusal: str, found: Found) -> None:
        if self._verdict is not None and not self._verdict.is_led_elsewhere:
            self._verdict.refuse(refusal)
            if not self._verdict.is_led_elsewhere:
                self._verdict.tell_found(found)

    def _conclude(self, refusal: Exception, found: Found) -> None:
        """Done again if it is interrupted: the state changes last."""
        is_refusal = isinstance(refusal, PlanRefused)
        if found or is_refusal:
            self._keep_refusal(refusal, {name: found[name] for name in _FOUND if name in found}, found.get("alone"))
        if found:
            known.add(self.policy.backend, found["patterns"])
            self._leave(tuple(found["left"]), found["because"])
            return
        self.plan = None
        self._fail(refusal, 0.0)
        self.stage = "refused" if is_refusal else "failed"

    def _leave(self, left: tuple[int, ...], because: str) -> None:
        """Begin again, with these nodes left to kernels."""
        self.request = replace(self.request, left=left)
        if self._verdict is not None:
            self._num_ranks = self._verdict.num_ranks
        self._left_because, self._has_failed = because, False
        self._job, self.plan, self.error, self._verdict = None, None, None, None
        self.state = CompileState.DUE

    def _fail(self, error: Exception, seconds: float) -> None:
        if self._verdict is not None:
            self._verdict.settle()
        self.error, self.stage, self.seconds = error, "failed", seconds
        self.state = CompileState.FAILED


def _tried_here(request: CompileRequest, path: str) -> str:
    try:
        return disagreement(path, compile_graph(request))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _mark(place: Place, key: Key, marks: dict[str, Any]) -> None:
    """Put marks on an artefact in the disk cache at `place`, by a cache of its own: a fork may come in between.

    Where the compiler has failed, there is none: marks that say what was left to kernels are kept all the same.
    """
    with contextlib.suppress(CacheRefused, BadArtefact):
        cache = DiskCache(place.directory, place.max_bytes)
        data = cache.get(key)
        if data is None and "left" in marks:
            data = without_plan()
        if data is not None:
            cache.put(key, marked(data, marks))
