"""One compiled plan for many shapes: right for each, or not used."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn

import lazy_backend
from lazy_backend import CompileWarning, computation, config, metrics
from lazy_backend.lowering.compilation.compiler import guards_hold
from lazy_backend.lowering.ir import shapes
from lazy_backend.lowering.plans import families
from lazy_backend.ports.replacements.inductor import symbols_with

Step = Callable[[str, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def background_or_not() -> None:
    config.first_sight = "run"


def each(step: Step, inputs: Sequence[torch.Tensor]) -> None:
    """The step gives eager's bits for every input, with a sync after each."""
    for made in inputs:
        expected = step("cpu", made)
        actual = step("lazy", made)
        lazy_backend.mark_step()
        assert_same(actual, expected)


def batches(sizes: Sequence[int], width: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, width, generator=generator) for size in sizes]


def shuffled(sizes: Sequence[int], times: int) -> list[int]:
    order = [size for size in sizes for _ in range(times)]
    random.Random(0).shuffle(order)
    return order


def many_views(device: str, x: torch.Tensor) -> torch.Tensor:
    x = x.to(device)
    return (x.reshape(-1) * x.shape[0]).cumsum(0)[: x.shape[0] + 1] + x.T.contiguous().sum()


def test_sizes_after_the_first_compile_once_for_all() -> None:
    with count("Compile") as compiles:
        each(many_views, batches([5] * 4))
        assert compiles() == 1
        each(many_views, batches(shuffled(range(2, 12), 4)))
    assert compiles() == 2


CONDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a power of a size": lambda n, m: n < 10.0 * torch.sym_float(m) ** 0.145,
    "a quotient": lambda n, m: n / m < 1.5,
    "a floor": lambda n, m: math.floor(n * 0.7) < m,
    "a ceiling": lambda n, m: math.ceil(n * 0.7) < m,
    "a truncated product": lambda n, m: math.trunc(n * 0.7) < m,
    "the larger size": lambda n, m: torch.sym_max(n, m) < 9,
    "a sum": lambda n, m: torch.sym_sum([n, m, 2 * n]) < 20,
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_on_sizes_are_evaluated_as_the_compiler_means_them(name: str) -> None:
    for hints in ((5, 7), (11, 3)):
        environment, symbols = symbols_with(hints)
        wanted = bool(CONDITIONS[name](*symbols))  # a guard of the environment from now on
        guards = compile(environment.produce_guards_expression(symbols), "<guards>", "eval")
        for sizes in ((5, 7), (11, 3), (9, 8), (4, 4), (30, 20)):
            assert guards_hold(guards, sizes) is (CONDITIONS[name](*sizes) is wanted)


def test_operators_that_choose_by_a_float_of_sizes() -> None:
    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return torch.isin(x.to(device).round(), torch.arange(float(x.shape[0] % 3 + 1), device=device))

    config.backend = "aot_eager_decomp_partition"
    each(step, batches(shuffled(range(2, 9), 3)))
    assert metrics.counter_value("CompileFailed") == 0


def test_norms_of_several_dtypes_compile_once_for_all_sizes() -> None:
    """What a norm gives is found out with the sizes of a sample. See Note [Dtypes of decompositions]."""
    config.backend = "aot_eager_decomp_partition"

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        low = x.to(device).bfloat16()
        wide = torch.ones(6, device=device)
        return torch.native_group_norm(low, wide, wide, low.shape[0], 6, 1, 2, 1e-5)[1] + 1

    with count("Compile") as compiles, count("CompileFailed") as failures:
        for made in batches(shuffled(range(2, 9), 4)):
            torch.testing.assert_close(step("lazy", made).cpu(), step("cpu", made))
    assert compiles() <= 2
    assert failures() == 0


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_many_sizes_from_the_start_compile_once(first_sight: str) -> None:
    """As in generating text token by token, again and again."""
    config.first_sight = first_sight
    with count("Compile") as compiles:
        for _ in range(8):
            each(many_views, batches(range(2, 12)))
    assert compiles() == 1


def test_one_of_many_sizes_that_recurs_alone_is_compiled() -> None:
    with count("Compile") as compiles:
        each(many_views, batches(range(2, 12)))
        each(many_views, batches([5] * 8))
        assert compiles() == 1
        each(many_views, batches(shuffled(range(2, 12), 4)))
    assert compiles() == 2


def test_one_of_many_sizes_that_no_guess_fits_is_compiled() -> None:
    config.max_dynamic_shapes = 0
    with count("Compile") as compiles, pytest.warns(CompileWarning, match="came back with"):
        each(many_views, batches([3, 5, 9, 6] * 8))
    assert compiles() == 1


def test_a_float_that_follows_the_size_costs_no_compile() -> None:
    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device).sum(0) / x.shape[0] ** 1.5

    with count("Compile") as compiles:
        for _ in range(4):
            each(step, batches(range(2, 12)))
    assert compiles() == 1


def test_a_size_of_one_is_right() -> None:
    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return (x.to(device).T @ x.to(device)).softmax(-1)

    each(step, batches(shuffled([1, 2, 3, 4], 4)))


def test_training_with_changing_sizes_and_rates() -> None:
    """AdamW with a schedule: sizes and floats change at once."""

    def losses(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        found = []
        for x in batches(shuffled(range(2, 8), 6)):
            loss = model(x.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if device == "lazy":
                lazy_backend.mark_step()
            found.append(loss.detach())
        return [*found, *model.state_dict().values()]

    with count("Compile") as compiles:
        lazily = losses("lazy")
    assert compiles() <= 3
    assert_same(lazily, losses("cpu"))


def test_a_position_that_moves_is_a_symbol() -> None:
    """A cache that is filled place by place."""

    def run(device: str) -> list[torch.Tensor]:
        cache = torch.zeros(4, 12).to(device)
        found = []
        for _ in range(3):
            for position in range(2, 12):
                cache[:, position] = cache[:, position - 1] * 0.5 + position
                found.append(cache[:, :position].sum(1))
                if device == "lazy":
                    lazy_backend.mark_step()
        return [*found, cache]

    expected = run("cpu")
    with count("Compile") as compiles:
        assert_same(run("lazy"), expected)
    assert compiles() <= 3


def test_a_wrong_guess_costs_a_compile_and_no_result() -> None:
    """Batch and length double together at first; then they do not."""

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        x = x.to(device)
        return (x * 2).reshape(-1).cumsum(0)

    inputs = [
        torch.randn(b, n) for b, n in ((2, 4), (2, 4), (4, 8), (4, 8), (4, 8), (3, 9), (3, 9), (5, 2), (5, 2), (5, 2))
    ]
    with count("Compile") as compiles:
        each(step, inputs)
    assert compiles() <= 3


@pytest.mark.parametrize("wrong", [1, -1, 7])
def test_planted_wrong_guesses_are_never_used(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every multiple that is guessed is off by `wrong`: no number fits, so no symbolic plan runs."""
    guessed = shapes._line

    def off(vector: Sequence[int], base: Sequence[int]) -> tuple[int, int] | None:
        line = guessed(vector, base)
        return None if line is None else (line[0], line[1] + wrong)

    monkeypatch.setattr(shapes, "_line", off)

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device).reshape(-1).mul(3).reshape(-1, 2).sum(0)

    each(step, batches(shuffled(range(2, 8), 4)))


def test_past_the_limits_graphs_are_interpreted() -> None:
    config.max_static_shapes = 0
    config.max_dynamic_shapes = 0

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device).exp()

    with count("Compile") as compiles, pytest.warns(CompileWarning):
        each(step, batches(shuffled([2, 3, 4], 4)))
    assert compiles() == 0
    assert {state.plan for state in computation.get_debug_states().values()} == {"fallback"}


def unrelated(count: int) -> list[torch.Tensor]:
    """Matrices of `count` shapes, each three times, whose rows and columns have nothing to do with each other."""
    return [made for n in range(count) for made in [torch.ones(2 + n, 3 + (3 * n) % 7)] * 3]


def test_limits_that_are_passed_warn_once_with_the_line() -> None:
    config.max_symbols = 1
    here = sys._getframe().f_code

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device).exp().sum(0)

    with pytest.warns(CompileWarning, match="of 2 nodes came back with 2 shapes") as caught:
        each(step, unrelated(8))
    (warning,) = caught
    assert warning.filename == here.co_filename
    for part in ("max_static_shapes = 1, max_dynamic_shapes = 3, max_symbols = 1", "buckets, or raise", "max_symbols"):
        assert part in str(warning.message)
    assert "fallback" in {state.plan for state in computation.get_debug_states().values()}


def test_within_the_limits_nothing_warns() -> None:
    """Warnings are errors in tests."""

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device).exp().sum(0)

    each(step, unrelated(8))
    assert {state.plan for state in computation.get_debug_states().values()} == {"optimized"}


def test_a_size_of_one_beside_one_other_size_is_compiled() -> None:
    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device).exp()

    with count("Compile") as compiles:
        each(step, batches([2] * 4 + [1] * 4))
    assert compiles() == 2
    assert {state.plan for state in computation.get_debug_states().values()} == {"optimized"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compilers_take_symbols(backend: str) -> None:
    config.backend = backend

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        x = x.to(device)
        return (x.reshape(-1) * 2).reshape(x.shape).softmax(0).sum(1)

    with count("Compile") as compiles, count("CompileFailed") as failures:
        for x in batches(shuffled([2, 3, 5, 8, 13], 4)):
            made = step("lazy", x)
            lazy_backend.mark_step()
            torch.testing.assert_close(made.cpu(), step("cpu", x))
    assert (compiles(), failures()) == (2, 0)


@pytest.mark.parametrize("sizes", [(2, 3, 4), (2, 1)])
def test_a_repeated_shape_is_checked_once(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step compares thousands of numbers, and a guess more: not at every sync."""

    def step(device: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(device).reshape(-1) * 2

    each(step, batches([size for size in sizes for _ in range(4)]))
    looked: list[str] = []
    bind, generalise = shapes.Sizes.bind, families.generalise
    monkeypatch.setattr(shapes.Sizes, "bind", lambda self, numbers: looked.append("bind") or bind(self, numbers))
    monkeypatch.setattr(families, "generalise", lambda *given: looked.append("guess") or generalise(*given))
    each(step, batches([size for size in sizes for _ in range(3)]))
    assert looked == []
