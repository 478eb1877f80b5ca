"""Communication that is under way: begun by one call of a graph, finished by a later one.

In: work of a process group, and the memory that it reads and writes. Out: a tensor that stands for it, and the memory
once the work is done.

Note [Memory under way]
What communicates in the background must not read or write memory that somebody else manages: a compiler may clone a
tensor, or give its memory to another one, between the two calls. So what is under way has memory of its own. It is
named by a ticket, a tensor of one number that the first call returns and the second one takes. The ticket is passed on
like any value: within a graph, as the result of one run and the input of another, into replays. So no plan can mix up
two of them, and none is in a key. The ticket's memory holds the work and its tensors: whatever ends a run, they end
with its last ticket.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.cache.weak_table import WeakTable

# Sends that nobody waits for: how many of the latest are kept until they are through.
_MAX_UNATTENDED = 64


@dataclass(slots=True, eq=False)
class Flight:
    """Work, and the memory that it fills; None for a send, which fills none.

    `blame`: what an error of the work is, with the call, its line and the other ranks.
    """

    work: dist.Work
    memory: torch.Tensor | None
    blame: Callable[[Exception], Exception]
    is_interrupted: bool = False  # whether a wait was, perhaps after the work was done

    def wait(self) -> None:
        """Wait until the work is done. Raises its error."""
        if self.is_interrupted and self.work.is_completed():
            return  # gloo would wait for another message
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.blame(error) from error


class _Ticket(bytearray):
    """The memory of a ticket, which ends with it: a number of eight bytes."""

    flight: Flight | None = None
    unattended: deque[Flight] | None = None  # where a send goes that nobody has waited for

    def __del__(self) -> None:
        flight = self.flight
        if flight is not None and self.unattended is not None:
            self.unattended.append(flight)


class UnderWay:
    """What this process has begun and not finished."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._tickets: WeakTable[int, _Ticket] = WeakTable()
        self._lock = process_lock()
        self._unattended: deque[Flight] = deque(maxlen=_MAX_UNATTENDED)

    def __len__(self) -> int:
        return sum(ticket.flight is not None for ticket in self._tickets)

    def ticket_for(self, flight: Flight) -> torch.Tensor:
        """A new ticket: int64[1] on the CPU."""
        number = next(self._numbers)
        ticket = _Ticket(number.to_bytes(8, "little"))
        ticket.flight = flight
        if flight.memory is None:
            ticket.unattended = self._unattended
        self._tickets[number] = ticket
        return torch.frombuffer(ticket, dtype=torch.int64)

    def finish(self, ticket: torch.Tensor) -> torch.Tensor | None:
        """Wait for what a ticket stands for, and return its memory, once."""
        found = self._tickets.get(int(ticket))
        with self._lock:
            flight = None if found is None else found.flight
            if found is not None:
                found.flight = None
        if found is None or flight is None:
            raise RuntimeError("communication that is not under way, or was waited for before, cannot be finished")
        try:
            flight.wait()
        except Exception:
            raise
        except BaseException:
            flight.is_interrupted, found.flight = True, flight  # whoever was interrupted may wait again
            raise
        return flight.memory


under_way = UnderWay()
