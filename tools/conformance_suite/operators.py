"""Programs of op_db: forward, gradients, in-place, `out=`, and inputs that eager refuses.

In: a `Case` of op_db. Out: its programs, the same on every call from the same random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils._pytree import tree_leaves, tree_map

from conformance_suite.cases import Case, operators
from conformance_suite.programs import Program, Sample, gradients_between, spread
from conformance_suite.targets import Target

# Samples of one case, spread evenly over all there are: a few entries have more than a thousand.
MAX_SAMPLES = 40
MAX_FURTHER_SAMPLES = 12  # of the second dtype
LAID_OUT_SAMPLES = 3  # that are also tried in each of `_LAYOUTS`
ODD_SAMPLES = 8  # that are also tried non-contiguous, or with odd `out` tensors

# Samples of these hold tensors on the CPU by intention, whatever the device: lengths and indices.
HOST_OPERANDS = ("narrow", "tensor_split", "__getitem__", "index_put")

# Eager itself crashes without elements.
NOT_WITHOUT_ELEMENTS = ("nn.functional.pdist",)


def op_programs(case: Case) -> Iterator[Program]:
    op = operators()[case.name]
    if case.variant == "errors":
        for number, error in enumerate(op.error_inputs("cpu")):
            sample = error.sample_input
            yield _forward(op, Sample(f"error input {number}", (sample.input, *sample.args), sample.kwargs))
        return
    makers = {"forward": _forward_of, "gradients": _gradients_of, "in-place": _in_place_of, "out": _out_of}
    yield from makers[case.variant](op, _samples(op, case))


def _samples(op: Any, case: Case) -> list[Sample]:
    """Samples of the database, some of them non-contiguous and in other layouts too, and one without elements."""
    differentiable = case.variant == "gradients" and op.supports_autograd
    given = list(op.sample_inputs("cpu", case.torch_dtype, requires_grad=differentiable))
    hosts = _host_leaves(op, case, len(given))
    samples = [_sample(f"sample {n}", sample, hosts[n]) for n, sample in enumerate(given)]
    samples = spread(samples, MAX_SAMPLES if case.dtype == "float32" else MAX_FURTHER_SAMPLES)
    odd = spread(samples, ODD_SAMPLES)
    if case.mode == "mixed":
        return [_mixed(sample, first) for sample in odd for first in (True, False)]
    laid_out = [_laid_out(sample, layout) for sample in spread(samples, LAID_OUT_SAMPLES) for layout in _LAYOUTS]
    empty = [] if op.full_name in NOT_WITHOUT_ELEMENTS else _without_elements(samples)
    return [*samples, *filter(None, map(_non_contiguous, odd)), *filter(None, laid_out), *empty]


def _sample(label: str, sample: Any, host: Sequence[int]) -> Sample:
    process, broadcasts = sample.output_process_fn_grad, sample.broadcasts_input
    return Sample(label, (sample.input, *sample.args), sample.kwargs, process, broadcasts, host)


def _host_leaves(op: Any, case: Case, count: int) -> list[list[int]]:
    """Which leaves of each sample the database leaves on the CPU when it makes samples for another device."""
    if op.full_name not in HOST_OPERANDS:
        return [[]] * count
    elsewhere = op.sample_inputs("meta", case.torch_dtype)
    leaves = [tree_leaves(([sample.input, *sample.args], sample.kwargs)) for sample in elsewhere]
    return [[n for n, leaf in enumerate(one) if isinstance(leaf, torch.Tensor) and leaf.is_cpu] for one in leaves]


def _changed(sample: Sample, label: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    """The sample with `change` done to each tensor; a tensor that stands twice stays one."""
    done: dict[int, Any] = {}

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        if id(leaf) not in done:
            with torch.no_grad():
                done[id(leaf)] = change(leaf.detach()).requires_grad_(leaf.requires_grad)
        return done[id(leaf)]

    args, kwargs = tree_map(once, (list(sample.args), sample.kwargs))
    return Sample(f"{sample.label} {label}", args, kwargs, sample.process, sample.broadcasts, sample.host)


def _non_contiguous(sample: Sample) -> Sample | None:
    try:
        return _changed(sample, "non-contiguous", noncontiguous_like)
    except RuntimeError:  # a few kinds of tensors have no such form
        return None


def _in_order(tensor: torch.Tensor, *order: int) -> torch.Tensor:
    """A copy whose dimensions lie in memory in this order, outermost first."""
    return tensor.permute(order).contiguous().permute(sorted(range(tensor.dim()), key=lambda place: order[place]))


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    return _in_order(tensor, *reversed(range(tensor.dim())))


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return _in_order(tensor, 0, *range(2, tensor.dim()), 1) if tensor.dim() > 1 else tensor.clone()


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand_as(tensor) if tensor.dim() and tensor.numel() else tensor.clone()


def _odd_steps(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in channels-last order whose dimensions of one element have a step of 1, as a batch of one may."""
    moved = _channels_last(tensor)
    steps = zip(moved.shape, moved.stride(), strict=True)
    return moved.as_strided(moved.shape, [1 if size == 1 else step for size, step in steps])


_LAYOUTS = {
    "reversed": _reversed,
    "channels last": _channels_last,
    "expanded": _expanded,
    "odd steps": _odd_steps,
}


def _laid_out(sample: Sample, layout: str) -> Sample | None:
    try:
        return _changed(sample, layout, _LAYOUTS[layout])
    except RuntimeError:  # a few kinds of tensors have no such form
        return None


def _mixed(sample: Sample, lowers_first: bool) -> Sample:
    """The sample with its first tensor in bfloat16, or all others."""
    tensors = (leaf for leaf in tree_leaves(sample.args) if isinstance(leaf, torch.Tensor))
    first = next((leaf for leaf in tensors if leaf.layout == torch.strided), None)

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        is_first = first is not None and tensor.data_ptr() == first.data_ptr()
        return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 and is_first is lowers_first else tensor

    return _changed(sample, "with a lower first" if lowers_first else "with lower others", lower)


def _without_elements(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample with its first dimension shrunk to nothing, unless the database has one without elements."""
    tensors = [leaf for sample in samples for leaf in tree_leaves(sample.args) if isinstance(leaf, torch.Tensor)]
    if not tensors or any(not tensor.numel() for tensor in tensors):
        return []
    return [_changed(samples[0], "without elements", lambda tensor: tensor[:0].clone() if tensor.dim() else tensor)]


def _forward_of(op: Any, samples: Iterable[Sample]) -> Iterator[Program]:
    return (_forward(op, sample) for sample in samples)


def _forward(op: Any, sample: Sample) -> Program:
    def run(target: Target) -> Any:
        args, kwargs = sample.on(target)
        return {"operands": (args, kwargs), "result": op(*args, **kwargs)}

    return Program(sample.label, run, sample.on_device)


def _gradients_of(op: Any, samples: Iterable[Sample]) -> Iterator[Program]:
    return (_gradients(op, sample) for sample in samples)


def _gradients(op: Any, sample: Sample) -> Program:
    def run(target: Target) -> Any:
        args, kwargs = sample.on(target)
        result = op(*args, **kwargs)
        gradients = gradients_between((args, kwargs), sample.process(result), target)
        return {"operands": (args, kwargs), "result": result, "gradients": gradients}

    return Program(sample.label, run, sample.on_device)


def _in_place_of(op: Any, samples: Iterable[Sample]) -> Iterator[Program]:
    for sample in samples:
        yield _in_place(op, sample)
        if op.supports_inplace_autograd and not sample.broadcasts:
            yield _in_place_gradients(op, sample)


def _in_place(op: Any, sample: Sample) -> Program:
    def run(target: Target) -> Any:
        args, kwargs = sample.on(target)
        return {"operands": (args, kwargs), "result": op.get_inplace()(*args, **kwargs)}

    return Program(sample.label, run, sample.on_device)


def _in_place_gradients(op: Any, sample: Sample) -> Program:
    wanted = _changed(sample, "with gradients", lambda tensor: tensor)

    def run(target: Target) -> Any:
        args, kwargs = wanted.on(target)
        leaf = args[0]
        if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return None
        leaf.requires_grad_()
        result = op.get_inplace()(leaf.clone(), *args[1:], **kwargs)
        return {"result": result, "gradients": gradients_between(leaf, wanted.process(result), target)}

    return Program(wanted.label, run, sample.on_device)


# ----- out= variants


def _garbage(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(tuple(shape), dtype=dtype)


def _right(expected: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(expected).fill_(1)


def _empty(expected: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=expected.dtype)


def _strided(expected: torch.Tensor) -> torch.Tensor:
    return noncontiguous_like(_right(expected))


def _too_large(expected: torch.Tensor) -> torch.Tensor:
    *others, last = expected.shape or (0,)
    return _garbage((*others, last + 1), expected.dtype)


def _other_dtype(expected: torch.Tensor) -> torch.Tensor:
    exact = expected.dtype.is_floating_point or expected.dtype.is_complex
    return _garbage(expected.shape, torch.int64 if exact else torch.float32)


# how the out tensor is made, and whether every sample gets one like it
_KINDS_OF_OUT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "out": (_right, True),
    "empty out": (_empty, True),
    "strided out": (_strided, False),
    "too large out": (_too_large, False),
    "out of another dtype": (_other_dtype, False),
}


def _out_of(op: Any, samples: Sequence[Sample]) -> Iterator[Program]:
    # what has gaps or no elements in the operands is tried in `forward`
    plain = [sample for sample in samples if "non-contiguous" not in sample.label]
    odd = spread(plain, ODD_SAMPLES)
    eager = Target()
    for sample in plain:
        try:
            args, kwargs = sample.on(eager)
            expected = op(*args, **kwargs)
        except Exception:  # as in `forward`
            continue
        if not _takes_out(expected):
            continue
        for kind, (make, for_all) in _KINDS_OF_OUT.items():
            if for_all or sample in odd:
                yield _out(op, sample, kind, _each(make, expected))


def _takes_out(expected: Any) -> bool:
    tensors = expected if isinstance(expected, list | tuple) else [expected]
    strided = (isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided for tensor in tensors)
    return bool(tensors) and all(strided)


def _each(make: Callable[[torch.Tensor], torch.Tensor], expected: Any) -> Any:
    if isinstance(expected, torch.Tensor):
        return make(expected.detach())
    made = [make(tensor.detach()) for tensor in expected]
    return made if isinstance(expected, list) else tuple(made)


def _out(op: Any, sample: Sample, kind: str, out: Any) -> Program:
    def run(target: Target) -> Any:
        args, kwargs = sample.on(target)
        given = target.move(out)
        return {"operands": (args, kwargs), "out": given, "result": op(*args, **kwargs, out=given)}

    return Program(f"{sample.label}, {kind}", run, sample.on_device)
