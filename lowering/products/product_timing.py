"""Time the libraries that multiply matrices. See Note [Which library multiplies].

In: a product. Out: whether oneDNN computes it faster than what ATen calls. Runs in the worker process, on one thread:
beside the program that waits for the artefact, two threads would measure the other program.
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from lazy_backend.lowering.products.product import MatrixProduct, TensorLayout
from lazy_backend.ports.native_code import PRODUCT, library
from lazy_backend.ports.replacements import inductor
from lazy_backend.ports.table import PRODUCTS

# Multiplications. A smaller product is over before oneDNN has found its kernel.
_SMALLEST = 1 << 20
# Of a larger size this many rows or columns are timed: the libraries' speeds have the same ratio from there on.
_LONGEST = 1024
# Batches that are timed.
_MOST = 64
# oneDNN must take no more than this share of ATen's time: the choice is not left to chance.
_MARGIN = 0.9
# Calls of each library, in turn, of which the fastest counts.
_ROUNDS = 8
# Seconds for one product: large ones are called less often.
_BUDGET = 0.05


def prefers_onednn(product: MatrixProduct) -> bool:
    """Whether oneDNN is faster at `product` under the current settings."""
    if product.multiplications < _SMALLEST or not _may_choose():
        return False
    return _is_faster(_shortened(product))


def _may_choose() -> bool:
    """Whether the user's settings leave the choice."""
    return (
        not torch.are_deterministic_algorithms_enabled()
        and torch.backends.mkldnn.is_available()
        and inductor.is_mkldnn_enabled()
        and inductor.get_precision is not None
        and inductor.get_precision("mkldnn", "matmul") in ("none", "ieee")
        and _onednn() is not None
    )


@functools.cache
def _onednn() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None] | None:
    """oneDNN's product: left, right, out, and what to multiply the values in out with before they are added."""
    if platform.machine() not in ("x86_64", "AMD64") or not PRODUCTS.fits():
        return None  # on other machines ATen calls oneDNN by itself
    function: Any = library()[PRODUCT]
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_float] * 2
    function.restype = None
    pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_in.argtypes, pointer_in.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p

    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, beta: float) -> None:
        capsules = inductor.to_handles([left, right, out])
        try:
            function(*[pointer_in(capsule, None) for capsule in capsules], beta, 1.0)
        finally:  # or the references in the capsules would stay
            inductor.from_handles(capsules)

    return multiply


def _shortened(product: MatrixProduct) -> MatrixProduct:
    """The product with fewer rows, columns and batches, where it has very many."""
    if max(product.left.size + product.right.size) <= _LONGEST:
        return product

    def shortened(layout: TensorLayout) -> TensorLayout:
        *batch, rows, columns = layout.size
        size = [*(min(count, _MOST) for count in batch), min(rows, _LONGEST), min(columns, _LONGEST)]
        by_column = layout.stride[-1] != 1 and columns != 1
        dense = torch.empty([*size[:-2], *reversed(size[-2:])] if by_column else size, device="meta")
        return TensorLayout(tuple(size), (dense.mT if by_column else dense).stride(), layout.dtype)

    added = product.added
    if added is not None:
        size = tuple(min(count, _LONGEST) for count in added.size)
        added = TensorLayout(size, torch.empty(size, device="meta").stride(), added.dtype)
    return MatrixProduct(shortened(product.left), shortened(product.right), added)


@functools.lru_cache(maxsize=4096)
def _is_faster(product: MatrixProduct) -> bool:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _time(product)
    except RuntimeError:  # what cannot be timed is not worth a compile: ATen can compute it
        return False
    finally:
        torch.set_num_threads(threads)


def _time(product: MatrixProduct) -> bool:
    left, right = _tensor(product.left), _tensor(product.right)
    size = (*left.shape[:-1], right.shape[-1])
    from_aten, from_onednn = torch.empty(size), torch.empty(size)
    added = None if product.added is None else _tensor(product.added)
    onednn = _onednn()
    assert onednn is not None

    def by_aten() -> None:
        if added is None:
            torch.matmul(left, right, out=from_aten)
        else:
            add_product(added, left, right, out=from_aten)

    def by_onednn() -> None:
        if added is not None:
            from_onednn.copy_(added)
        onednn(left, right, from_onednn, 0.0 if added is None else 1.0)

    add_product: Any = torch.addmm if left.dim() == 2 else torch.baddbmm
    contenders = (by_aten, by_onednn)
    for call in contenders:  # which find their kernels
        call()
    if not torch.allclose(from_aten, from_onednn, rtol=1e-4, atol=1e-5 * left.shape[-1]):
        return False
    fastest = [math.inf, math.inf]
    begin = perf_counter()
    for number in range(_ROUNDS):
        for place, call in enumerate(contenders):
            start = perf_counter()
            call()
            fastest[place] = min(fastest[place], perf_counter() - start)
        if number and perf_counter() - begin > _BUDGET:
            break
    return fastest[1] < _MARGIN * fastest[0]


def _tensor(layout: TensorLayout) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    memory = torch.empty(extent).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    return memory.as_strided(layout.size, layout.stride)  # what is added may be expanded
