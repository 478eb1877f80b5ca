"""Process groups by number.

Note [Groups have numbers]
A group's name says how many groups its process has made, and differs between ranks whose graphs are the same: each
pipeline stage, each row of a mesh has another. So graphs and keys have a number in its place, which counts the groups
in the order in which this process first communicated by them; that of all processes is 0. Ranks use their groups in the
same order, so that one compiled graph serves them all. The number stands for a name, and so for the group that has that
name when a graph runs.
"""

from __future__ import annotations

import torch.distributed as dist

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.ports import process_groups

WORLD = 0


def is_one_of_several_ranks() -> bool:
    """Whether this process is one of several that must record alike."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def group_named(name: str) -> dist.ProcessGroup:
    """The group with this name. Raises if there is none."""
    return process_groups.group_named(name)


class GroupNumbers:
    """The numbers of this process."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._names: list[str] = [""]  # of the world, which is found otherwise
        self._numbers: dict[str, int] = {}

    def number_of(self, group: dist.ProcessGroup) -> int:
        """The number of `group`, a new one if this process has not communicated by it."""
        if group is dist.group.WORLD:
            return WORLD
        name = str(group.group_name)
        found = self._numbers.get(name)
        if found is None:
            with self._lock:
                found = self._numbers.get(name)
                if found is None:
                    self._names.append(name)
                    found = self._numbers[name] = len(self._names) - 1
        return found

    def group_at(self, number: int) -> dist.ProcessGroup:
        """The group with this number. Raises `RuntimeError` if there is none any more."""
        if number == WORLD:
            group = dist.group.WORLD
        else:
            try:
                group = group_named(self._names[number])
            except (RuntimeError, ValueError):
                group = None
        if group is None:
            raise RuntimeError(
                "the process group of a recorded collective was destroyed before it ran\n"
                "  call lazy_backend.mark_step(wait=True) before torch.distributed.destroy_process_group()"
            )
        return group


group_numbers = GroupNumbers()
