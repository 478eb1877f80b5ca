"""Which elements tensors of one storage share, and windows as chains of views, against the elements themselves."""

from __future__ import annotations

import random

import pytest
import torch

from lazy_backend.lowering.ir.graph import TensorMeta, extent, intern_meta, meta_of
from lazy_backend.lowering.ir.overlap import overlap, overlaps_itself, same_window
from lazy_backend.lowering.ir.windows import chain_to


def elements(meta: TensorMeta) -> list[int]:
    places = torch.arange(extent(meta) + 1).as_strided(meta.shape, meta.stride, meta.storage_offset)
    return places.reshape(-1).tolist()


def random_meta(choose: random.Random) -> TensorMeta:
    dims = range(choose.randrange(4))
    shape = tuple(choose.choice((0, 1, 2, 3, 4, 4, 5)) for _ in dims)
    stride = tuple(choose.choice((0, 1, 2, 3, 5, 8, 12, 20)) for _ in dims)
    dtype = choose.choice((torch.float32, torch.float32, torch.int16))
    return intern_meta(shape, stride, choose.randrange(30), dtype)


def bytes_of(meta: TensorMeta) -> list[int]:
    width = meta.dtype.itemsize
    return [place * width + byte for place in elements(meta) for byte in range(width)]


@pytest.mark.parametrize("seed", range(10))
def test_overlaps_are_exact(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(300):
        one, other = random_meta(choose), random_meta(choose)
        if choose.random() < 0.5:
            other = intern_meta(one.shape, one.stride, choose.randrange(40), one.dtype)
        places = elements(one)
        assert overlaps_itself(one) == (len(set(places)) < len(places)), one
        assert overlap(one, other) == (not set(bytes_of(one)).isdisjoint(bytes_of(other))), (one, other)
        assert not same_window(one, other) or bytes_of(one) == bytes_of(other), (one, other)


def test_large_windows_are_compared_by_their_inner_dimensions() -> None:
    rows = intern_meta((1 << 20, 64), (128, 1), 0, torch.float32)
    assert not overlaps_itself(rows)
    assert not overlap(rows, intern_meta((1 << 20, 64), (128, 1), 64, torch.float32))
    assert overlap(rows, intern_meta((1 << 20, 64), (128, 1), 63, torch.float32))


def test_what_no_rule_decides_counts_as_overlapping() -> None:
    one = intern_meta((1 << 20, 1 << 10), (1024, 1025), 0, torch.float32)
    assert overlaps_itself(one)


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_leads_to_the_window(seed: int) -> None:
    choose = random.Random(seed)
    chains = 0
    for _ in range(300):
        base = torch.arange(24).view(choose.choice(((24,), (2, 3, 4), (1, 24)))).clone()
        base = base.permute(choose.sample(range(base.dim()), base.dim()))
        dims = range(choose.randrange(4))
        shape = tuple(choose.choice((1, 2, 3, 4)) for _ in dims)
        stride = tuple(choose.choice((0, 1, 2, 3, 4, 6, 12)) for _ in dims)
        window = intern_meta(shape, stride, choose.randrange(12), torch.int64)
        chain = chain_to(meta_of(base), window)
        if chain is None or extent(window) > 24:
            assert chain is None or extent(window) <= 24
            continue
        chains += 1
        view = base
        for op, args, made in chain:
            view = op(view, *args)
            assert meta_of(view) is made
        assert meta_of(view) is window
        assert view.data_ptr() == base.data_ptr() + 8 * window.storage_offset
    assert chains > 50


def test_overlapping_windows_and_gapped_bases_have_no_chain() -> None:
    flat = intern_meta((24,), (1,), 0, torch.float32)
    assert chain_to(flat, intern_meta((4, 3), (2, 1), 0, torch.float32)) is None
    assert chain_to(flat, intern_meta((2, 3), (0, 1), 0, torch.float32)) is None
    assert chain_to(flat, intern_meta((0,), (1,), 0, torch.float32)) is None
    gapped = intern_meta((4, 3), (6, 1), 0, torch.float32)
    assert chain_to(gapped, intern_meta((2,), (1,), 0, torch.float32)) is None
