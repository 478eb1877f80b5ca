"""What `export` and `load` did, as data and as text to print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def count(number: int, what: str = "graph") -> str:
    """`1 graph`, `2 graphs`, `2 entries`."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _skipped(skipped: Mapping[str, int]) -> list[str]:
    return [f"  {number} skipped: {reason}" for reason, number in skipped.items()]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What `lazy_backend.cache.export` wrote."""

    path: str
    graphs: int
    bytes: int  # of the file
    skipped: Mapping[str, int] = field(default_factory=dict)  # numbers of graphs, by reason
    unfinished: int = 0  # graphs of this process that are still being compiled, and so are not in the file

    def __str__(self) -> str:
        lines = [f"{self.path}: {count(self.graphs)}, {bytes_text(self.bytes)}", *_skipped(self.skipped)]
        if self.unfinished:
            wait = "call lazy_backend.wait_for_compiles() first"
            lines.append(f"  {count(self.unfinished)} still being compiled, and so not in the file: {wait}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `lazy_backend.cache.load` found in a file."""

    path: str
    graphs: int  # that this process can use from now on
    known: int = 0  # of these, that the cache had before
    held: int = 0  # of these, that no folder could keep: they last as long as this process
    skipped: Mapping[str, int] = field(default_factory=dict)  # numbers of graphs, by reason
    kept_in: str | None = None  # the folder of the cache; None if there is none
    why_held: str | None = None
    # numbers of graphs by a setting with which they were made and which this process does not have now
    other_settings: Mapping[str, int] = field(default_factory=dict)
    made_on: str = ""  # the machine on which the file was made

    def __str__(self) -> str:
        lines = [f"{self.path}: {count(self.graphs)}" + (f", {self.known} of them known before" if self.known else "")]
        if self.graphs > self.held:
            lines[0] += f", in {self.kept_in}"
        if self.held:
            lines.append(f"  {self.held} not kept, for this process only: {self.why_held or 'there is no disk cache'}")
        lines += _skipped(self.skipped)
        if self.skipped and self.made_on:
            lines.append(f"  the file was made on {self.made_on}")
        lines += [
            f"  {number} found only once a setting is the same: {setting}"
            for setting, number in self.other_settings.items()
        ]
        return "\n".join(lines)
