"""Advice that errors of other packages get, where these packages have a list of devices of their own.

In: a module of another package, once a program has imported it. Out: its errors as they were, with a note.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from lazy_backend.ports.replacements.when_imported import when_imported


def advise() -> None:
    """Have errors of other packages say what to do on the lazy device."""
    when_imported("transformers.training_args", _advise_on_bf16)


def _advise_on_bf16(module: ModuleType) -> None:
    """transformers refuses bf16 on devices that are not in its list, and names only those of the list."""
    arguments: Any = getattr(module, "TrainingArguments", None)
    validate: Any = getattr(arguments, "_validate_args", None)  # checked on 5.23; without it there is no note
    if validate is None:
        return

    @functools.wraps(validate)
    def validate_with_advice(self: Any) -> None:
        try:
            validate(self)
        except ValueError as error:
            if self.bf16 or self.bf16_full_eval:
                error.add_note(_on_bf16(type(self).__name__))
            raise

    arguments._validate_args = validate_with_advice


def _on_bf16(name: str) -> str:
    if name == "TrainingArguments":
        return (
            "to train with bf16 on the lazy device, take LazyTrainingArguments of "
            "lazy_backend.integrations.transformers in place of TrainingArguments"
        )
    return (
        f"to train with bf16 on the lazy device, take in place of {name} a class that begins with LazyArguments of "
        f"lazy_backend.integrations.transformers:\n  @dataclass\n  class Arguments(LazyArguments, {name}): pass"
    )
