"""Each planted cause of a compile, a new program or a cut is named, with the right line on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import lazy_backend
from lazy_backend import config
from lazy_backend.diagnostics.history import SyncRecord, history
from lazy_backend.diagnostics.reasons import record_compile
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.plans.specialise import CompileReport

HERE = Path(__file__).name


def line_of(marker: str) -> str:
    """The site of the only line of this file that ends with `# <marker>`."""
    lines = Path(__file__).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")]
    assert len(found) == 1
    return f"{__file__}:{found[0]}"


def records() -> list[SyncRecord]:
    return list(lazy_backend.explain().records)


def latest() -> SyncRecord:
    return records()[-1]


@pytest.fixture(params=["record", "run"], autouse=True)
def first_sight(request: pytest.FixtureRequest) -> None:
    config.first_sight = request.param


def steps(count: int, body: Callable[[int], object]) -> None:
    for step in range(count):
        body(step)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).to("lazy")


def forward(model: nn.Module, size: int = 6) -> torch.Tensor:
    x = torch.ones(size, 4).to("lazy")
    loss: torch.Tensor = model(x).sum()  # forward
    return loss


# ----- the causes


def test_changed_learning_rate(tmp_path: Path) -> None:
    config.backend = "aot_eager"  # floats are compiled in there
    weight = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for rate in (0.5, 0.5, 0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (weight * 2.0).sum().backward()
        optimizer.step()  # learning rate
        lazy_backend.mark_step()
    record = latest()
    assert record.outcome == "new specialisation"
    (compiled,) = record.compiles
    assert compiled.difference is not None
    assert (compiled.difference.kind, compiled.difference.now_site) == ("scalar", line_of("learning rate"))
    assert "alpha = -0.5" in compiled.difference.before
    assert "alpha = -0.25" in compiled.difference.now


def test_changed_length() -> None:
    for length in (5, 5, 7):
        (torch.ones(2, length).to("lazy") * 2).sum(dim=1)
        kept = torch.ones(2, length).to("lazy") + 1  # length
        lazy_backend.mark_step()
        del kept
    record = latest()
    assert (record.outcome, record.nearest) == ("miss", "program 1")
    assert record.difference is not None
    assert record.difference.kind == "shape"
    assert "f32[2, 5]" in record.difference.before
    assert "f32[2, 7]" in record.difference.now
    assert "padding" in record.advice


def test_new_last_batch() -> None:
    model = make_model()
    for size in (6, 6, 4):
        loss = forward(model, size)
        lazy_backend.mark_step()
        del loss
    found = latest().difference
    assert found is not None
    assert (found.kind, found.now_site) == ("shape", line_of("forward"))
    assert "drop_last" in latest().advice


def test_toggled_dropout() -> None:
    model = make_model()
    for training in (True, True, False):
        model.train(training)
        loss = forward(model)
        lazy_backend.mark_step()
        del loss
    found = latest().difference
    assert found is not None
    assert (found.kind, found.before, found.now_site) == ("op", "aten.native_dropout", line_of("forward"))
    assert "model.eval()" in latest().advice


def test_an_operator_for_a_log() -> None:
    weight = torch.ones(3).to("lazy")
    for step in range(3):
        weight.mul_(0.5)
        if step == 2:
            norm = weight.norm()  # log
        weight.add_(1.0)  # after the log
        lazy_backend.mark_step()
    del norm
    found = latest().difference
    assert found is not None
    assert found.kind == "op"
    assert (found.before_site, found.now_site) == (line_of("after the log"), line_of("log"))
    assert found.now == "aten.linalg_vector_norm, an operator more"
    assert "add_step_closure" in latest().advice


def test_an_operator_at_the_end() -> None:
    weight = torch.ones(3).to("lazy")
    for step in range(3):
        weight.mul_(0.5)
        if step == 2:
            mean = weight.mean()  # at the end
        lazy_backend.mark_step()
    del mean
    found = latest().difference
    assert found is not None
    assert (found.kind, found.now_site) == ("length", line_of("at the end"))
    assert "add_step_closure" in latest().advice


def test_two_steps_in_one() -> None:
    weight = torch.ones(3).to("lazy")
    for step in range(3):
        for _ in range(2 if step == 2 else 1):
            weight.mul_(0.5)
            weight.add_(1.0)
        lazy_backend.mark_step()
    assert "mark_step() once per step" in latest().advice


def test_a_leaked_activation() -> None:
    leaked: list[torch.Tensor] = []
    weight = torch.ones(3).to("lazy")
    for step in range(3):
        hidden = weight * 2  # hidden
        result = hidden.sum()
        if step == 2:
            leaked.append(hidden)
        del hidden
        lazy_backend.mark_step()
        del result
    found = latest().difference
    assert found is not None
    assert (found.kind, found.now_site) == ("outputs", line_of("hidden"))
    assert "aten.mul is held" in found.now
    assert latest().nearest == latest().program


def test_a_changed_dtype() -> None:
    for dtype in (torch.float32, torch.float32, torch.float64):
        x = torch.ones(3, dtype=dtype).to("lazy")
        made = x + 1  # dtype
        lazy_backend.mark_step()
        del made
    found = latest().difference
    assert found is not None
    assert (found.kind, found.now_site) == ("dtype", line_of("dtype"))
    assert "f64[3]" in found.now


def test_new_optimizer_state() -> None:
    weight = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()  # state
        lazy_backend.mark_step()
    found = latest().difference
    assert found is not None
    assert (found.kind, found.now_site) == ("op", line_of("state"))
    assert "optimizers make their state" in latest().advice


def test_another_backend() -> None:
    weight = torch.ones(3).to("lazy")
    for backend in ("eager", "eager", "aot_eager"):
        config.backend = backend
        weight.add_(1.0)
        lazy_backend.mark_step()  # backend
    found = latest().difference
    assert found is not None
    assert (found.kind, found.before, found.now) == ("configuration", "backend = 'eager'", "backend = 'aot_eager'")
    assert latest().site == line_of("backend")


def test_a_branch() -> None:
    weight = torch.ones(3).to("lazy")
    for step in range(3):
        if step < 2:
            weight.mul_(2.0)  # one way
        else:
            weight.div_(2.0)  # the other way
        lazy_backend.mark_step()
    found = latest().difference
    assert found is not None
    assert (found.kind, found.before_site, found.now_site) == ("op", line_of("one way"), line_of("the other way"))
    assert "torch.where" in latest().advice


def test_item_in_a_loop() -> None:
    weight = torch.ones(3).to("lazy")
    for _ in range(3):
        weight.mul_(2.0)
        weight.sum().item()  # item
        weight.add_(1.0)
        lazy_backend.mark_step()
    cuts = [record for record in records() if record.cause == "item()"]
    assert [cut.site for cut in cuts] == [line_of("item")] * 3
    assert "after mark_step()" in cuts[0].advice


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(3).to("lazy")
    weight.mul_(2.0)
    print(weight)  # print
    assert (latest().cause, latest().site) == ("print", line_of("print"))
    assert "add_step_closure" in latest().advice


def test_a_boolean_mask() -> None:
    weight = torch.ones(3).to("lazy")
    mask = weight > 0.5
    weight[mask].sum()  # mask
    cut = next(record for record in records() if record.cause.startswith("aten.index"))
    assert cut.site == line_of("mask")
    assert "torch.where" in cut.advice


def test_a_loop_without_mark_step() -> None:
    config.max_trace_length = 50
    weight = torch.ones(3).to("lazy")
    with pytest.warns(lazy_backend.GraphCutWarning, match="without a mark_step"):
        steps(60, lambda _: weight.mul_(2.0))  # unmarked
    assert (records()[0].cause, records()[0].site) == ("trace too long", line_of("unmarked"))
    assert "mark_step() once per step" in records()[0].advice


def test_changed_aliasing() -> None:
    a, b = torch.ones(3).to("lazy"), torch.ones(3).to("lazy")
    for x, y in ((a, b), (a, b), (a, a)):
        made = torch.add(x, y)  # alias
        lazy_backend.mark_step()
        del made
    found = latest().difference
    assert found is not None
    assert (found.kind, found.now_site) == ("aliasing", line_of("alias"))
    assert "used before in this step" in found.now
    view = a[:]
    torch.add(a, b)
    made = torch.add(view, b)
    lazy_backend.mark_step()
    del made
    assert latest().difference is not None


# ----- what goes with it


def test_a_known_step_has_nothing_to_explain() -> None:
    weight = torch.ones(3).to("lazy")
    for _ in range(4):
        weight.mul_(2.0)
        lazy_backend.mark_step()
    assert [record.outcome for record in records()] == ["miss"] + 3 * ["hit, level 1"]
    assert len(lazy_backend.explain().misses()) == 1
    assert [record.step for record in records()] == [1, 2, 3, 4]


def test_a_new_path_to_a_known_graph() -> None:
    weight = torch.ones(3).to("lazy")
    for step in range(4):
        if step == 3:
            weight.sum()  # nobody holds it
        weight.mul_(2.0)
        lazy_backend.mark_step()
        if step == 3:
            expected = "miss" if config.first_sight == "run" else "hit, level 2"
            assert latest().outcome == expected  # run as it was recorded, it needs no graph


def test_a_shape_served_by_a_plan_for_many() -> None:
    weight = torch.ones(3).to("lazy")
    for size in (3, 3, 3, 5, 5, 7, 7, 7):
        made = torch.ones(size).to("lazy") * 2
        lazy_backend.mark_step()
        del made
    del weight
    outcomes = [record.outcome for record in records()]
    assert outcomes.count("generalised hit") == 2
    assert records()[-1].plan == "compiled for many shapes"


def test_records_as_data(tmp_path: Path) -> None:
    weight = torch.ones(3).to("lazy")
    for factor in (2.0, 2.0):
        weight.mul_(factor)
        lazy_backend.mark_step()
    lazy_backend.wait_device_ops()
    explanation = lazy_backend.explain()
    explanation.save(tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["type"] == "sync"] == explanation.to_dict()["records"]
    types = {"run", "source", "program", "compile", "sync", "memory", "peak", "state"}
    assert {line["type"] for line in lines} == types
    assert explanation.records[1].run_seconds is not None


def test_an_explanation_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(before: object, now: object) -> None:
        raise IndexError("a defect")

    monkeypatch.setattr("lazy_backend.diagnostics.history.difference", fail)
    config.check_graphs = False
    weight = torch.ones(3).to("lazy")
    for step in range(2):
        (weight.mul_ if step else weight.add_)(2.0)
        lazy_backend.mark_step()
    assert weight.tolist() == [6.0] * 3
    assert "IndexError: a defect" in str(lazy_backend.explain())


def test_printed() -> None:
    weight = torch.ones(3).to("lazy")
    for step in range(6):
        (weight.mul_ if step < 5 else weight.div_)(2.0)
        lazy_backend.mark_step()
    text = str(lazy_backend.explain())
    assert "6 syncs of 2 programs" in text
    assert "steps 3 to 5" in text
    assert "unlike program 1 in op, at call 0" in text
    assert f"{HERE}:" in text
    assert "lazy_backend.mark_step()" in text


def test_a_scalar_after_a_vector_is_explained() -> None:
    for x in (torch.ones(3), torch.ones(())):
        x.to("lazy").exp()
        lazy_backend.mark_step()
    found = latest().difference
    assert found is not None
    assert (found.kind, found.now) == ("shape", "aten.exp: self is an input f32[]")


def test_only_the_last() -> None:
    weight = torch.ones(3).to("lazy")
    for _ in range(4):
        weight.mul_(2.0)
        lazy_backend.mark_step()
    assert [record.step for record in lazy_backend.explain(last=2).records] == [3, 4]


def test_nothing_is_kept_when_off() -> None:
    config.explain = False
    torch.ones(3).to("lazy").mul_(2.0)
    lazy_backend.mark_step()
    assert records() == []
    assert history.programs == {}


def test_no_record_keeps_a_tensor(first_sight: None) -> None:
    weight = torch.ones(3).to("lazy")
    made = weight * 2
    lazy_backend.mark_step(wait=True)
    del made
    live = lazy_backend.metrics.counter_value("CreateLtcTensor") - lazy_backend.metrics.counter_value(
        "DestroyLtcTensor"
    )
    assert live == 1


# ----- limits, strictness, eager mode


def test_too_many_graphs() -> None:
    config.max_different_graphs = 2
    weight = torch.ones(3).to("lazy")

    def step(count: int) -> None:
        for _ in range(count + 1):
            weight.mul_(2.0)
        lazy_backend.mark_step()

    step(0)
    step(1)
    step(1)
    with pytest.raises(lazy_backend.TooManyGraphsError, match="3 different graphs") as caught:
        step(2)
    assert "unlike program 2 in length" in str(caught.value)
    assert "config.max_different_graphs = 2" in str(caught.value)
    assert weight.tolist() == [2.0 ** (1 + 2 + 2 + 3)] * 3  # the sync itself was done


def test_too_many_graphs_of_one_region() -> None:
    weight = torch.ones(3).to("lazy")

    def step(count: int) -> None:
        weight.add_(1.0)
        with lazy_backend.step(max_different_graphs=1):
            steps(count, lambda _: weight.mul_(2.0))

    step(1)
    step(1)
    with pytest.raises(lazy_backend.TooManyGraphsError, match="2 different graphs"):
        step(2)


def test_too_many_graphs_of_a_captured_function() -> None:
    @lazy_backend.capture(max_different_graphs=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x)

    for _ in range(3):
        step(torch.ones(3).to("lazy"))
    with pytest.raises(lazy_backend.TooManyGraphsError, match="max_different_graphs = 1"):
        step(torch.ones(4).to("lazy"))


def test_strict_everywhere() -> None:
    config.strict = True
    made = torch.ones(3).to("lazy") * 2
    with pytest.raises(lazy_backend.StrictModeError, match="print needs a value"):
        print(made)
    config.strict = False
    assert made.tolist() == [2.0] * 3


def test_a_strict_step() -> None:
    weight = torch.ones(3).to("lazy")
    with pytest.raises(lazy_backend.StrictModeError, match=HERE), lazy_backend.step(strict=True):
        weight.mul_(2.0).sum().item()
    with lazy_backend.step(strict=True):
        weight.mul_(2.0)
    assert weight.sum().item() == 12.0


def test_strict_refuses_the_cut_of_a_long_trace() -> None:
    config.max_trace_length = 10
    weight = torch.ones(3).to("lazy")
    with lazy_backend.strict(), pytest.raises(lazy_backend.StrictModeError, match="without a mark_step"):
        steps(20, lambda _: weight.mul_(2.0))


def test_nothing_runs_unless_allowed() -> None:
    weight = torch.ones(3).to("lazy")
    weight.mul_(2.0)
    with lazy_backend.allow_execution(False):
        made = weight.add(1.0).sin()
        for run in (made.cpu, lazy_backend.mark_step, lambda: print(made)):
            with pytest.raises(lazy_backend.ExecutionNotAllowedError, match="allow_execution"):
                run()
        assert "aten.sin" in lazy_backend.debug.dump_ir([made])
    torch.testing.assert_close(made.cpu(), torch.full((3,), 3.0).sin())


def test_execution_stays_forbidden_without_a_block() -> None:
    lazy_backend.allow_execution(False)
    made = torch.ones(3).to("lazy") * 2
    with pytest.raises(lazy_backend.ExecutionNotAllowedError):
        made.cpu()
    lazy_backend.allow_execution(True)
    assert made.tolist() == [2.0] * 3


def train(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(6, 4).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        lazy_backend.mark_step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_eager_mode_gives_the_same() -> None:
    deferred = train("lazy")
    with lazy_backend.eager_mode():
        lazy_backend.metrics.reset()
        at_once = train("lazy")
        assert lazy_backend.metrics.counter_value("GraphCut") == 0
        assert records() == []
    for one, other in zip(deferred, at_once, strict=True):
        assert torch.equal(one, other)


def test_eager_mode_grows_nothing() -> None:
    context = lazy_backend.tensors.contexts.contexts.get_device_context(None)
    weight = torch.ones(3).to("lazy")
    with lazy_backend.eager_mode():
        size = context.trie.size
        for _ in range(100):
            weight.mul_(1.5)
            torch.empty(3, device="lazy").fill_(2.0)
        assert context.trie.size == size
        assert not context.eager_root.followers()
        assert not context.trace.inputs


def test_eager_mode_begins_and_ends_in_a_step() -> None:
    weight = torch.ones(3).to("lazy")
    weight.mul_(2.0)
    with lazy_backend.eager_mode():
        weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="size of tensor"):
            weight.add(torch.ones(4).to("lazy"))
    weight.mul_(2.0)
    lazy_backend.mark_step()
    assert weight.tolist() == [8.0] * 3


def test_the_line_of_a_step_block_is_the_users() -> None:
    weight = torch.ones(3).to("lazy")
    with lazy_backend.step():  # block
        weight.mul_(2.0)
    assert latest().site.startswith(f"{__file__}:")


def test_a_compile_that_nobody_ended_is_not_that_of_a_later_graph() -> None:
    def report(stage: str) -> CompileReport:
        return CompileReport(Graph((), (), (), 0, 0, torch.device("cpu")), stage)

    history.reset()
    record_compile(report("started"))
    for _ in range(10):  # one of them at the address of the first
        record_compile(report("compiled"))
    assert [compiled.outcome for compiled in history.compiles] == ["started"] + ["compiled"] * 10
