"""Who takes part in the benchmark, and the process each of them runs in.

In: commands, one JSON object per line on stdin. Out: one JSON object per line on stdout.
A process holds one contender and one workload and stays alive over all rounds, so that rounds of different contenders
can alternate. Commands: `start`, `round`, `trace`, `memory`, `growth`; the end of stdin ends the process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch

from shared.workers import Reply, answer_commands
from shared.workloads import WORKLOADS, Training, make_training

Hold = Callable[[], Callable[[], None]]

# Steps that may run as written before captured ones are replayed: three for each length of the batches.
_LEARNING = 30


def _nothing() -> None:
    return None


def _no_operators() -> int:
    return 0


def _hold_nothing() -> Callable[[], None]:
    return _nothing


def _same(training: Training) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a training step."""

    device: str
    prepare: Callable[[Training], None] = _same  # replaces parts of the training by compiled ones
    mark: Callable[[], None] = _nothing  # ends a step
    wait: Callable[[], None] = _nothing  # for everything scheduled
    hold: Hold = _hold_nothing  # keeps runs from disturbing `mark`; gives what ends that
    compiles: Callable[[], int] = _no_operators  # so far
    operators: Callable[[], int] | None = None  # recorded so far; None for who records nothing
    replays: str = ""  # the counter of what is replayed, if anything is meant to be


def _eager() -> Contender:
    return Contender("cpu")


def compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    # the cache directory is fresh, so each graph that Inductor compiles is a miss there
    found = counters["inductor"]
    return int(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def _compile(with_optimizer: bool) -> Callable[[], Contender]:
    def prepare(training: Training) -> None:
        training.forward = torch.compile(training.model)
        if with_optimizer:
            training.update = torch.compile(training.optimizer.step)

    return lambda: Contender("cpu", prepare=prepare, compiles=compiled_graphs)


def _torch_lazy() -> Contender:
    import torch._lazy.metrics
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    found: Any = torch._lazy.metrics
    lazy: Any = torch._lazy
    return Contender(
        "lazy",
        mark=lazy.mark_step,
        wait=lazy.wait_device_ops,
        hold=_use_ltc_thread_pool,
        compiles=lambda: int(found.counter_value("UncachedCompile") or 0),
        operators=lambda: sum(found.counter_value(name) for name in found.counter_names() if name.startswith("lazy::")),
    )


def _use_ltc_thread_pool() -> Callable[[], None]:
    """By default LTC runs a graph within `mark_step`. With its thread pool, `mark_step` is host work alone."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_torch_lazy_use_thread_pool")  # no Python function sets it
    flag.value = True

    def end() -> None:
        flag.value = False

    return end


def _lazy_backend(backend: str, compile: str) -> Callable[[], Contender]:
    def make() -> Contender:
        import lazy_backend

        lazy_backend.config.backend = backend
        lazy_backend.config.compile = compile
        return Contender(
            "lazy",
            mark=lazy_backend.mark_step,
            wait=lazy_backend.wait_device_ops,
            hold=hold_queue,
            compiles=lambda: lazy_backend.metrics.counter_value("Compile"),
            operators=recorded_calls,
        )

    return make


def _captured() -> Contender:
    """A replayed step: no Python of the step runs, so there is nothing that records, and no `mark_step`."""
    import lazy_backend

    def prepare(training: Training) -> None:
        training.train = lazy_backend.capture(training.train)

    lazy_backend.config.compile = "foreground"
    return Contender(
        "lazy",
        prepare=prepare,
        wait=lazy_backend.wait_device_ops,
        compiles=lambda: lazy_backend.metrics.counter_value("Compile"),
        replays="CapturedCall",
    )


def _captured_parts() -> Contender:
    """A plain loop whose model and optimizer are captured: the rest of its Python runs."""
    import lazy_backend

    def prepare(training: Training) -> None:
        lazy_backend.capture(training.model)
        training.update = lazy_backend.capture(training.optimizer).step

    plain = _lazy_backend("inductor", "foreground")()
    return dataclasses.replace(plain, prepare=prepare, operators=None, replays="RegionJump")


def recorded_calls() -> int:
    import lazy_backend

    found = lazy_backend.metrics.counters()
    return sum(value for name, value in found.items() if name.startswith("lazy::"))


def hold_queue() -> Callable[[], None]:
    """Put a task in front of the next run: then a sync is timed without a run, within it or beside it."""
    from lazy_backend import config
    from lazy_backend.tensors.contexts import contexts

    released = threading.Event()
    setting, config.run_in_background = config.run_in_background, "always"

    def task() -> None:
        released.wait()

    def release() -> None:
        config.run_in_background = setting
        released.set()

    contexts.get_device_context(None).queue.add(task)
    return release


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "eager": _eager,
    "compile": _compile(with_optimizer=False),
    "compile-all": _compile(with_optimizer=True),
    "ltc": _torch_lazy,
    "lazy": _lazy_backend("inductor", "foreground"),
    "captured-parts": _captured_parts,
    "captured": _captured,
    "lazy-eager": _lazy_backend("eager", "foreground"),
    "lazy-off": _lazy_backend("inductor", "off"),
}

# Contenders that must not find lazy_backend loaded.
WITHOUT_AUTOLOAD = frozenset(("ltc", "eager", "compile", "compile-all"))


# ----- measurements


def start(contender: Contender, training: Training, steps: int) -> Reply:
    """The first step, the first `steps` steps (seconds each), the loss after them and the number of compiles."""
    contender.prepare(training)
    begin = perf_counter()
    _step(contender, training)
    contender.wait()
    first = perf_counter() - begin
    later: list[float] = []
    for _ in range(steps - 1):
        before = perf_counter()
        _step(contender, training)
        later.append(perf_counter() - before)
    contender.wait()
    total = perf_counter() - begin
    check_replays(contender, steps)
    return {
        "first": first,
        "total": total,
        "longest_later": max(later, default=0.0),
        "loss": float(training.loss),
        "compiles": contender.compiles(),
    }


def check_replays(contender: Contender, steps: int) -> None:
    """Raise if what is captured ran as written in most steps: its figures would be those of plain loops, or less."""
    if contender.replays:
        import lazy_backend

        if lazy_backend.metrics.counter_value(contender.replays) < (steps - _LEARNING) // 2:
            raise RuntimeError(f"too little was replayed in {steps} steps: {lazy_backend.captures()}")


def _step(contender: Contender, training: Training) -> None:
    training.step()
    contender.mark()


def run_round(contender: Contender, training: Training, steps: int) -> Reply:
    """Seconds for `steps` steady steps, all results computed."""
    contender.wait()
    begin = perf_counter()
    for _ in range(steps):
        _step(contender, training)
    contender.wait()
    return {"seconds": perf_counter() - begin, "compiles": contender.compiles()}


def trace(contender: Contender, training: Training, steps: int) -> Reply:
    """Medians over steps, while no run is under way: CPU seconds of this thread for tracing a step (`trace`) and
    for its `mark_step` (`sync`), and seconds that `mark_step` takes as called, with a run behind it (`called`).
    """
    if contender.operators is None:
        return {}
    before = contender.operators()
    held = [_traced_step(contender, training, contender.hold, thread_time) for _ in range(steps)]
    free = [_traced_step(contender, training, _hold_nothing, perf_counter) for _ in range(steps)]
    return {
        "operators": (contender.operators() - before) / (2 * steps),
        "trace": statistics.median(traced for traced, _ in held),
        "sync": statistics.median(synced for _, synced in held),
        "called": statistics.median(synced for _, synced in free),
    }


def _traced_step(
    contender: Contender, training: Training, hold: Hold, clock: Callable[[], float]
) -> tuple[float, float]:
    contender.wait()
    begin = clock()
    training.step()
    traced = clock() - begin
    release = hold()
    begin = clock()
    contender.mark()
    synced = clock() - begin
    release()
    contender.wait()
    return traced, synced


def memory(contender: Contender, training: Training, steps: int) -> Reply:
    """Bytes that live between two steps, and how far resident memory rises above that within steps.

    Needs Linux with glibc, and a process whose allocator gives memory back at once (`MEMORY_ENVIRONMENT`).
    """
    contender.wait()
    gc.collect()
    # free memory in the middle of the heap, as a compile leaves it, would hide what the steps take from it
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    idle = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM, the peak of VmRSS, afresh
    run_round(contender, training, steps)
    return {"live": training.live_bytes(), "rise": _status_bytes("VmHWM") - idle}


# glibc: large blocks come from mmap and go back to the system when they are freed, so that VmRSS follows them
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


# ----- growth: cost per call of long traces


def growth(lengths: list[int], repeats: int, budget: float) -> Reply:
    """CPU seconds per call of traces of these lengths: unseen, known, and of their `mark_step`, for two programs.

    A length is left out if the first sight of it would take longer than `budget` seconds, by the lengths before it.
    """
    import lazy_backend

    lazy_backend.config.compile = "off"
    lazy_backend.config.max_trace_length = 10 * max(lengths)
    kinds: dict[str, Callable[[int], object]] = {"x = x + y": _chain, "x.add_(y)": _chain_in_place}
    return {name: _growth_of(kind, lengths, repeats, budget) for name, kind in kinds.items()}


def _chain(length: int) -> object:
    x = y = torch.ones(4, device="lazy")
    for _ in range(length):
        x = x + y
    return x


def _chain_in_place(length: int) -> object:
    x, y = torch.ones(4, device="lazy"), torch.ones(4, device="lazy")
    for _ in range(length):
        x.add_(y)
    return x


def _growth_of(kind: Callable[[int], object], lengths: list[int], repeats: int, budget: float) -> list[Reply]:
    _grown(kind, 10, repeats)
    rows: list[Reply] = []
    for length in lengths:
        if _predicted(rows, length) > budget:
            break
        rows.append(_grown(kind, length, repeats))
    return rows


def _predicted(rows: list[Reply], length: int) -> float:
    """Seconds of the first sight, if the cost per call rises once more as it did between the last two lengths."""
    if len(rows) < 2:
        return 0.0
    before, last = rows[-2]["unseen"], rows[-1]["unseen"]
    return float(length * last * max(1.0, last / before))


def _grown(kind: Callable[[int], object], length: int, repeats: int) -> Reply:
    _forget_paths()
    unseen, first_sync = _timed_trace(kind, length)
    _timed_trace(kind, length)
    known = [_timed_trace(kind, length) for _ in range(repeats)]
    return {
        "length": length,
        "unseen": unseen / length,
        "first_sync": first_sync / length,
        "known": statistics.median(traced for traced, _ in known) / length,
        "sync": statistics.median(synced for _, synced in known) / length,
    }


def _forget_paths() -> None:
    """Or a longer trace would find the beginning of the shorter one."""
    from lazy_backend.tensors.contexts import contexts

    context = contexts.get_device_context(None)
    with context.lock:
        context.forget_paths()
        context.new_trace()


def _timed_trace(kind: Callable[[int], object], length: int) -> tuple[float, float]:
    import lazy_backend

    begin = thread_time()
    kept = kind(length)
    traced = thread_time() - begin
    release = hold_queue()
    begin = thread_time()
    lazy_backend.mark_step()
    synced = thread_time() - begin
    release()
    lazy_backend.wait_device_ops()
    del kept
    return traced, synced


# ----- the process


def serve(contender_name: str, workload_name: str) -> None:
    """Answer commands until stdin ends."""
    state: tuple[Contender, Training] | None = None

    def answer(name: str, **arguments: Any) -> Reply:
        nonlocal state
        if name == "growth":
            return growth(**arguments)
        state = state or _made(contender_name, workload_name)
        return _MEASUREMENTS[name](*state, **arguments)

    answer_commands(answer)


_MEASUREMENTS: dict[str, Callable[..., Reply]] = {"start": start, "round": run_round, "trace": trace, "memory": memory}


def _made(contender_name: str, workload_name: str) -> tuple[Contender, Training]:
    contender = CONTENDERS[contender_name]()
    training = make_training(WORKLOADS[workload_name], contender.device)
    contender.mark()
    contender.wait()
    return contender, training
