"""How many different programs a region of the user's code may record.

In: records of syncs. Out: `TooManyGraphsError` at the first program too many, with its explanation. The sync itself is
done by then, so nothing is lost. After torch_xla's `max_different_graphs`.
"""

from __future__ import annotations

from lazy_backend.diagnostics.explanation import explain_record
from lazy_backend.diagnostics.history import SyncRecord
from lazy_backend.errors import TooManyGraphsError


class GraphLimit:
    """Counts the programs of one region. `name`: how the user knows the limit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._programs: set[str] = set()
        self._count = 0

    def check(self, record: SyncRecord, limit: int) -> None:
        """Count what is new here; a path to a graph that is known is not."""
        is_known = record.program in self._programs
        self._programs.add(record.program)
        if record.outcome == "miss" or (not is_known and record.outcome != "hit, level 2"):
            self._count += 1
            if self._count > limit:
                raise TooManyGraphsError(
                    f"{self._count} different graphs were recorded, {self.name} = {limit}\n{explain_record(record)}"
                )
