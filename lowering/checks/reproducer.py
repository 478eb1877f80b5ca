"""A script that shows what a compiler gets wrong, without this package where that is possible.

In: a graph whose compiled form was refused, or one node of it. Out: the text of a program that computes the same calls
by `torch.compile` and in eager, of random inputs that lie in memory as they did, and prints how far the two are apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, Value

_SCRIPT = '''"""{told}

Written for PyTorch {version} from a graph whose compiled form was not used. Inputs are random numbers: others may be
needed to show the difference, as may the rest of the program.
"""

import torch
from torch import device, inf, nan
{imports}

def program({names}):
{body}
    return [{results}]


def inputs():
    source = torch.Generator("{device}").manual_seed(0)

    def made(size, stride, dtype):
        one = torch.empty_strided(size, stride, dtype=dtype, device="{device}")
        is_float = dtype.is_floating_point or dtype.is_complex
        return one.normal_(generator=source) if is_float else one.random_(0, 2, generator=source)

    return [
{made}
    ]


def numbers(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


torch.manual_seed(0)
expected = program(*inputs())
torch.manual_seed(0)
found = torch.compile(program)(*inputs())
for one, other in zip(expected, found, strict=True):
    if not torch.equal(one, other) and one.numel():
        apart = (numbers(one) - numbers(other)).abs().nan_to_num(inf).max().item()
        print(f"{{one.dtype}}{{list(one.shape)}} differs by {{apart}} of {{numbers(one).abs().max().item()}}")
'''


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
        return repr(constants[arg.index] if isinstance(arg, Constant) else arg)

    def line(node: Node) -> str:
        args = [*map(text, node.args), *(f"{name}={text(arg)}" for name, arg in node.kwargs)]
        names = ["_" if one is None else f"t{one.number}" for one in node.outputs]
        target = f"[{', '.join(names)}]" if node.returns_list or len(names) > 1 else "".join(names)
        return f"    {target}{' = ' if names else ''}torch.ops.{node.op}({', '.join(args)})"

    metas = [value.meta for value in given]
    return _SCRIPT.format(
        told=told.replace("\\", "/").replace('"""', "'''"),
        version=torch.__version__,
        device=graph.device,
        imports="" if all(node.op.namespace == "aten" for node in nodes) else "\nimport lazy_backend\n",
        names=", ".join(map(text, given)),
        body="\n".join(map(line, nodes)),
        results=", ".join(map(text, results)),
        made="\n".join(f"        made({list(one.shape)}, {list(one.stride)}, {one.dtype})," for one in metas),
    )


def _written(graph: Graph) -> list[Value]:
    return [graph.inputs[place] for place in graph.mutated_inputs()]
