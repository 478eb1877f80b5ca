"""The Python module that inductor writes: the function that computes, its kernels, its checks, and what else it needs.

In: the text of the module. Out: `InductorModule`, of which runners take the function and the kernels, and light
artefacts the statements; what a check compares.

Note [What a version of Inductor may add]
Runners read the text that inductor writes for Python, and each version writes it a little differently. So whatever has
no part in the results costs no more than itself. A name that only Python needs matters to light artefacts alone, since
runners look at nothing but the body of `call`. A check, which is a statement that computes nothing, is written in C++
if its arguments are known, and else is left out and counted. What is left is a statement that computes something and
is unknown: then Python runs the graph, or that block of it, and metrics say why.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Parts of inductor's module that are not needed to run it.
_DROPPED = frozenset(("async_compile", "get_args", "benchmark_compiled_module"))

Kernel = tuple[tuple[str, ...], str]  # the C++ types of its arguments, its source


class NotLight(Exception):
    """Why a compiled graph needs PyTorch's own loader. See Note [Native, light and bundled artefacts]."""


class NotExpressible(Exception):
    """Why a wrapper stays in Python."""


# ----- checks


@dataclass(frozen=True, slots=True)
class CheckedGeometry:
    """What a check expects of one tensor: expressions. `dtype`: None if it does not say."""

    tensor: ast.expr
    size: ast.expr
    stride: ast.expr
    dtype: ast.expr | None = None


def check_name(statement: ast.stmt) -> str | None:
    """The name of the check that `statement` is; None if it may do more than check."""
    match statement:
        case ast.Assert():
            return "assert"
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if re.match("_?(assert|check|verify)(_|$)", name):
            return name
    return None


def checked_geometries(check: ast.stmt) -> list[CheckedGeometry]:
    """What a check compares. Raises `NotExpressible` if that is not known."""
    called = check.value if isinstance(check, ast.Expr) else None
    if isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and not called.keywords:
        with contextlib.suppress(TypeError):  # other arguments than the function takes
            found = _CHECKS.get(called.func.id, _not_known)(*called.args)
            if found is not None:
                return found
    raise NotExpressible(f"the check {ast.unparse(check)[:80]}")


def _not_known(*arguments: ast.expr) -> None:
    return None


def _of_one(tensor: ast.expr, size: ast.expr, stride: ast.expr, *names: ast.expr) -> list[CheckedGeometry]:
    return [CheckedGeometry(tensor, size, stride)]


def _of_one_with_dtype(
    tensor: ast.expr, size: ast.expr, stride: ast.expr, dtype: ast.expr, *names: ast.expr
) -> list[CheckedGeometry]:
    return [CheckedGeometry(tensor, size, stride, dtype)]


def _of_several(
    tensors: ast.expr, sizes: ast.expr, strides: ast.expr, *names: ast.expr
) -> list[CheckedGeometry] | None:
    lists = [one.elts for one in (tensors, sizes, strides) if isinstance(one, ast.Tuple | ast.List)]
    if len({len(one) for one in lists}) != 1 or len(lists) < 3:
        return None
    return [CheckedGeometry(*of_tensor) for of_tensor in zip(*lists, strict=True)]


def _of_addresses(*arguments: ast.expr) -> list[CheckedGeometry]:
    return []  # kernels for the CPU load and store at any address


_CHECKS: dict[str, Callable[..., list[CheckedGeometry] | None]] = {
    "assert_size_stride": _of_one,
    "assert_size_stride_grouped": _of_several,
    "assert_tensor_metadata": _of_one_with_dtype,
    "assert_alignment": _of_addresses,
}


# ----- the module


@dataclass(frozen=True, slots=True)
class InductorModule:
    """The module. `call`: the function that computes. `kernels`: those that it calls, by name."""

    statements: list[ast.stmt]
    call: ast.FunctionDef
    kernels: dict[str, Kernel]

    def light(self) -> list[ast.stmt]:
        """What Python needs to run the module, without anything of torch._inductor. Raises `NotLight`."""
        # a check comes from torch._inductor if no statement binds its name but an import that is dropped
        statements = copy.deepcopy(_without_dropped(self.statements))
        without_checks = _WithoutChecks(_loaded(statements) - _bound(statements) - _KNOWN)
        kept, used = _without_unused([without_checks.visit(statement) for statement in statements])
        missing = used - set(self.kernels) - _KNOWN - _bound(kept)
        if missing:
            raise NotLight(f"names of torch._inductor: {', '.join(sorted(missing))}")
        return kept

    def with_prefix(self, prefix: str) -> InductorModule:
        """The module with other names for its kernels, so that several can be built together."""
        renamed = _Renamed({name: prefix + name for name in self.kernels})
        kernels = {prefix + name: kernel for name, kernel in self.kernels.items()}
        statements = [renamed.visit(statement) for statement in self.statements]
        return InductorModule(statements, _call_of(statements), kernels)


_KNOWN = frozenset((*dir(builtins), "__name__", "extern_kernels"))


def inductor_module(source: str) -> InductorModule:
    """The module of this text. Raises `NotExpressible` if it does not compute in a function `call`."""
    statements: list[ast.stmt] = []
    kernels: dict[str, Kernel] = {}
    for statement in ast.parse(source).body:
        name = _assigned_name(statement)
        call = statement.value if isinstance(statement, ast.Assign) else None
        if name is not None and isinstance(call, ast.Call) and _is_kernel(call):
            types, text = map(ast.literal_eval, call.args)
            kernels[name] = (tuple(types), text)
        else:
            statements.append(statement)
    function = _call_of(statements)
    used = _loaded([function])
    return InductorModule(statements, function, {name: kernel for name, kernel in kernels.items() if name in used})


def _call_of(module: Sequence[ast.stmt]) -> ast.FunctionDef:
    """The function in which inductor's module computes: a method of its only class, or a function."""
    classes = [statement.body for statement in module if isinstance(statement, ast.ClassDef)]
    for body in (*classes, module):
        for member in body:
            if isinstance(member, ast.FunctionDef) and member.name == "call":
                return member
    raise NotExpressible("a module without a function `call`")


def _assigned_name(statement: ast.stmt) -> str | None:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else None


def _is_kernel(call: ast.Call) -> bool:
    """`async_compile.cpp_pybinding(...)`."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and (function.value.id, function.attr) == ("async_compile", "cpp_pybinding")
    )


def _without_dropped(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    return [one for one in statements if not _is_dropped(one, _assigned_name(one))]


def _is_dropped(statement: ast.stmt, name: str | None) -> bool:
    if isinstance(statement, ast.ImportFrom):
        # `light` raises NotLight if a name bound here is used
        return (statement.module or "").startswith("torch._")
    if isinstance(statement, ast.FunctionDef):
        return statement.name in _DROPPED
    # string literals, `async_compile.wait(globals())`, the benchmark
    return isinstance(statement, ast.Expr | ast.If | ast.Delete) or name in _DROPPED


class _WithoutChecks(ast.NodeTransformer):
    """Replaces checks whose functions are not there by `assert_size_stride`, or leaves them out."""

    def __init__(self, missing: set[str]) -> None:
        self._missing = missing

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        if check_name(node) not in self._missing:
            return node
        try:
            found = checked_geometries(node)
        except NotExpressible:
            return ast.copy_location(ast.Pass(), node)
        return [check for one in found for check in _plain_checks(one)] or [ast.Pass()]


def _plain_checks(expected: CheckedGeometry) -> list[ast.stmt]:
    tensor, size, stride = map(ast.unparse, (expected.tensor, expected.size, expected.stride))
    return ast.parse(f"if {tensor} is not None: assert_size_stride({tensor}, {size}, {stride})").body


class _Renamed(ast.NodeTransformer):
    """Gives names other names."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)


def _bound(statements: Sequence[ast.stmt]) -> set[str]:
    """Names bound anywhere in `statements`: globals, arguments and locals alike."""
    names: set[str] = set()
    for node in ast.walk(ast.Module(list(statements), [])):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names


def _loaded(statements: Sequence[ast.stmt]) -> set[str]:
    nodes = ast.walk(ast.Module(list(statements), []))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _without_unused(statements: list[ast.stmt]) -> tuple[list[ast.stmt], set[str]]:
    """Drop assignments to unread names (`empty_strided_cuda = ...`) until none is left. Also returns the names read."""
    while True:
        used = _loaded(statements) | {"call"}
        kept = [s for s in statements if (name := _assigned_name(s)) is None or name in used]
        if len(kept) == len(statements):
            return kept, used
        statements = kept


def extern_names(statements: Sequence[ast.stmt]) -> set[str]:
    """The names of `extern_kernels` that these statements use."""
    return {
        node.attr
        for node in ast.walk(ast.Module(list(statements), []))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "extern_kernels"
    }
