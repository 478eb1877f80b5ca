"""Writes: over PyTorch's database of operators, a recorded call writes the inputs that eager's call changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import as_bytes

from lazy_backend import CaptureError, config, serve
from lazy_backend.ports import trees

# In place, on the samples of float32, they leave the values as they are.
UNCHANGING = {"conj_physical", "nan_to_num"}

MOST_SAMPLES = 8
PARTS = 4


def entries() -> list[Any]:
    """Operators of PyTorch's database; imported late, since that takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # hypothesis is not there
        from torch.testing._internal.common_methods_invocations import op_db
    return [info for info in op_db if torch.float32 in info.supported_dtypes("cpu")]


Writes = tuple[tuple[bool, ...], tuple[bool, ...]]  # of the inputs of a call: as decided, and in eager


def calls_of(info: Any, op: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Calls of the samples, as functions of their tensors."""
    for place, sample in enumerate(info.sample_inputs("cpu", torch.float32)):
        if place == MOST_SAMPLES:
            return
        leaves, spec = trees.tree_flatten((sample.input, sample.args, sample.kwargs))
        if "norm" in info.name and 0.0 in [leaf for leaf in leaves if isinstance(leaf, float)]:
            continue  # a momentum with which statistics are written as they are
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors: torch.Tensor, leaves: Any = leaves, spec: Any = spec, places: Any = places) -> list[Any]:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            first, args, kwargs = trees.tree_unflatten(given, spec)
            results = trees.tree_leaves(op(first, *args, **kwargs))
            return [result for result in results if isinstance(result, torch.Tensor)]

        yield call, [leaves[place].detach() for place in places]


def writes_of(call: Callable[..., Any], tensors: list[torch.Tensor]) -> Writes | None:
    """What a call writes; None if it cannot be served, or eager refuses it."""
    if not tensors or any(tensor.layout != torch.strided or tensor._base is not None for tensor in tensors):
        return None
    own = [tensor.clone() for tensor in tensors]
    try:
        with torch.no_grad():
            call(*own)
        served = serve(call, tuple(tensors))
    except (CaptureError, RuntimeError, NotImplementedError):
        return None
    places = [place for _, place in served.graph_signature.user_inputs]
    written = set(served.graph.mutated_inputs())
    changed = tuple(as_bytes(one) != as_bytes(other) for one, other in zip(own, tensors, strict=True))
    return tuple(place in written for place in places), changed


def changes_geometry(info: Any) -> bool:
    """Whether an operator in place writes no memory, as `t_`."""
    packet = getattr(torch.ops.aten, f"{info.name.removesuffix('_')}_", None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return any(torch.Tag.inplace_view in overload.tags for overload in overloads)


def assert_writes_of(info: Any, op: Callable[..., Any], in_place: bool) -> None:
    found = [writes for call in calls_of(info, op) if (writes := writes_of(*call)) is not None]
    for decided, changed in found:
        if not in_place:
            assert decided == changed
        else:  # of some samples, the values stay the same
            assert all(is_written or not is_changed for is_written, is_changed in zip(decided, changed, strict=True))
            assert not any(decided[1:])
    if in_place and found and info.full_name not in UNCHANGING:
        assert any(changed[0] for _, changed in found)


@pytest.mark.scenario
@pytest.mark.filterwarnings("ignore")  # deprecated operators
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_written_is_what_eager_changes(part: int) -> None:
    config.compile = "off"
    wrong = []
    for info in entries()[part::PARTS]:
        in_place = None if changes_geometry(info) else info.get_inplace()
        for op in (info.op, in_place):
            if op is None or "jiterator" in info.name:  # CUDA's
                continue
            try:
                assert_writes_of(info, op, op is not info.op)
            except AssertionError as error:
                wrong.append(f"{info.full_name}, {op}: {error}")
    assert not wrong, "\n".join(wrong)
