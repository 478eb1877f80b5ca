"""Views and in-place operators: a table of programs, each equal to eager wherever the trace is cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from harness import NoSync, Program, Sync, SyncAt, assert_like_eager, assert_same, count, eager, grid

import lazy_backend
from lazy_backend import config, metrics

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


# ----- a base and one view


@program
def base_mutated(device: str, sync: Sync):
    base = grid(device, 4, 6)
    view = base[1]
    sync()
    base.add_(1)
    sync()
    return base, view


@program
def view_mutated(device: str, sync: Sync):
    base = grid(device, 4, 6)
    view = base[1]
    sync()
    view.mul_(10)
    sync()
    return base, view


@program
def base_made_in_the_trace(device: str, sync: Sync):
    base = torch.arange(24.0, device=device).view(4, 6)
    view = base.t()
    sync()
    view[2].zero_()
    sync()
    base[0] = -1
    return base, view


@program
def both_mutated_in_turns(device: str, sync: Sync):
    base = grid(device, 4, 6)
    view = base[:, 2:4]
    base += 1
    sync()
    view *= 2
    sync()
    base -= 3
    sync()
    view += base[:, :2]
    return base, view


@program
def read_before_the_write(device: str, sync: Sync):
    base = grid(device, 4, 6)
    before = base[0] + 0
    sync()
    base[0] = 7
    sync()
    return before, base


@program
def base_dropped(device: str, sync: Sync):
    view = grid(device, 4, 6)[2, 1:4]
    sync()
    view.neg_()
    sync()
    return (view,)


@program
def view_dropped(device: str, sync: Sync):
    base = grid(device, 4, 6)
    base[2, 1:4].neg_()
    sync()
    return (base,)


# ----- chains


@program
def chain_of_views(device: str, sync: Sync):
    base = grid(device, 4, 6)
    chain = base.t()[1:5].reshape(4, 4)[::2]
    sync()
    chain.add_(100)
    sync()
    return base, chain


@program
def chain_mutated_in_the_middle(device: str, sync: Sync):
    base = grid(device, 2, 3, 4)
    middle = base.transpose(0, 2)
    last = middle[1:3, 0]
    sync()
    middle.mul_(3)
    sync()
    last.sub_(1)
    sync()
    return base, middle, last


@program
def view_of_a_view_after_sync(device: str, sync: Sync):
    base = grid(device, 4, 6)
    view = base[1:3]
    sync()
    inner = view[:, 1::2]
    sync()
    inner.fill_(9)
    sync()
    return base, view, inner


@program
def offsets_add_up(device: str, sync: Sync):
    base = grid(device, 10)
    view = base[2:][3:][1:4]
    sync()
    view += 1
    return base, view, view[1:]


# ----- two views of one storage used later


@program
def overlapping_views_mutated_later(device: str, sync: Sync):
    base = grid(device, 8)
    left, right = base[:6], base[2:]
    sync()
    left.add_(right.clone())
    sync()
    right.mul_(2)
    sync()
    return left, right


@program
def overlapping_views_in_one_step(device: str, sync: Sync):
    base = grid(device, 8)
    left, right = base[:5], base[3:]
    sync()
    left.mul_(2)
    right.add_(1)
    left.sub_(0.5)
    total = left.sum() + right.sum()
    sync()
    return left, right, total


@program
def base_and_view_in_one_step(device: str, sync: Sync):
    base = grid(device, 4, 6)
    view = base[1:3].t()
    sync()
    base.add_(1)
    view.mul_(2)
    product = base @ view[:, :1]
    sync()
    return base, view, product


@program
def views_of_an_offset_upload(device: str, sync: Sync):
    base = torch.arange(12.0)[4:].to(device, copy=True)
    left, right = base[:4], base[2:6]
    sync()
    left += right.clone()
    return base, left, right


@program
def views_of_a_transposed_base(device: str, sync: Sync):
    base = torch.arange(12.0).reshape(3, 4).to(device).t()
    one, two = base[1], base[:, 1]
    sync()
    one.add_(two[0].clone())
    two.mul_(2)
    sync()
    return base, one, two


# ----- as_strided, set_, .data, detach, resize_


@program
def as_strided_overlap(device: str, sync: Sync):
    base = grid(device, 12)
    windows = base.as_strided((4, 3), (2, 1), 1)
    sync()
    base[3] = 50
    sync()
    windows[1].add_(1)
    return base, windows


@program
def as_strided_in_place(device: str, sync: Sync):
    base = grid(device, 12)
    other = base.view(12)
    base.as_strided_((2, 3), (1, 2), 3)
    sync()
    base.mul_(2)
    sync()
    return base, other


@program
def data_assigned(device: str, sync: Sync):
    target, source = grid(device, 2, 3), grid(device, 4, 5)
    target.data = source
    sync()
    target.add_(1)
    sync()
    return target, source


@program
def data_assigned_between_bits(device: str, sync: Sync):
    source = torch.complex(grid(device, 4), -grid(device, 4))
    targets = [source.conj().imag.detach(), source.conj(), source.real.detach(), torch.zeros(2, device=device)]
    sync()
    for target in targets:
        target.data = source.conj()
        sync()
        target.data = source.conj().imag if target.is_complex() else source
    source.add_(1)
    return source, *targets


@program
def data_mutated(device: str, sync: Sync):
    target = grid(device, 4, 6)
    view = target[0]
    sync()
    target.data.mul_(2)
    sync()
    target.data[1:3] -= 1
    return target, view


@program
def set_to_another_tensor(device: str, sync: Sync):
    target, source = grid(device, 2, 3), grid(device, 4, 5)
    sync()
    target.set_(source)
    sync()
    source.add_(1)
    return target, source


@program
def set_with_geometry(device: str, sync: Sync):
    target, source = grid(device, 2, 3), grid(device, 4, 5)
    target.set_(source, 2, (3, 2), (5, 1))
    sync()
    target.zero_()
    sync()
    return target, source


@program
def set_to_nothing(device: str, sync: Sync):
    target = grid(device, 2, 3)
    view = target[0]
    sync()
    target.set_()
    return target, view


@program
def detached_shares(device: str, sync: Sync):
    base = grid(device, 4, 6)
    detached = base.detach()
    sync()
    detached[0].add_(5)
    sync()
    base.mul_(2)
    return base, detached


@program
def resized_in_place(device: str, sync: Sync):
    base = grid(device, 4, 6)
    base.mul_(2)
    sync()
    base.resize_(3, 4)
    sync()
    base.add_(1)
    return (base,)


@program
def resized_while_viewed(device: str, sync: Sync):
    base = grid(device, 4, 6)
    view = base[1]
    sync()
    base.resize_(2, 6)
    sync()
    base.add_(1)
    return base, view


@program
def resized_views(device: str, sync: Sync):
    base = grid(device, 4, 6)
    smaller, shifted, same, flat = base[2:], base[1], base.t(), base.detach()
    sync()
    smaller.resize_(2, 3)
    shifted.resize_(4)
    same.resize_(3, 5)
    sync()
    flat.resize_(24)
    shifted.add_(1)
    sync()
    return base, smaller, shifted, same, flat


@program
def resized_beyond_the_memory(device: str, sync: Sync):
    base = grid(device, 2, 3)
    alias = base.detach()
    sync()
    alias.resize_(2, 4)
    alias[1, 2:].fill_(7)
    sync()
    nothing = torch.zeros(0, device=device)
    view = nothing.view(0)
    view.resize_(3)
    view.fill_(2)
    sync()
    return base, alias, nothing, view


# ----- parameters


@program
def view_of_a_parameter(device: str, sync: Sync):
    parameter = torch.nn.Parameter(grid(device, 4, 6))
    view = parameter.detach()[1]
    sync()
    with torch.no_grad():
        parameter.add_(1)
        sync()
        parameter[:, 0].zero_()
    sync()
    view.neg_()
    return parameter, view


@program
def slice_of_a_parameter_trained(device: str, sync: Sync):
    parameter = torch.nn.Parameter(grid(device, 4, 6))
    (parameter[1:3] ** 2).sum().backward()
    sync()
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    sync()
    return parameter, parameter.grad


# ----- other dtypes


@program
def view_as_another_dtype(device: str, sync: Sync):
    base = grid(device, 4, 6)
    bits = base.view(torch.int32)
    sync()
    bits[0].bitwise_or_(1)
    sync()
    base[1].add_(1)
    return base, bits


@program
def view_as_a_smaller_dtype(device: str, sync: Sync):
    base = grid(device, 2, 4)
    halves, row = base.view(torch.int16), base[1]
    sync()
    halves[:, ::2].zero_()
    row.add_(3)
    sync()
    return base, halves, row


@program
def real_and_imaginary(device: str, sync: Sync):
    base = torch.complex(torch.arange(4.0), torch.ones(4)).to(device)
    pairs = torch.view_as_real(base)
    sync()
    pairs[:, 1].mul_(3)
    sync()
    base.real.add_(1)
    return base, pairs, base.imag + 0


# ----- in-place changes of metadata


@program
def transposed_in_place(device: str, sync: Sync):
    base = grid(device, 4, 6)
    other = base[:]
    base.t_()
    sync()
    base[0].add_(10)
    sync()
    return base, other, base @ other


@program
def transpose_in_place(device: str, sync: Sync):
    base = grid(device, 2, 3, 4)
    base.transpose_(0, 2)
    sync()
    base.mul_(2).swapaxes_(0, 1)
    sync()
    return base, base.sum(0)


@program
def squeezed_in_place(device: str, sync: Sync):
    base = grid(device, 1, 4, 1, 3)
    base.squeeze_(0)
    sync()
    base.add_(1).squeeze_()
    sync()
    return (base,)


@program
def unsqueezed_in_place(device: str, sync: Sync):
    base = grid(device, 4, 3)
    view = base[1]
    base.unsqueeze_(1)
    sync()
    base.mul_(torch.tensor([1.0, 2.0, 3.0]).to(device))
    sync()
    return base, view


# ----- kinds of views


@program
def expanded(device: str, sync: Sync):
    base = grid(device, 4, 1)
    wide = base.expand(4, 3)
    sync()
    base.add_(2)
    sync()
    return base, wide, wide.sum(1)


@program
def diagonal_written(device: str, sync: Sync):
    base = grid(device, 4, 6)
    diagonal = base.diagonal(1)
    sync()
    diagonal.fill_(-1)
    sync()
    base.fill_diagonal_(7)
    return base, diagonal


@program
def unfolded(device: str, sync: Sync):
    base = grid(device, 10)
    windows = base.unfold(0, 4, 2)
    sync()
    base[4:6] = 0
    sync()
    return base, windows, windows.sum(1)


@program
def narrowed(device: str, sync: Sync):
    base = grid(device, 4, 6)
    narrow = base.narrow(1, 2, 3)
    sync()
    narrow.clamp_(max=10)
    sync()
    return base, narrow, narrow.select(0, 2)


@program
def split_pieces_written(device: str, sync: Sync):
    base = grid(device, 4, 6)
    one, two, three = base.split([1, 2, 3], dim=1)
    sync()
    two.zero_()
    sync()
    three.add_(one)
    return base, one, two, three


@program
def chunks_written(device: str, sync: Sync):
    base = grid(device, 6, 2)
    chunks = base.chunk(3)
    sync()
    chunks[1].neg_()
    sync()
    return base, list(chunks)


@program
def unbound_rows_written(device: str, sync: Sync):
    base = grid(device, 3, 4)
    rows = base.unbind()
    sync()
    for factor, row in enumerate(rows):
        row.mul_(factor)
    sync()
    return base, list(rows)


@program
def permuted_and_flattened(device: str, sync: Sync):
    base = grid(device, 2, 3, 4)
    permuted = base.permute(2, 0, 1)
    copied, shared = permuted.flatten(), base.flatten()
    sync()
    shared.add_(1)
    sync()
    return base, permuted, copied, shared


@program
def movedim_and_unflatten(device: str, sync: Sync):
    base = grid(device, 6, 4)
    view = base.unflatten(0, (2, 3)).movedim(0, -1)
    sync()
    view[1].mul_(-1)
    sync()
    return base, view


# ----- writes through indices


@program
def index_put_in_place(device: str, sync: Sync):
    base = grid(device, 4, 6)
    index = torch.tensor([0, 2, 2]).to(device)
    view = base[2]
    sync()
    base.index_put_((index,), torch.ones(3, 6).to(device), accumulate=True)
    sync()
    base[index, 1] = 8
    return base, view


@program
def index_with_a_cpu_tensor(device: str, sync: Sync):
    base = grid(device, 4, 6)
    sync()
    base[torch.tensor([1, 3])] = 0
    sync()
    return base, base[torch.tensor([0, 1])]


@program
def masked_fill_in_place(device: str, sync: Sync):
    base = grid(device, 4, 6)
    view = base[:, ::2]
    sync()
    view.masked_fill_(view > 6, -1)
    sync()
    return base, view


@program
def masked_assignment(device: str, sync: Sync):
    base = grid(device, 4, 6)
    base[base > 10] = 0
    sync()
    return base, base[0]


@program
def scattered(device: str, sync: Sync):
    base = grid(device, 4, 6)
    index = torch.tensor([[0, 1, 2, 0, 1, 3]]).to(device)
    view = base[1:]
    sync()
    base.scatter_(0, index, -5.0)
    sync()
    view.index_add_(0, torch.tensor([0, 0]).to(device), view[:2] + 0)
    return base, view


@program
def index_fill_and_copy(device: str, sync: Sync):
    base = grid(device, 4, 6)
    rows = torch.tensor([3, 1]).to(device)
    base.index_fill_(0, rows, 2.5)
    sync()
    base.index_copy_(0, rows, grid(device, 2, 6))
    return (base,)


# ----- copies into views, cat, out=


@program
def copied_into_slices(device: str, sync: Sync):
    base = torch.zeros(4, 6, device=device)
    base[1:3, ::2].copy_(grid(device, 2, 3))
    sync()
    base[0] = base[2]
    sync()
    base[:, -1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return (base,)


@program
def uploaded_into_unwritten_memory(device: str, sync: Sync):
    base = torch.empty(4, 6, device=device)
    base[:2].copy_(torch.ones(2, 6))
    sync()
    base[2:].copy_(torch.full((2, 6), 3.0))
    return (base,)


@program
def unwritten_views_share(device: str, sync: Sync):
    base = torch.empty(4, 6, device=device)
    view = base[1]
    sync()
    base.fill_(2)
    sync()
    view.add_(1)
    return base, view


@program
def unwritten_filled_after_sync(device: str, sync: Sync):
    base = torch.empty(4, 6, device=device)
    detached = base.detach()
    sync()
    base.copy_(torch.ones(4, 6))
    sync()
    detached.mul_(2)
    return base, detached


@program
def copied_between_dtypes(device: str, sync: Sync):
    base = grid(device, 4, 6, dtype=torch.int64)
    base[1].copy_(torch.full((6,), 2.7).to(device))
    sync()
    base.t()[0].copy_(grid(device, 4))
    return (base,)


@program
def cat_of_views(device: str, sync: Sync):
    base = grid(device, 4, 6)
    joined = torch.cat([base[:2], base[1:3]])
    sync()
    base[1].zero_()
    sync()
    stacked = torch.stack([base[0], base[1], joined[2]])
    joined[0].add_(1)
    return base, joined, stacked


@program
def out_of_the_right_size(device: str, sync: Sync):
    out = torch.zeros(4, 6, device=device)
    view = out[1]
    sync()
    torch.add(grid(device, 4, 6), 1, out=out)
    sync()
    return out, view


@program
def out_into_a_view(device: str, sync: Sync):
    base = torch.zeros(4, 6, device=device)
    torch.mul(grid(device, 6), 2, out=base[2])
    sync()
    torch.cat([base[2], base[2]], out=base.view(-1)[:12])
    return (base,)


@program
def out_of_the_wrong_size(device: str, sync: Sync):
    out = torch.empty(0, device=device)
    torch.add(grid(device, 4, 6), 1, out=out)
    sync()
    out.mul_(2)
    return (out,)


def resized_out(out: torch.Tensor, size: int) -> None:
    """Write `size` twos to `out`, which PyTorch advises against if that resizes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.add(torch.ones(size, device=out.device), 1, out=out)


@program
def out_shrunk_under_whole_aliases(device: str, sync: Sync):
    base = grid(device, 3, 4) * 1
    aliases = base.detach(), base.data, base.expand_as(base), base.squeeze(), base.movedim(0, 0), base.view(3, 4)
    sync()
    resized_out(base, 5)
    sync()
    aliases[0][2].add_(1)
    base.mul_(3)
    sync()
    return base, *aliases, *(alias + 1 for alias in aliases)


@program
def out_shrunk_through_an_alias(device: str, sync: Sync):
    base = grid(device, 3, 4) * 1
    rows, turned, whole = base[1:], base.t(), base.detach()
    sync()
    resized_out(rows, 3)
    resized_out(turned, 4)
    resized_out(whole, 2)
    sync()
    base.add_(1)
    return base, rows, turned, whole


@program
def out_grown_from_nothing(device: str, sync: Sync):
    base = torch.empty(0, device=device)
    aliases = base.detach(), base.data, base.view(0, 3), base.expand_as(base)
    sync()
    resized_out(base, 4)
    sync()
    base.add_(1)
    return base, *aliases, *(alias + 1 for alias in aliases)


@program
def out_grown_beyond_its_memory(device: str, sync: Sync):
    base = grid(device, 6) * 1
    whole, part, end = base.detach(), base[1:3], base[4:]
    sync()
    resized_out(whole, 8)
    resized_out(end, 5)
    sync()
    return base, whole, part, part + 1, end * 1


@program
def out_resized_whose_alias_is_an_operand(device: str, sync: Sync):
    base = grid(device, 2, 3) * 1
    alias = base.detach()
    sync()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sum(alias, 1, out=base)
    sync()
    return base, alias, alias * 2


@program
def resized_to_another_format_under_an_alias(device: str, sync: Sync):
    base = grid(device, 1, 2, 3, 4) * 1
    alias, flat = base.detach(), base.view(-1)
    sync()
    base.resize_((1, 2, 2, 4), memory_format=torch.channels_last)
    alias.resize_as_(alias.detach(), memory_format=torch.channels_last)
    sync()
    flat.add_(1)
    return base, alias, flat, base + 1, alias + 1


@program
def two_outs(device: str, sync: Sync):
    values, places = torch.empty(4, device=device), torch.empty(4, dtype=torch.int64, device=device)
    torch.max(grid(device, 4, 6), 1, out=(values, places))
    sync()
    return values, places


# ----- foreach, and the same tensor twice


@program
def foreach_in_place(device: str, sync: Sync):
    tensors = [grid(device, 4), grid(device, 2, 3), torch.ones(2, device=device)]
    view = tensors[1][0]
    sync()
    torch._foreach_mul_(tensors, 2.0)
    sync()
    torch._foreach_add_(tensors, [1.0, 2.0, 3.0])
    return tensors, view


@program
def foreach_on_views_of_one_base(device: str, sync: Sync):
    base = grid(device, 6, 4)
    parts = list(base.split(2))
    sync()
    torch._foreach_add_(parts, parts)
    sync()
    torch._foreach_sqrt_(parts)
    return base, parts


@program
def foreach_to_new_tensors(device: str, sync: Sync):
    tensors = [grid(device, 4), grid(device, 2, 3)]
    made = torch._foreach_exp(tensors)
    sync()
    torch._foreach_copy_(tensors, made)
    torch._foreach_zero_(made)
    return tensors, made


@program
def one_tensor_as_both_operands(device: str, sync: Sync):
    base = grid(device, 4, 4)
    sync()
    base.mul_(base)
    sync()
    base.copy_(base.t().clone())
    base.add_(base[0].clone())
    return (base,)


@program
def zero_sized(device: str, sync: Sync):
    base = grid(device, 4, 6)
    empty = base[2:2]
    sync()
    empty.add_(1)
    sync()
    return base, empty, torch.cat([empty, base[:1]])


@program
def real_part_conjugated(device: str, sync: Sync):
    base = torch.complex(torch.arange(4.0), torch.ones(4)).to(device)
    conjugate = base.conj()
    sync()
    base.mul_(2)
    sync()
    return base, conjugate * 1


# ----- the claims


@pytest.fixture(params=PROGRAMS)
def table_row(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]


def test_without_a_sync(table_row: Program) -> None:
    assert_like_eager(table_row, NoSync())


def test_with_every_sync(table_row: Program) -> None:
    assert_like_eager(table_row, SyncAt())


def test_in_eager_mode(table_row: Program) -> None:
    with lazy_backend.eager_mode():
        assert_like_eager(table_row, SyncAt())


def test_with_one_sync_at_each_point(table_row: Program) -> None:
    for point in range(eager(table_row)[1]):
        assert_like_eager(table_row, SyncAt(point))


def test_a_second_run_hits_the_cache(table_row: Program) -> None:
    assert_like_eager(table_row, SyncAt())
    with count("UncachedCompile") as misses:
        assert_like_eager(table_row, SyncAt())
    assert misses() == 0


# a write through overlapping windows is interpreted, with a warning
@pytest.mark.filterwarnings("ignore:.*is not compiled but interpreted.*:lazy_backend.CompileWarning")
@pytest.mark.parametrize("make_sync", [NoSync, SyncAt])
def test_compiled_at_second_sight(table_row: Program, make_sync: type) -> None:
    config.backend = "aot_eager"
    for _ in range(3):
        assert_like_eager(table_row, make_sync())


def unfold_with_gaps(device: str) -> torch.Tensor:
    x = grid(device, 5, 2) * 1
    x.unfold(0, 2, 2).mul_(3)
    return x


def unfold_with_a_gap_and_an_overlap(device: str) -> torch.Tensor:
    x = grid(device, 6, 2) * 1
    x.unfold(0, 3, 2).zero_()  # as many elements as x has
    return x


def expanded_zeroed(device: str) -> torch.Tensor:
    y = grid(device, 1, 3) + 1
    y.expand(2, 3).zero_()
    return y


def row_of_expanded(device: str) -> torch.Tensor:
    y = grid(device, 1, 3) + 1
    y.expand(2, 3)[1].mul_(2)
    return y


def shifted_in_place(device: str) -> torch.Tensor:
    x = grid(device, 4, 6) * 1
    x[:, 1:].add_(x[:, :-1])
    return x


def foreach_in_turns(device: str) -> torch.Tensor:
    x, y = grid(device, 4) * 1, grid(device, 4) * 2
    torch._foreach_add_([x, y], [y, x])
    return y


def strided_after_transposed_write(device: str) -> torch.Tensor:
    x, z = grid(device, 3, 4) * 1, grid(device, 6, 3)[:4]
    windows = x.as_strided((5, 3), (2, 1), 0)
    torch.mul(z.t(), 2, out=x)
    return windows * 1


DECLINED = {
    unfold_with_gaps: "windows with gaps",
    unfold_with_a_gap_and_an_overlap: "a view that has elements twice",
    expanded_zeroed: "a view that has elements twice",
    row_of_expanded: "a view that has elements twice",
    shifted_in_place: "reads memory that it writes as other elements",
    foreach_in_turns: "reads memory that it writes as other elements",
    strided_after_transposed_write: "memory that as_strided looks at",
}


@pytest.mark.parametrize("declined", DECLINED, ids=lambda declined: declined.__name__)
def test_a_write_that_compilers_get_wrong_is_interpreted(declined) -> None:
    config.backend = "aot_eager"

    def step() -> None:
        x = declined("lazy")
        lazy_backend.mark_step()
        assert_same(x, declined("cpu"))

    step()
    with pytest.warns(lazy_backend.CompileWarning, match="is not compiled but interpreted"):
        step()
    step()
    (name,) = (name for name in metrics.counter_names() if name.startswith("CompileDeclined: "))
    assert DECLINED[declined] in name
    assert "test_views.py:" in name
    assert metrics.counter_value("CompileDeclined") == metrics.counter_value(name) == 1
    assert metrics.counter_value("Compile") == 0
    assert "declined" in str(lazy_backend.explain())
    assert DECLINED[declined] in str(lazy_backend.explain())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_writes_into_pieces_keep_the_sign_of_zero(backend: str) -> None:
    config.backend = backend

    def program(device: str) -> list[torch.Tensor]:
        x, y, z, w = (grid(device, 4, 6) * 0 for _ in range(4))
        x.unfold(0, 2, 2).neg_()
        y.t()[:, 1:].unfold(-1, 3, 3).neg_()
        z.unfold(1, 1, 1)[:, 2:].neg_()
        w.unfold(1, 6, 4).neg_()
        return [x, y, z, w, x.unfold(1, 2, 1) * 1]

    expected = program("cpu")
    for _ in range(3):
        assert_same(program("lazy"), expected)
    assert metrics.counter_value("Compile") == 1
    assert metrics.counter_value("CompileDeclined") == 0


def test_a_write_that_compilers_get_wrong_runs_as_it_is_with_the_eager_backend() -> None:
    for _ in range(3):
        x = unfold_with_gaps("lazy")
        lazy_backend.mark_step()
        assert_same(x, unfold_with_gaps("cpu"))
    assert metrics.counter_value("Compile") == 1


def strided_pieces(device: str) -> list[torch.Tensor]:
    """Writes through `as_strided` that slices and views can do."""
    base = grid(device, 4, 6) * 1
    base.as_strided((2, 3), (6, 2), 7).mul_(3)
    base[1:].as_strided((3,), (7,), 0).zero_()
    base.fill_diagonal_(9)
    base.t().as_strided((3, 2), (1, 12), 6).add_(1)
    return [base]


def test_writes_through_as_strided_are_compiled_where_views_can_do_them() -> None:
    config.backend = "aot_eager"
    for _ in range(3):
        found = strided_pieces("lazy")
        lazy_backend.mark_step()
        assert_same(found, strided_pieces("cpu"))
    assert metrics.counter_value("Compile") == 1


def test_as_strided_looks_past_the_view_that_entered() -> None:
    config.backend = "aot_eager"
    base, real = grid("lazy", 4, 6), grid("cpu", 4, 6)
    for _ in range(3):
        results = []
        for of in (base, real):
            part = of[1:]
            if of is base:
                lazy_backend.mark_step()
            part.clamp_(-5, 5)
            results.append(part.as_strided((3,), (6,), 2).sum(0, keepdim=True))
        assert_same(results[0], results[1])
    assert metrics.counter_value("CompileFailed") == 0


def test_the_table_compiles() -> None:
    config.backend = "aot_eager"
    with count("Compile") as compiles:
        for _ in range(2):
            assert_like_eager(base_mutated, SyncAt())
    assert compiles() > 0


# ----- sharing that values do not show


def test_an_updated_parameter_keeps_its_memory() -> None:
    from lazy_backend.tensors.tensor import backing_tensor

    parameter = torch.nn.Parameter(grid("lazy", 4))
    parameter.cpu()
    before = backing_tensor(parameter._data).data_ptr()
    with torch.no_grad():
        parameter.add_(1)
    assert parameter.cpu().tolist() == [1, 2, 3, 4]
    assert backing_tensor(parameter._data).data_ptr() == before


def test_an_in_place_op_returns_its_operand() -> None:
    x = grid("lazy", 4)
    assert x.add_(1) is x
    assert x.t_() is x


def test_an_upload_is_a_copy() -> None:
    source = torch.zeros(3)
    x = source.to("lazy")
    source.add_(1)
    assert_same(x, torch.zeros(3))


def test_a_download_is_a_copy() -> None:
    x = grid("lazy", 3)
    x.cpu().zero_()
    assert x.tolist() == [0, 1, 2]


def test_a_lazy_copy_is_a_copy() -> None:
    x = grid("lazy", 3)
    y = x.clone()
    y.zero_()
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("first_sight", ["run", "record", "eager"])
@pytest.mark.parametrize(
    "look",
    [lambda x: x.view(torch.int32), lambda x: x.view(torch.float32), lambda x: x.view(2, 2), lambda x: x[1:]],
    ids=["bits", "same dtype", "view", "slice"],
)
def test_views_are_inference_tensors_where_eagers_are(
    look: Callable[[torch.Tensor], torch.Tensor], first_sight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "eager", first_sight == "eager")
    monkeypatch.setattr(config, "first_sight", "run" if first_sight == "eager" else first_sight)

    def found(device: str) -> list[bool]:
        normal = torch.ones(4).to(device)
        with torch.inference_mode():
            made = torch.ones(4).to(device)
            within = [look(normal), look(made)]
        return [one.is_inference() for one in (*within, look(normal), look(made))]

    for _ in range(3):
        assert found("lazy") == found("cpu")
        lazy_backend.mark_step()
