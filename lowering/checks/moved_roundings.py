"""Runs of operators whose results are moved by a rounding: how far rounding can move the results of a program.

In: operators, as they are called. Out: their results, moved.

Note [Moved roundings]
Monte Carlo arithmetic (Parker 1997): about half of the elements of each input and of each operator's result are moved
by one rounding, at random. The result of a sum of n elements is moved by the square root of n roundings, as summing in
another order does. Norms and softmax are taken apart, since their kernels sum in double precision on a CPU, as
compiled code does not. Elements are moved towards zero, where no operator's domain ends, or by half as much either way.

Results of operators that round nothing (`_EXACT`) are not moved, nor are small whole numbers among inputs: masks,
counts and labels. Memory that nobody has written (`torch.empty`) is filled with NaN.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from lazy_backend.lowering.checks.rounding import memory_of
from lazy_backend.ports import trees
from lazy_backend.ports.dispatcher import base_name, decompositions, function_schema
from lazy_backend.ports.thread_modes import TorchDispatchMode

# Elements of the pattern by which tensors are moved, which is repeated along them. A prime: no row is like the next.
_PATTERN = 16381

_EXACT_NAMES = """
abs alias amax amin argmax argmin as_strided_scatter bernoulli bernoulli_ bitwise_not cat clamp clamp_max clamp_min
clone constant_pad_nd copy copy_ embedding fill fill_ flip full full_like gather index index_put index_put_ index_select
isnan lift_fresh_copy masked_fill masked_fill_ max max_pool2d_with_indices maximum min minimum neg new_full new_ones
new_zeros ones ones_like reflection_pad1d reflection_pad2d relu relu_ repeat roll scalar_tensor scatter select_backward
select_scatter sign slice_backward slice_scatter sort stack threshold threshold_backward topk tril triu unfold_backward
where zero_ zeros zeros_like _to_copy _unsafe_view
"""
_NAMES_TAKEN_APART = """
native_batch_norm _native_batch_norm_legit native_batch_norm_backward native_layer_norm native_layer_norm_backward
native_group_norm native_group_norm_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
var var_mean std std_mean
"""
_EXACT, _TAKEN_APART = frozenset(_EXACT_NAMES.split()), frozenset(_NAMES_TAKEN_APART.split())
_UNWRITTEN = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))


class MovedRoundings(TorchDispatchMode):
    """A block in which the results of operators are moved, by at least `eps`. `sample`: another gives other moves.

    `eps` may be that of several roundings, or of coarser floats than the operators have. `either_way`: by half of it
    towards zero or away from it, so that the noise of many elements does not add up; operators' domains may be left.
    """

    def __init__(self, sample: int, eps: float, either_way: bool = False) -> None:
        super().__init__()
        self._eps = eps
        self._sample = sample
        pattern = torch.empty(2 * _PATTERN).bernoulli_(generator=torch.Generator().manual_seed(sample))
        self._pattern = 0.5 - pattern if either_way else -pattern
        self._shifts = itertools.count(sample * 7919, 101)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = base_name(op)
        if name in _TAKEN_APART and decompositions and op in decompositions:
            with self:
                return decompositions[op](*args, **kwargs)
        made = op(*args, **kwargs)
        if op.namespace == "aten" and name in _UNWRITTEN:
            made.fill_(math.nan if made.is_floating_point() or made.is_complex() else self._sample)
        elif op.namespace != "aten" or name not in _EXACT:
            self._move_results(op, args, kwargs, made)
        return made

    def _move_results(self, op: Any, args: Any, kwargs: Any, made: Any) -> None:
        schema = function_schema(op)
        results = made if isinstance(made, tuple) else (made,)
        moved = [one for one, of in zip(results, schema.returns, strict=False) if of.alias_info is None]
        given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                moved.append(given.get(argument.name))
        read = max((one.numel() for one in given.values() if isinstance(one, torch.Tensor)), default=0)
        for one in trees.tree_leaves(moved):
            if isinstance(one, torch.Tensor):
                self.move(one, math.sqrt(max(1.0, read / max(1, one.numel()))))

    def move(self, tensor: torch.Tensor, roundings: float = 1.0, spares_counts: bool = False) -> None:
        """Move the floats of a tensor in place, outside of the block. `spares_counts`: but for small whole numbers."""
        memory = memory_of(tensor)
        if memory.is_complex():
            memory = torch.view_as_real(memory.resolve_conj()).flatten()
        if not memory.is_floating_point() or memory.dtype.itemsize < 2:
            return
        info = torch.finfo(memory.dtype)
        shift = next(self._shifts) % _PATTERN
        step = self._pattern[shift : shift + _PATTERN].mul(max(self._eps, info.eps) * roundings).to(memory)
        kept = None
        if spares_counts:
            kept = torch.where((memory == memory.round()) & (memory.abs() <= info.eps**-0.5), memory, math.nan)
        whole = memory.numel() // _PATTERN * _PATTERN
        for part in (memory[:whole].view(-1, _PATTERN), memory[whole:]):
            part.addcmul_(part, step[: part.shape[-1]])
        if kept is not None:
            memory.copy_(torch.where(kept.isnan(), memory, kept))
