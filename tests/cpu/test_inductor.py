"""Whole training steps through Inductor: few, since each costs a compile, but deep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import NoSync, assert_same
from random_programs import random_chains
from test_training import losses, start
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import metrics


@pytest.fixture(autouse=True)
def inductor() -> None:
    lazy_backend.config.backend = "inductor"


@pytest.mark.scenario
@pytest.mark.parametrize(("model", "optimizer"), [("mlp", "adamw"), ("cnn", "momentum"), ("gpt", "adam_foreach")])
def test_losses_are_near_eagers(model: str, optimizer: str) -> None:
    expected = losses(start(model, optimizer, "cpu"), 6)
    assert losses(start(model, optimizer, "lazy"), 6) == pytest.approx(expected, rel=1e-4)
    assert metrics.counter_value("CompileFailed") == 0
    assert 1 <= metrics.counter_value("Compile") <= 2


def runs(program: Callable[[], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The values of three runs: interpreted, compiled, compiled again."""
    found = []
    for _ in range(3):
        results = program()
        lazy_backend.mark_step()
        found.append([result.cpu() for result in results])
    assert metrics.counter_value("Compile") >= 1
    return found


def test_views_and_writes() -> None:
    kept = torch.arange(12.0).to("lazy").reshape(3, 4)
    row = kept[1]
    lazy_backend.mark_step()

    def program() -> list[torch.Tensor]:
        kept.zero_()
        row.add_(1)
        kept.t()[2].mul_(5)
        made = kept + 1
        part = made[:, 1:3]
        part.copy_(kept[:, :2])
        same, twin = kept * 2, kept * 2
        same.add_(1)
        return [kept, row, made, part, same, twin]

    first, *rest = runs(program)
    for again in rest:
        assert all(map(torch.equal, first, again))


def test_dropout_and_attention() -> None:
    torch.manual_seed(0)
    projection = nn.Linear(8, 8).to("lazy")
    x = torch.randn(2, 2, 4, 8, device="lazy")

    def program() -> list[torch.Tensor]:
        torch.manual_seed(1)
        attended = F.scaled_dot_product_attention(projection(x), x, x, is_causal=True)
        out = F.dropout(attended, 0.5)
        projection.weight.grad = None
        out.sum().backward()
        return [out.detach(), projection.weight.grad, torch.randn(3, device="lazy")]

    first, *rest = runs(program)
    for again in rest:
        for one, other in zip(first, again, strict=True):
            torch.testing.assert_close(one, other)


def scattered(device: str) -> list[torch.Tensor]:
    """New values made of tensors that are overwritten: inductor 2.13 by itself writes them where these lie."""
    kept = [torch.arange(24.0).reshape(6, 4).to(device, copy=True) for _ in range(6)]
    index = torch.tensor([0, 2], device=device)
    lazy_backend.mark_step()
    clone, cast, joined, put, twice, both = kept
    new = [clone.clone(), cast.double().float(), torch.cat([joined]), put.index_put((index,), put[:2] * 2)]
    for x in (clone, cast, joined):
        x.add_(1)
    for x in new[:3]:
        x[2] = -1
    put.zero_()
    before = both.clone()
    twice.index_put_((index,), torch.ones(4, device=device)).index_put_((index[:1],), torch.zeros(4, device=device))
    both[1] = 7
    before[3] = 5
    return [*kept, *new, before]


def test_what_is_made_of_an_overwritten_tensor_keeps_its_own_memory() -> None:
    expected = [result.clone() for result in scattered("cpu")]
    for _ in range(3):
        results = scattered("lazy")
        lazy_backend.mark_step()
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one.cpu(), other)
    assert metrics.counter_value("Compile") >= 1
    assert metrics.counter_value("CompileFailed") == 0


def laid_out(device: str) -> list[torch.Tensor]:
    """Views that eager's strides allow, of results that inductor 2.13 by itself lays out otherwise."""
    odd = torch.arange(128.0).reshape(2, 8, 4, 2).to(device).transpose(1, 2)
    joined = torch.cat([torch.empty(0, device=device), odd])  # contiguous; as its decomposition has it, as `odd` is
    permuted = joined.permute(3, 0, 1, 2).clone()
    scaled = torch.cat([torch.empty(0, device=device), odd * 3]) * 0.5
    return [
        (joined.transpose(-2, -1) * 2).view(8, 2, 8),
        joined.sin().as_strided((3, 5), (7, 2), 3) + 1,
        permuted.as_strided((3, 5), (7, 2), 3) * 2,
        scaled.as_strided((2, 64), (64, 1)).cos(),
        torch.as_strided_copy(scaled * 2, (3, 5), (7, 2), 3),
        torch.as_strided_scatter(scaled.exp(), odd[0, 0, :3, :2], (3, 2), (7, 2), 3),
        torch.ops.aten._reshape_alias(joined.neg(), [8, 16], [16, 1]),
    ]


def test_views_see_memory_as_it_was_recorded() -> None:
    expected = laid_out("cpu")
    for _ in range(3):
        results = laid_out("lazy")
        lazy_backend.mark_step()
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)
    assert metrics.counter_value("Compile") >= 1
    assert metrics.counter_value("CompileFailed") == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lazy_backend.CompileWarning")
def test_chains_of_views_equal_eager() -> None:
    for seed in (30001, 30002, 30003):
        program = random_chains(seed)
        for _ in range(3):
            assert_same(program.run("lazy", lazy_backend.mark_step), program.run("cpu", NoSync()))
