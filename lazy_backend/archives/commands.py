"""Look into the disk cache of compiled graphs, make it smaller, and take it elsewhere.

Exit status: 0; 1 if something is damaged, missing, or could not be kept; 2 if the cache or the command was refused.

    python -m lazy_backend.cache list
    python -m lazy_backend.cache show 3fa9
    python -m lazy_backend.cache repro 3fa9 > fault.py
    python -m lazy_backend.cache check --remove
    python -m lazy_backend.cache prune --max-bytes 1G --older-than 30d
    python -m lazy_backend.cache export graphs.lazycache
    python -m lazy_backend.cache load graphs.lazycache
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from lazy_backend.archives.graph_names import describe_graph
from lazy_backend.archives.transfer import export, load
from lazy_backend.cache.archive import Archive, BrokenArchive, Packed
from lazy_backend.cache.disk import DiskCache, Entry, Removed
from lazy_backend.cache.entry import BrokenEntry
from lazy_backend.cache.folder import VARIABLE, CacheRefused, default_directory
from lazy_backend.cache.reports import bytes_text, count
from lazy_backend.errors import CacheError, CacheWarning
from lazy_backend.lowering.artefacts.artefact import header_bytes, kind_of, text_in
from lazy_backend.lowering.artefacts.environment import misfit
from lazy_backend.settings import config

SHORT = 40  # characters of a part that still go on a line
HASH_DIGITS = 12
# Bytes of a payload that are read to see the artefact's kind: its header is rarely larger.
START = 1 << 20

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    settings: dict[str, Any] = {"cache": True, "cache_readonly": False}
    if arguments.dir is not None:
        settings |= {"cache_dir": str(arguments.dir), "cache_dirs": ()}
    try:
        # what a warning would say is printed
        with config.patch(**settings), warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            return int(arguments.run(arguments))
    except BrokenArchive as error:
        print(f"{arguments.file}: {error}", file=sys.stderr)
        return 1
    except (CacheRefused, CacheError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # `list | head`: nobody reads on. Python would complain once more when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(error, file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m lazy_backend.cache", description="The disk cache of compiled graphs.")
    top.add_argument(
        "--dir",
        type=Path,
        help=f"the cache's directory (default: ${VARIABLE}, else that in the user's cache directory)",
    )
    commands = top.add_subparsers(required=True, metavar="list|show|repro|check|prune|export|load")

    command = commands.add_parser("list", help="all graphs, the most recently used first; or those of a file")
    command.add_argument("file", type=Path, nargs="?", help="a file that was exported")
    command.add_argument("--json", action="store_true", help="as JSON, with a hash of every part of the key")
    command.set_defaults(run=list_entries)

    command = commands.add_parser("show", help="a graph's whole key, with its text")
    command.add_argument("hash", help="the first digits of its hash")
    command.set_defaults(run=show)

    command = commands.add_parser(
        "repro", help="a program that shows how a graph was compiled wrong; without hash, which were"
    )
    command.add_argument("hash", nargs="?", help="the first digits of its hash")
    command.set_defaults(run=repro)

    command = commands.add_parser("check", help="read all graphs from end to end, in the cache or in a file")
    command.add_argument("file", type=Path, nargs="?", help="a file that was exported")
    command.add_argument("--remove", action="store_true", help="remove the broken ones from the cache")
    command.set_defaults(run=check, error=command.error)

    command = commands.add_parser("prune", help="remove graphs, the least recently used first")
    command.add_argument("--max-bytes", type=parse_bytes, metavar="SIZE", help="what may stay, as in 500M or 1G")
    command.add_argument(
        "--older-than", type=parse_age, metavar="AGE", help="what was not used for AGE, as in 12h or 30d"
    )
    command.add_argument("--all", action="store_true", help="everything")
    command.set_defaults(run=prune, error=command.error)

    command = commands.add_parser("export", help="write the graphs to one file, for `load` on other machines")
    command.add_argument("file", type=Path)
    command.add_argument("--all", action="store_true", help="also those made for other versions or processors")
    command.set_defaults(run=export_file)

    command = commands.add_parser("load", help="take the graphs of such a file into the cache")
    command.add_argument("file", type=Path, help="only from people whose code you would run: graphs are code")
    command.set_defaults(run=load_file)
    return top


# ----- one function per command


def list_entries(arguments: argparse.Namespace) -> int:
    if arguments.file is not None:
        return list_file(arguments.file)
    caches = [open_cache(readonly=True), *shared_caches()]
    if arguments.json:
        print(json.dumps([as_json(entry) for cache in caches for entry in cache], indent=2))
        return 0
    now = time.time()
    for cache in caches:
        entries = list(cache)
        if entries:
            print(f"{'hash':{HASH_DIGITS}} {'size':>9} {'age':>6} {'used':>6}  {'kind':7}  graph")
        for entry in entries:
            print(line(cache, entry, now))
        where = f"{cache.directory}{'' if cache is caches[0] else ' (only read)'}"
        print(f"{count(len(entries), 'entry')}, {bytes_text(cache.total_bytes())}, in {where}")
    return 0


def list_file(path: Path) -> int:
    archive = Archive(path.expanduser())
    number = 0
    for number, packed in enumerate(archive, 1):
        if number == 1:
            print(f"{'hash':{HASH_DIGITS}} {'size':>9}  graph")
        print(f"{packed.key.hash_hex()[:HASH_DIGITS]} {bytes_text(packed.size):>9}  {graph_text(packed)}")
    made = f", made on {archive.description['machine']}" if "machine" in archive.description else ""
    print(f"{count(number, 'entry')}, {bytes_text(archive.num_bytes)}, in {path}{made}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    caches = [open_cache(readonly=True), *shared_caches()]
    found = [entry for cache in caches for entry in cache if entry.hash.startswith(arguments.hash.lower())]
    if len(found) != 1:
        what = "no entry" if not found else f"{count(len(found), 'entry')}, not one,"
        print(f"{what} with a hash that starts with {arguments.hash!r}\n  in {caches[0].directory}", file=sys.stderr)
        for entry in found:
            print(f"  {entry.hash}", file=sys.stderr)
        return 1
    entry = found[0]
    now = time.time()
    print(f"hash: {entry.hash}\nsize: {bytes_text(entry.size)}, of which payload {bytes_text(entry.payload_size)}")
    print(f"created: {time_text(entry.created)}, {age_text(now - entry.created)} ago")
    print(f"last used: {time_text(entry.last_used)}, {age_text(now - entry.last_used)} ago")
    for name, text in entry.key.parts:
        print(f"{name}:\n{text}" if "\n" in text or len(text) > 2 * SHORT else f"{name}: {text}")
    return 0


def repro(arguments: argparse.Namespace) -> int:
    number = 0
    for cache in [open_cache(readonly=True), *shared_caches()]:
        for entry in cache:
            header = header_in(cache, entry)
            script, why_not = text_in(header, "script"), text_in(header, "no_script")
            if not (script or why_not) or not entry.hash.startswith((arguments.hash or "").lower()):
                continue
            number += 1
            refusal = f"{entry.hash[:HASH_DIGITS]}  {text_in(header, 'refused')}"
            print(refusal if not arguments.hash else script or f"# {refusal}\n# no program shows it: {why_not}")
    if not number:
        print("no such graph was refused", file=sys.stderr)
    return 0 if number else 1


def header_in(cache: DiskCache, entry: Entry) -> bytes:
    """The header of an artefact, and nothing that matters of other entries."""
    start = cache.start_of_payload(entry.hash, START)
    return start if len(start) < START else cache.start_of_payload(entry.hash, header_bytes(start))


def check(arguments: argparse.Namespace) -> int:
    if arguments.file is not None:
        if arguments.remove:
            arguments.error("--remove is for the cache: export a file anew instead")
        return check_file(arguments.file)
    cache = open_cache()
    broken = cache.verify(remove=arguments.remove)
    for one in broken:
        print(f"{one.hash}: {one.reason}")
    what = "removed" if arguments.remove and broken else "broken"
    print(f"{len(broken)} {what}, {count(sum(1 for _ in cache), 'entry')} readable, in {cache.directory}")
    return 1 if broken else 0


def check_file(path: Path) -> int:
    archive = Archive(path.expanduser())
    readable, faults = 0, []
    try:
        for packed in archive:
            try:
                archive.read(packed)
                readable += 1
            except BrokenEntry as error:
                faults.append(f"{packed.key.hash_hex()}: {error}")
    except BrokenArchive as error:
        faults.append(f"after {count(readable + len(faults), 'entry')}: {error}")
    for fault in faults:
        print(fault)
    print(f"{len(faults)} broken, {count(readable, 'entry')} readable, in {path}")
    return 1 if faults else 0


def prune(arguments: argparse.Namespace) -> int:
    limits = (arguments.max_bytes, arguments.older_than)
    if not arguments.all and limits == (None, None):
        arguments.error("say what goes: --max-bytes SIZE, --older-than AGE or --all")
    if arguments.all and limits != (None, None):
        arguments.error("--all leaves nothing that --max-bytes or --older-than could apply to")
    cache = open_cache()
    removed: Removed = cache.clear() if arguments.all else cache.prune(*limits)
    left = bytes_text(cache.total_bytes())
    freed = f"removed {count(removed.entries, 'entry')}, {bytes_text(removed.bytes)}"
    print(f"{freed}; left {left}, in {cache.directory}")
    return 0


def export_file(arguments: argparse.Namespace) -> int:
    open_cache(readonly=True)  # raises what is wrong with it
    with config.patch(cache_readonly=True):
        report = export(arguments.file, "all" if arguments.all else "fitting")
    print(report)
    return 0 if report.graphs else 1


def load_file(arguments: argparse.Namespace) -> int:
    DiskCache(place_of_cache(), config.cache_bytes)  # raises what is wrong with it
    report = load(arguments.file)
    print(report)
    return 0 if report.graphs and not report.held else 1


# ----- inside


def place_of_cache() -> Path:
    return default_directory() if config.cache_dir is None else Path(config.cache_dir).expanduser()


def open_cache(readonly: bool = False) -> DiskCache:
    """The cache to look at. A directory that is missing is not made."""
    directory = place_of_cache()
    return DiskCache(directory, max_bytes=0, readonly=readonly or not directory.exists())


def shared_caches() -> list[DiskCache]:
    return [DiskCache(Path(name).expanduser(), 0, readonly=True, shared=True) for name in config.cache_dirs]


def line(cache: DiskCache, entry: Entry, now: float) -> str:
    used, age = age_text(now - entry.last_used), age_text(now - entry.created)
    kind = kind_of(header_in(cache, entry)) or "?"
    figures = f"{bytes_text(entry.size):>9} {age:>6} {used:>6}  {kind:7}"
    return f"{entry.hash[:HASH_DIGITS]} {figures}  {graph_text(entry)}"


def graph_text(entry: Entry | Packed) -> str:
    """The graph in a few words, and why it cannot be used here."""
    why_not = misfit(entry.key)
    return describe_graph(entry.key) + ("" if why_not is None else f" ({why_not})")


def as_json(entry: Entry) -> dict[str, object]:
    return {
        "hash": entry.hash,
        "size": entry.size,
        "payload_size": entry.payload_size,
        "created": entry.created,
        "last_used": entry.last_used,
        "graph": describe_graph(entry.key),
        "misfit": misfit(entry.key),
        "parts": {name: text for name, text in entry.key.parts if len(text) <= SHORT and "\n" not in text},
        "part_hashes": entry.key.part_hashes(),
    }


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text, flags=re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected bytes, or as in 500M or 1G")
    return int(float(match[1]) * _BYTES[match[2].upper()])


def parse_age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text, flags=re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: expected a number and s, m, h, d or w, as in 12h or 30d")
    return float(match[1]) * _SECONDS[match[2].lower()]


def age_text(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        # two of a unit at least: 90 minutes say more than one hour
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def time_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
