"""Evidence that a compiled plan computes what the interpreter computes, or that it does not.

In: the verdicts of trials (`plans/trial.py`). Out: whether a plan needs a trial before it is used for some sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Compilers write other code for whole vectors than for what is left over. In elements.
_VECTOR = 16


class PlanRefused(RuntimeError):
    """A compiled plan that computed something else than the interpreter, for a reason that is not rounding."""


class PlanRepaired(Exception):
    """A plan that is used in place of one that was refused. The text says why, and what was left to kernels."""


class Proof:
    """What is known of one compiled plan. `mode`: as `config.verify_compiled`; "off" needs no proof.

    `seen`: the classes of sizes for which a trial agreed. `keep`: keeps them with the artefact on disk.
    `note_refusal`: is called with a refusal and, if it is known, the run that showed it. `left`: the text that says
    what was left to kernels because an earlier plan was refused.
    """

    def __init__(
        self,
        mode: str = "off",
        seen: Iterable[str] = (),
        keep: Callable[[dict[str, Any]], None] = lambda marks: None,
        note_refusal: Callable[[PlanRefused, Any], None] = lambda refusal, run: None,
        left: str = "",
    ) -> None:
        self.mode = mode
        self.seen = frozenset(seen)
        self.is_suspected = False  # a trial has found differences that further runs of the interpreter may explain
        self.refusal: PlanRefused | None = None
        self.left = left
        self._keep = keep
        self._note_refusal = note_refusal

    def covers(self, sizes: Sequence[int]) -> bool:
        """Whether the plan may be used for these values of its symbols."""
        return self.mode == "off" or (self.mode == "once" and _classes(sizes) <= self.seen)

    def agree(self, sizes: Sequence[int]) -> None:
        """Note that a trial with these sizes agreed."""
        self.is_suspected = False
        seen = self.seen | _classes(sizes)
        if seen != self.seen:
            self.seen = seen
            self._keep({"agreed": sorted(seen)})

    def refuse(self, refusal: PlanRefused, run: Any = None) -> None:
        """Note that a trial did not agree: the plan is not used any more."""
        self._note_refusal(refusal, run)
        self.refusal = refusal


def _classes(sizes: Sequence[int]) -> frozenset[str]:
    """Classes of sizes whose code differs; a plan without symbols has one class."""
    kinds = ("whole" if size % _VECTOR == 0 else "rest" if size > _VECTOR else "small" for size in sizes)
    return frozenset(["any", *(f"{place} {kind}" for place, kind in enumerate(kinds))])
