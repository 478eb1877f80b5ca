"""Runs without Python: inductor's wrapper as C++, next to the same graph with inductor's own wrapper."""

from __future__ import annotations

import ast
import math
import threading

import pytest
import torch
from artefacts import compiled
from builder import Program, aten
from harness import assert_same
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import metrics
from lazy_backend.computation import get_cached_computations
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.artefacts import artefact
from lazy_backend.lowering.artefacts.inductor_module import NotExpressible, NotLight, inductor_module
from lazy_backend.lowering.artefacts.runner_source import Wrapper, runner_of
from lazy_backend.lowering.checks.refusals import MARK
from lazy_backend.lowering.compilation import build
from lazy_backend.lowering.compilation.compiler import CompiledPlan
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.ir.graph import Graph, empty_of
from lazy_backend.lowering.plans.specialise import CompileReport
from lazy_backend.lowering.recurrent.layer_operators import recurrent_operator, workspace_size


def arguments_of(graph: Graph) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [empty_of(value.meta, torch.device("cpu")) for value in graph.inputs]
    for tensor in made:
        if tensor.dtype.is_floating_point:
            tensor.uniform_(0.1, 1.0, generator=generator)
        else:
            tensor.random_(0, 2, generator=generator)
    if graph.num_seeds:
        made.append(torch.arange(graph.num_seeds))
    return made


class Mixed(nn.Module):
    """Convolutions, pooling, attention: operators that are not kernels of inductor's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.project = nn.Linear(4, 12)
        self.tokens = nn.Embedding(5, 4)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        image = F.dropout(image, 0.3)
        x = F.max_pool2d(self.norm(self.conv(image)).relu(), 2).flatten(2).transpose(1, 2)
        q, k, v = (self.project(x) + self.tokens(tokens).sum()).view(2, 9, 3, 2, 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).sort(stable=True)[0]  # sort has no shim
        return mixed.square().mean()


def graph_of_a_step() -> Graph:
    lazy_backend.config.compile = "off"
    model = Mixed().to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    image, tokens = torch.randn(2, 2, 8, 8).to("lazy"), torch.tensor([1, 4], device="lazy")
    for _ in range(3):
        optimizer.zero_grad()
        model(image, tokens).backward()
        optimizer.step()
        lazy_backend.mark_step()
    return max((computation.graph for computation in get_cached_computations()), key=lambda graph: len(graph.nodes))


def test_a_step_does_what_inductors_wrapper_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of_a_step()
    found = []
    for kind in ("native", "light", "bundled"):
        call, arguments = compiled(graph, kind, monkeypatch), arguments_of(graph)
        given = list(arguments)
        with torch.no_grad():
            results = list(call(given))
        assert given == []
        found.append([*results, *arguments])  # parameters and statistics are written in place
    native, *others = found
    for other in others:
        assert_same([one for one in native if one is not None], [one for one in other if one is not None])


def test_masks_are_those_that_python_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    x, nothing, scalar = (program.input(torch.rand(shape)) for shape in ((4, 6), (0, 3), ()))
    operands = [x, program.call(aten.t.default, x), nothing, scalar]
    drawn = [program.call(aten.native_dropout.default, one, 0.4, True)[0] for one in operands]
    graph = program.graph(*(program.call(aten.exp.default, one) for one in drawn))
    assert graph.num_seeds
    native, light = (compiled(graph, kind, monkeypatch) for kind in ("native", "light"))
    for _ in range(2):
        assert_same(list(native(arguments_of(graph))), list(light(arguments_of(graph))))


@pytest.mark.parametrize("order", [2.0, 1, 3.5, math.inf])
def test_norms_are_those_that_python_computes(order: float, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    shapes = [(4, 6), (7,), (), (64, 256), (3, 1, 5)]
    tensors = [program.input(torch.randn(shape)) for shape in shapes]
    tensors += [program.call(aten.t.default, tensors[0]), program.input(torch.randn(5, dtype=torch.float64))]
    norms = program.call(aten._foreach_norm.Scalar, tensors, order)
    doubles = program.call(aten.exp.default, norms[-1])
    graph = program.graph(doubles, *norms, program.call(aten.stack.default, norms[:-1]))
    light, native = (compiled(graph, kind, monkeypatch) for kind in ("light", "native"))
    for _ in range(2):
        assert_same(list(native(arguments_of(graph))), list(light(arguments_of(graph))))


@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("is_reverse", [True, False])
def test_layers_of_an_lstm_are_those_that_python_computes(
    is_reverse: bool, has_biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program()
    shapes = [(2, 3, 4), (3, 5), (3, 5), (20, 4), (20, 5)]
    tensors = [program.input(torch.randn(shape)) for shape in shapes]
    biases = [program.input(torch.randn(20)) if has_biases else None for _ in range(2)]
    turned = program.call(aten.transpose.int, program.input(torch.randn(3, 2, 4)), 0, 1)
    layer, backward = recurrent_operator("onednn_lstm"), recurrent_operator("onednn_lstm_backward")
    size = workspace_size((2, 3, 4), 5, torch.float32, is_reverse)
    results = program.call(layer, *tensors, *biases, is_reverse, size)
    without, *_ = program.call(layer, turned, *tensors[1:], *biases, is_reverse, 0)
    asked = [program.call(aten.exp.default, results[0]), None, program.call(aten.cos.default, results[2])]
    gradients = program.call(backward, *asked, *tensors, *biases, *results, is_reverse)
    graph = program.graph(without, *results[:3], *gradients)
    light, native = (compiled(graph, kind, monkeypatch) for kind in ("light", "native"))
    for _ in range(2):
        assert_same(list(native(arguments_of(graph))), list(light(arguments_of(graph))))


def long_graph() -> Graph:
    program = Program()
    x = program.input(torch.ones(1 << 20))
    for _ in range(60):
        x = program.call(aten.exp.default, program.call(aten.sin.default, x))
    return program.graph(x)


def test_python_goes_on_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    call = compiled(long_graph(), "native", monkeypatch)
    arguments = [torch.ones(1 << 20)]
    counted = 0
    thread = threading.Thread(target=call, args=(arguments,))
    thread.start()
    while thread.is_alive():
        counted += 1
    assert counted > 1000  # with the GIL held during the run: one or two


def test_values_are_refused_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    table, places = program.input(torch.randn(4, 3)), program.input(torch.tensor([1, 2]))
    rows = program.call(aten.index_select.default, table, 0, places)
    call = compiled(program.graph(program.call(aten.exp.default, rows)), "native", monkeypatch)
    given = torch.randn(4, 3)
    with pytest.raises(RuntimeError) as caught:
        call([given, torch.tensor([1, 9])])
    mark, (index,), *_ = caught.value.args
    assert (mark, index.tolist()) == (MARK, [1, 9])
    assert given._use_count() == 1  # type: ignore[attr-defined]
    assert_same(call([given, torch.tensor([3, 0])])[0], given[[3, 0]].exp())
    with pytest.raises(RuntimeError, match="other arguments"):
        call([given])


def test_equal_runners_keep_to_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in nothing but the kernels' addresses, and a process loads equal bytes once."""
    x, calls = torch.rand(5), []
    for operator in (aten.exp.default, aten.sin.default):
        program = Program()
        graph = program.graph(program.call(aten.neg.default, program.call(operator, program.input(x))))
        calls.append(compiled(graph, "native", monkeypatch))
    for call, function in zip(calls, (torch.exp, torch.sin), strict=True):
        torch.testing.assert_close(call([x])[0], -function(x))


def test_operators_on_integers_get_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(4), torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)]
    program = Program()
    made = program.call(aten.addmm.default, *map(program.input, tensors), beta=2, alpha=3)
    call = compiled(program.graph(program.call(aten.abs.default, made)), "native", monkeypatch)
    assert_same(call(list(tensors))[0], torch.addmm(*tensors, beta=2, alpha=3).abs())


def test_a_write_to_places_that_occur_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.rand(4, 3), torch.tensor([2, 0, 2]), torch.rand(3, 3)]
    program = Program()
    x, places, values = map(program.input, tensors)
    made = program.call(aten.index_put.default, x, [places], values, True)
    call = compiled(program.graph(program.call(aten.exp.default, made)), "native", monkeypatch)
    torch.testing.assert_close(
        call(list(tensors))[0], torch.index_put(tensors[0], [tensors[1]], tensors[2], True).exp()
    )


def test_sizes_may_be_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the compiler's process, one plan for many sizes."""
    lazy_backend.config.backend, lazy_backend.config.compile = "inductor", "background"
    kinds = []
    load = artefact.unpack
    monkeypatch.setattr(artefact, "unpack", lambda data: (kinds.append(load(data)[0]["kind"]), load(data))[1])
    w = torch.randn(8, 8)
    weight = w.to("lazy")
    for size in (3, 5, 6, 7, 5, 6, 7, 9):
        x = torch.randn(size, 8)
        found = (x.to("lazy") @ weight).relu().sum(0)
        lazy_backend.mark_step()
        torch.testing.assert_close(found.cpu(), (x @ w).relu().sum(0))
        assert lazy_backend.wait_for_compiles(300)
    assert "native" in kinds
    assert set(kinds) == {"native"}
    assert any(state.plan == "optimized" for state in lazy_backend.computation.get_debug_states().values())


# ----- what a runner cannot do


def test_graphs_that_run_from_python_are_counted() -> None:
    program = Program()
    graph = program.graph(program.call(aten.exp.default, program.input(torch.ones(2))))
    plan = CompiledPlan(CompileRequest.of(graph, [], "inductor"), list, why_python="a reason")
    executor.compile_reports.report(CompileReport(graph, "compiled", plan=plan))
    assert metrics.counter_value("RunFromPython: a reason") == 1


def wrapper(*lines: str) -> ast.FunctionDef:
    (function,) = ast.parse("def call(self, args):\n" + "\n".join(f"    {line}" for line in lines)).body
    assert isinstance(function, ast.FunctionDef)
    return function


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("buf0 = torch.ops.aten.unbind.int(arg0_1)", "which returns more than tensors"),
        ("buf0 = torch.ops.mine.op.default(arg0_1)", "a call of torch.ops.mine.op.default"),
        ("buf0 = torch.ops.aten.sort.stable(arg0_1, dim=arg9_1)", "the name arg9_1"),
        ("buf0 = empty_strided_cpu((2,), (1,), torch.quint8)", "the dtype torch.quint8"),
        ("with torch.cuda.device(0): pass", "the statement"),
        ("buf0 = arg0_1.shape[0]", "the number"),
        ("other(arg0_1)", "a call of other"),
    ],
)
def test_what_a_runner_cannot_do_is_said(line: str, reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        runner_of(Wrapper(wrapper("arg0_1, = args", "args.clear()", line, "return (arg0_1, )"), {}))


def test_a_runner_that_the_compiler_refuses_costs_only_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    graph = program.graph(program.call(aten.exp.default, program.input(torch.ones(5))))
    monkeypatch.setattr(build, "runner_source", lambda *arguments: "no C++")
    call = compiled(graph, "bundled", monkeypatch, because="C++ that the compiler refuses")
    assert_same(call([torch.ones(5)])[0], torch.ones(5).exp())


# ----- what a version of inductor may add


def body(*lines: str) -> ast.FunctionDef:
    return wrapper("arg0_1, = args", "args.clear()", "buf0 = empty_strided_cpu((2,), (1,), torch.int64)", *lines)


def test_checks_that_are_not_known_are_left_out() -> None:
    checks = ("assert_new(arg0_1, 3)", "assert buf0 is not None", "assert_tensor_metadata(buf0, 7)", "_check_new()")
    runner = runner_of(Wrapper(body(*checks, "return (buf0, )"), {}))
    assert runner.left_out == ("assert_new", "assert", "assert_tensor_metadata", "_check_new")
    assert runner.text == runner_of(Wrapper(body("return (buf0, )"), {})).text


@pytest.mark.parametrize(
    ("check", "written"),
    [
        ("assert_size_stride(buf0, (2,), (1,), 'op')", ["-1"]),
        ("assert_tensor_metadata(buf0, (2,), (1,), torch.int64, 'op')", ["aoti_torch_dtype_int64()"]),
        (
            "assert_size_stride_grouped((buf0, arg0_1, buf0), ((2,), (3,), (2,)), ((1,), (1,), (1,)), 'op')",
            ["-1", "-1"],
        ),
        ("assert_alignment(buf0, 16, 'op')", []),
    ],
)
def test_checks_that_are_known_are_written(check: str, written: list[str]) -> None:
    runner = runner_of(Wrapper(body(check, "return (buf0, )"), {}))
    found = [line.split(", ")[-1].removesuffix("); }") for line in runner.text.splitlines() if "expect(" in line]
    assert found == written
    assert runner.left_out == ()


MODULE = """
import torch
from torch._inductor.new import helper, assert_tensor_metadata, assert_new
from torch import device
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
new_thing = helper.find()
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], "void kernel(float*) {}")
cpp_unused_1 = async_compile.cpp_pybinding(['float*'], "void kernel(float*) {}")
class Runner:
    def call(self, args):
        buf0, = args
        args.clear()
        assert_tensor_metadata(buf0, (2,), (1,), torch.float32, 'op')
        assert_new(buf0)
        cpp_fused_0(buf0)
        return (buf0, )
runner = Runner()
call = runner.call
"""


def test_names_of_inductor_matter_only_where_they_are_used() -> None:
    module = inductor_module(MODULE)
    assert list(module.kernels) == ["cpp_fused_0"]
    light = ast.unparse(ast.Module(module.light(), []))
    assert "helper" not in light
    assert "assert_new" not in light
    assert "if buf0 is not None:\n            assert_size_stride(buf0, (2,), (1,))" in light
    computing = inductor_module(MODULE.replace("cpp_fused_0(buf0)", "cpp_fused_0(helper(buf0))"))
    with pytest.raises(NotLight, match=r"names of torch\._inductor: helper"):
        computing.light()
