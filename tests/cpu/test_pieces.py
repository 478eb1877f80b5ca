"""Flat memory that a step writes piece by piece, as the buckets of gradients of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import assert_same, count

import lazy_backend
from lazy_backend import config
from lazy_backend.computation import get_cached_computations
from lazy_backend.lowering.ir.windows import written_in_pieces

Write = Callable[[torch.Tensor, torch.Tensor], object]


def write_all(flat: torch.Tensor, sources: list[torch.Tensor], write: Write) -> None:
    place = 0
    for source in sources:
        write(flat[place : place + source.numel()].view(source.shape), source)
        place += source.numel()


def sources(device: str) -> list[torch.Tensor]:
    made = [torch.arange(6.0).view(2, 3), torch.arange(8.0), torch.arange(10.0).view(5, 2).t().contiguous().t()]
    return [one.to(device) for one in made]


WRITES: dict[str, Write] = {
    "out": lambda piece, source: torch.mul(source, 0.5, out=piece),
    "copied": lambda piece, source: piece.copy_(source * 2),
    "cast": lambda piece, source: piece.copy_(source.to(torch.int64)),
    "broadcast": lambda piece, source: piece.copy_(source.sum()),
}


def step(device: str, write: Write, number: float) -> list[torch.Tensor]:
    flat = torch.zeros(24, device=device) + number
    write_all(flat, sources(device), write)
    flat.mul_(2)  # all of it is used
    flat[3:9].add_(number)  # and one window written, which is no piece
    first = flat * 1
    write_all(flat, sources(device)[::-1], write)
    again = flat[6:14] + 1
    flat[0:12].copy_(again.sum())  # half of it
    return [first, again, flat]


@pytest.mark.filterwarnings("error::lazy_backend.CompileWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_is_written_is_there(backend: str) -> None:
    config.backend = backend
    for write in WRITES.values():
        for number in range(3):
            found = step("lazy", write, float(number))
            lazy_backend.mark_step()
            assert_same(found, step("cpu", write, float(number)))


def test_memory_from_outside_and_floats_that_change() -> None:
    config.backend = "aot_eager"
    flats = {device: torch.zeros(24, device=device) for device in ("lazy", "cpu")}
    with count("CompileFailed") as failures:
        for number in range(6):
            for device, flat in flats.items():
                scale = 0.5 + number
                write_all(flat, sources(device), lambda piece, one, scale=scale: torch.mul(one, scale, out=piece))
                flat.mul_(2)
            lazy_backend.mark_step()
            assert_same(flats["lazy"], flats["cpu"])
    assert failures() == 0


def pieces_found(program: Callable[[torch.Tensor, torch.Tensor], object]) -> list[int]:
    """How many pieces each memory has that `program` writes piece by piece."""
    flat, source = torch.zeros(8, device="lazy"), torch.ones(4, device="lazy")
    kept = program(flat, source)
    lazy_backend.mark_step(wait=True)
    del kept
    (graph,) = [one.graph for one in get_cached_computations()]
    return [len(one.writes) for one in written_in_pieces(graph)]


def halves(flat: torch.Tensor, source: torch.Tensor) -> None:
    flat[:4].copy_(source)
    flat[4:].copy_(source * 2)


def test_which_memory_is_written_piece_by_piece() -> None:
    assert pieces_found(halves) == [2]


@pytest.mark.parametrize(
    "program",
    [
        lambda flat, source: flat[:4].copy_(source),
        lambda flat, source: (flat[:4].copy_(source), flat[2:6].copy_(source)),
        lambda flat, source: (flat[:4].copy_(source), flat[4:].copy_(flat[:4])),
        lambda flat, source: (flat[:4].copy_(source), flat.sum() * 1, flat[4:].copy_(source)),
        lambda flat, source: (flat[:4].add_(source), flat[4:].copy_(source)),
        lambda flat, source: (torch.mul(flat[:4], 2, out=flat[:4]), flat[4:].copy_(source)),
        lambda flat, source: (flat[::2].copy_(source), flat[1::2].copy_(source)),
        lambda flat, source: flat.copy_(source.repeat(2)),
    ],
    ids=["half", "overlapping", "read from", "read between", "added to", "in place", "with gaps", "whole"],
)
def test_which_memory_is_not(program: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    assert pieces_found(program) == []
