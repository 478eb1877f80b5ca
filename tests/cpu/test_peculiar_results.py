"""Results that eager gives in an unusual form: conjugate views, odd strides, rounding that depends on `out`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, grid

import lazy_backend
from lazy_backend import config


def complexes(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.complex64, generator=generator).to(device)


def solved_from_the_right(device: str) -> torch.Tensor:
    factors = torch.linalg.lu_factor(complexes(device, 3, 3))
    return torch.linalg.lu_solve(*factors, complexes(device, 3, 3), left=False)


def floats(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator).to(device)


def product_into(device: str, *places: Any) -> torch.Tensor:
    out = torch.ones(100, 100).to(device)[places]
    torch.matmul(floats(device, out.shape[0], 70), floats(device, 70, out.shape[1]), out=out)
    return out


def linear_into(device: str, dtype: torch.dtype) -> torch.Tensor:
    input, weight, bias = (floats(device, *shape).to(dtype) for shape in ((6, 40), (5, 40), (5,)))
    out = torch.ones(6, 5, dtype=dtype).to(device)
    torch.ops.aten.linear.out(input, weight, bias, out=out)
    return out


RESULTS: dict[str, Callable[[str], torch.Tensor]] = {
    "vdot_of_a_conjugate": lambda d: torch.vdot(complexes(d, 3), complexes(d, 3).conj()),
    "vdot_of_conjugates": lambda d: torch.vdot(complexes(d, 3).conj(), complexes(d, 3).conj()),
    "vdot": lambda d: torch.vdot(complexes(d, 3), complexes(d, 3)),
    "lu_solve_from_the_right": solved_from_the_right,
    "lu_solve_without_elements": lambda d: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(complexes(d, 3, 3)), complexes(d, 0, 3), left=False
    ),
    "as_strided_scatter": lambda d: torch.as_strided_scatter(grid(d, 12)[1::2], grid(d, 2), (2,), (2,), 3),
    "matmul_out": lambda d: product_into(d, slice(None), slice(None)),
    "matmul_out_strided": lambda d: product_into(d, slice(None, None, 2), slice(None, None, 2)),
    "matmul_out_resized": lambda d: torch.matmul(floats(d, 3, 4), floats(d, 4, 2), out=torch.empty(0).to(d)),
    "matmul_out_batched": lambda d: torch.matmul(
        floats(d, 5, 3, 40), floats(d, 40, 2), out=torch.ones(5, 3, 2).to(d)
    ),
    "linear_out_half": lambda d: linear_into(d, torch.float16),
    "linear_out": lambda d: linear_into(d, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("first_sight", ["run", "record"])
@pytest.mark.parametrize("name", RESULTS)
def test_as_eager(name: str, first_sight: str) -> None:
    config.first_sight = first_sight
    expected = RESULTS[name]("cpu")
    for _ in range(3):
        made = RESULTS[name]("lazy")
        assert (made.is_conj(), made.is_neg()) == (expected.is_conj(), expected.is_neg())
        assert made.stride() == expected.stride()
        assert_same(made.clone(), expected.clone())
        lazy_backend.mark_step()


@pytest.mark.parametrize("name", RESULTS)
def test_compiled(name: str) -> None:
    config.backend = "aot_eager"
    for _ in range(3):
        torch.testing.assert_close((RESULTS[name]("lazy") * 2).cpu(), RESULTS[name]("cpu") * 2)
        lazy_backend.mark_step()


def test_an_out_tensor_knows_that_it_was_written() -> None:
    out = torch.ones(2, 2).to("lazy")
    version = out._version
    assert torch.matmul(floats("lazy", 2, 3), floats("lazy", 3, 2), out=out) is out
    assert out._version == version + 1
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.matmul(floats("lazy", 2, 3).requires_grad_(), floats("lazy", 3, 2), out=out)
    with torch.inference_mode():
        assert_same(torch.matmul(floats("lazy", 2, 3), floats("lazy", 3, 2), out=out), out.cpu())


def test_gradients_of_conjugate_results() -> None:
    for name in ("vdot_of_a_conjugate", "lu_solve"):
        gradients = []
        for device in ("lazy", "cpu"):
            x = complexes(device, 3, 3).requires_grad_()
            if name == "lu_solve":
                made = torch.linalg.lu_solve(*torch.linalg.lu_factor(x), complexes(device, 3, 3), left=False)
            else:
                made = torch.vdot(x[0], x[1].conj())
            made.abs().sum().backward()
            gradients.append(x.grad)
        assert_same(*gradients)


def test_the_gradient_of_ormqr_lies_as_its_operand() -> None:
    strides = []
    for device in ("lazy", "cpu"):
        x = torch.empty_strided((5, 3), (1, 5), device=device).copy_(floats(device, 5, 3)).requires_grad_()
        factors = floats(device, 3).requires_grad_()
        made = torch.ormqr(x, factors, floats(device, 5, 2))
        found = torch.autograd.grad(made.sum(), [x, factors], retain_graph=True)
        (twice,) = torch.autograd.grad(made.pow(2).sum(), [x], create_graph=True)
        twice.sum().backward()
        strides.append([gradient.stride() for gradient in found])
        assert x.grad is not None
    assert strides[0] == strides[1] == [(1, 5), (1,)]
