"""What dies in a step is freed in it, whatever plan runs."""

from __future__ import annotations

import weakref

import pytest
import torch

import lazy_backend

watched: list[weakref.ref[torch.Tensor]] = []
alive: list[bool] = []


@torch.library.custom_op("lazy_test::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    """Notes, while the graph runs, whether the watched tensor is alive."""
    alive.append(watched[-1]() is not None)
    return x.clone()


@look.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def step(keep: bool) -> torch.Tensor | None:
    big = torch.ones(1000).to("lazy")
    watched.append(weakref.ref(big._data.storage.tensor))
    total = (big * 2).sum()
    kept = big if keep else None
    del big
    looked = look(total)
    lazy_backend.mark_step(wait=True)
    assert looked.item() == 2000
    return kept


@pytest.mark.parametrize("backend", ["interpreted", "eager", "aot_eager"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("where", ["always", "never"])
def test_an_input_lives_as_long_as_somebody_needs_it(backend: str, keep: bool, where: str) -> None:
    lazy_backend.config.run_in_background = where
    lazy_backend.config.compile = "off" if backend == "interpreted" else "foreground"
    lazy_backend.config.backend = "eager" if backend == "interpreted" else backend
    for _ in range(3):
        kept = step(keep)
        del kept
    assert alive[-3:] == [keep] * 3
