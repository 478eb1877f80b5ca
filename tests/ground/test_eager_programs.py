"""Programs without a lazy tensor: they compute, warn and find the same with the package installed as without it.

Each test compares processes that ran all of `eager_programs`: one in which the entry point was not loaded, one in which
it was, and one that used the lazy device before. See `observe.py` for what they write down.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eager_programs
import fingerprints
import pytest
import torch

Seen = dict[str, Any]

_TIMEOUT = 400.0  # seconds for three processes at once; on two cores that nobody else uses they take 40

# Additions that do not change a program: the name of the device's module, the entry point's own module, kernels of the
# key Lazy, and the functions that `torch.save` and `torch.load` ask about storages of devices that they do not know.
_ALLOWED = re.compile(
    r"interpreter modules\['(torch\.lazy|lazy_backend_autoload)'\]"
    r"|torch\.lazy(\W.*)?"
    r"|torch\.library\._impls\['aten/[\w.]+/Lazy'\]"
    r"|torch\.serialization\._package_registry\[.*"
)

pytestmark = pytest.mark.scenario  # what they share takes half a minute

_KINDS = {
    "without": ("0", ()),
    "installed": ("1", ()),
    "lazy first": ("1", ("--lazy-first",)),
}


def _start(kind: str, folder: Path) -> subprocess.Popen[str]:
    autoload, options = _KINDS[kind]
    place = folder / kind.replace(" ", "_")
    place.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LAZY_", "PYTEST_"))}
    variables |= {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload,
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "LAZY_BACKEND_CACHE_DIR": str(place / "lazy"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # Inductor would find that out by compiling more programs
        "OMP_NUM_THREADS": "1",  # the same sums in each process, and no threads before a fork
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    observe = Path(__file__).with_name("observe.py")
    command = [sys.executable, str(observe), str(place / "seen.json"), *options]
    return subprocess.Popen(
        command, env=variables, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Seen]]:
    """What each kind of process saw; they run beside each other."""
    folder = tmp_path_factory.mktemp("ground")
    with contextlib.ExitStack() as stack:
        running = {kind: stack.enter_context(_start(kind, folder)) for kind in _KINDS}
        for process in running.values():
            stack.callback(process.kill)
        for kind, process in running.items():
            _, errors = process.communicate(timeout=_TIMEOUT)
            assert process.returncode == 0, f"{kind}: {errors[-4000:]}"
        yield {kind: _read(folder / kind.replace(" ", "_") / "seen.json") for kind in _KINDS}


def _read(file: Path) -> Seen:
    found: Seen = json.loads(file.read_text())
    file.unlink()  # 30 MB, which pytest would keep
    return found


def _differences(without: dict[str, str], other: dict[str, str]) -> list[str]:
    """A line for each name whose descriptions differ, but for allowed additions."""
    found = []
    for name in sorted(without.keys() | other.keys()):
        before, after = without.get(name, "nothing"), other.get(name, "nothing")
        is_addition = before == "nothing" and _ALLOWED.fullmatch(name)
        if before != after and not is_addition:
            found.append(f"{name}: {_first_difference(before, after)}")
    return found


def _first_difference(before: str, after: str) -> str:
    if "\n" not in before + after:
        return f"{before} | {after}"
    lines = [
        f"{one} | {other}" for one, other in zip(before.split("\n"), after.split("\n"), strict=False) if one != other
    ]
    return f"{before.count(chr(10)) + 1} | {after.count(chr(10)) + 1} lines: {lines[:1]}"


def _assert_none(found: list[str]) -> None:
    assert not found, f"{len(found)} differ, without | installed:\n" + "\n".join(found[:200])


def test_there_are_programs(seen: dict[str, Seen]) -> None:
    """At least thirty, none of which fails without the package; and the package is there in the other processes."""
    assert len(eager_programs.programs) >= 30
    results = {name: one["result"] for name, one in seen["without"]["programs"].items()}
    assert {name: one for name, one in results.items() if isinstance(one, dict) and "raised" in one} == {}
    assert seen["without"]["torch"] == torch.__version__
    assert "lazy_backend_autoload" not in seen["without"]["modules"]
    assert "lazy_backend_autoload" in seen["installed"]["modules"]
    assert "lazy_backend" in seen["lazy first"]["modules"]


@pytest.mark.parametrize("name", eager_programs.programs)
@pytest.mark.parametrize("kind", ["installed", "lazy first"])
def test_results_are_those_without(seen: dict[str, Seen], kind: str, name: str) -> None:
    """Bit for bit."""
    assert seen[kind]["programs"][name]["result"] == seen["without"]["programs"][name]["result"]


@pytest.mark.parametrize("name", eager_programs.programs)
@pytest.mark.parametrize("kind", ["installed", "lazy first"])
def test_warnings_are_those_without(seen: dict[str, Seen], kind: str, name: str) -> None:
    """The same category and text, at the same line."""
    assert seen[kind]["programs"][name]["warnings"] == seen["without"]["programs"][name]["warnings"]


def test_import_torch_warns_of_nothing_more(seen: dict[str, Seen]) -> None:
    assert seen["installed"]["import"] == seen["lazy first"]["import"] == seen["without"]["import"]


def test_the_package_is_not_imported(seen: dict[str, Seen]) -> None:
    """Nor anything else that programs do not import without it."""
    allowed = {"lazy_backend_autoload", "torch.lazy"}
    assert set(seen["installed"]["modules"]) - allowed == set(seen["without"]["modules"])


def test_import_torch_replaces_nothing(seen: dict[str, Seen]) -> None:
    """Hooks, filters, finders, threads and all kernels of all operators, right after `import torch`."""
    _assert_none(_differences(seen["without"]["before"], seen["installed"]["before"]))


def test_programs_find_nothing_replaced(seen: dict[str, Seen]) -> None:
    """The same, and all names of all modules and classes of PyTorch and of Python's library, after the programs."""
    _assert_none(_differences(seen["without"]["after"], seen["installed"]["after"]))


def test_calls_enter_no_function_more(seen: dict[str, Seen]) -> None:
    """Functions of Python and C that calls enter, and the frames of errors: what takes no time need not be timed."""
    _assert_none(_differences(seen["without"]["calls"], seen["installed"]["calls"]))


def test_nothing_is_registered_for_exit_or_fork(seen: dict[str, Seen]) -> None:
    assert seen["installed"]["registered"] == seen["without"]["registered"]


def test_a_replaced_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a list, as the value of a dict, as a method, and wrapped so that it looks like the original."""

    class Owner:
        def method(self) -> None:
            return None

    def called() -> None:
        return None

    @functools.wraps(called)
    def wrapper() -> None:
        called()

    values: dict[str, Any] = {"name": called, "list": [called], "dict": {"key": called}, "class": vars(Owner)}
    before = fingerprints.of_values(values)
    assert fingerprints.of_values(values) == before
    monkeypatch.setattr(Owner, "method", wrapper)
    replaced = {"name": wrapper, "list": [wrapper], "dict": {"key": wrapper}, "class": vars(Owner)}
    found = "\n".join(_differences(before, fingerprints.of_values(replaced)))
    assert [name for name in ("name:", "list[", "dict['key']:", "class['method']:") if name not in found] == []
