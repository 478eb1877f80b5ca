"""All settings: name, default, environment variable, help, and whether compiled code depends on the setting.

In: the environment at import, assignments afterwards. Out: `config`, exported as `lazy_backend.config`.
An assignment is checked at once: a misspelt name or a bad value raises where it was written.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lazy_backend.lowering.devices.registration import backing_devices
from lazy_backend.ports.compilers import backend_names, is_backend


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting."""

    default: Any
    check: Callable[[Any], Any]  # returns the value to store, raises ValueError or TypeError
    help: str
    env: str | None = None
    in_key: bool = False  # whether compiled code depends on the setting
    of_machine: bool = False  # whether the default depends on the machine, as `help` says
    # what an assignment has to pass beyond `check`. The variable is read before the program can register anything
    check_assigned: Callable[[Any], None] = lambda value: None


def _at_least(least: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        refusal = f"expected a whole number of at least {least}"
        try:
            number = int(value)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(refusal) from None
        if isinstance(value, bool) or number < least or (isinstance(value, float) and number != value):
            raise ValueError(refusal)
        return number

    return check


_positive, _count = _at_least(1), _at_least(0)


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not float(value) >= 0:
        raise ValueError("expected seconds, or None for never")
    return float(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("0", "1", "true", "false"):
        return value.lower() in ("1", "true")
    if not isinstance(value, bool):
        raise ValueError("expected True or False")
    return value


def _choice(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(map(repr, choices))}")
        return str(value)

    return check


def _backend(value: Any) -> Any:
    if value in (None, ""):
        return None
    if not (isinstance(value, str) or callable(value)):
        raise ValueError("expected the name of a torch.compile backend or a callable")
    return value


def _check_registered(backend: Any) -> None:
    if isinstance(backend, str) and not is_backend(backend):
        raise ValueError(
            f"torch.compile has no backend of this name. It has {', '.join(backend_names())}.\n"
            "  Fix: name one of these, or assign the callable itself; a name may be assigned once "
            "torch._dynamo.register_backend knows it"
        )


def _folders(value: Any) -> tuple[str, ...]:
    found = value.split(os.pathsep) if isinstance(value, str) else () if value is None else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str | os.PathLike) for one in found):
        raise ValueError(f"expected a list of folders, or one text with {os.pathsep!r} between them")
    return tuple(os.fspath(one) for one in found if os.fspath(one))


def _device_type(value: Any) -> str | None:
    if value in (None, ""):
        return None
    if value not in backing_devices:
        known = ", ".join(map(repr, backing_devices))
        raise ValueError(
            f"expected one of {known}, or None for the last one there is. Another device has to be registered first.\n"
            f"  Fix: import its package and call lazy_backend.register_device({value!r}), after which it is the "
            "default; config.device may name it from then on, but not the variable, which is read at the import"
        )
    return str(value)


FLAGS: dict[str, Flag] = {
    "backend": Flag(
        None,
        _backend,
        "torch.compile backend, by name or as a callable. None takes the backing device's: Inductor on CPUs and CUDA. "
        "A name that torch.compile does not know raises at once; the variable's is looked up at the first compile.",
        "LAZY_BACKEND_BACKEND",
        in_key=True,
        check_assigned=_check_registered,
    ),
    "compile": Flag(
        "background",
        _choice("background", "foreground", "off"),
        "'background': compile a graph when it recurs, in a process of its own, and interpret it meanwhile. "
        "'foreground': wait for the compiler. 'off': interpret every graph.",
        "LAZY_BACKEND_COMPILE",
    ),
    "device": Flag(
        None,
        _device_type,
        "Backing device type: 'cpu', 'cuda' or one that `register_device` registered. None takes the last of these "
        "that there is. Fixed at the first lazy tensor.",
        "LAZY_BACKEND_DEVICE",
    ),
    "num_devices": Flag(
        1,
        _positive,
        "Number of logical lazy devices when the backing device is the CPU. Of others there is one per device.",
        "LAZY_BACKEND_NUM_DEVICES",
    ),
    "run_in_background": Flag(
        "auto",
        _choice("auto", "always", "never"),
        "Whether runs happen on another thread, or within mark_step. 'auto': on CUDA, and on other devices with a "
        "`GraphDevice`, unless the step is launched as one graph, and on the CPU, if nobody waits for the run, for "
        "compiled graphs that need no Python if there are "
        "more cores than threads in use, and for others if they take more than 1.5 ms and operators use one thread.",
        "LAZY_BACKEND_RUN_IN_BACKGROUND",
    ),
    "device_graphs": Flag(
        "auto",
        _choice("auto", "off"),
        "'auto': runs that recur are launched as one graph of the device, where it has such graphs: CUDA's, or those "
        "of a device with a `GraphDevice`. 'off': kernel by kernel.",
        "LAZY_BACKEND_DEVICE_GRAPHS",
    ),
    "overlap_collectives": Flag(
        False,
        _boolean,
        "Whether collectives on the CPU communicate in the background while the step computes what does not need them.",
        "LAZY_BACKEND_OVERLAP_COLLECTIVES",
    ),
    "mark_steps": Flag(
        "auto",
        _choice("auto", "by hand"),
        "Where steps end. 'auto': with optimizers' steps; where there is none, before the next batch from the "
        "host, or after some rounds of a loop; in a thread that calls mark_step(), only there. 'by hand': only at "
        "mark_step().",
        "LAZY_BACKEND_MARK_STEPS",
    ),
    "first_sight": Flag(
        "run",
        _choice("run", "record"),
        "What happens to a call that was never seen at its place in a program. 'run': it runs at once, as in eager, "
        "while it is recorded. 'record': it is deferred like any other, after inferring what it will give.",
        "LAZY_BACKEND_FIRST_SIGHT",
    ),
    "num_profiled_runs": Flag(
        1, _count, "Interpreted runs of a graph before it is compiled; with 0, nothing is asked of its size either."
    ),
    "compile_after_operators": Flag(
        32,
        _count,
        "Operators that the runs of a graph have called before it is compiled, each 64 KiB of results counted as "
        "one more. So a loop's main program is compiled at its second run, and small ones between steps only if they "
        "run often.",
        "LAZY_BACKEND_COMPILE_AFTER_OPERATORS",
    ),
    "max_specializations": Flag(4, _positive, "Compiled plans per graph, for floats that cannot be inputs."),
    "max_static_shapes": Flag(
        1,
        _count,
        "Shapes of one program that get a compiled plan each, before one plan for many shapes is compiled. "
        "See also set_fusion_strategy.",
    ),
    "max_dynamic_shapes": Flag(
        3,
        _count,
        "Plans for many shapes that a program gets, when sizes vary in another way than was guessed. "
        "See also set_fusion_strategy.",
    ),
    "max_symbols": Flag(4, _positive, "Sizes that vary independently in a plan for many shapes."),
    "release_delay_seconds": Flag(
        60.0,
        _seconds,
        "Seconds of compiled runs after which a graph itself is kept as compressed text only, and made again if it is "
        "to be compiled once more; None keeps it.",
    ),
    "compiler_idle_seconds": Flag(
        60.0,
        _seconds,
        "Seconds without a compile after which the compiler's process, which holds 375 MB, is ended; the next compile "
        "starts another. None keeps it.",
    ),
    "max_compiled_nodes": Flag(
        20_000, _positive, "Graphs with more nodes are interpreted, with a warning: compiling them takes many minutes."
    ),
    "compile_blocks_once": Flag(
        True,
        _boolean,
        "Whether stretches of a large graph that are equal, such as the blocks of a transformer, are compiled once and "
        "called many times, which saves most of the compile. False: graphs are compiled whole.",
        "LAZY_BACKEND_COMPILE_BLOCKS_ONCE",
    ),
    "compile_whole_after_seconds": Flag(
        60.0,
        _seconds,
        "Seconds of runs in such blocks after which the graph is also compiled whole, in the background and while a "
        "core idles; the faster plan stays. None: blocks stay.",
        "LAZY_BACKEND_COMPILE_WHOLE_AFTER_SECONDS",
    ),
    "verify_compiled": Flag(
        "once",
        _choice("once", "always", "off"),
        "'once': a compiled graph runs once beside the interpreter, on the same inputs, before it is used; one whose "
        "results differ by more than rounding explains is not used. 'always': every run, to find faults of compilers. "
        "'off': never. Holds for what is compiled or loaded from then on.",
        "LAZY_BACKEND_VERIFY_COMPILED",
    ),
    "max_trace_length": Flag(
        20_000, _positive, "Recorded calls after which a trace is cut, with a warning.", "LAZY_BACKEND_MAX_TRACE_LENGTH"
    ),
    "max_pending_bytes": Flag(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 64,
        _positive,
        "Bytes that may come from the host while calls are recorded: then the trace, which keeps them alive, is cut "
        "before the next batch. By default a 64th of the machine's memory.",
        "LAZY_BACKEND_MAX_PENDING_BYTES",
        of_machine=True,
    ),
    "max_served_shapes": Flag(
        64,
        _count,
        "Shapes of requests that a served function keeps beside those of the example inputs, least recently used first "
        "out; a shape that comes back is recorded again. 0: requests must have the shapes of the example inputs. Read "
        "by serve.",
    ),
    "trie_limit": Flag(1_000_000, _positive, "Recorded calls remembered per device; beyond it the trie starts afresh."),
    "computation_cache_size": Flag(1024, _positive, "Computations kept, least recently used first out."),
    "cache": Flag(True, _boolean, "Keep compiled graphs on disk for the next process.", "LAZY_BACKEND_CACHE"),
    "cache_dir": Flag(
        None,
        lambda value: None if value in (None, "") else str(value),
        "Where compiled graphs are kept: a directory of the user's own. None takes one in the user's cache directory.",
        "LAZY_BACKEND_CACHE_DIR",
    ),
    "cache_dirs": Flag(
        (),
        _folders,
        "Folders of compiled graphs that are only read, after that of `cache_dir`: a list, or a text like PATH. Each "
        "is some other process's `cache_dir`, and may be another user's, or on a read-only file system.",
        "LAZY_BACKEND_CACHE_DIRS",
    ),
    "cache_bytes": Flag(4 << 30, _positive, "Bytes of compiled graphs on disk; least recently used go first."),
    "cache_readonly": Flag(
        False, _boolean, "Take compiled graphs from disk but never write there.", "LAZY_BACKEND_CACHE_READONLY"
    ),
    "progress": Flag(
        None,
        lambda value: None if value is None else _boolean(value),
        "Say on standard error what is being compiled; None does if that is a terminal.",
        "LAZY_BACKEND_PROGRESS",
    ),
    "constants_cache_entries": Flag(128, _positive, "Host constants kept per device. Read at import."),
    "constants_cache_bytes": Flag(1 << 24, _positive, "Bytes of host constants kept per device. Read at import."),
    "max_async_closures": Flag(
        100, _positive, "Asynchronous step closures that may wait in the queue.", "LAZY_BACKEND_MAX_ASYNC_QUEUE"
    ),
    "torch_lazy": Flag(
        False,
        _boolean,
        "Stand in for torch._lazy from the import on, as compat.torch_lazy.install() does. Read at import.",
        "LAZY_BACKEND_TORCH_LAZY",
    ),
    "force_fallback": Flag(
        "",
        lambda value: ",".join(part.strip() for part in str(value).split(",") if part.strip()),
        "Comma-separated ops, as in 'aten::sub', that are not recorded but run at once (for debugging). What is "
        "pending when it changes is run first.",
    ),
    "explain": Flag(True, _boolean, "Keep a record of each sync for lazy_backend.explain().", "LAZY_BACKEND_EXPLAIN"),
    "explain_records": Flag(10_000, _positive, "Syncs that are remembered. Read at import and by history.clear()."),
    "log_file": Flag(
        None,
        lambda value: None if value in (None, "") else str(value),
        "Append each record to this file as it is made, as JSON lines, for python -m lazy_backend.report; also of a "
        "program that is killed. {pid} in the name becomes the process's number, {rank} that of the rank; without them "
        "ranks append theirs to the name.",
        "LAZY_BACKEND_LOG",
    ),
    "eager": Flag(
        False,
        _boolean,
        "Run every call at once on the backing device and record nothing, from the next step on. "
        "lazy_backend.eager_mode() does so from the next call on.",
        "LAZY_BACKEND_EAGER",
    ),
    "step_aside": Flag(
        True,
        _boolean,
        "Whether calls run at once instead of being recorded where that is measured to be faster, as in programs that "
        "read a value every few operators, or whose sizes are new at each step.",
        "LAZY_BACKEND_STEP_ASIDE",
    ),
    "strict": Flag(
        False, _boolean, "Raise StrictModeError where a graph would be cut, in every thread.", "LAZY_BACKEND_STRICT"
    ),
    "max_different_graphs": Flag(
        None,
        lambda value: None if value in (None, "") else _positive(value),
        "Raise TooManyGraphsError, with the explanation, at the sync of one different program more.",
        "LAZY_BACKEND_MAX_DIFFERENT_GRAPHS",
    ),
    "check_graphs": Flag(False, _boolean, "Check every graph for well-formedness.", "LAZY_BACKEND_CHECK_GRAPHS"),
    "debug": Flag(
        0,
        _count,
        "1: a line per sync, with its explanation where it was no hit. 2: also runs and times. 3: also the program or "
        "graph before and after each pass. 4: also the FX code of what is compiled.",
        "LAZY_DEBUG",
    ),
    "debug_file": Flag(
        None,
        lambda value: None if value in (None, "") else str(value),
        "Append what `debug` prints to this file instead of printing it; %p in its name is the process's number.",
        "LAZY_DEBUG_FILE",
    ),
    "source_frames": Flag(
        1,
        _positive,
        "Lines of your code that are noted per recorded call, from the innermost outwards; graphs print them. Holds "
        "for calls seen for the first time from then on.",
        "LAZY_BACKEND_SOURCE_FRAMES",
    ),
}


def _unknown(name: str) -> AttributeError:
    alike = difflib.get_close_matches(name, FLAGS, n=1)
    nearest = f": perhaps {alike[0]!r}" if alike else ""
    return AttributeError(f"lazy_backend.config has no setting {name!r}{nearest}\n  it has: {', '.join(FLAGS)}")


# Functions to call after a setting changed, by name of the setting.
_watchers: dict[str, Callable[[], None]] = {}


class Config:
    """All settings as attributes. `config.patch(name=value)` sets some for a block."""

    def __init__(self) -> None:
        for name, flag in FLAGS.items():
            value = os.environ.get(flag.env) if flag.env else None
            object.__setattr__(self, name, flag.default)
            if value is not None:
                self._set(name, value, f"environment variable {flag.env}={value!r}")

    def watch(self, name: str, on_change: Callable[[], None]) -> None:
        """Call `on_change` after setting `name` changes; if `on_change` raises, the previous value is restored."""
        _watchers[name] = on_change

    def _store(self, name: str, value: Any) -> None:
        before = getattr(self, name)
        object.__setattr__(self, name, value)
        on_change = _watchers.get(name)
        if on_change is not None and value != before:
            try:
                on_change()
            except BaseException:
                object.__setattr__(self, name, before)
                raise

    def __setattr__(self, name: str, value: Any) -> None:
        self._set(name, value, f"lazy_backend.config.{name} = {value!r}", is_assigned=True)

    def __getattr__(self, name: str) -> Any:
        # only reached for names that are not set
        raise _unknown(name)

    def _set(self, name: str, value: Any, where: str, is_assigned: bool = False) -> None:
        if name not in FLAGS:
            raise _unknown(name)
        try:
            checked = FLAGS[name].check(value)
            if is_assigned:
                FLAGS[name].check_assigned(checked)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}\n  {FLAGS[name].help}") from None
        self._store(name, checked)

    @contextlib.contextmanager
    def patch(self, **values: Any) -> Iterator[None]:
        """Set some settings for the duration of a `with` block."""
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                self._store(name, value)

    def help(self) -> str:
        """All settings with their values, defaults and environment variables, as text to print."""
        lines = []
        for name, flag in FLAGS.items():
            env = f" [{flag.env}]" if flag.env else ""
            keyed = " Part of a computation's key." if flag.in_key else ""
            lines.append(f"{name} = {getattr(self, name)!r} (default {flag.default!r}){env}\n    {flag.help}{keyed}")
        return "\n".join(lines)

    # names of torch._lazy.config
    def get_force_fallback(self) -> str:
        return str(self.force_fallback)

    def set_force_fallback(self, ops: str) -> None:
        self.force_fallback = ops


config = Config()
