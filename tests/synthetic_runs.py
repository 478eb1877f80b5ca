"""Runs of any size, as a log has them: for pages that a test could not record in its time."""

from __future__ import annotations

from typing import Any

from lazy_backend.diagnostics.run_log import Run, collect

SITE = "/home/user/train.py"


def make_run(steps: int, calls: int) -> Run:
    """A run of `steps` steps of a program with `calls` calls: a deep network's forward, backward and update."""
    header = {"type": "run", "command": "train.py", "directory": "/home/user", "torch": "2.13.0", "threads": 2}
    sources = {f"{SITE}:{line}": f"x = layer{line}(x)  # line {line}" for line in range(1, 41)}
    lines: list[dict[str, Any]] = [header, {"type": "source", "lines": sources}]
    lines += [_program("program 1", calls), _program("program 2", 12)]
    lines += [_compile(1, 1.0, 12.0), _compile(2, 14.0, None)]
    lines += [_sync(number, number % 50 == 0) for number in range(1, steps + 1)]
    lines += [_memory(number / 10) for number in range(2000)]
    lines.append({"type": "state", "computations": [], "live tensors": [], "disk cache": None})
    return collect(lines)


def make_run_of_variants(variants: int) -> Run:
    """A run with `variants` programs that differ in one number, and a wait for the compiler of two minutes."""
    run = make_run(900, 60)
    for number in range(10, 10 + variants):
        name = f"program {number}"
        call = {
            "op": "aten.mul.Tensor", "site": f"{SITE}:5", "args": f"in0, {number}", "reads": ["in0"],
            "makes": [["slot0", f"f32[{number}]"]],
        }  # fmt: skip
        run.programs[name] = _program(name, 0) | {"calls": [call], "graph": f"#{number}"}
        run.syncs[1000 + number] = _sync(1000 + number, False) | {
            "program": name, "graph": f"#{number}", "step": 1000 + number, "begin": 150.0 + number, "outcome": "miss",
            "run_begin": 151.0 + number, "trace_seconds": 0.5, "difference": None,
        }  # fmt: skip
    wait = {"type": "wait", "call": "wait_for_compiles()", "site": f"{SITE}:41", "step": 901, "begin": 30.0}
    run.waits.append(wait | {"seconds": 120.0, "done": True})
    return run


def _program(name: str, calls: int) -> dict[str, Any]:
    """Layers of seven calls, of which the last ones read what the first ones made."""
    made = []
    for place in range(calls):
        mirrored = calls - 1 - place
        reads = [f"slot{place - 1}"] if place and place % 7 else [f"slot{max(0, place - 7)}"] if place else []
        if mirrored < place and mirrored % 3 == 0:
            reads.append(f"slot{mirrored}")
        op = ("aten.mm.default", "aten.relu.default", "aten.add.Tensor", "aten.mul_.Tensor")[place % 4]
        call: dict[str, Any] = {"op": op, "site": f"{SITE}:{1 + 40 * place // calls}", "args": ", ".join(reads)}
        made.append(call | {"reads": reads, "makes": [[f"slot{place}", "f32[64, 128]"]]})
    return {
        "type": "program",
        "name": name,
        "device": "lazy:0",
        "site": f"{SITE}:40",
        "syncs": 1,
        "graph": "#1",
        "calls": made,
    }


def _sync(number: int, is_cut: bool) -> dict[str, Any]:
    is_new = number % 400 == 1
    begin = 0.02 * number + 0.5 * ((number + 398) // 400)  # a new program takes half a second more
    difference = {
        "kind": "shape", "before": "aten.mm: self is f32[64, 8]", "now": f"aten.mm: self is f32[{number}, 8]",
        "advice": "pad", "place": 3, "before_site": f"{SITE}:3", "now_site": f"{SITE}:3",
    }  # fmt: skip
    return {
        "type": "sync", "number": number, "step": number, "device": "lazy:0", "calls": 5000,
        "program": "program 2" if is_cut else "program 1", "cause": "item()" if is_cut else "mark_step",
        "site": f"{SITE}:{9 if is_cut else 40}", "outcome": "miss" if is_new else "hit, level 1", "begin": begin,
        "trace_seconds": 0.506 if is_new else 0.006, "sync_seconds": 0.001, "wait_seconds": 0.002, "plan": "compiled",
        "graph": "#1",
        "nearest": "program 2" if is_new else None, "difference": difference if is_new else None, "compiles": [],
        "run_begin": begin + (0.509 if is_new else 0.009), "run_seconds": 0.01, "advice": "",
    }  # fmt: skip


def _compile(number: int, begin: float, end: float | None) -> dict[str, Any]:
    return {
        "type": "compile", "graph": "#1", "nodes": 5000, "reason": "it recurred", "begin": begin, "end": end,
        "outcome": "compiled" if end else "started", "seconds": (end or begin) - begin, "difference": None,
        "error": None, "number": number,
    }  # fmt: skip


def _memory(time: float) -> dict[str, Any]:
    return {
        "type": "memory", "time": time, "step": int(time * 50), "device": "lazy:0", "tensors": 40, "bytes": 10_000_000,
        "device_bytes": None, "process_bytes": 500_000_000,
    }  # fmt: skip
