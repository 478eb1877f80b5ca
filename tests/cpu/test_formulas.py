"""Floats that remember how they were computed: the same bits as plain floats, and again at each replay."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from lazy_backend.floats.formulas import (
    OtherOutcome,
    Tape,
    TracedFloat,
    bits,
    compile_formulas,
    plain,
)

BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
UNARY = [operator.neg, operator.abs, operator.pos, lambda value: round(value, 3)]


def traced(*values: float) -> tuple[Tape, list[TracedFloat]]:
    tape = Tape()
    return tape, [tape.traced(tape.leaf(value)) for value in values]


def formula(function: Callable[..., Any], *values: float) -> Callable[..., float]:
    """`function`, traced at `values`, as the formulas compute it."""
    tape, leaves = traced(*values)
    result = function(*leaves)
    compute = compile_formulas(
        tape.nodes, tape.values, tape.guards, [leaf.number for leaf in leaves], [[(result.number, False)]]
    )
    return lambda *others: compute(*others)[0]  # type: ignore[no-any-return]


def random_expression(draw: random.Random, depth: int) -> Callable[..., Any]:
    """A function of three floats."""
    if not depth or draw.random() < 0.1:
        place = draw.randrange(4)
        constant = draw.choice([2, 3, -1, 0.1, -0.5, 1e-3, 7.25, True])
        return lambda *leaves: leaves[place] if place < 3 else constant
    if draw.random() < 0.2:
        unary, inner = draw.choice(UNARY), random_expression(draw, depth - 1)
        return lambda *leaves: unary(inner(*leaves))
    binary = draw.choice(BINARY)
    left = random_expression(draw, depth - 1)
    right = random_expression(draw, 0 if binary is operator.pow else depth - 1)  # no tower of integers
    return lambda *leaves: binary(left(*leaves), right(*leaves))


def outcome(function: Callable[..., Any], *values: float) -> Any:
    """The bits of what a function gives, or the kind of error."""
    try:
        result = function(*values)
    except (ArithmeticError, TypeError) as error:  # a TypeError: the remainder of a complex power
        return type(error)
    return bits(result) if isinstance(result, float) else (type(result), repr(result))


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions_give_the_bits_of_plain_floats(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        function = random_expression(draw, draw.randrange(1, 6))
        values = [draw.choice([0.0, -0.0, 1.0, draw.uniform(-3, 3), draw.uniform(0, 1e3)]) for _ in range(3)]
        others = [draw.choice([0.0, -0.0, 2.0, draw.uniform(-3, 3), draw.uniform(0, 1e3)]) for _ in range(3)]
        expected = outcome(function, *values)
        tape, leaves = traced(*values)
        assert outcome(function, *leaves) == expected
        try:
            found = function(*leaves)
        except (ArithmeticError, TypeError):
            continue
        if not isinstance(found, TracedFloat):
            continue
        assert bits(plain(found)) == expected
        compute = compile_formulas(
            tape.nodes, tape.values, tape.guards, [leaf.number for leaf in leaves], [[(found.number, False)]]
        )
        try:
            (again,) = compute(*others)
        except (OtherOutcome, ArithmeticError):
            continue  # the body would run as written
        assert bits(again) == outcome(function, *others)


def test_a_comparison_is_a_guard() -> None:
    compute = formula(lambda s: min(s, 0.5) * 2, 0.1)
    assert compute(0.25) == 0.5
    with pytest.raises(OtherOutcome):
        compute(0.75)


@pytest.mark.parametrize(
    ("ask", "same", "other"),
    [
        (lambda s: int(s * 10), 0.19, 0.21),
        (lambda s: round(s * 10), 0.14, 0.16),
        (lambda s: math.floor(s * 10), 0.19, 0.21),
        (lambda s: math.ceil(s * 10), 0.08, 0.21),
        (lambda s: bool(s), 0.5, 0.0),
        (lambda s: f"{s:.1f}", 0.11, 0.3),
        (lambda s: s == 0.1, 0.1, 0.2),
        (lambda s: hash(s), 0.1, 0.2),
        (lambda s: float(s), 0.1, 0.2),
        (lambda s: repr(s), 0.1, 0.2),
        (lambda s: copy.deepcopy([s]), 0.1, 0.2),
        (lambda s: s.is_integer(), 0.2, 2.0),
        (lambda s: s > 0.5, 0.2, 2.0),
    ],
)
def test_what_leaves_float_arithmetic_is_a_guard(ask: Callable[[float], Any], same: float, other: float) -> None:
    tape, (leaf,) = traced(0.1)
    ask(leaf)
    result = leaf * 3
    compute = compile_formulas(tape.nodes, tape.values, tape.guards, [leaf.number], [[(result.number, False)]])  # type: ignore[attr-defined]
    assert compute(same) == (same * 3,)
    with pytest.raises(OtherOutcome):
        compute(other)


def test_a_complex_power_is_no_float() -> None:
    compute = formula(lambda s: s**0.5, 4.0)
    assert compute(9.0) == 3.0
    with pytest.raises(OtherOutcome):
        compute(-1.0)


def test_equal_formulas_are_one_node() -> None:
    tape, (beta,) = traced(0.9)
    step = tape.leaf(3.0, key="step")
    assert tape.leaf(3.0, key="step") == step
    before = len(tape.nodes)
    results = [1 - beta ** tape.traced(step) for _ in range(150)]
    assert len(tape.nodes) == before + 2
    assert len({one.number for one in results}) == 1  # type: ignore[attr-defined]


def test_formulas_that_were_equal_must_agree() -> None:
    tape, (a, b) = traced(2.0, 2.0)
    compute = compile_formulas(
        tape.nodes, tape.values, tape.guards, [a.number, b.number], [[(a.number, True), (b.number, True)]]
    )
    assert compute(3.0, 3.0) == (-3.0,)
    with pytest.raises(OtherOutcome):
        compute(3.0, 4.0)


def test_a_traced_float_is_a_float() -> None:
    _, (leaf,) = traced(0.3)
    assert isinstance(leaf, float)
    assert sum([leaf, leaf]) == 0.6
    assert math.sqrt(leaf) == math.sqrt(0.3)
    assert type(copy.deepcopy(leaf)) is float
    assert type(copy.copy(leaf)) is float
    loaded = pickle.loads(pickle.dumps({"lr": leaf}))
    assert type(loaded["lr"]) is float
    assert f"{leaf:.2f}" == "0.30"
    assert divmod(leaf, 0.2) == divmod(0.3, 0.2)
    assert {leaf: 1}[0.3] == 1  # type: ignore[index]


def test_a_traced_float_that_outlives_its_tape_is_a_plain_float() -> None:
    tape, (leaf,) = traced(0.3)
    tape.close()
    assert type(leaf * 2) is float
    assert leaf < 1
    assert not tape.guards
    _, (fresh,) = traced(2.0)
    assert isinstance(leaf * fresh, TracedFloat)
    assert formula(lambda value: leaf * value, 2.0)(3.0) == 0.3 * 3.0


def test_a_traced_float_that_somebody_keeps_is_known() -> None:
    tape, leaves = traced(0.3, 0.4)
    kept = [leaves[0]]
    del leaves
    assert tape.kept() == kept


def test_numpy_gets_the_value_with_a_guard() -> None:
    numpy = pytest.importorskip("numpy")
    tape, (leaf,) = traced(0.3)
    assert numpy.minimum(leaf, 0.5) == 0.3
    assert len(tape.guards) == 1
    assert (leaf * numpy.float64(2.0)) == 0.6
    assert (numpy.float64(2.0) * leaf) == 0.6
