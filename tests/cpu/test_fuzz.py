"""Random programs of views, writes and reads, with cuts at random places, against eager."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from harness import assert_same, count

import lazy_backend
from lazy_backend import config

Tensors = list[torch.Tensor]
Choose = random.Random


def a_view(choose: Choose, x: torch.Tensor) -> torch.Tensor:
    """A random view of `x`; its shape depends on `x`'s only."""
    dim = choose.randrange(max(x.dim(), 1))
    if not x.dim() or not x.numel():
        return x.unsqueeze(0)
    size = x.shape[dim]
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: x.transpose(0, dim),
        lambda: x.narrow(dim, choose.randrange(size), 1) if size else x.detach(),
        lambda: x.select(dim, choose.randrange(size)),
        lambda: x[choose.randrange(size) if dim == 0 else slice(None)],
        lambda: x.unsqueeze(dim),
        lambda: x.squeeze(),
        lambda: x.detach(),
        lambda: x.view(x.shape),
        lambda: x.flatten() if x.is_contiguous() else x.t() if x.dim() <= 2 else x.permute(*reversed(range(x.dim()))),
        lambda: x.as_strided((2,), (1,), x.storage_offset()) if x.numel() > 1 and x.is_contiguous() else x.view_as(x),
        lambda: x.diagonal() if x.dim() == 2 else x.movedim(0, -1),
        lambda: choose.choice(x.split(max(1, size // 2), dim)),
        lambda: choose.choice(x.unbind(dim)),
        lambda: x[::2] if x.dim() else x,
        lambda: x.unfold(dim, 2, 1).select(dim, 0) if size >= 2 else x.expand_as(x),
        lambda: x.view(torch.int32).view(torch.float32),
    ]
    return choose.choice(kinds)()


def a_write(choose: Choose, x: torch.Tensor, other: torch.Tensor) -> None:
    """Write into `x` in a random way."""
    scalar = choose.choice([0.5, 2.0, -1.25, 3])
    kinds: list[Callable[[], object]] = [
        lambda: x.add_(scalar),
        lambda: x.mul_(scalar),
        lambda: x.copy_(other.detach().clone().sum()),
        lambda: x.zero_(),
        lambda: x.fill_(scalar),
        lambda: x.clamp_(-5, 5),
        lambda: x.masked_fill_(x > 1, scalar),
        lambda: x.copy_(x.clone().neg()),
        lambda: x.add_(x.detach().clone(), alpha=scalar),
        lambda: torch._foreach_add_([x], [scalar]),
        lambda: torch.mul(x.clone(), scalar, out=x),
        lambda: x.__setitem__(..., scalar),
        lambda: x.data.add_(scalar),
        lambda: x.tanh_(),
    ]
    choose.choice(kinds)()


def a_result(choose: Choose, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: x * 2,
        lambda: x + other.sum(),
        lambda: x.clone(),
        lambda: torch.cat([x.reshape(-1), other.reshape(-1)])[:6],
        lambda: x.contiguous(),
        lambda: x.reshape(-1),
        lambda: x.cumsum(0) if x.dim() else x.exp(),
        lambda: torch.where(x > 0, x, 0.5),
        lambda: x.new_zeros(2, 3),
        lambda: x.to(torch.float64).to(torch.float32),
        lambda: torch.stack([x, x]) if x.numel() < 30 else x.abs(),
    ]
    return choose.choice(kinds)()


def run_program(seed: int, device: str, sync: Callable[[], None], steps: int = 24) -> Tensors:
    """Every random choice depends on the seed and on shapes, so both devices run the same program."""
    choose = random.Random(seed)
    pool: Tensors = [
        torch.arange(12.0).reshape(3, 4).to(device, copy=True),
        torch.arange(6.0).to(device, copy=True),
        torch.ones(2, 3, device=device),
    ]
    for _ in range(steps):
        x, other = choose.choice(pool), choose.choice(pool)
        action = choose.random()
        if action < 0.4:
            pool.append(a_view(choose, x))
        elif action < 0.75:
            a_write(choose, x, other)
        elif action < 0.88:
            pool.append(a_result(choose, x, other))
        elif len(pool) > 3:
            pool.pop(choose.randrange(len(pool)))
        if choose.random() < 0.3:
            sync()
        del x, other
    return pool


def both(seed: int, sync: Callable[[], None]) -> tuple[Tensors, Tensors]:
    return run_program(seed, "lazy", sync), run_program(seed, "cpu", lambda: None)


@pytest.mark.parametrize("seed", range(150))
def test_random_programs_equal_eager(seed: int) -> None:
    assert_same(*both(seed, lazy_backend.mark_step))


@pytest.mark.parametrize("seed", range(150, 200))
def test_random_programs_in_one_trace_equal_eager(seed: int) -> None:
    assert_same(*both(seed, lambda: None))


# AOTAutograd refuses some writes to overlapping windows; then the graph is interpreted
@pytest.mark.filterwarnings("ignore::lazy_backend.CompileWarning")
@pytest.mark.parametrize("seed", range(200, 260))
def test_random_programs_compiled_equal_eager(seed: int) -> None:
    config.backend = "aot_eager"
    for _ in range(3):
        assert_same(*both(seed, lazy_backend.mark_step))


@pytest.mark.parametrize("seed", range(260, 300))
def test_random_programs_run_again_hit_the_cache(seed: int) -> None:
    run_program(seed, "lazy", lazy_backend.mark_step)
    lazy_backend.mark_step()
    with count("UncachedCompile") as misses:
        assert_same(*both(seed, lazy_backend.mark_step))
    assert misses() <= 1  # the read at the end cuts what the first run ended with mark_step


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_programs_equal_eager(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        assert_same(*both(seed, lazy_backend.mark_step))
