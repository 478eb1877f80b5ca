"""Several processes with a GPU each: NCCL's collectives in the graph. Skipped where there are not two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)

_TRAINING = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lazy_backend
from lazy_backend import config, metrics

way, config.backend = sys.argv[1:]
config.cache, config.compile = False, "foreground"
dist.init_process_group(dist.get_default_backend_for_device("lazy"))
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
torch.lazy.set_device(rank)


def train(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).to(f"{device}:{rank}")
    if way == "replicated":
        net = DistributedDataParallel(net)
    else:
        net = fully_shard(net, mesh=init_device_mesh(device, (size,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data, losses = torch.Generator().manual_seed(rank), []
    for number in range(30):
        x = torch.randn(32, 64, generator=data).to(f"{device}:{rank}")
        optimizer.zero_grad()
        loss = (net(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        lazy_backend.mark_step()
        if number == 4 and device == "lazy":
            lazy_backend.wait_device_ops()
            metrics.reset()
    return torch.tensor([float(loss) for loss in losses])


torch.testing.assert_close(train("lazy"), train("cuda"), rtol=1e-3, atol=1e-4)
assert metrics.counter_value("GraphCut") == 0, metrics.counter_names()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_losses_are_those_of_eager(way: str, backend: str, tmp_path: Path) -> None:
    done = run_ranks(_TRAINING, tmp_path, 2, [way, backend])
    assert [one.returncode for one in done] == [0, 0], "\n".join(one.stderr[-3000:] for one in done)
