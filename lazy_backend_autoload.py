"""Entry point of `torch.backends`, by which `import torch` alone makes `device="lazy"` work.

A module beside the package: torch lets no program go on whose entry point raises, and a part of the package could only
be imported with the package, where what can go wrong would.
"""

from __future__ import annotations

import importlib
import warnings


def autoload() -> None:
    """Import lazy_backend, or warn why it cannot be imported. Nothing if it is being imported already."""
    try:
        importlib.import_module("lazy_backend")
    except Exception as error:
        warnings.warn(
            f'device="lazy" is not there, because lazy_backend could not be loaded: {type(error).__name__}: {error}\n'
            "  `import lazy_backend` shows where; TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading it",
            RuntimeWarning,
            stacklevel=2,
        )
