"""Products of matrices, as a runner meets them.

In: the layouts of an operator's tensors. Out: a `MatrixProduct`, if oneDNN could compute it instead of ATen; and the
C++ that has oneDNN do so.

Note [Which library multiplies]
ATen gives float32 products to one library, MKL. On processors that MKL has no kernels for, such as AMD's with AVX-512,
oneDNN, which is part of PyTorch too, takes half the time for products of a few million multiplications, and twice the
time for small ones, since it looks up a kernel at each call. So whoever makes an artefact times both at each product
(`product_timing.py`), and the runner calls the faster one. An artefact keeps that choice: whoever loads it
gets the same numbers. Where algorithms must be deterministic, or oneDNN is switched off, nothing is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# What ATen calls for products of bfloat16, which takes float32 and any layout as well. An operator's handles are
# pointers to its tensors.
DEFINITION = """
namespace at {
class Tensor;
namespace native { void mkldnn_matmul(const Tensor&, const Tensor&, const Tensor&, float beta, float alpha); }
}
extern "C" {
AOTITorchError aoti_torch_copy_(AtenTensorHandle, AtenTensorHandle, int32_t);
AOTITorchError aoti_torch_zero_(AtenTensorHandle);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle, int64_t*);
}
static void multiply(AtenTensorHandle left, AtenTensorHandle right, AtenTensorHandle out, AtenTensorHandle added) {
    int64_t of_left, of_right;
    check(aoti_torch_get_numel(left, &of_left));
    check(aoti_torch_get_numel(right, &of_right));
    const bool is_empty = !of_left || !of_right;
    if (added) check(aoti_torch_copy_(out, added, 0));
    else if (is_empty) check(aoti_torch_zero_(out));
    if (is_empty) return;  // oneDNN refuses these
    const auto tensor = [](AtenTensorHandle handle) -> at::Tensor& { return *reinterpret_cast<at::Tensor*>(handle); };
    at::native::mkldnn_matmul(tensor(left), tensor(right), tensor(out), added ? 1.0f : 0.0f, 1.0f);
}
"""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Of a tensor: its sizes and strides, those of an example where they are symbolic, and its dtype by name."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`left @ right`, one of two matrices or of two batches of matrices, plus `added` if that is not None."""

    left: TensorLayout
    right: TensorLayout
    added: TensorLayout | None

    @property
    def multiplications(self) -> int:
        return math.prod(self.left.size) * self.right.size[-1]


# Whether oneDNN is to compute a product.
Prefers = Callable[[MatrixProduct], bool]


def never(product: MatrixProduct) -> bool:
    """Leave every product to ATen."""
    return False


def product_of(operands: Sequence[TensorLayout | None], out: TensorLayout | None) -> MatrixProduct | None:
    """The product that an operator computes, if oneDNN could. `operands`: left, right and, perhaps, what is added."""
    known = [one for one in operands if one is not None]
    if out is None or len(known) < len(operands) or {one.dtype for one in (*known, out)} != {"float32"}:
        return None
    left, right, *others = known
    added = others[0] if others else None
    if len(out.size) not in (2, 3) or not len(left.size) == len(right.size) == len(out.size):
        return None
    if not _is_contiguous(out) or not _is_dense(left) or not _is_dense(right):
        return None
    # oneDNN may leave single rows of a batch unwritten: it depends on their stride, which says nothing otherwise
    if len(out.size) == 3 and out.size[1] == 1:
        return None
    if added is not None and len(added.size) > len(out.size):
        return None
    return MatrixProduct(left, right, added)


def _is_contiguous(layout: TensorLayout) -> bool:
    step = 1
    for size, stride in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        if size == 0 or (size != 1 and stride != step):
            return False
        step *= size
    return True


def _is_dense(layout: TensorLayout) -> bool:
    """Whether the matrices are stored row by row, or column by column, and all of them in the same way."""
    swapped = TensorLayout(_swapped(layout.size), _swapped(layout.stride), layout.dtype)
    return _is_contiguous(layout) or _is_contiguous(swapped)


def _swapped(numbers: tuple[int, ...]) -> tuple[int, ...]:
    *batch, rows, columns = numbers
    return (*batch, columns, rows)
