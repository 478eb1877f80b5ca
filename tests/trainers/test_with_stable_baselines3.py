"""stable-baselines3 on device="lazy", with steps that end by themselves: eager's losses; the reads that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import count

import lazy_backend
from lazy_backend import config


@pytest.fixture(autouse=True)
def steps_end_with_the_optimizers() -> Iterator[None]:
    with config.patch(mark_steps="auto"):
        yield


def environment() -> Any:
    import gymnasium

    class Balance(gymnasium.Env[Any, Any]):
        """A point to be kept near zero, pushed left or right; nothing is random but where it starts."""

        observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self.state = self.np_random.uniform(-1, 1, 2).astype(np.float32)
            self.steps = 0
            return self.state, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            place, speed = self.state
            speed = np.float32(speed * 0.9 + (0.1 if action else -0.1))
            self.state = np.array([place + speed, speed], np.float32)
            self.steps += 1
            return self.state, 1 - abs(float(place)), abs(place) > 2, self.steps == 20, {}

    return Balance()


def losses_of(algorithm: str, device: str, steps: int, **options: Any) -> list[dict[str, float]]:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    found: list[dict[str, float]] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            values = {name: float(value) for name, value in self.logger.name_to_value.items() if "train/" in name}
            if values and (not found or found[-1] != values):
                found.append(values)
            return True

    kind = getattr(stable_baselines3, algorithm)
    model = kind("MlpPolicy", environment(), policy_kwargs={"net_arch": [8]}, seed=0, device=device, **options)
    model.learn(steps, callback=Watch(), log_interval=10_000)
    return found


def cuts_by_line() -> dict[str, int]:
    """How often each file of the package cut a graph."""
    found: dict[str, int] = {}
    for name, number in lazy_backend.metrics.counters().items():
        if name.startswith("GraphCut: "):
            file = name.rsplit("/", 1)[-1].split(":")[0]
            found[file] = found.get(file, 0) + number
    return found


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) > 2
    for values, others in zip(found, expected, strict=True):
        assert values == pytest.approx(others, rel=1e-4, abs=1e-6)


def test_dqn_trains_as_in_eager() -> None:
    options = {"learning_starts": 16, "train_freq": 4, "batch_size": 8, "target_update_interval": 20}
    expected = losses_of("DQN", "cpu", 120, **options)
    with count("UncachedCompile") as misses:
        assert_close(losses_of("DQN", "lazy", 120, **options), expected)
    assert misses() <= 12
    # a step's loss; an action's number
    assert cuts_by_line().keys() <= {"dqn.py", "policies.py"}
    assert cuts_by_line()["dqn.py"] <= 26


def test_ppo_trains_as_in_eager_mode() -> None:
    """Which draws the same random numbers, as the CPU's generator does not."""
    options = {"n_steps": 32, "batch_size": 16, "n_epochs": 2}
    with lazy_backend.eager_mode():
        expected = losses_of("PPO", "lazy", 160, **options)
    lazy_backend.metrics.reset()
    with count("UncachedCompile") as misses:
        assert_close(losses_of("PPO", "lazy", 160, **options), expected)
    assert misses() <= 40
    updates = 5 * 2 * 2
    cuts = cuts_by_line()
    assert cuts.keys() <= {"ppo.py", "on_policy_algorithm.py", "buffers.py", "distributions.py"}
    assert cuts["ppo.py"] <= 6 * updates + 5  # the parts of the loss, read before its backward
