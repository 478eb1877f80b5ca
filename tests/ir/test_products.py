"""Products of matrices: which of them oneDNN may compute, whether it does so correctly, and who decides."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch
from artefacts import compiled
from builder import Program, aten

from lazy_backend.lowering.artefacts.runner_source import Wrapper, runner_of, runner_source
from lazy_backend.lowering.compilation import build
from lazy_backend.lowering.compilation.cpp_units import RUNNER, build_units
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.products import product_timing
from lazy_backend.lowering.products.product import MatrixProduct, TensorLayout, never, product_of

needs_onednn = pytest.mark.skipif(product_timing._onednn() is None, reason="this PyTorch does not export the function")


@pytest.fixture(autouse=True)
def _fresh_timings() -> Iterator[None]:
    product_timing._is_faster.cache_clear()
    yield
    product_timing._is_faster.cache_clear()


def layout(tensor: torch.Tensor) -> TensorLayout:
    return TensorLayout(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))


def laid_out(how: str, *size: int) -> torch.Tensor:
    """A random tensor whose matrices are stored by rows, by columns, or with gaps."""
    *batch, rows, columns = size
    if how == "columns":
        return torch.randn(*batch, columns, rows).mT
    return torch.randn(*batch, rows, 2 * columns)[..., ::2] if how == "gaps" else torch.randn(size)


# ----- what oneDNN may compute


@pytest.mark.parametrize("how", ["rows", "columns"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_dense_matrices_are_products(how: str, batch: tuple[int, ...]) -> None:
    left, right, out = laid_out(how, *batch, 4, 5), laid_out(how, *batch, 5, 6), torch.empty(*batch, 4, 6)
    found = product_of([layout(left), layout(right)], layout(out))
    assert found == MatrixProduct(layout(left), layout(right), None)
    assert found.multiplications == 4 * 5 * 6 * (3 if batch else 1)


def test_other_operands_are_left_to_aten() -> None:
    left, right, out = (layout(torch.empty(size)) for size in ((4, 5), (5, 6), (4, 6)))
    integers = TensorLayout(left.size, left.stride, "int64")
    with_gaps, empty = layout(laid_out("gaps", 4, 5)), layout(torch.empty(0, 5))
    vector = layout(torch.empty(5))
    for operand in (None, integers, with_gaps, empty, vector):
        assert product_of([operand, right], out) is None
    assert product_of([left, right], None) is None
    assert product_of([left, right], layout(torch.empty(6, 4).mT)) is None
    assert product_of([left, right, layout(torch.empty(1, 4, 6))], out) is None
    batches = [layout(torch.empty(size)) for size in ((3, 1, 5), (3, 5, 6), (3, 1, 6))]
    assert product_of(batches[:2], batches[2]) is None
    assert product_of([left, right, layout(torch.empty(6))], out) is not None


# ----- what it computes


def graph_of(op: Any, *tensors: torch.Tensor, **scales: float) -> Graph:
    program = Program()
    made = program.call(op, *map(program.input, tensors), **scales)
    return program.graph(program.call(aten.relu.default, made))


@needs_onednn
@pytest.mark.parametrize(("left", "right"), list(itertools.product(["rows", "columns", "gaps"], repeat=2)))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_are_those_of_aten(
    left: str, right: str, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = laid_out(left, *batch, 4, 5), laid_out(right, *batch, 5, 6)
    seen: list[MatrixProduct] = []
    monkeypatch.setattr(build, "prefers_onednn", lambda product: not seen.append(product))
    products = aten.bmm.default if batch else aten.mm.default
    found = compiled(graph_of(products, one, other), "native", monkeypatch)([one, other])
    torch.testing.assert_close(found[0], (one @ other).relu())
    assert len(seen) == 1  # inductor copies what has gaps


@needs_onednn
@pytest.mark.parametrize("size", [(6,), (4, 6), (1, 6), (4, 1), ()])
def test_what_is_added_is_added(size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(size), torch.randn(4, 5), torch.randn(5, 6)]
    seen: list[MatrixProduct] = []
    monkeypatch.setattr(build, "prefers_onednn", lambda product: not seen.append(product))
    call = compiled(graph_of(aten.addmm.default, *tensors), "native", monkeypatch)
    torch.testing.assert_close(call(list(tensors))[0], torch.addmm(*tensors).relu())
    scaled = compiled(graph_of(aten.addmm.default, *tensors, alpha=3), "native", monkeypatch)
    torch.testing.assert_close(scaled(list(tensors))[0], torch.addmm(*tensors, alpha=3).relu())


@needs_onednn
@pytest.mark.parametrize("size", [(4, 5, 6), (128, 128, 128), (1, 7, 9), (33, 1, 65), (64, 256, 1)])
def test_what_was_in_the_memory_before_does_not_count(size: tuple[int, int, int]) -> None:
    rows, inner, columns = size
    multiply = product_timing._onednn()
    assert multiply is not None
    # a view, so that the memory is not aligned
    left, right = torch.randn(rows * inner + 3)[3:].view(rows, inner), torch.randn(inner, columns)
    for value in (0.0, torch.inf):
        left[0, 0] = value
        out = torch.full((rows, columns), torch.nan)
        multiply(left, right, out, 0.0)
        torch.testing.assert_close(out, left @ right, equal_nan=True)


@needs_onednn
def test_symbolic_products_are_chosen_for_the_sizes_they_were_seen_with(tmp_path: Path) -> None:
    (call,) = ast.parse(
        "def call(self, args):\n"
        "    s0, arg0_1, arg1_1 = args\n"
        "    buf0 = empty_strided_cpu((2*s0, 6), (6, 1), torch.float32)\n"
        "    extern_kernels.mm(reinterpret_tensor(arg0_1, (2*s0, 5), (5, 1), 0), arg1_1, out=buf0)\n"
        "    return (buf0, )"
    ).body
    assert isinstance(call, ast.FunctionDef)
    layouts = [layout(torch.empty(2, 3, 5)), layout(torch.empty(5, 6))]
    seen: list[MatrixProduct] = []
    runner = runner_of(Wrapper(call, {}, [3], layouts, lambda product: not seen.append(product)))
    assert seen == [MatrixProduct(layout(torch.empty(6, 5)), layouts[1], None)]
    assert runner.multiplies
    assert not runner_of(Wrapper(call, {}, [3], layouts, never)).multiplies

    module = loaded(build_units({RUNNER: runner_source([runner], "a test")})[0], tmp_path)
    module.bind0((), ())
    right = torch.randn(5, 6)
    for rows in (3, 1, 0):  # oneDNN itself refuses empty products
        left = torch.randn(2, rows, 5)
        (found,) = module.call0([rows, left, right])
        torch.testing.assert_close(found, left.view(2 * rows, 5) @ right)


def loaded(extension: bytes, folder: Path) -> Any:
    file = folder / f"compiled{EXTENSION_SUFFIXES[0]}"
    file.write_bytes(extension)
    spec = importlib.util.spec_from_file_location("compiled", file)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


# ----- who decides


@needs_onednn
def test_the_faster_library_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    product = product_of([layout(torch.empty(128, 128))] * 2, layout(torch.empty(128, 128)))
    assert product is not None
    onednn = product_timing._onednn()
    assert onednn is not None

    def slowly(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, beta: float) -> None:
        for _ in range(50):
            onednn(left, right, out, beta)

    calls = itertools.count()

    def instantly(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, beta: float) -> None:
        if next(calls) == 0:  # the one whose result is checked
            onednn(left, right, out, beta)

    def wrongly(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, beta: float) -> None:
        out.fill_(1.0)

    for multiply, is_preferred in ((slowly, False), (instantly, True), (wrongly, False)):
        monkeypatch.setattr(product_timing, "_onednn", lambda multiply=multiply: multiply)
        product_timing._is_faster.cache_clear()
        assert product_timing.prefers_onednn(product) is is_preferred, multiply


@needs_onednn
@pytest.mark.parametrize("size", [(96,), (1, 96), (128, 1), (8, 1, 96), (8, 128, 96), ()])
def test_products_with_expanded_addends_are_timed(size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor expands what is added before: some of it is in the same memory."""
    timed: list[MatrixProduct] = []
    monkeypatch.setattr(product_timing, "_SMALLEST", 1)
    monkeypatch.setattr(build, "prefers_onednn", lambda p: not timed.append(p) and product_timing.prefers_onednn(p))
    tensors = [torch.randn(size), torch.randn(8, 128, 64), torch.randn(8, 64, 96)]
    call = compiled(graph_of(aten.baddbmm.default, *tensors), "native", monkeypatch)
    torch.testing.assert_close(call(list(tensors))[0], torch.baddbmm(*tensors).relu())
    assert timed


def test_what_cannot_be_timed_is_left_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(product: MatrixProduct) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(product_timing, "_may_choose", lambda: True)
    monkeypatch.setattr(product_timing, "_time", fail)
    square = product_of([layout(torch.empty(256, 256))] * 2, layout(torch.empty(256, 256)))
    assert square is not None
    threads = torch.get_num_threads()
    assert product_timing.prefers_onednn(square) is False
    assert torch.get_num_threads() == threads


def test_nothing_is_timed_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def time(product: MatrixProduct) -> bool:
        raise AssertionError("timed")

    monkeypatch.setattr(product_timing, "_is_faster", time)
    square = product_of([layout(torch.empty(256, 256))] * 2, layout(torch.empty(256, 256)))
    small = product_of([layout(torch.empty(8, 8))] * 2, layout(torch.empty(8, 8)))
    assert square is not None
    assert small is not None
    assert product_timing.prefers_onednn(small) is False
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert product_timing.prefers_onednn(square) is False
    torch.use_deterministic_algorithms(True)
    try:
        assert product_timing.prefers_onednn(square) is False
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("batch", [(), (100,)])
def test_very_long_matrices_are_timed_in_part(batch: tuple[int, ...]) -> None:
    left, right = laid_out("columns", *batch, 5000, 64), laid_out("rows", *batch, 64, 3000)
    size = (*batch, 5000, 3000)
    with torch.device("meta"):
        product = product_of([layout(left), layout(right), layout(torch.empty(3000))], layout(torch.empty(size)))
    assert product is not None
    short = product_timing._shortened(product)
    assert short.left.size[-2:] == (1024, 64)
    assert short.left.stride[-2:] == (1, 1024)
    assert short.right.size[-2:] == (64, 1024)
    assert short.added is not None
    assert short.added.size == (1024,)
    assert product_timing._shortened(short) == short
