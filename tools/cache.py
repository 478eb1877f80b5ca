"""Look into the disk cache of compiled graphs, and make it smaller.

In: a directory, by default the one that lazy_backend uses. Out: text, or JSON.
Exit status: 0; 1 if `verify` found broken entries or `show` found nothing; 2 if the cache or the command was refused.

    python tools/cache.py list
    python tools/cache.py show 3fa9
    python tools/cache.py prune --max-bytes 1G --older-than 30d
    python tools/cache.py verify --remove
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from lazy_backend.caching.disk import DiskCache, Entry, Removed
from lazy_backend.caching.folder import VARIABLE, CacheRefused, default_directory

SHORT = 40  # characters of a part that still go on a line
HASH_DIGITS = 12

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (CacheRefused, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # `list | head`: nobody reads on. Python would complain once more when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(error, file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description="The disk cache of compiled graphs.")
    top.add_argument(
        "--dir",
        type=Path,
        help=f"the cache's directory (default: ${VARIABLE}, else that in the user's cache directory)",
    )
    commands = top.add_subparsers(required=True, metavar="list|show|prune|verify")

    command = commands.add_parser("list", help="all entries, the most recently used first")
    command.add_argument("--json", action="store_true", help="as JSON, with a hash of every part of the key")
    command.set_defaults(run=list_entries)

    command = commands.add_parser("show", help="an entry's whole key, with the text of its graph")
    command.add_argument("hash", help="the first digits of an entry's hash")
    command.set_defaults(run=show)

    command = commands.add_parser("prune", help="remove entries, the least recently used first")
    command.add_argument("--max-bytes", type=parse_bytes, metavar="SIZE", help="what may stay, as in 500M or 1G")
    command.add_argument(
        "--older-than", type=parse_age, metavar="AGE", help="what was not used for AGE, as in 12h or 30d"
    )
    command.add_argument("--all", action="store_true", help="everything")
    command.set_defaults(run=prune, error=command.error)

    command = commands.add_parser("verify", help="read every entry from end to end")
    command.add_argument("--remove", action="store_true", help="remove the broken ones")
    command.set_defaults(run=verify)
    return top


# ----- one function per command


def list_entries(arguments: argparse.Namespace) -> int:
    cache = open_cache(arguments.dir, readonly=True)
    entries = list(cache)
    if arguments.json:
        print(json.dumps([as_json(entry) for entry in entries], indent=2))
        return 0
    now = time.time()
    if entries:
        print(f"{'hash':{HASH_DIGITS}} {'size':>9} {'age':>6} {'used':>6}  key")
    for entry in entries:
        print(line(entry, now))
    print(f"{count(len(entries))}, {bytes_text(cache.total_bytes())}, in {cache.directory}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    cache = open_cache(arguments.dir, readonly=True)
    found = [entry for entry in cache if entry.hash.startswith(arguments.hash.lower())]
    if len(found) != 1:
        what = "no entry" if not found else f"{count(len(found))}, not one,"
        print(f"{what} with a hash that starts with {arguments.hash!r}\n  in {cache.directory}", file=sys.stderr)
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


def prune(arguments: argparse.Namespace) -> int:
    limits = (arguments.max_bytes, arguments.older_than)
    if not arguments.all and limits == (None, None):
        arguments.error("say what goes: --max-bytes SIZE, --older-than AGE or --all")
    if arguments.all and limits != (None, None):
        arguments.error("--all leaves nothing that --max-bytes or --older-than could apply to")
    cache = open_cache(arguments.dir)
    removed: Removed = cache.clear() if arguments.all else cache.prune(*limits)
    left = bytes_text(cache.total_bytes())
    print(f"removed {count(removed.entries)}, {bytes_text(removed.bytes)}; left {left}, in {cache.directory}")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    cache = open_cache(arguments.dir)
    broken = cache.verify(remove=arguments.remove)
    for one in broken:
        print(f"{one.hash}: {one.reason}")
    what = "removed" if arguments.remove and broken else "broken"
    print(f"{len(broken)} {what}, {count(sum(1 for _ in cache))} readable, in {cache.directory}")
    return 1 if broken else 0


# ----- inside


def open_cache(directory: Path | None, readonly: bool = False) -> DiskCache:
    """The cache to look at. A directory that is missing is not made."""
    if directory is None:
        configured = os.environ.get(VARIABLE)
        directory = Path(configured) if configured else default_directory()
    return DiskCache(directory, max_bytes=0, readonly=readonly or not directory.exists())


def line(entry: Entry, now: float) -> str:
    parts = " ".join(f"{name}={text}" for name, text in short_parts(entry).items())
    used, age = age_text(now - entry.last_used), age_text(now - entry.created)
    return f"{entry.hash[:HASH_DIGITS]} {bytes_text(entry.size):>9} {age:>6} {used:>6}  {parts}"


def as_json(entry: Entry) -> dict[str, object]:
    return {
        "hash": entry.hash,
        "size": entry.size,
        "payload_size": entry.payload_size,
        "created": entry.created,
        "last_used": entry.last_used,
        "parts": short_parts(entry),
        "part_hashes": entry.key.part_hashes(),
    }


def short_parts(entry: Entry) -> dict[str, str]:
    return {name: text for name, text in entry.key.parts if len(text) <= SHORT and "\n" not in text}


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


def bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age_text(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        # two of a unit at least: 90 minutes say more than one hour
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def time_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def count(entries: int) -> str:
    return f"{entries} entr{'y' if entries == 1 else 'ies'}"


if __name__ == "__main__":
    sys.exit(main())
