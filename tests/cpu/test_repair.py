"""A refused plan is repaired: the operators at fault are found and left to PyTorch's kernels, the rest is compiled."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from planted_faults import Planted, float_program
from test_trials import counts, with_fault, with_wrong_results
from torch import fx
from torch._ops import OpOverload

import lazy_backend
from lazy_backend import CompileWarning, config, metrics
from lazy_backend.lowering.plans import pending_compile

aten = torch.ops.aten

Program = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def tried() -> None:
    config.verify_compiled = "once"
    config.num_profiled_runs = 0


def by_a_third(*ops: Any) -> Callable[..., Any]:
    """A backend that gets these operators wrong."""
    return with_fault(lambda node, made, args: made.mul_(0.67) if node.target in ops else made)


def wrong_if_together(*ops: Any) -> Callable[..., Any]:
    """A backend that gets graphs wrong in which all of these operators are."""

    def backend(module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        is_wrong = {node.target for node in module.graph.nodes}.issuperset(ops)
        return with_wrong_results(module, examples) if is_wrong else module.forward

    return backend


def repaired(backend: Any, program: Program, steps: int = 16) -> list[str]:
    """Run a program until it is repaired, compare each result with eager's, and return the warnings."""
    config.backend = backend
    given = torch.rand(8)
    expected = program(given.clone())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            result = program(given.to("lazy"))
            lazy_backend.mark_step()
            assert torch.equal(result.cpu(), expected)
    return [str(one.message) for one in told if issubclass(one.category, CompileWarning)]


def plan() -> str:
    return lazy_backend.explain().records[-1].plan


def test_an_operator_that_is_wrong_is_named_and_the_rest_compiled() -> None:
    (told,) = repaired(by_a_third(aten.exp.default), lambda x: ((x * 2).exp() + 1).clone())
    assert "aten.exp recorded at" in told
    assert "test_repair.py" in told
    assert "f32[8] differs by" in told
    assert "compiled alone, too" in told
    assert (*counts(), metrics.counter_value("PlanRepaired")) == (1, 1, 1)
    assert plan() == "compiled"


def test_later_graphs_with_the_pattern_keep_it_from_the_compiler() -> None:
    backend = by_a_third(aten.exp.default)
    repaired(backend, lambda x: (x * 2).exp() + 1)
    assert not repaired(backend, lambda x: (x - 3).exp().exp(), steps=4)
    assert counts() == (2, 1)
    assert plan() == "compiled"


def test_two_operators_that_are_wrong_are_both_found() -> None:
    wrong = by_a_third(aten.exp.default, aten.tanh.default)
    (told,) = repaired(wrong, lambda x: ((x.tanh() - 2).exp() * 3).tanh() + 1, steps=24)
    assert "aten.exp" in told
    assert "aten.tanh" in told
    assert (*counts(), plan()) == (1, 1, "compiled")


def test_what_is_wrong_only_together_with_another_operator() -> None:
    (told,) = repaired(wrong_if_together(aten.exp.default, aten.tanh.default), lambda x: (x.exp() * 2).tanh() - 1)
    assert "the fault is in aten.tanh" in told
    assert "where it is compiled together with others" in told
    assert plan() == "compiled"
    left: list[Any] = []
    config.backend = lambda module, examples: left.extend(n.target for n in module.graph.nodes) or module.forward
    repaired(config.backend, lambda x: x.tanh() - 3, steps=4)
    assert aten.tanh.default in left  # of other graphs, nothing was concluded


def test_an_operator_that_writes_into_a_view() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        made = x.exp().view(2, 4)
        made[:, 1:3].mul_(3)
        made[:, 2:].sub_(x.view(2, 4)[:, :2])
        torch._foreach_add_([made[0], made[1]], 2)
        return made + 1

    for op in (aten.mul_.Tensor, aten.sub_.Tensor, aten._foreach_add_.Scalar):
        backend = with_fault(lambda node, made, args, op=op: _doubled(args) if node.target is op else made)
        (told,) = repaired(backend, program, steps=24)
        assert str(op).removesuffix(".Tensor") in told
        assert plan() == "compiled"
        lazy_backend.compat.runtime.reset()


def _doubled(args: Sequence[Any]) -> Any:
    written = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
    return written.mul_(2)


def test_what_cannot_be_repaired_stays_interpreted() -> None:
    (told,) = repaired(with_wrong_results, lambda x: (x * 2).exp() + 1)
    assert "is interpreted" in told
    assert (*counts(), metrics.counter_value("PlanRepaired"), plan()) == (0, 1, 0, "interpreted")


def test_a_compiler_that_fails_the_second_time() -> None:
    faulty, asked = by_a_third(aten.exp.default), [0]

    def backend(module: fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        asked[0] += 1
        if asked[0] > 1:
            raise RuntimeError("not again")
        return faulty(module, examples)

    (told,) = repaired(backend, lambda x: (x * 2).exp() + 1)
    assert "is interpreted" in told
    assert plan() == "interpreted"


def test_a_repaired_plan_that_is_wrong_is_refused() -> None:
    faulty, asked = by_a_third(aten.exp.default), [0]

    def backend(module: fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        asked[0] += 1
        made = faulty(module, examples)
        return made if asked[0] < 8 else lambda *args: [one * 2 for one in made(*args)]

    (told,) = repaired(backend, lambda x: (x * 2).exp() + 1, steps=24)
    assert asked[0] == 8
    assert "is interpreted" in told
    assert (*counts(), metrics.counter_value("PlanRepaired"), plan()) == (0, 2, 0, "interpreted")


def test_an_interrupt_of_the_search_is_one_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [0]
    tried = pending_compile._tried_here

    def interrupted(*args: Any) -> str:
        asked[0] += 1
        if asked[0] == 3:
            raise KeyboardInterrupt
        return tried(*args)

    monkeypatch.setattr(pending_compile, "_tried_here", interrupted)
    backend = by_a_third(aten.exp.default)
    with pytest.raises(KeyboardInterrupt):
        repaired(backend, lambda x: (x * 2).exp() + 1)
    repaired(backend, lambda x: (x * 2).exp() + 1)
    assert plan() == "compiled"


def test_the_run_that_showed_it_is_removed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    kept = pending_compile.Evidence

    def evidence(run: Any) -> Any:
        made = kept(run)
        paths.append(made.path)
        assert os.path.exists(made.path)
        return made

    monkeypatch.setattr(pending_compile, "Evidence", evidence)
    repaired(by_a_third(aten.exp.default), lambda x: (x * 2).exp() + 1)
    assert len(paths) == 1
    assert not os.path.exists(os.path.dirname(paths[0]))


def test_large_inputs_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazy_backend.lowering.plans.evidence._MAX_KEPT", 0)
    (told,) = repaired(by_a_third(aten.exp.default), lambda x: (x * 2).exp() + 1)
    assert "aten.exp recorded at" in told
    assert plan() == "compiled"


def test_threads_and_forks_go_on_searching() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp() + 1

    backend = by_a_third(aten.exp.default)
    repaired(backend, program, steps=6)  # in the middle of it
    child = os.fork()
    if not child:
        repaired(backend, program)
        os._exit(0 if plan() == "compiled" else 1)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(2):
        thread = threading.Thread(target=repaired, args=(backend, program))
        thread.start()
        repaired(backend, program)
        thread.join()
    assert plan() == "compiled"
    assert counts()[1] == 1


def test_graphs_for_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    config.max_static_shapes = 0
    config.backend = by_a_third(aten.exp.default)
    with warnings.catch_warnings(action="ignore", category=CompileWarning):
        for size in (20, 24, 48, 64, 20, 24, *[48, 64] * 12):
            given = torch.rand(size)
            result = (given.to("lazy") * 2).exp() + 1
            lazy_backend.mark_step()
            assert torch.equal(result.cpu(), (given * 2).exp() + 1)
    assert metrics.counter_value("PlanRepaired") == 1
    assert plan() == "compiled for many shapes"


def plant(seed: int) -> str:
    """What came of a fault of one operator of a random program. Results are compared at every step."""
    choose = random.Random(seed)
    planted, program = Planted(choose), choose.getrandbits(32)
    targets: list[Any] = []
    graphs: list[str] = []

    def backend(module: fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        if not targets:
            planted.backend(module, examples)
            targets.append(planted.place and planted.place.target)
            graphs.append(str(module.graph))

        class Faulty(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                if n.op != "call_function" or n.target is not targets[0]:
                    return super().run_node(n)
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
                return planted.planted(n, super().run_node(n), before, args, kwargs)

        return lambda *args: Faulty(module).run(*args)

    torch.manual_seed(seed)
    sources = [torch.randn(8, 8) for _ in range(3)]
    lazy_backend.compat.runtime.reset()
    config.backend = backend
    right: list[torch.Tensor] = []
    for _ in range(24):
        torch.manual_seed(seed)
        made = float_program(random.Random(program), [source.to("lazy") for source in sources])
        lazy_backend.mark_step()
        found = [one.cpu() for one in made]
        right = right or found  # of the first run, which calls eager's kernels
        for one, other in zip(found, right, strict=True):
            if other.isfinite().all():
                assert float((one - other).abs().max()) <= 1e-3 * float(other.abs().max()), seed
    if metrics.counter_value("PlanRepaired"):
        return "repaired"
    if not metrics.counter_value("PlanRefused"):
        return "none"
    # compilers get views, copies and the parts of a dropout themselves
    is_taken_apart = "dropout" in graphs[0] or targets[0] in (aten.copy_.default, aten.clone.default)
    is_opaque = is_taken_apart or not isinstance(targets[0], OpOverload) or targets[0].is_view
    return "opaque" if is_opaque else f"refused {seed}"


@pytest.mark.parametrize("block", range(4))
def test_planted_faults_are_repaired(block: int) -> None:
    with warnings.catch_warnings(action="ignore", category=CompileWarning):
        found = Counter(plant(seed) for seed in range(25 * block, 25 * block + 25))
    assert set(found) <= {"repaired", "none", "opaque"}, found
    assert found["repaired"] >= 5, found
