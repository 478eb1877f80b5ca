"""Soak: train for long while things go wrong, and check that nothing is lost, hung, leaked or silently wrong.

    python tools/soak.py --minutes 20
    python tools/soak.py --hours 2 --write docs/reliability.md
    python tools/soak.py --only interrupt,fork --minutes 5 --seed 7

In: flags. Out: a table on stdout, or between the markers of a page; all figures as JSON, written as the soak goes on.
The exit status is 1 if anything failed. Each scenario of soak_test/scenarios.py runs in a process of its own, with its
own folders for temporary files and compiled graphs. One that gives no sign of life counts as hung, and its stacks are
kept.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from shared.workers import finding_tools, give_recorder
from soak_test import run as soak_run
from soak_test.run import MARK, Record, Run, show_stacks_on_signal, tail
from soak_test.scenarios import SCENARIOS, Scenario
from tqdm import tqdm

BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"

# Seconds that processes of a scenario may take to end after it.
_FAREWELL = 15.0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="for all scenarios together (default 20)")
    parser.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--only", help="names of scenarios, with commas between; --list shows them")
    parser.add_argument("--list", action="store_true", help="print the names of the scenarios and what they inject")
    parser.add_argument("--seed", type=int, default=0, help="of what is injected when (default 0)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the markers of this page")
    parser.add_argument("--json", type=Path, default=Path("soak.json"), help="all figures (default soak.json)")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="run nothing: make the table of these figures")
    parser.add_argument("--patience", type=float, default=soak_run.PATIENCE + 30, help=argparse.SUPPRESS)
    parser.add_argument("--scenarios", type=Path, metavar="FILE", help="a Python file with scenarios of its own")
    for hidden, kind in (("--run-one", str), ("--seconds", float), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.minutes is not None and chosen.hours is not None:
        parser.error("--minutes and --hours say the same")
    chosen.budget = 60.0 * (chosen.hours * 60 if chosen.hours is not None else chosen.minutes or 20.0)
    return chosen


def load_scenarios(file: Path | None) -> dict[str, Scenario]:
    """The scenarios of `file`, which fills `soak_test.scenarios.SCENARIOS`; all usual ones without it."""
    if file is not None:
        SCENARIOS.clear()
        spec = importlib.util.spec_from_file_location("own_scenarios", file)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return SCENARIOS


def chosen_scenarios(only: str | None) -> list[Scenario]:
    if only is None:
        return list(SCENARIOS.values())
    names = only.split(",")
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise SystemExit(f"no scenario {', '.join(unknown)}\n  there are: {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names]


# ----- a scenario, from inside its process


def run_one(scenario: Scenario, seconds: float, seed: int, folder: Path) -> None:
    """Run a scenario in this process. What it raises is a failed claim."""
    show_stacks_on_signal()
    run = Run(scenario.name, seconds, seed, folder)
    # what imports made is no part of the figures, and would take 0.1 s of each sample
    gc.collect()
    gc.freeze()
    try:
        scenario.function(run)
    except BaseException as error:
        traceback.print_exc()
        run.claim("the scenario runs to its end", False, soak_run.traceback_text(error))
    run.finish()


# ----- and from outside


def start_scenario(name: str, seconds: float, chosen: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    places = {"TMPDIR": folder / "tmp", "LAZY_BACKEND_CACHE_DIR": folder / "cache"}
    places["TMPDIR"].mkdir(mode=0o700)
    give_recorder(places["LAZY_BACKEND_CACHE_DIR"])
    variables = {
        **{variable: str(place) for variable, place in places.items()},
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "LAZY_BACKEND_PROGRESS": "0",
        MARK: str(folder),
    }
    own = [] if chosen.scenarios is None else ["--scenarios", str(chosen.scenarios.resolve())]
    options = ["--seconds", str(seconds), "--seed", str(chosen.seed), "--folder", str(folder)]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "--run-one", name, *options, *own],
            env=finding_tools({"OMP_NUM_THREADS": "1", **os.environ, **variables}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def watch(scenario: Scenario, seconds: float, chosen: argparse.Namespace, bar: tqdm) -> Record:
    """Run a scenario in a process of its own, and see that it ends, well, and leaves nothing."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    process = start_scenario(scenario.name, seconds, chosen, folder)
    start = time.monotonic()
    hung = None
    try:
        while process.poll() is None and hung is None:
            time.sleep(0.1)
            bar.n = min(bar.total, bar.initial + min(seconds, time.monotonic() - start))
            bar.refresh()
            hung = _silence(folder, start, seconds, chosen.patience)
        if hung is not None:
            _print_all_stacks(process.pid)
    finally:
        left = _end_processes(process, str(folder), wait=hung is None and process.poll() is not None)
    record = _read_record(scenario.name, folder)
    log = tail(folder / "log", 8000)
    record.claim("nothing hangs", hung is None, f"{hung}; the stacks:\n{log}")
    ended = record.finished and process.returncode == 0
    if hung is None:
        record.claim("the process ends by itself", ended, f"status {process.returncode}:\n{log}")
        record.claim("no process is left", not left, "\n".join(left))
    shutil.rmtree(folder, ignore_errors=True)
    return record


def _silence(folder: Path, start: float, seconds: float, patience: float) -> str | None:
    """What is wrong if a scenario gave no sign of life, or goes on for too long."""
    file = folder / "record.json"
    latest = time.time() - file.stat().st_mtime if file.exists() else time.monotonic() - start
    if latest > patience:
        return f"no sign of life for {latest:.0f} s"
    if time.monotonic() - start > 4 * seconds + 1800:
        return f"still running after {time.monotonic() - start:.0f} s"
    return None


def _print_all_stacks(pid: int) -> None:
    """Have every soak process under `pid`, and itself, print its stacks into its log."""
    for one in [pid, *soak_run.processes_under(pid)]:
        if "soak" in soak_run.command_of(one):
            soak_run.dump_stacks(one)


def _end_processes(process: subprocess.Popen[bytes], mark: str, wait: bool) -> list[str]:
    """Kill what is left of a scenario. Returns the command lines of what should have ended by itself."""
    end = time.monotonic() + (_FAREWELL if wait else 0.0)
    while (left := soak_run.marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    commands = [soak_run.command_of(pid)[:200] for pid in left]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    return commands


def _read_record(name: str, folder: Path) -> Record:
    file = folder / "record.json"
    return Record.from_json(soak_run.read_json(file)) if file.exists() else Record(name)


# ----- results


def describe_machine(chosen: argparse.Namespace) -> dict[str, Any]:
    root = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "minutes": round(chosen.budget / 60, 1),
        "seed": chosen.seed,
    }


def table(results: dict[str, Any]) -> str:
    """The results as markdown: a line about the run, a row per scenario, those that failed first, and what failed."""
    about = results["about"]
    records = sorted(map(Record.from_json, results["scenarios"]), key=lambda record: not record.failed)
    failed = sum(len(record.failed) for record in records)
    lines = [
        f"{len(records)} scenarios in {about['minutes']:g} minutes, {failed or 'no'} failed claims. Run on "
        f"{about['date']} at commit `{about['commit']}` with PyTorch {about['torch']} and Python {about['python']}, "
        f"seed {about['seed']}.",
        "",
        "| scenario | what is injected | what must hold | what happened |",
        "|---|---|---|---|",
        *map(_row, records),
    ]
    lines += [f"\nFailed in `{record.name}`:\n\n{_failures(record)}" for record in records if record.failed]
    return "\n".join(lines)


def _row(record: Record) -> str:
    scenario = SCENARIOS.get(record.name)
    told = (scenario.injected, scenario.promise) if scenario else ("", "")
    counts = [f"{what}: {count:,}" for what, count in record.injected.items()]
    figures = [f"{name}: {f'{value:,}' if isinstance(value, int) else value}" for name, value in record.figures.items()]
    cells = [f"`{record.name}`", *told, "; ".join([*counts, *figures, _outcome(record)])]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _outcome(record: Record) -> str:
    if record.failed:
        return "**failed**: " + "; ".join(f"{c.text} ({c.failures:,} of {c.checks:,})" for c in record.failed)
    return f"all held, in {sum(claim.checks for claim in record.claims):,} checks"


def _failures(record: Record) -> str:
    """Each failed claim with the ends of its detail."""
    return "\n".join(f"- {claim.text}: `{_shortened(claim.detail)}`" for claim in record.failed)


def _shortened(text: str) -> str:
    """The first line and the last, which of a traceback is the error; without folders of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = [line for line in dict.fromkeys([lines[0], lines[-1]]) if not line.startswith("Traceback")]
    return re.sub(r"(/[\w.+-]+)+/", "", " ... ".join(line[:200] for line in chosen)).replace("`", "'")


def write_page(page: Path, text: str) -> None:
    """Put `text` between the markers of `page`."""
    whole = page.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    if not pattern.search(whole):
        raise SystemExit(f"{page} has no markers\n  put {BEGIN} and {END} where the table is to be")
    partial = page.with_suffix(".partial")
    partial.write_text(pattern.sub(lambda match: f"{BEGIN}\n{text}\n{END}", whole))
    partial.replace(page)


def keep(chosen: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is so far."""
    soak_run.write_json(chosen.json, results)
    if chosen.write is not None:
        write_page(chosen.write, table(results))


# ----- the command


def soak(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run the scenarios that were chosen, one after the other, and keep results after each."""
    scenarios = chosen_scenarios(chosen.only)
    weights = sum(scenario.weight for scenario in scenarios)
    results: dict[str, Any] = {"about": describe_machine(chosen), "scenarios": []}
    with tqdm(total=chosen.budget, unit="s", bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s [{elapsed}]") as bar:
        for scenario, seconds in _shares(scenarios, chosen.budget, weights):
            bar.set_description(scenario.name)
            record = watch(scenario, seconds, chosen, bar)
            bar.initial = bar.n = min(bar.total, bar.initial + seconds)
            results["scenarios"].append(asdict(record))
            for claim in record.failed:
                bar.write(
                    f"FAILED {scenario.name}: {claim.text} ({claim.failures} of {claim.checks})\n{claim.detail}\n"
                )
            keep(chosen, results)
    return results


def _shares(scenarios: Sequence[Scenario], budget: float, weights: float) -> Iterator[tuple[Scenario, float]]:
    for scenario in scenarios:
        yield scenario, budget * scenario.weight / weights


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    load_scenarios(chosen.scenarios)
    if chosen.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:22}{scenario.injected}")
        return 0
    if chosen.run_one is not None:
        run_one(SCENARIOS[chosen.run_one], chosen.seconds, chosen.seed, chosen.folder)
        return 0
    results = soak_run.read_json(chosen.from_json) if chosen.from_json is not None else soak(chosen)
    if chosen.from_json is not None and chosen.write is not None:
        write_page(chosen.write, table(results))
    print(table(results))
    return int(any(Record.from_json(data).failed for data in results["scenarios"]))


if __name__ == "__main__":
    sys.exit(main())
