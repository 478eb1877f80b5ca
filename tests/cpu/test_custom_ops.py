"""Custom operators: recorded where a fake kernel says what they give, run at once where none does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from harness import assert_same, count, grid
from torch import Tensor

import lazy_backend
from lazy_backend import ExecutionError, config, metrics

# ----- operators by torch.library.custom_op


@torch.library.custom_op("lazy_ops::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


scale.register_fake(lambda x, factor: torch.empty_like(x))
scale.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)
scale.register_vmap(lambda info, dims, x, factor: (scale(x, factor), dims[0]))


@torch.library.custom_op("lazy_ops::shift_", mutates_args={"x"})
def shift_(x: Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("lazy_ops::shifted_and_doubled", mutates_args={"x"})
def shifted_and_doubled(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


shifted_and_doubled.register_fake(lambda x: torch.empty_like(x))


@torch.library.custom_op("lazy_ops::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("lazy_ops::without_fake_writing", mutates_args={"x"})
def without_fake_writing(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@torch.library.custom_op("lazy_ops::resize_and_fill", mutates_args={"x"})
def resize_and_fill(x: Tensor, length: int) -> None:
    x.resize_(length).fill_(7)


@torch.library.custom_op("lazy_ops::reverse_into", mutates_args={"out"})
def reverse_into(x: Tensor, out: Tensor) -> None:
    for place in range(len(x)):
        out[-1 - place] = x[place]


@torch.library.custom_op("lazy_ops::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("lazy_ops::mixed", mutates_args=())
def mixed(x: Tensor, n: int, name: str, flag: bool, dims: list[int], y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return x * n, x.sum(dims)


mixed.register_fake(lambda x, n, name, flag, dims, y=None: (torch.empty_like(x), x.sum(dims)))


@torch.library.custom_op("lazy_ops::scale_all", mutates_args=())
def scale_all(tensors: list[Tensor], factors: list[float]) -> list[Tensor]:
    return [x * factor for x, factor in zip(tensors, factors, strict=True)]


scale_all.register_fake(lambda tensors, factors: [torch.empty_like(x) for x in tensors])


@torch.library.custom_op("lazy_ops::count_up", mutates_args=())
def count_up(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


count_up.register_fake(lambda n, device: torch.arange(n, device=device))


@torch.library.custom_op("lazy_ops::on_the_cpu", mutates_args=(), device_types="cpu")
def on_the_cpu(x: Tensor) -> Tensor:
    return x + 1


on_the_cpu.register_fake(lambda x: torch.empty_like(x))


@torch.library.custom_op("lazy_ops::aliasing", mutates_args=())
def aliasing(x: Tensor) -> Tensor:
    return x[1:]


aliasing.register_fake(lambda x: torch.empty_like(x[1:]))


@torch.library.custom_op("lazy_ops::whole_number", mutates_args=())
def whole_number(x: Tensor) -> int:
    return int(x.sum())


# ----- operators by torch.library.Library

library = torch.library.Library("lazy_lib", "DEF")
for name, key in [
    ("explicit", "CompositeExplicitAutograd"),
    ("implicit", "CompositeImplicitAutograd"),
    ("bare", "CPU"),
]:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: torch.mul(x, 3), key)
library.define("with_fake(Tensor x) -> Tensor")
library.impl("with_fake", lambda x: torch.mul(x, 3), "CPU")
torch.library.register_fake("lazy_lib::with_fake", lambda x: torch.empty_like(x), lib=library)
library.define("with_meta(Tensor x) -> Tensor")
library.impl("with_meta", lambda x: torch.mul(x, 3), "CPU")
library.impl("with_meta", lambda x: torch.empty_like(x), "Meta")
library.define("add_one_(Tensor(a!) x) -> Tensor(a!)")
library.impl("add_one_", lambda x: x.add_(1), "CPU")
torch.library.register_fake("lazy_lib::add_one_", lambda x: x, lib=library)
library.define("tail(Tensor(a) x) -> Tensor(a)")
library.impl("tail", lambda x: x[1:], "CPU")
torch.library.register_fake("lazy_lib::tail", lambda x: x[1:], lib=library)
ops = torch.ops.lazy_lib


def fresh(device: str) -> Tensor:
    return grid(device, 4) + 0


def written(op):
    """An operator that writes its operand: the operand and what it returns."""

    def run(device: str) -> list[Tensor]:
        x = fresh(device)
        made = op(x)
        return [x] if made is None else [x, made]

    return run


def tail_written(device: str) -> list[Tensor]:
    x = fresh(device)
    tail = ops.tail(x)
    tail.add_(1)
    return [x, tail]


def complex_written(device: str) -> list[Tensor]:
    z = torch.complex(fresh(device), fresh(device))
    shift_(torch.view_as_real(z), 0.5)
    return [z]


def gradients(device: str) -> list[Tensor]:
    x = grid(device, 4).requires_grad_()
    out = scale(x * 2, 1.5)
    out.sum().backward()
    return [out, x.grad]


RECORDED = {
    "float": lambda device: scale(fresh(device), 0.5),
    "gradients": gradients,
    "writes": written(lambda x: shift_(x, 0.5)),
    "writes_a_view": written(lambda x: shift_(x[1:3], 0.5)),
    "writes_a_view_of_another_dtype": complex_written,
    "writes_and_returns": written(shifted_and_doubled),
    "mixed": lambda device: mixed(fresh(device), 2, "a", True, [0]),
    "mixed_with_optional": lambda device: mixed(fresh(device), 2, "a", True, [0], fresh(device)),
    "lists": lambda device: scale_all([fresh(device), fresh(device)], [0.5, 2.0]),
    "factory": lambda device: count_up(3, torch.device(device)),
    "on_the_cpu": lambda device: on_the_cpu(fresh(device)),
    "beside_a_cpu_scalar": lambda device: scale(torch.tensor(2.0) * fresh(device).sum(), 1.0),
    "under_vmap": lambda device: torch.vmap(lambda row: scale(row, 2.0))(grid(device, 3, 4)),
    "explicit": lambda device: ops.explicit(fresh(device)),
    "implicit": lambda device: ops.implicit(fresh(device)),
    "implicit_gradient": lambda device: torch.func.grad(lambda x: ops.implicit(x).sum())(fresh(device)),
    "with_fake": lambda device: ops.with_fake(fresh(device)),
    "with_meta": lambda device: ops.with_meta(fresh(device)),
}
# AOTAutograd refuses operators outside aten whose results alias an operand; then the graph is interpreted
ALIASED = {"library_writes": written(ops.add_one_), "library_view": tail_written}

RUN_AT_ONCE = {
    "without_fake": (lambda device: without_fake(fresh(device)) + 1, "no fake kernel"),
    "without_fake_writing": (written(without_fake_writing), "no fake kernel"),
    "bare": (lambda device: ops.bare(fresh(device)), "no fake kernel"),
    "dynamic": (lambda device: positive(fresh(device)), "depends on values"),
    "returns_an_int": (lambda device: whole_number(fresh(device)), "no fake kernel"),
}


@pytest.mark.parametrize("name", RECORDED | ALIASED)
def test_an_op_with_a_fake_kernel_is_recorded(name: str) -> None:
    run = (RECORDED | ALIASED)[name]
    with lazy_backend.strict():
        made = run("lazy")
    assert_same(made, run("cpu"))


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("name", RECORDED)
def test_an_op_with_a_fake_kernel_is_compiled(name: str, backend: str) -> None:
    config.backend = backend
    with count("Compile") as compiles, count("CompileFailed") as failures:
        for _ in range(3):
            assert_same(RECORDED[name]("lazy"), RECORDED[name]("cpu"))
    assert (compiles(), failures()) == (1, 0)


@pytest.mark.filterwarnings("ignore::lazy_backend.CompileWarning")
@pytest.mark.parametrize("name", ALIASED)
def test_an_op_that_aliases_is_right_where_the_compiler_refuses_it(name: str) -> None:
    config.backend = "aot_eager"
    for _ in range(3):
        assert_same(ALIASED[name]("lazy"), ALIASED[name]("cpu"))


@pytest.mark.parametrize("name", RUN_AT_ONCE)
def test_an_op_without_a_fake_kernel_cuts_once_and_goes_on(name: str) -> None:
    run, reason = RUN_AT_ONCE[name]
    with count("GraphCut") as cuts:
        made = run("lazy")
    assert cuts() == 1
    assert_same(made, run("cpu"))
    (cause,) = [name for name in metrics.counter_names() if name.startswith("Fallback: ")]
    assert reason in cause
    assert __file__ in cause


def test_inductor_calls_custom_ops() -> None:
    def step(device: str) -> list[Tensor]:
        x = fresh(device)
        shift_(x, 0.5)
        made = [scale(x + 1, 0.5), *mixed(x, 2, "a", True, [0]), shifted_and_doubled(x), x]
        made.append(torch.ones(4, device=device).cumsum(0))
        reverse_into(made[-1].clone(), made[-1])
        if device == "lazy":
            lazy_backend.mark_step()
        return made

    config.backend = "inductor"
    for _ in range(3):
        assert_same(step("lazy"), step("cpu"))
    assert (metrics.counter_value("Compile"), metrics.counter_value("CompileFailed")) == (1, 0)


def test_a_float_that_changes_gives_right_results() -> None:
    for factor in (0.5, 1.5, 2.5, 3.5):
        assert_same(scale(fresh("lazy"), factor), scale(fresh("cpu"), factor))


def test_an_op_that_returns_a_view_raises_like_eagers() -> None:
    with pytest.raises(RuntimeError) as eagers:
        aliasing(fresh("cpu"))
    with pytest.raises(ExecutionError) as lazys:
        aliasing(fresh("lazy")).cpu()
    assert str(eagers.value) in str(lazys.value)
    assert f"{__file__}:" in str(lazys.value)


def test_an_op_without_autograd_raises_like_eagers() -> None:
    def error_of(device: str) -> str:
        with pytest.raises(RuntimeError) as caught:
            without_fake(grid(device, 4).requires_grad_()).sum().backward()
        return str(caught.value)

    assert error_of("lazy") == error_of("cpu")


def test_an_op_that_writes_counts_versions() -> None:
    x = fresh("lazy")
    version = x._version
    shift_(x, 1.0)
    assert x._version == version + 1


@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_an_op_that_resizes_its_operand_leaves_other_tensors_of_its_memory_their_sizes(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "first_sight", "run")  # deferred, it is an error at the run: its fake kernel lies
    seen = []
    for device in ("cpu", "lazy"):
        x = torch.ones(4).to(device)
        others = x.detach(), x[1:3]
        torch.ops.lazy_ops.resize_and_fill(x, length)
        seen.append([tensor.tolist() for tensor in (x * 2, x, *others)])
    assert seen[0] == seen[1]


def test_saved_then_written_by_an_op_raises() -> None:
    x = fresh("lazy").requires_grad_()
    a = x * 1
    y = a.exp() * a
    with torch.no_grad():
        shift_(a, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_opcheck_says_what_to_do_where_it_traces() -> None:
    with pytest.raises(Exception, match="trace it with CPU tensors"):
        torch.library.opcheck(scale, (grid("lazy", 4), 2.0), test_utils="test_schema")


def test_an_operator_that_was_taken_back_leaves_its_place_in_tables_to_no_other() -> None:
    """As in a notebook whose cells are run again: new operators appear at the addresses of old ones."""
    expected = torch.arange(3.0)
    for number in range(30):
        is_composite = number % 2 == 0
        with torch.library._scoped_library(f"lazy_taken_{number}", "DEF") as taken:
            taken.define("twice(Tensor x) -> Tensor")
            taken.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd" if is_composite else "CPU")
            op = getattr(torch.ops, f"lazy_taken_{number}").twice.default
            reference = weakref.ref(op)
            with torch.inference_mode():
                assert_same(op(expected.clone().to("lazy")).cpu(), expected * 2)
            del op
        delattr(torch.ops, f"lazy_taken_{number}")
        gc.collect()
        assert reference() is not None


@pytest.mark.parametrize("backend", ["interpreted", "eager", "aot_eager"])
def test_an_operator_that_takes_the_place_of_another_of_its_name(backend: str) -> None:
    """No program of the old one is taken for one of the new one, nor is its description in C++, at the same address."""
    config.compile, config.backend = ("off", "eager") if backend == "interpreted" else ("foreground", backend)
    config.first_sight = "run"
    value = grid("lazy", 3)
    arguments = ("Tensor a", "Tensor b", "Tensor a, Tensor b", "Tensor a", "Tensor a, Tensor b, Tensor c", "Tensor a")
    for factor, taken_by in enumerate(arguments, 2):
        with torch.library._scoped_library("lazy_taken", "DEF") as taken:
            taken.define(f"scaled({taken_by}) -> Tensor")
            taken.impl("scaled", lambda x, *others, factor=factor: x * factor, "CPU")
            taken.impl("scaled", lambda x, *others: torch.empty_like(x), "Meta")
            op = torch.ops.lazy_taken.scaled.default
            for _ in range(4):
                assert_same(op(*[value] * taken_by.count("Tensor")).cpu(), grid("cpu", 3) * factor)
                lazy_backend.mark_step()
            del op
        delattr(torch.ops, "lazy_taken")
        gc.collect()
