"""Errors: of operators when they are recorded, of runs once and with the line, and nothing is left behind."""

from __future__ import annotations

import inspect
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import assert_same, count, grid, run_program

import lazy_backend
from lazy_backend import (
    ExecutionError,
    GraphCutWarning,
    PoisonedTensorError,
    StrictModeError,
    config,
    metrics,
)
from lazy_backend.settings import Config
from lazy_backend.tensors.contexts import contexts

# ----- operators that fail when they run

fail = {"now": False, "thread": None}


@pytest.fixture(autouse=True, params=["always", "never"])
def where_runs_happen(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.run_in_background = request.param


@torch.library.custom_op("lazy_test::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    fail["thread"] = threading.current_thread()
    if fail["now"]:
        raise ValueError("out of luck")
    return x + 1


@fragile.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lazy_test::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("lazy_test::liar", mutates_args=())
def liar(x: torch.Tensor) -> torch.Tensor:
    return x[1:].clone()


@liar.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def failing() -> Iterator[None]:
    fail["now"] = True
    yield
    fail["now"] = False


def failed_run() -> tuple[torch.Tensor, str]:
    """A tensor whose run fails, and the line that recorded the operator at fault."""
    x = torch.ones(3, device="lazy")
    y, line = fragile(x), line_here()
    lazy_backend.mark_step()
    contexts.get_device_context(0).locker.wait_idle()
    fail["now"] = False
    return y, line


def line_here() -> str:
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def take_error() -> ExecutionError:
    with pytest.raises(ExecutionError) as caught:
        lazy_backend.wait_device_ops()
    return caught.value


def assert_next_step_works() -> None:
    y = torch.ones(3, device="lazy") * 2
    lazy_backend.mark_step(wait=True)
    assert y.tolist() == [2.0, 2.0, 2.0]


# ----- at record time

WRONG: dict[str, Callable[[str], object]] = {
    "matmul": lambda device: grid(device, 2, 3) @ grid(device, 2, 3),
    "add": lambda device: grid(device, 2) + grid(device, 3),
    "view": lambda device: grid(device, 2, 3).view(4),
    "view_of_transposed": lambda device: grid(device, 2, 3).t().view(6),
    "cat": lambda device: torch.cat([grid(device, 2, 3), grid(device, 2, 4)]),
    "stack": lambda device: torch.stack([grid(device, 2), grid(device, 3)]),
    "select": lambda device: grid(device, 2)[5],
    "dim": lambda device: grid(device, 2).sum(3),
    "expand": lambda device: grid(device, 2).expand(3),
    "dtype": lambda device: grid(device, 2, 2) @ grid(device, 2, 2, dtype=torch.float64),
    "inplace_cast": lambda device: grid(device, 2, dtype=torch.int64).add_(0.5),
    "inplace_broadcast": lambda device: grid(device, 2).add_(grid(device, 2, 2)),
    "conv": lambda device: torch.nn.functional.conv2d(grid(device, 1, 2, 4, 4), grid(device, 1, 3, 2, 2)),
    "linear": lambda device: torch.nn.functional.linear(grid(device, 2, 3), grid(device, 4, 5)),
    "bitwise": lambda device: grid(device, 2) & 1,
    "index_too_many": lambda device: grid(device, 2)[0, 0],
    "squeeze": lambda device: grid(device, 2).unsqueeze(4),
    "permute": lambda device: grid(device, 2, 3).permute(0, 0),
    "split": lambda device: grid(device, 4).split([1, 2]),
    "norm": lambda device: torch.nn.functional.layer_norm(grid(device, 2, 3), (4,)),
    "class": lambda device: grid(device, 2).bmm(grid(device, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_operators_error_has_eagers_type_at_record_time(name: str) -> None:
    with pytest.raises(Exception) as eagers:
        WRONG[name]("cpu")
    with pytest.raises(eagers.type), count("UncachedCompile") as runs:
        WRONG[name]("lazy")
    assert runs() == 0


# Fake kernels do not see these: they are found by the real one.
LATE: dict[str, Callable[[str], object]] = {
    "reduce_empty": lambda device: grid(device, 0).max(),
    "overlap": lambda device: grid(device, 1).expand(3).add_(1),
    "index_out_of_range": lambda device: torch.nn.functional.embedding(
        torch.tensor([7]).to(device), grid(device, 2, 3)
    ),
    "singular": lambda device: torch.linalg.inv(torch.zeros(2, 2).to(device)),
}


@pytest.mark.parametrize("name", LATE)
def test_an_error_of_the_kernel_has_eagers_text_at_the_sync(name: str) -> None:
    with pytest.raises(Exception) as eagers:
        LATE[name]("cpu")
    with pytest.raises(Exception) as lazys:
        LATE[name]("lazy").cpu()
    assert str(eagers.value).split("\n")[0] in str(lazys.value)
    assert f"{__file__}:" in str(lazys.value) or not isinstance(lazys.value, ExecutionError)


@pytest.mark.parametrize("name", ["matmul", "add", "view", "cat", "select", "dim", "expand", "inplace_broadcast"])
def test_an_operators_error_has_eagers_text(name: str) -> None:
    texts = []
    for device in ("cpu", "lazy"):
        with pytest.raises(Exception) as caught:
            WRONG[name](device)
        texts.append(str(caught.value).split("\n")[0])
    assert texts[1] == texts[0]


@pytest.mark.parametrize("name", WRONG)
def test_an_operators_error_leaves_nothing_in_the_trace(name: str) -> None:
    def step(wrong: bool) -> None:
        x = torch.ones(3, device="lazy")
        if wrong:
            with pytest.raises(Exception):  # noqa: B017
                WRONG[name]("lazy")
        y = x * 2.5
        lazy_backend.mark_step()
        assert y.tolist() == [2.5] * 3

    step(wrong=False)
    step(wrong=True)
    step(wrong=False)
    assert metrics.counter_value("UncachedCompile") == 1


def test_an_error_with_a_float_leaves_no_constant() -> None:
    def step(wrong: bool) -> torch.Tensor:
        x = torch.ones(3, device="lazy")
        if wrong:
            with pytest.raises(RuntimeError):
                torch.addmm(x, x, x, alpha=7.0)
        y = x * 2.5
        lazy_backend.mark_step()
        return y

    step(wrong=False)
    assert step(wrong=True).tolist() == [2.5] * 3


def test_an_error_with_a_new_input_leaves_no_input() -> None:
    a, b, c = grid("lazy", 3), grid("lazy", 4), grid("lazy", 3)
    with pytest.raises(RuntimeError):
        a + b
    assert_same(c + a, torch.arange(3.0) * 2)
    assert_same(b * 2, torch.arange(4.0) * 2)


def test_the_tensors_of_a_refused_call_still_work() -> None:
    x, y = grid("lazy", 3), torch.empty(4, device="lazy")
    with pytest.raises(RuntimeError):
        x.add_(y)
    assert_same(x, torch.arange(3.0))
    assert_same(y.zero_(), torch.zeros(4))


# ----- in a run


def test_an_operator_runs_in_the_background() -> None:
    lazy_backend.config.run_in_background = "always"
    fragile(torch.ones(3, device="lazy")).cpu()
    assert fail["thread"] is not threading.current_thread()


def test_a_runs_error_surfaces_once(failing) -> None:
    failed_run()
    take_error()
    lazy_backend.wait_device_ops()
    lazy_backend.mark_step()


def test_a_runs_error_names_the_cause_and_the_line(failing) -> None:
    _, line = failed_run()
    error = take_error()
    assert "out of luck" in str(error)
    assert "lazy_test.fragile" in str(error)
    assert f"recorded at {line}" in str(error)


def test_a_runs_error_names_the_sync(failing) -> None:
    failed_run()
    assert "(mark_step)" in str(take_error())


def test_a_runs_error_has_its_cause(failing) -> None:
    failed_run()
    causes, cause = [], take_error()
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__
    assert causes[0] is ExecutionError
    assert causes[-1] is ValueError


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_runs_error_surfaces(backend: str) -> None:
    config.backend = backend
    for _ in range(2):
        failed_run()
    fail["now"] = True
    failed_run()
    error = take_error()
    assert "out of luck" in str(error)
    assert "compiled" in str(error)


def test_the_next_mark_step_raises_it(failing) -> None:
    failed_run()
    torch.ones(3, device="lazy").mul_(2)
    with pytest.raises(ExecutionError):
        lazy_backend.mark_step()


def test_a_read_raises_it(failing) -> None:
    y, _ = failed_run()
    with pytest.raises((ExecutionError, PoisonedTensorError), match="out of luck"):
        y.tolist()
    contexts.get_device_context(0).locker.take_exception()


def test_waiting_in_mark_step_raises_it(failing) -> None:
    y = fragile(torch.ones(3, device="lazy"))
    with pytest.raises(ExecutionError):
        lazy_backend.mark_step(wait=True)
    del y


def test_item_raises_it(failing) -> None:
    y = fragile(torch.ones(3, device="lazy")).sum()
    with pytest.raises(ExecutionError, match="out of luck"):
        y.item()


def test_the_lock_is_released_and_the_next_step_works(failing) -> None:
    failed_run()
    take_error()
    assert_next_step_works()


def test_a_step_recorded_meanwhile_is_poisoned_then_the_next_works(failing) -> None:
    failed_run()
    y = torch.ones(3, device="lazy") * 3
    with pytest.raises(ExecutionError):
        lazy_backend.mark_step()
    with pytest.raises(PoisonedTensorError):
        y.tolist()
    assert_next_step_works()


def test_the_same_program_works_once_the_cause_is_gone(failing) -> None:
    failed_run()
    take_error()
    y, _ = failed_run()
    assert y.tolist() == [2.0] * 3


def test_a_poisoned_tensor_says_so(failing) -> None:
    y, _ = failed_run()
    take_error()
    with pytest.raises(PoisonedTensorError, match="this tensor has no value") as caught:
        y.tolist()
    assert isinstance(caught.value.__cause__, ExecutionError)
    assert "run the step again" in str(caught.value)


@pytest.mark.parametrize(
    "use", [lambda y: y + 1, lambda y: y.add_(1), lambda y: y[0], lambda y: y.cpu(), lambda y: torch.cat([y, y])]
)
def test_using_a_poisoned_tensor_raises(failing, use) -> None:
    y, _ = failed_run()
    take_error()
    with pytest.raises(PoisonedTensorError):
        use(y)
    assert_next_step_works()


def test_a_poisoned_tensor_can_be_dropped_and_replaced(failing) -> None:
    y, _ = failed_run()
    take_error()
    y = torch.ones(3, device="lazy")
    assert y.tolist() == [1.0] * 3


def test_what_existed_before_is_still_there(failing) -> None:
    x = grid("lazy", 3)
    x.add_(1)
    lazy_backend.mark_step(wait=True)
    failed_run()
    take_error()
    assert x.tolist() == [1.0, 2.0, 3.0]


def test_a_kernel_that_disagrees_with_its_fake_is_named() -> None:
    y = liar(torch.ones(3, device="lazy"))
    with pytest.raises(ExecutionError, match=r"recorded as f32\[3\] and computed as torch.float32 \[2\]"):
        y.cpu()


def test_an_error_on_one_device_leaves_the_other(two_devices, failing) -> None:
    x = torch.ones(3, device="lazy:1") + 1
    fragile(torch.ones(3, device="lazy:0"))
    y = fragile(torch.ones(3, device="lazy:0"))
    lazy_backend.mark_step("lazy:0")
    contexts.get_device_context(0).locker.wait_idle()
    assert x.tolist() == [2.0] * 3
    with pytest.raises(ExecutionError):
        lazy_backend.wait_device_ops(["lazy:0"])
    del y


def test_step_marks_on_entry_and_exit() -> None:
    with count("MarkStep") as marks, lazy_backend.step():
        torch.ones(3, device="lazy").add_(1)
    assert marks() == 2


def test_step_syncs_on_an_exception_and_raises_it() -> None:
    with pytest.raises(KeyError, match="mine"), lazy_backend.step():  # noqa: PT012
        x = torch.ones(3, device="lazy") + 1
        raise KeyError("mine")
    with count("GraphCut") as cuts:
        assert x.tolist() == [2.0] * 3
    assert cuts() == 0


def test_step_raises_the_users_error_first_and_the_runs_later(failing) -> None:
    with pytest.raises(KeyError, match="mine"), lazy_backend.step():  # noqa: PT012
        failed_run()
        torch.ones(3, device="lazy").add_(1)
        raise KeyError("mine")
    take_error()


def test_an_error_nobody_was_told_of_is_printed_at_exit(tmp_path: Path) -> None:
    code = """
import contextlib, io, sys, torch, lazy_backend
sys.stderr = sys.stdout
@torch.library.custom_op("t::bad", mutates_args=())
def bad(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("out of luck")
bad.register_fake(lambda x: torch.empty_like(x))
y = bad(torch.ones(2, device="lazy"))
lazy_backend.mark_step()
"""
    out = run_program(code, tmp_path, LAZY_BACKEND_FIRST_SIGHT="record")
    assert "the last run on lazy:0 failed" in out
    assert "out of luck" in out


# ----- cuts


def test_an_op_without_a_fake_kernel_runs_at_once() -> None:
    y = no_fake(torch.ones(3, device="lazy"))
    assert_same(y, torch.full((3,), 2.0))
    names = metrics.counter_names()
    assert any("Fallback" in name and "no fake kernel" in name and "test_errors.py:" in name for name in names)


@pytest.mark.parametrize("use", [torch.nonzero, lambda x: x[x > 0], torch.unique, lambda x: x.masked_select(x > 1)])
def test_an_op_whose_shape_depends_on_values_runs_at_once(use) -> None:
    assert_same(use(grid("lazy", 4)), use(grid("cpu", 4)))
    assert any("depends on values" in name for name in metrics.counter_names())


def test_a_repeated_cut_compiles_nothing_new() -> None:
    def step() -> None:
        x = torch.ones(4, device="lazy") * 2
        torch.nonzero(x).sum()
        lazy_backend.mark_step()

    step()
    with count("UncachedCompile") as misses:
        step()
    assert misses() == 0


def test_force_fallback_runs_the_op_at_once() -> None:
    config.force_fallback = "aten::sub"
    x = grid("lazy", 3)
    assert_same(x - 1, torch.arange(3.0) - 1)
    assert metrics.counter_value("aten::sub") == 1


def test_force_fallback_can_be_set_later() -> None:
    def step() -> torch.Tensor:
        y = grid("lazy", 3) - 1
        lazy_backend.mark_step()
        return y

    step()
    config.force_fallback = "aten::sub"
    lazy_backend.ir_cache.reset()
    assert_same(step(), torch.arange(3.0) - 1)
    assert metrics.counter_value("aten::sub") == 1


def minus_one() -> torch.Tensor:
    y = grid("lazy", 3) - 1
    assert_same(y, torch.arange(3.0) - 1)
    return y


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_force_fallback_holds_from_the_next_call_on(first_sight: str) -> None:
    config.first_sight = first_sight
    for _ in range(2):
        minus_one()
        lazy_backend.mark_step()
    config.force_fallback = "aten::sub"
    minus_one()
    assert metrics.counter_value("aten::sub") == 1


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_force_fallback_ends_when_it_is_reset(first_sight: str) -> None:
    config.first_sight = first_sight
    with config.patch(force_fallback="aten::sub"):
        minus_one()
    minus_one()
    lazy_backend.mark_step()
    minus_one()
    assert metrics.counter_value("aten::sub") == 1


def test_force_fallback_in_the_middle_of_a_step() -> None:
    x = grid("lazy", 3)
    y = x * 2
    config.force_fallback = "aten::sub, aten::div"
    z = (y - 1) / 2
    config.force_fallback = ""
    assert_same(z * 2, torch.arange(3.0) * 2 - 1)
    assert (metrics.counter_value("aten::sub"), metrics.counter_value("aten::div")) == (1, 1)


def test_force_fallback_stays_where_nothing_may_run() -> None:
    y = grid("lazy", 3) * 2
    with lazy_backend.allow_execution(False):
        z = y + 1
        with pytest.raises(lazy_backend.ExecutionNotAllowedError, match=r"config\.force_fallback"):
            config.force_fallback = "aten::sub"
        assert config.force_fallback == ""
    assert_same(z, torch.arange(3.0) * 2 + 1)


def test_autocast_of_other_devices_is_pytorchs() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def limit_traces(length: int) -> None:
    config.max_trace_length = length
    lazy_backend.ir_cache.reset()  # the bound is read when a trace starts


def test_a_long_trace_is_cut_with_a_warning() -> None:
    limit_traces(10)
    x = torch.zeros(3, device="lazy")
    with pytest.warns(GraphCutWarning) as caught:  # noqa: PT031
        for _ in range(25):
            x = x + 1
    (warning,) = caught
    text = str(warning.message)
    assert "10 operators were recorded on lazy:0 without a mark_step()" in text
    assert f"at {__file__}:" in text
    assert "max_trace_length" in text
    assert x.tolist() == [25.0] * 3


def test_a_long_trace_is_counted() -> None:
    limit_traces(10)
    x = torch.zeros(3, device="lazy")
    with warnings.catch_warnings(), count("TrimIrGraph") as cuts:
        warnings.simplefilter("ignore", GraphCutWarning)
        for _ in range(25):
            x.add_(1)
    assert cuts() == 2


def test_a_long_trace_compiles_one_program() -> None:
    limit_traces(10)
    x = torch.zeros(3, device="lazy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCutWarning)
        for _ in range(100):
            x.add_(1)
    lazy_backend.mark_step()
    assert x.tolist() == [100.0] * 3
    assert metrics.counter_value("UncachedCompile") <= 3


# ----- strict


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum()),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "repr": repr,
    "equal": lambda x: torch.equal(x, x.clone()),
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 1],
    "resize": lambda x: x.resize_(1, 2, 1, 1, memory_format=torch.channels_last),
    "copy": lambda x: torch.zeros(3).copy_(x),
    "no_fake": no_fake,
}


@pytest.mark.parametrize("name", READS)
def test_strict_refuses_reads(name: str) -> None:
    x = torch.ones(3, device="lazy") + 1
    with lazy_backend.strict(), pytest.raises(StrictModeError) as caught:
        READS[name](x)
    assert f"at {__file__}:" in str(caught.value)
    assert "strict mode does not allow" in str(caught.value)


def test_strict_lets_steps_pass() -> None:
    with lazy_backend.strict():
        x = torch.ones(3, device="lazy") + 1
        lazy_backend.mark_step()
    assert x.tolist() == [2.0] * 3


def test_strict_ends_with_its_block() -> None:
    x = torch.ones(3, device="lazy")
    with pytest.raises(StrictModeError), lazy_backend.strict():
        x.tolist()
    assert x.tolist() == [1.0] * 3


def test_strict_nests() -> None:
    with lazy_backend.strict():
        with lazy_backend.strict():
            pass
        with pytest.raises(StrictModeError):
            torch.ones(3, device="lazy").tolist()


def test_a_refused_read_leaves_the_trace_as_it_was() -> None:
    def step(read: bool) -> torch.Tensor:
        x = torch.ones(3, device="lazy") + 1
        if read:
            with lazy_backend.strict(), pytest.raises(StrictModeError):
                x.tolist()
        lazy_backend.mark_step()
        return x

    step(read=False)
    with count("UncachedCompile") as misses:
        assert step(read=True).tolist() == [2.0] * 3
    assert misses() == 0


# ----- settings and compilers


def test_a_misspelt_setting_raises() -> None:
    with pytest.raises(AttributeError, match="has no setting 'bakend': perhaps 'backend'\n  it has: backend, "):
        config.bakend = "eager"


@pytest.mark.parametrize(
    ("name", "value"), [("num_devices", 0), ("compile", "later"), ("check_graphs", 3), ("debug", -1)]
)
def test_a_bad_value_raises_with_the_settings_help(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"lazy_backend.config.{name} = {value!r}: expected"):
        setattr(config, name, value)


def broken_compiler(module, inputs):
    raise RuntimeError("no compiler today")


def run_three_steps() -> None:
    for _ in range(3):
        y = grid("lazy", 3) * 2
        lazy_backend.mark_step()
        assert_same(y, torch.arange(3.0) * 2)


def test_a_compiler_that_fails_is_reported_once() -> None:
    config.backend = broken_compiler
    with pytest.warns(lazy_backend.CompileWarning, match="no compiler today") as caught:
        run_three_steps()
    assert len(caught) == 1
    assert metrics.counter_value("CompileFailed") == 1


def test_an_unknown_backend_is_refused_where_it_is_set_with_the_known_ones() -> None:
    before = config.backend
    with pytest.raises(
        ValueError, match=r"config.backend = 'inductr': .* no backend .*eager, .*inductor.*\n  Fix: name"
    ):
        config.backend = "inductr"
    with pytest.raises(ValueError, match="no backend"), config.patch(backend="inductr"):
        pass
    assert config.backend is before


def test_a_backend_may_be_named_once_it_is_registered() -> None:
    def registered_late(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
        return module.forward

    name = f"registered_late_{config.run_in_background}"
    with pytest.raises(ValueError, match="no backend"):
        config.backend = name
    torch._dynamo.register_backend(registered_late, name)
    config.backend = name
    run_three_steps()
    assert metrics.counter_value("UncachedCompile")


@pytest.mark.parametrize("name", ["eager", "aot_eager", "inductor"])
def test_backends_that_are_known_without_dynamo_are_there(name: str) -> None:
    assert name in torch.compiler.list_backends(exclude_tags=())


def test_a_backend_of_the_variable_is_looked_up_when_graphs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZY_BACKEND_BACKEND", "inductr")
    config._store("backend", Config().backend)  # a program may register it meanwhile
    with pytest.raises(ValueError, match=r"unknown backend 'inductr'\n.*one of: eager, .*inductor"):
        run_three_steps()


def test_a_corrected_backend_goes_on_with_the_same_trace() -> None:
    config._store("backend", "inductr")
    with pytest.raises(ValueError, match="unknown backend"):
        run_three_steps()
    config.backend = "eager"
    run_three_steps()


def test_compiling_can_be_turned_off() -> None:
    config.compile = "off"
    run_three_steps()
    assert metrics.counter_value("Compile") == 0


def test_a_callable_is_a_backend() -> None:
    seen = []

    def backend(module, inputs):
        seen.append(len(inputs))
        return module

    config.backend = backend
    run_three_steps()
    assert seen == [1]


def test_a_graph_that_is_too_large_is_interpreted_with_a_warning() -> None:
    lazy_backend.config.max_compiled_nodes = 3

    def step() -> torch.Tensor:
        x = torch.ones(2, device="lazy")
        for _ in range(5):
            x = x + 1
        lazy_backend.mark_step()
        return x

    step()
    with pytest.warns(lazy_backend.CompileWarning, match=r"more nodes than config.max_compiled_nodes = 3"):
        step()
    assert step().tolist() == [6.0, 6.0]


# ----- where more is said

OURS = [one for one in vars(lazy_backend.errors).values() if isinstance(one, type)]


@pytest.mark.parametrize("kind", [one for one in OURS if issubclass(one, Exception) and not issubclass(one, Warning)])
def test_the_traceback_of_an_error_names_a_heading(kind: type[lazy_backend.LazyBackendError]) -> None:
    error = kind("what happened")
    assert str(error) == "what happened"
    *_, last = "".join(traceback.format_exception_only(error)).splitlines()
    assert last == f"See docs/troubleshooting.md#{kind.heading}"
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__ == [last]


@pytest.mark.parametrize("kind", [one for one in OURS if issubclass(one, Warning)])
def test_a_warning_names_a_heading_in_its_last_line(kind: type[lazy_backend.LazyBackendWarning]) -> None:
    with pytest.warns(kind, match=f"what happened\n  see docs/troubleshooting.md#{kind.heading}"):
        warnings.warn("what happened", kind, stacklevel=1)
