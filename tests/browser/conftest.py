"""A page in a real browser. Without Chromium or Playwright these tests are skipped, and say so."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import make_run, make_run_of_variants

import lazy_backend.diagnostics.page

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")

CHROMIUM = os.environ.get("LAZY_BACKEND_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# Opens a file and gives the page when it is drawn.
Open = Callable[[Path], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHROMIUM is None:
        here = str(Path(__file__).parent)
        for item in items:
            if str(item.path).startswith(here):
                item.add_marker(pytest.mark.skip(reason="needs Chromium: apt-get install chromium"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for one file: while Playwright runs, so does its event loop, and no other can in the thread."""
    with playwright.sync_playwright() as driver:
        # without a sandbox of its own: it runs as root in containers, and opens only what the tests wrote
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()
    assert asyncio._get_running_loop() is None


class _Pages:
    """Pages of one visitor, and what they wrote to the console or asked for beside their files."""

    def __init__(self, browser: Any) -> None:
        self._context = browser.new_context(viewport={"width": 1440, "height": 1000})
        self.faults: list[str] = []

    def open(self, path: Path) -> Any:
        page, faults = self._context.new_page(), self.faults
        page.on(
            "console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached")
        while path.as_uri() in faults:  # the page itself
            faults.remove(path.as_uri())
        return page

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Fails at the end of the test if the page wrote to the console or asked for anything but its file."""
    pages = _Pages(browser)
    yield pages.open
    pages.close()
    assert pages.faults == []


@pytest.fixture(scope="module")
def _opened(browser: Any) -> Iterator[tuple[_Pages, Open]]:
    pages = _Pages(browser)
    yield pages, functools.cache(pages.open)
    pages.close()


@pytest.fixture
def look_at(_opened: tuple[_Pages, Open]) -> Iterator[Open]:
    """The same for tests that change nothing on a page: it is opened once for all of them, as that takes seconds."""
    pages, open_once = _opened
    yield open_once
    assert pages.faults == []


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 10,000 steps of a program with 5,000 calls."""
    path = tmp_path_factory.mktemp("pages") / "big.html"
    path.write_text(lazy_backend.diagnostics.page.render(make_run(10_000, 5_000)))
    return path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 900 steps of a program with 60 calls."""
    path = tmp_path_factory.mktemp("pages") / "small.html"
    path.write_text(lazy_backend.diagnostics.page.render(make_run(900, 60)))
    return path


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with 30 programs that differ in a number, a wait, and a compile that is not over."""
    path = tmp_path_factory.mktemp("pages") / "many.html"
    path.write_text(lazy_backend.diagnostics.page.render(make_run_of_variants(30)))
    return path
