"""The self-check, `python -m lazy_backend`: what works with the PyTorch, the Python and the compiler that are there.

In: the process's versions, ports and settings; a small training loop, compiled in a cache of its own. Out: text.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from lazy_backend import metrics
from lazy_backend.api import wait_for_compiles
from lazy_backend.cache.folder import CacheRefused, default_directory
from lazy_backend.ports.port import VERSIONS, Port, check_all, version
from lazy_backend.recording.native import native_recorder
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts

_STEPS = 12


def self_check(compiled: bool = True) -> tuple[str, bool]:
    """The text, and whether nothing was found that is off or fails. `compiled`: also compile a loop, for 20 s or so."""
    checked = list(check_all())
    off = [port for port in checked if port.obstacle() is not None]
    lines = [*_versions(), *_ports(checked, off)]
    problems = len(off)
    if compiled:
        native_recorder.find()
        trial, failed = _trial()
        lines += [f"known calls    {native_recorder.describe()}", *trial]
        problems += failed
    lines.append("Nothing is off." if not problems else f"{problems} of these cost something: see the lines above.")
    return "\n".join(lines), not problems


def _versions() -> Iterator[str]:
    known = "" if version() in VERSIONS else f" (not run on it; on {VERSIONS[0]} to {VERSIONS[-1]})"
    yield f"PyTorch        {torch.__version__}{known}"
    yield f"Python         {platform.python_implementation()} {platform.python_version()}"
    yield f"system         {platform.system()} {platform.machine()}"
    found = contexts.backing_type()
    backing = f"cpu, {torch.get_num_threads()} threads" if found == "cpu" else found
    yield f"device         lazy, on {backing}"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield f"C++ compiler   {compiler or 'none: graphs are interpreted'}"
    yield f"cache          {_cache()}"


def _cache() -> str:
    if not config.cache:
        return "off (config.cache)"
    try:
        return str(config.cache_dir or default_directory())
    except CacheRefused as error:
        return f"none: {error}"


def _ports(checked: list[Port], off: list[Port]) -> Iterator[str]:
    yield f"ports          {len(checked) - len(off)} of {len(checked)} fit"
    for port in checked:
        yield f"  {'off ' if port in off else 'fits'}  {port.name}"
        if port in off:
            yield f"        {port.obstacle()}"
            yield f"        without it, {port.without}"


def _trial() -> tuple[list[str], int]:
    """Lines about a small training loop whose graphs are compiled, and the number of problems."""
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # a compiler may still be writing there
        config.patch(cache_dir=folder, compile="foreground", compile_after_operators=0),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to("lazy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        before = metrics.snapshot().counters
        for _ in range(_STEPS):
            loss = model(torch.ones(16, 64, device="lazy")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch._lazy.mark_step()
        loss.item()
        wait_for_compiles()
    counted = {name: value - before.get(name, 0) for name, value in metrics.snapshot().counters.items()}
    seconds = time.perf_counter() - began
    lines = [f"compiled       {counted.get('Compile', 0)} graphs of a small training loop, in {seconds:.0f} s"]
    failed = counted.get("CompileFailed", 0)
    if failed or not counted.get("Compile", 0):
        lines.append("  failed: graphs are interpreted")
    reasons = [name.partition(": ")[2] for name, n in counted.items() if n and name.startswith("RunFromPython: ")]
    lines += [f"  needs Python at each run, and does not run beside recording: {reason}" for reason in reasons]
    if not failed and not reasons:
        lines.append("  runs without Python")
    return lines, int(bool(failed)) + len(reasons)


def main() -> int:
    """The command. Exit status 1 if something is off."""
    text, is_whole = self_check(compiled="--no-compile" not in sys.argv)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough: nothing is left to say at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if is_whole else 1
