"""Random functions with state, captured, against the same functions as written and against the CPU.

The functions come from `tests/random_functions.py`. `tools/fuzz.py --replay functions`, and `--replay carried`, run as
many as wanted.
"""

from __future__ import annotations

import pytest
from random_functions import random_function
from random_loops import NOT_COMPARED, failure, minimize

from lazy_backend import metrics


@pytest.mark.parametrize("block", range(4))
def test_random_functions_do_the_same_captured(block: int) -> None:
    num_compared = num_replayed = 0
    for seed in range(18 * block, 18 * block + 18):
        found = failure(random_function(seed))
        if found is None:
            num_compared += 1
            num_replayed += metrics.counter_value("CapturedCall") > 0
        else:
            assert found.startswith(NOT_COMPARED), f"function {seed}: {found}"
    assert num_compared >= 15
    assert num_replayed >= 6


# Each was silently wrong once.
@pytest.mark.parametrize("seed", [1183, 1198, 4122, 12641, 12682, 14314, 100408])
def test_functions_that_failed(seed: int) -> None:
    assert failure(random_function(seed)) is None


def test_a_seed_makes_one_function() -> None:
    assert random_function(7) == random_function(7)
    assert random_function(7) != random_function(8)


def test_a_function_is_made_smaller() -> None:
    smaller = minimize(random_function(7), lambda one: any(statement.phase == "result" for statement in one.statements))
    assert len(smaller.statements) == smaller.num_steps == 1
    assert "step = capture(step" in smaller.script()


@pytest.mark.parametrize("block", range(2))
def test_random_functions_with_carriers_do_the_same_captured(block: int) -> None:
    num_replayed = 0
    for seed in range(14 * block, 14 * block + 14):
        found = failure(random_function(seed, carried=True))
        assert found is None or found.startswith(NOT_COMPARED), f"function {seed}: {found}"
        num_replayed += metrics.counter_value("CapturedCall") > 0
    assert num_replayed >= 5
