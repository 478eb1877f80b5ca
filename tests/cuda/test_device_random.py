"""Random numbers on the device: the seed decides them, whoever runs the graph."""

from __future__ import annotations

import pytest
import torch
from backing import BACKING, assert_launched, graphs, losses_of, needs_gpu
from harness import as_bytes, assert_same
from torch import nn

import lazy_backend
from lazy_backend import config

STEPS = 14

# In how many ways a step may run: its settings, and whether graphs of the device are on.
PLANS = {
    "interpreted": ({"compile": "off"}, "off"),
    "compiled": ({"compile": "foreground", "backend": "aot_eager"}, "off"),
    "launched, interpreted": ({"compile": "off"}, "auto"),
    "launched, compiled": ({"compile": "foreground", "backend": "aot_eager"}, "auto"),
}


def drawn(plan: str, seed: int) -> list[torch.Tensor]:
    """What some random operators draw in each of several steps."""
    settings, mode = PLANS[plan]
    with config.patch(**settings), graphs(mode):
        torch.manual_seed(seed)
        x = torch.ones(64, device="lazy")
        kept = []
        for _ in range(STEPS):
            kept += [nn.functional.dropout(x, 0.5), torch.randn(16, device="lazy") + 1, torch.rand_like(x) * 2]
            lazy_backend.mark_step()
        return [one.cpu() for one in kept]


@pytest.mark.parametrize("plan", PLANS)
def test_the_same_seed_gives_the_same_numbers_in_every_plan(plan: str) -> None:
    assert_same(drawn(plan, 7), drawn("interpreted", 7))


@pytest.mark.parametrize("plan", PLANS)
def test_each_step_and_each_seed_draws_others(plan: str) -> None:
    assert len({as_bytes(one) for one in drawn(plan, 7) + drawn(plan, 8)}) == 2 * 3 * STEPS


@needs_gpu
def test_compiled_by_inductor_too() -> None:
    """Its kernels have generators of their own; the seed contract holds for them as well."""
    PLANS["inductor"] = ({"compile": "foreground", "backend": "inductor"}, "auto")
    try:
        assert_same(drawn("inductor", 7), drawn("interpreted", 7))
    finally:
        del PLANS["inductor"]


@pytest.mark.parametrize("way", ["plain", "parts", "captured"])
def test_dropout_in_a_training(way: str) -> None:
    """The same seed gives the same losses in another training, which launches what one before it captured.

    The very first one is interpreted until its plans are there. CUDA has a kernel of its own for dropout then, which
    rounds otherwise than the operators that the plans have.
    """
    with config.patch(backend="aot_eager"), graphs("auto"):
        first, second, third = (losses_of("gpt", way, 30) for _ in range(3))
        assert_launched()
    assert second[0] == third[0]
    assert first[0] == pytest.approx(second[0], rel=1e-4) if BACKING == "cuda" else first[0] == second[0]


def test_seeding_between_launches() -> None:
    with graphs("auto"):
        draws = []
        for number in range(30):
            torch.manual_seed(number % 3)
            draws.append(torch.rand(8, device="lazy") + 1)
            lazy_backend.mark_step()
        found = [as_bytes(one.cpu()) for one in draws]
    assert len(set(found)) == 3
    assert found == found[:3] * 10


def test_eagers_generator_is_left_alone() -> None:
    """Steps draw from seeds of their own: what eager draws between them depends on the seed alone."""

    def draw(steps: int) -> list[float]:
        torch.manual_seed(3)
        before = torch.rand(2, device=BACKING)
        with graphs("auto"):
            for _ in range(steps):
                torch.rand(4, device="lazy").add_(1)
            lazy_backend.mark_step(wait=True)
        state = torch.cuda.get_rng_state() if BACKING == "cuda" else None
        after = [] if BACKING == "cpu" else torch.rand(2, device=BACKING).tolist()
        assert state is None or state.numel()
        return before.tolist() + after

    assert draw(0) == draw(9)
