"""Where a sequence repeats itself.

In: a sequence of integers, of which equal ones stand for calls that look alike. Out: `Repeat`s, which do not overlap,
and whose spare items belong to none of them.

Note [Found in linear time]
The distances at which short pieces of the sequence come again are counted in one pass. Only the commonest few are
periods to be tried, each in one pass over the sequence; the period that saves most is taken, and what it covers is left
out of the next search. So the time grows linearly with the sequence, for as many kinds of repeats as are searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# Calls in a piece whose distances are counted, periods tried in a search, and searches.
_PIECE = 3
_PERIODS = 24
_SEARCHES = 16


@dataclass(frozen=True, slots=True)
class Repeat:
    """From `start` on, `period` items come `count` times in a row; `spare` further ones go on alike."""

    start: int
    period: int
    count: int
    spare: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    @property
    def saved(self) -> int:
        """The items that are like those of an earlier round."""
        return self.period * (self.count - 1)


def find_repeats(items: Sequence[int], shortest: int) -> list[Repeat]:
    """The repeats, by their start. No round is shorter than `shortest`: several small ones make one.

    See Note [Found in linear time].
    """
    found: list[Repeat] = []
    free = [(0, len(items))]
    for _ in range(_SEARCHES):
        best = max(
            (one for start, end in free for one in _candidates(items, start, end, shortest)),
            key=lambda one: (one.saved, -one.period, -one.start),
            default=None,
        )
        if best is None:
            break
        found.append(best)
        free = [part for start, end in free for part in _without(start, end, best) if part[0] < part[1]]
    found.sort(key=lambda one: one.start)
    ends = [*(one.start for one in found[1:]), len(items)]  # a later search may have taken spare items
    return [replace(one, spare=min(one.spare, end - one.end)) for one, end in zip(found, ends, strict=False)]


def _without(start: int, end: int, taken: Repeat) -> tuple[tuple[int, int], ...]:
    if taken.start >= end or taken.end <= start:
        return ((start, end),)
    return (start, taken.start), (taken.end, end)


def _candidates(items: Sequence[int], start: int, end: int, shortest: int) -> Iterator[Repeat]:
    for period in _periods(items, start, end):
        place = start
        while place + period < end:
            first = place
            while place + period < end and items[place] == items[place + period]:
                place += 1
            like = place - first
            joined = period * -(-shortest // period)
            count = (like + period) // joined
            if count > 1:
                yield Repeat(first, joined, count, like + period - joined * count)
            place += 1


def _periods(items: Sequence[int], start: int, end: int) -> list[int]:
    """The distances at which pieces come again most often."""
    latest: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for place in range(start, end - _PIECE + 1):
        piece = tuple(items[place : place + _PIECE])
        before = latest.get(piece)
        if before is not None:
            distances[place - before] += 1
        latest[piece] = place
    return [distance for distance, _ in distances.most_common(_PERIODS)]
