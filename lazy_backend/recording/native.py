"""The recorder of known calls in C++: where it comes from, and what it is told.

In: `ports/native_recorder.cpp`, a C++ compiler, the disk cache. Out: `native_recorder`, which every step asks to go on.
Without it everything is recorded in Python, with the same results.

Note [Where the recorder comes from]
It is built once for each PyTorch, Python and version of this package, which takes 20 s of a core: by the compiler that
graphs need anyway, at low priority, on a thread of its own, once a program has ended so many steps that it is worth it.
It is kept in the disk cache beside compiled graphs, under the same rules: private, checked, made by one process at a
time. A later program finds it there at its first step. Nothing waits for it: it records from some call on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import signal
import subprocess
import sysconfig
import threading
from pathlib import Path
from typing import Any

import torch

import lazy_backend_autoload as first_use
from lazy_backend import metrics
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.process_locks import process_lock
from lazy_backend.cache.scratch import scratch_folder
from lazy_backend.cache.trie import TrieNode
from lazy_backend.execution.disk_cache import artefact_store
from lazy_backend.execution.step_ends import MOST_BATCHES, step_ends
from lazy_backend.lowering.artefacts.artefact import load_extension
from lazy_backend.lowering.artefacts.environment import made_for
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import intern_meta
from lazy_backend.lowering.ir.program import INPUTS, Call, Fresh, Same, Token, View
from lazy_backend.metrics.recording_costs import Aside
from lazy_backend.ports import cpython, port
from lazy_backend.ports.table import NATIVE_RECORDER
from lazy_backend.recording import at_once, record
from lazy_backend.recording.handlers import factory_operator
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.outside import unwritten_storage
from lazy_backend.tensors.state import UNWRITTEN, DeviceContext, LazyStorage, Pace, TensorData, Trace, ViewData
from lazy_backend.tensors.tensor import LazyTensor

# Steps after which a program is taken for one that goes on, so that building the recorder is worth it.
_WORTH = 100
# Seconds after which another process that builds it is taken for a stopped one; that a build may take.
_PATIENCE = 120.0
_LONGEST_BUILD = 600.0

_SOURCE = Path(port.__file__).with_name("native_recorder.cpp")


class NativeRecorder:
    """The recorder in C++, or the way to it. `state` says how far it is."""

    def __init__(self) -> None:
        self.state = "not looked for: no step has ended"
        self.extension: Any = None
        self._num_steps = 0
        self._thread: threading.Thread | None = None
        # Held while it is loaded. A thread inside of C++ when the interpreter ends aborts the process.
        self._loading = process_lock(outermost=True)

    def note_step(self) -> None:
        """Look for the recorder when a program ends its first step; build it when that is worth it."""
        if self._num_steps < _WORTH:
            self._num_steps += 1
            if self.extension is None and self._num_steps in (1, _WORTH) and NATIVE_RECORDER.fits():
                self._begin(may_build=self._num_steps == _WORTH and config.compile != "off")

    def _begin(self, may_build: bool) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self.find, args=(may_build,), name="lazy_backend recorder", daemon=True
            )
            self._thread.start()

    def find(self, may_build: bool = True) -> bool:
        """Take the recorder from the disk cache, or build it and put it there. Returns whether it records from now on.

        Raises nothing: where it cannot be had, that is said once, and calls are recorded in Python.
        """
        try:
            found = obtain(may_build)
        except _NotNow:
            return False
        except CannotBeBuilt as error:
            self.state = str(error)
            NATIVE_RECORDER.turn_off(str(error))
            return False
        if found is None:
            self.state = "not built yet"
            return False
        return self.start(found)

    def start(self, library: bytes) -> bool:
        """Load the recorder and have it record from now on. Returns whether it does."""
        try:
            with self._loading:
                self._load(library)
        except (ImportError, OSError, KeyError, TypeError) as error:
            self.state = f"cannot be loaded: {error}"
            NATIVE_RECORDER.turn_off(self.state)
            return False
        return True

    def _load(self, library: bytes) -> None:
        with scratch_folder() as folder:
            self.extension = load_extension(library, folder)
        self.extension.start(_handed_over())
        cpython.held_among = self.extension.held_among
        Aside.count = self.extension.calls
        self.state = "in C++"

    def end(self, timeout: float) -> None:
        """Load it no more: the interpreter ends. Waits up to `timeout` seconds for a load that has begun."""
        self._loading.acquire(timeout=timeout)

    def describe(self) -> str:
        """How known calls are recorded, as a part of a sentence."""
        return "recorded in C++" if self.extension is not None else f"recorded in Python; the one in C++: {self.state}"

    def counts(self) -> tuple[int, int]:
        """Calls that C++ recorded, or copied from the host, and those that Python got since the recorder was there."""
        return (0, 0) if self.extension is None else self.extension.counts()


native_recorder = NativeRecorder()


class CannotBeBuilt(Exception):
    """Says why."""


class _NotNow(Exception):
    """The program ended while the recorder was built."""


def _handed_over() -> dict[str, Any]:
    """What the recorder knows Python's side by."""
    aten = torch.ops.aten
    shares = (aten.detach.default, aten.alias.default)
    returns = (aten.lift_fresh.default, aten.lift.default)
    factories = {name: factory_operator(name) for name in first_use.FACTORIES if "generator" not in name}
    formats = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
    INPUTS.reserve(1)
    return {
        **{kind.__name__: kind for kind in (LazyTensor, LazyStorage, ViewData, TensorData, TrieNode)},
        **{kind.__name__: kind for kind in (DeviceContext, Trace, Pace)},
        **{kind.__name__: kind for kind in (Token, Fresh, View, Same, Call)},
        **{name: getattr(record, f"_{name.upper()}") for name in ("true", "false", "float", "complex", "enter")},
        "unwritten": UNWRITTEN,
        "strided": torch.strided,
        "formats": formats,
        "shares": tuple(op.name() for op in shares),
        "returns": tuple(op.name() for op in returns),
        "factories": tuple((f"aten::{name}", op.name(), op) for name, op in factories.items()),
        "copies": (("aten::_copy_from", "aten::copy_", aten.copy_.default),),
        "inputs": INPUTS.made,
        "dispatch": record.INSTALLED,
        "recorded_alike": record.recorded_alike,
        "draw_seed": contexts.get_rng_seed,
        "return_seed": rng.return_seed,
        "see_batch": step_ends.see_batch,
        "most_batches": MOST_BATCHES,
        "made_context": contexts.made_context,
        "unwritten_storage": unwritten_storage,
        "add_event": metrics.event_sink(),
        "upload_seconds": "TransferToDeviceTime",
        "upload_bytes": "OutboundData",
        "download_seconds": "TransferFromDeviceTime",
        "download_bytes": "InboundData",
        "lock": threading.RLock(),
        "runs_alike": record.runs_alike,
        "dropouts": tuple((op.name(), place) for op, place in rng.DROPOUT_PLACES.items()),
        "draw": at_once.draw,
        "take_back": at_once.take_back,
        "make_meta": intern_meta,
        "wrap_result": at_once.wrap_result,
        "see_calls": at_once.see_calls,
    }


# ----- where it comes from


def recorder_key() -> Key:
    """What a recorder is for: its source, PyTorch, Python, processor. It serves any number of threads."""
    parts = {name: str(value) for name, value in made_for().items() if name != "threads"}
    return Key((("recorder", _SOURCE.read_text()), *parts.items()))


def obtain(may_build: bool) -> bytes | None:
    """The recorder from the disk cache; built and kept there if it is not there and `may_build`.

    None if there is none, and none may be built or kept. Raises `CannotBeBuilt`.
    """
    store = artefact_store()
    key = recorder_key()
    found = None if store is None else store.get(key)
    if found is not None or not may_build or store is None or store.own is None:
        return found
    with store.own.made_once(key, _PATIENCE, "recorder") as made:
        if made is not None:
            return made
        built = build()
        store.put(key, built)
        return built


def build() -> bytes:
    """The recorder, an extension of Python. Raises `CannotBeBuilt`."""
    try:
        with scratch_folder() as folder:
            target = folder / "recorder.so"
            _run(_command(target), folder)
            return target.read_bytes()
    except OSError as error:
        raise CannotBeBuilt(f"it cannot be built: {error}") from error


def _command(target: Path) -> list[str]:
    home = Path(torch.__file__).parent
    included = (home / "include", home / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    abi = int(torch.compiled_with_cxx11_abi())
    options = ["-std=c++20", "-O2", "-g0", "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    # the process has this library by then, and it names all others
    linked = (f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-ltorch_python")
    return [*compiler, *options, *(f"-I{path}" for path in included), str(_SOURCE), "-o", str(target), *linked]


# Runs a command in the group of processes that the shell leads. They end with the program, as its standard input does.
_WHILE_THE_PROGRAM_RUNS = 'exec 3<&0 </dev/null; (read _ <&3; kill -9 0) & exec 3<&-; exec "$@"'


def _run(command: list[str], folder: Path) -> None:
    """Run the compiler, in a session of its own: Ctrl-C ends the program, and this with it, as every other end does."""
    log = folder / "log"
    with log.open("w") as output:
        # nice: the program's own threads come first
        process = subprocess.Popen(
            ["sh", "-c", _WHILE_THE_PROGRAM_RUNS, "sh", "nice", "-n", "10", *command], stdin=subprocess.PIPE,
            stdout=output, stderr=output, cwd=folder, start_new_session=True,
        )  # fmt: skip

    is_over = False

    def end() -> None:
        nonlocal is_over
        is_over = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    atexit.register(end)
    try:
        code = process.wait(_LONGEST_BUILD)
        if is_over:  # the program ends
            raise _NotNow
    except subprocess.TimeoutExpired:
        raise CannotBeBuilt(f"the C++ compiler took more than {_LONGEST_BUILD:.0f} s") from None
    finally:
        end()
        process.communicate()
        atexit.unregister(end)
    if code != 0:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "error" in line]
        said = f": {errors[0]}" if errors else ""
        raise CannotBeBuilt(f"the C++ compiler {command[0]} ended with status {code}{said}")
