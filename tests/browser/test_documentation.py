"""The pages of the documentation in Chromium: what they show is not cut off at the edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="the documentation is not built without `pip install '.[docs]'`")

# Elements that are wider inside than they are shown, and can be seen.
CLIPPED = """[...document.querySelectorAll('.md-content pre code, .md-content img')]
    .filter((one) => one.offsetParent && one.scrollWidth > one.clientWidth + 1)
    .map((one) => one.textContent.trim().slice(0, 80))"""


WIDTHS = 1280, 1920


@pytest.fixture(scope="module")
def clipped(browser: Any, site: Path) -> dict[int, dict[str, list[str]]]:
    """What is cut off at each width of the window, by page. Most of the time goes into loading pages: each once."""
    context = browser.new_context()
    page = context.new_page()
    found: dict[int, dict[str, list[str]]] = {width: {} for width in WIDTHS}
    for file in sorted(site.glob("*.html")):
        page.set_viewport_size({"width": WIDTHS[0], "height": 1000})
        page.goto(file.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 1000})
            found[width][file.name] = page.evaluate(CLIPPED)
    context.close()
    return found


@pytest.mark.scenario
@pytest.mark.parametrize("width", WIDTHS)
def test_code_is_shown_whole(clipped: dict[int, dict[str, list[str]]], width: int) -> None:
    assert clipped[width]
    assert {name: found for name, found in clipped[width].items() if found} == {}


def test_the_start_page_has_a_picture(browser: Any, site: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    picture = page.locator(".md-content img").first
    assert picture.evaluate("(image) => image.complete && image.naturalWidth > 0")
    assert picture.bounding_box()["y"] < 1000  # seen without scrolling
    context.close()


def test_a_long_signature_is_broken_into_lines(browser: Any, site: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.goto((site / "api.html").as_uri())
    signatures = page.locator(".doc-signature code").all_inner_texts()
    context.close()
    assert any(text.count("\n") > 3 for text in signatures)
    assert max(len(line) for text in signatures for line in text.splitlines()) <= 100
