"""Programs of module_db and optim_db.

In: a `Case` of one of them. Out: its programs, the same on every call from the same random state.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from conformance_suite.cases import Case, modules, optimizers
from conformance_suite.programs import Program, Sample, cotangents, differentiable, spread
from conformance_suite.targets import Target

MAX_MODULE_SAMPLES = 16  # of one case, spread evenly over all there are
STEPS = 5  # of an optimizer

# On accelerators, but not on the CPU, optimizers choose their foreach forms by themselves, which differ in rounding.
# These never do.
NEVER_FOREACH = ("Adafactor",)


# ----- module_db


def module_programs(case: Case) -> Iterator[Program]:
    info = modules()[case.name]
    training = not case.variant.startswith("eval")
    make = info.module_inputs_func
    if case.variant == "errors":
        make = info.module_error_inputs_func
    backward = case.variant.endswith("gradients")
    given = make(info, device="cpu", dtype=case.torch_dtype, requires_grad=backward, training=training)
    for number, sample in spread(list(enumerate(given)), MAX_MODULE_SAMPLES):
        sample = sample.module_error_input if case.variant == "errors" else sample
        label = f"input {number}" + (f" ({sample.desc})" if getattr(sample, "desc", "") else "")
        try:
            module = _module(info, sample, case.torch_dtype, training)
        except Exception:
            if case.variant != "errors":
                raise
            continue  # an error of the constructor, which meets no device
        yield _module_program(module, sample.forward_input, backward, label)


def _module(info: Any, sample: Any, dtype: torch.dtype, training: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
    return module.to(dtype).train(training)


def _module_program(module: torch.nn.Module, inputs: Any, backward: bool, label: str) -> Program:
    sample = Sample(label, inputs.args if inputs else (), inputs.kwargs if inputs else {})

    def run(target: Target) -> Any:
        moved = copy.deepcopy(module).to(target.device)
        args, kwargs = sample.on(target)
        result = moved(*args, **kwargs)
        if backward:
            outputs = differentiable(result)
            if outputs:
                torch.autograd.backward(outputs, cotangents(outputs, target))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return {
            "operands": (args, kwargs),
            "result": result,
            "state": dict(itertools.chain(moved.named_parameters(), moved.named_buffers())),
            "gradients": [leaf.grad for leaf in (*leaves, *moved.parameters()) if leaf.is_leaf],
        }

    return Program(label, run)


# ----- optim_db


def optim_programs(case: Case) -> Iterator[Program]:
    info, config = optimizers()[case.name]
    flags: dict[str, Any] = {
        "default": {},
        "for-loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }[case.variant]
    given = {**config.kwargs, **flags}

    def run(target: Target) -> Any:
        parameters, loss_of = _problem(info, case.torch_dtype, target)
        by_itself = case.variant == "default" and "foreach" in info.supported_impls and info.name not in NEVER_FOREACH
        options = {**given, "foreach": True} if by_itself and target.foreach and target.device == "cpu" else given
        optimizer = info.optim_cls(parameters, **copy.deepcopy(options))
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        for _ in range(STEPS):
            losses.append(optimizer.step(closure))
            target.finish()
        state = [optimizer.state[parameter] for parameter in parameters]
        return {"parameters": parameters, "losses": losses, "state": state}

    yield Program("five steps", run, on_device=False)  # the number of steps is a tensor on the CPU


def _problem(info: Any, dtype: torch.dtype, target: Target) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    """Parameters and a loss, as each optimizer wants them."""
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> torch.Tensor:
        return torch.nn.Parameter(target.move(torch.randn(shape, dtype=dtype, generator=generator)))

    weight, second = parameter(10, 5), parameter(5, 3)
    if info.only_supports_sparse_grads:
        places = target.move(torch.tensor([1, 3, 3]))
        return [weight], lambda: torch.nn.functional.embedding(places, weight, sparse=True).pow(2).sum()
    if info.name == "Muon":  # matrices only
        return [weight, second], lambda: (weight @ second).abs().pow(2).sum()
    bias, scalar = parameter(3), parameter()
    return [weight, second, bias, scalar], lambda: (weight @ second * scalar + bias).abs().pow(2).sum()
