"""What the examples share: their arguments, the result of a run, and the table at the end.

In: a function that trains on a device. Out: its figures, and how far they are from the same run in eager.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import lazy_backend
from lazy_backend import metrics

Row: TypeAlias = tuple[str, str]

# Training amplifies rounding: the losses of two compilers drift apart as it goes on. Seen: 1e-4 after 220 steps.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Run:
    """One training run. Its losses and weights are on the CPU, its model where it was trained."""

    model: nn.Module
    losses: Tensor  # one per step
    weights: dict[str, Tensor]  # parameters and buffers after the last step
    step_seconds: float  # median


@dataclass(frozen=True)
class Difference:
    """How far a run is from another one; NaN if a number of theirs is NaN."""

    losses: float  # largest absolute difference
    weights: float  # the same
    equal: bool  # bit for bit, all of both


@dataclass(frozen=True)
class Figures:
    """What the lazy device did. Times are in seconds; those per step are medians."""

    steps: int
    graphs: int
    compiles: int
    compile_seconds: float
    cache_hits: int
    graph_cuts: int
    trace_seconds: float
    sync_seconds: float
    wait_seconds: float  # part of the sync: until the run before is over
    run_seconds: float


class Stopwatch:
    """Takes the time of each step: call `lap` at its end."""

    def __init__(self) -> None:
        self._laps = [perf_counter()]

    def lap(self) -> None:
        self._laps.append(perf_counter())

    def median(self) -> float:
        """Seconds per step. A median, so that the few steps that compile do not count."""
        return median(end - start for start, end in zip(self._laps, self._laps[1:], strict=False))


# ----- the two ends of a training loop


def progress(batches: Iterable[tuple[Tensor, Tensor]], total: int, device: str) -> tqdm:
    """A progress bar around the batches of a run; none where standard error is not a terminal."""
    return tqdm(batches, total=total, desc=f"training on {device}", unit="step", disable=None)


def finished(model: nn.Module, losses: Sequence[Tensor], stopwatch: Stopwatch) -> Run:
    """The result of a run, fetched from the device in one sync. Of weights that are sharded, this process's shards."""
    states = {
        name: value.to_local() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    fetched, weights = lazy_backend.to_cpu((list(losses), states))
    weights = {name: value.cpu() for name, value in weights.items()}  # eager's are on its device still
    return Run(model, torch.stack(fetched).cpu(), weights, stopwatch.median())


# ----- from arguments to a table


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments every example takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", choices=("lazy", "cpu"), default="lazy", help="where to train (default: lazy)")
    made.add_argument(
        "--backend",
        default=lazy_backend.config.backend or "inductor",
        help="torch.compile backend of the lazy device: inductor, aot_eager, eager, ... (default: %(default)s)",
    )
    made.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data (default: 0)")
    made.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="after a lazy run, do the same run in eager and compare (default: yes)",
    )
    return made


def present(
    arguments: argparse.Namespace,
    train: Callable[[str], Run],
    evaluate: Callable[[nn.Module, str], Row],
) -> Run:
    """Train as the arguments of `parser` say, print the table, return the run.

    `train(device)` trains from scratch, `evaluate(model, device)` gives a row of the table.
    Raises `SystemExit` if the losses are further from eager's than they may be.
    """
    if arguments.device == "cpu":
        run = train("cpu")
        print_table("on cpu", [evaluate(run.model, "cpu"), *step_rows(run)])
        return run
    run, figures, evaluated = measured(arguments.backend, train, evaluate)
    rows = [evaluated, *step_rows(run), *figure_rows(figures)]
    if not arguments.check:
        print_table(f"on lazy, backend {arguments.backend}", rows)
        return run
    eager = train(eager_device())
    difference = compare(run, eager)
    print_table(f"on lazy, backend {arguments.backend}", rows + difference_rows(difference))
    print_table("the same run in eager", [evaluate(eager.model, eager_device()), *step_rows(eager)])
    check(difference, arguments.backend)
    return run


def measured(
    backend: str, train: Callable[[str], Run], evaluate: Callable[[nn.Module, str], Row]
) -> tuple[Run, Figures, Row]:
    """A run on the lazy device, what it took, and its evaluation."""
    metrics.reset()
    if backend == "inductor":
        print("the first step is interpreted; a step that recurs is compiled once, in about half a minute")
    with lazy_backend.config.patch(backend=backend):
        run = train("lazy")
        evaluated = evaluate(run.model, "lazy")
    return run, read_figures(), evaluated


@contextlib.contextmanager
def one_core_for_python() -> Iterator[None]:
    """Within the block operators leave a core to Python, which records a step while the one before it runs.

    Right for small models, whose operators gain little from a further core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, (os.cpu_count() or 1) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def eager_device() -> str:
    """Where eager runs the kernels that the lazy device runs: on the device behind it."""
    return "cuda" if torch.cuda.is_available() and lazy_backend.config.device != "cpu" else "cpu"


def read_figures() -> Figures:
    """What was counted since `metrics.reset()`."""
    compiled = metrics.metric_data("CompileTime")
    return Figures(
        steps=metrics.counter_value("MarkStep"),
        graphs=metrics.counter_value("UncachedCompile"),
        compiles=metrics.counter_value("Compile"),
        compile_seconds=compiled.total if compiled else 0.0,
        cache_hits=metrics.counter_value("CachedCompile"),
        graph_cuts=metrics.counter_value("GraphCut"),
        trace_seconds=_median("TraceTime"),
        sync_seconds=_median("SyncTime"),
        wait_seconds=_median("DeviceLockWait"),
        run_seconds=_median("ExecuteTime"),
    )


def compare(run: Run, other: Run) -> Difference:
    """How far `run` is from `other`."""
    pairs = [(value, other.weights[name]) for name, value in run.weights.items()]
    equal = torch.equal(run.losses, other.losses) and all(torch.equal(a, b) for a, b in pairs)
    return Difference(_largest(run.losses, other.losses), max(_largest(a, b) for a, b in pairs), equal)


def check(difference: Difference, backend: str) -> None:
    """Raise `SystemExit` if losses are further from eager's than `backend` may take them: see TOLERANCE."""
    # the "eager" backend calls the same kernels; a compiler fuses them, which rounds differently. On CUDA some kernels
    # add in another order each time
    allowed = 0.0 if backend == "eager" and eager_device() == "cpu" else TOLERANCE
    if not difference.losses <= allowed:  # as NaN is not
        raise SystemExit(f"losses differ from eager's by {difference.losses:.3g}, more than {allowed:g}")


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Names and values, one pair a line."""
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<29} {value}")


def step_rows(run: Run) -> list[Row]:
    return [("last loss", f"{run.losses[-1].item():.4f}"), ("time per step", _ms(run.step_seconds))]


def figure_rows(figures: Figures) -> list[Row]:
    return [
        # the run of one step overlaps the trace of the next
        ("  trace", _ms(figures.trace_seconds)),
        ("  sync", f"{_ms(figures.sync_seconds)}, {_ms(figures.wait_seconds)} of it waiting for the run before"),
        ("  run", _ms(figures.run_seconds)),
        ("steps", str(figures.steps)),
        ("graphs", str(figures.graphs)),
        ("compiles", f"{figures.compiles}, {figures.compile_seconds:.1f} s in all"),
        ("cache hits", str(figures.cache_hits)),
        ("graph cuts", str(figures.graph_cuts)),
    ]


def difference_rows(difference: Difference) -> list[Row]:
    return [
        ("largest difference of losses", f"{difference.losses:.3g}"),
        ("largest difference of weights", f"{difference.weights:.3g}"),
        ("bit for bit equal to eager", "yes" if difference.equal else "no"),
    ]


def _median(metric: str) -> float:
    data = metrics.metric_data(metric)
    return data.percentile(50) if data else 0.0


def _largest(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
