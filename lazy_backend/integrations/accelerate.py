"""accelerate: `Accelerator` on the lazy device. Tested with accelerate 1.15.

In: this module's `Accelerator` in place of accelerate's. Out: a loop whose steps end by themselves, at each step of an
optimizer that was prepared, and whose models and optimizers are replayed where that is known to be sound.

    from lazy_backend.integrations.accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)

A script that shall stay as it is runs on the lazy device with two variables in the environment:

    ACCELERATE_TORCH_DEVICE=lazy LAZY_BACKEND_MARK_STEP_ON_OPTIMIZER_STEP=1 accelerate launch train.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.integrations.replaying import replay_known_parts, replay_steps, unwrapped
from lazy_backend.integrations.versions import check_version

check_version("accelerate")

import accelerate


@contextlib.contextmanager
def device_of_accelerate() -> Iterator[None]:
    """A block in which accelerate, asked for its device for the first time, takes the lazy one."""
    name = "ACCELERATE_TORCH_DEVICE"
    before = os.environ.get(name)
    if before is None or not before.startswith("lazy"):
        os.environ[name] = "lazy"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class Accelerator(accelerate.Accelerator):
    """accelerate's `Accelerator`, on the lazy device.

    `capture`: whether optimizers of PyTorch are replayed, and models, or parts of them, that are made of modules of
    PyTorch or transformers.
    """

    def __init__(self, *args: Any, capture: bool = True, **kwargs: Any) -> None:
        self._captures = capture
        if kwargs.get("mixed_precision", os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp16":
            raise _refused("fp16 does not work: accelerate knows the devices for it", 'take mixed_precision="bf16"')
        with device_of_accelerate():
            super().__init__(*args, **kwargs)
        if self.device.type != "lazy":
            raise _refused(
                f"accelerate is on {self.device} already, as chosen for its first Accelerator or TrainingArguments",
                "make this Accelerator first, without cpu=True",
            )

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As in accelerate."""
        prepared: torch.nn.Module = super().prepare_model(model, *args, **kwargs)
        if self._captures and prepared is model:  # not one that was compiled
            replay_known_parts(model)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As in accelerate; the steps of the optimizer end steps."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        inner = unwrapped(prepared)
        step_ends.follow(inner)
        if self._captures:
            replay_steps(inner)
        return prepared


def _refused(what: str, instead: str) -> LazyBackendError:
    return LazyBackendError(f"Accelerator of lazy_backend: {what}\n  at {user_site()}\n  {instead}")
