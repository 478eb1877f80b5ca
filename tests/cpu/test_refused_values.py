"""Values that an operator refuses in eager are refused in every way of running, with its text and the user's line,
before anything of the step is stored.

All operators are one graph, so that they cost one compile for each way of running.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import Tensor, nn, tensor
from torch.nn import functional as F

import lazy_backend
from lazy_backend import config, metrics
from lazy_backend.computation import get_cached_computations
from lazy_backend.lowering.artefacts.inductor_module import NotExpressible
from lazy_backend.lowering.blocks import block_program
from lazy_backend.lowering.checks.value_rules import RULES
from lazy_backend.lowering.compilation import background, build
from lazy_backend.lowering.compilation.request import CompileRequest

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")

Program = Callable[..., Any]
Case = tuple[Program, list[Tensor], list[list[Tensor]]]  # with operands that it takes, and several that it refuses

X = torch.arange(12.0).reshape(3, 4) / 12
COUNTS = torch.arange(1, 13).reshape(3, 4)
EYE = torch.eye(3)


def of(*values: int) -> Tensor:
    return tensor(values)


# Operators for which compilers write code of their own.
INDEXED: dict[str, tuple[Program, bool]] = {
    "embedding": (lambda x, i: F.embedding(i, x), False),
    "index": (lambda x, i: x[i], True),
    "two indices": (lambda x, i: x[:, i.clamp_min(0).clamp_max(1)][i], True),
    "index_put": (lambda x, i: x.index_put((i,), x[:2] * 2), True),
    "index_put of sums": (lambda x, i: x.index_put((i,), x[:2], accumulate=True), True),
    "index_select": (lambda x, i: x.index_select(0, i), False),
    "gather": (lambda x, i: x.gather(0, i[None]), False),
    "scatter": (lambda x, i: x.scatter(0, i[None], x * 2), False),
    "scatter of a number": (lambda x, i: x.scatter(0, i[None], 2.0), False),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[None], x * 2), False),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i[None], x * 2, "amax"), False),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2] * 2), False),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2] * 2), False),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), True),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, x[:2] * 2, "prod"), False),
}
# Too large, and too small.
CHECKED: dict[str, Case] = {
    name: (function, [X, of(0, -1 if wraps else 1)], [[X, of(0, 3)], [X, of(0, -4 if wraps else -1)]])
    for name, (function, wraps) in INDEXED.items()
}
CHECKED |= {
    "take": (lambda x, i: x.take(i), [X, of(0, -1)], [[X, of(0, 12)]]),
    "put": (lambda x, i: x.put(i, x[0, :2] * 3), [X, of(0, -1)], [[X, of(0, -13)]]),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), [X, of(0, 1, -100)], [[X, of(0, 1, 255)]]),
    "cross_entropy, ignored": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=-1),
        [X, of(0, 1, -1)],
        [[X, of(0, -1, -2)]],
    ),
    "nll_loss": (lambda x, t: F.nll_loss(x, t, x[0]), [X, of(0, 1, 2)], [[X, of(0, 4, 2)]]),
    "nll_loss2d": (
        lambda x, t: F.nll_loss(x.view(1, 3, 2, 2), t),
        [X, of(0, 1, 2, 0).view(1, 2, 2)],
        [[X, of(0, 1, 3, 0).view(1, 2, 2)]],
    ),
    "multi_margin_loss": (lambda x, t: F.multi_margin_loss(x, t), [X, of(0, 1, 2)], [[X, of(0, 1, 4)]]),
    "multilabel_margin_loss": (
        lambda x, t: F.multilabel_margin_loss(x, t.expand(3, 4)),
        [X, of(0, 1, -1, 0)],
        [[X, of(0, 7, -1, 0)]],
    ),
    "binary_cross_entropy": (
        lambda x, t: F.binary_cross_entropy(x, t),
        [X, X.round()],
        [[X, X.round() * 255], [X - 1, X.round()]],
    ),
    "binary_cross_entropy of each": (
        lambda x, t: F.binary_cross_entropy(x, t, reduction="none"),
        [X, X],
        [[X * torch.nan, X]],
    ),
    "max_unpool2d": (lambda x, i: F.max_unpool2d(x[None], i[None], 2), [X, COUNTS], [[X, COUNTS * 0 + 112]]),
    "one_hot": (lambda i: F.one_hot(i, 3), [of(0, 1)], [[of(0, 3)], [of(0, -1)]]),
    "_assert_async": (lambda x: torch._assert_async((x < 2).all()), [X], [[X + 2]]),
    "_assert_async with a text": (lambda x: torch._assert_async((x < 2).all(), "too large"), [X], [[X + 2]]),
    "floor_divide": (lambda a, b: a // b, [COUNTS, COUNTS], [[COUNTS, COUNTS - 1]]),
    "remainder": (lambda a, b: a % b, [COUNTS, COUNTS], [[COUNTS, COUNTS - 1]]),
    "remainder of a number": (lambda a: 7 % a, [COUNTS], [[COUNTS - 1]]),
    "fmod": (lambda a, b: torch.fmod(a, b), [COUNTS, COUNTS], [[COUNTS, COUNTS - 1]]),
    "div": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), [COUNTS, COUNTS], [[COUNTS, COUNTS - 1]]),
    "cholesky": (lambda x: torch.linalg.cholesky(x), [EYE], [[-EYE]]),
    "inv": (lambda x: torch.linalg.inv(x), [EYE], [[EYE * 0]]),
    "solve": (lambda x, b: torch.linalg.solve(x, b), [EYE, X], [[EYE * 0, X]]),
    "lu_factor": (lambda x: torch.linalg.lu_factor(x)[0], [EYE], [[EYE * 0]]),
}

# Operators that compiled graphs call as they are.
CALLED: dict[str, Case] = {
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x), [X, of(0, 1)], [[X, of(0, 3)]]),
    "multinomial": (lambda x: torch.multinomial(x, 1), [X + 0.1], [[X - 0.5]]),
    "bernoulli": (lambda x: torch.bernoulli(x), [X], [[X - 0.5]]),
    "normal": (lambda x: torch.normal(0.0, x), [X + 0.1], [[X - 0.5]]),
    "poisson": (lambda x: torch.poisson(x), [X + 0.1], [[X - 0.5]]),
    "svd": (lambda x: torch.linalg.svd(x)[1], [EYE], [[EYE * torch.nan]]),
    "eigh": (lambda x: torch.linalg.eigh(x)[0], [EYE], [[EYE * torch.nan]]),
    "eig": (lambda x: torch.linalg.eig(x)[0], [EYE], [[EYE * torch.nan]]),
    "histc": (lambda x: torch.histc(x, 3), [X], [[X * torch.nan]]),
    "masked_scatter": (lambda x, m: x.masked_scatter(m, x[0]), [X, X < 0.1], [[X, X < 0.9]]),
    "segment_reduce": (lambda x, n: torch.segment_reduce(x, "sum", lengths=n), [X, of(1, 2)], [[X, of(1, -2)]]),
    "searchsorted": (lambda x, s: torch.searchsorted(x[0], x, sorter=s), [X, of(0, 1, 2, 3)], [[X, of(0, 1, 2, 9)]]),
    "lu_unpack": (lambda x, p: torch.lu_unpack(x, p.int())[0], [EYE, of(1, 2, 3)], [[EYE, of(1, 2, 9)]]),
}
CASES = CHECKED | CALLED


def refused_text(function: Program, bad: list[Tensor]) -> str:
    """What eager says. The number of an eigenvalue that does not converge varies."""
    with pytest.raises((RuntimeError, IndexError)) as caught:
        function(*(one.clone() for one in bad))
    return str(caught.value).partition(" (error code")[0]


class Steps:
    """Steps of these cases, each of which adds to `stored`, and to rows of `table`."""

    def __init__(
        self, wrap: Callable[[Program], Program] = lambda compute: compute, names: Iterable[str] = CASES
    ) -> None:
        self.stored, self.table = torch.zeros(40).to("lazy"), torch.zeros(3, 40).to("lazy")
        self.good = {name: [one.to("lazy") for one in CASES[name][1]] for name in names}
        self.compute = wrap(self.body)

    def body(self, operands: dict[str, list[Tensor]]) -> dict[str, Any]:
        made = {"read before": self.stored * 2}  # the compiler would write `stored` in the same loop
        made |= {name: CASES[name][0](*given) for name, given in operands.items()}
        self.table[operands["index"][1]] += 1
        self.stored += 1
        return made

    def __call__(self, **bad: list[Tensor]) -> dict[str, Any]:
        made: dict[str, Any] = self.compute(
            self.good | {name: [one.to("lazy") for one in given] for name, given in bad.items()}
        )
        lazy_backend.mark_step(wait=True)
        return made


def assert_refused(name: str, bad: list[Tensor], step: Callable[[], object], names_line: bool = True) -> None:
    """A step with bad values for one operator raises as eager does."""
    function, _, _ = CASES[name]
    with pytest.raises(RuntimeError) as caught:
        step()
    found = str(caught.value)
    assert found.startswith(refused_text(function, bad)), name
    if name in CHECKED and names_line:
        assert f"recorded at {__file__}:{function.__code__.co_firstlineno}" in found, name


WAYS: dict[str, dict[str, Any]] = {
    "interpreted": {"compile": "off"},
    "as the module is": {"backend": "eager"},
    "aot_eager": {"backend": "aot_eager"},
    "compiled": {"backend": "inductor", "run_in_background": "never"},
    "beside recording": {"backend": "inductor", "run_in_background": "always"},
    "captured": {"backend": "inductor"},
}


def test_the_page_of_operators_names_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "op_support.md").read_text()
    assert [name for name in RULES if f"`{name}`" not in page] == []


def assert_all_refused(step: Steps, names_line: bool = True) -> None:
    """Bad values are refused, one after the other, and good ones are taken again afterwards."""
    before = [step.stored.cpu(), step.table.cpu()]
    for name in step.good:
        for bad in CASES[name][2]:
            assert_refused(name, bad, functools.partial(step, **{name: bad}), names_line)
            assert_same([step.stored.cpu(), step.table.cpu()], before)
    step()
    assert_same(step.stored.cpu(), before[0] + 1)


def latest_plan() -> str:
    return str(lazy_backend.explain(last=1).records[0].plan)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one test compiles the others find here."""
    return str(tmp_path_factory.mktemp("graphs"))


_WHOLE = [pytest.param(way, marks=pytest.mark.scenario) for way in ("compiled", "beside recording", "captured")]


@pytest.mark.parametrize("way", ["interpreted", "as the module is", "aot_eager", *_WHOLE])
def test_a_step_refuses_what_eager_refuses_and_stores_nothing(way: str, folder: str) -> None:
    with config.patch(cache=True, cache_dir=folder, **WAYS[way]):
        step = Steps(lazy_backend.capture) if way == "captured" else Steps()
        for _ in range(5):
            step()
        assert latest_plan() == ("interpreted" if way == "interpreted" else "compiled")
        assert_all_refused(step, names_line=way != "as the module is")


# Of these, one is computed from others, and one is called as it is.
SOME = ("index", "cross_entropy", "binary_cross_entropy", "floor_divide", "cholesky", "multinomial")


def compile_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the compiler answer at once, in this process."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    def submit(request: CompileRequest, *arguments: Any) -> background.Job:
        with functorch_config.patch("enable_autograd_cache", True), inductor_config.patch({"cpp.vec_isa_ok": True}):
            data = build.compile_request(request)
        job = background.Job(0, b"")
        job.finish(data)
        return job

    monkeypatch.setattr(background.worker, "submit", submit)
    config.backend, config.compile, config.run_in_background = "inductor", "background", "never"


@pytest.mark.parametrize("kind", ["light", "bundled"])
def test_artefacts_that_need_python_refuse(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise NotExpressible("a test")

    if kind == "light":
        monkeypatch.setattr(build, "runner_of", refuse)
    else:
        monkeypatch.setattr(build, "_is_for_cpu", lambda examples: False)  # as for a GPU
    compile_here(monkeypatch)
    step = Steps(names=SOME)
    for _ in range(5):
        step()
    assert latest_plan() == "compiled"
    reasons = {"light": "a test", "bundled": "devices beside the CPU"}
    assert [name for name in metrics.counter_names() if name.startswith("RunFromPython")] == [
        f"RunFromPython: {reasons[kind]}"
    ]
    assert_all_refused(step)


class Routed(nn.Module):
    """Layers that look rows up, which are one block, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x.index_select(0, rows)).relu() * 2) + x
        return F.cross_entropy(x, targets)


@pytest.mark.scenario
def test_blocks_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MIN_SAVED", 1)
    monkeypatch.setattr(block_program, "_SHORTEST", 2)
    compile_here(monkeypatch)
    model = Routed().to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, good = torch.randn(3, 8).to("lazy"), of(2, 0, 1)

    def step(rows: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        model(x, rows.to("lazy"), targets.to("lazy")).backward()
        optimizer.step()
        lazy_backend.mark_step(wait=True)

    with config.patch(compile_whole_after_seconds=None):
        for _ in range(6):
            step(good, good)
        (plan,) = (plan for one in get_cached_computations() for plan in one.executor._compiler.plans)
        assert type(getattr(plan._call, "__self__", None)).__name__ == "BlockRunner"
        before = [one.detach().cpu() for one in model.parameters()]
        with pytest.raises(RuntimeError, match=rf"index out of range in self(.|\n)*recorded at {__file__}:\d+\n"):
            step(of(0, 3, 1), good)
        with pytest.raises(RuntimeError, match=rf"Target 9 is out of bounds(.|\n)*recorded at {__file__}:\d+\n"):
            step(good, of(0, 9, 1))
        assert_same([one.detach().cpu() for one in model.parameters()], before)
        step(good, good)


def shaped(x: Tensor, classes: Tensor) -> Tensor:
    """Checks whose bounds depend on the number of rows, and one whose bounds do not."""
    rows = x[classes] + x.index_select(0, classes) + x.gather(0, classes[:, None].expand(-1, 4))
    return F.cross_entropy(rows, classes % 4) + F.binary_cross_entropy(
        x.sigmoid(), (x > 0) * (classes[:, None] < 9) * 1.0
    )


@pytest.mark.scenario
def test_a_plan_for_many_shapes_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    config.backend, config.first_sight = "inductor", "run"
    stored = torch.zeros(40).to("lazy")

    def step(size: int, bad: int | None = None) -> None:
        classes = torch.arange(size)
        if bad is not None:
            classes[1] = bad
        loss = shaped(torch.randn(size, 4).to("lazy"), classes.to("lazy"))
        stored.add_(1)
        lazy_backend.mark_step(wait=True)
        loss.item()

    for size in (5, 6, 7, 8) * 4:
        step(size)
    assert latest_plan() == "compiled for many shapes"
    before = stored.cpu()
    for size in (5, 7):
        text = f"index 9 is out of bounds for dimension 0 with size {size}"
        with pytest.raises(RuntimeError, match=rf"{text}(.|\n)*recorded at {__file__}"):
            step(size, bad=9)
    assert_same(stored.cpu(), before)
    step(8)


def test_a_served_module_refuses() -> None:
    config.backend = "inductor"

    def answer(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        made = [CASES[name][0](*(next(rest) for _ in CASES[name][1])) for name in SOME[:-1]]
        return [one for one in made if one is not None]

    good = {name: CASES[name][1] for name in SOME[:-1]}
    served = lazy_backend.serve(answer, tuple(itertools.chain(*good.values())))
    for _ in range(3):
        served(*itertools.chain(*good.values()))
    for name in good:
        for bad in CASES[name][2]:
            given = itertools.chain(*(good | {name: bad}).values())
            assert_refused(name, bad, lambda given=given: served(*given))  # type: ignore[misc]
    served(*itertools.chain(*good.values()))


def test_a_call_that_stays_a_call_is_named(folder: str) -> None:
    """Of all calls of a graph, those are named that may have raised."""
    config.backend, config.cache, config.cache_dir = "inductor", True, folder

    def step(p: Tensor) -> Tensor:
        drawn = torch.multinomial(p.to("lazy"), 1)
        made = X.to("lazy")[drawn[:, 0]]
        lazy_backend.mark_step(wait=True)
        return made

    for _ in range(4):
        step(X[:, :3] + 0.1)
    assert latest_plan() == "compiled"
    line = step.__code__.co_firstlineno + 1
    with pytest.raises(
        RuntimeError, match=rf"element < 0\n.*likely in\n  aten.multinomial recorded at {__file__}:{line}\n  in"
    ):
        step(X[:, :3] - 0.5)
