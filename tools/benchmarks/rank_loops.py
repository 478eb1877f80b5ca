"""How fast several processes train together: DistributedDataParallel and fully_shard, in eager and lazy.

In: a number of processes. Out: a table of milliseconds per step, and of what a step communicates. Run by
`bench.py --ranks`. In each process both loops live side by side and take turns, a block of steps each, between
barriers; ratios are medians of those within a round. What is communicated comes from PyTorch's profiler: the calls of
the backend, and the bytes of their operands.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from shared.tables import Table
from shared.workers import finding_tools
from shared.workloads import GPT, GPTSize
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# `lazy`: a plain loop; with DistributedDataParallel its module and its optimizer are captured. `captured`: the whole
# step is; what fully_shard does cannot be replayed.
KINDS = {"DistributedDataParallel": ("eager", "lazy", "captured"), "fully_shard": ("eager", "lazy")}

_ALL_KINDS = KINDS["DistributedDataParallel"]

SIZES = {
    "2 layers of 64": GPTSize(layers=2, width=64, fused_attention=True),
    "4 layers of 128": GPTSize(fused_attention=True),
    "6 layers of 384": GPTSize(layers=6, width=384, heads=6, fused_attention=True),
}

# Steps until compiled code runs, and steps of a block.
_WARM_STEPS, _STEPS = 12, 20


def _replicated(model: GPT, device: str) -> nn.Module:
    return DistributedDataParallel(model)


def _sharded(model: GPT, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[GPT, str], nn.Module]] = {
    "DistributedDataParallel": _replicated,
    "fully_shard": _sharded,
}


@dataclass(slots=True)
class Loop:
    """A training loop of one kind, whose batches are this rank's own."""

    kind: str
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: torch.Tensor
    targets: torch.Tensor

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(self.inputs, self.targets)
            if self.kind != "eager":
                import lazy_backend

                lazy_backend.mark_step()

    def wait(self) -> None:
        if self.kind != "eager":
            import lazy_backend

            lazy_backend.wait_device_ops()


def _loop(kind: str, way: str, size: GPTSize) -> Loop:
    import lazy_backend

    torch.manual_seed(0)
    device = "cpu" if kind == "eager" else "lazy"
    model = GPT(size).to(device)
    captures_parts = kind == "lazy" and "captured" in KINDS[way]
    if captures_parts:
        lazy_backend.capture(model)
    wrapped = WAYS[way](model, device)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    if captures_parts:
        lazy_backend.capture(optimizer)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = wrapped(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    tokens = torch.randint(
        size.vocabulary, (size.batch, size.length + 1), generator=torch.Generator().manual_seed(dist.get_rank())
    ).to(device)
    captured = lazy_backend.capture(step) if kind == "captured" else step
    return Loop(kind, captured, tokens[:, :-1], tokens[:, 1:])


def _communicated(loop: Loop) -> dict[str, list[int]]:
    """For each collective of a step: how often it is called, and the bytes of its operands."""
    import lazy_backend

    with (
        lazy_backend.config.patch(run_in_background="never"),  # the profiler sees this thread's calls
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile,
    ):
        loop.steps(1)
        loop.wait()
    found: dict[str, list[int]] = {}
    for event in profile.events() or ():
        if event.name.startswith(("gloo:", "nccl:")):
            counted = found.setdefault(event.name.split(":")[1], [0, 0])
            counted[0] += 1
            counted[1] += sum(4 * math.prod(shape) for shape in event.input_shapes if shape)
    return found


def measure(way: str, size: str, rounds: int) -> dict[str, Any]:
    """Train in this process, one of a group."""
    import lazy_backend

    loops = [_loop(kind, way, SIZES[size]) for kind in KINDS[way]]
    for loop in loops:
        loop.steps(_WARM_STEPS)
        loop.wait()
    lazy_backend.wait_for_compiles()
    for loop in loops:
        loop.steps(3)
    compiles, cuts = (lazy_backend.metrics.counter_value(name) for name in ("Compile", "GraphCut"))
    seconds: dict[str, list[float]] = {loop.kind: [] for loop in loops}
    for _ in range(rounds):
        for loop in loops:
            dist.barrier()
            start = perf_counter()
            loop.steps(_STEPS)
            loop.wait()
            dist.barrier()
            seconds[loop.kind].append((perf_counter() - start) / _STEPS)
    late = [lazy_backend.metrics.counter_value("Compile") - compiles]
    # a barrier between blocks is one cut of its own, of nothing that was recorded
    late.append(lazy_backend.metrics.counter_value("GraphCut") - cuts)
    communicated = {loop.kind: _communicated(loop) for loop in loops}
    return {"seconds": seconds, "compiles": compiles, "late": late, "communicated": communicated}


# ----- a group of processes


def _run(way: str, size: str, count: int, rounds: int) -> dict[str, Any]:
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="lazy_backend_ranks_") as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "LAZY_BACKEND_CACHE_DIR": f"{folder}/lazy"}
        environment = finding_tools({**os.environ, **group, **own, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
        code = f"from benchmarks import rank_loops; rank_loops.serve({way!r}, {size!r}, {rounds})"
        command = [sys.executable, "-c", code]
        processes = [
            subprocess.Popen(
                command, cwd=folder, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{way}, {size}: the processes ended with {[p.returncode for p in processes]}")
    result: Any = json.loads(outputs[0].splitlines()[-1])
    return result  # type: ignore[no-any-return]


def serve(way: str, size: str, rounds: int) -> None:
    """What each process does. The first one prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(way, size, rounds)
    compiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(compiles, result["compiles"])
    result["compiles"] = sum(compiles)
    if dist.get_rank() == 0:
        print("\n" + json.dumps(result), flush=True)
    dist.destroy_process_group()


def _row(way: str, size: str, result: dict[str, Any]) -> list[str]:
    times = {kind: [1e3 * one for one in seconds] for kind, seconds in result["seconds"].items()}
    ratios = {kind: _ratios(times["eager"], own) for kind, own in times.items()}
    return [
        f"{way}, {size}",
        *(f"{statistics.median(times[kind]):.1f}" if kind in times else "-" for kind in _ALL_KINDS),
        *(ratios.get(kind, "-") for kind in _ALL_KINDS[1:]),
        str(result["compiles"]),
        _told(result["communicated"]["eager"]),
        "the same" if _is_alike(result["communicated"]) else _told(result["communicated"]["lazy"]),
    ]


def _ratios(eager: list[float], own: list[float]) -> str:
    found = sorted(one / other for one, other in zip(eager, own, strict=True))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def _is_alike(communicated: dict[str, Any]) -> bool:
    return all(one == communicated["eager"] for one in communicated.values())


def _told(communicated: dict[str, list[int]]) -> str:
    """As in `2 all_reduce, 1.53 MB`."""
    return "; ".join(f"{calls} {name}, {size / 1e6:.2f} MB" for name, (calls, size) in sorted(communicated.items()))


def main(count: int, rounds: int, show: Callable[[Table], str]) -> None:
    """Print the table."""
    rows = []
    for way in WAYS:
        for size in SIZES:
            result = _run(way, size, count, rounds)
            rows.append(_row(way, size, result))
            print(
                f"bench: {', '.join(rows[-1])}; late compiles and cuts: {result['late']}", file=sys.stderr, flush=True
            )
    head = ["loop", *(f"{kind}, ms" for kind in _ALL_KINDS), *(f"{kind}: speed / eager's" for kind in _ALL_KINDS[1:])]
    head += ["compiles of all ranks", "eager calls", "lazy calls"]
    print(show(Table(f"{count} processes: a step", head, rows)))
