"""The ports: one for each feature that needs internals of PyTorch or Python.

In: nothing. Out: `Port`s. Their features ask `fits()` before they reach or replace anything.
"""

from __future__ import annotations

from lazy_backend.ports.port import Port
