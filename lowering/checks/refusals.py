"""The operator by which a compiled graph refuses values, and the error that comes of it.

In: an exception of a run. Out: the error that the operator itself raises for these values, with the user's line.

Note [Values are checked before writes]
Some kernels of ATen look at the values of their operands, and raise: indices, targets, probabilities, divisors.
Compilers write code of their own for most of these operators. It checks nothing, or ends the process: an index out of
range in a loop of several threads, an integer divided by zero. So for each such operator (`value_rules.py`) a compiled
graph for the CPU has a condition, one reduction over the operand, and a call of `require`, which raises if it does not
hold.
Operators that stay calls of ATen's kernels raise by themselves. In Inductor's schedule, loops that write an input of
the graph and loops at places that they compute come after the checks that the program has before them
(`ports/replacements/inductor_patches.py`). So what raises in eager raises in the run, before anything is stored that
comes later in the program.
`require` takes the operands. If it refuses them, the operator is called once more, with these operands and zeros for
the others, and raises what it raises in eager. Should it accept them, the error says that the check is too strict.
On CUDA nothing is added: kernels assert there, and the error comes when the device is waited for, as in eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazy_backend.lowering.checks.value_rules import checked
from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, Value
from lazy_backend.ports.dispatcher import OpOverload, base_name, function_schema

# Of the exception that `require` raises, in Python and in C++: what its first argument is.
MARK = "values that an operator refuses"


class NodeError(RuntimeError):
    """An operator failed while a graph ran. `__cause__` is the operator's own error."""

    def __init__(self, node: Node, cause: BaseException, sites: Sequence[str] = ()) -> None:
        """`sites`: the lines of which one recorded the call, if it is not known which."""
        lines = " or ".join(sites or [node.site]) or "an unknown line"
        super().__init__(f"{cause}\n  while running {node}\n  recorded at {lines}")
        self.node = node


def _require(
    holds: torch.Tensor, operands: Sequence[torch.Tensor], sizes: Sequence[int], call: str, place: int
) -> None:
    if not holds:
        raise RuntimeError(MARK, list(operands), list(sizes), call, place)


def _define_require() -> tuple[torch.library.Library, OpOverload]:
    library = torch.library.Library("lazy_backend", "FRAGMENT")
    library.define("require(Tensor holds, Tensor[] operands, SymInt[] sizes, str call, int place) -> ()")
    library.impl("require", _require, "CompositeExplicitAutograd")
    torch.library.register_fake("lazy_backend::require", lambda *arguments: None, lib=library)
    operator = torch.ops.lazy_backend.require.default
    fx.has_side_effect(operator)
    return library, operator


# Raises if a condition does not hold. `operands`: what is checked. `sizes`: those of all operands of the call, in a
# graph with symbols. `call`, `place`: which call it is. The library is kept: without it the operator is gone.
_library, require = _define_require()

# Parts of the names of operators whose kernels refuse values, where compilers call these.
_REFUSING = (
    "index", "embedding", "gather", "scatter", "nll_loss", "cholesky", "linalg", "multinomial", "bernoulli", "normal",
    "poisson", "histc", "segment_reduce", "lu_unpack", "searchsorted", "assert",
)  # fmt: skip


def may_refuse(op: OpOverload) -> bool:
    """Whether the kernel of `op` may raise because of values. Any operator outside PyTorch may."""
    namespace, name = function_schema(op).name.split("::")
    return namespace not in ("aten", "prims", "lazy_backend") or any(word in name for word in _REFUSING)


def is_check(op: OpOverload) -> bool:
    """Whether a call of `op` in a compiled graph checks values. Backwards get those that forwards have checked."""
    return op is require or (may_refuse(op) and not base_name(op).endswith("_backward"))


def printed_call(node: Node) -> str:
    """What is alike in the same call of another block: the operator, and the geometry of its operands."""
    return f"{node.op}({', '.join(str(value.meta) for value in node.inputs())})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What `require` was called with, where it raised."""

    operands: Sequence[torch.Tensor]
    sizes: Sequence[int]
    call: str
    place: int

    @classmethod
    def of(cls, error: BaseException) -> Refusal | None:
        """The refusal that an exception tells of; None if it is another one."""
        if not isinstance(error, RuntimeError) or error.args[:1] != (MARK,):
            return None
        return cls(*error.args[1:])

    def error(self, graph: Graph, is_whole: bool) -> NodeError:
        """The error of the operator that refused. `is_whole`: whether `place` counts the calls of `graph`.

        Its cause is the operator's own error. Blocks that several calls share count their own: then the line is that of
        a call which looks the same.
        """
        alike = (node for node in graph.nodes if printed_call(node) == self.call)
        nodes = [graph.nodes[self.place]] if is_whole else list(alike)
        cause = self._cause(nodes[0])
        error = NodeError(nodes[0], cause, list(dict.fromkeys(node.site for node in nodes if node.site)))
        error.__cause__ = cause
        return error

    def _cause(self, node: Node) -> Exception:
        """What the operator raises for these values. See Note [Values are checked before writes]."""
        found = checked(node)
        assert found is not None
        tensors = dict(zip(found.values, self.operands, strict=True))
        sizes = iter(self.sizes)
        for value in node.inputs():
            shape = tuple(itertools.islice(sizes, len(value.meta.shape))) if self.sizes else value.meta.shape
            if value not in tensors:
                tensors[value] = torch.zeros(shape, dtype=value.meta.dtype)

        def given(arg: Arg) -> Any:
            if isinstance(arg, tuple):
                return [given(item) for item in arg]
            return tensors[arg] if isinstance(arg, Value) else 1.0 if isinstance(arg, Constant) else arg

        try:
            node.op(*map(given, node.args), **{name: given(arg) for name, arg in node.kwargs})
        except Exception as error:
            return error
        return RuntimeError(f"{MARK}, by a check that is too strict: please report this")
