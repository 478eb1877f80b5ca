"""Random training loops with captured modules and optimizers, against the same loops as written and against the CPU.

The loops come from `tests/random_loops.py`. `tools/fuzz.py --replay` runs as many of them as wanted, and makes one that
fails smaller.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_loops import NOT_COMPARED, RandomLoop, Statement, failure, minimize, random_loop


@pytest.mark.scenario
@pytest.mark.parametrize("block", range(6))
def test_random_loops_do_the_same_captured(block: int) -> None:
    num_compared = 0
    for seed in range(10 * block, 10 * block + 10):
        found = failure(random_loop(seed, short=True))
        if found is None:
            num_compared += 1
        else:
            assert found.startswith(NOT_COMPARED), f"loop {seed}: {found}"
    assert num_compared >= 8


def test_a_seed_makes_one_loop() -> None:
    assert random_loop(7) == random_loop(7)
    assert random_loop(7) != random_loop(8)


def test_a_failing_loop_is_made_smaller() -> None:
    loop = random_loop(7)
    loop = replace(loop, statements=(*loop.statements, Statement("end", "mark(step)", "step == 3")))
    smaller = minimize(loop, lambda one: any(statement.when == "step == 3" for statement in one.statements))
    assert len(smaller.statements) == smaller.num_steps == 1


def test_a_difference_is_found() -> None:
    code = "values.append(1 if capture is as_it_is else 2)"
    loop = RandomLoop(0, (*random_loop(7).statements, Statement("end", code)), 2)
    found = failure(loop)
    assert found is not None
    assert found.startswith("captured differs")
    assert "program(device, capture, mark, values)" in loop.script()
