"""The first checks on a new machine: what fails here makes everything else pointless.

In: a check's name, within a worker's process. Out: one line about what was seen; a failed check raises.
Every step goes a little further: the device itself, the package, a training step interpreted, compiled, captured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from gpu.training import Scale, make_gpu_training

# Steps of a training whose losses are compared with eager's.
_STEPS = 6


def _see_device(device: str, tiny: bool) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch.cuda.is_available() is False: no GPU, no driver, or a build of PyTorch without CUDA")
    x = torch.randn(64, 64, device=device)
    torch.testing.assert_close((x @ x).cpu(), x.cpu() @ x.cpu(), rtol=1e-3, atol=1e-3)
    return f"{torch.__version__}, a product on {x.device} is right"


def _import_package(device: str, tiny: bool) -> str:
    package = importlib.import_module("lazy_backend")
    package.config.device = device
    behind = importlib.import_module("lazy_backend.tensors.contexts").contexts.backing_type()
    if behind != device:
        raise RuntimeError(f"the lazy device computes on {behind}")
    x = torch.arange(4.0, device="lazy")
    if x.cpu().tolist() != [0, 1, 2, 3] or (x + 1).sum().item() != 10:
        raise RuntimeError("numbers come back changed")
    return f"lazy_backend {package.__version__}, computes on {behind}"


def _interpret(device: str, tiny: bool) -> str:
    return _compare(device, "interpreted", compile="off")


def _compile(device: str, tiny: bool) -> str:
    backend = "aot_eager" if tiny else "inductor"
    return _compare(device, "compiled", compile="foreground", backend=backend, compile_after_operators=0)


def _capture(device: str, tiny: bool) -> str:
    return _compare(device, "captured", is_captured=True, compile="off")


def _compare(device: str, how: str, is_captured: bool = False, **settings: Any) -> str:
    """Train on the device and on the lazy device before it; raise unless losses are alike."""
    package = importlib.import_module("lazy_backend")
    eager = make_gpu_training("mlp", device, Scale(tiny=True))
    with package.config.patch(device=device, cache=False, **settings):
        lazy = make_gpu_training("mlp", "lazy", Scale(tiny=True))
        if is_captured:
            lazy.train = package.capture(lazy.train)
        losses = []
        for _ in range(_STEPS):
            eager.step()
            lazy.step()
            if not is_captured:
                package.mark_step()
            losses.append((float(lazy.loss), float(eager.loss)))
        package.wait_device_ops()
    ours, eagers = (torch.tensor(column) for column in zip(*losses, strict=True))
    torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
    if how == "compiled" and not package.metrics.counter_value("Compile"):
        raise RuntimeError("nothing was compiled")
    same = "bit for bit" if torch.equal(ours, eagers) else f"up to {(ours - eagers).abs().max().item():.1e}"
    return f"{_STEPS} steps of an MLP, {how}: losses equal eager's {same}"


CHECKS: dict[str, Callable[[str, bool], str]] = {
    "the device": _see_device,
    "the package": _import_package,
    "a step interpreted": _interpret,
    "a step compiled": _compile,
    "a step captured": _capture,
}


def run_check(check: str, device: str, tiny: bool) -> dict[str, Any]:
    """What a check saw. Raises if it fails."""
    return {"seen": CHECKS[check](device, tiny)}
