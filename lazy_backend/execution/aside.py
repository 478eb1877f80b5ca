"""Which stretches of a program are recorded, and which run at once.

In: the ends of stretches, and whoever needs to have everything recorded. Out: traces that record, or that do not. The
decision itself is `metrics.recording_costs`'s: see Note [Stepping aside] there.
"""

from __future__ import annotations

from collections.abc import Callable

from lazy_backend.execution.rules import Rules
from lazy_backend.lowering.collectives.groups import is_one_of_several_ranks
from lazy_backend.lowering.ir.ranges import is_profiling
from lazy_backend.lowering.plans.profiling import pending_compiles
from lazy_backend.metrics.recording_costs import Aside
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import DeviceContext


def _is_compiling() -> bool:
    return pending_compiles() > 0


class SteppingAside:
    """Lets devices step aside, and record again."""

    def __init__(self, rules: Rules) -> None:
        self.told: Callable[[], object] | None = None  # of each stretch of a program that ended
        self._rules = rules
        self._is_captured = False  # whether the user has captured something

    def reset(self) -> None:
        """As after the import."""
        self._is_captured = False
        for context in contexts.get_active_devices():
            context.aside = Aside()
            context.follow_aside()

    def is_on(self) -> bool:
        """Whether the calls of some device run at once."""
        return any(context.aside.is_on for context in contexts.get_active_devices())

    def end_stretch(self, context: DeviceContext, cause: str, is_step: bool = False) -> None:
        """End a stretch of the program. The next one is recorded, or its calls run at once, whichever pays."""
        if self.told is not None:
            self.told()
        aside = context.aside
        aside.end(cause, is_step, _is_compiling, self._may_be_on)
        if (context.trace.cursor is context.eager_root) is not (config.eager or aside.is_on):
            context.follow_aside()

    def record_again(self) -> None:
        """Record on all devices from now on, until some stretch shows again that it does not pay."""
        for context in contexts.get_active_devices():
            context.aside.stop()
            context.follow_aside()

    def record_always(self) -> None:
        """Never step aside: the user has captured something, and expects it to be recorded."""
        if not self._is_captured:
            self._is_captured = True
            self.record_again()

    def _may_be_on(self) -> bool:
        is_watched = bool(config.eager or config.debug or self._rules.is_strict() or is_profiling())
        is_free = self._rules.runs_unseen_calls() and not self._rules.is_refusing() and not self._is_captured
        is_alone = len(contexts.get_active_devices()) == 1 and not is_one_of_several_ranks()
        return bool(config.step_aside) and is_free and is_alone and not is_watched and contexts.backing_type() == "cpu"
