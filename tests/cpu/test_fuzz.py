"""Random programs of views, writes, reads and gradients, with cuts at random places, against eager.

The programs come from `tests/random_programs.py`. `tools/fuzz.py` runs as many of them as wanted, and makes one that
fails smaller.
"""

from __future__ import annotations

import pytest
import torch
from harness import NoSync, assert_same, count
from random_programs import RandomProgram, minimize, random_chains, random_program

import lazy_backend
from lazy_backend import config, metrics


def assert_runs_like_eager(program: RandomProgram, sync=lazy_backend.mark_step) -> None:
    assert_same(program.run("lazy", sync), program.run("cpu", NoSync()))


@pytest.mark.parametrize("seed", range(150))
def test_random_programs_equal_eager(seed: int) -> None:
    assert_runs_like_eager(random_program(seed))


@pytest.mark.parametrize("seed", range(150, 200))
def test_random_programs_in_one_trace_equal_eager(seed: int) -> None:
    assert_runs_like_eager(random_program(seed), NoSync())


# AOTAutograd refuses some writes to overlapping windows; then the graph is interpreted
@pytest.mark.filterwarnings("ignore::lazy_backend.CompileWarning")
@pytest.mark.parametrize("seed", range(200, 240))
def test_random_programs_compiled_equal_eager(seed: int) -> None:
    config.backend = "aot_eager"
    program = random_program(seed)
    for _ in range(3):
        assert_runs_like_eager(program)


@pytest.mark.parametrize("block", range(5))
def test_chains_of_views_equal_eager(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        assert_runs_like_eager(random_chains(seed))


# what a compiler would get wrong is interpreted, with a warning
@pytest.mark.filterwarnings("ignore::lazy_backend.CompileWarning")
@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("block", range(5))
def test_chains_of_views_compiled_equal_eager(block: int) -> None:
    config.backend = "aot_eager"
    for seed in range(20 * block, 20 * block + 20):
        for _ in range(3):
            assert_runs_like_eager(random_chains(seed))
    assert metrics.counter_value("Compile") > metrics.counter_value("CompileDeclined") > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lazy_backend.CompileWarning")
@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_many_chains_of_views_compiled_equal_eager(backend: str) -> None:
    config.backend = backend
    for seed in range(1000, 3000 if backend == "aot_eager" else 1030):
        for _ in range(3):
            assert_runs_like_eager(random_chains(seed))


@pytest.mark.parametrize("seed", range(240, 280))
def test_random_programs_run_again_hit_the_cache(seed: int) -> None:
    program = random_program(seed)
    program.run("lazy", lazy_backend.mark_step)
    lazy_backend.mark_step()
    with count("UncachedCompile") as misses:
        assert_runs_like_eager(program)
    assert misses() <= 1  # the read at the end cuts what the first run ended with mark_step


@pytest.mark.parametrize("seed", range(280, 320))
def test_random_programs_run_within_mark_step_equal_eager(seed: int) -> None:
    config.run_in_background = "never"
    assert_runs_like_eager(random_program(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_programs_equal_eager(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        assert_runs_like_eager(random_program(seed))


# ----- the generator


def test_a_seed_makes_one_program() -> None:
    assert random_program(7) == random_program(7)
    assert random_program(7) != random_program(8)


def test_a_failing_program_is_made_smaller() -> None:
    smaller = minimize(random_program(7), lambda program: any("v2" in line for line in program.statements))
    assert len(smaller.statements) == 1


def test_a_program_is_a_script_that_runs(capsys) -> None:
    program = random_program(7)
    exec(program.script(), {"__name__": "script"})
    out = capsys.readouterr().out
    assert out.count("\n") >= 3
    assert "DIFFERS" not in out
    assert torch.is_grad_enabled()
