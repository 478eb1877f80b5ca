"""Equal stretches of a graph as blocks that are compiled once."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builder import Built, Program, aten, built, random_graph
from harness import assert_same

from lazy_backend.lowering.artefacts.artefact import kind_of, load, unpack
from lazy_backend.lowering.blocks import block_program
from lazy_backend.lowering.blocks.block_program import BlockProgram, blocks_of, in_blocks
from lazy_backend.lowering.blocks.block_sequence import BlockRunner, BlockSequence
from lazy_backend.lowering.blocks.list_operators import ListCalls, list_length
from lazy_backend.lowering.blocks.repeats import find_repeats
from lazy_backend.lowering.blocks.stretches import makes_views
from lazy_backend.lowering.compilation import build
from lazy_backend.lowering.compilation.compiler import CompiledPlan, load_graph
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Graph, Node, check_graph
from lazy_backend.lowering.ir.program import Token

NONE: frozenset[int] = frozenset()


# ----- where a sequence repeats itself


def test_what_comes_again_is_found() -> None:
    block = list(range(10, 30))
    (repeat,) = find_repeats([1, 2, *block * 5, 3], shortest=4)
    assert (repeat.start, repeat.period, repeat.count, repeat.end) == (2, 20, 5, 102)


def test_small_rounds_are_joined() -> None:
    (repeat,) = find_repeats([7, 8, 9] * 10, shortest=8)
    assert (repeat.period, repeat.count, repeat.spare) == (9, 3, 3)


def test_forward_and_backward_are_two_repeats() -> None:
    forward, backward = list(range(20)), list(range(50, 85))
    found = find_repeats([*forward * 4, 100, 101, *backward * 4, 102], shortest=4)
    assert [(one.start, one.period, one.count) for one in found] == [(0, 20, 4), (82, 35, 4)]


@pytest.mark.parametrize("seed", range(100))
def test_rounds_are_equal_and_do_not_overlap(seed: int) -> None:
    choose = random.Random(seed)
    items: list[int] = []
    for _ in range(choose.randrange(6)):
        items += [choose.randrange(3) for _ in range(choose.randrange(20))] * choose.randrange(1, 6)
    shortest = choose.randrange(1, 12)
    end = spare = 0
    for one in find_repeats(items, shortest):
        assert one.start >= end + spare
        assert one.count > 1
        assert one.period >= shortest
        end, spare = one.end, one.spare
        assert end + spare <= len(items)
        rounds = [items[start : start + one.period] for start in range(one.start, end, one.period)]
        assert all(other == rounds[0] for other in rounds)
        assert items[end : end + one.spare] == rounds[0][: one.spare] or one.spare >= one.period


# ----- any stretches compute what the graph computes


def interpreted(program: BlockProgram, constants: Sequence[float], promoted: frozenset[int]) -> BlockRunner:
    """The blocks interpreted, with the arguments that compiled ones get. The sequence has been text in between."""
    sequence = BlockSequence.from_json(json.loads(json.dumps(program.sequence.to_json())))
    assert sequence == program.sequence
    first = {call.block: call.constants for call in reversed(sequence.calls)}
    blocks = zip(program.blocks, (first[place] for place in range(len(program.blocks))), strict=True)
    return BlockRunner(sequence, [_compute(block, own, constants, promoted) for block, own in blocks])


def _compute(
    block: Graph, own: Sequence[int], constants: Sequence[float], promoted: frozenset[int]
) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    executor = SerialGraphExecutor(check_graph(block))

    def compute(arguments: list[Any]) -> Sequence[torch.Tensor]:
        inputs, further = arguments[: len(block.inputs)], arguments[len(block.inputs) :]
        arguments.clear()
        values = [constants[index] for index in own]
        places = [place for place, index in enumerate(own) if index in promoted]
        given = further.pop(0).tolist() if places else []
        for place, value in zip(places, given, strict=True):
            values[place] = value
        seeds = further.pop(0).tolist() if block.num_seeds else []
        assert not further
        return executor.execute(inputs, values, seeds)

    return compute


def assert_computes(one: Built, program: BlockProgram, promoted: frozenset[int] = NONE) -> None:
    """The interpreted blocks give the interpreted graph's results, bit for bit, what it writes included."""
    wanted_inputs, inputs = one.fresh(), one.fresh()
    wanted = SerialGraphExecutor(one.graph).execute(list(wanted_inputs), one.constants, one.seeds())
    arguments: list[Any] = list(inputs)
    if promoted:
        packed = [one.constants[index] for index in sorted(promoted)]
        arguments.append(torch.tensor(packed, dtype=torch.float64))
    if one.graph.num_seeds:
        arguments.append(torch.tensor(one.seeds()))
    results = interpreted(program, one.constants, promoted).call(arguments)
    assert not arguments  # the runner has taken them
    assert_same(results, wanted)
    assert_same(inputs, wanted_inputs)


@pytest.mark.parametrize("seed", range(60))
def test_any_stretches_compute_the_graph(seed: int) -> None:
    choose, one = random.Random(seed), random_graph(seed, length=60)
    nodes = [node for node in one.graph.nodes if not makes_views(node)]
    cuts = sorted(choose.sample(range(len(nodes) + 1), choose.randrange(2, 9)))
    stretches = [nodes[a:b] for a, b in zip([0, *cuts], [*cuts, len(nodes)], strict=True) if a < b]
    promoted = frozenset(index for index in range(one.graph.num_constants) if choose.random() < 0.5)
    assert_computes(one, blocks_of(one.graph, stretches, one.constants, promoted), promoted)


# ----- programs that repeat themselves


def block_of(program: Program, x: Token, w: Token, b: Token, scale: float = 0.5) -> Token:
    """A block with a residual connection, views, a write, and random numbers."""
    h = program.call(aten.native_layer_norm.default, x, [8], w, b, 1e-5)[0]
    h = program.call(aten.mm.default, h, program.call(aten.t.default, program.call(aten.outer.default, w, b)))
    top, bottom = program.call(aten.split.Tensor, h, 4)
    program.call(aten.mul_.Tensor, top, scale)
    h = program.call(aten.add.Tensor, h, program.call(aten.cat.default, [bottom, top]))
    for _ in range(4):
        h = program.call(aten.tanh.default, program.call(aten.sub.Tensor, h, x))
    noise = program.call(aten.rand_like.default, h)
    program.call(aten.add_.Tensor, w, program.call(aten.mean.dim, noise, [0]))
    return program.call(aten.add.Tensor, x, program.call(aten.mul.Tensor, h, noise))


def deep(count: int, scales: Sequence[float] = ()) -> Built:
    program = Program()
    generator = torch.Generator().manual_seed(0)
    x = program.input(torch.randn(8, 8, generator=generator))
    weights = [[program.input(torch.rand(8, generator=generator)) for _ in range(2)] for _ in range(count)]
    x = program.call(aten.tanh.default, x)
    for place, (w, b) in enumerate(weights):
        x = block_of(program, x, w, b, scales[place] if scales else 0.5)
    return built(program, program.call(aten.exp.default, x))


@pytest.mark.parametrize("count", [2, 3, 4, 12])
def test_a_deep_program_has_one_block(count: int) -> None:
    one = deep(count)
    program = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    assert program is not None
    calls = [call.block for call in program.sequence.calls]
    assert max(map(calls.count, calls)) >= count - 1
    assert len(program.blocks) <= 3
    assert_computes(one, program)


def test_blocks_within_small_batches() -> None:
    """What repeats within a round is cut, too: a program that calls a deep model for each of several small batches."""
    program = Program()
    generator = torch.Generator().manual_seed(0)
    weights = [[program.input(torch.rand(8, generator=generator)) for _ in range(2)] for _ in range(4)]
    total = program.call(aten.zeros.default, [8, 8])
    for _ in range(5):
        x = program.call(aten.tanh.default, program.input(torch.randn(8, 8, generator=generator)))
        for w, b in weights:
            x = block_of(program, x, w, b)
        total = program.call(aten.add.Tensor, total, x)
    one = built(program, total)
    found = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    assert found is not None
    assert len(found.blocks) <= 6
    assert len(found.sequence.calls) >= 20
    assert_computes(one, found)


@pytest.mark.parametrize("seed", range(40))
def test_rounds_of_several_kinds_that_begin_alike(seed: int) -> None:
    """What begins a round may be moved to the round before, unless rounds of another kind begin with it."""
    choose, program = random.Random(seed), Program()
    generator = torch.Generator().manual_seed(0)
    pool = [program.call(aten.tanh.default, program.input(torch.rand(4, 4, generator=generator))) for _ in range(3)]
    written = program.input(torch.zeros(4, 4))

    def calls(count: int) -> list[tuple[float, Any, int, int]]:
        return [
            (choose.random(), choose.choice(_UNARY), choose.randrange(3), choose.randrange(3)) for _ in range(count)
        ]

    start = calls(choose.randrange(1, 14))
    for _ in range(3):
        body = start + calls(choose.randrange(6, 24))
        for kind, op, a, b in body * choose.randrange(2, 5):
            if kind < 0.7:
                pool[b] = program.call(op, pool[a])
            elif kind < 0.85:
                program.call(aten.add_.Tensor, written, pool[a])
            else:  # a narrow place
                pool = [program.call(aten.add.Tensor, program.call(aten.add.Tensor, pool[0], pool[1]), pool[2])] * 3
    one = built(program, program.call(aten.cat.default, [*pool, written]))
    found = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    assert found is not None
    assert_computes(one, found)


_UNARY = [one.default for one in (aten.tanh, aten.sin, aten.cos, aten.sigmoid, aten.erf, aten.abs, aten.neg)]


def test_blocks_pass_few_values() -> None:
    one = deep(6)
    program = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    assert program is not None
    assert min(len(call.inputs) for call in program.sequence.calls[1:-1]) == 3  # x and two parameters


def test_a_run_frees_what_no_later_block_needs() -> None:
    one = deep(6)
    program = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    assert program is not None
    runner = interpreted(program, one.constants, NONE)
    results: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(block: Any) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
        compute = block._compute

        def run(arguments: list[Any]) -> Sequence[torch.Tensor]:
            alive.append(sum(ref() is not None for ref in results))
            made = compute(arguments)
            results.extend(map(weakref.ref, made))
            return made

        return run

    for block in {step.block for step in runner._steps}:
        block._compute = watched(block)
    runner.call([*one.fresh(), torch.tensor(one.seeds())])
    assert len(alive) == len(program.sequence.calls)
    assert max(alive) == 1  # what the block before has made


def test_what_ends_in_a_block_is_freed_in_it() -> None:
    """Be it an input of the graph, the last one included, or what the block before has made."""
    one = deep(6)
    program = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    assert program is not None
    runner = interpreted(program, one.constants, NONE)
    left: list[int] = []

    def watched(block: Any) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
        compute = block._compute

        def run(arguments: list[Any]) -> Sequence[torch.Tensor]:
            tensors = [weakref.ref(one) for one in arguments if one.dtype is torch.float32]  # not the seeds
            made = compute(arguments)
            left.append(sum(ref() is not None for ref in tensors))
            return made

        return run

    for block in {step.block for step in runner._steps}:
        block._compute = watched(block)
    runner.call([*one.fresh(), torch.tensor(one.seeds())])
    assert len(left) == len(program.sequence.calls)
    assert not any(left)


def test_blocks_with_other_floats_are_others_unless_they_are_inputs() -> None:
    one = deep(6, scales=[0.5, 0.25, 0.5, 0.25, 0.5, 0.25])
    program = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    promoted = frozenset(index for index, value in enumerate(one.constants) if value in (0.5, 0.25))
    shared = in_blocks(one.graph, one.constants, promoted, min_saved=0)
    assert program is not None
    assert shared is not None
    assert len(shared.blocks) < len(program.blocks)
    assert_computes(one, program)
    assert_computes(one, shared, promoted)


def test_floats_that_are_almost_equal_are_not() -> None:
    one = deep(4, scales=[0.0, -0.0, 0.0, -0.0])
    program = in_blocks(one.graph, one.constants, NONE, min_saved=0)
    assert program is not None
    assert_computes(one, program)
    values = {tuple(one.constants[index].hex() for index in call.constants) for call in program.sequence.calls}
    assert len(program.blocks) >= len(values)


def test_too_little_to_save() -> None:
    one = deep(4)
    assert in_blocks(one.graph, one.constants, NONE, min_saved=1000) is None


def test_random_blocks_that_repeat() -> None:
    shared = 0
    for seed in range(60):
        one = _repeated(seed)
        program = in_blocks(one.graph, one.constants, NONE, min_saved=0)
        assert program is not None
        shared += len(program.blocks) < len(program.sequence.calls)
        assert_computes(one, program)
    assert shared > 10, shared


def _repeated(seed: int, draws: bool = True) -> Built:
    """The same random calls several times, each time on other tensors. `draws`: whether some draw random numbers."""
    choose, program = random.Random(seed), Program()
    inputs = [program.input(torch.randn(4, 4, generator=torch.Generator().manual_seed(n))) for n in range(4)]
    pool = [program.call(aten.tanh.default, program.call(aten.t.default, one)) for one in inputs[:2]] + inputs[2:]
    body = [
        (choose.randrange(5 if draws else 4), choose.randrange(4), choose.randrange(4))
        for _ in range(choose.randrange(24, 40))
    ]
    for _ in range(choose.randrange(3, 8)):
        own = list(pool)
        for which, a, b in body:
            x, y = own[a], own[b]
            if which == 0:
                own[a] = program.call(aten.add.Tensor, x, y)
            elif which == 1:
                own[a] = program.call(aten.t.default, x)
            elif which == 2:
                program.call(aten.mul_.Tensor, x, program.call(aten.tanh.default, y))
            elif which == 3:
                own[b] = program.call(aten.mm.default, x, y)
            else:
                own[a] = program.call(aten.rand_like.default, program.call(aten.t.default, y))
        pool = own if choose.random() < 0.9 else pool
    made = [program.call(aten.tanh.default, token) for token in dict.fromkeys([*pool, *inputs])]
    return built(program, *made)


# ----- operators on lists


def optimizer_step(count: int, size: int = 4) -> tuple[Built, Program]:
    program = Program()
    generator = torch.Generator().manual_seed(1)
    params = [program.input(torch.rand(size, generator=generator)) for _ in range(count)]
    squares = [program.input(torch.rand(size, generator=generator)) for _ in range(count)]
    coefficient = program.input(torch.rand((), generator=generator))
    grads = [program.call(aten.mul.Tensor, program.call(aten.tanh.default, p), p) for p in params]
    norms = program.call(aten._foreach_norm.Scalar, grads, 2.0)
    total = program.call(aten.sum.default, program.call(aten.stack.default, norms))
    program.call(aten._foreach_mul_.Tensor, grads, coefficient)
    program.call(aten._foreach_mul_.Scalar, squares, 0.75)
    program.call(aten._foreach_addcmul_.Scalar, squares, grads, grads, 0.25)
    roots = program.call(aten._foreach_sqrt.default, squares)
    program.call(aten._foreach_addcdiv_.ScalarList, params, grads, roots, [-0.1 * (n + 1) for n in range(count)])
    return built(program, total, *(r for r in roots)), program


def test_lists_are_taken_apart_group_by_group() -> None:
    one, _ = optimizer_step(6)
    lists = [node for node in one.graph.nodes if list_length(node)]
    calls = ListCalls(6)
    assert all(calls.add(node) for node in lists[1:])
    parts = [calls.of_group(group) for group in ([0, 3], [1, 2], [4, 5])]
    first = next(place for place, node in enumerate(one.graph.nodes) if node is lists[1])
    apart = replace(one.graph, nodes=(*one.graph.nodes[:first], *(node for part in parts for node in part)))
    wanted_inputs, inputs = one.fresh(), one.fresh()
    wanted = SerialGraphExecutor(one.graph).execute(list(wanted_inputs), one.constants, [])
    assert_same(SerialGraphExecutor(apart).execute(list(inputs), one.constants, []), wanted)
    assert_same(inputs, wanted_inputs)


def _nodes_of(*calls: tuple[Any, ...]) -> list[Node]:
    """Calls on lists of the tensors that the numbers among the arguments name."""
    program = Program()
    tensors = [program.input(torch.rand(4)) for _ in range(6)]
    for op, *args in calls:
        program.call(op, *([tensors[n] for n in arg] if isinstance(arg, list) else arg for arg in args))
    graph = built(program, program.call(aten.cat.default, tensors)).graph
    return [node for node in graph.nodes if list_length(node)]


@pytest.mark.parametrize(
    "calls",
    [
        # a place reads what another one writes
        [(aten._foreach_mul_.Scalar, [0, 1], 2.0), (aten._foreach_add_.List, [2, 3], [1, 0])],
        # lists of other lengths
        [(aten._foreach_mul_.Scalar, [0, 1], 2.0), (aten._foreach_mul_.Scalar, [0, 1, 2], 2.0)],
    ],
)
def test_calls_that_cannot_be_taken_apart_together(calls: list[tuple[Any, ...]]) -> None:
    first, second = _nodes_of(*calls)
    run = ListCalls(2)
    assert run.add(first)
    assert not run.add(second)
    assert run.nodes == [first]


def test_a_tensor_with_a_number_for_each_place_keeps_its_call_whole() -> None:
    program = Program()
    lists = [[program.input(torch.rand(4)) for _ in range(3)] for _ in range(3)]
    program.call(aten._foreach_addcmul_.Tensor, *lists, program.input(torch.rand(3)))
    (node,) = built(program, program.call(aten.cat.default, lists[0])).graph.nodes[:1]
    assert list_length(node) is None


def test_a_tensor_that_all_places_read_must_stay_as_it_is() -> None:
    program = Program()
    a, b, shared = (program.input(torch.rand(())) for _ in range(3))
    program.call(aten._foreach_mul_.Scalar, [a, shared], 2.0)
    program.call(aten._foreach_mul_.Tensor, [a, b], shared)
    graph = built(program, program.call(aten.stack.default, [a, b, shared])).graph
    first, second = (node for node in graph.nodes if list_length(node))
    run = ListCalls(2)
    assert run.add(first)
    assert not run.add(second)


# ----- compiled


def compiled(one: Built, promoted: frozenset[int], monkeypatch: pytest.MonkeyPatch, min_saved: int) -> bytes:
    monkeypatch.setattr(build, "MIN_SAVED", min_saved)
    request = CompileRequest.of(one.graph, one.constants, "inductor", promoted)
    return build.compile_request(replace(request, shares_blocks=True))


def test_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = deep(4, scales=[0.5, 0.25, 0.5, 0.75])
    promoted = frozenset(index for index, value in enumerate(one.constants) if value in (0.5, 0.25, 0.75))
    data = compiled(one, promoted, monkeypatch, min_saved=0)
    assert kind_of(data) == "blocks"
    header, blobs = unpack(data)
    assert len(blobs) < len(header["sequence"]["calls"])
    request = CompileRequest.of(one.graph, one.constants, "inductor", promoted)
    wanted_inputs = one.fresh()
    wanted = SerialGraphExecutor(one.graph).execute(list(wanted_inputs), one.constants, one.seeds())
    assert_runs(one, load_graph(data, request), (wanted, wanted_inputs))


def assert_runs(one: Built, plan: CompiledPlan, wanted: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    """Runs compute that, and write that to the inputs: the first, which finds out how results lie, and later ones."""
    for _ in range(3):
        inputs = one.fresh()
        results = plan.execute(list(inputs), one.constants, one.seeds())
        assert_near(results, inputs, wanted)
    run = plan.run_beside()
    if run is not None:  # nothing draws random numbers
        inputs = one.fresh()
        run.begin(list(inputs), one.constants, one.seeds())
        while not run.wait(1.0):
            pass
        assert_near(run.results()[0], inputs, wanted)


def assert_near(
    results: list[torch.Tensor], inputs: list[torch.Tensor], wanted: tuple[list[torch.Tensor], list[torch.Tensor]]
) -> None:
    for actual, expected in zip([*results, *inputs], [*wanted[0], *wanted[1]], strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("draws", [False, True])
def test_random_compiled_blocks(seed: int, draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = _repeated(seed, draws)
    data = compiled(one, NONE, monkeypatch, min_saved=0)
    assert kind_of(data) == "blocks"
    inputs = one.fresh()
    outputs = SerialGraphExecutor(one.graph).execute(list(inputs), one.constants, one.seeds())
    plan = load_graph(data, CompileRequest.of(one.graph, one.constants, "inductor", NONE))
    assert_runs(one, plan, (outputs, inputs))
    assert draws or plan.run_beside() is not None


def test_small_requests_are_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    one = deep(2)
    assert kind_of(compiled(one, NONE, monkeypatch, block_program.MIN_SAVED)) == "native"
    assert load(compiled(one, NONE, monkeypatch, block_program.MIN_SAVED), one.graph).call is not None
