"""Inductor's Python wrapper as C++: allocations, kernels and library calls, without Python in between.

In: the function `call` of the module that inductor wrote, and the argument types of its kernels. Out: C++ that does the
same, or `NotExpressible` with the reason; the source of an extension with one or several of these.

Note [Runs without Python]
Inductor's wrapper is straight-line Python over very few things: empty tensors, reinterpretations of a tensor's memory,
kernels, operators of ATen, names that move and names that end. Each statement becomes one line of C++ over PyTorch's C
interface for such code (`aoti_torch_*`, the shims). The whole run takes place without the GIL, so that a run in the
background does not stop recording. Operators without a shim, and those that Python implements, are called by Python,
which has the GIL meanwhile.
Kernels are called by address. They are in extensions of their own, which take seconds to build; this one takes less
than one. Tensors live in the slots of one frame, which frees what is left when an exception comes: hundreds of C++
objects with destructors in one function would take the C++ compiler as long as the kernels do.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.artefacts import native_calls
from lazy_backend.lowering.artefacts.extension_template import EXTENSION, METHODS, RUNNER
from lazy_backend.lowering.artefacts.inductor_module import NotExpressible, check_name, checked_geometries
from lazy_backend.lowering.checks.kernel_calls import original
from lazy_backend.lowering.checks.refusals import MARK, require
from lazy_backend.lowering.products.product import DEFINITION, Prefers, TensorLayout, never, product_of
from lazy_backend.ports.dispatcher import OpOverload, base_name, function_schema, overload_name
from lazy_backend.ports.replacements import inductor
from lazy_backend.ports.table import LSTM_LAYERS, MASKS, NORM_OF_LISTS

_NO_MESSAGE = '"an operator failed, and PyTorch has printed why"'


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What inductor wrote: the function that computes, and the C++ types of its kernels' arguments by name.

    `symbols`: examples of the first arguments, which are integers. `layouts`: of the others, as far as they are known.
    `prefers`: see Note [Which library multiplies]. `num_threads`: see `num_threads_for`.
    """

    call: ast.FunctionDef
    kernels: Mapping[str, Sequence[str]]
    symbols: Sequence[int] = ()
    layouts: Sequence[TensorLayout | None] = ()
    prefers: Prefers = never
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Runner:
    """What runs a wrapper, and what it leaves to Python: expressions of functions on lists of tensors.

    `kernels`: those whose addresses it takes, in this order. `left_out`: checks that are not known. See Note [What a
    version of Inductor may add].
    """

    text: str
    declarations: frozenset[str]
    functions: tuple[str, ...]
    kernels: tuple[str, ...]
    multiplies: bool  # by oneDNN
    native_calls: frozenset[str]  # definitions of `native_calls.py` that it needs
    num_threads: int | None
    left_out: tuple[str, ...] = ()


def runner_of(wrapper: Wrapper) -> Runner:
    """The C++ of a runner. Raises `NotExpressible`."""
    writer = _RunnerWriter(wrapper)
    body = wrapper.call.body
    for place, statement in enumerate(body):
        writer.write(statement, body[place + 1] if place + 1 < len(body) else None)
    text = RUNNER.format(
        num_kernels=max(len(wrapper.kernels), 1),
        num_slots=max(writer.num_slots, 1),
        num_symbols=len(wrapper.symbols),
        num_tensors=writer.num_tensors,
        num_results=writer.num_results,
        num_threads=wrapper.num_threads or 0,
        num_functions=max(len(writer.functions), 1),
        num_calls=len(writer.functions),
        body="\n".join(f"    {line}" for line in writer.lines),
    )
    functions, kernels = tuple(writer.functions), tuple(wrapper.kernels)
    return Runner(
        text,
        frozenset(writer.declarations),
        functions,
        kernels,
        writer.multiplies,
        frozenset(writer.native_calls),
        wrapper.num_threads,
        tuple(writer.left_out),
    )


def runner_source(runners: Sequence[Runner], identity: str) -> str:
    """The source of an extension with these runners, which it calls `call0`, `call1`, ... and `bind0`, ...

    `identity`: of the kernels. A process loads equal bytes only once, and a runner with its kernels' addresses is only
    theirs.
    """
    functions = [runner.functions for runner in runners]
    declarations = set().union(*(runner.declarations for runner in runners))
    places = range(len(runners))
    return EXTENSION.format(
        declarations="\n".join(sorted(declarations)),
        products=DEFINITION if any(runner.multiplies for runner in runners) else "",
        native_calls="".join(sorted(set().union(*(runner.native_calls for runner in runners)))),
        conversions=inductor.CONVERSIONS,
        mark=json.dumps(MARK),
        message=f"{inductor.MESSAGE}()" if inductor.has_message() else _NO_MESSAGE,
        runners="\n".join(f"namespace runner{place} {{\n{runners[place].text}}}\n" for place in places),
        computations=", ".join(f"&runner{place}::computation" for place in places),
        methods="\n".join(METHODS.format(place=place) for place in places),
        identity=hashlib.blake2b(repr((identity, functions)).encode(), digest_size=16).hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class _Results:
    """What an operator of several results returned: the slots of the results."""

    slots: tuple[int, ...]


class _RunnerWriter:
    """Writes one line of C++ per statement."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.lines: list[str] = []
        self.declarations = {f"const char* {inductor.MESSAGE}();"}
        self.functions: list[str] = []
        self.num_slots = 0
        self.num_tensors = 0
        self.num_results = 0
        self.multiplies = False
        self.native_calls: set[str] = set()
        self.left_out: list[str] = []
        self._wrapper = wrapper
        self._kernels = {name: (place, types) for place, (name, types) in enumerate(wrapper.kernels.items())}
        self._layouts: dict[str, TensorLayout | None] = {}  # of tensors by name
        self._examples: dict[str, int] = {}  # of integers by name
        self._values: dict[str, int | str | _Results] = {}  # a tensor's slot, an integer's name in C++, results
        self._arguments: set[str] = set()

    def write(self, statement: ast.stmt, following: ast.stmt | None) -> None:
        name = check_name(statement)
        if name is not None and name not in self._kernels:
            self._check(name, statement)
            return
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                self._take_arguments([_name_of(name) for name in names])
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value, following)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="args"), attr="clear"))):
                pass  # the caller has done it
            case ast.Expr(value=ast.Call() as called):
                self._call(called)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Delete(targets=targets):
                for target in targets:
                    self._delete(_name_of(target))
            case ast.Return(value=ast.Tuple(elts=results)):
                self._return(results)
            case _:
                raise NotExpressible(f"the statement {ast.unparse(statement)[:80]}")

    # ----- statements

    def _take_arguments(self, names: Sequence[str]) -> None:
        symbols, layouts = self._wrapper.symbols, self._wrapper.layouts
        self._arguments.update(names)
        for place, name in enumerate(names):
            if place < len(symbols):
                self._values[name], self._examples[name] = f"symbols[{place}]", symbols[place]
            else:
                self._values[name] = self._slot()
                self._layouts[name] = layouts[self.num_tensors] if self.num_tensors < len(layouts) else None
                self.num_tensors += 1

    def _assign(self, name: str, value: ast.expr, following: ast.stmt | None) -> None:
        match value:
            case ast.Name(id=other) if isinstance(self._values.get(other), int):
                self._layouts[name] = self._layouts.get(other)
                # a buffer is used again under another name, and the first name ends
                if isinstance(following, ast.Delete) and [_name_of(one) for one in following.targets] == [other]:
                    self._say(f"move({self._tensor(value)}, {self._target(name)});")
                else:
                    self._say(f"share({self._tensor(value)}, {self._target(name)});")
            case ast.Subscript(value=ast.Name(id=other), slice=ast.Constant(value=int(place))):
                results = self._values.get(other)
                if not isinstance(results, _Results):
                    raise NotExpressible(f"an item of {other}")
                self._say(f"share(t[{results.slots[place]}], {self._target(name)});")
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[size, stride, dtype], keywords=[]):
                self._layouts[name] = self._layout(size, stride, ast.unparse(dtype).removeprefix("torch."))
                self._in_block(f"empty({{0}}, {{1}}, {self._dtype(dtype)}, {self._target(name)});", size, stride)
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                self._layouts[name] = self._layout_of(value)
                self._reinterpret(value, self._target(name))
            case ast.Call(func=ast.Attribute()):
                self._operator(value, name)
            case _:
                number = self._integer(value)
                self._say(f"const int64_t {name} = {number};")
                self._values[name], self._examples[name] = name, self._example(value)

    def _call(self, called: ast.Call) -> None:
        match called:
            case ast.Call(func=ast.Name(id=name)) if name in self._kernels:
                self._kernel(name, called)
            case ast.Call(func=ast.Attribute()):
                self._operator(called, None)
            case _:
                raise NotExpressible(f"a call of {ast.unparse(called.func)[:80]}")

    def _check(self, name: str, statement: ast.stmt) -> None:
        """Write a check, or leave it out if it is not known: it computes nothing."""
        written = len(self.lines)
        try:
            for expected in checked_geometries(statement):
                if not self._is_argument(expected.tensor):  # a graph's inputs are as its key says
                    dtype = "-1" if expected.dtype is None else self._dtype(expected.dtype)
                    line = f"expect({self._tensor(expected.tensor)}, {{0}}, {{1}}, {dtype});"
                    self._in_block(line, expected.size, expected.stride)
        except NotExpressible:
            del self.lines[written:]
            self.left_out.append(name)

    def _delete(self, name: str) -> None:
        value = self._values.pop(name, None)
        for slot in value.slots if isinstance(value, _Results) else [value] if isinstance(value, int) else []:
            self._say(f"drop(t[{slot}]);")

    def _return(self, results: Sequence[ast.expr]) -> None:
        self.num_results = len(results)
        for place, result in enumerate(results):
            if isinstance(result, ast.Constant) and result.value is None:
                continue
            slot = self._temporary(result) if isinstance(result, ast.Call) else self._tensor(result)
            self._say(f"share({slot}, results[{place}]);")

    # ----- calls

    def _kernel(self, name: str, called: ast.Call) -> None:
        place, types = self._kernels[name]
        if called.keywords or len(called.args) != len(types):
            raise NotExpressible(f"a call of {name} with other arguments than it has")
        kinds, given = [], []
        for kind, argument in zip(types, called.args, strict=True):
            kind = kind.replace("const ", "")
            if kind.endswith("*"):
                kinds.append("void*")
                given.append(f"data({self._tensor(argument)})")
            elif kind in ("int64_t", "float", "double"):
                kinds.append(kind)
                given.append(self._number(argument))
            else:
                raise NotExpressible(f"a kernel's argument of type {kind}")
        self._say(f"reinterpret_cast<void (*)({', '.join(kinds)})>(kernels[{place}])({', '.join(given)});")

    def _reinterpret(self, value: ast.Call, target: str) -> None:
        tensor, size, stride, offset = value.args
        line = f"reinterpret({self._tensor(tensor)}, {{0}}, {{1}}, {self._integer(offset)}, {target});"
        self._in_block(line, size, stride)

    def _operator(self, called: ast.Call, name: str | None) -> None:
        overload, called = _without_stand_in(_overload_of(called), called)
        function, written = _shim_of(overload), len(self.lines)
        if self._is_multiplied(overload, called) or self._is_mask(overload, called, name):
            return
        if self._are_norms(overload, called, name) or self._is_lstm(overload, called, name):
            return
        if self._is_check(overload, called):
            return
        if function not in inductor.shims() and name is None:
            overload, called = _returning_nothing(overload, called)
            function = _shim_of(overload)
        if function in inductor.shims():
            try:
                self._shim(function, overload, called, name)
                return
            except NotExpressible:
                del self.lines[written:]
        self._python(overload, called, name)

    def _is_multiplied(self, overload: OpOverload, called: ast.Call) -> bool:
        """Write a product that oneDNN computes. See Note [Which library multiplies]."""
        places = _PRODUCTS.get(str(overload))
        given = {keyword.arg: keyword.value for keyword in called.keywords}
        scales = [given.pop(scale, ast.Constant(1)) for scale in ("alpha", "beta")]
        if places is None or given.keys() != {"out"} or any(ast.unparse(scale) not in ("1", "1.0") for scale in scales):
            return False
        operands = [called.args[place] for place in places]
        out = given["out"]
        product = product_of(list(map(self._layout_of, operands)), self._layout_of(out))
        if product is None or not self._wrapper.prefers(product):
            return False
        temporaries = self.num_slots
        left, right, *added = [self._item("AtenTensorHandle", operand) for operand in operands]
        self._say(f"multiply({left}, {right}, {self._tensor(out)}, {added[0] if added else 'nullptr'});")
        for slot in range(temporaries, self.num_slots):
            self._say(f"drop(t[{slot}]);")
        self.multiplies = True
        return True

    def _is_mask(self, overload: OpOverload, called: ast.Call, name: str | None) -> bool:
        """Write the drawing of a dropout's mask."""
        if str(overload) != "lazy_backend.dropout_mask.default" or name is None or not MASKS.fits():
            return False
        size, stride, p, _, seeds, place = called.args
        drawn = f"{self._number(p)}, {self._tensor(seeds)}, {self._integer(place)}"
        self.native_calls.add(native_calls.MASKS)
        self.declarations.add("int32_t aoti_torch_dtype_bool();")
        self._layouts[name] = None
        lies, steps = ("nullptr", size) if _is_none(stride) else ("{1}", stride)
        self._in_block(f"draw_mask({{0}}, {lies}, {drawn}, {self._target(name)});", size, steps)
        return True

    def _are_norms(self, overload: OpOverload, called: ast.Call, name: str | None) -> bool:
        """Write the norms of a list, as of the gradients that a program clips."""
        if str(overload) != "aten._foreach_norm.Scalar" or called.keywords or not NORM_OF_LISTS.fits():
            return False
        match called.args:
            case [ast.List(elts=tensors), order] if name is not None and tensors:
                pass
            case _:
                return False
        temporaries = self.num_slots
        given = [self._item("AtenTensorHandle", tensor) for tensor in tensors]
        freed = range(temporaries, self.num_slots)
        made = [self._slot() for _ in given]
        for tensor, slot in zip(given, made, strict=True):
            self._say(f"norm({tensor}, {self._number(order)}, t[{slot}]);")
        for slot in freed:
            self._say(f"drop(t[{slot}]);")
        self._values[name] = _Results(tuple(made))
        self.native_calls.add(native_calls.NORMS)
        return True

    def _is_lstm(self, overload: OpOverload, called: ast.Call, name: str | None) -> bool:
        """Write one layer of an LSTM by oneDNN, or its backward."""
        function = _LSTM.get(str(overload))
        if function is None or name is None or called.keywords or not LSTM_LAYERS.fits():
            return False
        schema = function_schema(overload)
        count = sum("Tensor" in str(argument.type) for argument in schema.arguments)
        temporaries = self.num_slots
        tensors = [_is_none(value) or self._item("AtenTensorHandle", value) for value in called.args[:count]]
        given = ["nullptr" if tensor is True else tensor for tensor in tensors]
        freed = range(temporaries, self.num_slots)
        made = [self._slot() for _ in schema.returns]
        handles = f"const AtenTensorHandle given[] = {{{', '.join(given)}}};"
        addresses = f"AtenTensorHandle* const made[] = {{{', '.join(f'&t[{slot}]' for slot in made)}}};"
        numbers = ", ".join(map(self._integer, called.args[count:]))
        self._say(f"{{ {handles} {addresses} {function}(given, {numbers}, made); }}")
        for slot in freed:
            self._say(f"drop(t[{slot}]);")
        self._values[name] = _Results(tuple(made))
        self.native_calls.add(native_calls.LSTM)
        return True

    def _is_check(self, overload: OpOverload, called: ast.Call) -> bool:
        """Write a check of values. See Note [Values are checked before writes]."""
        if overload is not require:
            return False
        holds, operands, sizes, call, place = called.args
        temporaries = self.num_slots
        given = ", ".join(self._item("AtenTensorHandle", operand) for operand in _elements(operands))
        numbers = ", ".join(map(self._integer, _elements(sizes)))
        named = f"{json.dumps(ast.literal_eval(call))}, {self._integer(place)}"
        self._say(f"require({self._item('AtenTensorHandle', holds)}, {{{given}}}, {{{numbers}}}, {named});")
        for slot in range(temporaries, self.num_slots):
            self._say(f"drop(t[{slot}]);")
        return True

    def _shim(self, function: str, overload: OpOverload, called: ast.Call, name: str | None) -> None:
        """An operator by its shim, whose parameters have the names of the operator's schema."""
        parameters, schema = inductor.shims()[function], function_schema(overload)
        given: dict[str, ast.expr] = {keyword.arg or "": keyword.value for keyword in called.keywords}
        self.declarations.add(f"AOTITorchError {function}({', '.join(kind for kind, _ in parameters)});")
        positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        for argument, value in zip(positional, called.args, strict=False):
            given[argument.name] = value
        for argument in schema.arguments:
            if argument.name not in given:
                given[argument.name] = ast.parse(repr(argument.default_value), mode="eval").body
        self._check_numbers(schema, given)
        temporaries = self.num_slots
        values: list[str] = []
        declared: list[str] = []
        results: list[int] = []
        for kind, parameter in parameters:
            if re.fullmatch(r"ret\d+", parameter):
                results.append(self._slot())
                values.append(f"&t[{results[-1]}]")
            elif not parameter.endswith("_len_"):
                place = len(declared)
                declared += self._declared(kind, given[parameter], f"a{place}")
                values += self._passed(kind, given[parameter], f"a{place}")
        self._say("{ " + " ".join(declared) + f" check({function}({', '.join(values)})); }}")
        for slot in range(temporaries, self.num_slots):
            if slot not in results:
                self._say(f"drop(t[{slot}]);")
        if name is not None:
            if len(results) != len(schema.returns):
                raise NotExpressible(f"the result of {overload}")
            self._values[name] = results[0] if len(results) == 1 else _Results(tuple(results))

    def _check_numbers(self, schema: torch.FunctionSchema, given: Mapping[str, ast.expr]) -> None:
        """Shims take a number as a double, which operators on integers refuse."""
        out = given.get("out")
        layout = None if out is None else self._layout_of(out)
        if isinstance(out, ast.Name) and (layout is None or "int" not in layout.dtype):
            return
        for argument in schema.arguments:
            value = given[argument.name]
            if str(argument.type) == "number" and isinstance(value, ast.Constant) and isinstance(value.value, int):
                raise NotExpressible(f"the integer {argument.name}")

    def _python(self, overload: OpOverload, called: ast.Call, name: str | None) -> None:
        """An operator without a shim, or one of Python's, such as those that take a seed: Python calls it."""
        returns = function_schema(overload).returns
        if any(str(result.type) != "Tensor" for result in returns):
            raise NotExpressible(f"the operator {overload}, which returns more than tensors")
        temporaries = self.num_slots
        taken = _TakeTensors(self)
        called = copy.deepcopy(called)
        called.func = ast.parse(f"torch.ops.{overload}", mode="eval").body
        expression = ast.unparse(taken.visit(called))
        freed = range(temporaries, self.num_slots)
        results = f"[{expression}]" if name is None or len(returns) == 1 else expression
        self.functions.append(f"lambda t: list(map(defined, {results}))" + ("[:0]" if name is None else ""))
        made = [] if name is None else [self._slot() for _ in returns]
        given = f"AtenTensorHandle given[] = {{{', '.join(taken.tensors) or 'nullptr'}}};"
        addresses = f"AtenTensorHandle* made[] = {{{', '.join(f'&t[{slot}]' for slot in made) or 'nullptr'}}};"
        function = f"functions[{len(self.functions) - 1}]"
        self._say(
            f"{{ {given} {addresses} python(state, {function}, given, {len(taken.tensors)}, made, {len(made)}); }}"
        )
        for slot in freed:
            self._say(f"drop(t[{slot}]);")
        if name is not None:
            self._values[name] = made[0] if len(returns) == 1 else _Results(tuple(made))

    def tensor_of(self, value: ast.expr) -> str | None:
        """The slot of a tensor, or of a view of one, which is made first; None for anything else."""
        if isinstance(value, ast.Name):
            return self._tensor(value) if isinstance(self._values.get(value.id), int) else None
        match value:
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                return self._temporary(value)
        return None

    def _declared(self, kind: str, value: ast.expr, name: str) -> list[str]:
        """Declarations for an argument that is passed by address. `name`: of what they declare."""
        if not kind.endswith("*") or _is_none(value) or kind == "const char*":
            return []
        element = kind.removesuffix("*").removeprefix("const ").removesuffix("*").strip()
        if isinstance(value, ast.List | ast.Tuple):
            items = [self._item(element, item) for item in value.elts]
            declared = [f"{element} {name}[] = {{{', '.join(items) or '0'}}};"]
            return declared + ([f"const {element}* {name}p = {name};"] if kind.endswith("**") else [])
        return [f"{element} {name} = {self._item(element, value)};"]

    def _passed(self, kind: str, value: ast.expr, name: str) -> list[str]:
        if not kind.endswith("*"):
            return [self._item(kind, value)]
        if kind == "const char*" and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return [json.dumps(value.value)]
        is_list = kind.startswith("const ")
        if _is_none(value):
            return ["nullptr", "0"] if is_list else ["nullptr"]
        if isinstance(value, ast.List | ast.Tuple):
            return [f"&{name}p" if kind.endswith("**") else name, str(len(value.elts))]
        if is_list:
            raise NotExpressible(f"the argument {ast.unparse(value)[:80]}")
        return [f"&{name}"]

    def _item(self, kind: str, value: ast.expr) -> str:
        if kind == "AtenTensorHandle":
            return self._temporary(value) if isinstance(value, ast.Call) else self._tensor(value)
        if kind == "int32_t":
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                return str(int(value.value))
        elif kind in ("int64_t", "double"):
            return self._number(value)
        raise NotExpressible(f"an argument of type {kind}")

    # ----- values

    def _temporary(self, value: ast.expr) -> str:
        match value:
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                slot = f"t[{self._slot()}]"
                self._reinterpret(value, slot)
                return slot
        raise NotExpressible(f"the argument {ast.unparse(value)[:80]}")

    def _tensor(self, value: ast.expr) -> str:
        slot = self._values.get(value.id) if isinstance(value, ast.Name) else None
        if not isinstance(slot, int):
            raise NotExpressible(f"the tensor {ast.unparse(value)[:80]}")
        return f"t[{slot}]"

    def _is_argument(self, value: ast.expr) -> bool:
        return isinstance(value, ast.Name) and value.id in self._arguments

    def _number(self, value: ast.expr) -> str:
        if isinstance(value, ast.Constant) and isinstance(value.value, float):
            return _float(value.value)
        match value:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self._number(operand)})"
            case ast.Name(id="inf" | "nan" as name):
                return "INFINITY" if name == "inf" else "NAN"
        return self._integer(value)

    def _integer(self, value: ast.expr) -> str:
        """An expression over symbols, which are sizes and strides: none is negative, so C++ divides as Python does."""
        match value:
            case ast.Constant(value=bool(flag)):
                return str(int(flag))
            case ast.Constant(value=int(number)):
                return f"INT64_C({number})"
            case ast.Name(id=name) if isinstance(self._values.get(name), str):
                return str(self._values[name])
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                return f"({self._integer(left)} {_OPERATORS[type(sign)][0]} {self._integer(right)})"
        raise NotExpressible(f"the number {ast.unparse(value)[:80]}")

    def _example(self, value: ast.expr) -> int:
        """What an expression is for the examples of the symbols. Takes what `_integer` takes."""
        match value:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in self._examples:
                return self._examples[name]
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)][1](self._example(left), self._example(right))
        raise NotExpressible(f"the number {ast.unparse(value)[:80]}")

    def _layout(self, size: ast.expr, stride: ast.expr, dtype: str) -> TensorLayout:
        sizes, strides = (tuple(map(self._example, _elements(numbers))) for numbers in (size, stride))
        return TensorLayout(sizes, strides, dtype)

    def _layout_of(self, tensor: ast.expr) -> TensorLayout | None:
        """The layout of a named tensor, or of a view of one; None if it is not known."""
        match tensor:
            case ast.Name(id=name):
                return self._layouts.get(name)
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[of, size, stride, *_]):
                whole = self._layout_of(of)
                return None if whole is None else self._layout(size, stride, whole.dtype)
        return None

    def _dtype(self, node: ast.expr) -> str:
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _DTYPES:
                self.declarations.add(f"int32_t aoti_torch_dtype_{name}();")
                return f"aoti_torch_dtype_{name}()"
        raise NotExpressible(f"the dtype {ast.unparse(node)[:80]}")

    # ----- writing

    def _say(self, line: str) -> None:
        self.lines.append(line)

    def _in_block(self, line: str, size: ast.expr, stride: ast.expr) -> None:
        """`line` with a size and a stride in place of {0} and {1}."""
        declared = [
            f"const int64_t {name}[] = {{{', '.join(map(self._integer, _elements(numbers))) or '0'}}};"
            for name, numbers in (("size", size), ("stride", stride))
        ]
        self._say("{ " + " ".join(declared) + " " + line.format(f"{len(_elements(size))}, size", "stride") + " }")

    def _slot(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def _target(self, name: str) -> str:
        slot = self._values[name] = self._slot()
        return f"t[{slot}]"


class _TakeTensors(ast.NodeTransformer):
    """Replaces the tensors of an expression by the items of a list `t`. `tensors`: their slots, in that order."""

    def __init__(self, writer: _RunnerWriter) -> None:
        self._writer = writer
        self.tensors: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name | ast.Call):
            slot = self._writer.tensor_of(node)
            if slot is not None:
                self.tensors.append(slot)
                return ast.Subscript(ast.Name("t"), ast.Constant(len(self.tensors) - 1))
            if isinstance(node, ast.Name) and node.id not in PYTHON_NAMES:
                raise NotExpressible(f"the name {node.id} in an operator's arguments")
        return self.generic_visit(node)


def _defined(result: torch.Tensor | None) -> torch.Tensor:
    """What an operator did not compute, as its flags say, is a None that nothing uses."""
    return torch.empty(0, device="cpu") if result is None else result


# What expressions that are left to Python may use.
PYTHON_NAMES = {
    "torch": torch, "aten": torch.ops.aten, "device": torch.device, "inf": math.inf, "nan": math.nan,
    "defined": _defined,
}  # fmt: skip


def _name_of(node: ast.expr) -> str:
    if not isinstance(node, ast.Name):
        raise NotExpressible(f"the name {ast.unparse(node)[:80]}")
    return node.id


def _elements(numbers: ast.expr) -> list[ast.expr]:
    """The sizes or strides of a tensor."""
    if not isinstance(numbers, ast.Tuple | ast.List):
        raise NotExpressible(f"the size {ast.unparse(numbers)[:80]}")
    return numbers.elts


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _float(value: float) -> str:
    text = value.hex()
    return "INFINITY" if text == "inf" else "NAN" if text == "nan" else text


# As C++ writes them, and what they do.
_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.FloorDiv: ("/", operator.floordiv),
}

# What oneDNN can compute: the places of left, right and what is added among the operator's arguments.
_PRODUCTS = {
    "aten.mm.out": (0, 1),
    "aten.bmm.out": (0, 1),
    "aten.addmm.out": (1, 2, 0),
    "aten.baddbmm.out": (1, 2, 0),
}

# By operator, the function of `native_calls.LSTM` that computes it.
_LSTM = {
    "lazy_backend.onednn_lstm.default": "lstm",
    "lazy_backend.onednn_lstm_backward.default": "lstm_backward",
}

_DTYPES = frozenset(
    ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
    + ("complex64", "complex128")
)


def _overload_of(called: ast.Call) -> OpOverload:
    """The operator that `extern_kernels.NAME`, `aten.NAME.OVERLOAD` or `torch.ops.SPACE.NAME.OVERLOAD` calls."""
    match ast.unparse(called.func).removeprefix("torch.ops.").split("."):
        case ["extern_kernels", name] if hasattr(torch.ops.aten, name):
            space = "aten"
            overload = "out" if any(keyword.arg == "out" for keyword in called.keywords) else "default"
        case ["aten", name]:  # as inductor writes index_put_
            space, overload = "aten", "default"
        case [space, name, overload]:
            pass
        case _:
            raise NotExpressible(f"a call of {ast.unparse(called.func)[:80]}")
    found = getattr(getattr(getattr(torch.ops, space, None), name, None), overload, None)
    if not isinstance(found, OpOverload):
        raise NotExpressible(f"a call of {ast.unparse(called.func)[:80]}")
    return found


def _without_stand_in(overload: OpOverload, called: ast.Call) -> tuple[OpOverload, ast.Call]:
    """A call of an operator that was left to its kernel, as one of the operator itself."""
    op = original(overload)
    if op is overload:
        return overload, called
    arguments = list(zip(function_schema(op).arguments, called.args, strict=True))
    positional = [given for argument, given in arguments if not argument.kwarg_only]
    keywords = [ast.keyword(argument.name, given) for argument, given in arguments if argument.kwarg_only]
    return op, ast.Call(called.func, positional, keywords)


def _returning_nothing(overload: OpOverload, called: ast.Call) -> tuple[OpOverload, ast.Call]:
    """A call of an operator that writes its first operand, such as `scatter_reduce_`, as one that writes into `out`.

    Shims have only the latter.
    """
    base, name = base_name(overload), overload_name(overload)
    is_aten = overload.namespace == "aten" and base.endswith("_")
    packet = getattr(torch.ops.aten, base.rstrip("_"), None) if is_aten else None
    found = getattr(packet, "out" if name == "default" else f"{name}_out", None)
    if not isinstance(found, OpOverload) or not called.args or not isinstance(called.args[0], ast.Name):
        return overload, called
    return found, ast.Call(called.func, called.args, [*called.keywords, ast.keyword("out", called.args[0])])


def _shim_of(overload: OpOverload) -> str:
    space, name = function_schema(overload).name.split("::")
    suffix = f"_{overload_name(overload)}".removesuffix("_default")
    return f"aoti_torch_cpu_{name}{suffix}" if space == "aten" else ""
