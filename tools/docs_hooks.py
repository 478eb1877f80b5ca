"""What the pages of the documentation take from the code and from the README, and a check of the built site.

In: the pages of docs/, as MkDocs reads them. Out: the same with the sections of the README that they name
(`<!-- README: Quickstart -->`), the table of ports (`<!-- ports -->`), the settings page, the modules that mkdocstrings
looks at, and an error for a page that would load something from elsewhere.
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
from mkdocs.structure.files import File, Files

from lazy_backend.ports.port import ports
from lazy_backend.settings import FLAGS, Flag

ROOT = Path(__file__).resolve().parent.parent

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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the settings page."""
    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put sections of the README, and the table of ports, where a page names them."""
    markdown = re.sub(r"<!-- README: (.+?) -->", lambda match: readme_section(match[1]), markdown)
    return markdown.replace("<!-- ports -->", ports_table())


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


# ----- settings

_INTRODUCTION = """# Settings

Made from `lazy_backend/settings.py`. Settings are attributes of `lazy_backend.config`; those with an environment
variable take their first value from it. An assignment is checked at once: a name that does not exist, or a bad value,
raises where it was written. `lazy_backend.config.help()` prints this list with the values of now, and
`with lazy_backend.config.patch(name=value):` sets some for a block.

A setting that is *part of the key* makes graphs new when it changes: what is compiled depends on it.
"""


def settings_page() -> str:
    """The page of all settings, in their order in the code."""
    return "\n\n".join([_INTRODUCTION, *(_setting(name, flag) for name, flag in FLAGS.items())]) + "\n"


def _setting(name: str, flag: Flag) -> str:
    facts = [f"Default `{flag.default!r}`"]
    if flag.env:
        facts.append(f"environment variable `{flag.env}`")
    if flag.in_key:
        facts.append("part of the key")
    return f"### {name}\n\n{flag.help}\n\n{', '.join(facts)}."


# ----- ports


def ports_table() -> str:
    """The table of all ports, in their order in the code."""
    rows = [f"| {port.name}{' (essential)' if port.essential else ''} | {port.without} |" for port in ports.values()]
    return "\n".join(["| port | without it |", "|---|---|", *rows])


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
