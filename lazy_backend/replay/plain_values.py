"""Values that Python code may look at and that are compared by value: numbers, strings, and values made of them.

In: two values. Out: whether they are plain, and the same to any Python code: of one type, signed zeros told apart.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch

PLAIN_TYPES = frozenset(
    (
        bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    )
)  # fmt: skip


def is_a(value: Any, kinds: Any) -> bool:
    """`isinstance` that does not ask the object: a proxy may answer anything for `__class__`, or raise."""
    return issubclass(type(value), kinds)


def is_numpy_number(value: Any) -> bool:
    """Whether `value` is a scalar of numpy, such as `np.float64`. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_a(value, numpy.generic) and not value.dtype.hasobject


def is_plain(value: Any) -> bool:
    """Whether comparing `value` by value is safe and says everything."""
    return type(value) in PLAIN_TYPES or is_a(value, enum.Enum) or is_numpy_number(value)


def same_plain(a: Any, b: Any) -> bool:
    """Whether two values are plain and the same: 0.0 is not -0.0, True is not 1, nan is nan."""
    if type(a) is not type(b) or not is_plain(a):
        return False
    return bool(plain_key(a) == plain_key(b))


def plain_key(value: Any) -> Any:
    """A hashable stand-in for a plain value: equal for two values of one type exactly if these are the same."""
    kind = type(value)
    if kind is float:
        return value.hex() if value == value else "nan"
    if kind is complex:
        return plain_key(value.real), plain_key(value.imag)
    if kind is slice:
        return tuple((type(part), plain_key(part)) for part in (value.start, value.stop, value.step))
    if isinstance(value, enum.Enum):
        return id(value)
    if kind in PLAIN_TYPES:
        return value
    return value.dtype, value.tobytes()


# ----- values made of plain values


class _Opaque(Exception):
    """A value can be told from others by identity only."""


def value_key(value: Any) -> Hashable | None:
    """A stand-in for a value that says everything about it: plain values, arrays, dataclasses and namespaces of these.

    None if there is none. Functions and classes stand for themselves. Raises nothing.
    """
    try:
        return _key(value, {})
    except (_Opaque, RecursionError):
        return None


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    kind = type(value)
    if is_plain(value):
        return kind, plain_key(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value
    if id(value) in seen:  # shared, or within itself
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if is_array(value):
        return kind, value.dtype.str, value.shape, digest(value)
    if dataclasses.is_dataclass(value):
        return kind, _keys(
            ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)), seen
        )
    if kind is types.SimpleNamespace:
        return kind, _keys(vars(value).items(), seen)
    if kind is dict:
        return kind, _keys(value.items(), seen)
    if kind in (list, tuple):
        return kind, _keys(enumerate(value), seen)
    raise _Opaque


def _keys(items: Iterable[tuple[Any, Any]], seen: dict[int, int]) -> Hashable:
    return tuple((_key(name, seen), _key(item, seen)) for name, item in items)


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numpy that holds numbers. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def digest(array: Any) -> bytes:
    """What stands for the contents of an array: 1 ms per MB."""
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()
