"""What the pages of the documentation take from the README, and a check of the built site.

In: the pages of docs/, as MkDocs reads them. Out: the same with the sections of the README that they name
(`<!-- README: Quickstart -->`), the modules that mkdocstrings looks at, and an error for a page that would load
something from elsewhere.
"""

from __future__ import annotations

import html.parser
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parents[2]

_copied = tempfile.TemporaryDirectory(prefix="lazy_backend_docs_")  # removed when the build ends


@event_priority(100)  # before mkdocstrings reads its own settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show mkdocstrings, which knows no package-dir, the folders as they are installed."""
    package = Path(_copied.name) / "lazy_backend"
    if not package.exists():
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "lazy_backend", package, ignore=skip)
        for layer in ("lowering", "cache"):
            shutil.copytree(ROOT / layer, package / layer, ignore=skip)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_copied.name]
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put sections of the README where a page names them."""
    return re.sub(r"<!-- README: (.+?) -->", lambda match: readme_section(match[1]), markdown)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Let long names in tables be broken behind a dot, or a table of them would be wider than the page."""
    return re.sub(r"<td.*?</td>", lambda cell: re.sub(r"<code>.*?</code>", _breakable, cell[0]), html, flags=re.S)


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)\.(?=\w)", ".<wbr>", code[0])


# ----- the README


def readme_section(title: str) -> str:
    """The text under a heading of the README, up to the next heading."""
    # its links are seen from the root of the repository
    found = sections((ROOT / "README.md").read_text().replace("](docs/", "]("))
    if title not in found:
        raise PluginError(f"README.md has no section {title!r}\n  it has: {', '.join(found)}")
    return found[title]


def sections(markdown: str) -> dict[str, str]:
    """The text under each heading."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if line.startswith("#") and not is_code:
            lines = found[line.lstrip("# ")] = []
        else:
            lines.append(line)
    return {title: "\n".join(lines).strip() for title, lines in found.items()}


# ----- the built site


class Addresses(html.parser.HTMLParser):
    """What a page loads by itself when it is opened (links that are followed by hand are none), and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loads.append(values.get("src") or "")
        if tag == "link" and values.get("rel") != "canonical":
            self.loads.append(values.get("href") or "")
        self.anchors.add(values.get("id") or "")


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse pages that load something from elsewhere."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        addresses = Addresses()
        addresses.feed(page.read_text())
        elsewhere = [address for address in addresses.loads if re.match(r"(https?:)?//", address)]
        if elsewhere:
            raise PluginError(
                f"{page.name} loads {', '.join(elsewhere)}: the documentation must work without a network"
            )
