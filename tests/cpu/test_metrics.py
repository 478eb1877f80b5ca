"""Counters and metrics: every name has a meaning, values are right, exports are read back by others."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from harness import count, grid
from torch import nn

import lazy_backend
from lazy_backend import config, metrics
from lazy_backend.metrics.names import COUNTERS, METRICS, entry_of

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRIES = (*COUNTERS, *METRICS)


def total() -> torch.Tensor:
    return torch.ones(3, device="lazy").sum()


def value(name: str) -> float:
    data = metrics.metric_data(name)
    assert data is not None
    return data.total


# ----- names


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_every_name_is_in_the_docs(entry) -> None:
    cells = [f"`{entry.name}`", *([entry.unit] if entry.unit else []), entry.meaning]
    cells.append(", ".join(f"`{name}`" for name in entry.elsewhere))
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "metrics.md").read_text().splitlines()


def test_the_docs_name_nothing_else() -> None:
    rows = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(ENTRIES)


def test_the_sources_count_nothing_else() -> None:
    """Names in the code; conftest checks those that were counted, after every test."""
    found = {name for file in (ROOT / "lazy_backend").rglob("*.py") for name in counted_names(file)}
    assert {"MarkStep", "TraceTime", "DiskCacheHit", "CreateLtcTensor", "ExecuteFailed"} <= found
    assert [name for name in found if entry_of(name) is None] == []


def counted_names(file: Path) -> set[str]:
    """Literal names that `file` counts: arguments of `increment` and `observe`, keys and keywords of the others."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Dict) and file.parent.name == "execution" and all(map(is_number, node.values[:1])):
            names.update(key.value for key in node.keys if isinstance(key, ast.Constant))
        if not isinstance(node, ast.Call):
            continue
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("increment", "observe") and isinstance(node.args[0], ast.Constant):
            names.add(node.args[0].value)
        if function in ("observe_together", "Counter"):
            names.update(keyword.arg for keyword in node.keywords if keyword.arg)
    return names


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


@pytest.mark.parametrize(
    ("name", "entry", "labels"),
    [
        ("lazy::add", "lazy::<op>", {"op": "add"}),
        ("aten::nonzero", "<namespace>::<op>", {"namespace": "aten", "op": "nonzero"}),
        ("GraphCut: copy to cpu at /a at b.py:3", "GraphCut: <cause> at <line>", {"cause": "copy to cpu at /a"}),
        (
            "Fallback: aten.nonzero.default (its output (a shape) depends on values) at ",
            "Fallback: <op> (<reason>) at <line>",
            {"op": "aten.nonzero.default", "reason": "its output (a shape) depends on values", "line": ""},
        ),
    ],
)
def test_names_with_parts(name: str, entry: str, labels: dict[str, str]) -> None:
    found = entry_of(name)
    assert found is not None
    assert found[0].name == entry
    assert labels.items() <= found[1].items()


def test_names_of_torch_xla_are_understood() -> None:
    kept = total()
    kept.item()
    assert metrics.counter_value("xla::sum") == metrics.counter_value("lazy::sum") == 1
    assert metrics.counter_value("CreateXlaTensor") == metrics.counter_value("CreateLtcTensor") > 0
    assert metrics.metric_data("TensorToData") == metrics.metric_data("TransferToDeviceTime")


# ----- values


def test_an_upload_is_counted_with_its_bytes() -> None:
    torch.ones(2, 3).to("lazy")
    assert value("OutboundData") == 24
    assert value("TransferToDeviceTime") > 0


def test_an_upload_into_used_memory_is_counted_once() -> None:
    x = torch.zeros(4, device="lazy") + 1
    metrics.reset()
    x.copy_(torch.ones(4))
    data = metrics.metric_data("OutboundData")
    assert data is not None
    assert data.samples == (16.0,)


@pytest.mark.parametrize(
    "read",
    [lambda x: x.cpu(), lambda x: torch.zeros(4).copy_(x), lambda x: lazy_backend.to_cpu(x), lambda x: x.tolist()],
    ids=["cpu", "copy_", "to_cpu", "tolist"],
)
def test_a_download_is_counted_with_its_bytes(read) -> None:
    x = grid("lazy", 4)
    read(x)
    assert value("InboundData") == 16
    assert value("TransferFromDeviceTime") > 0


def test_an_item_is_a_download() -> None:
    total().item()
    assert value("InboundData") == 4


def test_a_cached_constant_is_no_upload() -> None:
    x = torch.ones(2, device="lazy")
    _ = x * torch.tensor(0.54321)
    with count("DeviceDataCacheHit") as hits:
        metrics.reset()
        _ = x * torch.tensor(0.54321)
    assert hits() == 1
    assert metrics.metric_data("OutboundData") is None


def test_inputs_updated_in_place_are_counted() -> None:
    model = nn.Linear(2, 2).to("lazy")
    x = grid("lazy", 3, 2)
    lazy_backend.mark_step()
    metrics.reset()
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)
    lazy_backend.mark_step()
    assert value("InputOutputAliasCount") == 2


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_synced_tensors_are_counted(first_sight: str) -> None:
    config.first_sight = first_sight
    for _ in range(2):
        kept = [total(), total() + 1]
        lazy_backend.mark_step()
        del kept
    assert metrics.counter_value("SyncedTensorsWithIR") == 4
    assert metrics.counter_value("SyncTensorsGraph") == 2
    assert metrics.counter_value("CachedCompile") == metrics.counter_value("UncachedCompile") == 1


def test_runs_are_counted_and_failed_ones() -> None:
    index = torch.tensor([7]).to("lazy")
    lazy_backend.mark_step()
    metrics.reset()
    kept = torch.ones(3, device="lazy").index_select(0, index)
    lazy_backend.mark_step()
    with pytest.raises(lazy_backend.ExecutionError):
        lazy_backend.wait_device_ops()
    del kept
    assert metrics.counter_value("ExecuteComputation") == metrics.counter_value("ThreadPoolException") == 1


def test_calls_at_once_are_timed_and_named() -> None:
    torch.nonzero(total())
    torch.unique(total())
    assert metrics.executed_fallback_ops() == ["aten::_unique2", "aten::nonzero"]
    data = metrics.metric_data("EagerOpExecuteTime")
    assert data is not None
    assert data.count == 2


def test_metric_data_is_a_record() -> None:
    for number in range(10):
        metrics.observe("OutboundData", float(number))
    data = metrics.metric_data("OutboundData")
    assert data is not None
    assert (data.count, data.total, data.mean, data.percentile(50), data.unit) == (10, 45.0, 4.5, 5.0, "bytes")
    with pytest.raises(AttributeError):
        data.count = 3  # type: ignore[misc]


# ----- exports


def test_a_snapshot_survives_json() -> None:
    total().item()
    taken = metrics.snapshot()
    assert metrics.Snapshot.from_dict(json.loads(taken.to_json())) == taken


def test_prometheus_parses_the_export() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    total().item()
    torch.nonzero(total())
    lazy_backend.mark_step()
    metrics.increment('GraphCut: a "quoted"\\ cause\nof two lines at train.py:3')
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics.to_prometheus())}
    assert families["lazy_backend_mark_step"].type == "counter"
    assert families["lazy_backend_mark_step"].samples[0].value == 1
    calls = {sample.labels["op"]: sample.value for sample in families["lazy_backend_recorded_call"].samples}
    assert calls["sum"] == 2
    cuts = [sample.labels for sample in families["lazy_backend_graph_cut_by_line"].samples]
    assert {"cause": 'a "quoted"\\ cause\nof two lines', "line": "train.py:3"} in cuts
    runs = {sample.name: sample for sample in families["lazy_backend_execute_time_seconds"].samples}
    data = metrics.metric_data("ExecuteTime")
    assert data is not None
    assert runs["lazy_backend_execute_time_seconds_sum"].value == data.total
    assert runs["lazy_backend_execute_time_seconds_count"].value == data.count


class Scalars:
    """A `SummaryWriter` that remembers."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[float, int | None]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert tag not in self.written
        self.written[tag] = scalar_value, global_step


def test_tensorboard_gets_each_counter_once() -> None:
    total().item()
    total().item()  # cuts at two lines
    assert len([name for name in metrics.counter_names() if name.startswith("GraphCut: ")]) == 2
    writer = Scalars()
    metrics.to_tensorboard(writer, 7)
    assert writer.written["lazy_backend/graph_cut"] == (2, 7)
    assert writer.written["lazy_backend/graph_cut_by_line"] == (2, 7)
    assert writer.written["lazy_backend/recorded_call"][0] == sum(
        value for name, value in metrics.counters().items() if name.startswith("lazy::")
    )
    seconds = metrics.metric_data("ExecuteTime")
    assert seconds is not None
    assert writer.written["lazy_backend/execute_time_seconds"] == (seconds.mean, 7)


def test_the_export_leaves_nothing_out() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    total().item()
    torch.nonzero(total())
    taken = metrics.snapshot()
    families = list(parser.text_string_to_metric_families(taken.to_prometheus()))
    counters = sum(len(family.samples) for family in families if family.type == "counter")
    assert counters == len(taken.counters)
    assert sum(family.type == "summary" for family in families) == len(taken.metrics)


def test_a_comparison_has_what_differs() -> None:
    total().item()
    before = metrics.snapshot()
    total().item()
    found = metrics.compare(before, metrics.snapshot())
    assert found.counters["lazy::sum"] == (1, 2)
    assert "UncachedCompile" not in found.counters
    before_runs, after_runs = found.metrics["ExecuteTime"]
    assert before_runs is not None
    assert after_runs is not None
    assert after_runs.count == before_runs.count + 1
    assert "lazy::sum: 1 -> 2 (+1)" in str(found)


def test_equal_snapshots_differ_in_nothing() -> None:
    taken = metrics.snapshot()
    assert str(metrics.compare(taken, taken)) == "nothing differs"


# ----- a first step, and custom operators


def test_a_first_step_is_in_the_execution_metrics() -> None:
    config.first_sight = "run"
    total()
    lazy_backend.mark_step()
    data = metrics.metric_data("ExecuteTime")
    assert data is not None
    assert data.count == metrics.counter_value("ExecuteComputation") == 1
    trace = metrics.metric_data("TraceTime")
    assert trace is not None
    assert 0 < data.total < trace.total


def test_the_short_report_names_custom_operators_that_ran_at_once() -> None:
    with torch.library._scoped_library("short_report", "DEF") as library:
        library.define("first(Tensor x) -> float")
        library.impl("first", lambda x: float(x[0]), "CPU")
        torch.ops.short_report.first(torch.ones(3, device="lazy"))
    assert "short_report::first: 1" in metrics.short_report().splitlines()
