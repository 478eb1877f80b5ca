"""Whether all processes of a group communicate alike, asked before they do, and who differs once one fails.

In: the collectives that a run is about to call. Out: nothing, or `CollectiveError`, which names the first one that
differs and the lines of both processes.

Note [Ranks agree]
A process that takes another branch than the others would wait for ever, or add numbers that do not belong together. So
before a run, each process writes into its group's store how many collectives it has called and which ones follow, which
takes 11 µs. One whose run is not like the run before also looks at what the process of the next rank is about to call,
waiting until that one comes so far, as the collective itself would. One neighbour is enough: if some processes changed
and others did not, or differently, one of them has a neighbour that differs. Loops in their steady state only write.
What is written names operators, dtypes and shapes. A difference in what may differ (who is the root of which rows, the
sizes of an `all_to_all`) is not looked at. Runs need not begin alike: a process that reads a value in between has two
runs where the others have one.
Where the store is not a `TCPStore`, as with `init_method="file://..."`, nothing is asked.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.lowering.collectives.groups import group_numbers
from lazy_backend.ports.process_groups import timeout_of

_ANSWER = timedelta(seconds=5)  # within which a store answers
_LONGEST_PAUSE = 0.02  # seconds between two looks at the store
_MAX_RANKS = 64  # that an error tells of


class CollectiveError(RuntimeError):
    """The processes of a group do not communicate alike, or one of them failed."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that is about to be called: `what` must be the same on all ranks, `site` is the user's line."""

    group: int
    what: str
    site: str


def describe_collective(name: str, dtype: torch.dtype, shape: Sequence[int], reduction: str | None) -> str:
    """As in `all_reduce of float32[3, 4] (sum)`."""
    sizes = ["...", *map(str, shape[1:])] if name == "all_to_all_" else map(str, shape)
    reduced = f" ({reduction})" if reduction else ""
    return f"{name.strip('_')} of {str(dtype).removeprefix('torch.')}[{', '.join(sizes)}]{reduced}"


def describe_exchange(name: str, dtype: torch.dtype, shape: Sequence[int], peer: int, tag: int) -> str:
    """As in `send of float32[3, 4] to rank 1 (tag 0)`. Ranks are those of the group."""
    kind, towards = ("send", "to") if name == "begin_send" else ("receive", "from")
    sizes = ", ".join(map(str, shape))
    return f"{kind} of {str(dtype).removeprefix('torch.')}[{sizes}] {towards} rank {peer} (tag {tag})"


@contextmanager
def _store_answers() -> Iterator[None]:
    """Within the block, an error of a store says what it means."""
    try:
        yield
    except dist.DistError as error:
        raise CollectiveError(
            f"the process that holds the store of a process group does not answer, and may have ended: {error}"
        ) from error


class RunCollectives:
    """The collectives of one graph, in order, and what it sends to single ranks or receives from them."""

    def __init__(self, calls: Sequence[Collective], exchanges: Sequence[Collective] = ()) -> None:
        self.calls = tuple(calls)
        self.exchanges = tuple(exchanges)
        self.of_groups: dict[int, tuple[str, tuple[Collective, ...]]] = {}
        for group in dict.fromkeys(call.group for call in calls):
            own = tuple(call for call in calls if call.group == group)
            text = "\n".join(call.what for call in own)
            self.of_groups[group] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), own


@dataclass(slots=True)
class Announcement:
    """What a run has announced and not called yet, and the seconds that its collectives took, waiting included."""

    calls: list[Collective]
    exchanges: list[Collective]  # which other ranks need not have
    seconds: float = 0.0


class _Announced(threading.local):
    """The announcement of the run on this thread."""

    now: Announcement | None = None


_announced = _Announced()


class Agreement:
    """What the processes of one group tell each other."""

    def __init__(self, group: dist.ProcessGroup, store: Any) -> None:
        self._group = group.group_name
        self._rank, self._size = group.rank(), group.size()
        self._timeout = timeout_of(group)
        self.store = store
        self._done = 0  # collectives that were called, those that failed included
        self._checked = 0  # how many of these, and of those that follow, need not be looked at any more
        self._latest = ""
        self._call: Collective | None = None  # the latest one

    def announce(self, digest: str, calls: Sequence[Collective]) -> None:
        """Say which collectives follow."""
        is_new = digest != self._latest
        with _store_answers():
            if is_new:
                text = json.dumps([[call.what, call.site] for call in calls])
                self.store.set(f"what/{self._rank}/{digest}", text)
            self.store.set(f"now/{self._rank}", f"{self._done} {len(calls)} {digest}")
        self._checked = self._done + (0 if is_new else len(calls))
        self._latest = digest

    def check(self, calls: Sequence[Collective]) -> None:
        """Look at what the next rank calls where `calls`, which follow, are not those of the run before."""
        if self._done >= self._checked:
            with _store_answers():
                self._checked = self._compare((self._rank + 1) % self._size, calls)

    def count(self, call: Collective) -> None:
        """Note that a collective was called."""
        self._done += 1
        self._call = call

    def blame(self) -> Callable[[Exception], Exception]:
        """What makes an error of the latest collective, which is under way, one that says what is known of it."""
        number, call = self._done, self._call
        assert call is not None

        def blame(error: Exception) -> Exception:
            self.forget()
            return self.explain(error, call, number)

        return blame

    def forget(self) -> None:
        """Look at what the next rank calls in the next run, whatever that is: this one has failed."""
        self._latest = ""

    def _compare(self, peer: int, calls: Sequence[Collective]) -> int:
        """Returns how many collectives are known to be alike from here on, counted from the first one."""
        end, pause = time.monotonic() + self._timeout, 0.0
        while (theirs := self._seen(peer)) is None or theirs[0] + len(theirs[1]) <= self._done:
            if time.monotonic() > end:
                raise CollectiveError(
                    f"rank {peer} did not come to {self._name(0, calls[0])} within {self._timeout:.0f} s\n"
                    f"  {self._whereabouts(peer)}"
                )
            time.sleep(pause)
            pause = min(2 * pause + 0.0002, _LONGEST_PAUSE)
        self._check(peer, calls, *theirs)
        # a root may be ahead, as it waits for nobody
        return max(min(self._done + len(calls), theirs[0] + len(theirs[1])), self._done + 1)

    def _check(self, peer: int, calls: Sequence[Collective], start: int, theirs: Sequence[Sequence[str]]) -> None:
        for place, call in enumerate(calls):
            other = self._done + place - start
            if 0 <= other < len(theirs) and theirs[other][0] != call.what:
                what, site = theirs[other]
                raise CollectiveError(
                    f"ranks do not communicate alike in group {self._group}\n"
                    f"  rank {self._rank} is about to call {self._name(place, call)}\n"
                    f"  rank {peer} is about to call {what} at {site or 'an unknown line'}\n"
                    "  every rank must take the same branch: read what decides it from a collective, or on every rank"
                )

    def _name(self, place: int, call: Collective) -> str:
        number = self._done + place + 1
        return f"collective {number} of group {self._group}, {call.what} at {call.site or 'an unknown line'}"

    def _seen(self, rank: int) -> tuple[int, list[list[str]]] | None:
        """How many collectives a rank had called before its latest run, and those of that run."""
        if not self.store.check([f"now/{rank}"]):
            return None
        start, _, digest = self.store.get(f"now/{rank}").decode().split()
        return int(start), json.loads(self.store.get(f"what/{rank}/{digest}"))

    def explain(self, error: Exception, call: Collective, number: int | None = None) -> CollectiveError:
        """`error`, which a collective raised, with what is known of the other ranks.

        `number`: which collective that was, counted from one; by default the latest.
        """
        done = self._done
        self._done = (done if number is None else number) - 1
        try:
            return self._explain(error, call)
        finally:
            self._done = done

    def _explain(self, error: Exception, call: Collective) -> CollectiveError:
        lines = [f"{error}", f"  in {self._name(0, call)}, on rank {self._rank}"]
        try:
            others = [rank for rank in range(min(self._size, _MAX_RANKS)) if rank != self._rank]
            for rank in others:
                theirs = self._seen(rank)
                if theirs is not None:
                    self._check(rank, [call], *theirs)
            lines += [f"  {self._whereabouts(rank)}" for rank in others]
        except CollectiveError as difference:
            return CollectiveError(f"{difference}\n  {error}")
        except Exception as failure:
            lines.append(f"  the process that holds the group's store does not answer, and may have ended: {failure}")
        return CollectiveError("\n".join(lines))

    def _whereabouts(self, rank: int) -> str:
        theirs = self._seen(rank)
        if theirs is None:
            return f"rank {rank} has not communicated yet"
        start, calls = theirs
        if start + len(calls) <= self._done:
            what, site = calls[-1]
            return f"rank {rank} has not come to it: its last one was {what} at {site or 'an unknown line'}"
        return f"rank {rank} came to it as well"


class Agreements:
    """Those of this process, by group."""

    def __init__(self) -> None:
        self.site_of_call: Callable[[], str] = str  # the user's line that calls us, for calls outside of graphs
        self._lock = process_lock()
        self._of: WeakKeyDictionary[dist.ProcessGroup, Agreement | None] = WeakKeyDictionary()
        self._generation = 0

    def begin_generation(self) -> None:
        """All groups are about to end: those that are made anew, under the same names, find nothing of these."""
        self._generation += 1

    def of(self, group: dist.ProcessGroup) -> Agreement | None:
        """The agreement of a group; None where nothing is asked."""
        if group not in self._of:
            with self._lock:
                if group not in self._of:
                    with _store_answers():
                        self._of[group] = self._make(group)
        return self._of[group]

    def _make(self, group: dist.ProcessGroup) -> Agreement | None:
        if group.size() == 1:
            return None
        stores: Any = dist
        store: Any = group.get_group_store()
        inner = store
        while isinstance(inner, stores.PrefixStore):
            inner = inner.underlying_store
        if not isinstance(inner, stores.TCPStore):
            return None
        # a connection of its own: another thread may wait in the group's
        own = store.clone()
        own.set_timeout(_ANSWER)
        return Agreement(group, stores.PrefixStore(f"lazy_backend/{self._generation}", own))

    @contextmanager
    def announced(self, run: RunCollectives) -> Iterator[Announcement]:
        """Within the block the collectives of `run` are called, in their order."""
        own = {number: self.of(group_numbers.group_at(number)) for number in run.of_groups}
        found = {number: agreement for number, agreement in own.items() if agreement is not None}
        for number, agreement in found.items():
            agreement.announce(*run.of_groups[number])
        before = _announced.now
        announcement = Announcement(list(run.calls), list(run.exchanges))
        try:
            _announced.now = announcement
            yield announcement
        except BaseException:
            for agreement in found.values():
                agreement.forget()
            raise
        finally:
            _announced.now = before

    @contextmanager
    def calling(self, number: int, what: Callable[[], str]) -> Iterator[dist.ProcessGroup]:
        """Within the block, one collective is called on the group with this number, which is given."""
        with self.waiting():
            group = group_numbers.group_at(number)
            agreement = self.of(group)
            if agreement is None:
                yield group
            else:
                with self._checked(agreement, number, what):
                    yield group

    def blame(self, group: dist.ProcessGroup) -> Callable[[Exception], Exception]:
        """What makes an error of the group's latest collective one that says what is known of it."""
        agreement = self.of(group)
        return (lambda error: error) if agreement is None else agreement.blame()

    def next_exchange(self, number: int, what: Callable[[], str]) -> Collective:
        """The exchange with a single rank that this thread's run is about to call, or one outside of runs."""
        announcement = _announced.now
        if announcement is not None and announcement.exchanges:
            return announcement.exchanges.pop(0)
        return Collective(number, what(), self.site_of_call())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block, this thread's run waits for communication that is under way."""
        announcement, begin = _announced.now, time.perf_counter()
        try:
            yield
        finally:
            if announcement is not None:
                announcement.seconds += time.perf_counter() - begin

    @contextmanager
    def _checked(self, agreement: Agreement, number: int, what: Callable[[], str]) -> Iterator[None]:
        """Within the block, the next collective of this thread's run is called, or one outside of runs."""
        announcement = _announced.now
        if announcement is not None and announcement.calls:
            call = announcement.calls.pop(0)
            following = [one for one in announcement.calls if one.group == number]
        else:
            call, following = Collective(number, what(), self.site_of_call()), []
            agreement.announce(*RunCollectives([call]).of_groups[number])
        try:
            agreement.check([call, *following])
            try:
                yield
            finally:
                agreement.count(call)
        except BaseException as error:
            agreement.forget()
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise agreement.explain(error, call) from error
            raise


agreements = Agreements()
