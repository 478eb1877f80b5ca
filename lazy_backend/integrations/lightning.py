"""Lightning: `Trainer(accelerator="lazy")`. Tested with lightning 2.6; `pytorch_lightning` is another package.

In: the import of this module. Out: an accelerator and a strategy named "lazy" in Lightning's registries. Each step of
an optimizer ends a step, and so does each other batch: one that adds to gradients, of validation, test or prediction.
What is logged is read afterwards, which cuts nothing. `precision="bf16-mixed"` and `"16-mixed"` are the lazy device's.

    import lazy_backend.integrations.lightning

    lightning.Trainer(accelerator="lazy", precision="bf16-mixed", max_epochs=3).fit(module, data)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.integrations.replaying import replay_known_parts, replay_steps
from lazy_backend.integrations.versions import changed_inside, check_version
from lazy_backend.tensors.contexts import contexts

check_version("lightning")

from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector


class LazyAccelerator(Accelerator):
    """The lazy device, as Lightning's trainer asks for it."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "lazy":
            raise LazyBackendError(
                f"Trainer(accelerator='lazy') was given a strategy on {device}\n  at {user_site()}\n"
                "  leave out strategy=, or take strategy='lazy'"
            )
        torch.lazy.set_device(device)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        torch.lazy.synchronize()  # type: ignore[attr-defined]

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Numbers of devices: of `devices=1` and `"auto"` the current one, of `[2]` that one."""
        chosen = list(devices) if isinstance(devices, list | tuple) else [contexts.current] * int(devices)
        if len(chosen) != 1:
            raise LazyBackendError(
                f"Trainer(accelerator='lazy', devices={devices!r}): this integration trains on one device\n"
                f"  at {user_site()}\n  take devices=1; for several processes, write the loop around "
                "DistributedDataParallel (docs/distributed.md)"
            )
        return chosen

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("lazy", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "lazy"


class LazyMixedPrecision(MixedPrecision):
    """`MixedPrecision` of the lazy device. `precision`: "bf16-mixed" or "16-mixed"."""

    def __init__(self, precision: Any) -> None:
        super().__init__(precision, "lazy")


class LazyStrategy(SingleDeviceStrategy):
    """One lazy device, whose steps end by themselves.

    `capture`: whether optimizers of PyTorch are replayed, and parts of the module that are made of PyTorch's modules.
    """

    strategy_name = "lazy"

    def __init__(self, device: torch.device | str | None = None, capture: bool = True, **kwargs: Any) -> None:
        kwargs.setdefault("accelerator", None)
        if kwargs["accelerator"] is None:
            kwargs["accelerator"] = LazyAccelerator()
        super().__init__(torch.device("lazy", contexts.current) if device is None else device, **kwargs)
        self._captures = capture
        self._is_between_steps = True

    @property
    def precision_plugin(self) -> Precision:
        found: Precision = super().precision_plugin
        return found

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        # Lightning makes autocast's of CUDA for an accelerator that it does not know
        if type(plugin) is MixedPrecision and plugin.device == "cuda":
            plugin = LazyMixedPrecision(plugin.precision)
        self._precision_plugin = plugin

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The tensor: one device has nothing to reduce. Lightning uploads lengths to be reduced, and reads them."""
        is_count = isinstance(tensor, torch.Tensor) and tensor.ndim == 0 and not tensor.dtype.is_floating_point
        return tensor.cpu() if is_count else tensor

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self._captures:
            replay_known_parts(self.lightning_module)
            for optimizer in self.optimizers:
                replay_steps(optimizer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._is_between_steps:  # such as the sums of an epoch that are set to zero: no part of the next step
            step_ends.end_of_trainer()
        self._is_between_steps = False
        super().on_train_batch_start(batch, batch_idx)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().backward(closure_loss, *args, **kwargs)
        module = self.lightning_module
        # a progress bar reads what each batch has logged, also a batch that only adds to the gradients; `fit_loop` has
        # this to ask (internal, checked on 2.6)
        if module is not None and module.automatic_optimization and module.trainer.fit_loop._should_accumulate():
            step_ends.end_of_trainer()
            self._is_between_steps = True
        return loss

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        with step_ends.held():  # what the precision plugin does after the step belongs to it
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        step_ends.end_of_trainer()
        self._is_between_steps = True
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_step(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_step(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_step(super().predict_step, args, kwargs)

    @staticmethod
    def _as_step(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        step_ends.end_of_trainer()
        return result


def _choose_by_accelerator() -> None:
    """Let `accelerator="lazy"` alone choose `LazyStrategy`.

    Lightning takes a strategy on the CPU for an accelerator that it does not know, and asks nobody; so the private
    method that chooses is replaced (internal, checked on 2.6). Without it, `strategy="lazy"` is to be given too.
    """
    original = getattr(_AcceleratorConnector, "_choose_strategy", None)
    if original is None:
        raise changed_inside("lightning", "_AcceleratorConnector._choose_strategy")

    def choose(self: Any) -> Any:
        if isinstance(self.accelerator, LazyAccelerator):
            return LazyStrategy(self._parallel_devices[0])
        return original(self)

    _AcceleratorConnector._choose_strategy = choose


if LazyAccelerator.name() not in AcceleratorRegistry:  # or this module was loaded again
    AcceleratorRegistry.register("lazy", LazyAccelerator, description="a lazy-tensor device")
    StrategyRegistry.register("lazy", LazyStrategy, description="one lazy device")
    _choose_by_accelerator()
