"""Trainers of other packages run in the test's process: importing them takes longer than training with them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazy_backend import config
from lazy_backend.settings import FLAGS

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples" / "trainers")
NEEDS = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "ignite": "ignite",
    "generation": "transformers",
    "serving": "transformers",
    "trl": "trl",
    "sentence_transformers": "sentence_transformers",
    "stable_baselines3": "stable_baselines3",
    "pytorch_optimizer": "pytorch_optimizer",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a package that is not installed; let other packages warn, but not ours."""
    for item in items:
        package = NEEDS.get(item.path.stem.removeprefix("test_with_"))
        if item.path.parent != Path(__file__).parent or package is None:
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.filterwarnings("error::lazy_backend.errors.LazyBackendWarning"))
        if importlib.util.find_spec(package) is None:
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))


@pytest.fixture(autouse=True)
def as_users_have_it(fresh_state: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Default settings but for the compiler, a folder of its own, and accelerate without a device."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    _forget_device()
    as_users = {"first_sight": "run", "run_in_background": "auto"}
    with config.patch(**as_users, compile_after_operators=FLAGS["compile_after_operators"].default):
        yield
    _forget_device()


def _forget_device() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
