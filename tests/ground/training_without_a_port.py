"""A program that trains as in eager, whatever port is off. `test_ports_off.py` runs it, with the port's name.

In: the name of a port that `LAZY_BACKEND_PORTS_OFF` turns off, and whether it is essential. Out: what was warned, as
JSON; it raises where results differ from eager's.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

SIZES = (4, 8, 16)  # batch, positions, width


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(self.norms[1](x))


def make_gpt() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    width = SIZES[2]
    model = torch.nn.Sequential(
        torch.nn.Embedding(11, width), Block(width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 11)
    )
    return model, torch.randint(11, SIZES[:2])


def make_quickstart() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    return model, torch.randn(64, 8)


def losses(
    model: torch.nn.Module, inputs: torch.Tensor, block: Callable[[], Any], mark: Callable[[], None], steps: int
) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for _ in range(steps):
        with block():
            out = model(inputs)
            targets = inputs if inputs.dtype == torch.int64 else inputs.sum(1, keepdim=True)
            loss = (
                torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())
                if inputs.dtype == torch.int64
                else torch.nn.functional.mse_loss(out, targets)
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mark()
        yield loss.detach()


def compare(make: Callable[[], Any], captured: bool, block: Callable[[], Any], eager_block: Callable[[], Any]) -> None:
    import lazy_backend

    model, inputs = make()
    twin = copy.deepcopy(model)
    model.to("lazy")
    if captured:
        lazy_backend.capture(model)
    found = [loss.cpu() for loss in losses(model, inputs.to("lazy"), block, lazy_backend.mark_step, 6)]
    expected = list(losses(twin, inputs, eager_block, lambda: None, 6))
    # inductor and foreach round otherwise
    torch.testing.assert_close(found, expected, rtol=2e-2 if block is not eager_block else 1e-3, atol=1e-3)


def no_block() -> Any:
    return torch.autocast("cpu", enabled=False)


def main(off: str, is_essential: bool) -> None:
    warnings.simplefilter("always")
    torch.set_num_threads(1)  # small products: threads that wait for each other take most of the time
    with warnings.catch_warnings(record=True) as caught:
        assert torch.ones(3).sum().item() == 3
        if is_essential:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=re.escape(f"{off} is off")):
                    torch.ones(3, device="lazy")
            assert (torch.ones(3) + 1).sum().item() == 6
        else:
            for captured in (False, True):
                compare(make_quickstart, captured, no_block, no_block)
            if off == "autocast":
                compare(make_gpt, False, no_block, no_block)
            else:
                compare(make_gpt, False, lambda: torch.autocast("lazy"), lambda: torch.autocast("cpu"))
            import lazy_backend

            print(lazy_backend.explain())
    print(json.dumps([str(one.message) for one in caught if type(one.message).__name__ == "PortWarning"]))
