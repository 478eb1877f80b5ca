"""Functional collectives in a group of one process, interpreted and compiled, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import run_program

_PROGRAM = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import lazy_backend
from lazy_backend import config, metrics

dist.init_process_group("gloo", init_method="file://{path}/store", rank=0, world_size=1)
group = dist.group.WORLD
config.first_sight, config.cache = {first_sight!r}, False
if {backend!r} == "interpreted":
    config.compile = "off"
else:
    config.compile, config.backend = "foreground", {backend!r}

calls = {{
    "all_reduce": lambda x: functional.all_reduce(x, "sum", group) * 2,
    "all_gather_tensor": lambda x: functional.all_gather_tensor(x, 0, group) + 1,
    "reduce_scatter_tensor": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group) + 1,
    "broadcast": lambda x: functional.broadcast(x, 0, group) + 1,
    "all_to_all_single": lambda x: functional.all_to_all_single(x, None, None, group) + 1,
    "all_reduce_coalesced": lambda x: sum(functional.all_reduce_coalesced([x, x * 2], "sum", group)),
    "wait_tensor": lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", group)) + 1,
}}

for name, call in calls.items():
    for start in range(3):
        x = torch.arange(4.0) + start
        found = call(x.to("lazy") * 1)
        lazy_backend.mark_step()
        assert torch.equal(found.cpu(), call(x) + 0), (name, found)
    leaf, real = (torch.arange(4.0).to(device).requires_grad_() for device in ("lazy", "cpu"))
    assert call(leaf).requires_grad == call(real).requires_grad, name
    fallbacks = [name for name in metrics.counter_names() if "it communicates" in name]
    assert fallbacks, metrics.counter_names()
    assert metrics.counter_value("CompileFailed") == 0
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
@pytest.mark.parametrize("backend", ["interpreted", "aot_eager"])
@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_functional_collectives_equal_eager(first_sight: str, backend: str, tmp_path: Path) -> None:
    run_program(_PROGRAM.format(path=tmp_path, first_sight=first_sight, backend=backend), tmp_path)
