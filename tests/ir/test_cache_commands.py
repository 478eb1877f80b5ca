"""`python -m lazy_backend.cache`: the disk cache of compiled graphs from a shell."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lazy_backend.archives import commands as command
from lazy_backend.archives.graph_names import describe_graph
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache
from lazy_backend.lowering.artefacts.artefact import pack
from lazy_backend.lowering.artefacts.environment import disk_key_parts
from lazy_backend.settings import config

LARGE = 1 << 30
GRAPH = """graph(%0: f32[16, 8]; 13 constants, 0 seeds) on cpu:
  %4: f32[32, 16] = aten.addmm(%2, %3, %1)
  %5: f32[32, 16] = aten.relu(%4)
  %6: f32[1], %7: f32[1] = aten.sum.dim_IntList(%5, [0], True)
  return %6
"""
DAY = 86400.0
ARTEFACT = pack({"kind": "native"}, [b"code"])


def key(graph: str, **parts: str) -> Key:
    return Key((("torch", "2.13"), *parts.items(), ("graph", graph)))


def artefact_key(graph: str) -> Key:
    """A key as compiled graphs have it here."""
    return Key((("graph", graph), *disk_key_parts()))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(place: Path) -> DiskCache:
    return DiskCache(place, LARGE)


def file_of(place: Path) -> Path:
    (file,) = place.glob("*.entry")
    return file


@pytest.fixture
def run(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit status, standard output and standard error of a command."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = command.main(["--dir", str(place), *arguments])
        except SystemExit as error:
            status = int(error.code or 0)
        return (status, *capsys.readouterr())

    return call


Run = Callable[..., tuple[int, str, str]]


def test_list(place: Path, run: Run) -> None:
    now = time.time()
    first, second = artefact_key(GRAPH), key("a", threads="2")
    DiskCache(place, LARGE, clock=lambda: now - 3 * DAY).put(second, bytes(5000))
    DiskCache(place, LARGE, clock=lambda: now).put(first, ARTEFACT)
    status, out, err = run("list")
    large, small = sorted(path.stat().st_size / 1024 for path in place.glob("*.entry"))[::-1]
    assert (status, err) == (0, "")
    assert out == (
        "hash              size    age   used  kind     graph\n"
        f"{first.hash_hex()[:12]}   {small:.1f} KiB     0s     0s  native   3 nodes: addmm relu sum\n"
        f"{second.hash_hex()[:12]}   {large:.1f} KiB     3d     3d  ?        ? (no compiled graph)\n"
        f"2 entries, {small + large:.1f} KiB, in {place}\n"
    )


def test_list_shows_shared_folders(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DiskCache(tmp_path / "shared", LARGE).put(artefact_key(GRAPH), ARTEFACT)
    with config.patch(cache_dir=str(place), cache_dirs=[tmp_path / "shared"]):
        assert command.main(["list"]) == 0
    own, *shared = capsys.readouterr().out.splitlines()
    assert own == f"0 entries, 0 B, in {place}"
    assert shared[-1].endswith(f"KiB, in {tmp_path / 'shared'} (only read)")
    assert not place.exists()


@pytest.mark.parametrize(
    ("graph", "parts", "text"),
    [
        (GRAPH, {}, "3 nodes: addmm relu sum"),
        ("  %1: f32[2]{1,2} = aten.t(%0)\n", {}, "1 nodes: t"),
        (
            GRAPH * 3,
            {"sizes": "{}", "device": "cuda:0"},
            "9 nodes: addmm relu sum addmm … sum, for many sizes, on cuda:0",
        ),
        ("", {}, "?"),
    ],
)
def test_a_graph_is_named_by_its_operators(graph: str, parts: dict[str, str], text: str) -> None:
    assert describe_graph(key(graph, **parts)) == text


def test_list_json(place: Path, run: Run) -> None:
    DiskCache(place, LARGE, clock=lambda: 1.7e9).put(key("a"), b"payload")
    (entry,) = DiskCache(place, LARGE)
    assert json.loads(run("list", "--json")[1]) == [
        {
            "hash": entry.hash,
            "size": entry.size,
            "payload_size": 7,
            "created": 1.7e9,
            "last_used": 1.7e9,
            "graph": "?",
            "misfit": "no compiled graph",
            "parts": {"torch": "2.13", "graph": "a"},
            "part_hashes": key("a").part_hashes(),
        }
    ]


def test_show(cache: DiskCache, run: Run) -> None:
    cache.put(key("%0 = mm(%1)\nreturn %0"), b"payload")
    status, out, _ = run("show", key("%0 = mm(%1)\nreturn %0").hash_hex()[:5].upper())
    assert status == 0
    assert out.endswith("torch: 2.13\ngraph:\n%0 = mm(%1)\nreturn %0\n")


def test_show_says_which_there_are(cache: DiskCache, place: Path, run: Run) -> None:
    cache.put(key("a"), b"payload")
    cache.put(key("b"), b"payload")
    status, _, err = run("show", "")
    assert status == 1
    assert err.startswith(f"2 entries, not one, with a hash that starts with ''\n  in {place}\n")
    assert key("a").hash_hex() in err
    assert run("show", "xyz")[2] == f"no entry with a hash that starts with 'xyz'\n  in {place}\n"


def test_prune(place: Path, run: Run) -> None:
    now = time.time()
    for days in range(5):
        DiskCache(place, LARGE, clock=itertools.repeat(now - days * DAY).__next__).put(key(str(days)), bytes(1000))
    assert run("prune", "--older-than", "84h")[1].startswith("removed 1 entry, 1.1 KiB; left 4.4 KiB, in ")
    assert run("prune", "--max-bytes", "2.5k", "--older-than", "30d")[1].startswith("removed 2 entries")
    assert run("prune", "--all")[1] == f"removed 2 entries, 2.2 KiB; left 0 B, in {place}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "say what goes: --max-bytes SIZE, --older-than AGE or --all"),
        (("--all", "--max-bytes", "1G"), "--all leaves nothing"),
        (("--max-bytes", "much"), "'much' is no size: expected bytes, or as in 500M or 1G"),
        (("--older-than", "30"), "'30' is no age"),
    ],
)
def test_prune_says_what_is_wrong(run: Run, arguments: tuple[str, ...], text: str) -> None:
    status, _, err = run("prune", *arguments)
    assert status == 2
    assert text in err


def test_check(cache: DiskCache, place: Path, run: Run) -> None:
    cache.put(key("a"), b"payload")
    assert run("check") == (0, f"0 broken, 1 entry readable, in {place}\n", "")
    file_of(place).write_bytes(file_of(place).read_bytes()[:-1])
    status, out, _ = run("check")
    assert status == 1
    assert out.startswith(f"{key('a').hash_hex()}: ")
    assert out.endswith(f"\n1 broken, 0 entries readable, in {place}\n")
    assert file_of(place).exists()
    assert run("check", "--remove")[0] == 1
    assert run("check")[0] == 0
    assert list(place.glob("*.entry")) == []


def test_export_and_load(cache: DiskCache, tmp_path: Path, run: Run) -> None:
    file, other = tmp_path / "graphs.lazycache", tmp_path / "other"
    cache.put(artefact_key(GRAPH), ARTEFACT)
    cache.put(key("a"), b"of something else")
    status, out, err = run("export", str(file))
    assert (status, err) == (0, "")
    assert out.startswith(f"{file}: 1 graph, ")
    assert out.endswith("\n  1 skipped: no compiled graph\n")
    status, out, err = run("list", str(file))
    assert out.splitlines()[1].endswith("KiB  3 nodes: addmm relu sum")
    assert run("check", str(file)) == (0, f"0 broken, 1 entry readable, in {file}\n", "")
    assert run("--dir", str(other), "load", str(file)) == (0, f"{file}: 1 graph, in {other}\n", "")
    known = f"{file}: 1 graph, 1 of them known before, in {other}\n"
    assert run("--dir", str(other), "load", str(file)) == (0, known, "")
    assert DiskCache(other, LARGE).get(artefact_key(GRAPH)) == ARTEFACT


def test_export_all_takes_what_does_not_fit_here(cache: DiskCache, tmp_path: Path, run: Run) -> None:
    cache.put(key("a"), b"payload")
    assert run("export", str(tmp_path / "file"))[0] == 1
    assert run("export", "--all", str(tmp_path / "file"))[0] == 0
    status, out, _ = run("load", str(tmp_path / "file"))
    assert status == 1
    assert out.splitlines()[:2] == [f"{tmp_path / 'file'}: 0 graphs", "  1 skipped: no compiled graph"]
    assert out.splitlines()[2].startswith("  the file was made on ")


def test_check_of_a_file_tells_what_is_damaged(cache: DiskCache, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "file"
    for graph in ("a", "b", "c"):
        cache.put(artefact_key(graph), ARTEFACT)
    run("export", str(file))
    whole = file.read_bytes()
    spoiled = whole.find(b"code") + 1
    file.write_bytes(whole[:spoiled] + b"x" + whole[spoiled + 1 : -10])
    status, out, _ = run("check", str(file))
    assert status == 1
    first, second, last = out.splitlines()
    assert first.endswith(": payload does not match its checksum")
    assert second.startswith("after 3 entries: damaged or cut off: ")
    assert last == f"2 broken, 2 entries readable, in {file}"
    assert run("check", "--remove", str(file))[0] == 2


def test_load_says_if_nothing_was_kept(cache: DiskCache, tmp_path: Path, run: Run) -> None:
    cache.put(artefact_key(GRAPH), ARTEFACT)
    run("export", str(tmp_path / "file"))
    with config.patch(cache_bytes=10):
        status, out, _ = run("--dir", str(tmp_path / "small"), "load", str(tmp_path / "file"))
    assert status == 1
    assert "1 not kept, for this process only: " in out
    assert "do not fit into a cache of 10" in out


@pytest.mark.parametrize("name", ["missing", "folder", "text"])
def test_a_file_that_cannot_be_used_is_told(tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no archive")
    for subcommand in ("list", "check", "load"):
        status, out, err = run(subcommand, str(tmp_path / name))
        assert status == (1 if name == "text" else 2)
        assert str(tmp_path / name) in out + err


@pytest.mark.parametrize("subcommand", ["list", "prune --all", "prune --max-bytes 0", "check"])
@pytest.mark.parametrize("exists", [False, True])
def test_without_entries(place: Path, run: Run, subcommand: str, exists: bool) -> None:
    if exists:
        place.mkdir(mode=0o700)
    status, out, err = run(*subcommand.split())
    assert (status, err) == (0, "")
    assert out.startswith(("0 ", "removed 0 "))
    assert place.exists() == exists


def test_says_why_a_cache_is_refused(place: Path, run: Run) -> None:
    place.mkdir()
    place.chmod(0o777)
    status, _, err = run("list")
    assert (status, err.splitlines()[-1]) == (2, f"  to mend it: chmod 700 {place}")


def test_looks_where_the_package_does(place: Path) -> None:
    DiskCache(place, LARGE).put(key("a"), b"payload")
    file_of(place).write_bytes(b"broken")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "lazy_backend.cache", "check"],
        env={**os.environ, "LAZY_BACKEND_CACHE_DIR": str(place)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith(f"1 broken, 0 entries readable, in {place}\n")
