"""Ignite engines: eager's losses and metrics, no cut in an iteration, one compile for training."""

from __future__ import annotations

import pytest
import torch
from harness import count
from torch import nn

from lazy_backend import config


def eager(dtype: torch.dtype | None = None) -> tuple[list[float], float]:
    """What the example does, with Ignite alone."""
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import MeanSquaredError

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(80, 4)
    rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    data = torch.utils.data.DataLoader(rows, batch_size=8)
    cast = torch.autocast("cpu", dtype, enabled=dtype is not None)
    trainer = create_supervised_trainer(
        model, optimizer, cast(nn.functional.mse_loss), model_fn=cast(lambda model, x: model(x))
    )
    evaluator = create_supervised_evaluator(
        model, {"error": MeanSquaredError()}, model_fn=cast(lambda model, x: model(x))
    )
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(data, max_epochs=3)
    return losses, evaluator.run(data).metrics["error"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_example_has_the_losses_and_metrics_of_eager(dtype: torch.dtype | None) -> None:
    import with_ignite

    with count("GraphCut") as cuts, count("Compile") as compiles, count("MarkStep") as steps:
        losses, error = with_ignite.train(dtype)
    assert steps() == 30 + 10
    assert cuts() <= 1  # the metric, at its end
    assert compiles() <= 3
    expected, expected_error = eager(dtype)
    assert losses == expected
    assert error == pytest.approx(expected_error, rel=1e-6)  # sums of floats on the device are not Python's


def test_an_engine_of_the_users_ends_its_steps() -> None:
    from ignite.engine import Engine

    from lazy_backend.integrations.ignite import LazySteps

    weight = torch.ones(3, device="lazy")

    def double(engine: Engine, batch: int) -> torch.Tensor:
        return weight.mul_(batch)

    engine = Engine(double)
    LazySteps().attach(engine)
    with count("MarkStep") as steps:
        engine.run([2, 3], max_epochs=2)
    assert steps() == 4
    assert weight.tolist() == [36.0, 36.0, 36.0]


def test_an_engine_of_theirs_has_its_steps_end_by_themselves() -> None:
    from ignite.engine import create_supervised_trainer

    model = nn.Linear(4, 1).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, device="lazy")
    with config.patch(mark_steps="auto"), count("MarkStep") as steps:
        engine.run([(torch.ones(2, 4), torch.ones(2, 1))] * 3)
    assert steps() == 3
