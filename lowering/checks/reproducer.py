"""A script that shows what a compiler gets wrong, without this package where that is possible.

In: a graph whose compiled form was refused, or one node of it. Out: the text of a program that computes the same calls
by `torch.compile` and in eager, of random inputs that lie in memory as they did, and prints how far the two are apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazy_backend.lowering.collectives.communication import is_collective
from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, TensorMeta, Value
from lazy_backend.ports.dispatcher import base_name

_SCRIPT = '''"""{told}

Written for PyTorch {version} from a graph whose compiled form was not used. Inputs are random numbers: others may be
needed to show the difference, as may the rest of the program.
"""

import torch
{imports}from torch import device, inf, nan

{definitions}
def program({names}):
{body}
    return [{results}]


def inputs(fill, low, high):
    source = torch.Generator("{device}").manual_seed(0)

    def made(size, stride, offset, dtype):
        extent = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride))
        one = torch.empty(max(extent, 0), 2, dtype=torch.float64, device="{device}")
        if dtype.is_floating_point or dtype.is_complex:
            getattr(one, fill)(generator=source)
        else:
            one.random_(low, high, generator=source)
        one = torch.view_as_complex(one) if dtype.is_complex else one[:, 0]
        return one.to(dtype, copy=True).as_strided(size, stride, offset)

    return [
{made}
    ]


def computed(program, *ranges):
    torch.manual_seed(0)
    return program(*inputs(*ranges))


def numbers(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


for ranges in ("normal_", 0, 2), ("uniform_", 0, 1), ("uniform_", 1, 2):
    try:
        expected = computed(program, *ranges)
        break
    except (IndexError, RuntimeError):  # as probabilities or places are not any numbers
        if ranges[1]:
            raise
for result, other in zip(expected, computed(torch.compile(program), *ranges)):
    one, other = numbers(result), numbers(other)
    apart = (one - other).abs().nan_to_num(inf, inf)
    apart[(one == other) | (one.isnan() & other.isnan())] = 0
    if apart.any():
        print(f"{{result.dtype}}{{list(result.shape)}} differs by {{apart.max().item()}} of {{one.abs().max().item()}}")
'''
_OWN = """if not hasattr(torch.ops.{namespace}, "{name}"):
    raise SystemExit("{namespace}::{name} is not PyTorch's: import the module that defines it at the top")
"""


class NotReproducible(ValueError):
    """There is no program that shows a graph's fault by itself. The text says why."""


def reproducer(graph: Graph, constants: Sequence[float], told: str, place: int | None = None) -> str:
    """The script. `told`: how the compiled form differed. `place`: of a node that is wrong by itself."""
    nodes: Sequence[Node] = graph.nodes if place is None else (graph.nodes[place],)
    given = graph.inputs if place is None else tuple(dict.fromkeys(nodes[0].inputs()))
    made = [value for node in nodes for value in (*node.outputs, *node.mutates) if value is not None]
    results = dict.fromkeys(made if place is not None else [*graph.outputs, *_written(graph)])

    def text(arg: Arg) -> str:
        if isinstance(arg, tuple):
            return f"[{', '.join(map(text, arg))}]"
        if isinstance(arg, Value):
            return f"t{arg.number}"
        if isinstance(arg, complex):
            return f"complex({arg.real!r}, {arg.imag!r})"
        return repr(constants[arg.index] if isinstance(arg, Constant) else arg)

    def line(node: Node) -> str:
        args = [*map(text, node.args), *(f"{name}={text(arg)}" for name, arg in node.kwargs)]
        names = ["_" if one is None else f"t{one.number}" for one in node.outputs]
        target = f"[{', '.join(names)}]" if node.returns_list or len(names) > 1 else "".join(names)
        return f"    {target}{' = ' if names else ''}torch.ops.{node.op}({', '.join(args)})"

    imports, definitions = _definitions(nodes)
    return _SCRIPT.format(
        told=told.replace("\\", "/").replace('"""', "'''"),
        version=torch.__version__,
        device=graph.device,
        imports=imports,
        definitions=definitions,
        names=", ".join(map(text, given)),
        body="\n".join(map(line, nodes)),
        results=", ".join(map(text, results)),
        made="\n".join(f"        {_made(value.meta)}," for value in given),
    )


def _definitions(nodes: Sequence[Node]) -> tuple[str, str]:
    """Imports and further lines that define the operators of a graph, in a program without recorded calls."""
    imports, definitions = "", ""
    if any(node.seed is not None for node in nodes):  # otherwise compiled code draws other numbers
        definitions += "torch._inductor.config.fallback_random = True\n"
        imports += "import torch._inductor.config\n"
    for op in dict.fromkeys(node.op for node in nodes):
        if is_collective(op):
            raise NotReproducible(f"{op} communicates with other processes, which this program would have to start")
        if op.namespace not in ("aten", "prims", "lazy_backend"):
            definitions += _OWN.format(namespace=op.namespace, name=base_name(op))
    if any(node.op.namespace == "lazy_backend" for node in nodes):
        imports += "import lazy_backend\n"
        definitions += "lazy_backend.lowering.recurrent.layer_operators.define_recurrent()\n"
    return imports, definitions


def _made(meta: TensorMeta) -> str:
    bits = ".conj()" * meta.conj + "._neg_view()" * meta.neg
    return f"made({list(meta.shape)}, {list(meta.stride)}, {meta.storage_offset}, {meta.dtype}){bits}"


def _written(graph: Graph) -> list[Value]:
    return [graph.inputs[place] for place in graph.mutated_inputs()]
