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


@pytest.mark.parametrize("width", [1280, 1920])
def test_code_is_shown_whole(browser: Any, site: Path, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 1000})
    page = context.new_page()
    clipped = {}
    for file in sorted(site.glob("*.html")):
        page.goto(file.as_uri())
        clipped[file.name] = page.evaluate(CLIPPED)
    context.close()
    assert {name: found for name, found in clipped.items() if found} == {}


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
