"""A compiled graph as bytes: what the worker process sends and the disk cache keeps.

In: the bytes that `build` makes. Out: a callable that takes one list of arguments and empties it.

Note [Native, light and bundled artefacts]
Inductor's result is a Python module that allocates buffers and calls C++ kernels. A loader needs only the kernels,
built into shared objects, and a runner that does what the module does, without Python (Note [Runs without Python]): a
native artefact. Where the module does something that a runner cannot do, it is kept, without the kernels' sources: a
light artefact. Both load in 15 ms (a GPT's step) and import neither torch._dynamo nor torch._inductor nor sympy.
PyTorch's own artefacts take five seconds to load, most of the time with the GIL held. The first two are correct only if
AOTAutograd adds no wrappers to the module and the module uses nothing from torch._inductor. Any other graph is sent as
a bundled artefact, which is PyTorch's own. What was compiled block by block contains the kernels and runners of all
blocks, an artefact for each block that cannot be built together with the others, and the sequence of the calls (Note
[Blocks compiled once]).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import marshal
import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from lazy_backend.cache.scratch import scratch_folder
from lazy_backend.lowering.artefacts.environment import made_for
from lazy_backend.lowering.artefacts.run_thread import Begin, RunStarter
from lazy_backend.lowering.artefacts.runner_source import PYTHON_NAMES
from lazy_backend.lowering.blocks.block_sequence import BlockRunner, BlockSequence
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.rng import define_operators_for
from lazy_backend.ports.replacements import inductor


class BadArtefact(ValueError):
    """Bytes that are not an artefact, or one that was made for another PyTorch, Python or processor."""


# ----- the container: length and text of a header, then blobs


def pack(header: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    text = json.dumps({**header, "made_for": made_for(), "sizes": [len(blob) for blob in blobs]}).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def unpack(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Header and blobs. Raises `BadArtefact`."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
    except (struct.error, ValueError) as error:
        raise BadArtefact(f"not an artefact: {error}") from error
    if header["made_for"] != made_for():
        raise BadArtefact(f"made for {header['made_for']}, but this is {made_for()}")
    blobs, place = [], 8 + length
    for size in header["sizes"]:
        blobs.append(data[place : place + size])
        place += size
    return header, blobs


def header_bytes(start: bytes) -> int:
    """How many bytes of an artefact its header takes, from the first eight."""
    return 8 + int(struct.unpack_from("<Q", start)[0])


def text_in(start: bytes, name: str) -> str | None:
    """A text of an artefact's header, from its first bytes; None if these are too few, or no artefact's."""
    try:
        (length,) = struct.unpack_from("<Q", start)
        text = json.loads(start[8 : 8 + length])[name]
    except (struct.error, ValueError, TypeError, KeyError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def kind_of(start: bytes) -> str | None:
    """The kind of an artefact, as `text_in`."""
    return text_in(start, "kind")


def marked(data: bytes, marks: dict[str, Any]) -> bytes:
    """The artefact with marks in its header, which say what runs have shown. Raises `BadArtefact`.

    `is_faster`: of a graph in blocks, than the whole graph. `agreed`, `refused`: see `Proof`. `script`: that of
    `reproducer`.
    """
    header, blobs = unpack(data)
    return pack({**header, **marks}, blobs)


# ----- loading


Call = Callable[[list[Any]], Sequence[Any]]


def _no_starter() -> None:
    """Runs need Python."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A compiled graph. `guards`: the conditions on symbolic sizes, if any. `why_python`: why its runs need Python.

    `may_be_slower`: whether it is in blocks, and nobody has seen yet that this is faster than the whole graph.
    `find_starter`: finds what begins runs beside recording, if such runs need no Python; for blocks after a first run.
    `left_out`: checks that its runs leave out.
    """

    call: Call
    guards: str | None
    why_python: str = ""
    may_be_slower: bool = False
    find_starter: Callable[[], RunStarter | None] = _no_starter
    left_out: tuple[str, ...] = ()
    is_in_blocks: bool = False


# The kind of an artefact of a graph that the compiler fails on: its marks say what has to be left to kernels.
NO_PLAN = "no plan"


def without_plan() -> bytes:
    """An artefact that has nothing but marks."""
    return pack({"kind": NO_PLAN, "guards": None}, [])


def marks_of(data: bytes) -> dict[str, Any]:
    """The header of an artefact, with the marks that runs have left in it. Raises `BadArtefact`."""
    return unpack(data)[0]


def load(data: bytes, graph: Graph) -> Loaded:
    """The compiled form of `graph`. Raises `BadArtefact`."""
    for node in graph.nodes:
        if node.seed is not None:
            define_operators_for(node.op)
    return _load(data)


def _load(data: bytes) -> Loaded:
    header, blobs = unpack(data)
    if header["kind"] == "bundled":
        return Loaded(_load_bundled(blobs[0]), header["guards"], header["reason"])
    if header["kind"] == "native":
        runners = _load_runners(header["kernels"], [header["block"]], blobs)
        starter = runners.starter(runners.extension.begin0)
        left_out = tuple(header["block"]["left_out"])
        return Loaded(runners.calls[0], header["guards"], find_starter=lambda: starter, left_out=left_out)
    if header["kind"] == "blocks":
        return _load_blocks(header, blobs)
    if header["kind"] == NO_PLAN:
        raise BadArtefact("the compiler failed on the graph")
    with scratch_folder() as folder:
        units = [load_extension(blob, folder) for blob in blobs[1:]]
    space: dict[str, Any] = {"__name__": "lazy_backend compiled graph"}
    for names, unit in zip(header["kernels"], units, strict=True):
        space.update((name, getattr(unit, name)) for name in names)
    space["extern_kernels"] = SimpleNamespace(**{name: _resolve(path) for name, path in header["externs"].items()})
    exec(marshal.loads(blobs[0]), space)
    return Loaded(space["call"], header["guards"], header["reason"])


def _load_blocks(header: dict[str, Any], blobs: Sequence[bytes]) -> Loaded:
    count = header["artefacts"]
    artefacts = list(map(_load, blobs[:count]))
    reasons = dict.fromkeys(artefact.why_python for artefact in artefacts if artefact.why_python)
    described, native = header["blocks"], [block for block in header["blocks"] if "runner" in block]
    runners = _load_runners(header["kernels"], native, blobs[count:]) if native else None
    calls = iter(runners.calls if runners is not None else ())
    blocks = [next(calls) if "runner" in block else artefacts[block["artefact"]].call for block in described]
    sequence = None if count or runners is None else _NativeSequence(runners)
    make, find = (None, _no_starter) if sequence is None else (sequence.make, sequence.starter)
    runner = BlockRunner(BlockSequence.from_json(header["sequence"]), blocks, make)
    left_out = tuple(name for block in native for name in block["left_out"])
    may_be_slower = "is_faster" not in header
    return Loaded(runner.call, header["guards"], ", ".join(reasons), may_be_slower, find, left_out, is_in_blocks=True)


@dataclass(frozen=True, slots=True)
class _Runners:
    """The runners of some blocks. `num_threads`: see `RunStarter`."""

    extension: Any
    calls: tuple[Call, ...]
    need_python: bool
    num_threads: int | None

    def starter(self, begin: Begin) -> RunStarter | None:
        """What begins runs by that function, if they need no Python."""
        return None if self.need_python else RunStarter(self.extension, begin, self.num_threads)


class _NativeSequence:
    """Calls of blocks in the extension that has their runners."""

    def __init__(self, runners: _Runners) -> None:
        self._runners = runners
        self._starter: RunStarter | None = None

    def make(self, *described: Any) -> Call:
        """What computes all of it, of what the extension's `make_sequence` takes."""
        extension = self._runners.extension
        sequence = extension.make_sequence(*described)
        self._starter = self._runners.starter(functools.partial(extension.begin_sequence, sequence))
        return functools.partial(extension.call_sequence, sequence)

    def starter(self) -> RunStarter | None:
        """What begins runs, once it has been made."""
        return self._starter


def _load_runners(
    kernels: Sequence[Sequence[str]], blocks: Sequence[dict[str, Any]], blobs: Sequence[bytes]
) -> _Runners:
    """The runners of these blocks. `blobs`: the extension with all runners, and units with these `kernels` each."""
    with scratch_folder() as folder:  # shared objects stay mapped after their files are gone
        extension, *units = [load_extension(blob, folder) for blob in blobs]
    addresses: dict[str, int] = {}
    for names, unit in zip(kernels, units, strict=True):
        addresses.update(zip(names, unit.addresses(), strict=True))
    for block in blocks:
        # eval adds no risk: an artefact is code anyway
        functions = [eval(text, dict(PYTHON_NAMES)) for text in block["functions"]]
        bind = getattr(extension, f"bind{block['runner']}")
        bind(tuple(addresses[name] for name in block["kernels"]), tuple(functions))
    calls = tuple(getattr(extension, f"call{block['runner']}") for block in blocks)
    need_python = any(block["functions"] for block in blocks)
    return _Runners(extension, calls, need_python, blocks[0]["num_threads"])


def boxed(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """`compiled` as a boxed function: it takes one list of arguments and empties that list.

    Inputs are freed during the run only if the backend provides a boxed function itself.
    """
    # AOTAutograd returns a function of *args, whose tuple would keep every input alive in
    # the run. That function wraps one that takes a list; functools.wraps copies the attribute `_boxed_call` to every
    # wrapper. The outermost function that takes a list is the right one: deeper ones lack some AOTAutograd wrappers
    inner: Any = compiled
    while inner is not None:
        if getattr(inner, "_boxed_call", False) and _takes_one_list(inner):
            return inner  # type: ignore[no-any-return]
        inner = getattr(inner, "__wrapped__", None)

    def unboxed(arguments: list[Any]) -> Any:
        taken = tuple(arguments)
        arguments.clear()
        return compiled(*taken)

    return unboxed


def _takes_one_list(function: Any) -> bool:
    parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _resolve(path: str) -> Any:
    if path.startswith("torch."):
        return getattr(torch, path.removeprefix("torch."))
    namespace, name, overload = path.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def load_extension(blob: bytes, folder: Path) -> ModuleType:
    """The extension module `compiled` of a shared object. Loaded once per process."""
    digest = hashlib.blake2b(blob, digest_size=16).hexdigest()
    name = f"_lazy_backend_{digest}.compiled"  # PyInit_compiled; CPython and the linker identify a library by name
    module = sys.modules.get(name)
    if module is None:
        file = folder / f"{digest}.so"
        file.write_bytes(blob)
        os.environ[inductor.POINTER_VARIABLE] = str(inductor.pointer_function)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return module


def _load_bundled(data: bytes) -> Callable[[list[Any]], Sequence[Any]]:
    return boxed(inductor.load_bundled(data))
