"""Stands in for the package `cachetools` where it is not installed, so that `gpu_check.py` runs on a bare machine.

In and out: as much of its `LRUCache` as this package uses. Not for production: install what pyproject.toml names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


class LRUCache(MutableMapping[Any, Any]):
    """A mapping that drops what was least recently used once it holds more than `maxsize`."""

    def __init__(self, maxsize: float, getsizeof: Callable[[Any], float] = lambda value: 1) -> None:
        self.maxsize = maxsize
        self._size_of = getsizeof
        self._values: OrderedDict[Any, Any] = OrderedDict()
        self.currsize = 0.0

    def __getitem__(self, key: Any) -> Any:
        value = self._values[key]
        self._values.move_to_end(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        size = self._size_of(value)
        if size > self.maxsize:
            raise ValueError("value too large")
        if key in self:
            del self[key]
        self._values[key] = value
        self.currsize += size
        while self.currsize > self.maxsize:
            self.popitem()

    def __delitem__(self, key: Any) -> None:
        self.currsize -= self._size_of(self._values.pop(key))

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def popitem(self) -> tuple[Any, Any]:
        """Remove what was least recently used."""
        key, value = self._values.popitem(last=False)
        self.currsize -= self._size_of(value)
        return key, value
