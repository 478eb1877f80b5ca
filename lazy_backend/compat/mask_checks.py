"""Keep the models of transformers from looking into attention masks where a read is an error: served and captured.

In: transformers, once a program has imported it. Out: in `call_refusing`, a lazy tensor counts as traced there, as
Note [What is changed in transformers] has it for the integrations. Elsewhere models do what they do in eager.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lazy_backend.execution.sync import executor
from lazy_backend.ports.replacements.when_imported import when_imported
from lazy_backend.tensors.tensor import LazyTensor


def install() -> None:
    """Have masks stay in graphs that are recorded where reads are refused."""
    when_imported("transformers.utils.import_utils", _count_as_traced)


def _count_as_traced(module: ModuleType) -> None:
    original: Any = getattr(module, "is_fake_tensor", None)  # checked on 5.23; without it a look into a mask is refused
    if original is None:
        return

    def is_fake_tensor(x: Any) -> bool:
        return (isinstance(x, LazyTensor) and executor.rules.is_refusing()) or original(x)

    module.is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]
