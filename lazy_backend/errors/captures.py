"""Errors of captured code that are raised in several places: replays that no longer hold, and parts that are gone."""

from __future__ import annotations

from lazy_backend.errors import CaptureError
from lazy_backend.errors.sites import user_site


def no_longer_alike(name: str, difference: str) -> CaptureError:
    """A call ran as written and did something else than its replay: `difference`."""
    return CaptureError(
        f"{name} no longer does what was captured: {difference}\n"
        "  calls since the last comparison may have used the old value: repeat what depends on them\n"
        "  pass what changed as an argument, or make it an attribute of the module; verify_every=n compares more often"
    )


def gone(what: str) -> CaptureError:
    """An optimizer that no longer exists is asked to do something."""
    return CaptureError(
        f"{what} was garbage-collected\n  at {user_site()}\n  keep a reference to it for as long as it is used"
    )
