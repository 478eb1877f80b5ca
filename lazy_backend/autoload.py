"""Entry point of `torch.backends`, by which `import torch` alone makes `device="lazy"` work.

A file of its own: where a program imports lazy_backend first, torch asks for this while the package is half imported.
"""

from __future__ import annotations


def autoload() -> None:
    """Nothing: importing this file has imported the package, or the package is being imported."""
