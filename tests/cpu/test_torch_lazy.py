"""Programs written for `torch._lazy`, after `lazy_backend.compat.torch_lazy.install()`.

The behaviours of PyTorch's own tests (test/lazy), where they have a meaning here.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
import torch._lazy
import torch._lazy.closure
import torch._lazy.computation
import torch._lazy.config
import torch._lazy.debug
import torch._lazy.device_context
import torch._lazy.ir_cache
import torch._lazy.metrics
import torch._lazy.ts_backend
from forks import TORCH
from harness import assert_same, count, grid, run_program
from torch import fx, nn
from torch._lazy.extract_compiled_graph import extract_compiled_graph
from torch._lazy.metrics import counter_value  # before install(), on purpose

import lazy_backend
from lazy_backend.compat import torch_lazy
from lazy_backend.ports.replacements.lazy_tensor_core import CoreReplacement


@pytest.fixture(autouse=True)
def installed() -> Iterator[CoreReplacement]:
    with torch_lazy.install() as installation:
        torch._lazy.ts_backend.init()
        yield installation


@pytest.fixture(params=["run", "record"])
def first_sight(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.first_sight = request.param


# ----- install


C_MODULES = (torch._C._lazy, torch._C._lazy_ts_backend)


def c_functions() -> dict[tuple[str, str], object]:
    return {(m.__name__, name): getattr(m, name) for m in C_MODULES for name in dir(m) if re.match("_[a-z]", name)}


def test_every_c_function_is_replaced() -> None:
    left = [name for name, function in c_functions().items() if type(function).__name__ == "builtin_function_or_method"]
    assert not left


def test_uninstall_gives_the_functions_back() -> None:
    torch_lazy.install().uninstall()
    before = c_functions()
    installation = torch_lazy.install()
    assert c_functions() != before
    installation.uninstall()
    assert c_functions() == before


def test_a_second_install_changes_nothing(installed: CoreReplacement) -> None:
    before = c_functions()
    assert torch_lazy.install() is installed
    assert c_functions() == before


def test_without_install_init_says_what_to_call(installed: CoreReplacement) -> None:
    installed.uninstall()
    with pytest.raises(lazy_backend.DeviceError, match=r"torch_lazy\.install\(\) first"):
        torch._lazy.ts_backend.init()


def test_a_backend_that_was_there_before_is_refused(tmp_path: Path) -> None:
    code = """
import torch, lazy_backend
from lazy_backend.compat import torch_lazy
from lazy_backend.ports.replacements.lazy_tensor_core import CoreReplacement
from lazy_backend.ports.replacements import lazy_tensor_core
lazy_tensor_core._default_device_type = lambda: "CPU"  # as once the C++ backend is registered
try:
    torch_lazy.install()
except lazy_backend.DeviceError as error:
    print(error)
"""
    assert "torch._lazy.ts_backend.init() was called before" in run_program(code, tmp_path)


def test_the_environment_installs_it_without_a_line_of_ours(tmp_path: Path) -> None:
    code = """
import torch, torch._lazy, torch._lazy.ts_backend, torch._lazy.metrics
torch._lazy.ts_backend.init()
x = torch.ones(3, device="lazy") + 1
torch._lazy.mark_step()
print(x.tolist(), torch._lazy.metrics.counter_value("MarkStep"))
"""
    assert run_program(code, tmp_path, TORCH, LAZY_BACKEND_TORCH_LAZY="1") == "[2.0, 2.0, 2.0] 1\n"


# ----- torch._lazy


def test_mark_step_takes_a_device_and_wait() -> None:
    x = grid("lazy", 3) + 1
    torch._lazy.mark_step(device="lazy:0", wait=True)
    assert x._data.storage.tensor is not None


def test_sync_multi_leaves_nothing_to_cut() -> None:
    x = grid("lazy", 3) + 1
    torch._lazy.sync_multi([x], [])
    with count("GraphCut") as cuts:
        assert x.tolist() == [1, 2, 3]
    assert cuts() == 0


def test_tensor_ids_follow_the_data() -> None:
    x = grid("lazy", 3)
    assert torch._lazy.get_tensor_id(x) == torch._lazy.get_tensor_id(x.data)
    assert torch._lazy.get_tensor_id(x) != torch._lazy.get_tensor_id(x + 1)


def test_to_cpu_copies_a_tree() -> None:
    x = grid("lazy", 3)
    assert_same(torch._lazy.to_cpu({"a": [x + 1]}), {"a": [torch.arange(3.0) + 1]})


def test_save_writes_no_lazy_device() -> None:
    file = io.BytesIO()
    torch._lazy.save([grid("lazy", 3) + 1], file)
    file.seek(0)
    assert_same(torch.load(file), [torch.arange(3.0) + 1])


def test_wait_device_ops_raises_what_a_run_raised() -> None:
    x = grid("lazy", 3)
    x.view(3)[torch.tensor([5]).to("lazy")] = 1.0  # an index that only the run finds to be wrong
    torch._lazy.mark_step()
    with pytest.raises(lazy_backend.ExecutionError):
        torch._lazy.wait_device_ops()


def test_the_device_context_is_that_of_the_lazy_device() -> None:
    context = torch._lazy.device_context.get_device_context()
    assert context.device == "lazy"
    assert torch._lazy.device_context.get_device_context("lazy") is context


# ----- step closures (test_step_closures.py)


def test_a_closure_has_run_when_mark_step_returns() -> None:
    seen: list[float] = []
    x = grid("lazy", 3).sum()
    torch._lazy.add_step_closure(lambda value: seen.append(value.item()), args=(x,))
    with count("GraphCut") as cuts:
        torch._lazy.mark_step()
    assert (seen, cuts()) == ([3.0], 0)


def test_mark_step_returns_before_an_asynchronous_closure() -> None:
    returned, seen = Event(), Event()

    def closure() -> None:
        if returned.wait(timeout=10):
            seen.set()

    torch._lazy.add_step_closure(closure, run_async=True)
    torch._lazy.mark_step()
    returned.set()
    assert seen.wait(timeout=10)


def test_an_error_of_a_closure_is_raised_by_mark_step() -> None:
    def closure() -> None:
        raise RuntimeError("simulated")

    torch._lazy.add_step_closure(closure)
    with pytest.raises(RuntimeError, match="simulated"):
        torch._lazy.mark_step()


def test_an_error_of_an_asynchronous_closure_keeps_the_next_from_running() -> None:
    ran = Event()

    def fail() -> None:
        raise RuntimeError("simulated")

    torch._lazy.add_step_closure(fail, run_async=True)
    torch._lazy.mark_step()
    handler = torch._lazy.device_context.get_device_context().async_closure_handler
    handler._closure_event_loop.join(timeout=10)
    torch._lazy.add_step_closure(ran.set, run_async=True)
    with pytest.raises(RuntimeError, match="previously raised exception"):
        torch._lazy.mark_step()
    del torch._lazy.device_context.get_device_context().async_closure_handler
    assert not ran.is_set()


def test_the_bound_of_the_queue_is_ltcs_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTC_MAX_ASYNC_QUEUE", "3")
    assert torch._lazy.closure.AsyncClosureHandler()._closure_queue.maxsize == 3


# ----- metrics (test_bindings.py)


def test_nothing_is_counted_before_anything_happens() -> None:
    torch._lazy.metrics.reset()
    assert torch._lazy.metrics.counter_names() == []


def test_a_name_imported_before_install_counts_here() -> None:
    grid("lazy", 3).add(1)
    assert counter_value("lazy::add") == 1
    assert "Counter: lazy::add\n  Value: 1" in torch._lazy.metrics.metrics_report()


# ----- reuse (test_reuse_ir.py): here, a path that was recorded before is known again


def accumulate(device: str, step: Callable[[], None], branches: bool) -> torch.Tensor:
    x, y, z = grid(device, 2, 3), grid(device, 2, 3) * 2, torch.zeros(2, 3, device=device)
    for i in range(10):
        z += x + y if not branches or i < 5 else x - y
        step()
    return z


@pytest.mark.parametrize(("branches", "programs"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("reuse", [True, False])
def test_a_repeated_step_is_known_again(branches: bool, programs: int, reuse: bool) -> None:
    torch._lazy.config.set_reuse_ir(reuse)
    with count("UncachedCompile") as new:
        found = accumulate("lazy", torch._lazy.mark_step, branches)
    assert_same(found, accumulate("cpu", lambda: None, branches))
    assert new() == programs  # the first one makes x, y and z


def test_an_operator_that_is_made_to_fall_back_is_counted() -> None:
    torch._lazy.config.set_force_fallback("aten::sub")
    assert torch._lazy.config.get_force_fallback() == "aten::sub"
    found = accumulate("lazy", torch._lazy.mark_step, True)
    assert counter_value("aten::sub") == 5
    assert_same(found, accumulate("cpu", lambda: None, True))


@pytest.mark.parametrize("kind", ["native_batch_norm", "_native_batch_norm_legit"])
def test_an_operator_with_several_results_is_known_again(kind: str) -> None:
    def program(device: str) -> torch.Tensor:
        x, weight, bias = grid(device, 4, 3, 2), grid(device, 3), grid(device, 3)
        statistics = (None, None) if kind == "native_batch_norm" else ()
        for _ in range(4):
            z, _, _ = getattr(torch.ops.aten, kind)(x, weight, bias, *statistics, True, 0.1, 1e-5)
            torch._lazy.mark_step()
        return z

    with count("UncachedCompile") as new:
        found = program("lazy")
    assert_same(found, program("cpu"))
    assert new() == 1


def test_the_cache_of_recorded_programs_is_dumped_and_reset(tmp_path: Path) -> None:
    grid("lazy", 3).add(1)
    torch._lazy.ir_cache.dump(str(tmp_path / "trie.dot"))
    assert "aten.add.Tensor" in (tmp_path / "trie.dot").read_text()
    torch._lazy.ir_cache.reset()
    torch._lazy.ir_cache.dump(str(tmp_path / "trie.dot"))
    assert "aten.add.Tensor" not in (tmp_path / "trie.dot").read_text()


# ----- views (test_functionalization.py)


def test_a_parameter_that_is_read_through_a_view_is_computed_once() -> None:
    def program(device: str) -> torch.Tensor:
        with torch.device(device):
            layer = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            layer.weight.copy_(grid(device, 2, 4))
        return grid(device, 4) @ layer.weight.transpose(0, 1)

    found = program("lazy")
    assert torch._lazy.debug.dump_ir([found], "text").count("aten.copy_") == 1
    torch._lazy.mark_step()
    assert_same(found, program("cpu"))


# ----- generators (test_generator.py)


def drawn(device: str, seed: int) -> torch.Tensor:
    return torch.tensor(1.0, device=device).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))


def test_a_generator_gives_the_numbers_of_the_cpu() -> None:
    found = drawn("lazy", 2023)
    torch._lazy.mark_step()
    assert_same(found, drawn("cpu", 2023))


def test_another_seed_is_no_other_program() -> None:
    # LTC compiles for each: it has the seed in the graph
    for seed in (1, 2, 1):
        t = drawn("lazy", seed) + 1
        torch._lazy.mark_step()
    del t
    assert counter_value("UncachedCompile") == 1


# ----- results that are inferred (test_meta_kernel.py)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_has_the_dtype_of_its_operands(bias: bool) -> None:
    layer = nn.Linear(2, 2, bias=bias, dtype=torch.float16).to("lazy")
    assert layer(torch.ones(2, 2, dtype=torch.float16).to("lazy")).dtype == torch.float16


def test_a_product_of_two_dtypes_fails_where_it_is_written() -> None:
    layer = nn.Linear(2, 2, bias=False).to("lazy")
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.ones(2, 2, dtype=torch.float16).to("lazy"))


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor([1], device="cpu") + torch.tensor([1], device="lazy")


# ----- looking (test_debug_util.py)


def test_a_saved_graph_has_the_stack_of_its_mark_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTC_SAVE_TENSORS_FILE", str(tmp_path / "graphs"))
    y = nn.Linear(5, 5).to("lazy")(torch.randn(1, 5).to("lazy"))
    torch._lazy.mark_step()
    del y
    text = (tmp_path / "graphs").read_text()
    stack = rf"Python Stacktrace:\n  mark_step \(.*_lazy/__init__\.py:\d+\)\n  \w+ \({re.escape(__file__)}:\d+\)"
    assert re.match(stack, text)
    assert "aten.addmm" in text


@pytest.mark.parametrize(("form", "sign"), [("text", "aten.mul("), ("backend", "def forward"), ("dot", "digraph")])
def test_a_graph_is_saved_in_the_form_that_is_asked_for(
    form: str, sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTC_SAVE_TENSORS_FILE", str(tmp_path / "graphs"))
    monkeypatch.setenv("LTC_SAVE_TENSORS_FMT", form)
    y = grid("lazy", 3) * 2
    torch._lazy.mark_step()
    del y
    assert sign in (tmp_path / "graphs").read_text()


def test_graphs_are_shown_as_text_and_dot() -> None:
    y = grid("lazy", 3) * 2
    assert "aten.mul(" in torch._lazy.debug.dump_ir([y], "text")
    assert "def forward" in torch._lazy.debug.dump_ir([y], "backend")
    assert torch._lazy.debug.render_ir_graph([y]).startswith("digraph")


def test_the_latest_graph_is_shown() -> None:
    y = grid("lazy", 3) * 2
    torch._lazy.mark_step()
    del y
    assert "aten.mul(" in torch._C._lazy_ts_backend._get_latest_computation_graph()


def test_the_symbolic_shape_mode_is_refused() -> None:
    torch._C._lazy._set_symbolic_shape_mode(False)
    with pytest.raises(lazy_backend.LazyBackendError, match="no counterpart"):
        torch._C._lazy._set_symbolic_shape_mode(True)


# ----- extracted graphs (test_extract_compiled_graph.py)


class Sub(nn.Module):
    def forward(self, a, b):
        return a - b


class ConstScale(nn.Module):
    def forward(self, a):
        return a * 2.5


class Addcmul(nn.Module):
    def forward(self, a, b, c):
        return torch.addcmul(a, b, c, value=5)


class ReturnMulti(nn.Module):
    def forward(self, a, b):
        return b + 1, a - 1


class ReturnDupTensor(nn.Module):
    def forward(self, a, b):
        c = a + b
        return a - b, c, a + 1, c


class InplaceUpdate(nn.Module):
    def forward(self, a, b):
        a.sub_(b)
        return b - 1, b + 1


class ReturnViews(nn.Module):
    def forward(self, a, b):
        c = a + b
        return c, c.t(), a.t()


class Unused(nn.Module):
    def forward(self, a, b):
        return b * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, a):
        return self.layers(a)


class Factory(nn.Module):
    def forward(self, a):
        return a + torch.ones(3)


MODULES = [Sub, ConstScale, Addcmul, ReturnMulti, ReturnDupTensor, InplaceUpdate, ReturnViews, Unused, Layers, Factory]


def arguments(module: nn.Module) -> list[torch.Tensor]:
    return [torch.randn(2, 3) for _ in range(module.forward.__code__.co_argcount - 1)]


@pytest.mark.usefixtures("first_sight")
@pytest.mark.parametrize("kind", MODULES)
def test_an_extracted_graph_does_what_the_module_does(kind: type[nn.Module]) -> None:
    module = kind()
    with torch.no_grad():
        extracted = extract_compiled_graph(fx.symbolic_trace(module), arguments(module))
        for _ in range(10):
            given = arguments(module)
            expected_given = copy.deepcopy(given)
            expected = module(*expected_given)
            assert_same(extracted(*given), list(expected) if isinstance(expected, tuple) else [expected])
            assert_same(given, expected_given)


@pytest.mark.usefixtures("first_sight")
@pytest.mark.parametrize("kind", [Sub, InplaceUpdate, ReturnViews])
def test_arguments_may_lie_in_memory_in_another_way(kind: type[nn.Module]) -> None:
    module = kind()
    extracted = extract_compiled_graph(fx.symbolic_trace(module), arguments(module))
    given = [torch.randn(3, 2).t(), torch.randn(2, 6)[:, ::2]]
    expected_given = copy.deepcopy(given)
    expected = module(*expected_given)
    results = extracted(*given)
    assert all(map(torch.equal, results, expected if isinstance(expected, tuple) else [expected]))
    assert_same(given, expected_given)


def test_an_extracted_graph_records_nothing() -> None:
    extracted = extract_compiled_graph(fx.symbolic_trace(Sub()), arguments(Sub()))
    torch._lazy.metrics.reset()
    extracted(*arguments(Sub()))
    assert [name for name in torch._lazy.metrics.counter_names() if name.startswith("lazy::")] == []


def test_what_cannot_be_recorded_is_not_extracted() -> None:
    torch._lazy.config.set_force_fallback("aten::sub")
    with pytest.raises(RuntimeError, match=r"fallback.*aten::sub"):
        extract_compiled_graph(fx.symbolic_trace(Sub()), arguments(Sub()))


def test_a_graph_that_nobody_asked_for_cannot_run() -> None:
    with pytest.raises(lazy_backend.LazyBackendError, match="no graph with the hash 0000"):
        torch._lazy.computation.run_cached_graph(bytes(16), [])


@pytest.mark.parametrize(
    ("one", "other"), [(lambda x: [x * 2.0], lambda x: [x * 3.0]), (lambda x: [x + 1, x - 1], lambda x: [x - 1, x + 1])]
)
def test_different_programs_have_different_hashes(one: Callable[..., object], other: Callable[..., object]) -> None:
    x = grid("lazy", 3)
    hashes = set()
    for program in (one, other):
        made = program(x)
        hashes.add(torch._lazy.computation.get_graph_hash(made))
        del made
        torch._lazy.mark_step()
    assert len(hashes) == 2


def test_inputs_that_do_not_fit_are_refused() -> None:
    x = grid("lazy", 3)
    y = x + 1
    key = torch._lazy.computation.get_graph_hash([y])
    with pytest.raises(ValueError, match=r"expected torch.float32 \[3\]"):
        torch._lazy.computation.run_cached_graph(key, [torch.zeros(4)])
    with pytest.raises(ValueError, match="has 1 inputs, got 0"):
        torch._lazy.computation.run_cached_graph(key, [])
