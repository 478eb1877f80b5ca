"""Findings: what to fix first in a slow run.

In: a `Run`. Out: `Finding`s in plain words, ranked by the seconds they cost.

Note [What a finding costs]
Seconds are measured, on the training thread. A cut costs the time from the read until the value is there. A new program
costs what its recording and syncing took beyond the median of known programs, or all of it if none is known. A compile
costs its time if training waited for it; a background compile costs nothing here, and the steps interpreted meanwhile
are a finding of their own. Findings without seconds, such as growing memory, come after those that have seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from lazy_backend.diagnostics.history import advice_on_cut
from lazy_backend.diagnostics.run_log import Line, Run

# Causes of syncs that the program asked for.
PLANNED = (
    "mark_step",
    "step",
    "sync_multi",
    "a captured call",
    "synchronize",
    "eager_mode",
    "allow_execution",
    "serve",
    "ir_cache.reset",
)
HITS = ("hit, level 1", "replay", "generalised hit")
_SHOWN_SHARE = 0.01  # of the run's time: less is not a finding
_MANY_CALLS = 8  # of a captured object: fewer say nothing
_GROWS = 0.25  # live tensors per step: slower growth is not a finding


# What is new in a program, by kind of difference.
_NEW = {
    "op": "another operator",
    "shape": "another shape",
    "dtype": "another dtype",
    "layout": "another layout in memory",
    "scalar": "another number",
    "aliasing": "other tensors share memory",
    "operand": "other operands",
    "length": "more or fewer operators",
    "outputs": "other results are held",
    "configuration": "another setting",
    "forgotten": "known once, and forgotten",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to look at. `section`: where the report shows it. `program`, `place`: a program to show, and its call.

    `is_fault`: True if something can be fixed, False if all is as it should be and the finding says where time went.
    """

    title: str
    text: str
    advice: str
    seconds: float
    count: int
    site: str
    section: str
    program: str = ""
    place: int | None = None
    is_fault: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find(run: Run) -> list[Finding]:
    """The findings of a run: first what can be fixed, then what is for information, each with the most expensive first.

    See Note [What a finding costs].
    """
    syncs = list(run.syncs.values())
    found = [
        *_cuts(syncs),
        *_first_programs(syncs),
        *_new_programs(syncs, run),
        *_compiles(run),
        *_interpreted(run, syncs),
        *_recording(syncs),
        *_waits(syncs),
        *_waits_for_the_compiler(run),
        *_collectives(run, syncs),
    ]
    least = _SHOWN_SHARE * run_seconds(run)
    ranked = sorted((f for f in found if f.seconds >= least and f.seconds > 0.0), key=lambda f: -f.seconds)
    told = [*ranked, *_failures(run), *_never_replayed(run), *_ports_off(run), *_stepped_aside(run), *_growth(run)]
    return sorted(told, key=lambda finding: (not finding.is_fault, -finding.seconds))


def run_seconds(run: Run) -> float:
    """Seconds from the first recorded call to the end of the last sync, run or wait."""
    ends = [end_of(sync) for sync in run.syncs.values()]
    ends += [wait["begin"] + wait["seconds"] for wait in run.waits] if ends else []
    begins = [sync["begin"] for sync in run.syncs.values()]
    return max(ends) - min(begins) if ends else 0.0


def end_of(sync: Line) -> float:
    """When a sync and its run were both over, in seconds since the history began."""
    host = sync["begin"] + sync["trace_seconds"] + sync["wait_seconds"] + sync["sync_seconds"]
    return max(host, (sync["run_begin"] or 0.0) + (sync["run_seconds"] or 0.0))


def is_cut(sync: Line) -> bool:
    return sync["cause"] not in PLANNED


def blocked_seconds(sync: Line) -> float:
    """Seconds that a read blocked the program: from the sync until the value is there."""
    return max(0.0, end_of(sync) - sync["begin"] - sync["trace_seconds"])


# ----- each kind of finding


def _cuts(syncs: Sequence[Line]) -> Iterable[Finding]:
    for (cause, site), group in _grouped(filter(is_cut, syncs), lambda sync: (sync["cause"], sync["site"])):
        seconds = sum(map(blocked_seconds, group))
        steps = len({sync["step"] for sync in group})
        yield Finding(
            f"{cause} cuts the step",
            f"It ran what was recorded so far and made Python wait, {_times(len(group))} in {_many(steps, 'step')}; "
            "what comes after it is a graph of its own.",
            advice_on_cut(cause),
            seconds,
            len(group),
            site,
            "cuts",
            group[-1]["program"],
        )


def _new_programs(syncs: Sequence[Line], run: Run) -> Iterable[Finding]:
    known = [_host_seconds(sync) for sync in syncs if sync["outcome"] == "hit, level 1"]
    usual = median(known) if known else 0.0
    missed = [sync for sync in syncs if sync["outcome"] not in HITS and sync["difference"] is not None]
    for key, group in _grouped(missed, lambda sync: _kind_of(sync["difference"])):
        difference = group[-1]["difference"]
        longer = "so much longer than known ones take" if known else "so long"
        programs = len({sync["program"] for sync in group})
        recurs = "None of these was met again: the step never becomes one that is known. " * _never_recurs(group, run)
        yield Finding(
            f"{_many(len(group), 'sync')} of new programs: {_NEW[key[0]]}",
            f"{recurs}Recording and syncing {_many(programs, 'program')} took {longer}. The last time, before: "
            f"{cut_short(difference['before'], 160)}; now: {cut_short(difference['now'], 160)}.",
            difference["advice"],
            sum(max(0.0, _host_seconds(sync) - usual) for sync in group),
            len(group),
            difference["now_site"] or group[-1]["site"],
            "misses",
            group[-1]["program"],
            difference["place"],
            is_fault=len(group) > 1,
        )


def _first_programs(syncs: Sequence[Line]) -> Iterable[Finding]:
    """The first program of each device, whose time includes loading what operators need."""
    for sync in syncs:
        if sync["outcome"] == "miss" and sync["difference"] is None:
            yield Finding(
                f"The first program on {sync['device']}",
                "It was recorded and run for the first time, which loads what operators need: once per process.",
                "nothing; measure without the first steps",
                _host_seconds(sync),
                1,
                sync["site"],
                "timeline",
                sync["program"],
                is_fault=False,
            )


def _never_recurs(group: Sequence[Line], run: Run) -> bool:
    names = {sync["program"] for sync in group}
    return len(names) > 2 and all(run.programs.get(name, {}).get("syncs", 1) == 1 for name in names)


def _kind_of(difference: Line) -> tuple[str, str, str]:
    return difference["kind"], difference["now_site"], difference["advice"]


# Outcomes of compiles that give no plan, as findings put them.
_FAILED = {"failed": "failed on", "refused": "computes something else than", "repaired": "gets a part wrong of"}


def _compiles(run: Run) -> Iterable[Finding]:
    waited = compiles_waited_for(run)
    done = [compiled for compiled in run.compiles.values() if compiled["outcome"] not in _FAILED]
    for (reason,), group in _grouped(done, lambda compiled: (compiled["reason"],)):
        held_up = [compiled for compiled in group if compiled["number"] in waited]
        seconds = sum(compiled["seconds"] for compiled in held_up)
        graphs = ", ".join(sorted({compiled["graph"] or "a graph" for compiled in held_up})[:8])
        if held_up:
            yield Finding(
                f"{_many(len(held_up), 'compile')} that training waited for",
                f"Since {reason}: {graphs}.",
                'lazy_backend.config.compile = "background" interprets meanwhile, and config.cache keeps what was '
                "compiled for the next process",
                seconds,
                len(held_up),
                "",
                "compiles",
            )


def _interpreted(run: Run, syncs: Sequence[Line]) -> Iterable[Finding]:
    """Runs that were interpreted because their compile was not finished."""
    began = {compiled["graph"]: compiled for compiled in run.compiles.values() if compiled["outcome"] not in _FAILED}
    late = [
        sync
        for sync in syncs
        if sync["plan"] == "interpreted" and sync["graph"] in began and sync["begin"] >= began[sync["graph"]]["begin"]
    ]
    if late:
        open_ones = [began[name] for name in dict.fromkeys(sync["graph"] for sync in late) if not began[name]["end"]]
        until = "was not over at the end" if open_ones else "went on"
        yield Finding(
            "Graphs were interpreted while the compiler worked",
            f"{_many(len(late), 'run')}; compiling in the background {until}. Results are the same, only slower.",
            "nothing, in a long run. lazy_backend.wait_for_compiles() before measuring; the next process finds on disk "
            "what was compiled to the end (config.cache)",
            sum(sync["run_seconds"] or 0.0 for sync in late),
            len(late),
            "",
            "compiles",
            late[-1]["program"],
            is_fault=False,
        )


def compiles_waited_for(run: Run) -> set[int]:
    """Numbers of the foreground compiles: those that ended before the sync that asked for them did."""
    waited = set()
    for sync in run.syncs.values():
        for compiled in sync["compiles"]:
            ended = run.compiles[compiled["number"]]
            host_end = sync["begin"] + sync["trace_seconds"] + sync["sync_seconds"] + sync["wait_seconds"]
            if ended["end"] is not None and ended["begin"] >= sync["begin"] and ended["end"] <= host_end + 0.001:
                waited.add(compiled["number"])
    return waited


def _recording(syncs: Sequence[Line]) -> Iterable[Finding]:
    hits = [sync for sync in syncs if sync["outcome"] == "hit, level 1" and sync["run_seconds"] is not None]
    recording = sum(sync["trace_seconds"] for sync in hits)
    running = sum(sync["run_seconds"] for sync in hits)
    if hits and recording > running:
        share = recording / (recording + running)
        yield Finding(
            "Python's own time is most of a known step",
            f"In {_many(len(hits), 'known sync')} {share:.0%} of the time was between the first call and the sync "
            "(Python, data loading, recording), the rest was running the graphs.",
            "lazy_backend.capture replays a step without its Python; look at data loading too",
            recording,
            len(hits),
            max(hits, key=lambda sync: sync["trace_seconds"])["site"],
            "steps",
        )


def _ports_off(run: Run) -> Iterable[Finding]:
    for text in run.state.get("ports off", ()):
        fact, _, loss = text.partition("\n")
        yield Finding(
            "A port does not fit this PyTorch",
            f"{fact.removeprefix('lazy_backend: ')}.",
            f"{loss.strip()}; `python -m lazy_backend` lists all ports",
            0.0,
            1,
            "",
            "steps",
        )


def _stepped_aside(run: Run) -> Iterable[Finding]:
    for text in run.state.get("stepping aside", ()):
        fact, _, stretches = text.partition("\n")
        yield Finding(
            "Calls ran at once, since recording them takes longer",
            f"{fact}. {'; '.join(line.strip() for line in stretches.splitlines())}.",
            "nothing: it is measured to be faster. Fewer reads, sizes that recur, larger steps or lazy_backend.capture "
            "make recording pay",
            0.0,
            1,
            "",
            "steps",
            is_fault=False,
        )


def _never_replayed(run: Run) -> Iterable[Finding]:
    for row in run.state.get("captured", ()):
        if row["calls"] < _MANY_CALLS or row["replays"]:
            continue
        reason = next(iter(row["as_written"]), "no backward has run through it twice")
        yield Finding(
            f"The captured {row['name']} is never replayed",
            f"None of its {row['calls']} calls was replayed: {reason.splitlines()[0]}.",
            " ".join(line.strip() for line in reason.splitlines()[1:]) or "do not capture it, or change what it says",
            0.0,
            row["calls"],
            row["site"],
            "steps",
        )


def _waits(syncs: Sequence[Line]) -> Iterable[Finding]:
    seconds = sum(sync["wait_seconds"] for sync in syncs)
    yield Finding(
        "Python waited for the device",
        "At the syncs the run before was not over. This is as it should be if the device is what limits the run.",
        "nothing on the host would make this faster: look at the slowest graphs",
        seconds,
        sum(sync["wait_seconds"] > 1e-4 for sync in syncs),
        "",
        "graphs",
        is_fault=False,
    )


def _waits_for_the_compiler(run: Run) -> Iterable[Finding]:
    for (call, site), group in _grouped(run.waits, lambda wait: (wait["call"], wait["site"])):
        until = "until it was done" if group[-1]["done"] else "and went on before it was done"
        last = ", the last time" if len(group) > 1 else ""
        yield Finding(
            f"The program waited in {call}",
            f"It asked to wait for the compiler {_times(len(group))}{last} {until}.",
            "nothing, before a measurement. Training need not wait: graphs are interpreted meanwhile",
            sum(wait["seconds"] for wait in group),
            len(group),
            site,
            "timeline",
            is_fault=False,
        )


def _collectives(run: Run, syncs: Sequence[Line]) -> Iterable[Finding]:
    """What ranks waited for each other: a collective takes long on those that come early, and not on the last one."""
    spent: dict[str, float] = {}
    for sync in syncs:
        spent[sync["device"]] = spent.get(sync["device"], 0.0) + sync.get("collective_seconds", 0.0)
    total, runs = sum(spent.values()), sum(sync["run_seconds"] or 0.0 for sync in syncs)
    if "ranks" not in run.header:
        yield Finding(
            "Collectives took part of the runs",
            f"{total / max(runs, total, 1e-9):.0%} of the time of runs, waiting for other ranks included.",
            "see who waits for whom: python -m lazy_backend.report with the logs of all ranks",
            total,
            sum(bool(sync.get("collective_seconds")) for sync in syncs),
            "",
            "timeline",
            is_fault=False,
        )
        return
    last = min(spent, key=lambda device: spent[device])
    each = ", ".join(f"{device} {seconds:.3g} s" for device, seconds in spent.items())
    yield Finding(
        f"Other ranks waited for {last}",
        f"Seconds in collectives: {each}. Who spends the least there comes last, and the others wait.",
        f"look at what {last} does in the timeline that the others do not, or give it less work",
        max(spent.values()) - spent[last],
        sum(bool(sync.get("collective_seconds")) for sync in syncs),
        "",
        "timeline",
    )


def _failures(run: Run) -> Iterable[Finding]:
    waited = compiles_waited_for(run)
    for compiled in run.compiles.values():
        if compiled["outcome"] in _FAILED:
            yield Finding(
                f"the compiler {_FAILED[compiled['outcome']]} graph {compiled['graph']}",
                f"{compiled['error'] or ''}"[:400],
                "nothing: PyTorch's own kernel computes that part, and the rest is compiled"
                if compiled["outcome"] == "repaired"
                else "results are the same, only slower; see the error, and docs/limits.md",
                compiled["seconds"] if compiled["number"] in waited else 0.0,
                1,
                "",
                "compiles",
            )


def _growth(run: Run) -> Iterable[Finding]:
    """Devices whose live tensors grow in number with every step, as with a list of losses."""
    for device in dict.fromkeys(sample["device"] for sample in run.memory):
        samples = [sample for sample in run.memory if sample["device"] == device]
        later = samples[len(samples) // 4 :]  # parameters and optimizer state are made at the beginning
        if len(later) < 3 or later[-1]["step"] == later[0]["step"]:
            continue
        steps = later[-1]["step"] - later[0]["step"]
        counts = [sample["tensors"] for sample in later]
        per_step = (counts[-1] - counts[0]) / steps
        rising = sum(b >= a for a, b in pairwise(counts)) / (len(counts) - 1)
        if per_step >= _GROWS and rising > 0.9:
            yield _grown(run, device, samples[0], samples[-1], per_step)


def _grown(run: Run, device: str, first: Line, last: Line, per_step: float) -> Finding:
    peak = run.peaks.get(device, {"lines": [], "step": 0})
    most = max((row for row in peak["lines"] if row["site"]), key=lambda row: row["tensors"], default=None)
    text = f"From {first['tensors']} to {last['tensors']} in steps {first['step']} to {last['step']}."
    if most is not None:
        text += f" In step {peak['step']} most of them ({most['tensors']}) were {most['how']} this line."
    return Finding(
        f"live tensors on {device} grow by {per_step:.2g} per step",
        text,
        "something holds results of every step, such as a list of losses: keep numbers (loss.item() after "
        "mark_step()), or a running sum",
        0.0,
        round(per_step * (last["step"] - first["step"])),
        most["site"] if most else "",
        "memory",
    )


# ----- words


def _host_seconds(sync: Line) -> float:
    return float(sync["trace_seconds"] + sync["sync_seconds"])


def _grouped(items: Iterable[Line], key: Any) -> list[tuple[Any, list[Line]]]:
    groups: dict[Any, list[Line]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.items())


def cut_short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} …"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
