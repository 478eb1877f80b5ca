"""Values that Python code may look at and that are compared by value: numbers, strings, and values made of them.

In: two values. Out: whether they are plain, and the same to any Python code: of one type, signed zeros told apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import logging
import sys
import types
import weakref
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any

import torch

from lazy_backend.ports.cpython import attributes_of, is_a, mro_of, name_of, namespace_of, slots_of

# Where a dataclass keeps its fields, and how those that instances have are told from others.
FIELDS = "__dataclass_fields__"
_IS_FIELD = dataclasses._FIELD  # type: ignore[attr-defined]

PLAIN_TYPES = frozenset(
    (
        bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    )
)  # fmt: skip


_PLAIN_IDS = frozenset(map(id, PLAIN_TYPES))


def is_numpy_number(value: Any) -> bool:
    """Whether `value` is a scalar of numpy, such as `np.float64`. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_a(value, numpy.generic) and not numpy.generic.dtype.__get__(value).hasobject


def is_plain(value: Any) -> bool:
    """Whether comparing `value` by value is safe and says everything."""
    return id(type(value)) in _PLAIN_IDS or is_a(value, enum.Enum) or is_numpy_number(value)


def text_of(value: Any) -> str:
    """A plain value as code would write it; of others, the class."""
    if id(type(value)) in _PLAIN_IDS:
        return repr(value)
    if is_a(value, enum.Enum):
        return f"{name_of(type(value))}.{dict.get(attributes_of(value), '_name_')}"
    if is_numpy_number(value):
        return f"{name_of(type(value))}({sys.modules['numpy'].generic.item(value)!r})"
    return f"a {name_of(type(value))}"


# Lead to all others of the process, and hold no tensors themselves.
_PROCESS_WIDE = (
    logging.Filterer, logging.Manager, logging.PlaceHolder, logging.LoggerAdapter,
    weakref.WeakSet, weakref.WeakValueDictionary,
)  # fmt: skip


def is_process_wide(kind: type) -> bool:
    """Whether what instances of a class lead to grows with the process."""
    # not issubclass(), by which an abstract base class remembers each class that it is asked about
    return any(base is one for base in mro_of(kind) for one in _PROCESS_WIDE)


def has_plain_hash(key: Any) -> bool:
    """Whether a dict finds `key` without calling functions of its class."""
    if id(type(key)) in _PLAIN_IDS:
        return True
    if type(key) is tuple:
        return all(map(has_plain_hash, key))
    return all(_is_of_c_or_torch(type(key), name) for name in ("__hash__", "__eq__")) and not is_a(key, frozenset)


def _is_of_c_or_torch(kind: type, name: str) -> bool:
    found = next((space[name] for space in map(namespace_of, mro_of(kind)) if name in space), None)
    known = (namespace_of(torch.Tensor).get(name), namespace_of(enum.Enum).get(name))
    return type(found) is types.WrapperDescriptorType or any(found is one for one in known)


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
    if is_a(value, enum.Enum):
        return id(value)
    if id(kind) in _PLAIN_IDS:
        return value
    generic = sys.modules["numpy"].generic
    return generic.dtype.__get__(value), generic.tobytes(value)


# ----- values made of plain values


class _Opaque(Exception):
    """A value can be told from others by identity only."""


def value_key(value: Any, named: list[Any] | None = None) -> Hashable | None:
    """A stand-in for a value that says everything about it: plain values, arrays, dataclasses and namespaces of these.

    None if there is none. Functions and classes stand for themselves, and are added to `named`. Raises nothing.
    """
    found: list[Any] = []
    try:
        key = _key(value, {}, found)
    except (_Opaque, RecursionError):
        return None
    if named is not None:
        named += found
    return key


def _key(value: Any, seen: dict[int, int], named: list[Any]) -> Hashable:
    kind = class_key(type(value))
    if is_plain(value):
        if is_a(value, enum.Enum):
            named.append(type(value))
        return kind, plain_key(value)
    if is_a(value, type):
        named.append(value)
        return class_key(value)
    if is_a(value, types.FunctionType | types.BuiltinFunctionType):
        named.append(value)
        return value  # type: ignore[no-any-return]
    if id(value) in seen:  # shared, or within itself
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if is_array(value):
        return kind, value.dtype.str, value.shape, digest(value)
    fields = next((space[FIELDS] for space in map(namespace_of, mro_of(type(value))) if FIELDS in space), None)
    if type(fields) is dict:
        named.append(type(value))
        return kind, _keys(_values_of_fields(value, fields.values()), seen, named)
    if kind is types.SimpleNamespace:
        return kind, _keys(vars(value).items(), seen, named)
    if kind is dict:
        return kind, _keys(value.items(), seen, named)
    if kind is list or kind is tuple:
        return kind, _keys(enumerate(value), seen, named)
    raise _Opaque


def _values_of_fields(value: Any, fields: Iterable[Any]) -> list[tuple[str, Any]]:
    """The values of a dataclass, from its `__dict__` or its slots, and the attributes that are no fields."""
    found = dict(attributes_of(value))
    for slot in chain.from_iterable(map(slots_of, mro_of(type(value)))):
        with contextlib.suppress(AttributeError):
            found[slot.__name__] = slot.__get__(value)
    names = [field.name for field in fields if field._field_type is _IS_FIELD]
    if not found.keys() >= set(names):
        raise _Opaque  # one is a property
    return [(name, found.pop(name)) for name in names] + list(found.items())


class _ClassKey:
    """Stands for a class whose metaclass may define how it is compared."""

    __slots__ = ("_kind",)

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __eq__(self, other: object) -> bool:
        return type(other) is _ClassKey and other._kind is self._kind

    def __hash__(self) -> int:
        return id(self._kind)


def class_key(kind: type) -> Hashable:
    """A stand-in for a class that compares by identity."""
    return kind if type(kind) is type else _ClassKey(kind)


def _keys(items: Iterable[tuple[Any, Any]], seen: dict[int, int], named: list[Any]) -> Hashable:
    return tuple((_key(name, seen, named), _key(item, seen, named)) for name, item in items)


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numpy that holds numbers. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def digest(array: Any) -> bytes:
    """What stands for the contents of an array: 1 ms per MB."""
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()
