"""A compiler that fails is asked once more; operators on which it fails again are left to PyTorch's kernels."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lazy_backend
from lazy_backend import CompileWarning, config, metrics
from lazy_backend.lowering.compilation import background

LONG = 1800.0

# What the compiler's process does first.
FAILS_ON_EXP = """
import torch
from torch._inductor import lowering
def fail(*args, **kwargs): raise RuntimeError("no code for this")
lowering.lowerings[torch.ops.aten.exp.default] = fail
"""
FAILS = """
from lazy_backend.ports.replacements import inductor
made, failed = inductor.compile_ahead, []
def compile_ahead(*args):
    if len(failed) < {times}:
        failed.append(1)
        raise RuntimeError("not now")
    return made(*args)
inductor.compile_ahead = compile_ahead
"""
MAIN = "from lazy_backend.lowering.plans.worker import main"

Compiler = Callable[[str], None]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    compile_all()


def compile_all() -> None:
    config.backend, config.compile, config.verify_compiled = "inductor", "background", "once"
    config.compile_after_operators = config.num_profiled_runs = 0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Has the compiler's process begin with some code."""
    program = background._program

    def begin_with(code: str) -> None:
        monkeypatch.setattr(background, "_program", lambda *args: program(*args).replace(MAIN, f"{code}\n{MAIN}"))

    background.worker.close()
    yield begin_with
    background.worker.close()


def run(program: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Run a program until nothing is compiled any more, compare each result with eager's, and return the warnings."""
    given = torch.rand(8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            found = program(given.to("lazy"))
            lazy_backend.mark_step()
            torch.testing.assert_close(found.cpu(), program(given))
            assert lazy_backend.wait_for_compiles(LONG)
    return [str(one.message) for one in told if issubclass(one.category, CompileWarning)]


def counts() -> tuple[int, ...]:
    names = "Compile", "CompileFailed", "PlanAgreed", "PlanRepaired"
    return tuple(metrics.counter_value(name) for name in names)


def plan() -> str:
    return lazy_backend.explain().records[-1].plan


def test_what_the_compiler_fails_on_is_left_to_its_kernel(compiler: Compiler, tmp_path: Path) -> None:
    compiler(FAILS_ON_EXP)
    tmp_path.chmod(0o700)
    config.cache, config.cache_dir = True, str(tmp_path)

    def program(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2.5).exp() + 1).tanh().sin()

    (told,) = run(program)
    assert "it could not be compiled" in told
    assert "no code for this" in told
    assert "the fault is in aten.exp recorded at" in told
    assert "test_failed_compiles.py" in told
    assert (*counts(), plan()) == (1, 0, 1, 1, "compiled")
    assert [one.outcome for one in lazy_backend.explain().compiles] == ["compiled", "repaired"]
    # a later graph with the operator is compiled at once
    assert not run(lambda x: x.exp() * 0.75)
    assert (*counts(), plan()) == (2, 0, 2, 1, "compiled")

    for thread in threading.enumerate():
        if thread.name == "lazy_backend marks":
            thread.join()
    compiler(FAILS.format(times=1000))
    background.worker.close()
    lazy_backend.compat.runtime.reset()  # as in the next process, which compiles nothing
    config.cache, config.cache_dir = True, str(tmp_path)
    compile_all()
    assert not run(program)
    assert (*counts(), plan()) == (0, 0, 0, 1, "compiled")


def test_a_failure_that_passes_is_not_told(compiler: Compiler) -> None:
    compiler(FAILS.format(times=1))
    assert not run(lambda x: ((x * 3.5).cos() + 1).tanh())
    assert (*counts(), plan()) == (1, 0, 1, 0, "compiled")


def test_where_no_form_can_be_compiled_the_graph_is_interpreted(compiler: Compiler) -> None:
    compiler(FAILS.format(times=1000))
    (told,) = run(lambda x: ((x * 4.5).cos() + 1).tanh())
    assert "could not be compiled with backend 'inductor'" in told
    assert "not now" in told
    assert (*counts(), plan()) == (0, 1, 0, 0, "interpreted")
