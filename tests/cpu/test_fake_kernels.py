"""Operators whose metadata PyTorch does not compute: they are recorded and compiled like others, and cut nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import assert_same, count
from torch import Tensor
from torch.nn import functional as F

import lazy_backend

Program = tuple[Callable[[], list[Tensor]], Callable[..., Tensor | tuple[Tensor, ...]]]


def floats(*shape: int) -> Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape).cos()


PROGRAMS: dict[str, Program] = {
    "diagonal_scatter": (lambda: [floats(4, 4), floats(4)], lambda x, y: (x * 2).diagonal_scatter(y * 3)),
    "select_scatter": (lambda: [floats(4, 3), floats(3)], lambda x, y: (x * 2).select_scatter(y * 3, 0, 1)),
    "slice_scatter": (lambda: [floats(4, 3), floats(2, 3)], lambda x, y: (x * 2).slice_scatter(y * 3, 0, 1, 3)),
    "as_strided_scatter": (
        lambda: [floats(4, 3), floats(3)],
        lambda x, y: torch.as_strided_scatter(x * 2, y * 3, (3,), (4,), 1),
    ),
    "as_strided": (lambda: [floats(4, 3)], lambda x: (x * 2).as_strided((3, 2), (4, 1), 1)),
    "bilinear": (lambda: [floats(5, 3), floats(5, 2), floats(4, 3, 2)], F.bilinear),
    "pinv": (lambda: [floats(4, 3)], torch.linalg.pinv),
    "multi_margin_loss": (lambda: [floats(4, 3)], lambda x: F.multi_margin_loss(x, (x[:, 0] > 2).long())),
    "multilabel_margin_loss": (
        lambda: [floats(4, 3)],
        lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 3, dtype=torch.int64, device=x.device)),
    ),
    "fractional_max_pool3d": (
        lambda: [floats(1, 2, 4, 4, 4), floats(1, 2, 3).abs()],
        lambda x, samples: torch.ops.aten.fractional_max_pool3d(x, (2, 2, 2), (2, 2, 2), samples.detach())[0],
    ),
    "fake_quantize_per_tensor": (
        lambda: [floats(4, 3)],
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 9),
    ),
    "fake_quantize_per_channel": (
        lambda: [floats(4, 3), floats(3).abs()],
        lambda x, scale: torch.fake_quantize_per_channel_affine(
            x, scale.detach(), torch.zeros(3, dtype=torch.int32, device=x.device), 1, 0, 9
        ),
    ),
    "fake_quantize by tensors": (
        lambda: [floats(4, 3)],
        lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.full((1,), 0.1, device=x.device), torch.zeros(1, dtype=torch.int32, device=x.device), 0, 9
        ),
    ),
    "gradient of gamma": (
        lambda: [floats(4).abs(), floats(4).abs()],
        lambda x, y: torch._standard_gamma_grad(x, y).detach(),
    ),
    "gradient of dirichlet": (
        lambda: [floats(4, 3).abs(), floats(4, 3).abs()],
        lambda x, y: torch._dirichlet_grad(x, y, y.sum(-1, keepdim=True).expand(4, 3)).detach(),
    ),
    "geqrf": (lambda: [floats(4, 3)], lambda x: tuple(made.detach() for made in torch.geqrf(x))),
    "histogram": (lambda: [floats(12)], lambda x: tuple(torch.histogram(x.detach(), 4))),
}


def run(name: str, device: str) -> list[Tensor]:
    """The results, and the gradients of the operands."""
    make, function = PROGRAMS[name]
    operands = [made.to(device).requires_grad_() for made in make()]
    made = function(*operands)
    results = [made] if isinstance(made, Tensor) else list(made)
    loss = torch.stack([result.sum() for result in results]).sum()
    gradients = torch.autograd.grad(loss, operands, allow_unused=True) if loss.requires_grad else ()
    return [*(result.detach() for result in results), *(one for one in gradients if one is not None)]


@pytest.mark.parametrize("first_sight", ["record", "run"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_as_in_eager(name: str, first_sight: str) -> None:
    lazy_backend.config.first_sight = first_sight
    expected = run(name, "cpu")
    for _ in range(2):
        with count("GraphCut") as cuts:
            found = run(name, "lazy")
            lazy_backend.mark_step()
        assert cuts() == 0
        assert_same(found, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.scenario)])
def test_compiled(backend: str) -> None:
    lazy_backend.config.backend = backend
    expected = {name: run(name, "cpu") for name in PROGRAMS}
    for _ in range(2):
        found = {name: run(name, "lazy") for name in PROGRAMS}
        lazy_backend.mark_step()
        for name in PROGRAMS:
            for one, other in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(one.cpu(), other, msg=lambda text, name=name: f"{name}: {text}")
    assert lazy_backend.metrics.counter_value("Compile")
    assert not lazy_backend.metrics.counter_value("CompileFailed")


def test_a_scatter_around_its_operand_runs_at_once() -> None:
    def program(device: str) -> Tensor:
        return torch.as_strided_scatter(floats(4, 6).to(device)[:, 1:3], floats(3).to(device), (3,), (6,), 2)

    for _ in range(2):
        assert_same(program("lazy"), program("cpu"))


RESIZING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda x, out: torch.sum(x, 1, out=out),
    "mean": lambda x, out: torch.mean(x, 0, out=out),
    "logsumexp": lambda x, out: torch.logsumexp(x, 1, out=out),
    "mm": lambda x, out: torch.mm(x, x.t(), out=out),
    "amax": lambda x, out: torch.amax(x, 0, out=out),
    "prod": lambda x, out: torch.prod(x, 1, out=out),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", RESIZING)
def test_a_resized_operand_leaves_no_trace_in_what_is_inferred_later(name: str) -> None:
    """Two tensors share their data, and one is resized: later operands of the old shape are not taken for resized."""
    base = torch.ones(7, 5, device="lazy") * 2
    alias = base.detach()
    RESIZING[name](alias, base)
    lazy_backend.mark_step()
    fakes = lazy_backend.tensors.contexts.context_of("lazy").fakes
    assert [meta for meta, fake in fakes.items() if tuple(fake.shape) != meta.shape] == []


def test_results_are_resized_again_by_the_same_call() -> None:
    """PyTorch caches what fake calls return, not what they resize."""
    lazy_backend.config.first_sight = "record"
    x = torch.randn(5, 5).to("lazy")
    for times in range(3):
        for _ in range(times):  # the call comes at another place of the program, where it was not seen before
            x = x + 1
        parts = [torch.empty(0, device="lazy"), torch.empty(0, device="lazy")]
        torch.split_with_sizes_copy(x, [2, 3], out=parts)
        assert [tuple(part.shape) for part in parts] == [(2, 5), (3, 5)]
        assert torch.equal(torch.cat(parts).cpu(), x.cpu())


@pytest.mark.parametrize("first_sight", ["record", "run"])
def test_random_numbers_have_the_dtype_and_strides_that_eager_gives_them(first_sight: str) -> None:
    """The fake kernel of `normal` promotes dtypes and is contiguous; eager's takes those of the mean."""
    lazy_backend.config.first_sight = first_sight
    mean, spread = torch.zeros(3, 2, dtype=torch.bfloat16).t(), torch.ones(2, 3)
    expected = torch.normal(mean, spread)
    for _ in range(2):
        found = torch.normal(mean.to("lazy"), spread.to("lazy"))
        lazy_backend.mark_step()
        assert (found.dtype, found.cpu().shape) == (expected.dtype, expected.shape)
        base = torch.zeros(3, 2).to("lazy")
        assert torch.normal(base.t(), 1.0).stride() == torch.normal(torch.zeros(3, 2).t(), 1.0).stride()
