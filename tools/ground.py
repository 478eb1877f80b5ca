"""Ground: what the installed package costs programs that do not use it, and whether it is the same on each PyTorch.

    python tools/ground.py
    python tools/ground.py --venvs .venv .venv-2.14.1 .venv-2.15.0

In: flags. Out: a table in markdown, with a column for each environment; raw figures as JSON. Progress goes to stderr.
Three parts: what the package adds to `import torch`, in new processes; what it adds to calls of eager programs, in two
processes that take turns (`TORCH_DEVICE_BACKEND_AUTOLOAD=0` in one of them); and the package in use: autocast, the
README's blocks, runs beside recording, artefacts, recording, a plain loop. The first two have a ratio or difference for
each pair of measurements; shown are medians and the range without the outer tenths.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

from shared import figures
from shared.checkout import ROOT, commit
from shared.tables import Table
from shared.workers import Reply, Worker, WorkerFailed, answer_commands

Rows = dict[str, str]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
WITHOUT, INSTALLED = {AUTOLOAD: "0"}, {AUTOLOAD: "1"}

_SECONDS = 0.02  # of one measurement of a call, which is repeated as often as that takes
_STEPS = 60  # of the GPT whose runs are counted


def _progress(text: str) -> None:
    print(f"ground: {text}", file=sys.stderr, flush=True)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The values without the smallest and the largest tenth."""
    ordered = sorted(values)
    outer = len(ordered) // 10
    return ordered[outer], ordered[-1 - outer]


# ----- import torch

# Processor time as well: another process on the same core adds nothing to it.
_IMPORT = """
import json, sys, time
begin = time.perf_counter(), time.process_time()
import torch
end = time.perf_counter(), time.process_time()
pages = open("/proc/self/statm").read().split()[1] if sys.platform == "linux" else 0
found = {"wall": end[0] - begin[0], "cpu": end[1] - begin[1], "MiB": int(pages) * 4096 / 2**20}
print(json.dumps({**found, "modules": len(sys.modules)}))
"""


# The entry point by itself: torch also searches the environment for entry points, which it does without ours as well.
_ENTRY = """
import json, time
import torch
begin = time.perf_counter()
import lazy_backend_autoload
lazy_backend_autoload.autoload()
print(json.dumps({"entry": time.perf_counter() - begin}))
"""


def _imported(changes: Mapping[str, str], code: str = _IMPORT) -> dict[str, float]:
    environment = {**os.environ, **changes}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tempfile.gettempdir(), capture_output=True, text=True
    )
    if done.returncode:
        raise WorkerFailed(f"import torch failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def import_rows(pairs: int) -> Rows:
    """What the package adds to `import torch`: seconds, memory, modules."""
    for changes in (WITHOUT, INSTALLED):
        _imported(changes)  # reads files and writes byte code
    found = []
    for number in range(pairs):
        _progress(f"import torch: pair {number + 1} of {pairs}")
        if number % 2:
            installed = _imported(INSTALLED)
            found.append((_imported(WITHOUT), installed))
        else:
            found.append((_imported(WITHOUT), _imported(INSTALLED)))
    rows = {}
    for key, name, unit, scale in (
        ("wall", "time", "ms", 1e3),
        ("cpu", "processor time", "ms", 1e3),
        ("MiB", "memory", "MiB", 1.0),
        ("modules", "modules", "", 1.0),
    ):
        added = [(other[key] - own[key]) * scale for own, other in found]
        low, high = _range(added)
        whole = statistics.median(own[key] for own, _ in found) * scale
        text = f"{statistics.median(added):+,.1f} {unit} ({low:+,.1f} to {high:+,.1f}) of {whole:,.0f} {unit}"
        rows[f"`import torch`: {name} added"] = " ".join(text.split())
    alone = [1e3 * _imported(WITHOUT, _ENTRY)["entry"] for _ in range(pairs)]
    low, high = _range(alone)
    rows["the entry point alone"] = f"{statistics.median(alone):.2f} ms ({low:.2f} to {high:.2f})"
    return rows


# ----- calls of eager programs


def _operator(torch: Any) -> Callable[[], Any]:
    x, y = torch.ones(4), torch.ones(4)
    return lambda: x + y


def _module_call(torch: Any) -> Callable[[], Any]:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    return lambda: layer(x)


def _autocast_block(torch: Any) -> Callable[[], Any]:
    def block() -> None:
        with torch.autocast("cpu"):
            pass

    return block


def _backward(torch: Any) -> Callable[[], Any]:
    weight = torch.ones(4, requires_grad=True)
    return lambda: (weight * weight).sum().backward()


def _optimizer_step(kind: str) -> Callable[[Any], Callable[[], Any]]:
    def make(torch: Any) -> Callable[[], Any]:
        parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        return getattr(torch.optim, kind)(parameters, lr=1e-3).step  # type: ignore[no-any-return]

    return make


def _loop(torch: Any) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.ones(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()

    return step


def _save_and_load(torch: Any) -> Callable[[], Any]:
    saved = {"weight": torch.ones(4, 4), "step": 3}

    def save() -> None:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        torch.load(file)

    return save


def _generator(torch: Any) -> Callable[[], Any]:
    return lambda: torch.Generator()


def _norm(torch: Any) -> Callable[[], Any]:
    x = torch.ones(4)
    return lambda: torch.norm(x)


ACTIONS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "an operator": _operator,
    "a call of `Linear`": _module_call,
    "an empty autocast block": _autocast_block,
    "a backward": _backward,
    "a step of SGD": _optimizer_step("SGD"),
    "a step of AdamW": _optimizer_step("AdamW"),
    "a step of an MLP": _loop,
    "`torch.save` and `load`": _save_and_load,
    "`torch.Generator()`": _generator,
    "`torch.norm`": _norm,
}


def serve_actions() -> None:
    """Answer `time`: seconds that so many calls of an action take. In a process of its own."""
    import torch

    calls: dict[str, Callable[[], Any]] = {}

    def answer(command: str, action: str, count: int = 0) -> Reply:
        if action not in calls:
            calls[action] = ACTIONS[action](torch)
            for _ in range(50):
                calls[action]()
        call = calls[action]
        if command == "calibrate":
            return {"count": max(1, math.ceil(_SECONDS / max(_timed(call, 20) / 20, 1e-9)))}
        return {"seconds": _timed(call, count)}

    answer_commands(answer)


def _timed(call: Callable[[], Any], count: int) -> float:
    """Seconds of a processor: all that these calls do is done by this thread, and others may want the core."""
    times = range(count)
    begin = thread_time()
    for _ in times:
        call()
    return thread_time() - begin


def action_rows(rounds: int) -> Rows:
    """Microseconds of calls, without the package and with it."""
    command = [sys.executable, __file__, "--serve", "actions"]
    seconds: dict[str, list[tuple[float, float]]] = {action: [] for action in ACTIONS}
    with (
        Worker("without", command, {**ONE_THREAD, **WITHOUT}) as without,
        Worker("installed", command, {**ONE_THREAD, **INSTALLED}) as installed,
    ):
        counts = {action: without.ask("calibrate", action=action)["count"] for action in ACTIONS}
        for number in range(rounds):
            _progress(f"calls: round {number + 1} of {rounds}")
            for action, count in counts.items():
                order = (without, installed) if number % 2 else (installed, without)
                took = {worker.name: worker.ask("time", action=action, count=count)["seconds"] for worker in order}
                seconds[action].append((took["without"] / count, took["installed"] / count))
    return {f"{action}, µs": _compared(pairs) for action, pairs in seconds.items()}


def _compared(pairs: Sequence[tuple[float, float]]) -> str:
    own, other = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [installed / without for without, installed in pairs]
    low, high = _range(ratios)
    return f"{own:,.2f} → {other:,.2f}: {statistics.median(ratios):.3f} ({low:.2f} to {high:.2f})"


# ----- the package in use


def _autocast_on(device: str) -> str:
    import torch

    x = torch.ones(4, 4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        product = x @ x
    product.float().sum().backward()
    assert x.grad is not None
    return f"works: {product.dtype}, {x.grad.sum().item():g}".replace("torch.", "")


def _gpt_steps() -> Reply:
    """Runs of a small GPT's training beside recording, and how many compiled graphs are called from Python.

    The latter also of the graphs of two other trainings.
    """
    from shared.workloads import WORKLOADS, make_training

    import lazy_backend

    lazy_backend.config.compile = "foreground"
    training = make_training(WORKLOADS["gpt-sgd"], "lazy")
    lazy_backend.mark_step(wait=True)
    before = lazy_backend.metrics.counter_value("ExecuteBeside")
    for _ in range(_STEPS):
        training.step()
        lazy_backend.mark_step()
    lazy_backend.wait_device_ops()
    beside = lazy_backend.metrics.counter_value("ExecuteBeside") - before
    for name in ("mlp", "cnn"):
        other = make_training(WORKLOADS[name], "lazy")
        for _ in range(6):
            other.step()
            lazy_backend.mark_step(wait=True)
    counters = lazy_backend.metrics.counters()
    reasons = {key: value for key, value in counters.items() if key.startswith(("RunFromPython", "CheckLeftOut"))}
    return {
        "beside": beside,
        "compiled": counters.get("Compile", 0),
        "reasons": reasons,
        "loss": float(training.loss),
    }


def serve_use() -> None:
    """Answer questions about the package in use. In a process of its own."""

    def answer(command: str, **arguments: Any) -> Reply:
        if command == "autocast":
            return {"found": _autocast_on(**arguments)}
        return _gpt_steps()

    answer_commands(answer)


def _asked(command: str, changes: Mapping[str, str] = INSTALLED, **arguments: Any) -> Reply:
    """The answer of a new process. Raises `WorkerFailed`."""
    with Worker(command, [sys.executable, __file__, "--serve", "use"], {**ONE_THREAD, **changes}) as worker:
        return worker.ask(command, **arguments)


def _autocast_row(device: str) -> str:
    try:
        return str(_asked("autocast", device=device)["found"])
    except WorkerFailed as failure:
        return f"fails: {failure}"


def _readme_blocks() -> Iterator[str]:
    """The code of each block of the README that is to run."""
    for match in re.finditer(
        r"^(<!--.*-->\n)?([ ]*)```python\n(.*?)^[ ]*```", (ROOT / "README.md").read_text(), re.M | re.S
    ):
        if match[1] is None:
            yield textwrap.dedent(match[3])


def _readme_row() -> str:
    failed, count = [], 0
    for code in _readme_blocks():
        count += 1
        with tempfile.TemporaryDirectory(prefix="ground-") as folder:
            variables = {**os.environ, **INSTALLED, "LAZY_BACKEND_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True
            )
        if done.returncode:
            failed.append((done.stderr.splitlines() or ["it printed nothing"])[-1][:200])
    return f"{count - len(failed)} of {count} run" + "".join(f"; {line}" for line in failed)


def _gpt_rows() -> Rows:
    beside, artefacts = (
        f"of {_STEPS} steps of a GPT, runs beside recording",
        "artefacts of compiled graphs",
    )
    try:
        found = _asked("gpt")
    except WorkerFailed as failure:
        return {beside: f"fails: {failure}", artefacts: "-"}
    python = {key: value for key, value in found["reasons"].items() if key.startswith("RunFromPython")}
    from_python = sum(python.values())
    reasons = "".join(f"; {key}: {value}" for key, value in found["reasons"].items())
    return {
        beside: str(found["beside"]),
        artefacts: f"{found['compiled'] - from_python} native, {from_python} bundled{reasons}",
        "the GPT's loss after them": f"{found['loss']:.6f}",
    }


def _bench_worker(contender: str) -> Worker:
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "--worker", contender, "--workload", "mlp"]
    return Worker(contender, command, {**ONE_THREAD, **(WITHOUT if contender == "eager" else INSTALLED)})


def _recording_row(rounds: int) -> str:
    with _bench_worker("lazy-off") as worker:
        worker.ask("start", steps=20)
        traces = [worker.ask("trace", steps=60) for _ in range(rounds)]
    each = [1e6 * (one["trace"] + one["sync"]) / one["operators"] for one in traces]
    low, high = _range(each)
    return f"{statistics.median(each):.2f} ({low:.2f} to {high:.2f}); {traces[0]['operators']:.0f} calls a step"


def _loop_row(rounds: int) -> str:
    with _bench_worker("eager") as eager, _bench_worker("lazy") as lazy:
        for worker in (eager, lazy):
            worker.ask("start", steps=60)
        took = [
            (eager.ask("round", steps=500)["seconds"], lazy.ask("round", steps=500)["seconds"]) for _ in range(rounds)
        ]
    ratios = [own / other for own, other in took]
    low, high = _range(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def use_rows(rounds: int) -> Rows:
    """What the package does on this PyTorch."""
    rows = {}
    for device in ("cpu", "lazy"):
        _progress(f"autocast on {device}")
        rows[f"autocast on {device}"] = _autocast_row(device)
    _progress("blocks of the README")
    rows["the README's blocks"] = _readme_row()
    _progress("a GPT")
    rows |= _gpt_rows()
    measured: dict[str, Callable[[int], str]] = {
        "recording a step of an MLP, µs per call": _recording_row,
        "a plain loop of an MLP, speed / eager's": _loop_row,
    }
    for name, measure in measured.items():
        _progress(name)
        try:
            rows[name] = measure(rounds)
        except WorkerFailed as failure:
            rows[name] = f"fails: {failure}"
    return rows


# ----- environments


def measure(arguments: argparse.Namespace) -> Reply:
    """All rows, in this environment."""
    import torch

    parts: dict[str, Callable[[], Rows]] = {
        "import": lambda: import_rows(arguments.pairs),
        "calls": lambda: action_rows(arguments.rounds),
        "use": lambda: use_rows(max(3, arguments.rounds // 3)),
    }
    rows: Rows = {"Python": sys.version.split()[0], "checkout": commit()}
    for part in arguments.parts:
        rows |= parts[part]()
    return {"torch": str(torch.__version__), "rows": rows}


def _measured_by(interpreter: Path, arguments: argparse.Namespace) -> Reply:
    _progress(f"with {interpreter}")
    with tempfile.TemporaryDirectory(prefix="ground-") as folder:
        out = Path(folder, "found.json")
        options = ["--json", str(out), "--pairs", str(arguments.pairs), "--rounds", str(arguments.rounds)]
        command = [str(interpreter), __file__, *options, "--parts", *arguments.parts]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env={**os.environ, **WITHOUT})
        return dict(json.loads(out.read_text()))


def _interpreter(folder: Path) -> Path:
    """Python of an environment; not resolved, as the link's place is what tells it its packages."""
    found = folder.absolute() / "bin" / "python"
    if not found.exists():
        raise SystemExit(f"no environment is in {folder}. Fix: make test TORCH=<version>")
    return found


def table(results: Sequence[Reply]) -> Table:
    """A column for each environment."""
    names = list(dict.fromkeys(name for found in results for name in found["rows"]))
    rows = [[name, *(found["rows"].get(name, "-") for found in results)] for name in names]
    note = "Calls: processor microseconds without → with the package, the ratio and its range; one thread per operator."
    return Table("The package beside programs, and in use", ["", *(found["torch"] for found in results)], rows, note)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", nargs="+", type=Path, help="environments, each a column")
    parser.add_argument("--parts", nargs="+", choices=("import", "calls", "use"), default=["import", "calls", "use"])
    parser.add_argument("--pairs", type=int, default=12, help="pairs of processes that import torch (default 12)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the calls of eager programs (default 20)")
    parser.add_argument("--figures", type=Path, help="the file of the pages' figures, docs/speed.json: its section")
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    parser.add_argument("--serve", choices=("actions", "use"), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.serve:
        {"actions": serve_actions, "use": serve_use}[arguments.serve]()
        return
    if arguments.venvs:
        results = [_measured_by(_interpreter(folder), arguments) for folder in arguments.venvs]
    else:
        results = [measure(arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(results if arguments.venvs else results[0], indent=1))
    print(table(results).markdown())
    if arguments.figures:
        command = " ".join(["python tools/ground.py", *sys.argv[1:]])
        figures.write(arguments.figures, "ground", figures.section_of([table(results)], command))


if __name__ == "__main__":
    main()
