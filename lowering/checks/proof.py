"""Evidence that a compiled plan computes what the interpreter computes, or that it does not.

In: the verdicts of trials (`plans/trial.py`). Out: whether a plan needs a trial before it is used for some sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

# Compilers write other code for whole vectors than for what is left over. In elements.
_VECTOR = 16


class PlanRefused(RuntimeError):
    """A compiled plan that computed something else than the interpreter, for a reason that is not rounding."""


class PlanRepaired(Exception):
    """A plan that is used in place of one that was refused or could not be made.

    The text says why, and what was left to kernels.
    """


class OtherRanks(Protocol):
    """What is known of the verdicts of other ranks about the same plan."""

    is_awaited: bool  # whether they may still refuse it

    @property
    def refusal(self) -> object | None:
        """Why one of them refused it."""

    def look(self) -> None:
        """Ask for news, if it is time to."""

    def settle(self) -> None:
        """Say that this rank does not refuse it."""


class OpenJudgement(Protocol):
    """A question whether rounding explains what a trial suspects, asked of another process."""

    def begin(self) -> None:
        """Ask now."""

    def poll(self) -> Callable[[Proof], None] | None:
        """What to do with the proof, once there is an answer."""


class Proof:
    """What is known of one compiled plan. `mode`: as `config.verify_compiled`; "off" needs no proof.

    `seen`: the classes of sizes for which a trial agreed. `keep`: keeps them with the artefact on disk.
    `note_refusal`: is called with a refusal and, if it is known, the run that showed it. `left`: the text that says
    what was left to kernels because an earlier plan was refused. `others`: for a plan that communicates.
    """

    def __init__(
        self,
        mode: str = "off",
        seen: Iterable[str] = (),
        keep: Callable[[dict[str, Any]], None] = lambda marks: None,
        note_refusal: Callable[[PlanRefused, Any], None] = lambda refusal, run: None,
        left: str = "",
        others: OtherRanks | None = None,
    ) -> None:
        self.mode = mode
        self.seen = frozenset(seen)
        self.is_suspected = False  # a trial has found differences that further runs of the interpreter may explain
        self.judgement: OpenJudgement | None = None  # under way, whether they do
        self.ask: Callable[..., OpenJudgement] | None = None  # has them explained elsewhere
        self.refusal: PlanRefused | None = None
        self.left = left
        self._keep = keep
        self._note_refusal = note_refusal
        self._others = others
        if others is not None and (mode == "off" or self.seen):
            others.settle()

    def covers(self, sizes: Sequence[int]) -> bool:
        """Whether the plan may be used for these values of its symbols."""
        return self.mode == "off" or (self._is_proven(sizes) and not self._is_awaited())

    def waits(self, sizes: Sequence[int]) -> bool:
        """Whether the verdict of a trial is under way: in another process, or on other ranks.

        See Note [Rounding is judged elsewhere] and Note [Ranks share verdicts].
        """
        return self.judgement is not None or (self._is_proven(sizes) and self._is_awaited())

    @property
    def may_ask(self) -> bool:
        """Whether differences are explained elsewhere; otherwise by the next run."""
        return self.ask is not None and self.mode == "once" and not self.is_suspected

    def _is_proven(self, sizes: Sequence[int]) -> bool:
        return self.mode == "once" and _classes(sizes) <= self.seen

    def _is_awaited(self) -> bool:
        return self._others is not None and self._others.is_awaited

    def listen(self) -> None:
        """Take the answer of a judgement, if there is one. Refuse the plan if another rank has refused it."""
        judgement = self.judgement
        if judgement is not None and (conclude := judgement.poll()) is not None:
            self.judgement = None
            conclude(self)
        if self._others is not None and self.refusal is None and self.mode != "off":
            self._others.look()
            if self._others.refusal is not None:
                self.refusal = PlanRefused(str(self._others.refusal))

    def agree(self, sizes: Sequence[int]) -> None:
        """Note that a trial with these sizes agreed."""
        self.is_suspected = False
        seen = self.seen | _classes(sizes)
        if seen != self.seen:
            self.seen = seen
            self._keep({"agreed": sorted(seen)})
            if self._others is not None:
                self._others.settle()

    def go_without(self) -> None:
        """Have the plan used without a proof."""
        self.mode = "off"
        if self._others is not None:
            self._others.settle()

    def refuse(self, refusal: PlanRefused, run: Any = None) -> None:
        """Note that a trial did not agree: the plan is not used any more."""
        self._note_refusal(refusal, run)
        self.refusal = refusal


def _classes(sizes: Sequence[int]) -> frozenset[str]:
    """Classes of sizes whose code differs; a plan without symbols has one class."""
    kinds = ("whole" if size % _VECTOR == 0 else "rest" if size > _VECTOR else "small" for size in sizes)
    return frozenset(["any", *(f"{place} {kind}" for place, kind in enumerate(kinds))])
