"""What a scenario of the soak is given: its time, what it injected, what it claims, and whether figures stay flat.

In: calls of a scenario. Out: a JSON file, written as the scenario goes on, so that a killed one leaves what it had.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

# Environment variable that every process of a scenario inherits: what is left of it is found by it.
MARK = "LAZY_BACKEND_SOAK"

# Samples of a figure before anything is said about its growth, and those that are kept.
_FEWEST_SAMPLES = 12
_MOST_SAMPLES = 240

# What resident memory may grow in a run, in bytes, and per step of it: the allocator's own wandering, and a leak of
# less than a pointer or two per step.
_RESIDENT_GROWTH = 6 << 20
_RESIDENT_GROWTH_PER_STEP = 24

# Objects that Python's collector tracks: the history keeps up to 2,000 samples of memory over a whole run. Weak
# references are left out: the list of live tensors is rid of dead ones when it has doubled.
_OBJECTS_GROWTH = 2500

# Seconds that a process may take longer than it was told to before it counts as hung.
PATIENCE = 180.0


@dataclass(slots=True)
class Claim:
    """Something that must hold, and how often it did."""

    text: str
    checks: int = 0
    failures: int = 0
    detail: str = ""  # of the first failure


@dataclass(slots=True)
class Record:
    """What came of a scenario. JSON-able."""

    name: str
    seconds: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)  # of the figures that must stay flat, and their steps
    finished: bool = False

    @property
    def failed(self) -> list[Claim]:
        return [claim for claim in self.claims if claim.failures]

    def claim(self, text: str, held: bool, detail: str = "") -> bool:
        claim = next((claim for claim in self.claims if claim.text == text), None)
        if claim is None:
            claim = Claim(text)
            self.claims.append(claim)
        claim.checks += 1
        if not held:
            claim.failures += 1
            claim.detail = claim.detail or detail or "it did not"
        return held

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        return cls(**{**data, "claims": [Claim(**claim) for claim in data["claims"]]})


class Run:
    """One scenario under way, in a process of its own."""

    def __init__(self, name: str, seconds: float, seed: int, folder: Path) -> None:
        self.seconds = seconds
        self.folder = folder
        self.random = random.Random(f"{name} {seed}")
        self.record = Record(name)
        self._injected: Counter[str] = Counter()
        self._start = time.monotonic()
        self._written = 0.0
        # scenarios have threads; their signal handlers and finalizers write as well, in the midst of a write
        self._lock = threading.RLock()
        self._is_writing = False
        self.beat()

    # ----- time

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def goes_on(self, share: float = 1.0) -> bool:
        """Whether there is time left, of the first `share` of it. Also a sign of life."""
        self.beat()
        return self.elapsed() < self.seconds * share

    def beat(self) -> None:
        """A sign of life: without one for `PATIENCE` seconds the process counts as hung."""
        if time.monotonic() - self._written > 1.0:
            self.write()

    # ----- what happened

    def inject(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._injected[what] += count
        self.beat()

    def claim(self, text: str, held: bool, detail: str = "") -> bool:
        """Note whether something holds that must. Returns it."""
        with self._lock:
            is_first = not self.record.failed
            self.record.claim(text, held, detail)
        if not held and is_first:
            self.write()
        return held

    def figure(self, name: str, value: Any) -> None:
        self.record.figures[name] = value

    @contextlib.contextmanager
    def must_not_raise(self, text: str) -> Iterator[None]:
        """Claim that the block raises nothing."""
        try:
            yield
        except Exception as error:
            self.claim(text, False, traceback_text(error))
        else:
            self.claim(text, True)

    def write(self) -> None:
        with self._lock:
            if self._is_writing:
                return
            self._is_writing = True
            try:
                self._written = time.monotonic()
                self.record.seconds = round(self.elapsed(), 1)
                self.record.injected = dict(self._injected)
                write_json(self.folder / "record.json", asdict(self.record))
            finally:
                self._is_writing = False

    def finish(self) -> None:
        self.record.finished = True
        self.write()

    # ----- processes

    def start(self, arguments: Sequence[str], log: Path, process_group: int | None = None) -> subprocess.Popen[bytes]:
        """Start Python with `arguments`; what it prints goes to `log`. `process_group`: 0 for one of its own."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=process_group,
            )

    def wait_for(self, process: subprocess.Popen[bytes], log: Path, limit: float = PATIENCE) -> int | None:
        """Its status; None if it did not end in time, which is a failed claim with its stacks."""
        end = time.monotonic() + limit
        while process.poll() is None:
            self.beat()
            if time.monotonic() > end:
                dump_stacks(process.pid)
                process.kill()
                process.wait()
                self.claim("no process hangs", False, f"after {limit:.0f} s:\n{tail(log, 6000)}")
                return None
            time.sleep(0.02)
        self.claim("no process hangs", True)
        return process.returncode

    def python(self, arguments: Sequence[str], log: Path, limit: float = PATIENCE) -> int | None:
        """Run Python with `arguments` to its end."""
        return self.wait_for(self.start(arguments, log), log, limit)


def write_json(file: Path, data: Any) -> None:
    """Whole or not at all, whenever this process is killed."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1))
    partial.replace(file)


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def tail(log: Path, length: int = 3000) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return text[-length:].strip()


def traceback_text(error: BaseException) -> str:
    """The error with its innermost frames."""
    import traceback

    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(lines if len(lines) < 30 else [*lines[:6], "  ...", *lines[-22:]])


# ----- stacks and processes


def show_stacks_on_signal() -> None:
    """Have this process print the stacks of all its threads when it is sent SIGUSR1."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def dump_stacks(pid: int, seconds: float = 1.0) -> None:
    """Have a process that called `show_stacks_on_signal` do so."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(seconds)


def command_of(pid: int) -> str:
    """Its command line; empty once it is gone, and of a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def processes() -> list[int]:
    return [int(place.name) for place in Path("/proc").iterdir() if place.name.isdigit()]


def processes_under(pid: int) -> list[int]:
    """Every process that `pid` started, directly or not, parents first."""
    children: dict[int, list[int]] = {}
    for other in processes():
        children.setdefault(parent_of(other), []).append(other)
    found, open_ends = [], [pid]
    while open_ends:
        below = children.get(open_ends.pop(), [])
        found += below
        open_ends += below
    return found


def compilers_of(pid: int) -> list[int]:
    """The compiler's process of a program and the C++ compilers under it."""
    below = processes_under(pid)
    workers = [child for child in below if "lazy_backend.lowering.plans.worker" in command_of(child)]
    return list(dict.fromkeys(one for worker in workers for one in (worker, *processes_under(worker))))


def marked_processes(mark: str) -> list[int]:
    """Those that inherited `mark`, but for zombies."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes() and command_of(pid):
                found.append(pid)
    return found


# ----- flatness


def growth(samples: Sequence[float]) -> float:
    """How much a figure grew over all samples: the median slope of all pairs (Theil and Sen) times their number.

    A few outliers, and a step up that comes down again, change nothing.
    """
    if len(samples) < 2:
        return 0.0
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(samples), 2)]
    return statistics.median(slopes) * (len(samples) - 1)


def count_files(*folders: str | Path) -> int:
    return sum(len(files) + len(inner) for folder in folders for _, inner, files in os.walk(folder))


class Flatness:
    """Figures of this process, sampled while it trains; none may grow after a third of the run.

    The first third is for warming up: caches fill, graphs are compiled, the allocator finds its size.
    """

    def __init__(self, run: Run, figures: dict[str, Callable[[], float]], sizes_objects: bool = True) -> None:
        """`figures`: what to sample beside the process's own, with no growth allowed.

        Without `sizes_objects` the number of Python's objects is left out, as for tables that go up and down.
        """
        self._run = run
        self._counts: dict[str, Callable[[], float]] = {
            "open files": lambda: len(os.listdir("/proc/self/fd")),
            "threads": lambda: len(os.listdir("/proc/self/task")),
            "temporary files": lambda: count_files(os.environ["TMPDIR"]),
            "uncollectable objects": lambda: len(gc.garbage),
            **figures,
        }
        sizes = ["resident bytes", "objects"] if sizes_objects else ["resident bytes"]
        self._samples: dict[str, list[float]] = {name: [] for name in [*self._counts, *sizes]}
        self._steps: list[int] = []
        self._next = 0.0
        self.interval = max(run.seconds / _MOST_SAMPLES, 0.05)
        gc.collect()
        gc.freeze()  # each sample searches what was made since for garbage, not PyTorch's million objects again

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._steps)

    def sample(self, step: int) -> None:
        """Take a sample, if it is time for one."""
        if self._run.elapsed() < self._next:
            return
        gc.collect()
        for name, count in self._counts.items():
            self._samples[name].append(count())
        if "objects" in self._samples:
            self._samples["objects"].append(sum(type(one) is not weakref.ref for one in gc.get_objects()))
        self._samples["resident bytes"].append(resident_bytes())
        self._steps.append(step)
        self._next = self._run.elapsed() + self.interval

    def settled(self, name: str) -> list[float]:
        """The samples after the first third."""
        samples = self._samples[name]
        return samples[len(samples) // 3 :]

    def check(self) -> None:
        """Claim for each figure that it stayed flat; nothing, if there are too few samples to say."""
        self._run.record.samples = {"steps": [float(step) for step in self._steps], **self._samples}
        count = len(self.settled("resident bytes"))
        if count < _FEWEST_SAMPLES:
            self._run.figure("flatness", f"not measured: {count} samples")
            return
        steps = self._steps[-1] - self._steps[-count]
        allowed = {"resident bytes": _RESIDENT_GROWTH + steps * _RESIDENT_GROWTH_PER_STEP, "objects": _OBJECTS_GROWTH}
        for name in self._samples:
            found = growth(self.settled(name))
            limit = allowed.get(name, 0.5)
            first, last = self.settled(name)[0], self.settled(name)[-1]
            detail = f"grew by {found:,.0f} in {steps:,} steps ({first:,.0f} to {last:,.0f}), allowed {limit:,.0f}"
            self._run.claim(f"flat: {name}", found <= limit, detail)
        self._run.figure("steps measured for flatness", steps)
        resident = growth(self.settled("resident bytes"))
        self._run.figure("growth of resident memory", f"{resident / 2**20:+.1f} MiB")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
