"""transformers: `Trainer` and `Seq2SeqTrainer` on the lazy device. Tested with transformers 5.23 and accelerate 1.15.

In: `LazyTrainingArguments` in place of `TrainingArguments`. Out: a training whose steps end by themselves, at each step
of the optimizer, and read values at logging steps only.

    from lazy_backend.integrations.transformers import LazyTrainingArguments

    Trainer(model, LazyTrainingArguments("run", bf16=True, max_steps=1000), train_dataset=rows).train()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lazy_backend.capturing import capture
from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.integrations.accelerate import device_of_accelerate
from lazy_backend.integrations.replaying import replay_known_parts, replay_steps, unwrapped
from lazy_backend.integrations.versions import check_version
from lazy_backend.tensors.contexts import contexts

check_version("transformers")

from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments
from transformers import trainer as trainer_module

from lazy_backend.integrations import attention_masks

attention_masks.leave_in_graph()


class LazyCallback(TrainerCallback):
    """Ends the steps of a `Trainer` on the lazy device. `LazyTrainingArguments` adds it to every trainer by itself."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        choice = getattr(args, "lazy_capture", "never")
        if not _is_lazy(args) or choice == "never":
            return
        replay_steps(unwrapped(kwargs["optimizer"]))
        if choice == "always":
            capture(kwargs["model"])
        else:
            replay_known_parts(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _end_step(args)  # gradients are gone by then: they need not be kept

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _end_step(args)  # the sum of losses was reset: otherwise the next step would be another program

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _end_step(args)


def _is_lazy(args: TrainingArguments) -> bool:
    return args.device.type == "lazy"


def _end_step(args: TrainingArguments) -> None:
    if _is_lazy(args):
        step_ends.end_of_trainer()


@dataclass
class LazyArguments:
    """What training arguments need for the lazy device, to be put before a class of arguments, such as trl's.

    `logging_nan_inf_filter` is off: it would read the loss of each step. `dataloader_pin_memory` is off on a CPU.
    """

    lazy_capture: str = field(
        default="auto",
        metadata={
            "help": "Whether the model's and the optimizer's calls are replayed, as by lazy_backend.capture: 'auto' "
            "captures optimizers of PyTorch, models of transformers and parts made of PyTorch's modules, 'always' any "
            "model, 'never' nothing.",
            "choices": ["auto", "always", "never"],
        },
    )

    def __post_init__(self) -> None:
        if self.lazy_capture not in ("auto", "always", "never"):
            raise ValueError(f"lazy_capture={self.lazy_capture!r}: expected 'auto', 'always' or 'never'")
        self._refuse("use_cpu", "leave it out, or take TrainingArguments to train without the lazy device")
        self._refuse("torch_compile", "leave it out: the lazy device compiles steps by itself")
        self._refuse("fp16", "take bf16=True, which needs no scaling: accelerate refuses fp16 on devices unknown to it")
        self.logging_nan_inf_filter = False
        if contexts.backing_type() == "cpu":
            self.dataloader_pin_memory = False
        if LazyCallback not in trainer_module.DEFAULT_CALLBACKS:
            trainer_module.DEFAULT_CALLBACKS.append(LazyCallback)
        super().__post_init__()  # type: ignore[misc]

    def _refuse(self, name: str, instead: str) -> None:
        if getattr(self, name):
            raise LazyBackendError(f"{type(self).__name__}({name}=True) does not work\n  at {user_site()}\n  {instead}")

    def _validate_args(self) -> None:
        """The checks of transformers, which takes bf16 for impossible on devices unknown to it. Checked on 5.23."""
        arguments: Any = self
        asked = arguments.bf16, arguments.bf16_full_eval
        arguments.bf16 = arguments.bf16_full_eval = False
        try:
            super()._validate_args()  # type: ignore[misc]
        finally:
            arguments.bf16, arguments.bf16_full_eval = asked

    @cached_property
    def _setup_devices(self) -> torch.device:
        """The device that transformers asks accelerate for. Checked on 5.23."""
        with device_of_accelerate():
            return super()._setup_devices  # type: ignore[misc]


@dataclass
class LazyTrainingArguments(LazyArguments, TrainingArguments):
    """`TrainingArguments` of a training on the lazy device."""


@dataclass
class LazySeq2SeqTrainingArguments(LazyArguments, Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` of a training on the lazy device."""
