"""Values that code reads without being given them, and how they change between calls: for random programs.

In: a source of random choices. Out: a `Read`: statements that make a value, an expression of it, a number, and
statements that change it. `NOW` in these stands for the number of the step. They use `names()`.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import collections
import contextvars
import copy
import ctypes
import dataclasses
import decimal
import enum
import fractions
import functools
import importlib
import itertools
import logging
import math
import operator
import os
import pickle
import queue
import sys
import threading
import types
import typing
import weakref
from typing import Any, NamedTuple

import numpy as np


class Read(NamedTuple):
    """How a value is made, read and changed."""

    setup: str
    value: str
    changes: tuple[str, ...]


_CLASS = """class Part:
    gain = 0.5
    table = {'a': 0.5}
    @property
    def twice(self): return self.gain * 2
    @staticmethod
    def fixed(): return 0.5
    @classmethod
    def of_class(cls): return cls.gain
    def scaled(self, by=0.5): return self.gain * by
    def __float__(self): return float(self.gain)
    def __len__(self): return 2
    def __bool__(self): return self.gain > 0
    def __call__(self): return self.gain
class Other(Part):
    gain = 2.0
part = Part()"""
_OF_CLASS = (
    "Part.gain = 0.25 * NOW", "part.gain = 0.25 * NOW", "vars(part).pop('gain', None)", "part.__class__ = Other",
    "Part.scaled = lambda self, by=0.5: 3.0", "Part.scaled.__defaults__ = (0.25 * NOW,)", "part.scaled = lambda: 0.75",
    "Part.twice = property(lambda self: 3.0)", "Part.fixed = staticmethod(lambda: 0.25 * NOW)", "Part.table['a'] = NOW",
    "Part.of_class = classmethod(lambda cls: 1.5)", "Part.__float__ = lambda self: 1.5", "part = Other()",
    "Part.__len__ = lambda self: NOW", "Part.__bool__ = lambda self: False", "Part.__call__ = lambda self: 0.25 * NOW",
    "Part.__bases__ = (Gains,)", "Part.__getattribute__ = lambda self, name: 0.25 if name == 'gain' else object.__getattribute__(self, name)",
    "Part.gain = property(lambda self: 0.25)", "part.gain = True", "part.gain = np.float64(0.25 * NOW)",
)  # fmt: skip
_CLASS_VALUES = (
    "Part.gain", "part.gain", "part.twice", "part.fixed()", "Part.of_class()", "part.scaled()", "float(part)",
    "Part.table['a']", "len(part)", "(2.0 if part else 0.5)", "part()", "getattr(part, 'gain')", "vars(part).get('gain', 1.0)",
    "operator.attrgetter('gain')(part)", "getattr(part, 'ga' + 'in')", "operator.methodcaller('scaled')(part)",
    "sum(one.gain for one in (part, part))", "type(part).gain", "(lambda: part.gain)()", "getattr(part, 'missing', part.gain)",
    "part.__dict__.get('gain', 2.0)", "next(iter([part])).gain", "max([part], key=lambda one: one.gain).gain",
)  # fmt: skip
_NUMBERS = "numbers, table, chosen = [0.5, 2.0], {'a': 0.5}, {1, 2}\nqueue_ = collections.deque([0.5, 1.0])\nnested = {'a': [{'b': 0.5}]}"
_OF_NUMBERS = (
    "numbers[1] = 0.25 * NOW", "numbers.append(1.5)", "numbers.reverse()", "numbers[:] = numbers[:1] * 3", "numbers = [0.25, 1.5]",
    "table['a'] = 0.25 * NOW", "table['b'] = 1.5", "table = {'a': 3.0}", "chosen.add(3)", "chosen.discard(1)",
    "queue_.append(0.25 * NOW)", "queue_.rotate()", "nested['a'][0]['b'] = 0.25 * NOW", "nested['a'].append({'b': 3.0})",
    "nested['a'] = [{'b': NOW}]", "table.update(c=1.0)", "table = collections.defaultdict(float, table)",
    "table = collections.ChainMap({'a': 0.25 * NOW}, table)",
)  # fmt: skip
_NUMBER_VALUES = (
    "numbers[1]", "sum(numbers)", "len(numbers)", "numbers[-1]", "max(numbers)", "table['a']", "table.get('b', 1.0)",
    "len(table)", "(2.0 if 'b' in table else 1.0)", "sum(table.values())", "len(chosen)", "(2.0 if 3 in chosen else 1.0)",
    "queue_[0]", "sum(queue_)", "nested['a'][-1]['b']", "len(nested['a'])", "sum(one['b'] for one in nested['a'])",
    "functools.reduce(operator.add, numbers)", "operator.itemgetter('a')(table)", "dict(table)['a']", "[*numbers][0]",
    "math.fsum(numbers)", "list(map(float, numbers))[0]", "next(itertools.islice(numbers, 1, None))", "{**table}.get('b', 0.5)",
)  # fmt: skip

_READS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (_CLASS, _CLASS_VALUES, _OF_CLASS),
    (_CLASS, _CLASS_VALUES, _OF_CLASS),
    (_NUMBERS, _NUMBER_VALUES, _OF_NUMBERS),
    (
        "global GAIN\nGAIN = 0.5",
        ("GAIN", "(lambda: GAIN)()", "sum(GAIN for _ in range(2))"),
        ("GAIN = 0.25 * NOW", "GAIN = 2", "GAIN = True", "GAIN = -0.0", "GAIN = np.float32(0.25 * NOW)", "GAIN = float('nan')"),
    ),
    (
        "global HELP\ndef HELP(): return 0.5",
        ("HELP()", "(HELP() + 1)"),
        ("def HELP(): return 0.25 * NOW", "HELP = lambda: 2.0", "HELP.__code__ = (lambda: 0.75).__code__"),
    ),
    (
        "gain_ = 0.5\ndef inner(): return gain_",
        ("gain_", "inner()", "[inner() for _ in range(2)][1]"),
        ("gain_ = 0.25 * NOW", "gain_ = 2", "def inner(): return 0.75", "inner.__closure__[0].cell_contents = 0.25 * NOW"),
    ),
    (
        "def scaled_(v=1.0, by=0.5, *, plus=1.0): return v * by + plus",
        ("scaled_()", "scaled_(2.0)", "scaled_(by=1.0)"),
        (
            "scaled_.__defaults__ = (1.0, 0.25 * NOW)", "scaled_.__kwdefaults__ = {'plus': NOW}",
            "scaled_.__kwdefaults__['plus'] = 0.25 * NOW", "scaled_.__code__ = (lambda v=0, by=0, *, plus=0: v - by + plus).__code__",
            "def scaled_(v=1.0, by=0.25, plus=0.0): return v - by",
        ),
    ),
    (
        "def marked(): return marked.gain\nmarked.gain = 0.5",
        ("marked()", "marked.gain"),
        ("marked.gain = 0.25 * NOW", "vars(marked)['gain'] = NOW"),
    ),
    (
        "half = functools.partial(operator.mul, 0.5)\nkeyed = functools.partial(scaled_of, by=0.5)",
        ("half(1.0)", "keyed(2.0)"),
        ("half = functools.partial(operator.mul, 0.25 * NOW)", "keyed.keywords['by'] = 0.25 * NOW",
         "half.__setstate__((operator.mul, (3.0,), {}, None))"),
    ),
    (
        "@functools.cache\ndef cached(): return [0.5]",
        ("cached()[0]", "len(cached())"),
        ("cached()[0] = 0.25 * NOW", "cached.cache_clear()", "cached().append(1.0)"),
    ),
    (
        "array = np.ones(4, dtype='float32')",
        ("float(array[0])", "float(array.sum())", "array.ndim", "float(np.mean(array))", "len(array)", "array[1]"),
        ("array[0] = 0.25 * NOW", "array[1] = 3", "array = array * 2", "array.shape = (2, 2)", "array.fill(0.25)",
         "array = array.astype('float64')", "array[:] = np.arange(array.size).reshape(array.shape)"),
    ),
    (
        "host = torch.ones(3)",
        ("float(host[1])", "float(host.sum())", "host.shape[0]", "host.tolist()[1]"),
        ("host[1] = 0.25 * NOW", "host = host * 2", "host.mul_(0.5)", "host.resize_(2)"),
    ),
    (
        "os.environ['LAZY_TEST_GAIN'] = '0.5'",
        ("float(os.environ['LAZY_TEST_GAIN'])", "float(os.getenv('LAZY_TEST_GAIN', '2'))", "len(os.environ.get('LAZY_TEST_GAIN', ''))"),
        ("os.environ['LAZY_TEST_GAIN'] = str(0.25 * NOW)", "os.environ.pop('LAZY_TEST_GAIN', None)\nos.environ['LAZY_TEST_GAIN'] = '3'"),
    ),
    ("var = contextvars.ContextVar('var', default=0.5)", ("var.get()",), ("var.set(0.25 * NOW)",)),
    ("local = threading.local()\nlocal.gain = 0.5", ("local.gain", "vars(local)['gain']"), ("local.gain = 0.25 * NOW",)),
    ("count_ = itertools.count()", ("next(count_)",), ("next(count_)",)),
    ("cycle = itertools.cycle([0.5, 2.0, 1.0])", ("next(cycle)",), ("next(cycle)",)),
    (
        "def numbers_of():\n    while True: yield from (0.5, 2.0)\ngiven = numbers_of()",
        ("next(given)", "next(numbers_of())"),
        ("next(given)", "def numbers_of(): yield 0.25"),
    ),
    (
        "namespace = types.SimpleNamespace(gain=0.5)\nmodule_ = types.ModuleType('random_reads_module')\nmodule_.gain = 0.5\n"
        "sys.modules['random_reads_module'] = module_",
        ("namespace.gain", "module_.gain", "__import__('random_reads_module').gain", "sys.modules['random_reads_module'].gain"),
        ("namespace.gain = 0.25 * NOW", "module_.gain = 0.25 * NOW", "vars(module_)['gain'] = 3",
         "namespace = types.SimpleNamespace(gain=3.0)",
         "sys.modules['random_reads_module'] = types.SimpleNamespace(gain=0.75)"),
    ),
    (
        "class Sl: __slots__ = ('gain', '__weakref__')\nsl = Sl()\nsl.gain = 0.5\nref_ = weakref.ref(sl)",
        ("sl.gain", "ref_().gain"),
        ("sl.gain = 0.25 * NOW", "Sl.gain.__set__(sl, 3.0)", "sl = Sl()\nsl.gain = 0.25\nref_ = weakref.ref(sl)"),
    ),
    (
        "class Mode(enum.Enum):\n    one = 0.5\n    two = 2.0\nmode_ = Mode.one",
        ("mode_.value", "Mode['one'].value", "len(Mode)", "(0.5 if mode_ is Mode.one else 3.0)"),
        ("mode_ = Mode.two", "mode_ = list(Mode)[NOW % 2]"),
    ),
    (
        "@dataclasses.dataclass(frozen=True)\nclass Frozen: gain: float = 0.5\nfrozen = Frozen()",
        ("frozen.gain", "dataclasses.astuple(frozen)[0]", "dataclasses.asdict(frozen)['gain']", "Frozen().gain", "hash(frozen) % 3"),
        ("object.__setattr__(frozen, 'gain', 0.25 * NOW)", "frozen = Frozen(3.0)", "Frozen.__init__.__defaults__ = (0.25 * NOW,)"),
    ),
    (
        "class Odd:\n    def __getattr__(self, name): return vars(self)['kept'].get(name, 1.0)\n"
        "    def __getitem__(self, key): return vars(self)['kept'][key]\n"
        "    def __contains__(self, key): return key in vars(self)['kept']\nodd = Odd()\nodd.kept = {'gain': 0.5}",
        ("odd.gain", "odd.other", "odd['gain']", "(2.0 if 'other' in odd else 0.5)"),
        ("odd.kept['gain'] = 0.25 * NOW", "odd.kept['other'] = 3.0", "odd.other = 0.75", "Odd.__getattr__ = lambda self, name: 3.0"),
    ),
    (
        "class Meta(type):\n    rate = 0.5\n    @property\n    def gain(cls): return cls.rate\nclass Own(metaclass=Meta): pass",
        ("Own.gain", "Own.rate"),
        ("Meta.rate = 0.25 * NOW", "Own.rate = 3.0", "Meta.gain = property(lambda cls: 0.75)"),
    ),
    (
        "class Desc:\n    level = 0.5\n    def __get__(self, one, kind): return self.level\nclass Has: gain = Desc()\nhas = Has()",
        ("has.gain", "Has.gain"),
        ("Desc.level = 0.25 * NOW", "vars(Has)['gain'].level = 3.0", "vars(has)['gain'] = 0.75", "Has.gain = 0.75"),
    ),
    (
        "bytes_, text_ = bytearray(b'ab'), 'ab'\nview_ = memoryview(bytes_)",
        ("bytes_[0] * 0.01", "len(text_)", "view_[1] * 0.01", "len(bytes_)"),
        ("bytes_[0] = NOW", "bytes_[1] = NOW", "text_ = text_ + 'c'", "view_ = memoryview(bytearray(b'xyz'))"),
    ),
    (
        "import array as arrays\nplain_array = arrays.array('d', [0.5, 2.0])",
        ("plain_array[1]", "sum(plain_array)", "len(plain_array)"),
        ("plain_array[1] = 0.25 * NOW", "plain_array = arrays.array('d', [0.25, 1.0])"),
    ),
    (
        "kinds = collections.Counter('aab')\nordered = collections.OrderedDict(a=0.5, b=2.0)",
        ("kinds['a']", "kinds['missing'] + 1", "next(iter(ordered.values()))", "kinds.most_common(1)[0][1]"),
        ("kinds['a'] += NOW", "kinds.update('bbbb')", "ordered.move_to_end('a')", "ordered['a'] = 0.25 * NOW"),
    ),
    (
        "calls = [lambda: 0.5, lambda: 2.0]\nby_name = {'f': lambda: 0.5}",
        ("calls[0]()", "by_name['f']()", "sum(one() for one in calls)"),
        ("calls[0] = lambda: 0.25 * NOW", "calls.reverse()", "by_name['f'] = calls[1]", "by_name.update(f=lambda: 3.0)"),
    ),
    (
        "class Str(str): pass\nclass Num(float):\n    extra = 0.5\nnum = Num(0.5)",
        ("num", "num.extra", "num * 2"),
        ("num = Num(0.25 * NOW)", "num.extra = 3.0", "Num.__mul__ = lambda self, other: 0.75", "Num.extra = 0.75"),
    ),
    (
        "class Lst(list):\n    def __getitem__(self, place): return list.__getitem__(self, place) * self.by\n    by = 1.0\n"
        "lst = Lst([0.5, 2.0])",
        ("lst[1]", "sum(lst)", "lst.by"),
        ("lst.by = 0.25 * NOW", "Lst.by = 3.0", "list.__setitem__(lst, 1, 0.25 * NOW)", "lst.append(1.0)"),
    ),
    (
        "class Bare: pass\nbare = Bare()",
        ("(2.0 if hasattr(bare, 'gain') else 0.5)", "getattr(bare, 'gain', 0.5)", "len(vars(bare))", "(2.0 if bare else 0.5)",
         "len([name for name in dir(bare) if name[0] != '_'])", "(2.0 if bare == Bare() else 0.5)", "len(Bare.__name__)"),
        ("bare.gain = 0.25 * NOW", "del bare.gain", "Bare.gain = 0.75", "del Bare.gain", "Bare.__getattr__ = lambda self, name: 3.0",
         "del Bare.__getattr__", "Bare.__eq__ = lambda self, other: True", "Bare.__len__ = lambda self: NOW % 2",
         "bare.__dict__ = {'gain': 0.25 * NOW}", "Bare.__name__ = 'Renamed'"),
    ),
    (
        "class Base:\n    def gain(self): return 0.5\nclass Mixed(Base): pass\nclass Most(Mixed):\n    def gain(self): return super().gain() + 1\n"
        "class Another:\n    def gain(self): return 0.75\nmost = Most()",
        ("most.gain()", "Most.__mro__[1]().gain()", "super(Most, most).gain()"),
        ("Mixed.gain = lambda self: 0.25 * NOW", "most.gain = lambda: 3.0", "del most.gain", "Base.gain = lambda self: 0.25 * NOW",
         "Most.__bases__ = (Another,)", "del Most.gain"),
    ),
    (
        "class Fixed:\n    kept = 0.5\nclass Under(Fixed): pass",
        ("Under.kept", "getattr(Under, 'ke' + 'pt')", "sum(value for value in (Under.kept, Fixed.kept))"),
        ("Fixed.kept = 0.25 * NOW", "Under.kept = 3.0", "del Under.kept"),
    ),
    (
        "@dataclasses.dataclass(order=True)\nclass Record:\n    gain: float = 0.5\n    number: int = 1\nrecord, same = Record(), Record()",
        ("(2.0 if record == same else 0.5)", "(2.0 if record < same else 0.5)", "len(repr(record))", "len(f'{record}')", "sum(dataclasses.astuple(record))",
         "sum(dataclasses.asdict(record).values())", "sum(getattr(record, field.name) for field in dataclasses.fields(record))",
         "len(pickle.dumps(vars(record)))", "copy.copy(record).gain", "dataclasses.replace(record, number=2).gain", "len(str([record]))",
         "operator.attrgetter('gain')(record)"),
        ("record.gain = 0.25 * NOW", "record.number = 2", "same.gain = 0.125", "same.number = 12345678", "record.other = 3"),
    ),
    (
        "class Shown:\n    level = 1\n    def __str__(self): return 'a' * self.level\n    def __format__(self, how): return 'ab' * self.level\n"
        "shown, get_level = Shown(), operator.attrgetter('level')",
        ("len(str(shown))", "len(f'{shown}')", "len('{}'.format(shown))", "len('%s' % shown)", "get_level(shown)"),
        ("shown.level = 2", "Shown.level = 3", "Shown.__str__ = lambda self: 'abcd'", "Shown.__format__ = lambda self, how: 'abcde'"),
    ),
    (
        "class Point:\n    __match_args__ = ('u', 'v')\n    def __init__(self): self.u, self.v = 0.5, 2.0\npoint, entries = Point(), {'a': 0.5}\n"
        "def matched():\n    match point:\n        case Point(0.5, v): return v\n        case Point(u=u): return u\n"
        "def matched_entries():\n    match entries:\n        case {'a': a, 'b': b}: return a + b\n        case {'a': a}: return a\n    return 3.0",
        ("matched()", "matched_entries()"),
        ("point.v = 0.25 * NOW", "point.u = 0.125", "Point.__match_args__ = ('v', 'u')", "entries['b'] = 0.25 * NOW", "entries['a'] = 2.0"),
    ),
    (
        "chain, user = collections.ChainMap({}, {'a': 0.5}), collections.UserDict(a=0.5)\ntable_ = {'a': 0.5, 'b': 2.0}\nview, keys_ = table_.values(), table_.keys()\n"
        "default = collections.defaultdict(lambda: 0.5)",
        ("chain['a']", "user['a']", "sum(view)", "len(keys_)", "next(iter(table_.values()))", "(default['a'] if len(default) else default.default_factory())"),
        ("chain['a'] = 0.25 * NOW", "chain.maps.reverse()", "user['a'] = 0.25 * NOW", "user.data = {'a': 3.0}", "table_['a'] = table_.pop('a')",
         "table_['c'] = 0.25 * NOW", "default.default_factory = lambda: 0.25 * NOW"),
    ),
    (
        "package_ = types.ModuleType('random_package')\npackage_.__path__ = []\npart_ = types.ModuleType('random_package.part')\npart_.gain = 0.5\npackage_.part = part_\n"
        "sys.modules['random_package'], sys.modules['random_package.part'] = package_, part_\nsys.modules.pop('random_absent', None)\n"
        "def imported():\n    import random_package.part as found\n    return found.gain\ndef imported_from():\n    from random_package.part import gain\n    return gain\n"
        "def tried():\n    try: import random_absent as found\n    except ImportError: return 0.5\n    return found.gain",
        ("imported()", "imported_from()", "tried()", "importlib.import_module('random_package.part').gain"),
        ("part_.gain = 0.25 * NOW", "package_.part = types.SimpleNamespace(gain=0.25 * NOW)",
         "sys.modules['random_package.part'] = types.SimpleNamespace(gain=3.0)", "sys.modules['random_absent'] = types.SimpleNamespace(gain=0.75)"),
    ),
    (
        "import builtins\nbuiltins.RANDOM_BUILTIN = 0.5\nvars(builtins).pop('RANDOM_ABSENT', None)\n"
        "for name_ in ('abs', 'RANDOM_BUILTIN'): globals().pop(name_, None)",
        ("abs(-0.5)", "RANDOM_BUILTIN", "getattr(builtins, 'RANDOM_ABSENT', 0.5)"),
        ("builtins.RANDOM_BUILTIN = 0.25 * NOW", "globals()['abs'] = lambda value: 0.25 * NOW", "globals()['RANDOM_BUILTIN'] = 3.0",
         "builtins.RANDOM_ABSENT = 0.75", "del builtins.RANDOM_ABSENT", "del globals()['abs']"),
    ),
    (
        "class Ref: pass\nref_a, ref_b = Ref(), Ref()\nweak_set, weak_values = weakref.WeakSet([ref_a]), weakref.WeakValueDictionary(a=ref_a)",
        ("len(weak_set)", "len(weak_values)", "(2.0 if 'b' in weak_values else 0.5)"),
        ("weak_set.add(ref_b)", "weak_values['b'] = ref_b", "ref_b = None"),
    ),
    (
        "event, lock, fifo = threading.Event(), threading.Lock(), queue.Queue()\nlogger_ = logging.getLogger('random_reads')\nlogger_.setLevel(10)",
        ("(2.0 if event.is_set() else 0.5)", "(2.0 if lock.locked() else 0.5)", "fifo.qsize() + 1", "(2.0 if logger_.isEnabledFor(20) else 0.5)", "logger_.level"),
        ("event.set()", "lock.locked() or lock.acquire()", "fifo.put(1)", "logger_.setLevel(40)", "event.clear()", "logger_.setLevel(10)"),
    ),
    (
        "objects, data = np.array([0.5, 2.0], dtype=object), ctypes.c_double(0.5)\ndecimal.setcontext(decimal.Context())\nthird = fractions.Fraction(1, 3)",
        ("objects[0]", "data.value", "float(third)", "float(decimal.Decimal(1) / decimal.Decimal(3))"),
        ("objects[0] = 0.25 * NOW", "data.value = 0.25 * NOW", "third = fractions.Fraction(NOW, 7)", "third._numerator = 3",
         "decimal.getcontext().prec = 3 + NOW % 5"),
    ),
    (
        "global number_of\nnumber_of = 0\nclass Counts: number = 0\ncounts = Counts()\ndef step_():\n    global number_of\n    number_of += 1\n    return 0.5 if number_of < 7 else 2.0\n"
        "def count_():\n    counts.number += 1\n    return 0.5 if counts.number < 7 else 2.0",
        ("step_()", "count_()"),
        ("number_of = 0", "counts.number = 0"),
    ),
    (
        "counted, tally = {'n': 0}, collections.Counter()\ndef entry_():\n    counted['n'] += 1\n    return 0.5 if counted['n'] < 7 else 2.0\n"
        "def tally_():\n    tally['a'] += 1\n    return 0.5 if tally['a'] % 3 else 2.0",
        ("entry_()", "tally_()"),
        ("counted['n'] = 0", "tally['a'] = 2"),
    ),
    (
        "args, simple, which = argparse.Namespace(gain=0.5, other=2.0), types.SimpleNamespace(gain=0.5, other=2.0), 'gain'\n"
        "same_args = argparse.Namespace(gain=0.5, other=2.0)",
        ("getattr(args, which)", "getattr(simple, f'{which}')", "sum(getattr(args, name) for name in ('gain', 'other'))", "sum(vars(simple).values())",
         "(2.0 if args == same_args else 0.5)", "len(repr(simple))", "(2.0 if hasattr(simple, 'third') else 0.5)", "dict(**vars(args))['other']"),
        ("args.gain = 0.25 * NOW", "simple.gain = 0.25 * NOW", "which = 'other'", "simple.third = 3.0", "args.other = 0.125", "simple.other = 12.5"),
    ),
    (
        "scaler = torch.amp.GradScaler('cpu', growth_factor=2.0)",
        ("scaler.get_growth_factor()", "(2.0 if scaler.is_enabled() else 0.5)"),
        ("scaler.set_growth_factor(3.0)", "scaler._enabled = False"),
    ),
)  # fmt: skip


def all_reads() -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """How values are made; the expressions that read each; the changes."""
    return _READS


class Gains:
    gain = 4.0


def scaled_of(value: float, by: float = 1.0) -> float:
    return value * by


def random_read(choose: Any) -> Read:
    """A random value, with one expression and all its changes."""
    setup, values, changes = choose.choice(_READS)
    return Read(setup, choose.choice(values), changes)


def names() -> dict[str, Any]:
    """What the statements may name besides `torch`."""
    modules = (
        argparse, collections, contextvars, copy, ctypes, dataclasses, decimal, enum, fractions, functools, importlib, itertools,
        logging, math, operator, os, pickle, queue, sys, threading, types, typing, weakref,
    )  # fmt: skip
    return {one.__name__: one for one in modules} | {"np": np, "Gains": Gains, "scaled_of": scaled_of}
