"""Arguments that several tools take.

In: the names that a tool knows. Out: types for `argparse`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    """What reads comma-separated names, and refuses those that are not `known`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse
