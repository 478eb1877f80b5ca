"""What became of the calls of each captured module, optimizer and function.

In: calls, counted as they happen. Out: rows for `explain`, reports and run logs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from lazy_backend.cache.weak_table import WeakTable
from lazy_backend.errors import CaptureWarning
from lazy_backend.errors.sites import user_site, warn_user

# Calls, one after another, that cannot be replayed before there is a warning: the first ones differ from the rest.
PATIENCE = 4
# After that, only two calls in this many try again.
RETRY = 64
# The first call that runs as written to be compared with what is replayed; each further one comes after twice as many.
FIRST_CHECK = 64
# Why a known call of a module or an optimizer is not replayed: its step has not come there before.
NEW_PLACE = "it came after other operators of its step than before, as where steps do not end"
# Reasons that are remembered: some name lines, of which there may be many.
_MAX_REASONS = 32


class NotReplayable(Exception):
    """Why what a callable recorded cannot be replayed. The text is for the user."""


class Account:
    """The calls of one captured object. `seconds`: in replays of a module's or an optimizer's calls, without backwards.

    `is_asked`: whether the user asked for the capture, and is warned of calls that cannot be replayed.
    """

    __slots__ = ("name", "kind", "site", "calls", "replays", "seconds", "reasons", "is_asked", "_warned", "__weakref__")

    def __init__(self, name: str, kind: str, is_asked: bool = True) -> None:
        self.name = name
        self.kind = kind
        self.site = user_site()
        self.calls = 0
        self.replays = 0
        self.seconds = 0.0
        self.reasons: Counter[str] = Counter()  # why calls ran as written
        self.is_asked = is_asked
        self._warned = not is_asked
        _accounts[id(self)] = self

    def ran_as_written(self, reason: str) -> None:
        if reason in self.reasons or len(self.reasons) < _MAX_REASONS:
            self.reasons[reason] += 1

    def warn(self, reason: str) -> None:
        """Tell the user, once, that calls cannot be replayed."""
        self.tell(f"runs as written, because it cannot be replayed: {reason}")

    def tell(self, text: str) -> None:
        """Tell the user, once, something about the captured object."""
        if not self._warned:
            self._warned = True
            warn_user(f"the captured {self.name} {text}", CaptureWarning)

    def row(self) -> dict[str, Any]:
        """The account as data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "site": self.site,
            "calls": self.calls,
            "replays": self.replays,
            "microseconds_per_replay": 1e6 * self.seconds / self.replays if self.seconds else None,
            "as_written": dict(self.reasons.most_common()),
        }


@dataclass(slots=True, eq=False, kw_only=True)
class Attempts:
    """The calls of one kind. `failures`: in a row that could not be replayed; `check_at`: the call to be compared.

    `misses`: in a row that were known, but not where the step stood.
    """

    calls: int = 0
    failures: int = 0
    check_at: int = FIRST_CHECK
    misses: int = 0

    def is_hopeless(self) -> bool:
        """Whether this call is not worth learning from."""
        return self.failures >= PATIENCE and self.calls % RETRY > 1

    def miss(self, account: Account) -> None:
        """Note that a known call came at a new place of a step, as the first steps have many."""
        self.misses += 1
        if self.misses >= FIRST_CHECK:
            account.ran_as_written(NEW_PLACE)

    def fail(self, account: Account, reason: str) -> None:
        """Note why a call could not be replayed, and tell the user if others could not before."""
        account.ran_as_written(reason)
        self.failures += 1
        if self.failures >= PATIENCE:
            account.warn(reason)


_accounts: WeakTable[int, Account] = WeakTable()


def describe() -> list[dict[str, Any]]:
    """A row for each captured module, optimizer and function that is alive."""
    return [account.row() for account in _accounts]
