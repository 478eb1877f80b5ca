"""Programs seen for the first time run as they are recorded; later runs are deferred. Every run is eager's.

The tables of the other files are run here the other way: they test what is recorded before it is run.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import (
    NoSync,
    Program,
    Sync,
    SyncAt,
    assert_like_eager,
    assert_same,
    count,
    eager,
    grid,
    live_tensors,
    run_program,
)  # fmt: skip
from random_programs import RandomProgram, random_program
from test_custom_ops import ALIASED, RECORDED, RUN_AT_ONCE, positive
from test_data_dependent import READS
from test_errors import LATE, WRONG, fail, fragile, liar, no_fake
from test_random_tiers import DRAWS, Draw, drawn
from test_threads import arithmetic, in_threads, training
from test_training import no_garbage_collector, start
from test_views import PROGRAMS
from torch import nn

import lazy_backend
from lazy_backend import ExecutionError, PoisonedTensorError, StrictModeError, config, metrics
from lazy_backend.recording import operators
from lazy_backend.recording.at_once import RealCall
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.tensor import backing_tensor


@pytest.fixture(autouse=True)
def first_sight() -> None:
    config.first_sight = "run"


@pytest.fixture(params=["always", "never"])
def where_runs_happen(request: pytest.FixtureRequest) -> None:
    config.run_in_background = request.param


def forget() -> None:
    """Make every program unseen again."""
    context = contexts.get_device_context(0)
    lazy_backend.mark_step(wait=True)
    with context.lock:
        context.forget_paths()
        context.new_trace()


def assert_like_eager_thrice(program: Program, make_sync: Callable[[], Sync]) -> None:
    """At first sight, and in two runs that are deferred and find everything known."""
    forget()
    for run in range(3):
        with count("UncachedCompile") as misses:
            assert_like_eager(program, make_sync())
            lazy_backend.mark_step()  # what is read without a cut is still in the trace
        assert misses() == 0 or run == 0


def outcomes(case: Callable[[str], Any]) -> list[Any]:
    """What `case` gives in three runs; the later ones know the path."""
    forget()
    found = []
    for _ in range(3):
        result = case("lazy")
        lazy_backend.mark_step()
        found.append(lazy_backend.to_cpu(result))
    return found


# ----- tables of programs


@pytest.fixture(params=PROGRAMS)
def table_row(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]


@pytest.mark.usefixtures("where_runs_happen")
@pytest.mark.parametrize("make_sync", [NoSync, SyncAt])
def test_views_and_writes(table_row: Program, make_sync: type) -> None:
    assert_like_eager_thrice(table_row, make_sync)


@pytest.mark.usefixtures("where_runs_happen")
def test_views_and_writes_with_one_sync_at_each_point(table_row: Program) -> None:
    for point in range(eager(table_row)[1]):
        assert_like_eager_thrice(table_row, lambda point=point: SyncAt(point))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", range(600, 660))
def test_random_programs(seed: int, compiled: bool) -> None:
    config.compile = "foreground" if compiled else "off"
    config.run_in_background = "always" if seed % 2 else "never"
    program = random_program(seed)
    expected = program.run("cpu", NoSync())
    for run in range(3):
        with count("UncachedCompile") as misses:
            assert_same(program.run("lazy", lazy_backend.mark_step), expected)
            lazy_backend.mark_step()
        assert misses() == 0 or run == 0


def with_a_branch(program: RandomProgram, seed: int) -> RandomProgram:
    """`program` with two further statements somewhere in its second half, one of which writes if it can."""
    statements = list(program.statements)
    place = random.Random(seed).randrange(len(statements) // 2, len(statements) + 1)
    writes = "v3.mul_(2) if torch.is_tensor(v3) and not v3.requires_grad and v3.is_contiguous() else None"
    statements[place:place] = ["branch = v0.detach().clone() * 3 if 'v0' in locals() else None", writes]
    return RandomProgram(program.seed, tuple(statements))


def runs_on_the_cpu(program: RandomProgram) -> bool:
    try:
        program.run("cpu", NoSync())
    except Exception:
        return False  # `v3` was deleted, say
    return True


def assert_branches_like_eager(seed: int) -> None:
    known = random_program(seed)
    branched = with_a_branch(known, seed)
    if not runs_on_the_cpu(branched):
        return
    for program in (known, known, branched, branched, known, branched):
        assert_same(program.run("lazy", lazy_backend.mark_step), program.run("cpu", NoSync()))
        lazy_backend.mark_step()


@pytest.mark.parametrize("seed", range(700, 740))
def test_random_programs_that_branch(seed: int) -> None:
    config.run_in_background = "always" if seed % 2 else "never"
    assert_branches_like_eager(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_programs_that_branch(block: int) -> None:
    for seed in range(7000 + 50 * block, 7050 + 50 * block):
        assert_branches_like_eager(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_programs(block: int) -> None:
    for seed in range(5000 + 100 * block, 5100 + 100 * block):
        program = random_program(seed)
        sync = NoSync() if seed % 3 == 0 else lazy_backend.mark_step
        expected = program.run("cpu", NoSync())
        for _ in range(3):
            assert_same(program.run("lazy", sync), expected)


@pytest.mark.parametrize("name", READS)
def test_shapes_that_depend_on_values(name: str) -> None:
    assert_same(outcomes(lambda device: READS[name](device) + 1), [READS[name]("cpu") + 1] * 3)


@pytest.mark.parametrize("name", RECORDED | ALIASED)
def test_custom_operators(name: str) -> None:
    run = (RECORDED | ALIASED)[name]
    for _ in range(3):
        assert_same(run("lazy"), run("cpu"))


@pytest.mark.parametrize("name", RUN_AT_ONCE)
def test_custom_operators_that_cannot_be_recorded(name: str) -> None:
    run = RUN_AT_ONCE[name][0]
    for _ in range(3):
        with count("GraphCut") as cuts:
            assert_same(run("lazy"), run("cpu"))
        assert cuts() >= 1


def test_a_custom_operators_shape_that_depends_on_values_is_not_remembered() -> None:
    for values in ([1.0, 2.0, -1.0], [1.0, -1.0, -1.0], [3.0, 2.0, 1.0]):
        made = positive(torch.tensor(values).to("lazy") * 2) + 1
        lazy_backend.mark_step()
        assert_same(made, positive(torch.tensor(values) * 2) + 1)


@pytest.mark.parametrize("op", [torch.nonzero, torch.unique, lambda x: x[x > 1], lambda x: torch.bincount(x.relu())])
def test_a_shape_that_depends_on_values_is_not_remembered(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for values in ([1, 2, -1], [1, -1, -1], [3, 2, 1]):
        made = op(torch.tensor(values).to("lazy") * 2) + 1
        lazy_backend.mark_step()
        assert_same(made, op(torch.tensor(values) * 2) + 1)


BOOLS: dict[str, Callable[[str], Any]] = {
    "equal": lambda device: torch.equal(grid(device, 3) + 1, grid(device, 3) + 1),
    "not_equal": lambda device: torch.equal(grid(device, 3) + 1, grid(device, 3)),
    "allclose": lambda device: torch.allclose(grid(device, 3) + 1, grid(device, 3) + 1.00000001),
    "is_nonzero": lambda device: torch.is_nonzero(grid(device, 3).sum()),
    "truth": lambda device: bool((grid(device, 3) > 1).any()),
    "item": lambda device: (grid(device, 3) * 2).sum().item(),
    "same_size": lambda device: torch.is_same_size(grid(device, 3), grid(device, 2)),
}


@pytest.mark.parametrize("name", BOOLS)
def test_operators_that_return_python_values(name: str) -> None:
    assert_same(outcomes(BOOLS[name]), [BOOLS[name]("cpu")] * 3)


def in_block(block: Callable[[], Any], body: Callable[[str], Any]) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        with block():
            return body(device)

    return run


def product(device: str) -> torch.Tensor:
    return grid(device, 3, 4) @ grid(device, 4, 3) + 1


MODES: dict[str, Callable[[str], Any]] = {
    "no_grad": in_block(torch.no_grad, lambda device: product(device).requires_grad_() * 2),
    "inference_mode": in_block(torch.inference_mode, lambda device: product(device)[0].mul_(2)),
    "grad": lambda device: torch.func.grad(lambda x: (x * x).sum())(product(device)),
    "vmap": lambda device: torch.vmap(lambda row: row.sum() * row)(product(device)),
    "jacobian": lambda device: torch.func.jacrev(lambda x: x * x)(grid(device, 4)),
    "forward_mode": lambda device: torch.func.jvp(lambda x: x * x, (grid(device, 4),), (grid(device, 4),))[1],
    "conjugate": lambda device: torch.complex(grid(device, 4), grid(device, 4)).conj().mul(2).imag + 0,
    "channels_last": lambda device: grid(device, 1, 2, 3, 4).to(memory_format=torch.channels_last) + 1,
    "optimizer_zero_size": lambda device: torch.cat([grid(device, 0), product(device)[0]]),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_of_the_thread(name: str) -> None:
    assert_same(outcomes(MODES[name]), [MODES[name]("cpu")] * 3)


def test_autocast_acts_once() -> None:
    # on the call, not on its kernel
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(outcomes(product), [product("cpu")] * 3)


# ----- what runs when


def step_of(device: str, branch: bool = False) -> list[torch.Tensor]:
    """Values, gradients and a write through a view; `branch` adds calls in the middle."""
    w = grid(device, 4, 6).requires_grad_()
    y = w * 2 + 1
    part = (y.detach() + 0)[1]
    noise = torch.nn.functional.dropout(torch.ones(8, device=device)) if device == "lazy" else None
    if branch:
        y = y.square() - y[2]
        part.mul_(3)
    y.relu().sum().backward()
    assert w.grad is not None
    return [y.detach(), part, w.grad] + ([] if noise is None else [noise])


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def run_of(step: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    made = step()
    lazy_backend.mark_step()
    return [tensor.cpu() for tensor in made]


def test_the_first_step_has_nothing_left_to_run() -> None:
    y = grid("lazy", 4) * 2
    computed = y._data.storage.tensor
    assert computed is not None
    lazy_backend.mark_step()
    assert y._data.storage.tensor is computed
    assert metrics.counter_value("ExecuteComputation") == 1


def test_the_second_step_is_deferred() -> None:
    def step() -> torch.Tensor:
        y = grid("lazy", 4) * 2
        pending = y._data.storage.tensor is None
        lazy_backend.mark_step()
        assert_same(y, grid("cpu", 4) * 2)
        return pending

    assert [step(), step(), step()] == [False, True, True]


@pytest.mark.usefixtures("where_runs_happen")
def test_a_branch_taken_for_the_first_time_cuts_nothing_and_is_right() -> None:
    known = [run_of(lambda: step_of("lazy")) for _ in range(3)]
    with count("GraphCut") as cuts:
        torch.manual_seed(3)
        made = step_of("lazy", branch=True)
        lazy_backend.mark_step()
        assert cuts() == 0
    *values, noise = [tensor.cpu() for tensor in made]
    assert_same(values, copies(step_of("cpu", branch=True)))
    assert_same(noise, known[0][-1])


@pytest.mark.usefixtures("where_runs_happen")
def test_a_branch_taken_again_is_known() -> None:
    for _ in range(2):
        run_of(lambda: step_of("lazy"))
    first = run_of(lambda: step_of("lazy", branch=True))
    for branch in (True, False, True, True):
        with count("UncachedCompile") as misses:
            made = run_of(lambda branch=branch: step_of("lazy", branch=branch))
        assert misses() == 0
        assert_same(made[:-1], copies(step_of("cpu", branch=branch)))
        assert_same(made[-1], first[-1])


def test_a_branch_runs_what_came_before_it_once() -> None:
    total = torch.zeros(3, device="lazy")

    def step(branch: bool) -> None:
        total.add_(1)
        if branch:
            total.mul_(2)
        total.add_(1)
        lazy_backend.mark_step()

    expected = 0.0
    for branch in (False, False, True, False, True, True):
        step(branch)
        expected = (expected + 1) * 2 + 1 if branch else expected + 2
    assert total.tolist() == [expected] * 3


def test_views_held_across_a_branch_share_memory() -> None:
    def step(device: str, branch: bool) -> list[torch.Tensor]:
        base = grid(device, 4, 6) + 0
        row = base[1]
        if branch:
            base.t()[0].sub_(7)
        row.add_(1)
        return [base, row]

    for branch in (False, False, True, True):
        made = step("lazy", branch)
        lazy_backend.mark_step()
        assert_same(made, step("cpu", branch))


def test_gradients_of_what_was_deferred_before_a_branch() -> None:
    def step(device: str, branch: bool) -> list[torch.Tensor]:
        w = grid(device, 3, 3).requires_grad_()
        hidden = (w @ w).relu()
        loss = (hidden * 2 if branch else hidden).sum()
        loss.backward()
        return [loss, w.grad]

    for branch in (False, False, True, True):
        made = step("lazy", branch)
        lazy_backend.mark_step()
        assert_same(made, step("cpu", branch))


def test_what_is_dead_before_a_branch_is_not_kept() -> None:
    def step(branch: bool) -> None:
        x = grid("lazy", 1000)
        dropped = x * 2
        kept = dropped + 1
        storage = weakref.ref(dropped._data.storage)
        del dropped
        if branch:
            kept = kept - 3
            assert storage() is None
        lazy_backend.mark_step()

    with no_garbage_collector():
        for branch in (False, False, True):
            step(branch)


def test_what_dies_at_first_sight_is_freed_at_once() -> None:
    with no_garbage_collector():
        x = grid("lazy", 1000)
        dropped = x * 2
        memory = weakref.ref(dropped._data.storage.tensor)
        x = dropped + 1
        del dropped
        assert memory() is None


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_nothing_is_left_when_everything_is_dropped(first_sight: str) -> None:
    config.first_sight = first_sight
    gc.collect()
    with no_garbage_collector():
        before = live_tensors()
        for branch in (False, False, True, True):
            made = step_of("lazy", branch)
            lazy_backend.mark_step(wait=True)
            del made
            assert live_tensors() == before


def test_an_updated_parameter_keeps_its_memory_at_first_sight() -> None:
    parameter = nn.Parameter(grid("lazy", 4))
    before = backing_tensor(parameter._data).data_ptr()
    with torch.no_grad():
        parameter.add_(1)
    assert backing_tensor(parameter._data).data_ptr() == before
    assert parameter.tolist() == [1, 2, 3, 4]


def test_the_graph_of_a_first_run_is_that_of_the_second() -> None:
    def step() -> tuple[str, str]:
        y = torch.nn.functional.dropout(grid("lazy", 4) * 2.5 + 1)
        found = lazy_backend.computation.get_graph_hash([y]), lazy_backend.debug.dump_ir([y])
        lazy_backend.mark_step()
        return found

    assert step() == step() == step()


def test_a_known_graph_on_a_new_path_counts_as_known() -> None:
    config.backend = "aot_eager"
    for _ in range(3):
        y = grid("lazy", 4) * 2 + 1
        lazy_backend.mark_step()
        assert_same(y, grid("cpu", 4) * 2 + 1)
    assert (metrics.counter_value("UncachedCompile"), metrics.counter_value("Compile")) == (1, 1)


def test_the_first_run_counts_as_a_profiled_run() -> None:
    config.backend = "aot_eager"

    def step(number: float) -> list[float]:
        y = grid("lazy", 2) + number
        lazy_backend.mark_step()
        return y.tolist()

    with count("Compile") as compiles:
        assert step(1.0) == [1.0, 2.0]
        assert compiles() == 0
        assert step(2.0) == [2.0, 3.0]
        assert compiles() == 1
        assert step(3.0) == [3.0, 4.0]  # the number changed before the compile, so it is an input
        assert compiles() == 1


def test_calls_are_counted() -> None:
    for run in range(1, 4):
        y = grid("lazy", 4) * 2 + 1
        lazy_backend.mark_step()
        assert metrics.counter_value("lazy::mul") == run
        del y


def test_a_trace_that_grows_too_long_is_trimmed() -> None:
    config.max_trace_length = 10

    def count_to(number: int) -> torch.Tensor:
        x = torch.zeros(2, device="lazy")
        for _ in range(number):
            x = x + 1
        return x

    with pytest.warns(lazy_backend.GraphCutWarning, match="10 operators were recorded"):
        found = count_to(25)
    assert found.tolist() == [25, 25]


def test_the_default_dtype_changes_results() -> None:
    def made() -> torch.Tensor:
        return torch.ones(2, dtype=torch.int64, device="lazy") / 2

    for _ in range(2):
        assert made().dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert made().dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_two_devices(two_devices) -> None:
    def there_and_back() -> torch.Tensor:
        x = grid("lazy:0", 4) + 1
        y = x.to("lazy:1") * 2
        return y.to("lazy:0") + x

    for _ in range(3):
        assert_same(there_and_back(), torch.arange(4.0).add(1) * 3)


# ----- reads


def cuts_of(program: Callable[[], object]) -> dict[str, int]:
    """The cuts of one run with their causes and lines."""
    before = metrics.counters()
    program()
    after = metrics.counters()
    return {name: n - before.get(name, 0) for name, n in after.items() if name.startswith("GraphCut")}


def reads_in_the_middle() -> None:
    x = grid("lazy", 4)
    y = x * 2
    assert y.sum().item() == 12
    z = x + 1
    assert x.tolist() == [0, 1, 2, 3]  # an input that nobody wrote: no cut
    x.add_(1)
    assert x.tolist() == [1, 2, 3, 4]
    assert bool((z > 0).all())
    z.nonzero()
    lazy_backend.mark_step()


def test_a_read_cuts_where_it_will_cut_later() -> None:
    first, *later = [cuts_of(reads_in_the_middle) for _ in range(3)]
    assert first["GraphCut"] == 3
    for cuts in later:
        changed = {name: n for name, n in cuts.items() if n}
        assert changed == first


def test_a_read_at_first_sight_is_known_later() -> None:
    reads_in_the_middle()
    with count("UncachedCompile") as misses:
        reads_in_the_middle()
    assert misses() == 0


def test_strict_refuses_a_read_at_first_sight() -> None:
    def program() -> None:
        y = grid("lazy", 4) * 2
        with lazy_backend.strict(), pytest.raises(StrictModeError, match="would cut the graph"):
            y.tolist()
        lazy_backend.mark_step()

    for _ in range(3):
        program()


def test_closures_see_the_values_of_a_first_step() -> None:
    seen: list[list[float]] = []
    for _ in range(3):
        y = grid("lazy", 2) + 1
        lazy_backend.add_step_closure(lambda y: seen.append(y.tolist()), (y,))
        lazy_backend.mark_step()
    assert seen == [[1, 2]] * 3


# ----- random numbers


@pytest.mark.parametrize("name", DRAWS)
def test_the_first_run_draws_what_later_runs_draw(name: str) -> None:
    config.first_sight = "record"
    deferred = drawn(DRAWS[name], 7)
    forget()
    config.first_sight = "run"
    assert_same([drawn(DRAWS[name], 7) for _ in range(3)], [deferred] * 3)


def resized_out(op: Callable[..., torch.Tensor], *args: Any, dtype: torch.dtype = torch.float32) -> Draw:
    return lambda: op(*args, out=torch.empty(0, device="lazy", dtype=dtype))


RESIZED: dict[str, Draw] = {
    "rand": resized_out(torch.rand, 4),
    "randint": resized_out(torch.randint, 100, (4,), dtype=torch.int64),
    "bernoulli": lambda: torch.bernoulli(grid("lazy", 4) / 4, out=torch.empty(0, device="lazy")),
    "multinomial": lambda: torch.multinomial(
        grid("lazy", 9), 4, out=torch.empty(0, dtype=torch.int64, device="lazy")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIZED)
def test_a_random_operator_that_resizes_draws_the_same_each_time(name: str) -> None:
    first, *later = [drawn(RESIZED[name], 7) for _ in range(3)]
    assert_same(later, [first] * 2)


def test_a_refused_random_call_draws_nothing() -> None:
    def then(wrong: bool) -> torch.Tensor:
        torch.manual_seed(5)
        if wrong:
            with pytest.raises(RuntimeError):
                torch.multinomial(grid("lazy", 2, 2, 2), 1)
        return torch.rand(4, device="lazy").cpu()

    assert_same(then(wrong=True), then(wrong=False))


def test_a_draw_before_a_branch_is_kept() -> None:
    def step(branch: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        one = torch.rand(4, device="lazy")
        if branch:
            one = one + 1 - 1
        return [one, torch.rand(4, device="lazy")]

    plain = [run_of(lambda: step(branch=False)) for _ in range(2)]
    branched = [run_of(lambda: step(branch=True)) for _ in range(2)]
    assert_same(plain[0], plain[1])
    assert_same(branched[0], branched[1])
    assert_same(branched[0][1], plain[0][1])


# ----- errors


def error_of(case: Callable[[str], object], device: str) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:
        case(device)
    text = str(caught.value).replace("lazy:0", "cpu").replace("LazyTensor", "Tensor")
    return caught.type, text


@pytest.mark.parametrize("name", WRONG | LATE)
def test_an_error_at_first_sight_is_eagers_at_the_call(name: str) -> None:
    case = (WRONG | LATE)[name]
    assert error_of(case, "lazy") == error_of(case, "cpu")


@pytest.mark.parametrize("name", WRONG | LATE)
def test_an_error_at_first_sight_leaves_the_trace_usable(name: str) -> None:
    def step(wrong: bool) -> None:
        x = grid("lazy", 3)
        y = x * 2.5
        if wrong:
            with pytest.raises(Exception):  # noqa: B017
                (WRONG | LATE)[name]("lazy")
        z = y + x
        lazy_backend.mark_step()
        assert_same([y, z], [torch.arange(3.0) * 2.5, torch.arange(3.0) * 3.5])

    for wrong in (True, False, False, True, True, False):
        step(wrong)


UNSEEN: dict[str, Callable[[torch.Tensor], object]] = {
    "returns_a_bool": lambda x: torch.allclose(x, x),
    "resizes": lambda x: torch.add(x, 1, out=torch.empty(0, device="lazy")),
    "depends_on_values": torch.nonzero,
    "without_fake": no_fake,
    "fails": lambda x: error_of(lambda device: torch.mm(x, x), "lazy"),
    "is_recorded": lambda x: x - 5,
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("empty", [False, True])
def test_known_calls_after_an_unseen_one_are_run(name: str, empty: bool) -> None:
    x = grid("lazy", 3)
    total = torch.zeros(3, device="lazy")

    def step(unseen: bool) -> None:
        if not empty:
            total.add_(1)
        if unseen:
            UNSEEN[name](x)
        y = x * 2
        total.add_(y)
        lazy_backend.mark_step()
        assert_same(y, torch.arange(3.0) * 2)

    steps = (False, False, True, False, True, True, False)
    for unseen in steps:
        step(unseen)
    assert_same(total, len(steps) * (torch.arange(3.0) * 2 + (0 if empty else 1)))


def test_gradcheck() -> None:
    x = (torch.arange(6, dtype=torch.float64).view(2, 3) / 7 + 0.1).to("lazy").requires_grad_()
    for _ in range(2):
        assert torch.autograd.gradcheck(torch.sigmoid, x, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradcheck(torch.sigmoid, x, fast_mode=True)
        assert torch.autograd.gradgradcheck(torch.sigmoid, x)


@pytest.mark.parametrize("name", WRONG)
def test_an_error_in_a_known_step_leaves_it_right(name: str) -> None:
    def step(wrong: bool) -> None:
        x = grid("lazy", 3) + 0
        y = x * 2.5
        if wrong:
            with pytest.raises(Exception):  # noqa: B017
                WRONG[name]("lazy")
        x.add_(1)
        lazy_backend.mark_step()
        assert_same([x, y], [torch.arange(3.0) + 1, torch.arange(3.0) * 2.5])

    for wrong in (False, False, True, False):
        step(wrong)


@pytest.fixture
def failing():
    fail["now"] = True
    yield
    fail["now"] = False


def test_a_custom_operators_error_is_raised_as_it_is(failing) -> None:
    x = grid("lazy", 3) + 1
    with pytest.raises(ValueError, match="out of luck"):
        fragile(x)
    assert_same(x, torch.arange(3.0) + 1)


def test_an_operator_whose_fake_lies_is_right_at_first_sight() -> None:
    assert_same(outcomes(lambda device: liar(grid(device, 3))), [torch.tensor([1.0, 2.0])] * 3)


def test_ctrl_c_at_first_sight_leaves_the_trace_usable() -> None:
    @torch.library.custom_op("lazy_first::interrupted", mutates_args=())
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    interrupted.register_fake(torch.empty_like)
    x = grid("lazy", 3) * 2
    with pytest.raises(KeyboardInterrupt):
        interrupted(x)
    assert_same(x + 1, torch.arange(3.0) * 2 + 1)


def failed_step() -> torch.Tensor:
    """A known step that fails when it runs."""
    made = torch.ones(3, device="lazy")
    for now in (False, False, True):
        fail["now"] = now
        made = fragile(grid("lazy", 3) * 2)
        lazy_backend.mark_step()
    contexts.get_device_context(0).locker.wait_idle()
    fail["now"] = False
    return made


@pytest.mark.usefixtures("where_runs_happen")
def test_an_earlier_runs_error_surfaces_at_an_unseen_call() -> None:
    poisoned = failed_step()
    x = torch.arange(3.0)
    with pytest.raises(ExecutionError, match="out of luck"):
        x.to("lazy") - 0.125
    with pytest.raises(PoisonedTensorError):
        poisoned + 1
    assert_same(x.to("lazy") - 0.125, x - 0.125)


@pytest.mark.usefixtures("where_runs_happen")
def test_an_earlier_runs_error_poisons_what_was_deferred_since() -> None:
    poisoned = failed_step()
    y = grid("lazy", 3) * 2  # known, so deferred
    with pytest.raises(ExecutionError, match="out of luck"):
        y - 0.125
    for tensor in (poisoned, y):
        with pytest.raises(PoisonedTensorError):
            tensor + 1
    assert_same(grid("lazy", 3) * 2 - 0.125, torch.arange(3.0) * 2 - 0.125)


@pytest.mark.usefixtures("where_runs_happen")
def test_an_error_of_what_was_deferred_before_a_branch_surfaces_at_the_branch() -> None:
    for _ in range(2):
        y = fragile(grid("lazy", 3))
        lazy_backend.mark_step()
    fail["now"] = True
    y = fragile(grid("lazy", 3))
    with pytest.raises(ExecutionError, match="out of luck"):
        y - 0.125
    fail["now"] = False
    with pytest.raises(PoisonedTensorError):
        y.cpu()
    assert_same(fragile(grid("lazy", 3)) - 0.125, torch.arange(3.0) + 1 - 0.125)


def test_a_poisoned_operand_is_refused_at_an_unseen_call() -> None:
    poisoned = failed_step()
    with pytest.raises(ExecutionError):
        lazy_backend.wait_device_ops()
    with pytest.raises(PoisonedTensorError):
        poisoned.flip(0)


def test_an_operator_without_a_fake_gets_its_operands_values() -> None:
    for _ in range(3):
        assert_same(no_fake(grid("lazy", 3) + 1) * 2, (torch.arange(3.0) + 1) * 4)


# ----- training


def tool(name: str) -> ModuleType:
    """A module of `tools/shared`."""
    found = sys.modules.get(f"tools_{name}")
    if found is None:
        spec = importlib.util.spec_from_file_location(
            f"tools_{name}", Path(__file__).resolve().parents[2] / "tools" / "shared" / f"{name}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


def assert_trains_like_eager(lazy: Callable[[], Any], eager: Callable[[], Any], steps: int = 6) -> None:
    with no_garbage_collector():
        for step in range(steps):
            with count("UncachedCompile") as misses, count("GraphCut") as cuts:
                made = lazy()
            assert misses() == 0 or step < 2
            assert cuts() == 0
            assert_same(made.detach(), eager().detach())


@pytest.mark.usefixtures("where_runs_happen")
@pytest.mark.parametrize(
    ("model", "optimizer"), [("mlp", "adamw_foreach"), ("cnn", "momentum"), ("cnn", "adam"), ("gpt", "adam_foreach")]
)
def test_training_is_known_from_the_third_step_on(model: str, optimizer: str) -> None:
    runs = [start(model, optimizer, device) for device in ("lazy", "cpu")]
    assert_trains_like_eager(runs[0].step, runs[1].step)
    lazy, eager = (run.model.state_dict() for run in runs)
    assert_same(lazy, eager)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gpt_is_known_from_the_third_step_on(fused: bool) -> None:
    workloads = tool("workloads")
    size = workloads.GPTSize(layers=2, width=32, fused_attention=fused)
    workload = workloads._gpt("a small one", size, workloads._adamw)
    lazy, cpu = (workloads.make_training(workload, device) for device in ("lazy", "cpu"))

    def step() -> torch.Tensor:
        lazy.step()
        lazy_backend.mark_step()
        return lazy.loss

    def eager_step() -> torch.Tensor:
        cpu.step()
        return cpu.loss

    assert_trains_like_eager(step, eager_step)


def test_memory_is_flat_from_the_third_step_on() -> None:
    run = start("mlp", "adam_foreach", "lazy")
    with no_garbage_collector():
        alive = []
        for _ in range(8):
            run.step()
            lazy_backend.wait_device_ops()
            alive.append(live_tensors())
    assert len(set(alive[1:])) == 1


def test_evaluation_between_steps() -> None:
    def evaluated(device: str) -> list[float]:
        run = start("cnn", "momentum", device)
        seen = []
        for _ in range(4):
            run.step()
            run.model.eval()
            with torch.no_grad():
                inputs, _ = (tensor.to(device) for tensor in run._next_batch())
                seen.append(run.model(inputs).sum().item())
            run.model.train()
        return seen

    assert evaluated("lazy") == evaluated("cpu")


# ----- threads


@pytest.mark.usefixtures("where_runs_happen")
@pytest.mark.parametrize("mark", [lambda: None, lazy_backend.mark_step], ids=["one trace", "mark_step"])
def test_two_threads_on_one_device(mark) -> None:
    expected = [arithmetic("cpu", start, 30, lambda: None) for start in (1, 2)]
    for _ in range(3):
        made = in_threads(*(lambda start=start: arithmetic("lazy", start, 30, mark) for start in (1, 2)))
        assert_same(made, expected)


@pytest.mark.usefixtures("where_runs_happen")
def test_two_threads_train_on_one_device() -> None:
    expected = [training("cpu", seed, 15) for seed in (1, 2)]
    for _ in range(2):
        assert in_threads(*(lambda seed=seed: training("lazy", seed, 15) for seed in (1, 2))) == expected


def test_a_first_run_on_another_thread_is_known_here() -> None:
    def step() -> list[float]:
        y = grid("lazy", 3) * 2
        lazy_backend.mark_step()
        return y.tolist()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    with count("UncachedCompile") as misses:
        assert step() == [0, 2, 4]
    assert misses() == 0


def test_common_operators_are_looked_up_when_the_first_device_is_made(tmp_path: Path) -> None:
    assert len(operators.common_ops()) == len(operators._COMMON.split())  # all exist
    program = """
        import torch, lazy_backend.recording.operators as operators
        x = torch.ones(2, 2, device="lazy", requires_grad=True)
        known = len(operators._traits)
        (x @ x + x).relu().sum().backward()
        assert len(operators._traits) == known > 50
        torch.trace(x)
        assert len(operators._traits) == known + 1
    """
    run_program(textwrap.dedent(program), tmp_path)


@pytest.mark.parametrize("operands", [2, 20])
def test_whose_memory_a_result_shares(operands: int) -> None:
    tensors = [grid("lazy", 3) for _ in range(operands)]
    call = RealCall(contexts.get_device_context(0))
    lazy_backend.mark_step(wait=True)
    made = call.run(torch.ops.aten.cat.default, (tensors,), {}, None)
    assert call.source_of(made) is None
    for tensor in tensors:
        assert call.source_of(backing_tensor(tensor._data)[1:]) is tensor._data
