"""Steps that differ in what is still held at the sync."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same, count

import lazy_backend
from lazy_backend import computation


def activations(device: str) -> list[torch.Tensor]:
    x = torch.arange(6.0).to(device)
    return [x + 1, x * 2, x.cumsum(0), x.exp(), x.neg(), x.square()]


def keeping(*places: int) -> None:
    """One step that holds the activations at `places` beyond its sync, and compares them with eager's."""
    made = activations("lazy")
    held = [made[place] for place in places]
    del made
    lazy_backend.mark_step()
    expected = activations("cpu")
    assert_same(held, [expected[place] for place in places])


def test_a_few_outputs_more_than_wanted_are_a_hit() -> None:
    keeping(0, 1, 2)
    with count("UncachedCompile") as misses:
        keeping(0, 2)
        keeping(1)
        keeping(0, 1, 2)
    assert misses() == 0


def test_many_more_are_not() -> None:
    keeping(0, 1, 2, 3, 4, 5)
    with count("UncachedCompile") as misses:
        keeping(3)
    assert misses() == 1


def test_live_sets_that_keep_differing_share_one_computation() -> None:
    for place in range(6):
        keeping(place)
    with count("UncachedCompile") as misses, count("Compile") as compiles:
        for place in (3, 1, 5, 0, 4, 2):
            keeping(place)
            keeping(place, (place + 1) % 6) if place < 5 else keeping(0, 5)
    assert misses() <= 1
    assert compiles() <= 2


def test_an_output_nobody_holds_is_freed_at_once() -> None:
    keeping(0, 1, 2)
    before = lazy_backend.metrics.counter_value("CreateLtcTensor") - lazy_backend.metrics.counter_value(
        "DestroyLtcTensor"
    )
    keeping(0)
    after = lazy_backend.metrics.counter_value("CreateLtcTensor") - lazy_backend.metrics.counter_value(
        "DestroyLtcTensor"
    )
    assert after == before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_plans_drop_them_too(backend: str) -> None:
    lazy_backend.config.backend = backend
    for places in ((0, 1, 2), (0, 1, 2), (0, 2), (1,), (0, 2), (0, 1, 2)):
        keeping(*places)
    assert len(computation.get_cached_computations()) == 1
