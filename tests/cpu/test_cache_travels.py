"""Compiled graphs that were exported: another machine, without a compiler, finds and runs them.

One process compiles, for all tests; what they load is its file and its bundle for torch.compiler.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import count

import lazy_backend
from lazy_backend import CacheError, CacheWarning, config, metrics
from lazy_backend.archives import transfer
from lazy_backend.cache import disk
from lazy_backend.cache.archive import Archive, ArchiveWriter, new_archive
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache
from lazy_backend.cache.entry import encode_key, make_head, split
from lazy_backend.execution import disk_cache
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.compilation.background import worker

LONG = 300.0
STEPS = 6

# A multilayer perceptron with AdamW. Prints nothing; `losses` and `plans` tell what happened after each step.
PROGRAM = """
import json, sys
import torch, lazy_backend
from torch import nn

def train(steps, after=lambda: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(32, 8).to("lazy"), torch.randn(32, 1).to("lazy")
    losses, plans = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        lazy_backend.mark_step()
        losses.append(loss.item())
        plans.append([state.plan for state in lazy_backend.computation.get_debug_states().values()])
        after()
    return losses, plans
"""

COMPILES = f"""{PROGRAM}
losses, _ = train({STEPS})
assert lazy_backend.wait_for_compiles({LONG})
report = lazy_backend.cache.export(sys.argv[1] + "/graphs.lazycache")
used = lazy_backend.cache.export(sys.argv[1] + "/used.lazycache", which="used")
bundle, info = torch.compiler.save_cache_artifacts()
open(sys.argv[1] + "/bundle", "wb").write(bundle)
in_bundle, compiles = len(info.lazy_backend_artifacts), lazy_backend.metrics.counter_value("Compile")
print(json.dumps([losses, report.graphs, used.graphs, in_bundle, compiles]))
"""

LOADS = f"""{PROGRAM}
import shutil, warnings
warnings.simplefilter("error")
assert shutil.which("c++") is None
report = lazy_backend.cache.load(sys.argv[1])
losses, plans = train({STEPS})
assert lazy_backend.wait_for_compiles(1.0)
print(json.dumps([str(report), losses, plans, lazy_backend.metrics.counters()]))
"""


def run_machine(code: str, argument: Path, home: Path, **variables: str) -> Any:
    """Run `code` as on a machine of its own: another home, and no cache of this one. Returns what it printed."""
    settings = ("LAZY_BACKEND_", "TORCHINDUCTOR_", "XDG_", "HOME", "CXX")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    home.mkdir(exist_ok=True)
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **variables}
    command = [sys.executable, "-c", code, str(argument)]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Made:
    """What the first machine made."""

    file: Path
    bundle: bytes
    losses: list[float]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("first")
    losses, *numbers = run_machine(COMPILES, folder, folder / "home")
    assert numbers == [1, 1, 1, 1]  # graphs exported, of these used, in the bundle, compiled
    return Made(folder / "graphs.lazycache", (folder / "bundle").read_bytes(), losses)


def without_compiler(folder: Path) -> dict[str, str]:
    (folder / "empty").mkdir()
    return {"PATH": str(folder / "empty"), "CXX": str(folder / "empty" / "c++")}


@pytest.fixture(autouse=True)
def as_users_have_it(tmp_path: Path) -> Iterator[None]:
    config.backend, config.compile, config.first_sight = "inductor", "background", "run"
    config.run_in_background = "auto"
    config.cache, config.cache_dir = True, str(tmp_path / "cache")
    executor.clear_computations()
    yield
    lazy_backend.wait_device_ops()
    if not lazy_backend.wait_for_compiles(timeout=0.0):
        worker.close()


def train(steps: int = STEPS, after: Any = lambda: None) -> tuple[list[float], list[list[str]]]:
    names: dict[str, Any] = {}
    exec(PROGRAM, names)
    executor.clear_computations()
    lazy_backend.ir_cache.reset()
    found: tuple[list[float], list[list[str]]] = names["train"](steps, after)
    return found


def expect_compiled(made: Made) -> None:
    """Training here runs compiled from its third step on, and compiles nothing."""
    with count("Compile") as compiles:
        losses, plans = train()
    assert [("optimized" in plan) for plan in plans] == [False, False, True, True, True, True]
    assert losses == pytest.approx(made.losses, rel=1e-4)
    assert compiles() == 0


def rewritten(made: Made, path: Path, change: Any) -> Path:
    """The file with each entry's key and payload changed by hand, and with checksums that are right."""
    archive = Archive(made.file)
    with new_archive(path, archive.description) as writer:
        for packed in archive:
            key, payload = change(packed.key, split(archive.read(packed))[1])
            writer.add(make_head(encode_key(key), payload, 0.0) + payload)
    return path


def with_part(key: Key, part: str, **values: Any) -> Key:
    """The key with other values in a part that is a table."""
    changed = {name: json.dumps(json.loads(text) | values) for name, text in key.parts if name == part}
    return Key(tuple((name, changed.get(name, text)) for name, text in key.parts))


# ----- another machine


@pytest.mark.scenario
def test_another_machine_runs_compiled_from_its_third_step_without_a_compiler(made: Made, tmp_path: Path) -> None:
    home = tmp_path / "home"
    report, losses, plans, counters = run_machine(LOADS, made.file, home, **without_compiler(tmp_path))
    assert report == f"{made.file}: 1 graph, in {home / 'cache' / 'lazy_backend'}"
    assert losses == pytest.approx(made.losses, rel=1e-4)
    assert [("optimized" in plan) for plan in plans] == [False, False, True, True, True, True]
    assert counters.get("Compile", 0) == counters.get("CompileFailed", 0) == 0
    assert (counters["CacheLoaded"], counters["DiskCacheHit"]) == (1, 1)


@pytest.mark.scenario
def test_a_home_that_cannot_be_written_is_no_hindrance(made: Made, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "cache").write_text("a file where the cache would be: root may write everywhere else")
    code = LOADS.replace('simplefilter("error")', 'simplefilter("ignore")')
    report, losses, plans, counters = run_machine(code, made.file, tmp_path / "home", **without_compiler(tmp_path))
    assert report == f"{made.file}: 1 graph\n  1 not kept, for this process only: there is no disk cache"
    assert losses == pytest.approx(made.losses, rel=1e-4)
    assert "optimized" in plans[2]
    assert (counters.get("Compile", 0), counters["DiskCacheHitBehind"]) == (0, 1)


# ----- load


def test_what_was_loaded_is_found(made: Made, tmp_path: Path) -> None:
    report = lazy_backend.cache.load(made.file)
    assert str(report) == f"{made.file}: 1 graph, in {tmp_path / 'cache'}"
    expect_compiled(made)


def test_loading_again_changes_nothing(made: Made, tmp_path: Path) -> None:
    lazy_backend.cache.load(made.file)
    (entry,) = (tmp_path / "cache").glob("*.entry")
    before = entry.stat()
    report = lazy_backend.cache.load(str(made.file))
    assert (report.graphs, report.known, report.held) == (1, 1, 0)
    assert (entry.stat().st_ino, entry.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_threads_may_load_at_once(made: Made, tmp_path: Path) -> None:
    threads = [threading.Thread(target=lazy_backend.cache.load, args=(made.file,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert DiskCache(tmp_path / "cache", 1 << 30).verify() == []
    assert len(list((tmp_path / "cache").glob("*.entry"))) == 1
    assert metrics.counter_value("CacheLoaded") == 8


@pytest.mark.parametrize("cause", ["off", "readonly", "refused", "too small", "disk full"])
def test_what_cannot_be_kept_is_used_all_the_same(
    made: Made, tmp_path: Path, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: Any = contextlib.nullcontext()
    if cause == "off":
        config.cache = False
        why = "there is no disk cache"
    elif cause == "readonly":
        config.cache_readonly = True
        why = "config.cache_readonly is set"
    elif cause == "refused":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
        why, warned = "there is no disk cache", pytest.warns(CacheWarning, match="other users may write")
    elif cause == "too small":
        config.cache_bytes = 1000
        why = "do not fit into a cache of 1000"
    else:
        monkeypatch.setattr(disk, "write_all", full)
        why = "No space left on device"
    with warned:
        report = lazy_backend.cache.load(made.file)
    assert (report.graphs, report.held) == (1, 1)
    assert "1 not kept, for this process only: " in str(report)
    assert why in str(report)
    if cause == "disk full":
        with pytest.warns(CacheWarning, match="training goes on"):
            disk_cache.artefact_layers()
    expect_compiled(made)
    assert metrics.counter_value("DiskCacheHitBehind") == 1
    assert list(tmp_path.glob("cache/*.entry")) == list(tmp_path.glob("cache/*.tmp")) == []
    # what is only held can be exported like everything else
    assert lazy_backend.cache.export(tmp_path / "again").graphs == 1


def full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_cache_that_holds_only_some_evicts_nothing_for_good(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "two"
    archive = Archive(made.file)
    (packed,) = archive
    payload = split(archive.read(packed))[1]
    other = Key((*packed.key.parts, ("more", "")))
    with new_archive(file, {}) as writer:
        for key in (packed.key, other):
            writer.add(make_head(encode_key(key), payload, 0.0) + payload)
    config.cache_bytes = int(packed.size * 1.5)
    report = lazy_backend.cache.load(file)
    assert (report.graphs, report.held) == (2, 1)
    assert f"config.cache_bytes = {config.cache_bytes} leaves no room" in str(report)
    expect_compiled(made)


# ----- what does not fit


@pytest.mark.parametrize(
    ("part", "values", "reason"),
    [
        ("artefact", {"torch": "2.12.0"}, f"made for PyTorch 2.12.0, this is {torch.__version__}"),
        ("artefact", {"python": "00"}, "made for another version of Python"),
        ("artefact", {"abi": ".so"}, "made for Python's interface .so, this has .cpython"),
        ("artefact", {"processor": "00"}, "made for another processor or other instructions"),
        ("artefact", {"format": 1}, "made for another version of lazy_backend"),
    ],
)
def test_what_was_made_for_another_machine_is_skipped(
    made: Made, tmp_path: Path, part: str, values: dict[str, Any], reason: str
) -> None:
    file = rewritten(made, tmp_path / "file", lambda key, payload: (with_part(key, part, **values), payload))
    with pytest.warns(CacheWarning, match="compiled graphs not loaded, or not all of them"):
        report = lazy_backend.cache.load(file)
    ((said, number),) = report.skipped.items()
    assert said.startswith(reason)
    assert (report.graphs, number) == (0, 1)
    assert f"  1 skipped: {said}\n  the file was made on {report.made_on}" in str(report)
    assert metrics.counter_value(f"CacheSkipped: {said}") == 1
    assert list((tmp_path / "cache").glob("*.entry")) == []


@pytest.mark.parametrize(
    "key",
    [(), (("artefact", "{}"),), (("graph", "x"), ("artefact", "["), ("lowering", "1"))],
    ids=["none", "few", "text"],
)
def test_what_is_no_compiled_graph_is_skipped(made: Made, tmp_path: Path, key: tuple[tuple[str, str], ...]) -> None:
    file = rewritten(made, tmp_path / "file", lambda _, payload: (Key(key), payload))
    with pytest.warns(CacheWarning):
        assert lazy_backend.cache.load(file).skipped == {"no compiled graph": 1}


def test_another_version_of_this_package_is_skipped(made: Made, tmp_path: Path) -> None:
    def change(key: Key, payload: bytes) -> tuple[Key, bytes]:
        return Key(tuple((name, '"0"' if name == "lowering" else text) for name, text in key.parts)), payload

    with pytest.warns(CacheWarning):
        report = lazy_backend.cache.load(rewritten(made, tmp_path / "file", change))
    assert report.skipped == {"made for another version of lazy_backend": 1}


def test_other_settings_are_told(made: Made, tmp_path: Path) -> None:
    """They may still be set when graphs are looked for, so the graph is kept."""
    file = rewritten(made, tmp_path / "file", lambda key, payload: (with_part(key, "state", threads=99), payload))
    report = lazy_backend.cache.load(file)
    assert (report.graphs, report.skipped) == (1, {})
    here = torch.get_num_threads()
    assert str(report).endswith(f"  1 found only once a setting is the same: threads 99, here {here}")


@pytest.mark.parametrize("payload", [b"", b"\0" * 1000, b"\1\0\0\0\0\0\0\0[", b"\2\0\0\0\0\0\0\0{}"])
def test_a_payload_that_is_no_artefact_is_skipped(made: Made, tmp_path: Path, payload: bytes) -> None:
    with pytest.warns(CacheWarning):
        report = lazy_backend.cache.load(rewritten(made, tmp_path / "file", lambda key, _: (key, payload)))
    assert report.skipped == {"no compiled graph": 1}


def test_an_artefact_under_a_false_key_is_never_run(made: Made, tmp_path: Path) -> None:
    """Its key fits, but it says itself that it was made elsewhere: it is not loaded, and the graph is interpreted."""

    def change(key: Key, payload: bytes) -> tuple[Key, bytes]:
        return key, payload.replace(b'"torch": "2.', b'"torch": "1.')

    assert lazy_backend.cache.load(rewritten(made, tmp_path / "file", change)).graphs == 1
    losses, plans = train(3)
    assert not any("optimized" in plan for plan in plans)
    assert losses == pytest.approx(made.losses[:3], rel=1e-4)
    assert metrics.counter_value("DiskCacheRejected") == 1
    with pytest.warns(CacheWarning, match=r"(?s)cannot be used here: BadArtefact: made for .* compiled again"):
        disk_cache.artefact_layers()
    disk_cache.artefact_layers()  # a second warning would be an error


# ----- files that are damaged, hostile, or not there


@pytest.mark.parametrize("damage", ["cut off", "a byte", "empty", "another format", "no archive"])
def test_a_damaged_file_costs_what_it_hits(made: Made, tmp_path: Path, damage: str) -> None:
    DiskCache(tmp_path / "cache", 1 << 30).put(Key((("graph", "mine"),)), b"stays")
    whole, file = made.file.read_bytes(), tmp_path / "file"
    file.write_bytes(
        {
            "cut off": whole[: len(whole) // 2],
            "a byte": whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:],
            "empty": b"",
            "another format": whole[:8] + b"\x09" + whole[9:],
            "no archive": b"#!/bin/sh\n" * 100,
        }[damage]
    )
    with pytest.warns(CacheWarning, match="not loaded, or not all"):
        report = lazy_backend.cache.load(file)
    ((reason, number),) = report.skipped.items()
    assert (report.graphs, number, reason.startswith("damaged")) == (0, 1, True)
    assert DiskCache(tmp_path / "cache", 1 << 30).get(Key((("graph", "mine"),))) == b"stays"
    assert len(list((tmp_path / "cache").glob("*.entry"))) == 1


def test_a_file_that_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        lazy_backend.cache.load(tmp_path / "nothing")


def test_a_file_that_others_may_write_raises(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(made.file.read_bytes())
    file.chmod(0o666)
    with pytest.raises(CacheError, match=r"(?s)other users may write it, mode 666.*chmod go-w"):
        lazy_backend.cache.load(file)


# ----- export


def test_an_entry_that_is_removed_meanwhile_is_left_out(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy_backend.cache.load(made.file)
    misfit = transfer.misfit

    def pruned(key: Key) -> str | None:
        DiskCache(tmp_path / "cache", 1 << 30).clear()
        return misfit(key)

    monkeypatch.setattr(transfer, "misfit", pruned)
    report = lazy_backend.cache.export(tmp_path / "file")
    assert (report.graphs, report.skipped) == (0, {"removed by another process meanwhile": 1})
    assert list(Archive(tmp_path / "file")) == []


def test_a_damaged_entry_is_left_out(made: Made, tmp_path: Path) -> None:
    lazy_backend.cache.load(made.file)
    (entry,) = (tmp_path / "cache").glob("*.entry")
    entry.write_bytes(entry.read_bytes()[:-9] + b"\xff" * 9)
    assert lazy_backend.cache.export(tmp_path / "file").skipped == {"damaged": 1}


def test_what_cannot_be_read_is_left_out(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy_backend.cache.load(made.file)
    train(4)
    monkeypatch.setattr(DiskCache, "whole", full)
    assert lazy_backend.cache.export(tmp_path / "file").skipped == {"not readable: No space left on device": 1}
    assert list(transfer.used_entries()) == []


def test_ctrl_c_leaves_the_earlier_file(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy_backend.cache.load(made.file)
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.write_bytes(b"earlier")
    monkeypatch.setattr(ArchiveWriter, "add", lambda self, entry: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        lazy_backend.cache.export(file)
    assert [(one.name, one.read_bytes()) for one in file.parent.iterdir()] == [("file", b"earlier")]


def test_export_takes_what_this_process_used(made: Made, tmp_path: Path) -> None:
    lazy_backend.cache.load(made.file)
    assert lazy_backend.cache.export(tmp_path / "file", which="used").graphs == 0
    train()
    assert lazy_backend.cache.export(tmp_path / "file", which="used").graphs == 1


def test_export_without_a_cache_says_so(tmp_path: Path) -> None:
    config.cache = False
    with pytest.raises(CacheError, match=r"no disk cache to export\n  set config.cache"):
        lazy_backend.cache.export(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_misspelt_choice_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which='mine': expected 'fitting', 'used' or 'all'"):
        lazy_backend.cache.export(tmp_path / "file", which="mine")  # type: ignore[arg-type]


# ----- shared folders


def test_a_shared_folder_is_read_and_never_written(made: Made, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with config.patch(cache_dir=str(shared)):
        lazy_backend.cache.load(made.file)
    metrics.reset()
    (shared / ".lock").unlink()
    before = {path: path.stat() for path in (shared, *shared.iterdir())}
    config.cache_dirs = [shared]
    expect_compiled(made)
    assert (metrics.counter_value("DiskCacheHit"), metrics.counter_value("DiskCacheHitBehind")) == (1, 1)
    after = {path: path.stat() for path in (shared, *shared.iterdir())}
    assert {path: (s.st_mtime_ns, s.st_ctime_ns) for path, s in after.items()} == {
        path: (s.st_mtime_ns, s.st_ctime_ns) for path, s in before.items()
    }
    described = disk_cache.describe()
    assert described is not None
    assert (described["behind"], described["hits_behind"], described["misses"]) == ([str(shared)], 1, 0)


@pytest.mark.parametrize("case", ["missing", "open to others"])
def test_a_shared_folder_that_cannot_be_used_is_told_once(tmp_path: Path, case: str) -> None:
    shared = tmp_path / "shared"
    if case != "missing":
        shared.mkdir()
        shared.chmod(0o777)
    config.cache_dirs = str(shared)
    with pytest.warns(CacheWarning, match="there is no such folder" if case == "missing" else "other users may write"):
        disk_cache.artefact_layers()
    assert disk_cache.artefact_layers().shared == ()  # a second warning would be an error


def test_the_setting_takes_lists_and_texts() -> None:
    for value in (["a", Path("b")], ("a", "b"), f"a{os.pathsep}b", f"{os.pathsep}a{os.pathsep}b{os.pathsep}"):
        config.cache_dirs = value
        assert config.cache_dirs == ("a", "b")
    config.cache_dirs = None
    assert config.cache_dirs == ()
    with pytest.raises(ValueError, match="expected a list of folders"):
        config.cache_dirs = 3


# ----- the bundle of torch.compiler


def test_the_bundle_of_pytorch_carries_our_graphs(made: Made, tmp_path: Path) -> None:
    info = torch.compiler.load_cache_artifacts(made.bundle)
    assert info is not None
    assert len(info.artifacts["lazy_backend"]) == 1
    assert metrics.counter_value("CacheLoaded") == 1
    assert len(list((tmp_path / "cache").glob("*.entry"))) == 1
    expect_compiled(made)


def test_an_artefact_of_the_bundle_that_does_not_fit_is_skipped(made: Made, tmp_path: Path) -> None:
    file = rewritten(made, tmp_path / "file", lambda key, value: (with_part(key, "artefact", torch="2.12.0"), value))
    archive = Archive(file)
    (packed,) = archive
    whole = archive.read(packed)
    for entry, reason in ((whole, f"made for PyTorch 2.12.0, this is {torch.__version__}"), (whole[:-1], "damaged")):
        transfer.take_entry(entry)
        assert metrics.counter_value(f"CacheSkipped: {reason}") == 1
    assert list((tmp_path / "cache").glob("*.entry")) == []


def test_a_bundle_has_what_this_process_used(made: Made, tmp_path: Path) -> None:
    assert list(transfer.used_entries()) == []
    lazy_backend.cache.load(made.file)
    assert list(transfer.used_entries()) == []
    train(4)
    ((hash, entry),) = transfer.used_entries()
    (file,) = (tmp_path / "cache").glob("*.entry")
    assert (file.name, file.read_bytes()) == (f"{hash}.entry", entry)
