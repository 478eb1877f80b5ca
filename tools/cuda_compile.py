"""Compile steps for a GPU that is not there, and run their kernels by Triton's interpreter.

    make test-cuda-compile
    python tools/cuda_compile.py --steps mlp,lstm

In: a CUDA build of PyTorch, no GPU. Out: a row for each step of `gpu/training.py`; exit status 0 if all is well: every
kernel that Inductor wrote was compiled to machine code, keys name capability and driver, the artefact was loaded up to
the driver (`gpu/absent.py`), and, found again by its key in a second process and loaded with `TRITON_INTERPRET=1`, it
agrees with the graph's operators by the trial that every compiled step has to pass (`lowering/plans/trial.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from gpu.training import GPU_WORKLOADS
from shared import figures
from shared.checkout import ROOT
from shared.command_line import names_among
from shared.tables import Result, Table
from shared.workers import WorkerFailed, returned_by

try:
    from gpu.absent import TARGETS
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    sys.exit(
        "cuda_compile: this PyTorch comes without Triton\n  a CUDA build has it: `make test-cuda-compile` sets one up"
    )

_HEAD = ("step", "nodes", "kernels", "compiled", "cubins", "artefact", "compared", "results", "verdict", "seconds")


def faults_of(compiled: Result, interpreted: Result) -> list[str]:
    """What is not as it has to be."""
    wanted = set(compiled["kernels"])
    missing = {"compiled": wanted ^ set(compiled["loaded"]), "run by the interpreter": wanted ^ set(interpreted["ran"])}
    faults = [f"not {what}: {', '.join(sorted(names))}" for what, names in missing.items() if names]
    if not wanted:
        faults.append("there are no kernels")
    faults += [f"not in the key: {part}" for part in compiled["unnamed"]]
    if interpreted["verdict"] != "agreed":
        faults.append(f"{interpreted['verdict']}: {interpreted['refusal']}")
    return faults


def _measure(step: str, target: str, folder: Path) -> tuple[Result, Result]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "LAZY_BACKEND_CACHE_DIR": str(folder / "cache")}
    results = []
    for call, further in (("compiled", {}), ("interpreted", {"TRITON_INTERPRET": "1"})):
        own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / call), "TRITON_CACHE_DIR": str(folder / f"{call}-triton")}
        results.append(
            returned_by(f"gpu.compiled_steps.{call}({step!r}, {target!r})", {**environment, **own, **further}, 1)
        )
    return results[0], results[1]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=names_among(GPU_WORKLOADS), default=("mlp", "resnet50", "gpt2", "lstm"),
                        help=f"comma-separated, of {', '.join(GPU_WORKLOADS)}")  # fmt: skip
    parser.add_argument("--figures", type=Path, help="the file of the pages' figures, docs/speed.json: its section")
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    arguments = parser.parse_args()
    rows, faults = [], []
    for step in arguments.steps:
        print(f"cuda_compile: {step}", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="lazy_backend_cuda_") as folder:
                compiled, interpreted = _measure(step, arguments.target, Path(folder))
        except WorkerFailed as failure:
            faults.append(f"{step}: {failure}")
            continue
        found = faults_of(compiled, interpreted)
        faults += [f"{step}: {fault}" for fault in found]
        verdict = "incomplete" if found and interpreted["verdict"] == "agreed" else interpreted["verdict"]
        counts = [compiled["nodes"], *(len(compiled[one]) for one in ("kernels", "loaded")), compiled["cubins"]]
        counts += [f"{compiled['kib']:.0f} KiB", len(interpreted["ran"]), interpreted["results"], verdict]
        rows.append((step, *map(str, counts), f"{compiled['seconds']:.0f}"))
    table = Table(f"Compiled for {arguments.target}, and run by Triton's interpreter", _HEAD, rows)
    print(table.aligned())
    if arguments.figures:
        figures.write(arguments.figures, "cuda-compile", figures.section_of([table], "make test-cuda-compile"))
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
