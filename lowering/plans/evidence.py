"""The run in which a compiled plan was refused, kept in a file, so that other forms of its graph can be tried in it.

In: the inputs of a run. Out: whether another compiled form of its graph computes what the interpreter computes of them.

Inputs are kept up to a bound, the smallest first: places, labels and masks are small. Floats beyond it are made anew of
the same mean and deviation. If these do not show the fault, the search for it ends (`repair.py`). What other ranks sent
is kept whole: with more than the bound, there is no search.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from lazy_backend.cache.scratch import make_scratch_folder
from lazy_backend.lowering.checks import rounding
from lazy_backend.lowering.checks.proof import Proof
from lazy_backend.lowering.collectives.conversation import Heard
from lazy_backend.lowering.compilation.compiler import CompiledPlan
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Graph, empty_of
from lazy_backend.lowering.ir.portable import from_bytes, to_bytes
from lazy_backend.lowering.plans.trial import Trial, TriedRun

# Bytes of inputs that are kept.
_MAX_KEPT = 1 << 28


class Evidence:
    """A file with a run's inputs, removed with this object. Raises OSError, MemoryError, and `NotPortable`."""

    def __init__(self, run: TriedRun) -> None:
        if sum(one.result.nbytes for one in run.heard if one.result is not None) > _MAX_KEPT:
            raise MemoryError("other ranks sent too much")
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
            inputs[place] = [one.mean().item(), one.std().item()] if is_made else rounding.copy_of(one)
        constants, seeds = [number.hex() for number in run.constants], list(map(int, run.seeds))
        kept = {"graph": text, "inputs": inputs, "constants": constants, "seeds": seeds, "sizes": list(run.sizes)}
        torch.save(kept | {"heard": [[one.call, one.sends, one.result] for one in run.heard]}, self.path)


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
