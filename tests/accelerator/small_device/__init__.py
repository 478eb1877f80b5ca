"""The package of a small accelerator, "small", as its maker would ship it: it knows nothing of lazy_backend.

Importing it builds `small_device.cpp`, 25 s the first time, and tells PyTorch of the device: `device="small"` works.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).parent / "small_device.cpp"
_LIBRARY = f"small_device_{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]}"
_folder = Path(tempfile.gettempdir()) / f"{_LIBRARY}_{torch.__version__}_{sys.version_info.minor}_{os.getuid()}"
_folder.mkdir(mode=0o700, exist_ok=True)
native = cpp_extension.load(_LIBRARY, [str(_SOURCE)], extra_cflags=["-O1"], build_directory=str(_folder))


class SmallModule(ModuleType):
    """`torch.small`, the device module that PyTorch asks. Functions that it does not have are optional."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    memory_allocated = staticmethod(lambda device=None: native.memory_allocated())
    max_memory_allocated = staticmethod(lambda device=None: native.max_memory_allocated())
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    manual_seed_all = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)


torch.utils.rename_privateuse1_backend("small")
torch._register_device_module("small", SmallModule("torch.small"))
