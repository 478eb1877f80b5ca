"""What autocast does to each operator, by backing device.

In: a backing device's type. Out: a rule per operator, where this release of PyTorch has one.
`tests/cpu/test_autocast.py` compares the names with what PyTorch registered, and what the rules do with eager.
"""

from __future__ import annotations

import torch

from lazy_backend.errors import DeviceError
from lazy_backend.lowering.devices.cast_lists import CastRule
from lazy_backend.lowering.devices.registration import BUILT_IN, backing_devices
from lazy_backend.ports.replacements.mixed_precision import cast_kernels


def rules_for(backing: str) -> dict[str, CastRule]:
    """Operator -> rule, for the operators that have one on `backing` in this release of PyTorch."""
    found = backing_devices[backing]
    kernels = cast_kernels(f"Autocast{found.key}")
    rules = {name: rule for rule, names in found.autocast_rules.items() for name in names.split()}
    unknown = sorted(kernels - rules.keys())
    if unknown and found not in BUILT_IN:  # of PyTorch's own devices, a test finds them
        raise DeviceError(
            f"{backing} has kernels of autocast whose rules are not known: {', '.join(unknown)}\n"
            "  Fix: list them in `autocast_rules` of what is given to lazy_backend.register_device()"
        )
    return {name: rule for name, rule in rules.items() if name in kernels}


def default_dtype(backing: str) -> torch.dtype:
    """The dtype of `torch.autocast("lazy")` without one."""
    return backing_devices[backing].autocast_dtype
