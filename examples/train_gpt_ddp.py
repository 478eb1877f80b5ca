"""Train the GPT of train_gpt.py in several processes, each on its own batches.

    torchrun --nproc-per-node=2 examples/train_gpt_ddp.py --device lazy
    torchrun --nproc-per-node=2 examples/train_gpt_ddp.py --device lazy --fully-shard

`DistributedDataParallel` averages the gradients of all processes; `fully_shard` also spreads parameters and the
optimizer's state over them. On `device="lazy"` they do so within the step's graph: forward, backward, communication and
optimizer are one graph, compiled once for all processes. The first one prints the figures of its run, and how far its
losses are from those of the same run in eager.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout

import torch
import torch.distributed as dist
from common import Run, Stopwatch, finished, parser, present, progress
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, batches, build_model, build_optimizer, evaluate, learning_rate, load_text, train_step

import lazy_backend

STEPS = 200


def sharded(model: GPT, device: str) -> GPT:
    """`model`, whose blocks gather their parameters from all processes when they need them."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(model: GPT, device: str) -> DistributedDataParallel:
    """`model`, whose gradients are averaged over all processes."""
    if device == "lazy":
        lazy_backend.capture(model)
    return DistributedDataParallel(model)


def train(device: str, steps: int = STEPS, seed: int = 0, shards: bool = False) -> Run:
    """Train from scratch on `device`. All processes begin with the same weights, and draw different batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text = load_text()
    built = build_model(len(text.vocabulary), seed).to(device)
    model: nn.Module = sharded(built, device) if shards else replicated(built, device)
    optimizer = build_optimizer(model)
    if device == "lazy":
        lazy_backend.capture(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    losses: list[Tensor] = []
    stopwatch = Stopwatch()
    with progress(batches(text.train, steps, seed * size + rank), steps, device) as bar:
        for characters, following in bar:
            losses.append(train_step(model, optimizer, characters.to(device), following.to(device)))
            schedule.step()
            lazy_backend.mark_step()
            stopwatch.lap()
    return finished(model, losses, stopwatch)


def main() -> None:
    arguments = parser("Train a character GPT in several processes. Start it with torchrun.")
    arguments.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s)")
    arguments.add_argument("--fully-shard", action="store_true", help="spread parameters over the processes")
    chosen = arguments.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it as torchrun --nproc-per-node=2 examples/train_gpt_ddp.py")
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if dist.get_rank() else sys.stdout):
        present(chosen, lambda device: train(device, chosen.steps, chosen.seed, chosen.fully_shard), evaluate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
