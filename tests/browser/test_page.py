"""The report in Chromium: it opens, zooms, filters and selects. Every test fails on an error in the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Open
from synthetic_runs import make_run_of_variants

import lazy_backend
from lazy_backend.diagnostics.page import render
from lazy_backend.diagnostics.run_log import Run, merged


def window(page: Any, chart: str) -> tuple[float, float]:
    """What a chart shows of its first axis."""
    script = f"echarts.getInstanceByDom(document.getElementById('{chart}')).getOption().dataZoom[0]"
    zoom = page.evaluate(script)
    return zoom["startValue"], zoom["endValue"]


def turn_wheel(page: Any, selector: str, turns: int = 6) -> None:
    """Zoom in at the middle of an element."""
    place = page.locator(selector)
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
    for _ in range(turns):
        page.mouse.wheel(0, -300)
    page.wait_for_timeout(250)  # ECharts gathers events for 100 ms


def pixel_of_call(page: Any, place: int) -> tuple[float, float]:
    """Where the middle of a call is drawn, in the window."""
    page.locator("#graph-chart").scroll_into_view_if_needed()
    x, y = page.evaluate(
        f"graph.chart.convertToPixel({{ gridIndex: 0 }}, [graph.picture.x[{place}], graph.picture.y[{place}]])"
    )
    box = page.locator("#graph-chart").bounding_box()
    return box["x"] + x, box["y"] + y


def test_every_section_is_drawn(look_at: Open, small: Path) -> None:
    page = look_at(small)
    assert page.locator("nav a").count() == page.locator("section").count() == 9
    for chart in ("steps-chart", "timeline-chart", "graph-chart", "memory-chart", "tensors-chart"):
        assert page.locator(f"#{chart} canvas").count() == 1
    assert page.locator("#tiles").inner_text().startswith("19.5 s\nof 900 steps")


def test_findings_come_first_with_lines_and_advice(look_at: Open, small: Path) -> None:
    first = look_at(small).locator("ol.findings li").first
    assert "train.py:" in first.inner_text()
    assert first.locator(".advice").count() == 1


def test_10_000_steps_and_5_000_calls_open_in_3_seconds(open_page: Open, big: Path) -> None:
    # the best of three: other processes of the machine are not what is measured
    times = (open_page(big).evaluate("performance.getEntriesByName('ready')[0].startTime") for _ in range(3))
    assert any(time < 3000 for time in times)


def test_the_steps_zoom(open_page: Open, big: Path) -> None:
    page = open_page(big)
    before = window(page, "steps-chart")
    turn_wheel(page, "#steps-chart")
    after = window(page, "steps-chart")
    assert after[1] - after[0] < 0.8 * (before[1] - before[0])
    # and what is shown is drawn anew, in finer pieces
    size = page.evaluate("shownBuckets[0].to - shownBuckets[0].from + 1")
    assert size < 42  # of 10,000 steps in 240 bars


def test_the_timeline_zooms_and_goes_back(open_page: Open, small: Path) -> None:
    page = open_page(small)
    before = window(page, "timeline-chart")
    turn_wheel(page, "#timeline-chart")
    assert window(page, "timeline-chart")[1] - window(page, "timeline-chart")[0] < 0.8 * (before[1] - before[0])
    page.click("[data-zoom=all]")
    assert window(page, "timeline-chart") == before


def test_a_click_on_a_step_shows_its_time(open_page: Open, small: Path) -> None:
    page = open_page(small)
    before = window(page, "timeline-chart")
    page.locator("#steps-chart").scroll_into_view_if_needed()
    box = page.locator("#steps-chart").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 150)
    after = window(page, "timeline-chart")
    assert after[1] - after[0] < 0.1 * (before[1] - before[0])


def test_a_timeline_is_drawn_with_few_shapes(look_at: Open, big: Path) -> None:
    assert look_at(big).evaluate("shownSegments.length") < 5000  # of 40,000 pieces


def test_a_table_is_sorted_and_filtered(open_page: Open, small: Path) -> None:
    page = open_page(small)
    rows = page.locator("#compiles tbody tr")
    assert rows.count() == 2
    page.locator("#compiles th", has_text="at").first.click()
    assert rows.first.locator("td").first.inner_text() == "14.0 s"


def test_a_program_is_found_and_selected(open_page: Open, small: Path) -> None:
    page = open_page(small)
    assert "program 1 on lazy:0: 60 calls" in page.locator("#graph-title").inner_text()
    page.fill(".programs .list input", "program 2")
    assert page.locator(".program").count() == 1
    page.click(".program")
    assert "program 2 on lazy:0: 12 calls" in page.locator("#graph-title").inner_text()


def test_a_click_on_a_call_shows_its_line(open_page: Open, small: Path) -> None:
    page = open_page(small)
    page.click("[data-graph=calls]")
    page.mouse.click(*pixel_of_call(page, 3))
    shown = page.locator("#call").inner_text()
    assert "3: aten.mul_" in shown
    assert "train.py:3" in shown
    assert "x = layer3(x)  # line 3" in shown
    assert "slot3: f32[64, 128]" in shown


def test_a_pointer_over_a_call_shows_its_line(open_page: Open, small: Path) -> None:
    page = open_page(small)
    page.click("[data-graph=calls]")
    page.mouse.move(*pixel_of_call(page, 0))
    page.wait_for_selector("text=click for more")
    assert "x = layer1(x)  # line 1" in page.locator("#graph-chart").inner_text()


def test_operands_lead_from_call_to_call(open_page: Open, small: Path) -> None:
    page = open_page(small)
    page.click("[data-graph=calls]")
    page.evaluate("selectCall(10, true)")
    page.locator("#call .link", has_text="9: relu").click()
    assert page.evaluate("graph.selected") == 9


def test_the_graph_zooms(open_page: Open, big: Path) -> None:
    page = open_page(big)
    page.click("[data-graph=calls]")
    page.click("[data-graph=fit]")
    before = window(page, "graph-chart")
    turn_wheel(page, "#graph-chart")
    after = window(page, "graph-chart")
    assert after[1] - after[0] < 0.8 * (before[1] - before[0])


def test_a_call_is_found_by_its_line(open_page: Open, big: Path) -> None:
    page = open_page(big)
    page.fill("#find-call", "line 33")
    assert page.locator("#matches").inner_text() == "125 matches"
    page.press("#find-call", "Enter")
    assert "line 33" in page.locator("#call").inner_text()


def test_a_finding_leads_to_its_call(open_page: Open, small: Path) -> None:
    page = open_page(small)
    page.locator("ol.findings li", has_text="another shape").get_by_text("show in the program").click()
    assert page.evaluate("graph.selected") == 3


# ----- what is folded


def test_the_graph_opens_whole_and_folded_by_line(open_page: Open, big: Path) -> None:
    page = open_page(big)
    assert page.evaluate("graph.picture.op.length") == 40  # 5,000 calls of 40 lines
    left, right = window(page, "graph-chart")
    assert left <= page.evaluate("Math.min(...graph.picture.x)")
    assert right >= page.evaluate("Math.max(...graph.picture.x)")
    page.click("[data-graph=calls]")
    assert page.evaluate("graph.picture.op.length") == 5000


def test_a_line_leads_to_its_calls(open_page: Open, small: Path) -> None:
    page = open_page(small)
    page.mouse.click(*pixel_of_call(page, 1))
    assert "x = layer2(x)  # line 2" in page.locator("#call").inner_text()
    page.locator("#call .link", has_text="2: add").click()
    assert page.evaluate("[graph.isFolded, graph.selected]") == [False, 2]
    page.click("[data-graph=lines]")
    assert page.evaluate("graph.isFolded")


def test_programs_that_differ_in_a_number_are_one_row(open_page: Open, many: Path) -> None:
    page = open_page(many)
    rows = page.locator(".program:not(.variant)")
    assert rows.count() == 3
    assert "30 variants" in rows.nth(1).inner_text()
    rows.nth(1).click()
    assert page.locator(".program.variant").count() == 29
    page.locator(".program.variant").nth(3).click()
    assert "program 14" in page.locator(".program.variant").first.inner_text()
    assert "program 14 on lazy:0" in page.locator("#graph-title").inner_text()
    assert page.locator("#graphs tbody tr").count() == 3
    assert "and 29 variants" in page.locator("#graphs tbody").inner_text()


def test_what_can_be_changed_stands_apart(look_at: Open, many: Path) -> None:
    page = look_at(many)
    heads = page.locator("#findings .content > h3").all_inner_texts()
    assert heads == ["You can change", "For information"]
    assert "wait_for_compiles()" in page.locator("ol.information").inner_text()
    costs = page.locator("#findings .cost").all_inner_texts()
    assert all(cost.endswith(" s") for cost in costs)


def test_a_wait_for_the_compiler_is_in_the_timeline(look_at: Open, many: Path) -> None:
    page = look_at(many)
    kinds = page.evaluate("lanes[0].segments.filter((segment) => segment.wait).map((one) => [one.from, one.to])")
    assert kinds == [[30.0, 150.0]]
    assert "the compiler" in page.locator("#timeline-legend").inner_text()
    assert "120 s\nin wait_for_compiles()" in page.locator("#tiles").inner_text()


def test_a_compile_that_is_not_over_is_counted(look_at: Open, many: Path) -> None:
    page = look_at(many)
    assert "2\ncompiles, 1 of them not over" in page.locator("#tiles").inner_text()
    assert "so far" in page.locator("#compiles tbody").inner_text()


def test_ranks_have_a_lane_each(open_page: Open, tmp_path: Path) -> None:
    runs = [make_run_of_variants(3) for _ in range(2)]
    for rank, run in enumerate(runs):
        run.header |= {"rank": rank, "began": 100.0 + 2 * rank}
    path = tmp_path / "ranks.html"
    path.write_text(render(merged(runs)))
    page = open_page(path)
    names = page.evaluate("lanes.map((lane) => lane.name)")
    assert names == ["rank 0, Python", "rank 0, runs", "rank 1, Python", "rank 1, runs", "compiler"]
    waits = "segments.filter((segment) => segment.wait).map((one) => one.from)"
    assert page.evaluate(f"[lanes[0].{waits}, lanes[2].{waits}]") == [[30.0], [32.0]]
    option = "echarts.getInstanceByDom(document.getElementById('memory-chart')).getOption()"
    assert page.evaluate(f"{option}.series.filter((line) => line.name.endsWith('process')).length") == 2


def test_memory_of_tensors_has_an_axis_of_its_own(look_at: Open, many: Path) -> None:
    page = look_at(many)
    option = "echarts.getInstanceByDom(document.getElementById('memory-chart')).getOption()"
    assert page.evaluate(f"{option}.yAxis.map((axis) => axis.position)") == ["left", "right"]
    assert page.evaluate(f"{option}.series.map((line) => line.yAxisIndex)") == [0, 1]
    process, tensors = page.evaluate(f"{option}.yAxis.map((axis) => axis.max)")
    assert tensors < process / 10


def test_a_column_of_times_has_one_unit(look_at: Open, many: Path) -> None:
    page = look_at(many)
    for section, column in (("misses", 2), ("graphs", 6), ("graphs", 7)):
        cells = page.locator(f"#{section} tbody tr td:nth-child({column})").all_inner_texts()
        assert len({cell.rpartition(" ")[2] for cell in cells if cell[0].isdigit()}) == 1, cells


@pytest.mark.parametrize("width", [1280, 1920])
def test_nothing_is_wider_than_the_window(open_page: Open, many: Path, width: int) -> None:
    page = open_page(many)
    page.set_viewport_size({"width": width, "height": 1000})
    # charts follow the window's size a frame later
    page.wait_for_function(f"document.documentElement.scrollWidth <= {width}", timeout=10_000)


def test_light_and_dark(open_page: Open, small: Path) -> None:
    page = open_page(small)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) != before
    assert page.locator("#steps-chart canvas").count() == 1


@pytest.mark.parametrize("kind", ["empty", "recorded"])
def test_pages_of_little(open_page: Open, tmp_path: Path, kind: str) -> None:
    if kind == "recorded":
        torch.ones(2).to("lazy").mul_(2)
        lazy_backend.mark_step(wait=True)
        page = open_page(lazy_backend.report(tmp_path / "page.html"))
        assert page.locator("#tiles").inner_text().count("1 step") == 1
    else:
        (tmp_path / "page.html").write_text(render(Run()))
        page = open_page(tmp_path / "page.html")
        assert "Nothing was recorded" in page.locator("#findings").inner_text()
        assert page.locator(".empty").count() >= 7
