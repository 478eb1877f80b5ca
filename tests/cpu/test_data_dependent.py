"""Shapes and decisions that depend on values: cut once and go on; masked writes that need no cut make none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import SyncAt, assert_like_eager, assert_same, count, grid
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import LazyBackendError, config, metrics

# ----- reads whose shape depends on values


def ints(device: str) -> torch.Tensor:
    return torch.tensor([3, 1, 1, 0, 2]).to(device) + 0


def floats(device: str) -> torch.Tensor:
    return grid(device, 5) - 2


READS = {
    "nonzero": lambda d: torch.nonzero(floats(d)),
    "nonzero_as_tuple": lambda d: torch.nonzero(floats(d), as_tuple=True)[0],
    "argwhere": lambda d: torch.argwhere(floats(d)),
    "where": lambda d: torch.where(floats(d) > 0)[0],
    "mask": lambda d: floats(d)[grid(d, 5) > 2],
    "mask_of_a_row": lambda d: (grid(d, 3, 5) + 0)[1, grid(d, 5) > 2],
    "mask_of_rows": lambda d: (grid(d, 5, 3) + 0)[grid(d, 5) > 2],
    "masked_select": lambda d: floats(d).masked_select(grid(d, 5) > 2),
    "unique": lambda d: torch.unique(ints(d)),
    "unique_with_counts": lambda d: torch.stack(torch.unique(ints(d), return_counts=True)),
    "unique_consecutive": lambda d: torch.unique_consecutive(ints(d)),
    "bincount": lambda d: torch.bincount(ints(d)),
    "repeat_interleave": lambda d: torch.repeat_interleave(ints(d)),
    "repeat_interleave_of": lambda d: torch.repeat_interleave(floats(d)[:3], ints(d)[:3]),
    "combinations": lambda d: torch.combinations(floats(d)),
    "histogram": lambda d: torch.histc(floats(d), 4)[torch.histc(floats(d), 4) > 1],
}


def has_known_shape(name: str) -> bool:
    """Whether PyTorch can say the shape without values: since 2.14 it counts the combinations by a formula."""
    try:
        READS[name]("meta")
    except (NotImplementedError, RuntimeError):
        return False
    assert name == "combinations"
    return True


@pytest.mark.parametrize("name", READS)
def test_a_shape_that_depends_on_values_cuts_once_and_goes_on(name: str) -> None:
    with count("GraphCut") as cuts:
        made = READS[name]("lazy") + 1
        needed = 0 if has_known_shape(name) else 1
        assert cuts() == needed
    assert_same(made, READS[name]("cpu") + 1)
    told = [name for name in metrics.counter_names() if "depends on values" in name and __file__ in name]
    assert bool(told) == bool(needed)


@pytest.mark.parametrize("name", READS)
def test_a_repeated_cut_compiles_once(name: str) -> None:
    config.backend = "aot_eager"
    for run in range(4):
        with count("UncachedCompile") as misses:
            made = READS[name]("lazy") * 2
            lazy_backend.mark_step()
        assert_same(made, READS[name]("cpu") * 2)
        assert misses() == 0 or run == 0
    assert metrics.counter_value("CompileFailed") == 0


GRADIENTS = {
    "mask": lambda x: x[x > 0.15].square().sum(),
    "masked_select": lambda x: x.masked_select(x > 0.15).square().sum(),
    "nonzero": lambda x: x[torch.nonzero(x > 0.15, as_tuple=True)].square().sum(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.arange(5, device=x.device)).square().sum(),
    "repeat_interleave_of_known_size": lambda x: x.repeat_interleave(
        torch.arange(5, device=x.device), output_size=10
    ).square().sum(),
    "masked_scatter": lambda x: torch.zeros_like(x).masked_scatter(x > 0.15, x.flip(0)).square().sum(),
    "mask_set_to_a_tensor": lambda x: set_where(x * 1, x > 0.15, x[:3] * 3).square().sum(),
    "mask_set_to_a_number": lambda x: set_where(x * 1, x > 0.15, 2.0).square().sum(),
    "mask_set_to_a_0d_tensor": lambda x: set_where(x * 1, x > 0.15, x[2] * 2).square().sum(),
    "mask_added_to": lambda x: add_where(x * 1, x > 0.15, 1).square().sum(),
    "tensor_split": lambda x: x.tensor_split(torch.tensor([2, 3]))[2].square().sum(),
}  # fmt: skip


def set_where(x: torch.Tensor, mask: torch.Tensor, value: object) -> torch.Tensor:
    x[mask] = value
    return x


def add_where(x: torch.Tensor, mask: torch.Tensor, value: object) -> torch.Tensor:
    x[mask] += value
    return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_go_through(name: str, backend: str) -> None:
    def program(device, sync):
        x = grid(device, 5).div_(10).requires_grad_()
        loss = GRADIENTS[name](x)
        sync()
        loss.backward()
        sync()
        return loss, x.grad

    config.backend = backend
    for _ in range(3):
        assert_like_eager(program, SyncAt())


# ----- masked writes

MASKED_WRITES = {
    "number": lambda x: set_where(x, x > 2, 7.5),
    "int": lambda x: set_where(x, x > 2, 7),
    "cpu_0d_tensor": lambda x: set_where(x, x > 2, torch.tensor(7.5)),
    "lazy_0d_tensor": lambda x: set_where(x, x > 2, x.sum()),
    "one_element": lambda x: set_where(x, x > 2, x.sum()[None]),
    "rows": lambda x: set_where(x, x[:, 0] > 2, 7.5),
    "part_of_a_row": lambda x: x.__setitem__((1, x[1] > 5), 7.5) or x,
    "columns": lambda x: x.__setitem__((slice(None), x[0] > 1), 7.5) or x,
    "bytes": lambda x: set_where(x, (x > 2).to(torch.bool), 7.5),
    "cpu_mask": lambda x: set_where(x, torch.arange(12.0).view(4, 3) > 2, 7.5),
    "two_masks": lambda x: set_where(set_where(x, x > 2, 0.5), x < 1, 2.5),
    "view": lambda x: set_where(x.t()[1:], x.t()[1:] > 2, 7.5) * 0 + x.t()[1:],
    "masked_fill": lambda x: x.masked_fill_(x > 2, 7.5),
    "index_put_accumulated": lambda x: x.index_put_((x > 2,), torch.tensor(7.5, device=x.device), accumulate=True),
    "where": lambda x: x.copy_(torch.where(x > 2, 7.5, x)),
}


@pytest.mark.parametrize("name", MASKED_WRITES)
def test_a_number_written_under_a_mask_cuts_nothing(name: str) -> None:
    with lazy_backend.strict():
        made = MASKED_WRITES[name](grid("lazy", 4, 3) + 0)
    assert_same(made, MASKED_WRITES[name](grid("cpu", 4, 3) + 0))


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("name", MASKED_WRITES)
def test_a_masked_write_compiles(name: str, backend: str) -> None:
    config.backend = backend
    expected = MASKED_WRITES[name](grid("cpu", 4, 3) + 0)
    for _ in range(3):
        assert_same(MASKED_WRITES[name](grid("lazy", 4, 3) + 0), expected)
    assert (metrics.counter_value("Compile"), metrics.counter_value("CompileFailed")) == (1, 0)


def test_masked_writes_compile_in_inductor() -> None:
    def step(device: str) -> list[torch.Tensor]:
        made = [MASKED_WRITES[name](grid(device, 4, 3) + 0) for name in ("number", "lazy_0d_tensor", "rows", "columns")]
        if device == "lazy":
            lazy_backend.mark_step()
        return made

    config.backend = "inductor"
    for _ in range(3):
        assert_same(step("lazy"), step("cpu"))
    assert (metrics.counter_value("Compile"), metrics.counter_value("CompileFailed")) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float64])
@pytest.mark.parametrize("value", [2, 2.5, True, torch.tensor(2), torch.tensor(2.5)], ids=repr)
def test_a_masked_write_casts_like_eagers(dtype: torch.dtype, value: object) -> None:
    made = [set_where(torch.arange(4).to(dtype).to(d), torch.arange(4).to(d) > 1, value) for d in ("lazy", "cpu")]
    assert_same(*made)


def test_values_counted_by_a_mask_are_written() -> None:
    x = [set_where(grid(d, 5) + 0, grid(d, 5) > 1, grid(d, 3) + 10) for d in ("lazy", "cpu")]
    assert_same(*x)


def test_too_many_values_under_a_mask_raise_like_eagers() -> None:
    with pytest.raises(RuntimeError) as eagers:
        set_where(grid("cpu", 5), grid("cpu", 5) > 1, grid("cpu", 4))
    with pytest.raises(RuntimeError) as lazys:
        set_where(grid("lazy", 5), grid("lazy", 5) > 1, grid("lazy", 4)).cpu()
    assert str(eagers.value) in str(lazys.value)


def test_adding_under_a_mask_cuts_once() -> None:
    with count("GraphCut") as cuts:
        x = add_where(grid("lazy", 5) + 0, grid("lazy", 5) > 2, 1)
    assert cuts() == 1
    assert_same(x, add_where(grid("cpu", 5), grid("cpu", 5) > 2, 1))


# ----- decisions


def test_a_decision_reads_once_and_both_ways_are_cached() -> None:
    def step(sign: float) -> torch.Tensor:
        x = grid("lazy", 4) * sign
        y = x + 1 if (x < 0).any() else x - 1
        lazy_backend.mark_step()
        return y

    expected = {1.0: torch.arange(4.0) - 1, -1.0: -torch.arange(4.0) + 1}
    for sign in expected:
        step(sign)
    with count("UncachedCompile") as misses:
        for sign, value in expected.items():
            assert_same(step(sign), value)
    assert misses() == 0


def test_a_loop_until_convergence() -> None:
    def solve(device: str) -> tuple[torch.Tensor, int]:
        x, steps = torch.ones(3).to(device) * 5, 0
        while (x * x - 2).abs().max() > 1e-5:
            x, steps = (x + 2 / x) / 2, steps + 1
        return x, steps

    assert_same(solve("lazy"), solve("cpu"))


def test_an_item_steers_the_next_shape() -> None:
    def run(device: str) -> torch.Tensor:
        x = grid(device, 6) + 0
        return x[: int(x[3].item())] * 2

    assert_same(run("lazy"), run("cpu"))


def test_a_split_at_lazy_places_says_where_they_belong() -> None:
    with pytest.raises(RuntimeError, match="tensor_indices_or_sections to be on cpu"):
        grid("lazy", 6).tensor_split(torch.tensor([1, 2]).to("lazy"))


def test_a_step_with_a_read_in_it_trains_like_eager() -> None:
    def program(device, sync):
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            out = model(grid(device, 5, 3) / 10)
            kept = out[out.sum(1) > out.sum(1).mean()]
            loss = kept.square().sum() if len(kept) else out.sum()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm.item() > 0:
                optimizer.step()
            losses.append(loss.item())
            sync()
        return losses, model.weight

    for backend in ("eager", "aot_eager"):
        config.backend = backend
        assert_like_eager(program, SyncAt())


# ----- layouts that cannot be lazy

REFUSED = {
    "nested": lambda: torch.nested.nested_tensor([grid("lazy", 3), grid("lazy", 2)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_cannot_be_lazy_is_refused_with_the_line(name: str) -> None:
    with pytest.raises(LazyBackendError, match=r"cannot be lazy|lazy tensors cannot be") as caught:
        REFUSED[name]()
    assert f"at {__file__}:" in str(caught.value)
    assert "CPU" in str(caught.value)
    assert_same(grid("lazy", 3) + 1, grid("cpu", 3) + 1)


# ----- dtypes


class Mixed(nn.Module):
    """Integers, masks and floats in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        x = x.masked_fill((tokens == 0)[..., None], 0.0)
        mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.cross_entropy(self.out(mixed).flatten(0, 1).float(), tokens.flatten(), ignore_index=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_model_trains_in_every_dtype(dtype: torch.dtype, backend: str) -> None:
    def program(device, sync):
        torch.manual_seed(0)
        model = Mixed().to(dtype).to(device)
        # as CPU parameters are updated by default: foreach, the default for lazy ones, rounds elsewhere to float16
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-4, foreach=False)
        tokens, losses = (torch.arange(12) % 7).view(2, 6).to(device), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            sync()
            losses.append(loss.detach())
        return losses, model.out.weight

    config.backend = backend
    for _ in range(2):
        assert_like_eager(program, SyncAt())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_model_trains(dtype: torch.dtype) -> None:
    def program(device, sync):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(grid(device, 5, 3).to(dtype))
            (out * out.conj()).real.sum().backward()
            optimizer.step()
            sync()
        return out, model[0].weight

    assert_like_eager(program, SyncAt())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers_compute_like_eagers(dtype: torch.dtype) -> None:
    def run(device: str) -> list[torch.Tensor]:
        x = torch.tensor([0, 1, 2, 3, 100]).to(dtype).to(device)
        made = [x.sum(), x.prod(), x * x, x.float().mean(), x > 1, x.cumsum(0), x.sort()[0], x.max(), ~x, x.any()]
        return made + [x.to(torch.float16), torch.where(x > 1, x, 0), x.double().argmax(), F.one_hot(x.long() % 3, 3)]

    assert_same(run("lazy"), run("cpu"))


# ----- reads at every step: each costs a wait, and what lies between them is known


class Loop:
    """What a training loop keeps on the host between its steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.average = 0.0
        self.best = float("inf")

    def note(self, loss: float) -> None:
        self.average, self.best = 0.9 * self.average + 0.1 * loss, min(self.best, loss)

    def step(self, read: Callable[[Loop, torch.Tensor], object], place: str) -> None:
        loss = self.model(torch.randn(8, 8).to("lazy")).square().mean()
        if place == "before backward":
            read(self, loss)
        self.optimizer.zero_grad()
        loss.backward()
        if place == "after backward":
            read(self, loss)
        self.optimizer.step()
        if place == "after the step":
            read(self, loss)
        lazy_backend.mark_step()


def refuse(condition: bool) -> None:
    if condition:
        raise AssertionError


READS_OF_LOOPS: dict[str, Callable[[Loop, torch.Tensor], object]] = {
    "item": lambda loop, loss: loop.note(loss.item()),
    "format": lambda loop, loss: f"{loss:.3f} {loss}",
    "equal": lambda loop, loss: torch.equal(loss, loss.detach() + 1),
    "allclose": lambda loop, loss: torch.allclose(loss, loss.detach() + 1),
    "if any": lambda loop, loss: refuse(bool(torch.isnan(loop.model[0].weight).any())),
    "if all": lambda loop, loss: refuse(not (loss.detach() >= 0).all()),
    "bool of a comparison": lambda loop, loss: loss < 1e9 and loss > -1,
    "tolist": lambda loop, loss: loop.model[0].weight.norm(dim=1).tolist(),
    "cpu": lambda loop, loss: loss.detach().cpu().numpy(),
    "nonzero": lambda loop, loss: (loop.model[0].weight > 0).nonzero(),
    "unique": lambda loop, loss: torch.unique(loop.model[0].weight > 0),
    "topk": lambda loop, loss: loop.model[0].bias.topk(2).indices.tolist(),
    "elements": lambda loop, loss: [one.item() for one in loop.model[2].bias],
    "largest of several": lambda loop, loss: max(p.detach().abs().max() for p in loop.model.parameters()).item(),
    "rate by what is read": lambda loop, loss: loop.plateau.step(loss.item()),
    "float from what is read": lambda loop, loss: (loop.model[0].weight.detach() * loss.item()).sum(),
}


@pytest.mark.parametrize("place", ["before backward", "after backward", "after the step"])
@pytest.mark.parametrize("name", READS_OF_LOOPS)
def test_a_read_at_every_step_is_no_miss(name: str, place: str) -> None:
    lazy_backend.config.first_sight = "run"
    loop = Loop()
    for _ in range(5):
        loop.step(READS_OF_LOOPS[name], place)
    with count("UncachedCompile") as misses, count("CachedCompile") as hits, count("SyncTensorsGraph") as syncs:
        for _ in range(6):
            loop.step(READS_OF_LOOPS[name], place)
    assert (misses(), hits()) == (0, syncs())
    assert syncs() >= 6
