"""Ignite: engines on the lazy device. Tested with pytorch-ignite 0.5.

In: a model, an optimizer and a loss, as for Ignite's functions of the same names; or an engine of the user's. Out: an
engine whose steps end by themselves: a trainer's at each step of the optimizer, others' after each iteration. Metrics
are to be made with `device="lazy"`: otherwise they fetch each batch to the CPU.

    from lazy_backend.integrations.ignite import create_supervised_evaluator, create_supervised_trainer

    trainer = create_supervised_trainer(model, optimizer, loss_fn, amp_dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lazy_backend.execution.step_ends import step_ends
from lazy_backend.integrations.replaying import replay_known_parts, replay_steps
from lazy_backend.integrations.versions import check_version

check_version("pytorch-ignite")

import ignite.engine
from ignite.engine import Engine, Events


class LazySteps:
    """A handler that ends a step after each iteration: `LazySteps().attach(engine)`, before other handlers."""

    def attach(self, engine: Engine) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self, engine: Engine) -> None:
        step_ends.end_of_trainer()


def create_supervised_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    amp_dtype: torch.dtype | None = None,
    capture: bool = True,
    **kwargs: Any,
) -> Engine:
    """Ignite's function of this name, for a model on the lazy device; `kwargs` are its other arguments.

    `amp_dtype`: compute the model and the loss under `torch.autocast` with this dtype. `capture`: whether an optimizer
    of PyTorch is replayed, and the model, or those parts of it that are made of PyTorch's modules. The engine's output
    is the loss, unless `output_transform` says otherwise: as a tensor, which is read by whoever logs it.
    """
    kwargs.setdefault("device", "lazy")
    kwargs.setdefault("output_transform", lambda x, y, y_pred, loss: loss.detach())
    kwargs["model_fn"] = _autocast(kwargs.get("model_fn", _call), amp_dtype)
    engine = ignite.engine.create_supervised_trainer(model, optimizer, _autocast(loss_fn, amp_dtype), **kwargs)
    step_ends.follow(optimizer)
    if capture:
        replay_known_parts(model)
        replay_steps(optimizer)
    return engine


def create_supervised_evaluator(
    model: torch.nn.Module,
    metrics: Mapping[str, Any] | None = None,
    *,
    amp_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Engine:
    """Ignite's function of this name, for a model on the lazy device; `kwargs` are its other arguments."""
    kwargs.setdefault("device", "lazy")
    kwargs["model_fn"] = _autocast(kwargs.get("model_fn", _call), amp_dtype)
    engine = ignite.engine.create_supervised_evaluator(model, dict(metrics or {}), **kwargs)
    LazySteps().attach(engine)  # after the metrics, whose sums belong to the step
    return engine


def _call(model: torch.nn.Module, inputs: Any) -> Any:
    return model(inputs)


def _autocast(function: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    """Ignite's own `amp_mode` is of CUDA."""
    return function if dtype is None else torch.autocast("lazy", dtype)(function)
