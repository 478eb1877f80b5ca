"""The examples, for a few steps: their losses are eager's, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import lazy_backend

EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")


@pytest.fixture(autouse=True)
def examples_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["example"])


def test_digits() -> None:
    import common
    import train_digits

    runs = [train_digits.train(device, epochs=1) for device in ("lazy", "cpu")]
    assert common.compare(*runs).equal
    assert lazy_backend.metrics.counter_value("Compile") <= 3


def test_gpt() -> None:
    import common
    import train_gpt

    runs = [train_gpt.train(device, steps=12) for device in ("lazy", "cpu")]
    assert common.compare(*runs).equal
    assert lazy_backend.metrics.counter_value("Compile") <= 3


def test_serve() -> None:
    import serve

    outcome = serve.run(threads=4, requests=50, swaps=10)
    assert outcome.wrong == 0
    assert outcome.frames <= 4
