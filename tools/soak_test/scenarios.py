"""What the soak injects, one function per kind of failure.

In: a `Run`, with its time. Out: claims. The docstring of a scenario is its row in docs/reliability.md: the first
paragraph says what is injected, the second, after "Holds:", what must hold.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lazy_backend
from lazy_backend import config
from lazy_backend.computation import get_cached_computations, get_debug_states
from lazy_backend.diagnostics.history import history
from lazy_backend.tensors.contexts import contexts
from soak_test.run import Flatness, Run, compilers_of, count_files, processes_under, tail, traceback_text
from soak_test.training import PROGRAMS, Training, Twin

TRAINER = str(Path(__file__).with_name("training.py"))

# How far the losses of compiled graphs may be from eager's, in the first steps of a training.
TOLERANCE = 1e-2
COMPARED_STEPS = 200

# Seconds that a compile may take on a machine that others use as well.
COMPILE_LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of failure, with its share of the time."""

    name: str
    function: Callable[[Run], None]
    weight: float = 1.0

    @property
    def injected(self) -> str:
        return self._documented()[0]

    @property
    def promise(self) -> str:
        return self._documented()[1]

    def _documented(self) -> tuple[str, str]:
        injected, _, promise = " ".join((self.function.__doc__ or "").split()).partition("Holds: ")
        return injected.strip(), promise


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, weight: float = 1.0) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to the scenarios."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        SCENARIOS[name] = Scenario(name, function, weight)
        return function

    return add


# ----- what scenarios share


def is_equal(one: float, other: float) -> bool:
    """Bit for bit, but for the kind of NaN."""
    return one.hex() == other.hex()


def check_losses(run: Run, training: Training, twin: Twin, steps: int, exact: bool = True) -> None:
    """Train for some steps and claim that the losses are eager's."""
    first = training.number
    losses = lazy_backend.to_cpu([training.step() for _ in range(steps)])
    for number, loss in enumerate(losses, first):
        compare_loss(run, number, loss.item(), twin.loss(number), exact)
    run.beat()


def compare_loss(run: Run, number: int, found: float, expected: float, exact: bool = True) -> None:
    if exact:
        text, held = "losses are eager's, bit for bit", is_equal(found, expected)
    else:
        text, held = f"losses are eager's within {TOLERANCE}", abs(found - expected) <= TOLERANCE
    run.claim(text, held, f"step {number}: {found!r}, in eager {expected!r}")


def keep_little_history() -> None:
    """The history keeps its latest 10,000 steps: it would grow for as long."""
    config.explain_records = 10
    history.clear()


def cache_figures() -> dict[str, Callable[[], float]]:
    """Sizes of the package's tables in this process."""
    return {
        "trie nodes": lambda: sum(context.trie.size for context in contexts.get_active_devices()),
        "computations": lambda: len(get_cached_computations()),
        "live tensors": live_tensors,
        "cache files": lambda: count_files(os.environ["LAZY_BACKEND_CACHE_DIR"]),
    }


def live_tensors() -> int:
    counters = lazy_backend.metrics.counters()
    return counters.get("CreateLtcTensor", 0) - counters.get("DestroyLtcTensor", 0)


def wait_for_compiles(run: Run, limit: float = COMPILE_LIMIT) -> bool:
    end = time.monotonic() + limit
    while not lazy_backend.wait_for_compiles(timeout=2.0):
        run.beat()
        if time.monotonic() > end:
            return False
    return True


def largest_plan() -> str:
    """How the largest graph of this process is run."""
    computations = get_cached_computations()
    if not computations:
        return "none"
    largest = max(computations, key=lambda computation: computation.executor.stored.num_nodes)
    return get_debug_states()[largest.hash].plan


@contextlib.contextmanager
def counted_warnings() -> Iterator[list[str]]:
    """The package's warnings within the block, as text."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in caught if issubclass(one.category, lazy_backend.LazyBackendWarning)]


@contextlib.contextmanager
def small_disk(run: Run, name: str, kibibytes: int = 1024) -> Iterator[tuple[Path, bool]]:
    """A folder on a disk of its own of that size; where mounting is not allowed, a limit on the size of files.

    Yields the folder and whether it is a disk.
    """
    folder = run.folder / name
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        try:
            yield folder, True
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with an OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield folder, False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder: Path) -> Path:
    """A file that leaves no room on the folder's disk."""
    file = folder / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        while True:
            out.write(b"\0" * 4096)
    return file


# ----- many steps


def train_flat(run: Run, name: str, backend: str) -> None:
    """Train for all of the run's time, checkpoint now and then, and claim that nothing grows."""
    keep_little_history()
    config.backend = backend
    config.compiler_idle_seconds = 2.0
    training, twin = Training(PROGRAMS[name], "lazy"), Twin(name)
    is_exact = backend == "eager"
    check_losses(run, training, twin, COMPARED_STEPS, is_exact)
    checkpoint = run.folder / "checkpoint"

    def save_and_load() -> None:
        training.save(checkpoint)
        training.load(checkpoint, "cpu")
        with run.must_not_raise("a checkpoint is loaded straight to the device"):
            training.load(checkpoint, "lazy")
        run.inject("checkpoints saved and loaded")

    # the step after a load is a program of its own, for each length of a sequence: what recurs so seldom would be
    # compiled late, and look like growth
    for _ in range(24):
        save_and_load()
        for _ in range(3):
            training.step()
        run.beat()
    wait_for_compiles(run)
    flatness = Flatness(run, cache_figures())
    saved = time.monotonic()
    while run.goes_on(0.7 if is_exact else 1.0):  # the rest is for eager's steps
        loss = training.step()
        if training.number % 50 == 0:
            value = loss.item()
            run.claim("losses are finite", math.isfinite(value), f"step {training.number}: {value}")
        if time.monotonic() - saved > max(1.0, run.seconds / 100):
            save_and_load()
            saved = time.monotonic()
        flatness.sample(training.number)
    run.inject("steps", training.number)
    flatness.check()
    if is_exact:
        for number in range(training.number):
            twin.loss(number)
            run.beat()
        check_losses(run, training, twin, 3)


@scenario("steps-mlp", 4)
def steps_mlp(run: Run) -> None:
    """Steps of an MLP with AdamW, a schedule and gradient clipping, compiled; checkpoints saved and loaded.

    Holds: memory, open files, threads, temporary files, trie, caches, live tensors and garbage stay flat.
    """
    train_flat(run, "mlp", "inductor")


@scenario("steps-captured", 3)
def steps_captured(run: Run) -> None:
    """The same steps through `capture`, with a fused AdamW.

    Holds: the same figures stay flat.
    """
    train_flat(run, "captured", "inductor")


@scenario("steps-cnn", 2)
def steps_cnn(run: Run) -> None:
    """Steps of a CNN with BatchNorm.

    Holds: the same figures stay flat.
    """
    train_flat(run, "cnn", "inductor")


@scenario("steps-gpt", 2)
def steps_gpt(run: Run) -> None:
    """Steps of a small GPT on sequences of varying lengths.

    Holds: the same figures stay flat.
    """
    train_flat(run, "gpt", "inductor")


@scenario("steps-exact", 2)
def steps_exact(run: Run) -> None:
    """Steps of the CNN with `backend="eager"`, checkpoints saved and loaded; then the same number of steps in eager.

    Holds: the same figures stay flat, and the last losses are eager's, bit for bit.
    """
    train_flat(run, "cnn", "eager")


# ----- killed processes


def read_losses(file: Path) -> dict[int, float]:
    """The losses by step that a trainer wrote; a line that was cut off says nothing."""
    found: dict[int, float] = {}
    text = file.read_text() if file.exists() else ""
    for line in text.splitlines(keepends=True):
        number, _, loss = line.partition(" ")
        if line.endswith("\n") and loss:
            found[int(number)] = float.fromhex(loss.strip())
    return found


def kill_after_start(run: Run, process: subprocess.Popen[bytes], losses: Path) -> None:
    """SIGKILL a trainer at a random moment: one time in five while it starts, else once it has trained."""
    if run.random.random() < 0.2:
        time.sleep(run.random.uniform(0.0, 4.0))
    else:
        before = losses.stat().st_size if losses.exists() else 0
        end = time.monotonic() + 60.0
        while process.poll() is None and time.monotonic() < end:
            if losses.exists() and losses.stat().st_size > before:
                break
            run.beat()
            time.sleep(0.01)
        time.sleep(run.random.uniform(0.0, 1.5))
    if process.poll() is None:
        process.kill()
        run.inject("SIGKILLs of the trainer")
    process.wait()


@scenario("kill-trainer", 3)
def kill_trainer(run: Run) -> None:
    """SIGKILL of the training process at random moments, while it starts and while it trains and writes checkpoints.

    Holds: each new process goes on from the checkpoint, and all losses are those of an undisturbed eager run, bit for
    bit.
    """
    log, round_number = run.folder / "log", 0
    while run.goes_on() or round_number == 0:
        name = ("mlp", "cnn", "gpt", "captured")[round_number % 4]
        folder = run.folder / f"round{round_number}"
        folder.mkdir()
        arguments = [TRAINER, "--folder", str(folder), "--program", name, "--every", "7"]
        losses = folder / "losses"
        for life in range(6):
            if life and not run.goes_on():
                break
            process = run.start([*arguments, "--steps", "1000000", "--load-to", ("cpu", "lazy")[life % 2]], log)
            kill_after_start(run, process, losses)
            claim_killed(run, process, log)
        finish_training(run, arguments, losses, name, log)
        round_number += 1


def claim_killed(run: Run, process: subprocess.Popen[bytes], log: Path) -> None:
    ended_well = process.returncode in (0, -signal.SIGKILL)
    run.claim("a process only ends when it is killed", ended_well, f"status {process.returncode}:\n{tail(log)}")


def finish_training(run: Run, arguments: list[str], losses: Path, name: str, log: Path) -> None:
    """Let a last process train a few steps more, and compare every loss with eager's."""
    steps = max(read_losses(losses), default=0) + 20
    status = run.python([*arguments, "--steps", str(steps)], log)
    run.claim("a new process goes on", status == 0, f"status {status}:\n{tail(log)}")
    found, twin = read_losses(losses), Twin(name)
    run.claim("no step is missing", sorted(found) == list(range(steps)), f"{len(found)} of {steps}")
    run.inject("steps", len(found))
    for number, loss in sorted(found.items()):
        compare_loss(run, number, loss, twin.loss(number))
        run.beat()


@scenario("kill-while-compiling", 3)
def kill_while_compiling(run: Run) -> None:
    """SIGKILL of the training process while its graphs are compiled and written to the disk cache.

    Holds: the next process goes on and compiles; no entry of the cache is damaged; the compiler's process ends, and
    its temporary files are gone once another process has compiled.
    """
    log, width = run.folder / "log", 16
    code = Path(__file__).with_name("compiled.py")
    while run.goes_on() or width == 16:
        width += 8
        for _ in range(3):
            process = run.start([str(code), str(width)], log)
            time.sleep(run.random.uniform(1.0, 12.0))
            if process.poll() is None:
                process.kill()
                run.inject("SIGKILLs of the trainer")
            process.wait()
            claim_killed(run, process, log)
            if not run.goes_on():
                break
        status = run.python([str(code), str(width)], log, COMPILE_LIMIT)
        run.claim("the next process compiles, or loads, and is right", status == 0, f"status {status}:\n{tail(log)}")
    left = sorted(path.name for path in Path(os.environ["TMPDIR"]).iterdir())
    run.claim("no temporary files of killed processes stay", not left, ", ".join(left[:8]))


@scenario("kill-compiler", 8)
def kill_compiler(run: Run) -> None:
    """SIGKILL of the compiler's process, or of a C++ compiler under it, at random moments while it compiles.

    Holds: training goes on with eager's losses, there is at most one warning, and the graph is compiled in the end.
    """
    config.cache = False  # each kill is to hit a compile
    rounds = 0
    while run.goes_on() or rounds == 0:
        rounds += 1
        width = 16 + rounds
        training, twin = Training(PROGRAMS["mlp"], "lazy", width), Twin("mlp", width)
        with counted_warnings() as texts:
            check_losses(run, training, twin, 8, exact=False)
            is_killed = kill_one_compiler(run, training, twin)
            is_compiled = trains_until_compiled(run, training)
        if is_killed:
            run.claim("at most one warning per kill", len(texts) <= 1, f"{len(texts)}: {texts}")
            run.claim("the graph is compiled after the kill", is_compiled, f"it is {largest_plan()!r}: {texts}")
        lazy_backend.ir_cache.reset()
        for computation in list(get_debug_states()):
            lazy_backend.computation.debug_flush_compilation_cache(computation)
        forget_computations()


def forget_computations() -> None:
    """So that the next round's graphs are the only ones, and no relatives of these."""
    from lazy_backend.execution.sync import executor

    executor.clear_computations()


def kill_one_compiler(run: Run, training: Training, twin: Twin) -> bool:
    """Train for a random time, then kill. Whether there was something to kill."""
    end = time.monotonic() + run.random.uniform(0.0, 6.0)
    while time.monotonic() < end:
        step_and_compare(run, training, twin)
    found = compilers_of(os.getpid())
    if not found:
        return False
    victim = found[0] if run.random.random() < 0.7 else run.random.choice(found)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    run.inject("SIGKILLs of the compiler's process" if victim == found[0] else "SIGKILLs of a C++ compiler")
    return True


def step_and_compare(run: Run, training: Training, twin: Twin) -> None:
    number = training.number
    loss = training.step()
    if number < COMPARED_STEPS:
        compare_loss(run, number, loss.item(), twin.loss(number), exact=False)
    run.beat()


def trains_until_compiled(run: Run, training: Training) -> bool:
    """Whether the graph of a training is compiled within the limit."""
    end = time.monotonic() + COMPILE_LIMIT
    while time.monotonic() < end:
        for _ in range(10):
            training.step()
        lazy_backend.wait_for_compiles(timeout=0.5)
        run.beat()
        plan = largest_plan()
        if plan == "optimized":
            return True
        if plan == "fallback":  # said to be final
            return False
    return False


# ----- interrupted steps


class Interrupt(KeyboardInterrupt):
    """Raised by a handler in the midst of a step."""


class Interrupter:
    """Raises in the main thread after a random time; never outside `armed`."""

    def __init__(self, run: Run, action: Callable[[], None]) -> None:
        self._run = run
        self._action = action
        self._is_armed = False
        self.count = 0
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_armed:
            self.count += 1
            self._action()

    def call(self, function: Callable[[], Any], longest: float) -> Any:
        """`function()`, interrupted after at most `longest` seconds if it is still under way."""
        signal.setitimer(signal.ITIMER_REAL, self._run.random.uniform(1e-5, longest))
        self._is_armed = True
        try:
            result = function()
            self._is_armed = False
            return result
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


def raise_interrupt() -> None:
    raise Interrupt


@scenario("interrupt", 2)
def interrupt(run: Run) -> None:
    """Ctrl-C: a signal handler that raises KeyboardInterrupt at a random moment of a step, of a training and of a
    program without state, with and without a thread for the device.

    Holds: nothing hangs; the step after it works; training from the last good state has eager's losses, bit for bit.
    """
    config.backend = "eager"
    interrupter = Interrupter(run, raise_interrupt)
    x = torch.arange(12.0).reshape(3, 4).to("lazy")
    expected = ((torch.arange(12.0).reshape(3, 4) * 2 + 1) @ (torch.arange(12.0).reshape(3, 4) * 2 + 1).t()).relu()

    def stateless() -> torch.Tensor:
        y = x * 2 + 1
        z = (y @ y.t()).relu()
        lazy_backend.mark_step()
        return z

    rounds = 0
    while run.goes_on(0.4) or rounds == 0:
        rounds += 1
        config.run_in_background = ("always", "never")[rounds % 2]
        for _ in range(20):
            with contextlib.suppress(Interrupt):
                interrupter.call(stateless, 3e-4)
            with run.must_not_raise("the step after an interrupted one works"):
                run.claim("its values are eager's, bit for bit", torch.equal(stateless().cpu(), expected))
    run.inject("interrupts of a step without state", interrupter.count)
    while run.goes_on() or rounds < 2:
        rounds += 1
        interrupted_training(run, interrupter, ("mlp", "captured", "cnn", "gpt")[rounds % 4])


def interrupted_training(run: Run, interrupter: Interrupter, name: str) -> None:
    """Train for 60 steps; what is interrupted starts again from a copy of the state before it."""
    training, twin = Training(PROGRAMS[name], "lazy"), Twin(name)
    checkpoint = run.folder / "checkpoint"
    training.save(checkpoint)
    before = interrupter.count

    def three_steps() -> list[torch.Tensor]:
        return lazy_backend.to_cpu([training.step() for _ in range(3)])

    while training.number < 60:
        number = training.number
        # torch.no_grad, which optimizers use, may itself be interrupted before it puts the mode back, in eager too
        torch.set_grad_enabled(True)
        with run.must_not_raise("training goes on after an interrupted step"):
            try:
                losses = interrupter.call(three_steps, 0.012)
            except Interrupt:
                torch.set_grad_enabled(True)
                training = Training(PROGRAMS[name], "lazy")
                training.load(checkpoint, "cpu")
                losses = three_steps()
            for place, loss in enumerate(losses):
                compare_loss(run, number + place, loss.item(), twin.loss(number + place))
            training.save(checkpoint)
        run.beat()
        if run.record.failed and training.number == number:  # it would fail for ever
            break
    run.inject("interrupts of a training step", interrupter.count - before)


@scenario("ctrl-c-to-the-group", 1)
def ctrl_c_to_the_group(run: Run) -> None:
    """Ctrl-C in a terminal: SIGINT to a training process that catches it and to its children at once, at random
    moments, while the compiler's process starts as well.

    Holds: training goes on with eager's losses, and the graph is compiled in the end.
    """
    log, width = run.folder / "log", 192
    code = Path(__file__).with_name("compiled.py")
    while run.goes_on() or width == 192:
        width += 8
        process = run.start([str(code), str(width), "--catches-interrupts"], log, process_group=0)
        end = time.monotonic() + 60.0
        while not compilers_of(process.pid) and process.poll() is None and time.monotonic() < end:
            run.beat()
            time.sleep(0.01)
        for _ in range(3):
            time.sleep(run.random.uniform(0.0, 1.0))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                run.inject("SIGINTs to the group")
        status = run.wait_for(process, log, COMPILE_LIMIT)
        run.claim("training goes on and is compiled", status == 0, f"status {status}:\n{tail(log)}")


@scenario("signals-that-read", 1)
def signals_that_read(run: Run) -> None:
    """A signal handler that saves the model at a random moment of a step, as a preemption handler does; finalizers that
    read and compute with tensors, run by the garbage collector in the midst of steps.

    Holds: nothing hangs or raises; the saved values are finite; losses are eager's, bit for bit.
    """
    config.backend = "eager"
    training, twin = Training(PROGRAMS["mlp"], "lazy"), Twin("mlp")
    errors: list[BaseException] = []

    def save() -> None:
        try:
            run.inject("state_dict saved by a signal handler")
            state = lazy_backend.to_cpu(dict(training.model.state_dict()))
            run.claim("saved values are finite", all(bool(value.isfinite().all()) for value in state.values()))
        except BaseException as error:
            errors.append(error)

    class Reader:
        """Reads a tensor when it is collected; part of a cycle, so that only the collector finds it."""

        def __init__(self) -> None:
            self.tensor = torch.ones(3, device="lazy")
            self.itself = self

        def __del__(self) -> None:
            try:
                run.inject("finalizers that read tensors")
                total = (self.tensor * 2).sum().item()
                run.claim("finalizers read what is right", total == 6.0, f"{total}")
            except BaseException as error:
                errors.append(error)

    interrupter = Interrupter(run, save)
    thresholds = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        while run.goes_on() or training.number < 3:
            Reader()
            number = training.number
            with run.must_not_raise("the step that was disturbed works"):
                loss = interrupter.call(training.step, 4e-3)
                compare_loss(run, number, loss.item(), twin.loss(number))
            text = traceback_text(errors[0]) if errors else ""
            run.claim("handlers and finalizers do not raise", not errors, text)
            errors.clear()
            if training.number == number or len(run.record.failed) > 2:
                break
    finally:
        gc.set_threshold(*thresholds)


@scenario("memory-error", 1)
def memory_error(run: Run) -> None:
    """Memory that runs out: an address-space limit under which a step's operands do not fit, and MemoryError raised
    within the step.

    Holds: the step raises an error or works; the steps after it work, with eager's losses, bit for bit.
    """
    config.backend = "eager"
    training, twin = Training(PROGRAMS["mlp"], "lazy"), Twin("mlp")
    check_losses(run, training, twin, 5)
    before = resource.getrlimit(resource.RLIMIT_AS)

    def large() -> None:
        # 40 MB each: none fits
        x = torch.ones(run.random.randrange(9_000_000, 11_000_000), device="lazy")
        y = (x * 2).relu() + x
        lazy_backend.mark_step()
        y.sum().item()

    def small() -> None:
        (torch.ones(4, device="lazy") * 3).cumsum(0).tolist()

    def raise_memory_error() -> None:
        raise MemoryError("injected")

    interrupter = Interrupter(run, raise_memory_error)
    rounds = 0
    while run.goes_on() or rounds < 2:
        rounds += 1
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + run.random.randrange(8 << 20, 100 << 20), before[1]))
        try:
            large()
        except (RuntimeError, MemoryError):  # PyTorch's allocator raises the first
            run.inject("allocations that failed")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        with contextlib.suppress(RuntimeError, MemoryError):  # within a run it becomes an ExecutionError
            interrupter.call(small, 1e-3)
        with run.must_not_raise("the steps after it work"):
            check_losses(run, training, twin, 3)
        if run.record.failed:
            break
    run.inject("MemoryErrors raised", interrupter.count)


# ----- a poor environment


def train_and_compile(run: Run, steps: int = 12, width: int = 32, expects: str | None = "optimized") -> list[str]:
    """Train, let what recurs be compiled, train on; claim eager's losses. Returns the warnings.

    `expects`: how the graph must be run in the end, if that is known.
    """
    training, twin = Training(PROGRAMS["mlp"], "lazy", width), Twin("mlp", width)
    with counted_warnings() as texts, run.must_not_raise("training goes on"):
        check_losses(run, training, twin, steps, exact=False)
        run.claim("the compiler does not hang", wait_for_compiles(run))
        check_losses(run, training, twin, steps, exact=False)
        if expects is not None:
            plan = largest_plan()
            run.claim(f"the graph is {expects}", plan == expects, f"it is {plan!r}")
    run.claim("at most one warning", len(texts) <= 1, "\n".join(texts))
    start_over()
    return texts


def start_over() -> None:
    """Forget what was recorded and compiled; what is on disk stays."""
    lazy_backend.ir_cache.reset()
    forget_computations()


@contextlib.contextmanager
def environment(**changes: str | Path) -> Iterator[None]:
    """Other environment variables, for what is started within the block."""
    import tempfile

    before = {name: os.environ.get(name) for name in changes}
    os.environ.update({name: str(value) for name, value in changes.items()})
    tempfile.tempdir = None  # Python remembers the folder it found first
    try:
        yield
    finally:
        tempfile.tempdir = None
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@scenario("disk-full", 1.5)
def disk_full(run: Run) -> None:
    """A full disk under the compiled graphs, under temporary files, under both; then there is room again.

    Holds: training goes on with eager's losses, with at most one warning; with room again, graphs are compiled.
    """
    width = 32
    for kind in ("the cache", "temporary files", "both") * 100:
        if width > 32 and not run.goes_on():
            break
        width += 1
        with small_disk(run, f"disk{width}") as (folder, is_disk), contextlib.ExitStack() as stack:
            if kind != "temporary files":
                cache = folder / "cache"
                cache.mkdir(mode=0o700)
                stack.enter_context(config.patch(cache_dir=str(cache)))
            if kind != "the cache":
                stack.enter_context(environment(TMPDIR=folder, TORCHINDUCTOR_CACHE_DIR=folder / "inductor"))
            file = fill(folder) if is_disk else None
            end_compiler()
            run.inject(f"full disk under {kind}")
            train_and_compile(run, width=width, expects=None)
            if file is not None:
                file.unlink()
                end_compiler()
                # room for the cache's entry and for small files, not for a compiler's: those are elsewhere by now
                with environment(TMPDIR=run.folder / "tmp", TORCHINDUCTOR_CACHE_DIR=run.folder / "inductor"):
                    train_and_compile(run, width=width)
        end_compiler()


def end_compiler() -> None:
    """End the compiler's process: the next one sees the environment as it is by then."""
    from lazy_backend.lowering.compilation.background import worker

    worker.close()


@scenario("read-only-home", 1)
def read_only_home(run: Run) -> None:
    """Folders of compiled graphs that cannot be made or written: below a file, in /proc, on a read-only disk; a folder
    of temporary files that is removed in mid-training.

    Holds: training goes on with eager's losses, graphs are compiled, and there is at most one warning.
    """
    below_a_file = run.folder / "file"
    below_a_file.write_text("not a folder")
    width = 64
    for kind in ("a file", "/proc", "read-only", "removed") * 100:
        if width > 64 and not run.goes_on():
            break
        width += 1
        run.inject(f"{kind}")
        with contextlib.ExitStack() as stack:
            if kind == "read-only":
                folder, is_disk = stack.enter_context(small_disk(run, f"home{width}"))
                if is_disk:
                    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
                stack.enter_context(config.patch(cache_dir=str(folder / "cache")))
            elif kind == "removed":
                folder = run.folder / f"removed{width}"
                folder.mkdir()
                stack.enter_context(environment(TMPDIR=folder))
                torch.ones(2, device="lazy").add(1).tolist()
                folder.rmdir()
            else:
                place = {"a file": below_a_file, "/proc": Path("/proc/nowhere")}[kind]
                stack.enter_context(environment(HOME=place, XDG_CACHE_HOME=place / "cache"))
                stack.enter_context(config.patch(cache_dir=str(place / "cache")))
            end_compiler()
            train_and_compile(run, width=width)
        end_compiler()


@scenario("cleaner", 1)
def cleaner(run: Run) -> None:
    """A cleaner that removes everything among the temporary files, at random moments while graphs are compiled.

    Holds: training goes on with eager's losses, nothing hangs, and there is at most one warning.
    """
    width = 224
    while run.goes_on() or width == 224:
        width += 1
        is_over = threading.Event()
        thread = threading.Thread(target=remove_files, args=(run, is_over, run.random.uniform(0.01, 3.0)))
        thread.start()
        try:
            with config.patch(cache=False):
                train_and_compile(run, width=width, expects=None)
        finally:
            is_over.set()
            thread.join()
        end_compiler()


def remove_files(run: Run, is_over: threading.Event, interval: float) -> None:
    while not is_over.wait(interval):
        for path in Path(os.environ["TMPDIR"]).iterdir():
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            run.inject("temporary files and folders removed")


@scenario("damaged-cache", 1)
def damaged_cache(run: Run) -> None:
    """Files of the disk cache that are cut short, changed in one byte, emptied, or removed, between two trainings.

    Holds: training goes on with eager's losses, graphs are compiled again, and there is at most one warning.
    """
    width = 256
    while run.goes_on() or width == 256:
        width += 1
        with config.patch(cache_dir=str(run.folder / f"cache{width}")):
            train_and_compile(run, width=width)
            for file in (run.folder / f"cache{width}").rglob("*"):
                if file.is_file():
                    run.inject(damage(run, file))
            train_and_compile(run, width=width)


def damage(run: Run, file: Path) -> str:
    """Damage a file. Returns what was done."""
    data = bytearray(file.read_bytes())
    kind = run.random.choice(("cut short", "changed", "emptied", "removed")) if data else "removed"
    if kind == "removed":
        file.unlink()
        return kind
    if kind == "changed":
        data[run.random.randrange(len(data))] ^= 1 << run.random.randrange(8)
    file.write_bytes(data[: {"cut short": run.random.randrange(len(data)), "emptied": 0}.get(kind, len(data))])
    return kind


@scenario("no-compiler", 1)
def no_compiler(run: Run) -> None:
    """No C++ compiler: `CXX` leads nowhere and `PATH` is empty.

    Holds: graphs are interpreted with eager's losses, with at most one warning.
    """
    width = 96
    with environment(CXX="/nowhere/c++", PATH="/nowhere"), config.patch(cache=False):
        training, twin = Training(PROGRAMS["mlp"], "lazy", width), Twin("mlp", width)
        with counted_warnings() as texts, run.must_not_raise("training goes on"):
            while run.goes_on() or training.number < 12:
                check_losses(run, training, twin, 12)
                wait_for_compiles(run)
        run.inject("steps without a compiler", training.number)
        run.claim("at most one warning", len(texts) <= 1, "\n".join(texts))
        run.claim("the graph is interpreted", largest_plan() == "fallback", largest_plan())


@scenario("clock-jumps", 1)
def clock_jumps(run: Run) -> None:
    """The wall clock jumps by up to ten years, forwards and backwards, in the training and for the files of the cache.

    Holds: training goes on with eager's losses, graphs are compiled and found on disk again, reports are made.
    """
    real_time = time.time
    offset = 0.0
    time.time = lambda: real_time() + offset
    width = 128
    try:
        while run.goes_on() or width == 128:
            width += 1
            for _ in range(2):  # the second finds the first's on disk
                offset = run.random.uniform(-10, 10) * 365 * 86400
                run.inject("jumps of the clock")
                train_and_compile(run, width=width)
                for file in Path(os.environ["LAZY_BACKEND_CACHE_DIR"]).rglob("*"):
                    moved = real_time() + run.random.uniform(-10, 10) * 365 * 86400
                    os.utime(file, (moved, moved))
            with run.must_not_raise("explanations and reports are made"):
                str(lazy_backend.explain())
                lazy_backend.report(str(run.folder / "report.html"))
    finally:
        time.time = real_time


@scenario("many-files", 0.5)
def many_files(run: Run) -> None:
    """More than 1,024 open files when the compiler's process is started.

    Holds: training goes on with eager's losses, and graphs are compiled.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    run.inject("open files", len(opened))
    width = 160
    try:
        while run.goes_on() or width == 160:
            width += 1
            end_compiler()
            train_and_compile(run, width=width)
    finally:
        for descriptor in opened:
            os.close(descriptor)


# ----- threads and processes


@scenario("fork", 1)
def fork(run: Run) -> None:
    """`os.fork` in mid-training, from the training thread and from another one, with steps pending and runs under way;
    the child trains on. Also a `DataLoader` with processes.

    Holds: parent and child both train on with eager's losses, bit for bit; no child hangs.
    """
    config.backend = "eager"
    training, twin = Training(PROGRAMS["mlp"], "lazy"), Twin("mlp")
    for number in range(2000):
        twin.loss(number)
    rounds = 0
    while (run.goes_on() or rounds < 2) and training.number < 1900:
        rounds += 1
        config.run_in_background = ("always", "never")[rounds % 2]
        pending = [training.step() for _ in range(3)]
        del pending
        if rounds % 3:
            child = fork_child(run, training, twin)
        else:
            children: list[int] = []
            thread = threading.Thread(target=lambda: children.append(fork_child(run, None, twin)))  # noqa: B023
            thread.start()
            check_losses(run, training, twin, 3)
            thread.join()
            child = children[0]
        run.inject("forks")
        check_losses(run, training, twin, 2)
        wait_for_child(run, child)
        if rounds % 10 == 2:
            load_in_processes(run, training, twin)
        if run.record.failed:
            break


def load_in_processes(run: Run, training: Training, twin: Twin) -> None:
    """Train while a `DataLoader` of two forked processes gives batches."""
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(16, 2))
    total = 0.0
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
        check_losses(run, training, twin, 1)
        total += batch.to("lazy").sum().item()
    run.inject("DataLoaders")
    run.claim("a DataLoader's processes give every batch", total == sum(range(32)), f"{total}")


def fork_child(run: Run, training: Training | None, twin: Twin) -> int:
    """Fork; the child trains, for a few steps, and ends with 0 if all its losses were eager's."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        # the fork of another thread may have met a step half recorded: it trains something of its own
        own = training or Training(PROGRAMS["mlp"], "lazy")
        first = own.number
        losses = lazy_backend.to_cpu([own.step() for _ in range(3)])
        expected = [twin.loss(number) for number in range(first, first + 3)]
        status = 0 if all(map(is_equal, [loss.item() for loss in losses], expected)) else 2
    finally:
        os._exit(status)


def wait_for_child(run: Run, child: int, limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            run.claim("a forked child trains on", code == 0, f"status {code} (2: other losses than eager's)")
            return
        run.beat()
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR1)  # stacks of the child, into the log
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run.claim("a forked child trains on", False, f"it hung: see {run.folder / 'log'}")


def run_threads(run: Run, functions: list[Callable[[], None]]) -> None:
    """Run functions at the same time, each on its thread; an error of one is a failed claim."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # threads that hang stop giving signs of life
            thread.join(0.5)
    run.claim("no thread raises", not errors, traceback_text(errors[0]) if errors else "")


@scenario("serve-swaps", 2)
def serve_swaps(run: Run) -> None:
    """Eight threads ask a served model while its weights are swapped 100 times, and another model trains beside it.

    Holds: every answer is that of one set of weights, old or new; the losses of the training are eager's, bit for bit;
    memory and threads stay flat.
    """
    config.backend = "eager"
    keep_little_history()
    models = [answering_model(seed) for seed in range(11)]
    requests = [torch.randn(4, 16) for _ in range(8)]
    with torch.no_grad():
        answers = [[model(request) for request in requests] for model in models]
    served = lazy_backend.serve(models[0], requests[0])
    training, twin = Training(PROGRAMS["mlp"], "lazy"), Twin("mlp")
    flatness = Flatness(run, cache_figures())
    while run.goes_on() or not run.record.claims:
        serve_once(run, served, models, requests, answers, training, twin)
        flatness.sample(training.number)
    flatness.check()


def answering_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def serve_once(
    run: Run,
    served: Any,
    models: list[nn.Module],
    requests: list[torch.Tensor],
    answers: list[list[torch.Tensor]],
    training: Training,
    twin: Twin,
) -> None:
    """100 swaps under the requests of eight threads, with training beside."""
    swaps: list[int] = [0]  # the models whose weights were swapped in, or are about to be, in turn
    wrong: list[str] = []
    is_over = threading.Event()

    def ask(place: int) -> None:
        count = 0
        while not is_over.is_set():
            number = (place + count) % len(requests)
            first = max(0, len(swaps) - 2)
            answer = served(requests[number])
            candidates = {swaps[swap] for swap in range(first, len(swaps))}
            if not any(torch.allclose(answer, answers[version][number], atol=1e-6) for version in candidates):
                wrong.append(f"request {number}: none of the versions {sorted(candidates)}")
            count += 1

    def swap() -> None:
        try:
            for count in range(1, 101):
                version = count % len(models)
                swaps.append(version)
                served.swap_weights(models[version].state_dict())
                run.inject("swaps of weights")
        finally:
            is_over.set()

    def train() -> None:
        while not is_over.is_set():
            check_losses(run, training, twin, 5)

    run_threads(run, [*[lambda place=place: ask(place) for place in range(8)], swap, train])  # type: ignore[misc]
    served.swap_weights(models[0].state_dict())
    run.claim("answers are those of one set of weights", not wrong, "\n".join(wrong[:5]))


@scenario("threads", 1)
def threads(run: Run) -> None:
    """Four threads train models of their own on one device at the same time, and read their losses; what they record is
    interleaved in ever new ways, so the tables of paths and computations, made small, fill again and again.

    Holds: every loss is eager's, bit for bit; the tables keep their bounds, memory and all else stay flat.
    """
    config.backend = "eager"
    config.trie_limit, config.computation_cache_size = 10_000, 32
    keep_little_history()
    twins = {name: Twin(name) for name in ("mlp", "cnn", "gpt")}
    for twin in twins.values():
        twin.loss(20)
    rounds = 0
    figures = cache_figures()
    tables = {"trie nodes": config.trie_limit + config.max_trace_length, "computations": config.computation_cache_size}
    bounded = {name: figures.pop(name) for name in tables}
    flatness = Flatness(run, figures, sizes_objects=False)
    while run.goes_on() or rounds == 0:
        rounds += 1

        def train(name: str) -> None:
            training = Training(PROGRAMS[name], "lazy")
            for number in range(20):
                compare_loss(run, number, training.step().item(), twins[name].loss(number))

        names = ["mlp", "cnn", "gpt", "mlp"]
        run_threads(run, [lambda name=name: train(name) for name in names])  # type: ignore[misc]
        run.inject("trainings in threads", len(names))
        flatness.sample(rounds * 20 * len(names))
        for name, most in tables.items():
            run.claim(f"bounded: {name}", bounded[name]() <= most, f"{bounded[name]()} of {most}")
        if run.record.failed:
            break
    flatness.check()


# How a program may end, as its last lines.
_ENDINGS = {
    "with steps pending": "x = torch.ones(4, device='lazy') * 2",
    "with a compile under way": "[step() for _ in range(6)]",
    "with a tensor operator in a finalizer": "late = Late()",
    "with a tensor operator in the finalizer of a cycle": "late = Late(); late.itself = late",
    "with an asynchronous closure": (
        "lazy_backend.add_step_closure(lambda: time.sleep(0.2), run_async=True); lazy_backend.mark_step()"
    ),
    "by an exception": "step(); raise SystemExit(0)",
    "by SIGTERM": "step(); os.kill(os.getpid(), signal.SIGTERM)",
}
_BEGINNING = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)
import torch, lazy_backend
w = torch.ones(4, 4, device="lazy")
def step():
    global w
    w = (w @ w).relu() / 7
    lazy_backend.mark_step()
class Late:
    def __init__(self):
        self.x = torch.ones(4, device="lazy")
    def __del__(self):
        self.x * 2
step()
"""


@scenario("exit", 1)
def exits(run: Run) -> None:
    """Programs that end with steps pending, with a compile under way, with finalizers that compute, by SIGTERM.

    Holds: they end in time with the status that eager's would, and leave no process and no temporary file.
    """
    log = run.folder / "log"
    rounds = 0
    while run.goes_on() or rounds == 0:
        for title, ending in _ENDINGS.items():
            if rounds and not run.goes_on():
                break
            status = run.python(["-c", _BEGINNING + ending], log, limit=90.0)
            expected = -signal.SIGTERM if title == "by SIGTERM" else 0
            run.inject(title)
            run.claim(f"ends as eager's: {title}", status == expected, f"status {status}:\n{tail(log)}")
        rounds += 1
    time.sleep(1.0)
    below = processes_under(os.getpid())
    run.claim("no process is left", not below, f"{below}")
    left = sorted(path.name for path in Path(os.environ["TMPDIR"]).iterdir())
    run.claim("no temporary file is left", not left, ", ".join(left[:8]))
