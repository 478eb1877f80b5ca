"""The content of the report page, as plain data.

In: a `Run`. Out: one dict for JSON, in the order of the page. Syncs are stored as columns, and strings that recur
(lines of code, programs, causes) once in a table, so that 10,000 steps take 1 MB.

Note [Which graphs are shown]
A run that never repeats a program has as many programs as steps. The page draws the programs with the most syncs, and
among equals the latest, up to a total number of calls; for the others it has name, line and counts, and says so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lazy_backend.diagnostics.findings import (
    HITS,
    blocked_seconds,
    compiles_waited_for,
    cut_short,
    end_of,
    find,
    is_cut,
    run_seconds,
)
from lazy_backend.diagnostics.graph_layout import lay_out
from lazy_backend.diagnostics.history import advice_on_cut
from lazy_backend.diagnostics.run_log import Line, Run
from lazy_backend.lowering.serving.executor import ProfileMetrics

_MAX_CALLS = 40_000  # in the pictures of all programs in total
_MAX_ARGUMENTS = 400  # characters of a call's arguments: a list may hold thousands of tensors
_MAX_EXAMPLES = 5  # per group of syncs with the same kind of explanation


class Texts:
    """A table of strings, which numbers each of them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def table(self) -> list[str]:
        return list(self._numbers)


def page_data(run: Run, profile: ProfileMetrics | None = None) -> dict[str, Any]:
    """Everything on the page. `profile`: node times from `Executor.benchmark_nodes`, if they were measured."""
    texts = Texts()
    syncs = list(run.syncs.values())
    variants = variants_of(run.programs)
    return {
        "run": run.header,
        "notes": run.notes,
        "summary": _summary(run, syncs),
        "findings": [finding.to_dict() for finding in find(run)],
        "syncs": _columns(syncs, texts) | {"compile": _compile_seconds(run, syncs)},
        "explained": _explained(syncs, texts),
        "compiles": [compiled | {"elapsed": _elapsed(run, compiled)} for compiled in run.compiles.values()],
        "waits": [_without_type(wait) for wait in run.waits],
        "cuts": _cuts(syncs),
        "programs": _programs(run, variants, texts),
        "graphs": _graphs(run, syncs, variants),
        "nodes": _nodes(profile),
        "memory": [_without_type(sample) for sample in run.memory],
        "peaks": [_without_type(peak) for peak in run.peaks.values()],
        "state": _without_type(run.state),
        "sources": run.sources,
        "texts": texts.table(),
    }


def _without_type(line: Line) -> Line:
    return {name: value for name, value in line.items() if name != "type"}


def _summary(run: Run, syncs: Sequence[Line]) -> dict[str, Any]:
    compiled = [line for line in run.compiles.values() if line["outcome"] in ("compiled", "failed")]
    running = [line for line in run.compiles.values() if line["outcome"] == "started"]
    return {
        "seconds": run_seconds(run),
        "steps": max((sync["step"] for sync in syncs), default=0),
        "first_step": min((sync["step"] for sync in syncs), default=0),
        "syncs": len(syncs),
        "hits": sum(sync["outcome"] in HITS for sync in syncs),
        "programs": len({sync["program"] for sync in syncs}),
        "compiles": len(compiled),
        "compiles_running": len(running),
        "compile_seconds": sum(_elapsed(run, line) for line in (*compiled, *running)),
        "cuts": sum(map(is_cut, syncs)),
        "cut_seconds": sum(blocked_seconds(sync) for sync in syncs if is_cut(sync)),
        "wait_seconds": sum(sync["wait_seconds"] for sync in syncs),
        "asked_wait_seconds": sum(wait["seconds"] for wait in run.waits),
        "devices": sorted({sync["device"] for sync in syncs}),
    }


def _elapsed(run: Run, compiled: Line) -> float:
    """The compiler's seconds or, if the compile did not finish, the seconds from its start to the end of the run."""
    if compiled["outcome"] != "started":
        return float(compiled["seconds"])
    ends = [end_of(sync) for sync in run.syncs.values()] + [wait["begin"] + wait["seconds"] for wait in run.waits]
    return max(0.0, max(ends, default=0.0) - float(compiled["begin"]))


_TEXT_COLUMNS = ("device", "program", "cause", "site", "outcome", "plan", "graph")
_TIME_COLUMNS = {"trace_seconds": "trace", "sync_seconds": "sync", "wait_seconds": "wait", "run_seconds": "run"}


def _columns(syncs: Sequence[Line], texts: Texts) -> dict[str, list[Any]]:
    """The syncs as columns; times in seconds, rounded to microseconds."""
    columns: dict[str, list[Any]] = {name: [texts.number(sync[name]) for sync in syncs] for name in _TEXT_COLUMNS}
    columns |= {name: [sync[name] for sync in syncs] for name in ("number", "step", "calls")}
    columns |= {short: [_rounded(sync[name]) for sync in syncs] for name, short in _TIME_COLUMNS.items()}
    columns |= {name: [_rounded(sync[name]) for sync in syncs] for name in ("begin", "run_begin")}
    return columns


def _compile_seconds(run: Run, syncs: Sequence[Line]) -> list[float]:
    """For each sync, the part of its `sync_seconds` that was spent waiting for the compiler."""
    waited = compiles_waited_for(run)
    numbers = [[c["number"] for c in sync["compiles"] if c["number"] in waited] for sync in syncs]
    spent = [sum(run.compiles[number]["seconds"] for number in found) for found in numbers]
    return [round(min(seconds, sync["sync_seconds"]), 6) for seconds, sync in zip(spent, syncs, strict=True)]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _explained(syncs: Sequence[Line], texts: Texts) -> list[dict[str, Any]]:
    """The syncs that were not plain hits, grouped by the way they differ."""
    groups: defaultdict[Any, list[tuple[int, Line]]] = defaultdict(list)
    for index, sync in enumerate(syncs):
        if sync["outcome"] not in ("hit, level 1", "replay") or sync["difference"] is not None:
            groups[_kind_of(sync)].append((index, sync))
    rows = []
    for group in groups.values():
        _, last = group[-1]
        rows.append(
            {
                "outcome": last["outcome"],
                "difference": last["difference"],
                "nearest": last["nearest"],
                "program": last["program"],
                "cause": last["cause"],
                "site": last["site"],
                "advice": last["advice"],
                "count": len(group),
                "seconds": sum(sync["trace_seconds"] + sync["sync_seconds"] for _, sync in group),
                "first_step": group[0][1]["step"],
                "last_step": last["step"],
                "examples": [index for index, _ in group[-_MAX_EXAMPLES:]],
            }
        )
    return sorted(rows, key=lambda row: -row["seconds"])


def _kind_of(sync: Line) -> tuple[Any, ...]:
    found = sync["difference"]
    if found is None:
        return sync["outcome"], sync["site"], sync["cause"]
    return sync["outcome"], sync["site"], found["kind"], found["now_site"], found["before_site"], found["advice"]


def _cuts(syncs: Sequence[Line]) -> list[dict[str, Any]]:
    groups: defaultdict[tuple[str, str], list[Line]] = defaultdict(list)
    for sync in filter(is_cut, syncs):
        groups[sync["site"], sync["cause"]].append(sync)
    rows = [
        {
            "site": site,
            "cause": cause,
            "count": len(group),
            "steps": len({sync["step"] for sync in group}),
            "seconds": sum(map(blocked_seconds, group)),
            "advice": advice_on_cut(cause),
        }
        for (site, cause), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


# ----- programs and graphs


def _programs(run: Run, variants: Mapping[str, str], texts: Texts) -> list[dict[str, Any]]:
    """Every program, with its picture if there is room. See Note [Which graphs are shown]."""
    newest_first = list(reversed(run.programs.values()))
    shown: set[str] = set()
    room = _MAX_CALLS
    for program in sorted(newest_first, key=lambda program: -program["syncs"]):
        if len(program["calls"]) <= room:
            shown.add(program["name"])
            room -= len(program["calls"])
    rows = []
    for program in run.programs.values():
        first = run.programs[variants[program["name"]]]
        row = {name: program[name] for name in ("name", "device", "site", "syncs", "graph")}
        picture = _picture(program["calls"], texts) if program["name"] in shown else None
        if picture is not None:
            picture["folded"] = _folded_picture(program["calls"], texts)
        row |= {"calls": len(program["calls"]), "picture": picture}
        rows.append(row | {"like": first["name"], "differs": "" if first is program else variation(first, program)})
    return rows


# What variants of a program differ in: numbers, and how many tensors a list holds.
_NUMBER = re.compile(r"(?<![\w.%])-?\d+(\.\d*)?(e[-+]?\d+)?")
_TENSORS = re.compile(r"\[(?:input|slot)\d+(?:, (?:input|slot)\d+)*\]")


def variants_of(programs: Mapping[str, Line]) -> dict[str, str]:
    """For each program, the first one that equals it except for numbers and lengths of lists; possibly itself."""
    firsts: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, program in programs.items():
        calls = tuple(
            (c["op"], c["site"], _without_numbers(c.get("args", "")), len(c["makes"])) for c in program["calls"]
        )
        found[name] = firsts.setdefault((program["device"], calls), name)
    return found


def _without_numbers(args: str) -> str:
    return _NUMBER.sub("0", _TENSORS.sub("[tensors]", args))


def variation(first: Line, program: Line) -> str:
    """The first call of `program` that differs from the variant `first`, as text; "" if none does."""
    for before, now in zip(first["calls"], program["calls"], strict=True):
        if any(before.get(part) != now.get(part) for part in ("args", "makes", "enters")):
            shapes = _joined(now["makes"]).partition(": ")[2]
            args = _TENSORS.sub(lambda tensors: f"[{tensors[0].count(',') + 1} tensors]", now.get("args", ""))
            return cut_short(f"{_short(now['op'])}({args}) -> {shapes}", 80)
    return ""


def fold_by_line(calls: Sequence[Line]) -> list[tuple[Line, list[int]]]:
    """Consecutive calls from one line merged into one call, each with the places of the calls merged into it.

    Only consecutive calls: a line in a loop appears once per iteration, so data still flows from top to bottom.
    """
    folded: list[tuple[Line, list[int]]] = []
    for place, call in enumerate(calls):
        if not folded or folded[-1][0]["site"] != call["site"]:
            empty: Line = {
                "op": "",
                "site": call["site"],
                "reads": [],
                "makes": [],
                "enters": [],
                "writes": [],
                "of": {},
            }
            folded.append((empty, []))
        group, places = folded[-1]
        places.append(place)
        own = {token for token, _ in group["makes"]}
        group["reads"] += [token for token in call["reads"] if token not in own and token not in group["reads"]]
        for name in ("makes", "enters", "writes"):
            group[name] += call.get(name, ())
        group["of"].update(call.get("of", {}))
        group["op"] = call["op"] if len(places) == 1 else f"{len(places)} calls"
    return folded


def _folded_picture(calls: Sequence[Line], texts: Texts) -> dict[str, Any]:
    """A program's calls merged by line, as columns with their layout. `places`: first call and number of calls each."""
    folded = fold_by_line(calls)
    groups = [group for group, _ in folded]
    layout = lay_out(groups)
    return {
        "op": [texts.number(_short(group["op"])) for group in groups],
        "site": [texts.number(group["site"]) for group in groups],
        "makes": [texts.number(_joined(group["makes"][-1:])) for group in groups],
        "places": [number for _, places in folded for number in (places[0], len(places))],
        "x": layout.x,
        "y": layout.y,
        "edges": [number for edge in layout.edges for number in edge],
    }


def _picture(calls: Sequence[Line], texts: Texts) -> dict[str, Any]:
    """A program's calls as columns, with their layout."""
    layout = lay_out(calls)
    return {
        "op": [texts.number(_short(call["op"])) for call in calls],
        "site": [texts.number(call["site"]) for call in calls],
        "args": [cut_short(call.get("args", ""), _MAX_ARGUMENTS) for call in calls],
        "makes": [texts.number(_joined(call["makes"])) for call in calls],
        "enters": [cut_short(_joined(call.get("enters", ())), _MAX_ARGUMENTS) for call in calls],
        "writes": {place: call["writes"] for place, call in enumerate(calls) if call.get("writes")},
        "x": layout.x,
        "y": layout.y,
        "edges": [number for edge in layout.edges for number in edge],
    }


def _short(op: str) -> str:
    return op.removesuffix(".default").removesuffix(".Tensor")


def _joined(tensors: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{token}: {shape}" for token, shape in tensors)


def _graphs(run: Run, syncs: Sequence[Line], variants: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run times by graph and plan, largest total first; the graphs of a program's variants share one row."""
    runs: defaultdict[tuple[str, str], list[Line]] = defaultdict(list)
    for sync in syncs:
        if sync["run_seconds"] is not None:
            runs[variants.get(sync["program"], sync["graph"]), sync["plan"]].append(sync)
    nodes = {line["graph"]: line["nodes"] for line in run.state.get("computations", ())}
    rows = []
    for (_, plan), group in runs.items():
        seconds = [float(sync["run_seconds"]) for sync in group]
        graphs = Counter(sync["graph"] for sync in group)
        graph = graphs.most_common(1)[0][0]
        program = Counter(sync["program"] for sync in group).most_common(1)[0][0]
        row = {"graph": graph, "variants": len(graphs), "plan": plan, "program": program, "nodes": nodes.get(graph)}
        times = {"seconds": sum(seconds), "median": median(seconds), "slowest": max(seconds)}
        rows.append(row | {"runs": len(group)} | times)
    return sorted(rows, key=lambda row: -row["seconds"])


def _nodes(profile: ProfileMetrics | None) -> list[dict[str, Any]]:
    """The nodes of a profile, slowest first."""
    if profile is None:
        return []
    timed: Mapping[int, float] = dict(enumerate(profile.seconds_per_node))
    slowest = sorted(timed, key=lambda place: -timed[place])
    return [{"place": place, "op": profile.names[place], "seconds": timed[place]} for place in slowest]
