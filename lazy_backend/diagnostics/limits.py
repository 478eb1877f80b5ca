"""A limit on the number of different programs that a region of the user's code may record.

In: records of syncs. Out: `TooManyGraphsError` at the first program beyond the limit, with its explanation. The sync
itself is done by then, so nothing is lost. Modelled on torch_xla's `max_different_graphs`.
"""

from __future__ import annotations

from lazy_backend.diagnostics.explanation import explain_record
from lazy_backend.diagnostics.history import SyncRecord
from lazy_backend.errors import TooManyGraphsError


class GraphLimit:
    """Counts the programs of one region. `name`: what the error message calls the limit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._programs: set[str] = set()
        self._count = 0

    def check(self, record: SyncRecord, limit: int) -> None:
        """Count the program of `record` if it is new in this region; a new path to a known graph does not count.

        Raises `TooManyGraphsError` beyond `limit`.
        """
        is_known = record.program in self._programs
        self._programs.add(record.program)
        if record.outcome == "miss" or (not is_known and record.outcome != "hit, level 2"):
            self._count += 1
            if self._count > limit:
                raise TooManyGraphsError(
                    f"{self._count} different graphs were recorded (limit: {self.name} = {limit})\n"
                    f"{explain_record(record)}"
                )
