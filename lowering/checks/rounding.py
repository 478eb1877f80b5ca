"""Differences between two runs of one graph, and which of them rounding explains.

In: the results of the interpreter and of a compiled plan for the same inputs. Out: the results that disagree.

Note [What rounding explains]
A compiler fuses kernels and sums in another order, so its floats differ from eager's. How far they may is not a
tolerance of taste: eager itself says it.

1. Results of equal bits agree. Others are suspected if integers or bools differ at all, or floats by more than
   `ROUNDINGS` roundings (`finfo.eps` of the graph's coarsest floats) of the largest element of that result.
2. Where results are suspected, the interpreter runs again with moved roundings (Note [Moved roundings]). This moves an
   element as far as rounding can: hardly, where the computation is sound; far, where it divides noise by noise (a bias
   before a batch norm, in Adam), or where a choice hangs on a tie. A plan agrees if no element is more than `ROUNDINGS`
   roundings and `TIMES` as far from the interpreter's as in the furthest of `SAMPLES` such runs, and how far the
   result's elements move on average, once: many elements on ties excuse no other. As many runs follow whose elements
   are moved `TIMES` as far, either way, and which are not multiplied: noise that is all that a sum leaves may be so
   large, too, and then have another sign, on which a whole step of Rprop hangs. An element that is NaN in such a run
   alone comes of memory that nobody has written, and has no value to compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazy_backend.lowering.ir.graph import Graph, empty_of, extent, meta_of

ROUNDINGS = 16
TIMES = 8
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """The largest difference in one result, and the result's largest element; for integers 1 and 0."""

    size: float
    scale: float


def differences(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> dict[int, Discrepancy]:
    """The results that are not equal, by place."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {place: difference(one, other) for place, (one, other) in pairs if not are_equal(one, other)}


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of one dtype have equal elements: as `torch.equal`, of any dtype."""
    return torch.equal(_comparable(one), _comparable(other))


def difference(one: torch.Tensor, other: torch.Tensor) -> Discrepancy:
    """Between two results."""
    one, other = _comparable(one), _comparable(other)
    if one.is_floating_point() or one.is_complex():
        size, scale = _largest(_real(one) - _real(other)), _largest(_real(one))
        if math.isfinite(size) and math.isfinite(scale):
            return Discrepancy(size, scale)
    return Discrepancy(_largest(_apart(one, other)), _scale_of(one))


def is_suspect(found: Discrepancy, eps: float) -> bool:
    """Whether a difference is more than a few roundings."""
    return found.size > ROUNDINGS * eps * found.scale


class Spread:
    """How far rounding moves the elements of one result, in eager."""

    def __init__(self, ours: torch.Tensor) -> None:
        self._ours = ours
        self._explained = torch.zeros(())

    def add(self, further: torch.Tensor, roundings: int = 1) -> None:
        """Add the result of a run whose elements are moved by so many roundings."""
        moved = _apart(self._ours, further).mul_(TIMES / roundings)
        if roundings > 1:
            moved.masked_fill_(moved.isinf(), 0.0)  # out of an operator's domain
        self._explained = torch.maximum(self._explained.to(moved), moved)

    def unexplained(self, theirs: torch.Tensor, eps: float) -> Discrepancy | None:
        """The largest difference to another result that rounding does not explain, if there is one."""
        apart, scale = _apart(self._ours, theirs), _scale_of(self._ours)
        usual = self._explained.masked_fill(self._explained.isinf(), 0.0).mean() / TIMES
        wrong = apart.masked_fill_(apart <= self._explained + usual + ROUNDINGS * eps * scale, 0.0)
        return Discrepancy(_largest(wrong), scale) if wrong.any() else None


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far elements are apart: 0 where both are NaN, infinite where one is; 1 for integers that differ."""
    one, other = _comparable(one), _comparable(other)
    if not (one.is_floating_point() or one.is_complex()):
        return (one != other).float()
    one, other = _real(one), _real(other)
    apart = (one - other).abs_().nan_to_num_(math.inf, math.inf)
    return apart.masked_fill_((one == other) | (one.isnan() & other.isnan()), 0.0)


def _scale_of(tensor: torch.Tensor) -> float:
    tensor = _comparable(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return _largest(_real(tensor).nan_to_num(0.0, 0.0, 0.0))


# Dtypes that PyTorch keeps and does not compare.
_BYTES = frozenset(
    getattr(torch, name)
    for name in ("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)
_INTEGERS = {1: torch.uint8, 2: torch.int16}


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one of a dtype that PyTorch compares."""
    if tensor.is_complex() and tensor.dtype.itemsize == 4:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]) if tensor.dtype in _BYTES else tensor


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Real numbers of at least 32 bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)  # ten times as fast as `vector_norm`, and NaN if one is
    return max(high.item(), -low.item())


def coarsest_eps(graph: Graph) -> float:
    """`finfo.eps` of the coarsest floats that the graph computes with; 0 if it has none.

    Floats of 8 bits or less are stored alone: no operator computes with them, and 16 of their roundings are anything.
    """
    made = (value for node in graph.nodes for value in node.outputs if value is not None)
    dtypes = {value.meta.dtype for value in (*graph.inputs, *made)}
    floats = [dtype for dtype in dtypes if (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1]
    return max((torch.finfo(dtype).eps for dtype in floats), default=0.0)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in memory of its own, laid out alike, though not with what lies before and behind it."""
    if tensor.is_contiguous() and not (tensor.storage_offset() or tensor.is_conj() or tensor.is_neg()):
        return tensor.clone()  # in a seventh of the time
    made = empty_of(meta_of(tensor), tensor.device)
    memory_of(made).copy_(memory_of(tensor))
    return made


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from the first to the last, each once."""
    offset = tensor.storage_offset()
    return tensor.as_strided((extent(meta_of(tensor)) - offset,), (1,), offset)
