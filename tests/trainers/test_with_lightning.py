"""Lightning with validation, logging, a progress bar and checkpoints: eager's losses; values are read after steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import count

from lazy_backend import LazyBackendError, config

STEPS = 30


def fit(accelerator: Any, module: Any = None, resume: str | None = None, **options: Any) -> tuple[Any, list[float]]:
    import lightning
    import with_lightning  # the example

    class Watch(lightning.Callback):
        def __init__(self) -> None:
            self.losses: list[torch.Tensor] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(outputs["loss"])

    torch.manual_seed(0)
    watch = Watch()
    options = {"max_epochs": 3, "log_every_n_steps": 5, "gradient_clip_val": 1.0} | options
    trainer = lightning.Trainer(accelerator=accelerator, callbacks=[watch], enable_model_summary=False, **options)
    trainer.fit(module or with_lightning.Regression(), with_lightning.data(), with_lightning.data(), ckpt_path=resume)
    return trainer, [loss.item() for loss in watch.losses]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_losses_are_those_of_eager(precision: str) -> None:
    with (
        count("GraphCut") as cuts,
        count("MarkStep") as steps,
        count("RegionJump") as jumps,
        count("Compile") as compiles,
    ):
        trainer, losses = fit("lazy", precision=precision)
    assert len(losses) == STEPS
    assert compiles() <= 3
    assert cuts() == 3  # the mean of each validation
    assert jumps() >= STEPS - 5  # the optimizer, though it is given a closure
    assert steps() <= STEPS + 32 + 9  # batches of validation; what is set to zero before an epoch
    other, expected = fit("cpu", precision=precision)
    assert losses == expected
    assert trainer.callback_metrics == other.callback_metrics
    assert {"loss", "validation"} <= trainer.callback_metrics.keys()


def test_half_precision_is_scaled_on_the_device() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    options: dict[str, Any] = {"precision": "16-mixed", "limit_val_batches": 0}
    with count("GraphCut") as cuts, count("MarkStep") as steps:
        trainer, losses = fit("lazy", **options)
    assert trainer.precision_plugin.scaler.is_enabled()
    assert cuts() == 0
    assert steps() <= STEPS + 3
    # Lightning takes bfloat16 for "16-mixed" on a CPU, unless it is given the plugin
    on_cpu = MixedPrecision("16-mixed", "cpu")
    assert losses == fit("cpu", plugins=on_cpu, limit_val_batches=0)[1]


def test_steps_of_training_are_one_program_and_never_cut() -> None:
    with count("GraphCut") as cuts, count("Compile") as compiles:
        fit("lazy", limit_val_batches=0)
    assert cuts() == 0
    assert compiles() <= 3


def test_batches_whose_gradients_are_added_are_steps() -> None:
    """The progress bar reads the loss of each."""
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 0, "max_epochs": 2}
    with count("MarkStep") as steps, count("GraphCut") as cuts, count("Compile") as compiles:
        _, losses = fit("lazy", **options)
    assert 20 <= steps() <= 20 + 2
    assert cuts() == 0
    assert compiles() <= 3
    assert losses == fit("cpu", **options)[1]


def test_several_optimizers_each_end_their_steps() -> None:
    import with_lightning

    class Two(with_lightning.Regression):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> Any:
            for optimizer in self.optimizers():
                loss = super().training_step(batch, index)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return {"loss": loss.detach()}

        def configure_optimizers(self) -> Any:
            first, _, last = self.layers
            return [torch.optim.Adam(first.parameters()), torch.optim.SGD(last.parameters(), lr=0.1)]

    options: dict[str, Any] = {"gradient_clip_val": None, "limit_val_batches": 0, "max_epochs": 1}
    with count("MarkStep") as steps:
        torch.manual_seed(0)
        _, losses = fit("lazy", Two(), **options)
    assert 20 <= steps() <= 23
    torch.manual_seed(0)
    assert losses == fit("cpu", Two(), **options)[1]


def test_a_checkpoint_goes_on_with_the_same_losses() -> None:
    _, whole = fit("lazy", limit_val_batches=0)
    first, losses = fit("lazy", limit_val_batches=0, max_epochs=2)
    assert losses == whole[:20]
    first.save_checkpoint("two.ckpt")
    assert all(x.device.type == "cpu" for x in torch.load("two.ckpt")["state_dict"].values())
    assert fit("lazy", resume="two.ckpt", limit_val_batches=0)[1] == whole[20:]


def test_test_and_predict_end_steps_too() -> None:
    import with_lightning

    class Model(with_lightning.Regression):  # type: ignore[misc]
        def test_step(self, batch: Any, index: int) -> None:
            self.validation_step(batch, index)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layers(batch[0])

    outcomes = []
    for accelerator in ("lazy", "cpu"):
        torch.manual_seed(0)
        trainer, _ = fit(accelerator, Model(), max_epochs=1, limit_val_batches=0)
        with count("MarkStep") as steps:
            (tested,) = trainer.test(trainer.model, with_lightning.data(), verbose=False)
            predicted = trainer.predict(trainer.model, with_lightning.data())
        assert steps() == (20 if accelerator == "lazy" else 0)
        outcomes.append((tested, [batch.tolist() for batch in predicted]))
    assert outcomes[0] == outcomes[1]


def test_a_strategy_by_name_and_as_an_object() -> None:
    from lazy_backend.integrations.lightning import LazyStrategy

    expected = fit("cpu", max_epochs=1)[1]
    assert fit("lazy", strategy="lazy", max_epochs=1)[1] == expected
    with count("RegionJump") as jumps:
        assert fit("auto", strategy=LazyStrategy(capture=False), max_epochs=1)[1] == expected
    assert jumps() == 0


# ----- what users do wrong


def test_a_strategy_of_another_device_is_told() -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    with pytest.raises(LazyBackendError, match="was given a strategy on cpu"):
        fit("lazy", strategy=SingleDeviceStrategy("cpu"))


def test_several_devices_are_told() -> None:
    with pytest.raises(LazyBackendError, match=r"devices=2\): this integration trains on one device"):
        fit("lazy", devices=2)


def test_a_trainer_of_theirs_has_its_steps_end_by_themselves() -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from lazy_backend.integrations.lightning import LazyAccelerator

    strategy = SingleDeviceStrategy("lazy", accelerator=LazyAccelerator())
    with config.patch(mark_steps="auto"), count("MarkStep") as steps:
        fit("auto", strategy=strategy, max_epochs=1)
    assert steps() >= 2
