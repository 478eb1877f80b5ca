"""PyTorch's database of operators on DTensors: a mesh of lazy devices against a mesh of CPUs, on several processes.

    python tools/conformance_suite/dtensors.py --ops '^add' --ranks 4
    python tools/conformance_suite/dtensors.py --json build/dtensors.jsonl

In: flags. Out: a line of JSON per operator in a file, and a summary on stdout; status 1 if an operator differs.
Each sample of `op_db` is called with its tensors laid out over the ranks in every way that PyTorch's own DTensor tests
try (`DTensorConverter`): copied, or cut along a dimension. A call has to do what it does on a mesh of CPUs: give the
same whole tensors and gradients, or raise an error of the same class. A group of processes that hangs or crashes is
replaced, and goes on with the next operator.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

# Their numbers are drawn, or are whatever the memory held: only the shapes of their results are compared.
ARBITRARY = re.compile(
    r"^(bernoulli|cauchy|empty|exponential|geometric|log_normal|multinomial|new_empty|normal|rand|uniform|"
    r"nn\.functional\.(\w*dropout|rrelu|fractional_max_pool|multi_head_attention|scaled_dot_product)|"
    r"pca_lowrank|svd_lowrank)"
)


def outcome(op: Any, args: Sequence[Any], kwargs: dict[str, Any], gradients: bool) -> list[Any] | str:
    """Whole results and gradients on the CPU, or the class of the error."""
    torch.manual_seed(0)
    try:
        found = [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        if gradients:
            roots = [leaf for leaf in found if leaf.requires_grad]
            if roots:
                sum(leaf.abs().sum() for leaf in roots).backward()
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            found += [leaf.grad for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
        return [_whole(leaf) for leaf in found]
    except Exception as error:
        return type(error).__name__


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def difference(expected: list[Any] | str, found: list[Any] | str, arbitrary: bool) -> str | None:
    if isinstance(expected, str) or isinstance(found, str):
        raised = [one if isinstance(one, str) else "a result" for one in (expected, found)]
        return None if raised[0] == raised[1] else f"{raised[1]} instead of {raised[0]}"
    try:
        if arbitrary:
            expected, found = ([torch.zeros_like(one) for one in side] for side in (expected, found))
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None


def check(op: Any, meshes: Sequence[DeviceMesh], most_samples: int, most_layouts: int) -> dict[str, Any]:
    """What an operator does on both meshes, the first on CPUs: calls, errors that both raise, differences."""
    counts, differences = Counter[str](), []
    arbitrary = ARBITRARY.match(op.full_name) is not None
    gradients = op.supports_autograd and not arbitrary
    for number, sample in enumerate(itertools.islice(op.sample_inputs("cpu", torch.float32), most_samples)):
        copies = [[] for _ in meshes]
        for mesh, made in zip(meshes, copies, strict=True):
            converter = DTensorConverter(mesh, (sample.input, *sample.args), sample.kwargs)
            made.extend(itertools.islice(converter, most_layouts))
        for layout, calls in enumerate(zip(*copies, strict=True)):
            results = []
            for args, kwargs in calls:
                if gradients:
                    args, kwargs = tree_map_only(torch.Tensor, _differentiable, (args, kwargs))
                results.append(outcome(op, args, kwargs, gradients))
            counts["calls"] += 1
            counts["errors"] += isinstance(results[0], str)
            if (differs := difference(*results, arbitrary)) is not None:
                differences.append(f"sample {number}, layout {layout}: {differs}")
    return {"operator": op.full_name, **counts, "differences": differences}


def _differentiable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


# ----- processes


def serve(rank: int, chosen: argparse.Namespace, port: int, names: Sequence[str], file: Path) -> None:
    """What a rank does: check the operators one after the other. The first rank writes what comes of them."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(chosen.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import lazy_backend

    lazy_backend.config.cache = False
    lazy_backend.config.compile = "off" if chosen.backend == "interpreted" else "foreground"
    if chosen.backend != "interpreted":
        lazy_backend.config.backend = chosen.backend
    dist.init_process_group("gloo", timeout=timedelta(seconds=chosen.seconds))
    meshes = [init_device_mesh(device, (chosen.ranks,)) for device in ("cpu", "lazy")]
    known = {op.full_name: op for op in op_db}
    for name in names:
        try:
            result = check(known[name], meshes, chosen.samples, chosen.layouts)
        except Exception:
            result = {"operator": name, "differences": [traceback.format_exc(limit=-3)]}
        dist.barrier()
        if rank == 0:
            with file.open("a") as lines:
                lines.write(json.dumps(result) + "\n")


def run(names: Sequence[str], chosen: argparse.Namespace, file: Path) -> Iterator[dict[str, Any]]:
    """Results in the order of `names`, from one group of processes after the other."""
    file.unlink(missing_ok=True)
    file.touch()
    done = 0
    while done < len(names):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        group = [
            context.Process(target=serve, args=(rank, chosen, port, names[done:], file), daemon=True)
            for rank in range(chosen.ranks)
        ]
        for process in group:
            process.start()
        changed = time.monotonic() + 60  # to start
        while done < len(names) and time.monotonic() - changed < chosen.seconds:
            results = [json.loads(line) for line in file.read_text().splitlines()]
            yield from results[done:]
            changed = time.monotonic() if len(results) > done else changed
            done = len(results)
            if done < len(names) and not all(process.is_alive() for process in group):
                break
            time.sleep(0.05)
        for process in group:
            process.kill()
            process.join()
        if done < len(names):
            lost = {"operator": names[done], "differences": ["the processes hung or crashed"]}
            with file.open("a") as lines:
                lines.write(json.dumps(lost) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a pattern that their names contain")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=3, help="of an operator, at most")
    parser.add_argument("--layouts", type=int, default=8, help="of a sample, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="for an operator; then it hangs")
    parser.add_argument("--backend", default="interpreted", help="interpreted, eager, aot_eager or inductor")
    parser.add_argument("--json", type=Path, default=None, help="the file of results")
    chosen = parser.parse_args()
    names = [op.full_name for op in op_db if torch.float32 in op.dtypes and re.search(chosen.ops, op.full_name)]
    names = list(dict.fromkeys(names))
    totals, different = Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        file = chosen.json or Path(folder) / "results.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        for result in tqdm(run(names, chosen, file), total=len(names), disable=None):
            totals.update({name: result.get(name, 0) for name in ("calls", "errors")})
            if result["differences"]:
                different.append(result["operator"])
                tqdm.write(f"{result['operator']}: {len(result['differences'])}, as {result['differences'][0]}")
    print(
        f"{len(names) - len(different)} of {len(names)} operators do on {chosen.ranks} lazy devices what they do on "
        f"CPUs: {totals['calls']} calls, of which {totals['errors']} raise on both"
    )
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
