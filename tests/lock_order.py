"""Which locks are taken while which are held: run as a program, it prints one edge per line, as two names.

Every lock that this package makes is replaced by one that notes what its thread holds when it is taken.
"""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / name) for name in ("lazy_backend", "lowering", "cache"))

# Locks that tell an end: released by another thread than the one that took them, when they were made.
SIGNALS = {"Work.ended", "ClosureRunner.done"}

_edges: set[tuple[str, str]] = set()
_held = threading.local()
_real = {"Lock": threading.Lock, "RLock": threading.RLock}


class Noting:
    """A lock that notes what is held when it is taken."""

    def __init__(self, lock: Any, place: str) -> None:
        self._lock = lock
        self._place = place

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        held = _held.__dict__.setdefault("places", [])
        taken = self._lock.acquire(*args, **kwargs)
        if taken:
            _edges.update((place, self._place) for place in held if self._place not in held)
            held.append(self._place)
        return taken

    def release(self) -> None:
        self._lock.release()
        held = _held.__dict__.setdefault("places", [])
        if self._place in held:  # the lock of a run's end is released by another thread than the one that took it
            held.reverse()
            held.remove(self._place)
            held.reverse()

    def __enter__(self) -> Any:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def module_name(file: Path) -> str:
    return file.parent.name if file.stem == "__init__" else file.stem


def owner_of(cls: type) -> str:
    """The class of ours whose `__init__` makes the lock: the first of its bases that has one."""
    return next(base.__name__ for base in reversed(cls.__mro__) if "__init__" in base.__dict__ and base is not object)


def _noting(kind: str) -> Any:
    def make() -> Any:
        frame: Any = sys._getframe(1)
        lock = _real[kind]()
        if frame.f_code.co_name == "process_lock":
            frame = frame.f_back
        file = frame.f_code.co_filename
        if not file.startswith(FOLDERS):
            return lock
        target = linecache.getline(file, frame.f_lineno).split("=")[0].split(":")[0].strip().removeprefix("self.")
        owner = frame.f_locals.get("self")
        name = f"{module_name(Path(file))}.{target}" if owner is None else f"{owner_of(type(owner))}.{target}"
        return Noting(lock, name) if name not in SIGNALS else lock

    return make


def workload() -> None:
    """Everything that takes locks: training, replays, closures, reports, serving, compiles, threads, reads."""
    import torch

    import lazy_backend

    def train(steps: int, width: int) -> None:
        model = torch.nn.Linear(4, width).to("lazy")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        step = lazy_backend.capture(lambda x: model(x).sum())
        for number in range(steps):
            model(torch.ones(2 + number % 3, 4, device="lazy")).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazy_backend.add_step_closure(print, (), run_async=number % 2 == 0)
            lazy_backend.mark_step()
            with torch.no_grad():
                step(torch.ones(2, 4, device="lazy") * torch.tensor(float(number)))
        model.weight.tolist()

    with lazy_backend.config.patch(backend="inductor"):
        train(6, 8)
        lazy_backend.wait_for_compiles()
    with lazy_backend.config.patch(backend="eager", run_in_background="always"):
        train(12, 8)
        threads = [threading.Thread(target=train, args=(6, width)) for width in (3, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        served = lazy_backend.serve(torch.nn.Linear(4, 4), torch.ones(2, 4))
        served(torch.ones(2, 4))
    str(lazy_backend.explain())
    lazy_backend.metrics.short_report()
    lazy_backend.metrics.snapshot()
    torch.lazy.synchronize()


if __name__ == "__main__":
    threading.Lock, threading.RLock = _noting("Lock"), _noting("RLock")  # type: ignore[misc, assignment]
    workload()
    for before, after in sorted(_edges):
        print("edge", before, after)
