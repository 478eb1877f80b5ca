"""Where the calls of a program stand in its picture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from synthetic_runs import make_run

from lazy_backend.diagnostics.graph_layout import lay_out, operands_of


def call(reads: list[str], makes: str = "", **further: Any) -> dict[str, Any]:
    return {"op": "aten.mul.Tensor", "site": "", "reads": reads, "makes": [[makes, ""]] if makes else [], **further}


def test_a_call_stands_below_all_that_it_reads() -> None:
    layout = lay_out([call([], "a"), call(["a"], "b"), call(["a"], "c"), call(["b", "c"], "d")])
    assert layout.y == [0, 1, 1, 2]
    assert layout.edges == [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_a_call_that_reads_nothing_stands_above_its_first_reader() -> None:
    layout = lay_out(
        [call([], "a"), call(["a"], "b"), call(["b"], "c"), call([], "weight"), call(["c", "weight"], "d")]
    )
    assert layout.y == [0, 1, 2, 2, 3]


def test_views_of_what_reads_nothing_stand_above_their_first_reader_too() -> None:
    chain = [call([], "a"), call(["a"], "b"), call(["b"], "c"), call(["c"], "d")]
    weight = [call([], "w"), call(["w"], "v", of={"v": "w"})]
    layout = lay_out([*chain, *weight, call(["b", "w"], "e"), call(["d", "v"], "f")])
    assert layout.y == [0, 1, 2, 3, 1, 3, 2, 4]


def test_calls_of_a_layer_do_not_overlap() -> None:
    layout = lay_out(make_run(1, 600).programs["program 1"]["calls"])
    rows: dict[int, list[float]] = {}
    for x, y in zip(layout.x, layout.y, strict=True):
        rows.setdefault(y, []).append(x)
    for row in rows.values():
        ordered = sorted(row)
        assert all(b - a > 0.98 for a, b in pairwise(ordered))  # places have two decimals


def test_readers_stand_evenly_below_what_they_read() -> None:
    layout = lay_out([call([], "a"), call(["a"], "b"), call(["a"], "c"), call(["a"], "d")])
    assert layout.x == [0.0, -1.0, 0.0, 1.0]


def test_a_reader_follows_the_write_to_a_tensor_whose_view_it_reads() -> None:
    calls = [
        call([], "base"),
        call(["base"], "view", of={"view": "base"}),
        call(["base"], writes=["base"]),
        call(["view"], "read"),
    ]
    assert operands_of(calls) == [[], [0], [0], [1, 2]]
