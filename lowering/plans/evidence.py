"""The run in which a compiled plan was refused, kept in a file, so that other forms of its graph can be tried in it.

In: the inputs of a run. Out: whether another compiled form of its graph computes what the interpreter computes of them,
or whether rounding explains how its own plan differed.

Inputs are kept up to a bound, the smallest first: places, labels and masks are small. Floats beyond it are made anew of
the same mean and deviation. If these do not show the fault, the search for it ends (`repair.py`). What other ranks sent
is kept whole: with more than the bound, there is no search.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazy_backend.cache.scratch import make_scratch_folder
from lazy_backend.lowering.checks import rounding
from lazy_backend.lowering.checks.proof import PlanRefused, Proof
from lazy_backend.lowering.checks.rounding import Discrepancy
from lazy_backend.lowering.collectives.conversation import Heard
from lazy_backend.lowering.compilation.background import Job, worker
from lazy_backend.lowering.compilation.compiler import CompiledPlan
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Graph, empty_of
from lazy_backend.lowering.ir.portable import from_bytes, to_bytes
from lazy_backend.lowering.plans.trial import Compared, Trial, TriedRun, described, unexplained

# Bytes of inputs that are kept.
_MAX_KEPT = 1 << 28


class Evidence:
    """A file with a run's inputs, removed with this object. Raises OSError, MemoryError, and `NotPortable`.

    `compared`: the results that are suspected; with them, all inputs are kept as they are, up to the bound.
    """

    def __init__(self, run: TriedRun, compared: Compared | None = None) -> None:
        if sum(one.result.nbytes for one in run.heard if one.result is not None) > _MAX_KEPT:
            raise MemoryError("other ranks sent too much")
        if compared is not None and sum(one.nbytes for one in run.inputs) > _MAX_KEPT:
            raise MemoryError("there are too many inputs")
        text = to_bytes(run.graph).decode()
        folder = make_scratch_folder()
        self.remove = weakref.finalize(self, folder.remove)
        self.path = str(folder.path / "run")
        inputs: dict[int, Any] = {}
        nbytes = 0
        for place in sorted(range(len(run.inputs)), key=lambda place: run.inputs[place].nbytes):
            one = run.inputs[place]
            nbytes += one.nbytes
            is_made = nbytes > _MAX_KEPT and one.is_floating_point()
            if is_made:
                inputs[place] = [one.mean().item(), one.std().item()]
            else:
                inputs[place] = one if compared is not None else rounding.copy_of(one)
        constants, seeds = [number.hex() for number in run.constants], list(map(int, run.seeds))
        kept: dict[str, Any] = {
            "graph": text,
            "inputs": inputs,
            "constants": constants,
            "seeds": seeds,
            "sizes": list(run.sizes),
        }
        kept["compared"] = dict(compared or {})
        kept["heard"] = [[one.call, one.sends, one.result] for one in run.heard]
        torch.save(kept, self.path)


def disagreement(path: str, plan: CompiledPlan) -> str:
    """How a plan differs from the interpreter in the run of a file; empty if it does not."""
    kept = torch.load(path, weights_only=True)
    graph = from_bytes(kept["graph"].encode())
    constants = tuple(map(float.fromhex, kept["constants"]))
    plan.proof = Proof("once")
    heard = [Heard(*one) for one in kept["heard"]]
    trial = Trial(plan, kept["sizes"], SerialGraphExecutor(graph), lambda verdict, seconds: None, heard)
    while not plan.proof.refusal and not plan.proof.covers(kept["sizes"]):
        trial.execute(_inputs(graph, kept["inputs"]), constants, kept["seeds"])
    return "no memory for a trial" if plan.proof.mode == "off" else str(plan.proof.refusal or "")


def judgement(path: str) -> dict[int, Discrepancy]:
    """The results that were suspected in the run of a file and that rounding does not explain."""
    kept = torch.load(path, weights_only=True)
    graph = from_bytes(kept["graph"].encode())
    constants, heard = tuple(map(float.fromhex, kept["constants"])), [Heard(*one) for one in kept["heard"]]
    run = TriedRun(graph, _inputs(graph, kept["inputs"]), constants, kept["seeds"], kept["sizes"], heard)
    compared = kept["compared"]
    ours, theirs = ({place: pair[side] for place, pair in compared.items()} for side in range(2))
    return unexplained(compared, ours, theirs, run, SerialGraphExecutor(graph))


class Judgement:
    """Whether rounding explains what a trial suspects, asked of the compiler's process.

    Note [Rounding is judged elsewhere]
    Runs with moved roundings take several times as long as a step, and their results are needed for nothing else. So
    the run is written to a file, on a thread of its own, with both results of what is suspected, and the compiler's
    process judges it at its low priority. Steps go on interpreted until it has. If it cannot, the next run is another
    trial, in which this process judges.
    """

    def __init__(self, run: TriedRun, compared: Compared, sent: Sequence[int], waits: bool, idle: float) -> None:
        """`waits`: whether `poll` waits for the answer. `idle`: seconds after which the process may end."""
        self._run: TriedRun | None = run
        self._compared: Compared | None = compared
        self._graph, self._sizes = run.graph, run.sizes
        self._sent, self._waits, self._idle = sent, waits, idle
        self._evidence: Evidence | None = None
        self._job: Job | None = None
        self._process = os.getpid()
        self._written = threading.Thread(target=self._write, name="lazy_backend evidence")
        with contextlib.suppress(RuntimeError):  # there are too many threads: the next run judges
            self._written.start()

    def _write(self) -> None:
        with contextlib.suppress(Exception):  # no memory, no disk, or objects that cannot be kept
            assert self._run is not None
            self._evidence = Evidence(self._run, self._compared)
        self._run = self._compared = None

    def begin(self) -> None:
        """Ask, once the file is written."""
        if self._process == os.getpid() and self._job is None:
            if self._written.ident is not None:
                self._written.join()
            if self._evidence is not None:
                self._job = worker.judge(self._evidence.path, self._idle)

    def poll(self) -> Callable[[Proof], None] | None:
        """What to do with the proof, once there is an answer."""
        if self._process != os.getpid():  # which has no such thread, and another compiler's process
            return _suspect
        worker.poll()
        if self._waits or not self._written.is_alive():
            self.begin()
        job = self._job
        if job is None:
            return None if self._written.is_alive() else _suspect
        if self._waits:
            worker.wait_for(job)
        if not job.done:
            return None
        return self._conclude if job.error is None and job.result is not None else _suspect

    def _conclude(self, proof: Proof) -> None:
        assert self._job is not None
        found = {int(place): Discrepancy(*one) for place, one in json.loads(self._job.result or b"{}").items()}
        if found:
            proof.refuse(PlanRefused(described(self._graph, self._sent, found)), self._evidence)
        else:
            proof.agree(self._sizes)


def _suspect(proof: Proof) -> None:
    proof.is_suspected = True


def _inputs(graph: Graph, kept: Mapping[int, Any]) -> list[torch.Tensor]:
    made = []
    for place, value in enumerate(graph.inputs):
        one = kept[place]
        if isinstance(one, list):
            mean, std = one
            like = empty_of(value.meta, graph.device)
            generator = backing_of(graph.device).new_generator(graph.device).manual_seed(place)
            rounding.memory_of(like).normal_(mean, std, generator=generator)
            made.append(like)
        else:
            made.append(rounding.copy_of(one))
    return made
