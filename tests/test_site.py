"""The documentation as it is built: strictly, whole, and without a network."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lazy_backend
from lazy_backend.settings import FLAGS

pytest.importorskip("mkdocs", reason="the documentation is not built without `pip install '.[docs]'`")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from mkdocs.exceptions import PluginError  # noqa: E402
from pages import docs_hooks  # noqa: E402

MODULES = ("cache", "computation", "debug", "ir_cache", "metrics")


def anchors(page: Path) -> set[str]:
    found = docs_hooks.Addresses()
    found.feed(page.read_text())
    return found.anchors


def test_every_public_name_is_described(site: Path) -> None:
    described = anchors(site / "api.html")
    # errors, and functions whose module has their name, are found under their full names
    places = ("", "errors.", "diagnostics.page.", "serve.")
    missing = {n for n in lazy_backend.__all__ if not any(f"lazy_backend.{place}{n}" in described for place in places)}
    assert missing <= {"config", "sync", *MODULES}  # told in words there


@pytest.mark.parametrize("name", MODULES)
def test_every_function_of_a_public_module_is_described(site: Path, name: str) -> None:
    described = anchors(site / "api.html")
    module = getattr(lazy_backend, name)
    own = {n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    names = set(getattr(module, "__all__", {n for n in own - {"check_lazy"} if n[0] != "_"}))
    assert names
    places = {n: getattr(getattr(module, n), "__module__", module.__name__) for n in names}  # some are made elsewhere
    assert not {n for n, place in places.items() if not {f"{place}.{n}", f"{module.__name__}.{n}"} & described}


def test_every_setting_is_described(site: Path) -> None:
    assert FLAGS.keys() <= anchors(site / "settings.html")


def test_every_page_is_built(site: Path) -> None:
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if not (site / f"{page.stem}.html").exists()]
    assert not missing


def test_the_start_page_has_the_quickstart_of_the_readme(site: Path) -> None:
    assert "parameters stay the same objects" in (site / "index.html").read_text()


def test_every_error_and_warning_is_in_the_troubleshooting_page() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    ours = {name for name, value in vars(lazy_backend.errors).items() if isinstance(value, type)}
    assert not {name for name in ours - {"LazyBackendError", "LazyBackendWarning"} if name not in page}


def test_every_error_and_warning_names_a_heading_of_the_troubleshooting_page(site: Path) -> None:
    found = anchors(site / "troubleshooting.html")
    classes = [value for value in vars(lazy_backend.errors).values() if isinstance(value, type)]
    assert {one.__name__: one.heading for one in classes if one.heading not in found} == {}


@pytest.mark.parametrize("source", sorted((ROOT / "docs" / "images").glob("*.dot")), ids=lambda source: source.stem)
def test_a_picture_says_what_its_source_says(source: Path) -> None:
    labels = re.findall(r'label="([^"]*)"', source.read_text())
    expected = {" ".join(line.split()) for label in labels for line in re.split(r"\\[nl]", label)} - {""}
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", source.with_suffix(".svg").read_text())
    assert {" ".join(html.unescape(text).split()) for text in drawn} >= expected, "make pictures"


def test_a_section_that_the_readme_lacks_is_refused() -> None:
    with pytest.raises(PluginError, match="no section 'Quickest start'"):
        docs_hooks.on_page_markdown("<!-- README: Quickest start -->")


def test_a_comment_in_code_is_no_heading() -> None:
    text = "# Title\n\n```sh\n# no heading\n```\nmore\n\n## Next\n"
    assert docs_hooks.sections(text) == {"Title": "```sh\n# no heading\n```\nmore", "Next": ""}


def test_a_long_name_in_a_table_can_be_broken_behind_a_dot() -> None:
    cell = '<td><code>torch._lazy.mark_step</code>, <a href="a.b.html">1.5</a></td>'
    broken = '<td><code>torch.<wbr>_lazy.<wbr>mark_step</code>, <a href="a.b.html">1.5</a></td>'
    assert docs_hooks.on_page_content(f"<code>a.b</code>{cell}") == f"<code>a.b</code>{broken}"


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://example.org/mermaid.js"></script>',
        '<link rel="stylesheet" href="//example.org/font.css">',
        '<img src="http://example.org/picture.png">',
    ],
)
def test_a_page_that_loads_from_elsewhere_is_refused(tmp_path: Path, tag: str) -> None:
    (tmp_path / "page.html").write_text(f'<link rel="canonical" href="https://example.org"><a href="//x">x</a>{tag}')
    with pytest.raises(PluginError, match=r"page.html loads .*example.org"):
        docs_hooks.on_post_build(SimpleNamespace(site_dir=tmp_path))
